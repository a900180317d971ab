//! Runs scenarios, on all cores.

use super::job::{Backend, Job, RunResult};
use softhca_scenarios::{Outcome, Plan, Recording, Verdict, simulate};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Instant;

/// How jobs run.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunOptions {
    /// The number of jobs at a time; by default as many simulations as cores, and one real run.
    pub at_once: Option<NonZeroUsize>,
    /// How often a real run that failed is repeated.
    pub retries: u32,
    /// Whether everything is recorded.
    pub keep: bool,
}

/// Runs all jobs and passes the results to `on_result` in the order of jobs until it breaks.
pub fn run_all(
    jobs: &[Job],
    on: Backend,
    options: RunOptions,
    mut on_result: impl FnMut(usize, RunResult) -> ControlFlow<()>,
) {
    let default = match on {
        Backend::Sim => std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
        // Real runs share the cores, and their timers run in real time.
        Backend::Udp => NonZeroUsize::MIN,
    };
    let workers = options.at_once.unwrap_or(default).get().min(jobs.len()).max(1);
    let next = AtomicUsize::new(0);
    let (sender, results) = mpsc::sync_channel::<(usize, RunResult)>(workers * 4);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(job) = jobs.get(index) else { return };
                    if sender.send((index, run_with_retries(job, options))).is_err() {
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

/// Repeats a real run that failed. Virtual time is deterministic: a simulation fails every time.
fn run_with_retries(job: &Job, options: RunOptions) -> RunResult {
    let retries = if job.backend == Backend::Udp { options.retries } else { 0 };
    until_pass(retries, || run_job(job, options.keep))
}

fn until_pass(retries: u32, mut run: impl FnMut() -> RunResult) -> RunResult {
    let mut ran = run();
    while ran.outcome.verdict != Verdict::Pass && ran.failed_attempts < retries {
        ran = RunResult { failed_attempts: ran.failed_attempts + 1, ..run() };
    }
    ran
}

fn run_job(job: &Job, keep: bool) -> RunResult {
    let started = Instant::now();
    let (outcome, values) = match job.plan() {
        Err(problem) => (Outcome::failed_to_run(problem.to_string()), job.parameters.clone()),
        Ok(plan) => (run_plan(&plan, job.backend, keep), plan.parameters.clone()),
    };
    RunResult { outcome, values, duration: started.elapsed(), failed_attempts: 0 }
}

/// Runs a plan once. With `keep`, everything is recorded. A failed run keeps its log and the outputs of its programs.
pub fn run_plan(plan: &Plan, on: Backend, keep: bool) -> Outcome {
    let run = |recording| match on {
        Backend::Sim => simulate(plan, recording),
        #[cfg(target_os = "linux")]
        Backend::Udp if !plan.commands.is_empty() => crate::exec::run_programs(plan, recording),
        Backend::Udp => softhca_scenarios::udp::run(plan, recording),
    };
    let first = if keep { Recording::Everything } else { Recording::Digest };
    let guarded = catch_unwind(AssertUnwindSafe(|| {
        let outcome = run(first);
        // Repeat a failed simulation with full recording: virtual time is deterministic.
        match (outcome.verdict, on) {
            (Verdict::Fail, Backend::Sim) if !keep => run(Recording::Everything),
            _ => outcome,
        }
    }));
    guarded.unwrap_or_else(|cause| {
        let message = cause.downcast_ref::<String>().cloned();
        let message = message.or_else(|| cause.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Outcome::failed_to_run(format!("internal error: {}", message.unwrap_or_default()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use softhca_scenarios::ParameterValues;
    use std::time::Duration;

    #[test]
    fn a_pass_after_a_failure_is_flaky_and_retries_are_limited() {
        for (passes_at, retries, attempts, verdict, is_flaky) in [
            (1, 3, 1, Verdict::Pass, false),
            (3, 3, 3, Verdict::Pass, true),
            (3, 1, 2, Verdict::Fail, false),
            (2, 0, 1, Verdict::Fail, false),
        ] {
            let mut runs = 0;
            let ran = until_pass(retries, || {
                runs += 1;
                let verdict = if runs < passes_at { Verdict::Fail } else { Verdict::Pass };
                RunResult {
                    outcome: Outcome { verdict, ..Outcome::default() },
                    values: ParameterValues::new(),
                    duration: Duration::ZERO,
                    failed_attempts: 0,
                }
            });
            let seen = (runs, ran.outcome.verdict, ran.is_flaky(), ran.summary().is_flaky);
            assert_eq!(seen, (attempts, verdict, is_flaky, is_flaky), "{passes_at} {retries}");
        }
    }
}
