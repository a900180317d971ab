//! `softhca shrink`: a minimal set of faults with which a scenario still fails, simulated or on a real program.

use crate::exit_code::{CommandResult, bad_input};
use crate::output;
use crate::scenario::{self, ParameterValue};
#[cfg(target_os = "linux")]
use crate::sweep::{self, ScenarioRuns, Surroundings};
use crate::terminal;
use clap::Args;
use softhca_scenarios::{FaultText, ParameterValues, Scenario, minimize, with_faults};
#[cfg(target_os = "linux")]
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

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
    /// Write the scenario with the minimal set to this file
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Host that the program runs on, as for `softhca exec`
    #[arg(long, value_name = "NAME", requires = "program")]
    host: Option<String>,
    /// Run the program, or the programs of a .toml file after `--`, as `softhca sweep` does, and keep the outcome: crash,
    /// hang, wrong-result or leak
    #[cfg(target_os = "linux")]
    #[arg(long, requires = "program", conflicts_with = "host")]
    sweep: bool,
    /// Run this program with `softhca exec`, instead of a simulation
    #[arg(last = true, value_name = "PROGRAM", conflicts_with_all = ["seed", "set"])]
    program: Vec<String>,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> CommandResult {
    shrink(arguments).map_err(bad_input)
}

/// The necessary faults, and their effect.
struct Shrunk {
    faults: Vec<String>,
    before: usize,
    runs: u64,
    results: Vec<String>,
}

fn shrink(arguments: &Arguments) -> Result<ExitCode, String> {
    let scenario = scenario::read(&arguments.file)?;
    let found = match &arguments.program[..] {
        [] => shrink_simulation(arguments, &scenario)?,
        #[cfg(target_os = "linux")]
        words if arguments.sweep => shrink_sweep(&scenario, words)?,
        _ => shrink_program(&scenario, |text| run_program(arguments, text))?,
    };
    let Some(found) = found else {
        if !arguments.program.is_empty() {
            let (program, name) = (arguments.program.join(" "), scenario.name());
            outln!("{program} does not fail with {name}: nothing to shrink");
        }
        return Ok(ExitCode::FAILURE);
    };
    outln!("{} of {} faults suffice ({} runs):", found.faults.len(), found.before, found.runs);
    for fault in &found.faults {
        outln!("{fault}\n");
    }
    for result in &found.results {
        outln!("result: {result}");
    }
    if let Some(path) = &arguments.output {
        let text = with_faults(scenario.text(), &found.faults);
        std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn shrink_simulation(arguments: &Arguments, scenario: &Scenario) -> Result<Option<Shrunk>, String> {
    let set = ParameterValue::pairs(&arguments.set);
    let sweep = scenario.sweep(&set).map_err(|problem| problem.to_string())?;
    let values: &ParameterValues = match &sweep[..] {
        [one] => one,
        _ => return Err("give each parameter a single value".into()),
    };
    let seed = arguments.seed.unwrap_or(scenario.seed);
    let plan = scenario.plan(values, seed).map_err(|problem| problem.to_string())?;
    let bar = terminal::progress_of_runs(None);
    let found = softhca_scenarios::shrink(&plan, scenario.text(), |runs| bar.set_position(runs as u64));
    let runs = bar.position();
    drop(bar);
    let Some(found) = found else {
        outln!("{} does not fail with seed {seed}: nothing to shrink", scenario.name());
        return Ok(None);
    };
    let failures = found.outcome.failures().filter(|failure| !failure.is_unfired_rule());
    let mut results: Vec<String> =
        failures.map(|failure| format!("{}: {}", failure.text, failure.detail)).collect();
    results.extend(found.outcome.error.clone());
    Ok(Some(Shrunk { faults: found.faults, before: found.before, runs, results }))
}

/// How a run of a program failed: the expectations that did not hold, the exit code, or the outcome of a sweep. Empty if
/// it did not.
type Symptoms = Vec<String>;

/// Shrinks the faults of a scenario. `run` runs programs with a scenario, and returns how the run failed and how often
/// each fault happened.
fn shrink_program(
    scenario: &Scenario,
    mut run: impl FnMut(&str) -> Result<(Symptoms, Vec<u64>), String>,
) -> Result<Option<Shrunk>, String> {
    let bar = terminal::progress_of_runs(None);
    let mut run_with = |faults: &[&FaultText]| {
        bar.inc(1);
        // A fault often prevents another.
        let texts: Vec<String> = faults.iter().map(|fault| (*fault).clone().optional().to_string()).collect();
        run(&with_faults(scenario.text(), &texts))
    };
    let all = FaultText::all(scenario.text());
    let (symptoms, hits) = run_with(&all.iter().collect::<Vec<_>>())?;
    if symptoms.is_empty() {
        return Ok(None);
    }
    let of_fault = |(index, fault): (usize, &FaultText)| fault.split(hits.get(index).copied().unwrap_or(0));
    let candidates: Vec<FaultText> = all.iter().enumerate().flat_map(of_fault).collect();
    let before = candidates.len();
    let mut fails = |faults: &[&FaultText]| run_with(faults).is_ok_and(|(seen, _)| seen == symptoms);
    // Hits that are split may not be those of the whole.
    let candidates = match fails(&candidates.iter().collect::<Vec<_>>()) {
        true => candidates,
        false => all,
    };
    let faults = minimize(candidates, fails).iter().map(FaultText::to_string).collect();
    Ok(Some(Shrunk { faults, before, runs: bar.position(), results: symptoms }))
}

/// Shrinks the faults with which the programs of a sweep have a bad outcome.
#[cfg(target_os = "linux")]
fn shrink_sweep(scenario: &Scenario, words: &[String]) -> Result<Option<Shrunk>, String> {
    let target = sweep::read_target(words)?;
    let surroundings = Surroundings::new(false)?;
    let parse = |text: &str| {
        let parsed = Scenario::parse(scenario.name(), text);
        let plan = parsed.and_then(|scenario| scenario.plan(&ParameterValues::new(), scenario.seed));
        plan.map_err(|problem| problem.to_string())
    };
    let mut runs = ScenarioRuns::start(&target, &surroundings, &parse(scenario.text())?)?;
    let mut details = BTreeMap::new();
    let found = shrink_program(scenario, |text| {
        let (outcome, detail, hits) = runs.run(&parse(text)?)?;
        details.insert(outcome.name(), detail);
        let symptoms = if outcome.is_bad() { vec![outcome.name().to_owned()] } else { Vec::new() };
        Ok((symptoms, hits))
    })?;
    if surroundings.are_interrupted() {
        return Err("interrupted".into());
    }
    Ok(found.map(|mut found| {
        for result in &mut found.results {
            *result = format!("{result}: {}", details.get(result.as_str()).map_or("", String::as_str));
        }
        found
    }))
}

/// Runs a program with a scenario by `softhca exec`.
fn run_program(arguments: &Arguments, text: &str) -> Result<(Symptoms, Vec<u64>), String> {
    let path = output::unpredictable_path("softhca-shrink-", ".toml");
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    output::create_new(&path).and_then(|mut file| file.write_all(text.as_bytes())).map_err(failed)?;
    let own = std::env::current_exe().map_err(|error| format!("cannot find the executable: {error}"))?;
    let mut command = Command::new(own);
    command.args(["exec", "--json", "--name"]).arg(format!("shrink-{}", std::process::id()));
    command.args(arguments.host.iter().flat_map(|host| ["--host", host.as_str()]));
    command.arg("--scenario").arg(&path).arg("--").args(&arguments.program);
    let output = command.stdin(Stdio::null()).output().map_err(failed)?;
    let _ = std::fs::remove_file(&path);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let verdict: Option<serde_json::Value> =
        text.lines().last().and_then(|line| serde_json::from_str(line).ok());
    let Some(verdict) = verdict.filter(|verdict| verdict["rules"].is_array()) else {
        return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
    };
    let list = |key: &str| verdict[key].as_array().cloned().unwrap_or_default();
    let hits = list("rules").iter().map(|rule| rule["fired"].as_u64().unwrap_or(0)).collect();
    let not_held = list("expectations").into_iter().filter(|expectation| expectation["held"] == false);
    let mut symptoms: Symptoms =
        not_held.map(|failed| failed["text"].as_str().unwrap_or_default().to_owned()).collect();
    let code = output.status.code().unwrap_or(-1);
    if symptoms.is_empty() && code != 0 {
        symptoms.push(format!("the program ends with {code}"));
    }
    Ok((symptoms, hits))
}
