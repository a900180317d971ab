//! One run of a scenario, and all of them on every core.

use super::Backend;
use softhca_scenarios::{Outcome, ParameterValues, Recording, RunReport, Scenario, Verdict, simulate};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// A run that is asked for.
#[derive(Clone)]
pub struct Job {
    /// The file.
    pub scenario: Arc<Scenario>,
    /// Its parameters, as far as they were set.
    pub parameters: ParameterValues,
    /// The seed.
    pub seed: u64,
    /// Where.
    pub backend: Backend,
}

/// What a run came to.
pub struct RunResult {
    /// What it came to.
    pub outcome: Outcome,
    /// All its parameters.
    pub values: ParameterValues,
    /// How long it took.
    pub duration: Duration,
}

/// What is kept of a run.
pub struct Summary {
    /// Whether everything held.
    pub verdict: Verdict,
    /// How long it took.
    pub duration: Duration,
    /// What did not hold, in words.
    pub failures: String,
}

impl Job {
    /// The command that does it again.
    pub fn replay(&self) -> String {
        let mut words = vec!["softhca".to_owned(), "run".into(), shell_quoted(self.scenario.name())];
        if self.backend == Backend::Udp {
            words.extend(["--on".into(), "udp".into()]);
        }
        words.extend(["--seed".into(), self.seed.to_string()]);
        for (name, value) in &self.parameters {
            words.extend(["--set".into(), shell_quoted(&format!("{name}={value}"))]);
        }
        words.join(" ")
    }

    /// The run as a line of JSON.
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
                let carry_out = |recording| match self.backend {
                    Backend::Sim => simulate(&plan, recording),
                    #[cfg(target_os = "linux")]
                    Backend::Udp if !plan.commands.is_empty() => crate::exec::run_programs(&plan),
                    Backend::Udp => softhca_scenarios::udp::run(&plan, recording),
                };
                let first = if keep { Recording::Everything } else { Recording::Digest };
                let guarded = catch_unwind(AssertUnwindSafe(|| {
                    let outcome = carry_out(first);
                    // The same run again, with everything written down: virtual time can do that.
                    match (outcome.verdict, self.backend) {
                        (Verdict::Fail, Backend::Sim) if !keep => carry_out(Recording::Everything),
                        _ => outcome,
                    }
                }));
                let outcome = guarded.unwrap_or_else(|cause| {
                    let words = cause.downcast_ref::<String>().cloned();
                    let words = words.or_else(|| cause.downcast_ref::<&str>().map(|text| (*text).to_owned()));
                    Outcome::failed_to_run(format!("SoftHCA itself failed: {}", words.unwrap_or_default()))
                });
                (outcome, plan.parameters.clone())
            }
        };
        RunResult { outcome, values, duration: started.elapsed() }
    }
}

impl RunResult {
    /// What is kept for the report.
    pub fn summary(&self) -> Summary {
        let failures = self.outcome.failures().map(|failure| format!("{}: {}", failure.text, failure.detail));
        let complaint = self.outcome.error.iter().cloned().chain(failures).collect::<Vec<_>>().join("\n");
        Summary { verdict: self.outcome.verdict, duration: self.duration, failures: complaint }
    }
}

fn shell_quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// Runs all jobs, virtual ones on every core, and hands their results over in the order of jobs, until whoever takes
/// them has enough.
pub fn run_all(
    jobs: &[Job],
    on: Backend,
    keep: bool,
    mut take: impl FnMut(usize, RunResult) -> ControlFlow<()>,
) {
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    // Real sockets have one wire for all.
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
        let mut wanted = 0;
        for (index, ran) in results {
            early.insert(index, ran);
            while let Some(ran) = early.remove(&wanted) {
                if take(wanted, ran).is_break() {
                    // With the receiver gone, nobody begins another run.
                    return;
                }
                wanted += 1;
            }
        }
    });
}
