//! `softhca run`: scenario files in virtual or in real time, for one seed or many.

mod artifacts;
mod job;
mod junit;
mod printer;
mod store;

#[cfg(target_os = "linux")]
pub use printer::format_verdict;

use crate::{EXIT_BAD_INPUT, output};
use clap::{Args, ValueEnum};
use job::{Job, RunResult};
use softhca_scenarios::{Diagnostic, Scenario, Verdict};
use std::fs;
use std::io::{self, Read};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;

/// What `softhca run` takes.
#[derive(Args)]
#[command(
    after_help = "Exit code: 0 if every expectation held, 1 if one did not, 2 if a file or an argument cannot \
                        be used or a run could not be carried out."
)]
pub struct Arguments {
    /// Scenario files, or folders of them; with --merge, JUnit files
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// In virtual time, or on real sockets
    #[arg(long, value_enum, default_value = "sim")]
    on: Backend,
    /// The seed; the file's unless said
    #[arg(long, value_name = "N", conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Every seed from A to B, both included
    #[arg(long, value_name = "A..B")]
    seeds: Option<SeedRange>,
    /// Only the K-th of N equal parts of all runs
    #[arg(long, value_name = "K/N")]
    shard: Option<Shard>,
    /// Give a parameter of the file a value; NAME=all for each of its values in turn
    #[arg(long = "set", value_name = "NAME=VALUE")]
    set: Vec<ParameterValue>,
    /// Write a JUnit report
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Merge JUnit reports into the one that --junit names, instead of running anything
    #[arg(long, requires = "junit")]
    merge: bool,
    /// Write log, capture, ladder and result of every run into a folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// One JSON object per run instead of text
    #[arg(long)]
    json: bool,
}

/// What time is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// Virtual time.
    Sim,
    /// Real UDP sockets.
    Udp,
}

impl Backend {
    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Backend::Sim => "sim",
            Backend::Udp => "udp",
        }
    }
}

/// The most runs of one command: each of them is kept until the end.
const MAX_RUNS: u64 = 1_000_000;
/// The most bytes of a scenario file.
const MAX_SCENARIO_BYTES: u64 = 16 << 20;

/// Seeds from one to another, both included.
#[derive(Clone, Debug)]
struct SeedRange(RangeInclusive<u64>);

impl FromStr for SeedRange {
    type Err = String;

    fn from_str(text: &str) -> Result<SeedRange, String> {
        let ends = text.split_once("..").and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        match ends {
            Some((first, last)) if first <= last => Ok(SeedRange(first..=last)),
            Some(_) => Err("the range is empty".into()),
            None => Err("seeds are written A..B, such as 1..1000".into()),
        }
    }
}

/// One part of several.
#[derive(Clone, Copy, Debug)]
struct Shard {
    index: usize,
    count: usize,
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Shard, String> {
        let parts = text.split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
        match parts {
            Some((part, of)) if 1 <= part && part <= of => Ok(Shard { index: part, count: of }),
            Some(_) => Err("parts are counted from 1: 1/4, 2/4, 3/4, 4/4".into()),
            None => Err("a part is written K/N, such as 1/4".into()),
        }
    }
}

/// A parameter and its value.
#[derive(Clone, Debug)]
pub struct ParameterValue(pub String, pub String);

impl FromStr for ParameterValue {
    type Err = String;

    fn from_str(text: &str) -> Result<ParameterValue, String> {
        match text.split_once('=') {
            Some((name, value)) if !name.is_empty() => {
                Ok(ParameterValue(name.trim().into(), value.trim().into()))
            }
            _ => Err("a setting is written NAME=VALUE".into()),
        }
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> ExitCode {
    if arguments.merge {
        return merge(arguments);
    }
    let jobs = match collect_jobs(arguments) {
        Ok(jobs) => jobs,
        Err(problems) => {
            problems.iter().for_each(|problem| eprintln!("{problem}"));
            return ExitCode::from(EXIT_BAD_INPUT);
        }
    };
    if let Err(why) = check_outputs(arguments) {
        eprintln!("softhca run: {why}");
        return ExitCode::from(EXIT_BAD_INPUT);
    }
    let mut teller = printer::RunPrinter::new(&jobs, arguments.json, arguments.out.clone());
    let mut ran = Vec::new();
    job::run_all(&jobs, arguments.on, arguments.out.is_some(), |index, result: RunResult| {
        ran.push((index, result.summary()));
        teller.on_result(index, &result)
    });
    teller.finish();
    if let Some(path) = &arguments.junit {
        let report = junit::report(&jobs, &ran);
        if let Err(error) = fs::write(path, report) {
            eprintln!("softhca run: {}", output::write_error("--junit", path, &error));
            return ExitCode::from(EXIT_BAD_INPUT);
        }
    }
    if let Some(why) = teller.write_error() {
        eprintln!("softhca run: {why}");
        return ExitCode::from(EXIT_BAD_INPUT);
    }
    let has = |verdict| ran.iter().any(|(_, summary)| summary.verdict == verdict);
    match (has(Verdict::Error), has(Verdict::Fail)) {
        (true, _) => ExitCode::from(EXIT_BAD_INPUT),
        (false, true) => ExitCode::FAILURE,
        (false, false) => ExitCode::SUCCESS,
    }
}

/// Whether what comes of the runs can be written: better known before than after them.
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

/// Every run that is asked for, in order: files, then parameters, then seeds.
fn collect_jobs(arguments: &Arguments) -> Result<Vec<Job>, Vec<String>> {
    let mut problems = Vec::new();
    let mut jobs = Vec::new();
    let set: Vec<(String, String)> =
        arguments.set.iter().map(|ParameterValue(name, value)| (name.clone(), value.clone())).collect();
    let seeds_each = arguments.seeds.as_ref().map_or(0, |SeedRange(seeds)| seeds.end() - seeds.start());
    for file in &arguments.files {
        let paths = match scenario_files(file) {
            Ok(paths) => paths,
            Err(why) => {
                problems.push(why);
                continue;
            }
        };
        for path in paths {
            match read_scenario(&path).and_then(|scenario| {
                let sweep = scenario.sweep(&set).map_err(|problem| problem.to_string())?;
                Ok((Arc::new(scenario), sweep))
            }) {
                Err(why) => problems.push(why),
                Ok((scenario, sweep)) => {
                    let runs = (sweep.len() as u64).saturating_mul(seeds_each.saturating_add(1));
                    if runs > MAX_RUNS - jobs.len() as u64 {
                        let path = path.display();
                        problems.push(format!("{path}: {runs} runs: at most {MAX_RUNS} can be done at once"));
                        continue;
                    }
                    let seed = arguments.seed.unwrap_or(scenario.seed);
                    let seeds = arguments.seeds.as_ref().map_or(seed..=seed, |seeds| seeds.0.clone());
                    for values in sweep {
                        let job = |seed| Job {
                            scenario: scenario.clone(),
                            parameters: values.clone(),
                            seed,
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
    if let Some(Shard { index: part, count: of }) = arguments.shard {
        jobs = jobs.into_iter().skip(part - 1).step_by(of).collect();
    }
    Ok(jobs)
}

/// The file itself, or the scenario files of a folder.
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
        true => Err(format!("{}: the folder has no scenario files (*.toml)", path.display())),
        false => Ok(found),
    }
}

/// Reads and checks a scenario file.
pub fn read_scenario(path: &Path) -> Result<Scenario, String> {
    let name = path.display().to_string();
    let text =
        read_text(path).map_err(|error| format!("{name}: {error}; give the path of a scenario file"))?;
    Scenario::parse(&name, &text).map_err(|problem: Diagnostic| problem.to_string())
}

/// The text of a file, if it is not longer than any scenario.
fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    fs::File::open(path)?.take(MAX_SCENARIO_BYTES + 1).read_to_string(&mut text)?;
    match text.len() as u64 > MAX_SCENARIO_BYTES {
        true => Err(io::Error::other(format!("more than {} MiB", MAX_SCENARIO_BYTES >> 20))),
        false => Ok(text),
    }
}

fn merge(arguments: &Arguments) -> ExitCode {
    let mut reports = Vec::new();
    for path in &arguments.files {
        match fs::read_to_string(path) {
            Ok(text) => reports.push((path.display().to_string(), text)),
            Err(error) => {
                eprintln!("softhca run: {}: {error}", path.display());
                return ExitCode::from(EXIT_BAD_INPUT);
            }
        }
    }
    let path = arguments.junit.as_ref().expect("clap asks for it");
    let written = junit::merge(&reports).and_then(|merged| {
        fs::write(path, merged).map_err(|error| output::write_error("--junit", path, &error))
    });
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("softhca run: {why}");
            ExitCode::from(EXIT_BAD_INPUT)
        }
    }
}
