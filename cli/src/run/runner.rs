//! Runs scenarios, on all cores.

use super::job::{Backend, Job, RunResult};
use softhca_scenarios::{Outcome, Recording, Verdict, simulate};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Instant;

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
                    if sender.send((index, run_job(job, keep))).is_err() {
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

fn run_job(job: &Job, keep: bool) -> RunResult {
    let started = Instant::now();
    let (outcome, values) = match job.scenario.plan(&job.parameters, job.seed) {
        Err(problem) => (Outcome::failed_to_run(problem.to_string()), job.parameters.clone()),
        Ok(plan) => {
            let run_plan = |recording| match job.backend {
                Backend::Sim => simulate(&plan, recording),
                #[cfg(target_os = "linux")]
                Backend::Udp if !plan.commands.is_empty() => crate::exec::run_programs(&plan),
                Backend::Udp => softhca_scenarios::udp::run(&plan, recording),
            };
            let first = if keep { Recording::Everything } else { Recording::Digest };
            let guarded = catch_unwind(AssertUnwindSafe(|| {
                let outcome = run_plan(first);
                // Repeat a failed simulation with full recording: virtual time is deterministic.
                match (outcome.verdict, job.backend) {
                    (Verdict::Fail, Backend::Sim) if !keep => run_plan(Recording::Everything),
                    _ => outcome,
                }
            }));
            let outcome = guarded.unwrap_or_else(|cause| {
                let message = cause.downcast_ref::<String>().cloned();
                let message = message.or_else(|| cause.downcast_ref::<&str>().map(|text| (*text).to_owned()));
                Outcome::failed_to_run(format!("internal error: {}", message.unwrap_or_default()))
            });
            (outcome, plan.parameters.clone())
        }
    };
    RunResult { outcome, values, duration: started.elapsed() }
}
