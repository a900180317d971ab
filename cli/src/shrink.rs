//! `softhca shrink`: a minimal set of faults with which a scenario still fails.

use crate::exit_code;
use crate::scenario::{self, ParameterValue};
use clap::Args;
use softhca_scenarios::ParameterValues;
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `softhca shrink`.
#[derive(Args)]
#[command(
    after_help = "Exit code: 0 if a minimal set was found, 1 if the scenario does not fail, 2 if it cannot be used."
)]
pub struct Arguments {
    /// Scenario file
    file: PathBuf,
    /// Seed with which the scenario fails [default: the file's]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Set a parameter of the scenario
    #[arg(long = "set", value_name = "NAME=VALUE")]
    set: Vec<ParameterValue>,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> ExitCode {
    match shrink(arguments) {
        Ok(code) => code,
        Err(why) => {
            errln!("{why}");
            ExitCode::from(exit_code::BAD_INPUT)
        }
    }
}

fn shrink(arguments: &Arguments) -> Result<ExitCode, String> {
    let scenario = scenario::read(&arguments.file)?;
    let set = ParameterValue::pairs(&arguments.set);
    let sweep = scenario.sweep(&set).map_err(|problem| problem.to_string())?;
    let values: &ParameterValues = match &sweep[..] {
        [one] => one,
        _ => return Err("softhca shrink: give each parameter a single value".into()),
    };
    let seed = arguments.seed.unwrap_or(scenario.seed);
    let plan = scenario.plan(values, seed).map_err(|problem| problem.to_string())?;
    let mut runs = 0;
    let Some(found) = softhca_scenarios::shrink(&plan, |n| runs = n) else {
        outln!("{} does not fail with seed {seed}: nothing to shrink", scenario.name());
        return Ok(ExitCode::FAILURE);
    };
    outln!("{} of {} faults suffice ({runs} runs):", found.faults.len(), found.before);
    for fault in &found.faults {
        outln!("  {fault}");
    }
    for failure in found.outcome.failures().filter(|failure| !failure.is_unfired_rule()) {
        outln!("result: {}: {}", failure.text, failure.detail);
    }
    if let Some(error) = &found.outcome.error {
        outln!("result: {error}");
    }
    Ok(ExitCode::SUCCESS)
}
