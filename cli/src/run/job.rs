//! One run of a scenario, and many of them on all cores.

use crate::shell::quote;
use clap::ValueEnum;
use softhca_scenarios::{Outcome, ParameterValues, Recording, RunReport, Scenario, Verdict, simulate};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Where scenarios run.
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
    /// Where it runs.
    pub backend: Backend,
}

pub struct RunResult {
    pub outcome: Outcome,
    pub values: ParameterValues,
    /// How long it took.
    pub duration: Duration,
}

/// The part of a result that is kept for the JUnit report.
pub struct Summary {
    pub verdict: Verdict,
    /// How long it took.
    pub duration: Duration,
    /// The failed expectations as text.
    pub failures: String,
}

impl Job {
    /// The command that repeats the run.
    pub fn replay(&self) -> String {
        let mut words = vec!["softhca".to_owned(), "run".into(), quote(self.scenario.name())];
        if self.backend == Backend::Udp {
            words.extend(["--on".into(), "udp".into()]);
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
            trace_sha256: outcome.trace_sha256.as_deref(),
            order_sha256: outcome.order_sha256.as_deref(),
            replay: self.replay(),
            rules: &outcome.rules,
            expectations: &outcome.expectations,
            skipped: &outcome.skipped,
            parameters: &ran.values,
            goodput: &outcome.goodput,
            ended_ns: outcome.ended_ns,
            error: outcome.error.as_deref(),
        }
    }

    fn run(&self, keep: bool) -> RunResult {
        let started = Instant::now();
        let (outcome, values) = match self.scenario.plan(&self.parameters, self.seed) {
            Err(problem) => (Outcome::failed_to_run(problem.to_string()), self.parameters.clone()),
            Ok(plan) => {
                let run_plan = |recording| match self.backend {
                    Backend::Sim => simulate(&plan, recording),
                    #[cfg(target_os = "linux")]
                    Backend::Udp if !plan.commands.is_empty() => crate::exec::run_programs(&plan),
                    Backend::Udp => softhca_scenarios::udp::run(&plan, recording),
                };
                let first = if keep { Recording::Everything } else { Recording::Digest };
                let guarded = catch_unwind(AssertUnwindSafe(|| {
                    let outcome = run_plan(first);
                    // Repeat a failed simulation with full recording: virtual time is deterministic.
                    match (outcome.verdict, self.backend) {
                        (Verdict::Fail, Backend::Sim) if !keep => run_plan(Recording::Everything),
                        _ => outcome,
                    }
                }));
                let outcome = guarded.unwrap_or_else(|cause| {
                    let message = cause.downcast_ref::<String>().cloned();
                    let message =
                        message.or_else(|| cause.downcast_ref::<&str>().map(|text| (*text).to_owned()));
                    Outcome::failed_to_run(format!("internal error: {}", message.unwrap_or_default()))
                });
                (outcome, plan.parameters.clone())
            }
        };
        RunResult { outcome, values, duration: started.elapsed() }
    }
}

impl RunResult {
    /// The summary for the JUnit report.
    pub fn summary(&self) -> Summary {
        let failures = self.outcome.failures().map(|failure| format!("{}: {}", failure.text, failure.detail));
        let complaint = self.outcome.error.iter().cloned().chain(failures).collect::<Vec<_>>().join("\n");
        Summary { verdict: self.outcome.verdict, duration: self.duration, failures: complaint }
    }
}

/// Runs all jobs, simulated ones on all cores, and passes the results to `on_result` in the order of jobs until it
/// breaks.
pub fn run_all(
    jobs: &[Job],
    on: Backend,
    keep: bool,
    mut on_result: impl FnMut(usize, RunResult) -> ControlFlow<()>,
) {
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    // Real runs share one network.
    let workers = if on == Backend::Udp { 1 } else { cores.min(jobs.len()).max(1) };
    let next = AtomicUsize::new(0);
    let (sender, results) = mpsc::sync_channel::<(usize, RunResult)>(workers * 4);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(job) = jobs.get(index) else { return };
                    if sender.send((index, job.run(keep))).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        let mut early: BTreeMap<usize, RunResult> = BTreeMap::new();
        let mut next_index = 0;
        for (index, ran) in results {
            early.insert(index, ran);
            while let Some(ran) = early.remove(&next_index) {
                if on_result(next_index, ran).is_break() {
                    // Dropping the receiver stops the workers.
                    return;
                }
                next_index += 1;
            }
        }
    });
}
