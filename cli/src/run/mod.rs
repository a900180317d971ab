//! `softhca run`: scenario files in virtual or real time, for one seed or many.

mod artifacts;
mod ci_report;
mod job;
pub mod junit;
mod merge;
mod printer;
#[cfg(target_os = "linux")]
pub mod program_report;
mod runner;
mod store;

use crate::exit_code::{BAD_INPUT, CommandError, CommandResult, bad_input};
use crate::output;
use crate::scenario::{self, ParameterValue};
use crate::selection::{SeedRange, Shard};
use clap::Args;
pub use job::{Backend, Summary};
use job::{Job, RunResult};
use runner::RunOptions;
pub use runner::run_plan;
use softhca_scenarios::Verdict;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// Arguments of `softhca run`.
#[derive(Args)]
#[command(
    after_help = "Exit code: 0 if every expectation held, 1 if one failed, 2 if a file or an argument cannot be \
                        used or a run could not be executed."
)]
pub struct Arguments {
    /// Scenario files, or folders with scenario files
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Run in the simulator (virtual time) or over UDP sockets
    #[arg(long, value_enum, default_value = "sim")]
    on: Backend,
    /// Seed [default: the file's]
    #[arg(long, value_name = "N", conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Run every seed from A to B, inclusive
    #[arg(long, value_name = "A..B")]
    seeds: Option<SeedRange>,
    /// Run N seeds from --seed on [default: 1], each of which draws what the file leaves open: sizes, rates, kinds of
    /// faults, MTU, recovery and profile
    #[arg(long, value_name = "N", conflicts_with_all = ["seeds", "on"], value_parser = clap::value_parser!(u64).range(1..=MAX_RUNS))]
    swarm: Option<u64>,
    /// Run only the K-th of N equal parts of all runs
    #[arg(long, value_name = "K/N")]
    shard: Option<Shard>,
    /// Set a parameter of the scenario; NAME=all runs each of its values
    #[arg(long = "set", value_name = "NAME=VALUE")]
    set: Vec<ParameterValue>,
    /// Write a JUnit report
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Append a Markdown summary with times, as for $GITHUB_STEP_SUMMARY
    #[arg(long, value_name = "FILE")]
    summary: Option<PathBuf>,
    /// Annotate failed expectations at file and line for GitHub Actions, on standard error
    #[arg(long)]
    annotate: bool,
    /// Do not run: merge results of shards, from files with the output of --json, reports of --junit and folders
    /// of --out
    #[arg(long, value_name = "PATH", num_args = 1.., conflicts_with_all = ["shard", "out", "retry", "jobs"])]
    merge: Vec<PathBuf>,
    /// Name missing results by shard, of N shards
    #[arg(long, value_name = "N", requires = "merge")]
    shards: Option<NonZeroUsize>,
    /// Write event log, capture, ladder and result of every run to this folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Check the [[expect]] and invariants of this file too
    #[arg(long, value_name = "FILE")]
    expect: Option<PathBuf>,
    /// Run this many scenarios at a time [default: one per core in virtual time, one over UDP sockets]
    #[arg(long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
    /// Repeat a failed run over UDP sockets up to N times; a run that then passes is flaky
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=100))]
    retry: u32,
    /// A flaky run counts as failed
    #[arg(long)]
    no_flaky: bool,
    /// Print one JSON object per run
    #[arg(long)]
    json: bool,
}

/// The maximum number of runs of one command: their summaries are kept until the end.
const MAX_RUNS: u64 = 1_000_000;
/// The maximum number of failed runs that --merge prints; reports have all of them.
const MAX_FAILURES_PRINTED: usize = 60;

/// Runs the command.
pub fn run(arguments: &Arguments) -> CommandResult {
    let unusable = |problems: Vec<String>| {
        for problem in problems.iter().filter(|_| arguments.annotate) {
            errln!("{}", ci_report::annotate_problem(problem));
        }
        CommandError { code: BAD_INPUT, messages: problems }
    };
    let jobs = collect_jobs(arguments).map_err(unusable)?;
    check_outputs(arguments).map_err(bad_input)?;
    if !arguments.merge.is_empty() {
        return merge(arguments, &jobs).map_err(unusable);
    }
    let mut run_printer = printer::RunPrinter::new(&jobs, arguments.json, arguments.out.clone());
    let mut results = Vec::new();
    let Arguments { jobs: at_once, retry: retries, .. } = *arguments;
    let options = RunOptions { at_once, retries, keep: arguments.out.is_some() };
    runner::run_all(&jobs, arguments.on, options, |index, result: RunResult| {
        results.push((index, result.summary()));
        run_printer.on_result(index, &result)
    });
    run_printer.finish();
    let never = print_sometimes(arguments, &jobs, &results);
    write_reports(arguments, &jobs, &results).map_err(bad_input)?;
    run_printer.write_error().map_or(Ok(()), Err).map_err(bad_input)?;
    Ok(exit_code(arguments, &results, never))
}

/// Prints in how many runs each `sometimes` expectation held. Returns whether one never did, if this can be said: of all
/// runs of several seeds.
fn print_sometimes(arguments: &Arguments, jobs: &[Job], results: &[(usize, Summary)]) -> bool {
    let mut totals: BTreeMap<(&str, &str), [u64; 2]> = BTreeMap::new();
    for (index, summary) in results {
        for (text, held) in &summary.sometimes {
            let [times, runs] = totals.entry((jobs[*index].scenario.name(), text.as_str())).or_default();
            (*times, *runs) = (*times + u64::from(*held), *runs + 1);
        }
    }
    let mut never = false;
    for ((file, text), [times, runs]) in totals {
        let fails = times == 0 && runs > 1 && arguments.shard.is_none();
        never |= fails;
        let line = format!(
            "{}{text}: in {times} of {runs} runs ({file})",
            if fails { "never: " } else { "sometimes: " }
        );
        match arguments.json {
            true => errln!("{line}"),
            false => outln!("{line}"),
        }
    }
    never
}

/// Merges results of shards, and prints the runs that did not pass.
fn merge(arguments: &Arguments, jobs: &[Job]) -> Result<ExitCode, Vec<String>> {
    let merged = merge::merge(jobs, &arguments.merge)?;
    for note in &merged.notes {
        warnln!("{note}");
    }
    let shards = arguments.shards.map(NonZeroUsize::get);
    for line in merge::describe_missing(jobs, &merged.missing, shards) {
        warnln!("{line}");
    }
    if arguments.json {
        merged.lines.iter().for_each(|line| outln!("{line}"));
        let without = merged.results.len() - merged.missing.len() - merged.lines.len();
        if without > 0 {
            warnln!("{without} results are in JUnit reports only; --json needs those of --json or --out");
        }
    } else {
        let has_result = |index: &usize| merged.missing.binary_search(index).is_err();
        let failed = merged.results.iter().filter(|(_, summary)| summary.verdict != Verdict::Pass);
        for (index, summary) in failed.filter(|(index, _)| has_result(index)).take(MAX_FAILURES_PRINTED) {
            outln!("{}  {}", scenario::verdict_word(summary.verdict), jobs[*index].heading());
            summary.failures.iter().for_each(|failure| outln!("      {}", failure.text));
            outln!("      replay: {}", jobs[*index].replay());
        }
        outln!("{}", ci_report::describe_counts(&merged.results));
    }
    let never = print_sometimes(arguments, jobs, &merged.results);
    write_reports(arguments, jobs, &merged.results).map_err(|why| vec![why])?;
    Ok(exit_code(arguments, &merged.results, never))
}

/// Writes JUnit report and summary, and prints annotations.
fn write_reports(arguments: &Arguments, jobs: &[Job], results: &[(usize, Summary)]) -> Result<(), String> {
    if let Some(path) = &arguments.junit {
        fs::write(path, junit::report(jobs, results))
            .map_err(|error| output::write_error("--junit", path, &error))?;
    }
    if let Some(path) = &arguments.summary {
        File::options()
            .append(true)
            .create(true)
            .open(path)
            .and_then(|mut file| file.write_all(ci_report::markdown(jobs, results).as_bytes()))
            .map_err(|error| output::write_error("--summary", path, &error))?;
    }
    if arguments.annotate {
        ci_report::annotations(jobs, results).iter().for_each(|line| errln!("{line}"));
    }
    Ok(())
}

fn exit_code(arguments: &Arguments, results: &[(usize, Summary)], never: bool) -> ExitCode {
    let has = |verdict| results.iter().any(|(_, summary)| summary.verdict == verdict);
    let is_flaky = arguments.no_flaky && results.iter().any(|(_, summary)| summary.is_flaky);
    match (has(Verdict::Error), has(Verdict::Fail) || is_flaky || never) {
        (true, _) => ExitCode::from(BAD_INPUT),
        (false, true) => ExitCode::FAILURE,
        (false, false) => ExitCode::SUCCESS,
    }
}

/// Checks before the first run that the outputs can be written.
fn check_outputs(arguments: &Arguments) -> Result<(), String> {
    if let Some(folder) = &arguments.out {
        fs::create_dir_all(folder)
            .map_err(|error| format!("cannot write to {}: {error}", folder.display()))?;
    }
    if let Some(path) = &arguments.junit {
        output::create("--junit", path)?;
    }
    Ok(())
}

/// Every requested run, ordered by file, parameters and seed.
fn collect_jobs(arguments: &Arguments) -> Result<Vec<Job>, Vec<String>> {
    let mut problems = Vec::new();
    let mut jobs = Vec::new();
    let set = ParameterValue::pairs(&arguments.set);
    let seeds_of = |default: u64| match (&arguments.seeds, arguments.swarm) {
        (Some(SeedRange(seeds)), _) => seeds.clone(),
        (None, Some(count)) => {
            let first = arguments.seed.unwrap_or(1);
            first..=first.saturating_add(count - 1)
        }
        (None, None) => {
            let seed = arguments.seed.unwrap_or(default);
            seed..=seed
        }
    };
    for file in &arguments.files {
        let paths = match scenario_files(file) {
            Ok(paths) => paths,
            Err(why) => {
                problems.push(why);
                continue;
            }
        };
        for path in paths {
            match scenario::read(&path).and_then(|mut scenario| {
                if let Some(expect) = &arguments.expect {
                    scenario = scenario::add_expectations(scenario, expect)?;
                }
                let sweep = scenario.sweep(&set).map_err(|problem| problem.to_string())?;
                Ok((Arc::new(scenario), sweep))
            }) {
                Err(why) => problems.push(why),
                Ok((scenario, sweep)) => {
                    let seeds = seeds_of(scenario.seed);
                    let seeds_each = seeds.end() - seeds.start();
                    let runs = (sweep.len() as u64).saturating_mul(seeds_each.saturating_add(1));
                    if runs > MAX_RUNS - jobs.len() as u64 {
                        let path = path.display();
                        problems
                            .push(format!("{path}: {runs} runs: the maximum of one command is {MAX_RUNS}"));
                        continue;
                    }
                    for values in sweep {
                        let job = |seed| Job {
                            scenario: scenario.clone(),
                            parameters: values.clone(),
                            seed,
                            swarm: arguments.swarm.is_some(),
                            backend: arguments.on,
                        };
                        jobs.extend(seeds.clone().map(job));
                    }
                }
            }
        }
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    Ok(Shard::select(arguments.shard, jobs).collect())
}

/// The file itself, or the scenario files in a folder.
fn scenario_files(path: &Path) -> Result<Vec<PathBuf>, String> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let entries = fs::read_dir(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
        .collect();
    found.sort();
    match found.is_empty() {
        true => Err(format!("{}: the folder contains no scenario files (*.toml)", path.display())),
        false => Ok(found),
    }
}
