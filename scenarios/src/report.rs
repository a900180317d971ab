//! What a run came to: verdict, rules, expectations, and how it is written for programs.

use crate::parameters::ParameterValues;
use serde::Serialize;
use std::collections::BTreeMap;

/// Whether everything held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Everything held.
    Pass,
    /// Something did not.
    Fail,
    /// The run could not be carried out.
    Error,
}

/// What a fault did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RuleOutcome {
    /// Its name.
    pub name: String,
    /// How often it happened.
    pub fired: u64,
    /// It need not happen.
    pub optional: bool,
}

/// What became of an expectation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExpectationOutcome {
    /// It in words.
    pub text: String,
    /// Whether it held.
    pub held: bool,
    /// What was found.
    pub detail: String,
    /// Where to look, if it did not hold.
    #[serde(skip)]
    pub location: Option<TraceLocation>,
}

/// A place in a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceLocation {
    /// When.
    pub time_ns: u64,
    /// Whose ladder.
    pub qp: String,
}

/// An expectation that was not looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SkippedExpectation {
    /// It in words.
    pub text: String,
    /// Why not.
    pub why: String,
}

/// What a run wrote down.
#[derive(Clone, Debug, Default)]
pub struct Artifacts {
    /// The event log, JSON lines.
    pub events: Vec<u8>,
    /// The capture, pcapng.
    pub capture: Vec<u8>,
    /// The ladders of all connections.
    pub ladders: Vec<softhca_trace::Ladder>,
}

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Whether everything held.
    pub verdict: Verdict,
    /// Why the run could not be carried out.
    pub error: Option<String>,
    /// What each fault did.
    pub rules: Vec<RuleOutcome>,
    /// What became of each expectation.
    pub expectations: Vec<ExpectationOutcome>,
    /// Expectations that were not looked at.
    pub skipped: Vec<SkippedExpectation>,
    /// The SHA-256 of the event log, in virtual time.
    pub trace_sha256: Option<String>,
    /// The SHA-256 of what virtual and real time have in common, in real time.
    pub order_sha256: Option<String>,
    /// What virtual and real time have in common, where it was kept.
    pub comparable_trace: Option<softhca_trace::ComparableTrace>,
    /// When the last thing happened, in nanoseconds.
    pub ended_ns: u64,
    /// Goodput of every workload in bits per second, by name.
    pub goodput: BTreeMap<String, u64>,
    /// What was written down, if it was asked for.
    pub artifacts: Option<Artifacts>,
}

/// A run as a line of JSON. The order of the keys is part of the format.
#[derive(Clone, Debug, Serialize)]
pub struct RunReport<'a> {
    /// The file, as it was named.
    pub scenario: &'a str,
    /// What it shows.
    pub title: &'a str,
    /// The seed.
    pub seed: u64,
    /// `sim` or `udp`.
    pub on: &'a str,
    /// Whether everything held.
    pub verdict: Verdict,
    /// The SHA-256 of the event log; null in real time.
    pub trace_sha256: Option<&'a str>,
    /// The SHA-256 of what virtual and real time have in common.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub order_sha256: Option<&'a str>,
    /// The command that does it again.
    pub replay: String,
    /// What each fault did.
    pub rules: &'a [RuleOutcome],
    /// What became of each expectation.
    pub expectations: &'a [ExpectationOutcome],
    /// Expectations that were not looked at.
    #[serde(skip_serializing_if = "<[SkippedExpectation]>::is_empty")]
    pub skipped: &'a [SkippedExpectation],
    /// The parameters.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub parameters: &'a ParameterValues,
    /// Goodput of every workload in bits per second.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub goodput: &'a BTreeMap<String, u64>,
    /// When the last thing happened, in nanoseconds.
    pub ended_ns: u64,
    /// Why the run could not be carried out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<&'a str>,
}

impl Outcome {
    /// A run that could not be carried out.
    pub fn failed_to_run(why: impl Into<String>) -> Outcome {
        Outcome {
            verdict: Verdict::Error,
            error: Some(why.into()),
            rules: Vec::new(),
            expectations: Vec::new(),
            skipped: Vec::new(),
            trace_sha256: None,
            order_sha256: None,
            comparable_trace: None,
            ended_ns: 0,
            goodput: BTreeMap::new(),
            artifacts: None,
        }
    }

    /// The expectations that did not hold.
    pub fn failures(&self) -> impl Iterator<Item = &ExpectationOutcome> {
        self.expectations.iter().filter(|expectation| !expectation.held)
    }
}

/// Steps of a ladder that are shown before and after a place.
const CONTEXT_STEPS: usize = 10;

impl Artifacts {
    /// The part of a ladder that shows what went on at a place.
    pub fn ladder_at(&self, place: &TraceLocation, style: softhca_trace::LadderStyle) -> Option<String> {
        let mut ladder = self.ladders.iter().find(|ladder| ladder.involves(&place.qp))?.clone();
        let time = place.time_ns as i64;
        let at = ladder.steps.iter().position(|step| step.time_ns >= time).unwrap_or(ladder.steps.len());
        let (first, last) = (at.saturating_sub(CONTEXT_STEPS), (at + CONTEXT_STEPS).min(ladder.steps.len()));
        ladder.steps = ladder.steps[first..last].to_vec();
        (!ladder.steps.is_empty()).then(|| ladder.draw(style))
    }
}
