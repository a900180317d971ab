//! Shared by `run`, `shrink` and `exec`: reading scenario files, parameter values, and verdicts as text.

use softhca_scenarios::{Diagnostic, Outcome, Scenario, Verdict};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::str::FromStr;

/// The maximum size of a scenario file.
const MAX_SCENARIO_BYTES: u64 = 16 << 20;

#[derive(Clone, Debug)]
pub struct ParameterValue(pub String, pub String);

impl FromStr for ParameterValue {
    type Err = String;

    fn from_str(text: &str) -> Result<ParameterValue, String> {
        match text.split_once('=') {
            Some((name, value)) if !name.is_empty() => {
                Ok(ParameterValue(name.trim().into(), value.trim().into()))
            }
            _ => Err("expected NAME=VALUE".into()),
        }
    }
}

impl ParameterValue {
    /// The pairs that a scenario takes.
    pub fn pairs(values: &[ParameterValue]) -> Vec<(String, String)> {
        values.iter().map(|ParameterValue(name, value)| (name.clone(), value.clone())).collect()
    }
}

/// Reads and checks a scenario file.
pub fn read(path: &Path) -> Result<Scenario, String> {
    let name = path.display().to_string();
    let text =
        read_text(path).map_err(|error| format!("{name}: {error}; give the path of a scenario file"))?;
    Scenario::parse(&name, &text).map_err(|problem: Diagnostic| problem.to_string())
}

/// Adds the expectations of another file to a scenario.
pub fn add_expectations(scenario: Scenario, path: &Path) -> Result<Scenario, String> {
    let name = path.display().to_string();
    let text = read_text(path)
        .map_err(|error| format!("{name}: {error}; give the path of a file with [[expect]]"))?;
    scenario.with_expectations(&name, &text).map_err(|problem| problem.to_string())
}

fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX_SCENARIO_BYTES + 1).read_to_string(&mut text)?;
    match text.len() as u64 > MAX_SCENARIO_BYTES {
        true => Err(io::Error::other(format!("larger than {} MiB", MAX_SCENARIO_BYTES >> 20))),
        false => Ok(text),
    }
}

/// A verdict as the first word of a line.
pub const fn verdict_word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "pass",
        Verdict::Fail => "FAIL",
        Verdict::Error => "ERROR",
    }
}

/// Formats a verdict with the faults and expectations that it rests on.
pub fn format_verdict(heading: &str, outcome: &Outcome) -> String {
    let mut text = format!("{}  {heading}\n", verdict_word(outcome.verdict));
    if let Some(error) = &outcome.error {
        text += &format!("      {}\n", error.replace('\n', "\n      "));
    }
    for rule in &outcome.rules {
        let times = match rule.fired {
            0 => "never applied".to_owned(),
            1 => "applied once".to_owned(),
            n => format!("applied {n} times"),
        };
        text += &format!("      fault {:?} {times}\n", rule.name);
    }
    for expectation in &outcome.expectations {
        let mark = match (expectation.held, expectation.sometimes) {
            (true, _) => "held  ",
            (false, true) => "absent",
            (false, false) => "FAILED",
        };
        text += &format!("      {mark} {}: {}\n", expectation.text, expectation.detail);
    }
    for skipped in &outcome.skipped {
        text += &format!("      not checked: {}: {}\n", skipped.text, skipped.why);
    }
    for (workload, rate) in &outcome.goodput {
        text += &format!("      goodput of {workload}: {}\n", softhca_scenarios::quantity::Rate(*rate));
    }
    text
}
