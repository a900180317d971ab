//! One run of a scenario and its result.

use crate::shell::quote;
use clap::ValueEnum;
use softhca_scenarios::{
    Diagnostic, Outcome, ParameterValues, Plan, RunReport, Scenario, SourceLine, Verdict,
};
use std::sync::Arc;
use std::time::Duration;

/// The place where scenarios run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// The simulated network, in virtual time.
    Sim,
    /// Real UDP sockets.
    Udp,
}

impl Backend {
    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Backend::Sim => "sim",
            Backend::Udp => "udp",
        }
    }
}

/// A requested run.
#[derive(Clone)]
pub struct Job {
    pub scenario: Arc<Scenario>,
    /// The parameters that were set.
    pub parameters: ParameterValues,
    pub seed: u64,
    /// The seed draws what the file leaves open.
    pub swarm: bool,
    /// The place where it runs.
    pub backend: Backend,
}

pub struct RunResult {
    pub outcome: Outcome,
    pub values: ParameterValues,
    /// How long it took.
    pub duration: Duration,
    /// The number of earlier attempts, which failed.
    pub failed_attempts: u32,
}

/// The part of a result that is kept for reports.
#[derive(Debug)]
pub struct Summary {
    pub verdict: Verdict,
    /// How long it took.
    pub duration: Duration,
    /// The failed expectations, or the reason why it could not be executed.
    pub failures: Vec<Failure>,
    /// The ends of the outputs of programs, if the run did not pass.
    pub outputs: String,
    /// It passed after an attempt that failed.
    pub is_flaky: bool,
    /// The expectations that are counted over all seeds, and whether they held.
    pub sometimes: Vec<(String, bool)>,
}

/// The bytes of an output in the JUnit report: its end.
const MAX_OUTPUT: usize = 64 << 10;

/// A failed expectation as text, and its line in the scenario file.
#[derive(Debug)]
pub struct Failure {
    pub text: String,
    pub at: Option<SourceLine>,
}

impl Job {
    /// The plan of the run.
    pub fn plan(&self) -> Result<Plan, Diagnostic> {
        match self.swarm {
            true => self.scenario.swarm_plan(&self.parameters, self.seed),
            false => self.scenario.plan(&self.parameters, self.seed),
        }
    }

    /// Title, file, seed and parameters.
    pub fn heading(&self) -> String {
        let set: String = self.parameters.iter().map(|(name, value)| format!(", {name} = {value}")).collect();
        format!("{}  ({}, seed {}{set})", self.scenario.title, self.scenario.name(), self.seed)
    }

    /// The command that repeats the run.
    pub fn replay(&self) -> String {
        let mut words = vec!["softhca".to_owned(), "run".into(), quote(self.scenario.name())];
        if self.backend == Backend::Udp {
            words.extend(["--on".into(), "udp".into()]);
        }
        if let Some(expect) = self.scenario.expectations_name() {
            words.extend(["--expect".into(), quote(expect)]);
        }
        if self.swarm {
            words.extend(["--swarm".into(), "1".into()]);
        }
        words.extend(["--seed".into(), self.seed.to_string()]);
        for (name, value) in &self.parameters {
            words.extend(["--set".into(), quote(&format!("{name}={value}"))]);
        }
        words.join(" ")
    }

    pub fn json_line<'a>(&'a self, ran: &'a RunResult) -> RunReport<'a> {
        let outcome = &ran.outcome;
        RunReport {
            scenario: self.scenario.name(),
            title: &self.scenario.title,
            seed: self.seed,
            on: self.backend.name(),
            verdict: outcome.verdict,
            flaky: ran.is_flaky(),
            trace_sha256: outcome.trace_sha256.as_deref(),
            order_sha256: outcome.order_sha256.as_deref(),
            replay: self.replay(),
            rules: &outcome.rules,
            expectations: &outcome.expectations,
            skipped: &outcome.skipped,
            parameters: &ran.values,
            goodput: &outcome.goodput,
            ended_ns: outcome.ended_ns,
            duration_ms: ran.duration.as_millis() as u64,
            error: outcome.error.as_deref(),
        }
    }
}

impl RunResult {
    /// Whether it passed after an attempt that failed.
    pub fn is_flaky(&self) -> bool {
        self.failed_attempts > 0 && self.outcome.verdict == Verdict::Pass
    }

    fn outputs(&self) -> String {
        let kept = self.outcome.artifacts.as_ref().filter(|_| self.outcome.verdict != Verdict::Pass);
        let outputs = kept.iter().flat_map(|kept| &kept.outputs).map(|(program, output)| {
            let end = &output[output.len().saturating_sub(MAX_OUTPUT)..];
            format!("{program}:\n{}\n", String::from_utf8_lossy(end))
        });
        outputs.collect()
    }

    /// The summary for reports.
    pub fn summary(&self) -> Summary {
        let error = self.outcome.error.iter().map(|error| Failure { text: error.clone(), at: None });
        let failures = self.outcome.failures().map(|failure| Failure {
            text: format!("{}: {}", failure.text, failure.detail),
            at: failure.at.clone(),
        });
        Summary {
            verdict: self.outcome.verdict,
            duration: self.duration,
            failures: error.chain(failures).collect(),
            outputs: self.outputs(),
            is_flaky: self.is_flaky(),
            sometimes: self.outcome.sometimes().map(|(text, held)| (text.to_owned(), held)).collect(),
        }
    }
}

impl Summary {
    /// A run that could not be executed, or of which nothing is known.
    pub fn error(why: &str) -> Summary {
        let failures = vec![Failure { text: why.into(), at: None }];
        Summary {
            verdict: Verdict::Error,
            duration: Duration::ZERO,
            failures,
            outputs: String::new(),
            is_flaky: false,
            sometimes: Vec::new(),
        }
    }

    /// All failures as text.
    pub fn failures_text(&self) -> String {
        self.failures.iter().map(|failure| failure.text.as_str()).collect::<Vec<_>>().join("\n")
    }
}
