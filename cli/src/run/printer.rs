//! What people read of a run: the verdict in plain words, what each fault did, and the packets around a failure.

use super::job::{Job, RunResult};
use super::store::{ArtifactStore, KeepPolicy};
use crate::terminal;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use softhca_scenarios::{Outcome, Verdict};
use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;

/// So many runs at most are told one by one; of more, only those that fail.
const MAX_RUNS_PRINTED: usize = 60;
/// Without --out, so many failures leave something behind.
const MAX_FAILURES_KEPT: usize = 10;

/// Tells about runs as they end.
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
    /// Nothing has run yet.
    pub fn new(jobs: &'a [Job], json: bool, out: Option<PathBuf>) -> RunPrinter<'a> {
        let bar = match jobs.len() > 1 && io::stderr().is_terminal() {
            true => ProgressBar::with_draw_target(Some(jobs.len() as u64), ProgressDrawTarget::stderr()),
            false => ProgressBar::hidden(),
        };
        if let Ok(style) =
            ProgressStyle::with_template("{bar:40} {pos}/{len} runs, {elapsed} gone, {eta} to go {msg}")
        {
            bar.set_style(style);
        }
        let few = jobs.len() <= MAX_RUNS_PRINTED;
        let store = match out {
            Some(out) => ArtifactStore::new(out, jobs, KeepPolicy::All),
            None => {
                let root = std::env::temp_dir().join(format!("softhca-run-{}", std::process::id()));
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

    /// A run ended; breaks if there is no sense in others, since they could not be written.
    pub fn on_result(&mut self, index: usize, ran: &RunResult) -> ControlFlow<()> {
        let job = &self.jobs[index];
        let verdict = ran.outcome.verdict;
        self.counts[verdict as usize] += 1;
        let folder = self.keep_artifacts(index, ran);
        let text = match self.json {
            true => serde_json::to_string(&job.json_line(ran)).unwrap_or_default() + "\n",
            false if self.print_all || verdict != Verdict::Pass => format_run(job, ran, folder),
            false => String::new(),
        };
        self.progress.suspend(|| {
            let mut output = io::stdout().lock();
            // Whoever reads may have seen enough.
            let _ = output.write_all(text.as_bytes());
        });
        self.progress.inc(1);
        let [_, failed, broken] = self.counts;
        if failed + broken > 0 {
            self.progress.set_message(format!("({} failed)", failed + broken));
        }
        match (self.store.policy(), &self.write_error) {
            (KeepPolicy::All, Some(_)) => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    }

    fn keep_artifacts(&mut self, index: usize, ran: &RunResult) -> Option<PathBuf> {
        let is_left = match self.store.policy() {
            KeepPolicy::All => true,
            KeepPolicy::Failures => {
                let failed = ran.outcome.verdict != Verdict::Pass && ran.outcome.artifacts.is_some();
                failed && self.kept < MAX_FAILURES_KEPT
            }
        };
        // One that is half written is enough.
        if !is_left || self.write_error.is_some() {
            return None;
        }
        self.kept += 1;
        match self.store.write(index, ran) {
            Ok(folder) => Some(folder),
            Err(why) => {
                let told: u64 = self.counts.iter().sum();
                self.write_error = Some(match self.store.policy() {
                    KeepPolicy::All => format!("stopped after {told} of {} runs: {why}", self.jobs.len()),
                    KeepPolicy::Failures => why,
                });
                None
            }
        }
    }

    /// All have ended.
    pub fn finish(&mut self) {
        self.progress.finish_and_clear();
        let [passed, failed, broken] = self.counts;
        if !self.json && passed + failed + broken > 1 {
            let mut line = format!("{passed} of {} runs passed", passed + failed + broken);
            if failed > 0 {
                line += &format!(", {failed} failed");
            }
            if broken > 0 {
                line += &format!(", {broken} could not be carried out");
            }
            let _ = writeln!(io::stdout().lock(), "{line}");
        }
    }

    /// What could not be written.
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
    if outcome.verdict != Verdict::Pass {
        text += &format!("      replay: {}\n", job.replay());
    }
    text
}

/// A verdict with what it rests on.
pub fn format_verdict(heading: &str, outcome: &Outcome) -> String {
    let word = match outcome.verdict {
        Verdict::Pass => "pass",
        Verdict::Fail => "FAIL",
        Verdict::Error => "ERROR",
    };
    let mut text = format!("{word}  {heading}\n");
    if let Some(error) = &outcome.error {
        text += &format!("      {}\n", error.replace('\n', "\n      "));
    }
    for rule in &outcome.rules {
        let times = match rule.fired {
            0 => "never happened".to_owned(),
            1 => "happened once".to_owned(),
            n => format!("happened {n} times"),
        };
        text += &format!("      fault {:?} {times}\n", rule.name);
    }
    for expectation in &outcome.expectations {
        let mark = if expectation.held { "held  " } else { "BROKEN" };
        text += &format!("      {mark} {}", expectation.text);
        text += &format!(": {}\n", expectation.detail);
    }
    for skipped in &outcome.skipped {
        text += &format!("      not checked: {}: {}\n", skipped.text, skipped.why);
    }
    for (workload, rate) in &outcome.goodput {
        text += &format!("      goodput of {workload}: {}\n", softhca_scenarios::quantity::Rate(*rate));
    }
    text
}

/// The packets around the first expectation that did not hold.
fn failure_ladder(outcome: &Outcome) -> String {
    let around = outcome.failures().find_map(|failure| failure.location.as_ref());
    let (Some(around), Some(artefacts)) = (around, &outcome.artifacts) else { return String::new() };
    match artefacts.ladder_at(around, terminal::style()) {
        Some(ladder) => format!("\n{ladder}\n"),
        None => String::new(),
    }
}
