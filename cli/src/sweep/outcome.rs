//! The outcome of a run in comparison with the runs without faults.

use super::recording::Recording;
use super::runner::{Limits, ProgramEnd, RunOutcome};
use super::target::Target;
use serde::{Deserialize, Serialize};
use softhca::Verb;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

softhca_wire::named_enum! {
    /// The classes of outcomes, with their names in results.
    #[derive(Deserialize, Serialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum Outcome {
        Right => "right",
        CleanError => "clean-error",
        Crash => "crash",
        Hang => "hang",
        WrongResult => "wrong-result",
        Leak => "leak",
    }
}

impl Outcome {
    /// Whether the program has a bug.
    pub const fn is_bad(self) -> bool {
        !matches!(self, Outcome::Right | Outcome::CleanError)
    }
}

/// The run without faults, for comparison.
pub struct Baseline {
    pub codes: Vec<Option<i32>>,
    /// The standard output of each program, if it is the same in every run; with digits masked if only they differ.
    pub stdout: Vec<Option<(String, bool)>>,
    pub recording: Recording,
    pub duration: Duration,
    pub longest_gap: Duration,
}

fn masked(text: &str) -> String {
    let mut result = String::new();
    for c in text.chars() {
        let c = if c.is_ascii_digit() { '#' } else { c };
        if !(c == '#' && result.ends_with('#')) {
            result.push(c);
        }
    }
    result
}

impl Baseline {
    /// Compares two runs without faults.
    pub fn new(first: RunOutcome, second: &RunOutcome) -> Baseline {
        let stdout = first.ends.iter().zip(&second.ends).map(|(a, b)| {
            if a.stdout == b.stdout {
                Some((a.stdout.clone(), false))
            } else if masked(&a.stdout) == masked(&b.stdout) {
                Some((masked(&a.stdout), true))
            } else {
                None
            }
        });
        Baseline {
            stdout: stdout.collect(),
            codes: first.ends.iter().map(|end| end.status.and_then(|status| status.code())).collect(),
            duration: first.duration.max(second.duration),
            longest_gap: first.longest_gap.max(second.longest_gap),
            recording: first.recording,
        }
    }

    /// The limits of runs with faults.
    pub fn limits(&self) -> Limits {
        Limits {
            total: (self.duration * 10).max(Duration::from_secs(10)),
            idle: (self.longest_gap * 3).max(Duration::from_secs(6)),
        }
    }
}

/// A report of a sanitizer in the output of a program.
fn sanitizer_report(stderr: &str) -> Option<&str> {
    stderr.lines().find(|line| {
        ["ERROR: AddressSanitizer", "ERROR: LeakSanitizer", "WARNING: ThreadSanitizer", "runtime error:"]
            .iter()
            .any(|mark| line.contains(mark))
    })
}

/// Classifies a run. `faulted` is the program that met the fault.
pub fn classify(target: &Target, clean: &Baseline, faulted: usize, run: &RunOutcome) -> (Outcome, String) {
    let name = |index: usize| &target.program[index].name;
    // The end of one program often causes that of another: all are named.
    let crash = |(index, end): (usize, &ProgramEnd)| {
        if let Some(line) = sanitizer_report(&end.stderr) {
            return Some(format!("{}: {}", name(index), line.trim()));
        }
        let was_stopped = run.stopped.as_ref().is_some_and(|(_, waiting)| waiting.contains(&index));
        let signal = end.status.and_then(|status| status.signal());
        let signal = signal.filter(|_| !was_stopped && !target.program[index].service);
        signal.map(|signal| format!("{} ended with signal {signal}", name(index)))
    };
    let crashes: Vec<String> = run.ends.iter().enumerate().filter_map(crash).collect();
    if !crashes.is_empty() {
        return (Outcome::Crash, crashes.join(", "));
    }
    if let Some((why, waiting)) = &run.stopped {
        if waiting.contains(&faulted) || waiting.is_empty() {
            return (Outcome::Hang, format!("{}: {why}", name(faulted)));
        }
        let names: Vec<&str> = waiting.iter().map(|index| name(*index).as_str()).collect();
        let is_connected = |index: &usize| {
            let connects = |verb| matches!(verb, Some(Verb::ModifyQp | Verb::RdmaAccept | Verb::RdmaConnect));
            run.recording.points.iter().any(|point| point.role == *name(*index) && connects(point.verb()))
        };
        if waiting.iter().any(is_connected) {
            let names = names.join(", ");
            return (
                Outcome::Leak,
                format!("{} ended, and {names} still waits: a wedged peer ({why})", name(faulted)),
            );
        }
        return (
            Outcome::CleanError,
            format!("{} never had a connection and waits for one", names.join(", ")),
        );
    }
    let code_of =
        |index: usize| run.ends.get(index).and_then(|end| end.status).and_then(|status| status.code());
    let not_started = run.ends.len() < target.program.len();
    let failed = (0..run.ends.len()).find(|index| {
        !target.program[*index].service && code_of(*index) != clean.codes.get(*index).copied().flatten()
    });
    let leaks = leaks(clean, run, faulted);
    let releases = run.recording.released_after_fault.get(&faulted).copied().unwrap_or(0) > 0;
    if let Some(index) = failed {
        if releases && let Some(leak) = leaks {
            return (Outcome::Leak, format!("{} {leak}", name(faulted)));
        }
        let code = code_of(index).map_or("no exit code".into(), |code| format!("exit code {code}"));
        let message = run.ends[index].stderr.lines().rev().find(|line| !line.trim().is_empty());
        let message = message.map_or(String::new(), |line| format!(": {}", line.trim()));
        return (Outcome::CleanError, format!("{}: {code}{message}", name(index)));
    }
    if not_started {
        return (Outcome::CleanError, format!("{} ended before the other programs started", name(faulted)));
    }
    if let Some(text) = &run.check_failed {
        return (Outcome::WrongResult, format!("the exit codes are right, and the check fails: {text}"));
    }
    if target.check.is_none() {
        for (index, expected) in clean.stdout.iter().enumerate() {
            let Some((expected, is_masked)) = expected else { continue };
            let seen = &run.ends[index].stdout;
            let seen = if *is_masked { masked(seen) } else { seen.clone() };
            if seen != *expected && !target.program[index].service {
                let detail = format!("{} ends with success, and its output differs", name(index));
                return (Outcome::WrongResult, detail);
            }
        }
        let retried = run.recording.posted_after_fault.get(&faulted).copied().unwrap_or(0) > 0;
        if run.recording.has_failed_completion && !retried {
            let detail = "reports success although a work request failed and was not posted again";
            return (Outcome::WrongResult, format!("{} {detail}", name(faulted)));
        }
    }
    if let Some(leak) = leaks {
        return (Outcome::Leak, format!("{} {leak}", name(faulted)));
    }
    let detail = if run.recording.fired == 0 { "the program did not reach the point" } else { "" };
    (Outcome::Right, detail.into())
}

/// The objects that the clean run released and this one did not.
fn leaks(clean: &Baseline, run: &RunOutcome, faulted: usize) -> Option<String> {
    let excess = run.recording.balance.iter().filter_map(|((role, kind), count)| {
        // Connection requests bring identifiers that no call created: a balance below zero is not a release.
        let usual = clean.recording.balance.get(&(*role, *kind)).copied().unwrap_or(0).max(0);
        (*role == faulted && *count > usual).then(|| format!("{} {kind}", count - usual))
    });
    let excess: Vec<String> = excess.collect();
    (!excess.is_empty()).then(|| format!("ended without releasing {}", excess.join(", ")))
}
