//! Text output of runs: verdict, faults, expectations, and the packets around a failure.

use super::job::{Job, RunResult};
use super::store::{ArtifactStore, KeepPolicy};
use crate::scenario::format_verdict;
use crate::{output, terminal};
use indicatif::ProgressBar;
use softhca_scenarios::{Outcome, Verdict};
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;

/// Up to this many runs are all printed; of more, only the failed ones.
const MAX_RUNS_PRINTED: usize = 60;
/// Without --out, the number of failed runs whose files are kept.
const MAX_FAILURES_KEPT: usize = 10;

/// Prints runs as they end.
pub struct RunPrinter<'a> {
    jobs: &'a [Job],
    json: bool,
    store: ArtifactStore<'a>,
    print_all: bool,
    progress: ProgressBar,
    counts: [u64; 3],
    kept: usize,
    write_error: Option<String>,
}

impl<'a> RunPrinter<'a> {
    /// Creates a printer for these jobs.
    pub fn new(jobs: &'a [Job], json: bool, out: Option<PathBuf>) -> RunPrinter<'a> {
        let bar = match jobs.len() > 1 {
            true => terminal::progress_of_runs(Some(jobs.len())),
            false => ProgressBar::hidden(),
        };
        let few = jobs.len() <= MAX_RUNS_PRINTED;
        let store = match out {
            Some(out) => ArtifactStore::new(out, jobs, KeepPolicy::All),
            None => {
                let root = output::unpredictable_path("softhca-run-", "");
                ArtifactStore::new(root, jobs, KeepPolicy::Failures)
            }
        };
        RunPrinter {
            jobs,
            json,
            store,
            print_all: few,
            progress: bar,
            counts: [0; 3],
            kept: 0,
            write_error: None,
        }
    }

    /// Prints a result and stores its files. Breaks if the files of a run cannot be written.
    pub fn on_result(&mut self, index: usize, ran: &RunResult) -> ControlFlow<()> {
        let job = &self.jobs[index];
        let verdict = ran.outcome.verdict;
        self.counts[verdict as usize] += 1;
        let folder = self.keep_artifacts(index, ran);
        let text = match self.json {
            true => serde_json::to_string(&job.json_line(ran)).unwrap_or_default() + "\n",
            false if self.print_all || verdict != Verdict::Pass || ran.is_flaky() => {
                format_run(job, ran, folder)
            }
            false => String::new(),
        };
        let checks_nothing = verdict == Verdict::Pass && ran.outcome.expectations.is_empty();
        // Once for each file, not for each seed.
        let is_first = index == 0 || self.jobs[index - 1].scenario.name() != job.scenario.name();
        self.progress.suspend(|| {
            if checks_nothing && is_first {
                warnln!("{}: no expectation was checked: add [[expect]]", job.scenario.name());
            }
            let mut output = io::stdout().lock();
            // The reader may have closed the pipe.
            let _ = output.write_all(terminal::printable(&text).as_bytes());
        });
        self.progress.inc(1);
        let [_, failed, errors] = self.counts;
        if failed + errors > 0 {
            self.progress.set_message(format!("({} failed)", failed + errors));
        }
        match (self.store.policy(), &self.write_error) {
            (KeepPolicy::All, Some(_)) => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    }

    fn keep_artifacts(&mut self, index: usize, ran: &RunResult) -> Option<PathBuf> {
        let is_kept = match self.store.policy() {
            KeepPolicy::All => true,
            KeepPolicy::Failures => {
                let failed = ran.outcome.verdict != Verdict::Pass && ran.outcome.artifacts.is_some();
                failed && self.kept < MAX_FAILURES_KEPT
            }
        };
        // Stop after the first write error.
        if !is_kept || self.write_error.is_some() {
            return None;
        }
        self.kept += 1;
        match self.store.write(index, ran) {
            Ok(folder) => Some(folder),
            Err(why) => {
                let ended: u64 = self.counts.iter().sum();
                self.write_error = Some(match self.store.policy() {
                    KeepPolicy::All => format!("stopped after {ended} of {} runs: {why}", self.jobs.len()),
                    KeepPolicy::Failures => why,
                });
                None
            }
        }
    }

    /// Prints the totals.
    pub fn finish(&mut self) {
        self.progress.finish_and_clear();
        let [passed, failed, errors] = self.counts;
        if !self.json && passed + failed + errors > 1 {
            let mut line = format!("{passed} of {} runs passed", passed + failed + errors);
            if failed > 0 {
                line += &format!(", {failed} failed");
            }
            if errors > 0 {
                line += &format!(", {errors} could not be run");
            }
            let _ = writeln!(io::stdout().lock(), "{line}");
        }
    }

    /// The first write error.
    pub fn write_error(&self) -> Option<&str> {
        self.write_error.as_deref()
    }
}

fn format_run(job: &Job, ran: &RunResult, folder: Option<PathBuf>) -> String {
    let outcome = &ran.outcome;
    let mut heading = format!("{}  ({}, seed {}", job.scenario.title, job.scenario.name(), job.seed);
    for (name, value) in &ran.values {
        heading += &format!(", {name} = {value}");
    }
    heading += ")";
    let mut text = format_verdict(&heading, outcome);
    if outcome.verdict == Verdict::Fail {
        text += &failure_ladder(outcome);
    }
    if let Some(folder) = folder {
        text += &format!("      written: {}\n", folder.display());
    }
    if ran.is_flaky() {
        text += &format!("      flaky: passed after {} failed\n", count(ran.failed_attempts, "attempt"));
    }
    if outcome.verdict != Verdict::Pass {
        text += &format!("      replay: {}\n", job.replay());
    }
    text
}

fn count(number: u32, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

/// The packets around the first failed expectation.
fn failure_ladder(outcome: &Outcome) -> String {
    let around = outcome.failures().find_map(|failure| failure.location.as_ref());
    let (Some(around), Some(artifacts)) = (around, &outcome.artifacts) else { return String::new() };
    match artifacts.ladder_at(around, terminal::style()) {
        Some(ladder) => format!("\n{ladder}\n"),
        None => String::new(),
    }
}
