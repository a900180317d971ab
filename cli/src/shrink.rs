//! `softhca shrink`: the fewest faults with which a scenario still fails.

use crate::EXIT_BAD_INPUT;
use crate::run::{self, ParameterValue};
use clap::Args;
use softhca_scenarios::ParameterValues;
use std::path::PathBuf;
use std::process::ExitCode;

/// What `softhca shrink` takes.
#[derive(Args)]
#[command(
    after_help = "Exit code: 0 if a list was found, 1 if the scenario does not fail, 2 if it cannot be used."
)]
pub struct Arguments {
    /// The scenario file
    file: PathBuf,
    /// The seed with which it fails; the file's unless said
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Give a parameter of the file a value
    #[arg(long = "set", value_name = "NAME=VALUE")]
    set: Vec<ParameterValue>,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> ExitCode {
    match shrink(arguments) {
        Ok(code) => code,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::from(EXIT_BAD_INPUT)
        }
    }
}

fn shrink(arguments: &Arguments) -> Result<ExitCode, String> {
    let scenario = run::read_scenario(&arguments.file)?;
    let set: Vec<(String, String)> =
        arguments.set.iter().map(|ParameterValue(name, value)| (name.clone(), value.clone())).collect();
    let sweep = scenario.sweep(&set).map_err(|problem| problem.to_string())?;
    let values: &ParameterValues = match &sweep[..] {
        [one] => one,
        _ => return Err("softhca shrink: one run at a time: give each parameter one value".into()),
    };
    let seed = arguments.seed.unwrap_or(scenario.seed);
    let plan = scenario.plan(values, seed).map_err(|problem| problem.to_string())?;
    let mut runs = 0;
    let Some(found) = softhca_scenarios::shrink(&plan, |n| runs = n) else {
        say!("{} does not fail with seed {seed}: there is nothing to shrink", scenario.name());
        return Ok(ExitCode::FAILURE);
    };
    say!("{} of {} faults are enough ({runs} runs):", found.faults.len(), found.before);
    for fault in &found.faults {
        say!("  {fault}");
    }
    for failure in found.outcome.failures().filter(|failure| !failure.is_unfired_rule()) {
        say!("then: {}: {}", failure.text, failure.detail);
    }
    if let Some(error) = &found.outcome.error {
        say!("then: {error}");
    }
    Ok(ExitCode::SUCCESS)
}
