//! The result of a run: verdict, rules, expectations, and its JSON form.

use crate::parameters::ParameterValues;
use crate::source::SourceLine;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// All expectations held.
    Pass,
    /// An expectation failed.
    Fail,
    /// The run could not be executed.
    #[default]
    Error,
}

/// The result of a fault rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RuleOutcome {
    pub name: String,
    /// Number of times that it fired.
    pub fired: u64,
    /// It does not have to fire.
    pub optional: bool,
}

/// The result of an expectation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExpectationOutcome {
    /// The expectation in words.
    pub text: String,
    pub held: bool,
    pub detail: String,
    /// It is counted over all seeds: this run need not fulfil it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub sometimes: bool,
    /// Its table in the scenario file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<SourceLine>,
    /// Position in the trace that explains a failure.
    #[serde(skip)]
    pub location: Option<TraceLocation>,
}

/// A position in a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceLocation {
    pub time_ns: u64,
    /// Queue pair of the ladder.
    pub qp: String,
}

/// An expectation that was not checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SkippedExpectation {
    /// The expectation in words.
    pub text: String,
    pub why: String,
}

/// The files of a run.
#[derive(Clone, Debug, Default)]
pub struct Artifacts {
    /// Event log, JSON lines.
    pub events: Vec<u8>,
    /// Capture, pcapng.
    pub capture: Vec<u8>,
    /// Ladders of all connections.
    pub ladders: Vec<softhca_trace::Ladder>,
    /// The output of each program, by its name.
    pub outputs: Vec<(String, Vec<u8>)>,
}

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    pub verdict: Verdict,
    /// Reason why the run could not be executed.
    pub error: Option<String>,
    pub rules: Vec<RuleOutcome>,
    pub expectations: Vec<ExpectationOutcome>,
    /// Expectations that were not checked.
    pub skipped: Vec<SkippedExpectation>,
    /// SHA-256 of the event log, in virtual time.
    pub trace_sha256: Option<String>,
    /// SHA-256 of the comparable trace.
    pub order_sha256: Option<String>,
    /// The part of the trace that virtual and real time have in common, if recorded.
    pub comparable_trace: Option<softhca_trace::ComparableTrace>,
    /// Time of the last event, in nanoseconds.
    pub ended_ns: u64,
    /// Goodput of each workload in bits per second, by name.
    pub goodput: BTreeMap<String, u64>,
    /// Files of the run, if recorded.
    pub artifacts: Option<Artifacts>,
}

/// A run as one line of JSON. The order of the keys is part of the format.
#[derive(Clone, Debug, Serialize)]
pub struct RunReport<'a> {
    /// Path of the file as given.
    pub scenario: &'a str,
    pub title: &'a str,
    pub seed: u64,
    /// `sim` or `udp`.
    pub on: &'a str,
    pub verdict: Verdict,
    /// It passed after an attempt that failed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub flaky: bool,
    /// SHA-256 of the event log; null in real time.
    pub trace_sha256: Option<&'a str>,
    /// SHA-256 of the comparable trace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub order_sha256: Option<&'a str>,
    /// Command that repeats the run.
    pub replay: String,
    pub rules: &'a [RuleOutcome],
    pub expectations: &'a [ExpectationOutcome],
    /// Expectations that were not checked.
    #[serde(skip_serializing_if = "<[SkippedExpectation]>::is_empty")]
    pub skipped: &'a [SkippedExpectation],
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub parameters: &'a ParameterValues,
    /// Goodput of each workload in bits per second.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub goodput: &'a BTreeMap<String, u64>,
    /// Time of the last event, in nanoseconds.
    pub ended_ns: u64,
    /// How long the machine took, in milliseconds.
    pub duration_ms: u64,
    /// Reason why the run could not be executed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<&'a str>,
}

impl Outcome {
    /// The result of a run that could not be executed.
    pub fn failed_to_run(why: impl Into<String>) -> Outcome {
        Outcome { error: Some(why.into()), ..Outcome::default() }
    }

    /// The expectations that are counted over all seeds, and whether they held in this run.
    pub fn sometimes(&self) -> impl Iterator<Item = (&str, bool)> {
        let counted = self.expectations.iter().filter(|expectation| expectation.sometimes);
        counted.map(|expectation| (expectation.text.as_str(), expectation.held))
    }

    /// The expectations that failed.
    pub fn failures(&self) -> impl Iterator<Item = &ExpectationOutcome> {
        self.expectations.iter().filter(|expectation| !expectation.held && !expectation.sometimes)
    }
}

/// Ladder steps that are printed before and after a position.
const CONTEXT_STEPS: usize = 10;

impl Artifacts {
    /// The part of a ladder around a position.
    pub fn ladder_at(&self, place: &TraceLocation, style: softhca_trace::LadderStyle) -> Option<String> {
        let mut ladder = self.ladders.iter().find(|ladder| ladder.involves(&place.qp))?.clone();
        let time = place.time_ns as i64;
        let at = ladder.steps.iter().position(|step| step.time_ns >= time).unwrap_or(ladder.steps.len());
        let (first, last) = (at.saturating_sub(CONTEXT_STEPS), (at + CONTEXT_STEPS).min(ladder.steps.len()));
        ladder.steps = ladder.steps[first..last].to_vec();
        (!ladder.steps.is_empty()).then(|| ladder.draw(style))
    }
}
