//! `softhca bisect`: from which moment on a failure was inevitable.

use crate::exit_code::{CommandResult, bad_input};
use crate::scenario::{self, ParameterValue};
use crate::terminal;
use clap::Args;
use serde::Serialize;
use softhca_scenarios::quantity::Time;
use softhca_scenarios::{Bisection, Moment, bisect};
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `softhca bisect`.
#[derive(Args)]
#[command(
    after_help = "Repeats the failed run up to a moment, and continues without its faults or with other random numbers. \
                  The moments are the begin of the run and each fault.\nExit code: 0 if the moment was found, 1 if the \
                  scenario does not fail, 2 if it cannot be used."
)]
pub struct Arguments {
    /// Scenario file
    file: PathBuf,
    /// Seed with which the scenario fails [default: the file's]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// The run is one of `softhca run --swarm`
    #[arg(long)]
    swarm: bool,
    /// Set a parameter of the scenario
    #[arg(long = "set", value_name = "NAME=VALUE")]
    set: Vec<ParameterValue>,
    /// Continuations with other random numbers at each moment, if the run has any
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(0..=1000))]
    continuations: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct MomentLine {
    at_ns: u64,
    faults: usize,
    failed: u32,
    continuations: u32,
}

impl From<&Moment> for MomentLine {
    fn from(moment: &Moment) -> MomentLine {
        let Moment { at_ns, faults, failed, continuations } = *moment;
        MomentLine { at_ns, faults, failed, continuations }
    }
}

/// The object of `--json`.
#[derive(Serialize)]
struct Report<'a> {
    scenario: &'a str,
    seed: u64,
    symptoms: &'a [String],
    moments: Vec<MomentLine>,
    inevitable_from_ns: Option<u64>,
    cause: Option<&'a str>,
    ended_ns: u64,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> CommandResult {
    find(arguments).map_err(bad_input)
}

fn find(arguments: &Arguments) -> Result<ExitCode, String> {
    let scenario = scenario::read(&arguments.file)?;
    let sweep =
        scenario.sweep(&ParameterValue::pairs(&arguments.set)).map_err(|problem| problem.to_string())?;
    let [values] = &sweep[..] else { return Err("give each parameter a single value".into()) };
    let seed = arguments.seed.unwrap_or(if arguments.swarm { 1 } else { scenario.seed });
    let plan = match arguments.swarm {
        true => scenario.swarm_plan(values, seed),
        false => scenario.plan(values, seed),
    };
    let plan = plan.map_err(|problem| problem.to_string())?;
    let bar = terminal::progress_of_runs(None);
    let found = bisect(&plan, arguments.continuations, |runs| bar.set_position(runs as u64));
    drop(bar);
    let Some(found) = found else {
        errln!("{} does not fail with seed {seed}: nothing to bisect", scenario.name());
        return Ok(ExitCode::FAILURE);
    };
    match arguments.json {
        true => {
            let Bisection { symptoms, moments, inevitable, cause, ended_ns } = &found;
            let report = Report {
                scenario: scenario.name(),
                seed,
                symptoms,
                moments: moments.iter().map(MomentLine::from).collect(),
                inevitable_from_ns: inevitable.map(|moment| moment.at_ns),
                cause: cause.as_deref(),
                ended_ns: *ended_ns,
            };
            outln!("{}", serde_json::to_string(&report).unwrap_or_default());
        }
        false => print(&found),
    }
    Ok(ExitCode::SUCCESS)
}

fn print(found: &Bisection) {
    for symptom in &found.symptoms {
        let failure = if symptom.is_empty() { "the run cannot be executed" } else { symptom.as_str() };
        outln!("failure: {failure}");
    }
    outln!("{:>16}  {:>8}  failed", "from", "faults");
    for Moment { at_ns, faults, failed, continuations } in &found.moments {
        outln!("{:>16}  {faults:>8}  {failed} of {continuations} continuations", Time(*at_ns).to_string());
    }
    match (&found.inevitable, &found.cause) {
        (None, _) => {
            outln!("not inevitable: a continuation avoids the failure at every moment that was tried")
        }
        (Some(moment), Some(cause)) => {
            let (at, tried) = (Time(moment.at_ns), moment.continuations);
            outln!("inevitable from {at} on, in all of {tried} continuations: after {cause}");
        }
        (Some(moment), None) => {
            outln!(
                "inevitable from the start, in all of {} continuations: no fault is needed",
                moment.continuations
            );
        }
    }
}
