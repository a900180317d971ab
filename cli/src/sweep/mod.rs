//! `softhca sweep`: every error path of a program, once.
//!
//! A first run without faults records the calls, completions and events of the programs. Then each is run again with one
//! fault at one point, and the outcome is classified. A point is addressed by program, verb, object in order of creation
//! and call on that object, so that the same point is hit although timing varies.

mod point;
mod report;
mod runner;
mod target;

use crate::{exit_code, output};
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use point::{Coverage, Injection};
use report::{Report, RunResult};
use runner::{Baseline, Limits, Worker, classify};
use softhca_trace::{CaptureReader, LadderBuilder, LadderStyle, Packet};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use target::Target;

/// The limit of a run without faults.
const CLEAN_LIMITS: Limits = Limits { total: Duration::from_secs(120), idle: Duration::from_secs(30) };

/// Arguments of `softhca sweep`.
#[derive(Args)]
pub struct Arguments {
    /// Inject errors into the calls of verbs; the default
    #[arg(long)]
    verbs: bool,
    /// Inject failed completions, lost notifications and asynchronous events
    #[arg(long)]
    events: bool,
    /// Lose, duplicate, delay and corrupt packets
    #[arg(long)]
    packets: bool,
    /// Inject everything
    #[arg(long)]
    all: bool,
    /// Run at most this many points of each group: the calls of one verb on one object
    #[arg(long, value_name = "N", default_value_t = 4)]
    per_group: usize,
    /// Run at most this many faults, spread over all
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Seeds: each fault runs once for each
    #[arg(long, value_name = "A..B", value_parser = parse_seeds)]
    seeds: Option<(u64, u64)>,
    /// Run only part K of N of the faults
    #[arg(long, value_name = "K/N", value_parser = parse_shard)]
    shard: Option<(usize, usize)>,
    /// Skip the faults whose results are in the folder of --out
    #[arg(long, requires = "out")]
    resume: bool,
    /// Run only this fault, as the replay command names it
    #[arg(long, value_name = "POINT")]
    only: Vec<Injection>,
    /// Runs at the same time, each on a daemon of its own [default: the number of processors]
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// Longest run, in seconds [default: ten times the run without faults, at least 10]
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<f64>,
    /// Longest time without a call, packet, completion or output, in seconds [default: three times that of the run
    /// without faults, at least 6]
    #[arg(long, value_name = "SECONDS")]
    idle: Option<f64>,
    /// Write a JUnit report to this file
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Print one JSON object per run, and the totals
    #[arg(long)]
    json: bool,
    /// Keep the outputs, event log, capture, ladder and fault of each bad run in this folder, and all results
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// List the faults and exit
    #[arg(long)]
    list: bool,
    /// A file that names the programs, or after `--` a program and its arguments
    #[arg(required = true, value_name = "FILE | -- PROGRAM")]
    target: Vec<String>,
}

fn parse_seeds(text: &str) -> Result<(u64, u64), String> {
    let wrong = || format!("{text:?} is not a range of seeds such as 1..4");
    let (first, last) = text.split_once("..").ok_or_else(wrong)?;
    let (first, last) = (first.parse().map_err(|_| wrong())?, last.parse().map_err(|_| wrong())?);
    if first > last { Err(wrong()) } else { Ok((first, last)) }
}

fn parse_shard(text: &str) -> Result<(usize, usize), String> {
    let wrong = || format!("{text:?} is not a shard such as 1/4");
    let (part, all) = text.split_once('/').ok_or_else(wrong)?;
    let (part, all): (usize, usize) = (part.parse().map_err(|_| wrong())?, all.parse().map_err(|_| wrong())?);
    if part == 0 || part > all { Err(wrong()) } else { Ok((part, all)) }
}

/// Runs `softhca sweep`.
pub fn run(arguments: &Arguments) -> ExitCode {
    match sweep(arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(message) => {
            errln!("softhca: {message}");
            ExitCode::from(exit_code::BAD_INPUT)
        }
    }
}

/// Whether the words are a file with programs: one word that ends with `.toml`.
fn read_target(words: &[String]) -> Result<Target, String> {
    match words {
        [file] if file.ends_with(".toml") => Target::read(Path::new(file)),
        words => Ok(Target::of_command(words)),
    }
}

/// A run that is due.
#[derive(Clone)]
struct Job {
    injection: Injection,
    seed: u64,
}

fn sweep(arguments: &Arguments) -> Result<bool, String> {
    let target = read_target(&arguments.target)?;
    let coverage = Coverage {
        verbs: arguments.verbs || arguments.all || !(arguments.events || arguments.packets),
        events: arguments.events || arguments.all,
        packets: arguments.packets || arguments.all,
    };
    for injection in &arguments.only {
        if point::role_of(&target, &injection.point.role).is_none() {
            return Err(format!("--only {injection}: no program has the name {:?}", injection.point.role));
        }
    }
    if let Some(folder) = &arguments.out {
        std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    let scratch = Scratch::new()?;
    let mut first = Worker::start(&target, 0, &scratch.0)?;
    let clean = clean_runs(&target, &mut first)?;
    let (mut injections, groups) = point::plan(&target, &clean.recording, coverage, arguments.per_group);
    if !arguments.only.is_empty() {
        injections.clone_from(&arguments.only);
    }
    if let Some(limit) = arguments.limit.filter(|limit| *limit < injections.len()) {
        let count = injections.len();
        injections = (0..limit).map(|n| injections[n * count / limit].clone()).collect();
    }
    let (from, to) = arguments.seeds.unwrap_or((1, 1));
    let all = injections
        .into_iter()
        .flat_map(|injection| (from..=to).map(move |seed| Job { injection: injection.clone(), seed }));
    let all =
        all.enumerate().filter(|(index, _)| arguments.shard.is_none_or(|(part, of)| index % of == part - 1));
    let mut jobs: Vec<Job> = all.map(|(_, job)| job).collect();
    if arguments.list {
        for job in &jobs {
            outln!("{}", job.injection);
        }
        return Ok(true);
    }
    let results_path = arguments.out.as_ref().map(|folder| folder.join("results.jsonl"));
    let mut earlier = Vec::new();
    if let (true, Some(path)) = (arguments.resume, &results_path) {
        earlier = read_results(path)?;
        let done: BTreeSet<(String, u64)> =
            earlier.iter().map(|run: &RunResult| (run.point.clone(), run.seed)).collect();
        jobs.retain(|job| !done.contains(&(job.injection.to_string(), job.seed)));
    }
    let seconds = |given: Option<f64>| given.map(Duration::from_secs_f64);
    let limits = Limits {
        total: seconds(arguments.timeout).unwrap_or((clean.duration * 10).max(Duration::from_secs(10))),
        idle: seconds(arguments.idle).unwrap_or((clean.longest_gap * 3).max(Duration::from_secs(6))),
    };
    let store = match &results_path {
        Some(path) => {
            let mut options = File::options();
            options.create(true).write(true).truncate(!arguments.resume).append(arguments.resume);
            Some(options.open(path).map_err(|error| format!("{}: {error}", path.display()))?)
        }
        None => None,
    };
    let run = SweepRun {
        arguments,
        target: &target,
        clean: &clean,
        jobs: &jobs,
        limits,
        next: AtomicUsize::new(0),
        failed: AtomicBool::new(false),
        progress: progress_bar(jobs.len()),
        results: Mutex::new((earlier, store)),
    };
    let begin = Instant::now();
    let workers =
        arguments.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let workers = workers.clamp(1, jobs.len().max(1));
    let errors: Vec<String> = std::thread::scope(|scope| {
        let run = &run;
        let scratch = &scratch.0;
        let others: Vec<_> = (1..workers)
            .map(|number| {
                scope.spawn(move || {
                    Worker::start(run.target, number, scratch).and_then(|mut worker| run.work(&mut worker))
                })
            })
            .collect();
        let mine = run.work(&mut first);
        let others = others
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err("a worker panicked".into())));
        [mine].into_iter().chain(others).filter_map(Result::err).collect()
    });
    run.progress.finish_and_clear();
    if let Some(error) = errors.into_iter().next() {
        return Err(error);
    }
    let (mut results, _) = run.results.into_inner().expect("no worker panicked");
    results.sort_by(|a, b| (&a.point, a.seed).cmp(&(&b.point, b.seed)));
    let report = Report { results: &results, groups: &groups, duration: begin.elapsed(), runs: jobs.len() };
    if let Some(path) = &arguments.junit {
        let title = arguments.target.join(" ");
        std::fs::write(path, report.junit(&title)).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    if arguments.json {
        outln!("{}", report.totals_json());
    } else {
        outln!("{}", report.text().trim_end());
    }
    Ok(!results.iter().any(|run| run.outcome.is_bad()))
}

/// Runs the target twice without faults: the second run shows which outputs vary.
fn clean_runs(target: &Target, worker: &mut Worker<'_>) -> Result<Baseline, String> {
    let mut runs = Vec::new();
    for _ in 0..2 {
        let run = worker.run(None, 1, CLEAN_LIMITS)?;
        if let Some((why, waiting)) = &run.stopped {
            let names: Vec<&str> = waiting.iter().map(|index| target.program[*index].name.as_str()).collect();
            return Err(format!("the run without faults does not end: {}: {why}", names.join(", ")));
        }
        for (end, program) in run.ends.iter().zip(&target.program).filter(|(_, program)| !program.service) {
            if !end.status.is_some_and(|status| status.success()) {
                let status = end.status.map_or("no status".into(), |status| status.to_string());
                let last = |text: &str| text.lines().rfind(|line| !line.trim().is_empty()).map(str::to_owned);
                let message = last(&end.stderr).or_else(|| last(&end.stdout)).unwrap_or_default();
                return Err(format!("the run without faults fails: {}: {status}: {message}", program.name));
            }
        }
        if let Some(text) = &run.check_failed {
            return Err(format!("the check fails without faults: {text}"));
        }
        runs.push(run);
    }
    let second = runs.pop().expect("two runs");
    let first = runs.pop().expect("two runs");
    if first.recording.points.is_empty() {
        return Err("the program calls no verb: it does not use a device of SoftHCA (statically linked, or another library?)".into());
    }
    Ok(Baseline::new(first, &second))
}

fn read_results(path: &Path) -> Result<Vec<RunResult>, String> {
    let failed = |error: String| format!("{}: {error}", path.display());
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error.to_string())),
    };
    let lines = BufReader::new(file).lines().map_while(Result::ok).filter(|line| !line.is_empty());
    // An interruption may have cut the last line.
    Ok(lines.filter_map(|line| serde_json::from_str(&line).ok()).collect())
}

fn progress_bar(runs: usize) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(runs as u64), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} runs, {eta} left {msg}") {
        bar.set_style(style);
    }
    bar
}

/// A folder that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Scratch, String> {
        let folder = output::unpredictable_path("softhca-sweep-", "");
        output::create_folder(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(Scratch(folder))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What the workers share.
struct SweepRun<'a> {
    arguments: &'a Arguments,
    target: &'a Target,
    clean: &'a Baseline,
    jobs: &'a [Job],
    limits: Limits,
    next: AtomicUsize,
    failed: AtomicBool,
    progress: ProgressBar,
    results: Mutex<(Vec<RunResult>, Option<File>)>,
}

impl SweepRun<'_> {
    /// Takes jobs until none is left.
    fn work(&self, worker: &mut Worker<'_>) -> Result<(), String> {
        while !self.failed.load(Ordering::Relaxed)
            && let Some(job) = self.jobs.get(self.next.fetch_add(1, Ordering::Relaxed))
        {
            let done = self.run_one(worker, job);
            if let Err(error) = done {
                self.failed.store(true, Ordering::Relaxed);
                return Err(error);
            }
        }
        Ok(())
    }

    fn run_one(&self, worker: &mut Worker<'_>, job: &Job) -> Result<(), String> {
        let run = worker.run(Some(&job.injection), job.seed, self.limits)?;
        let (outcome, detail) = classify(self.target, self.clean, &job.injection, &run);
        let point = job.injection.to_string();
        let mut kept = None;
        if let (true, Some(out)) = (outcome.is_bad(), &self.arguments.out) {
            let folder = out.join(point.replace(':', "-").replace('+', "-always"));
            keep_files(worker.folder(), &folder)?;
            let write = |name: &str, text: String| {
                std::fs::write(folder.join(name), text).map_err(|error| format!("{name}: {error}"))
            };
            write("ladder.txt", draw_ladders(&worker.folder().join("packets.pcapng")))?;
            write("fault.toml", job.injection.scenario(self.target))?;
            kept = Some(folder.display().to_string());
        }
        let replay = self.replay(&point, job.seed);
        let fault = job.injection.fault.to_string();
        let name = job.injection.point.name().to_owned();
        let result = RunResult {
            point,
            name,
            fault,
            seed: job.seed,
            outcome,
            detail,
            replay,
            kept,
            milliseconds: run.duration.as_millis() as u64,
            reached: run.recording.fired > 0,
        };
        let line = result.json(&job.injection);
        let mut results = self.results.lock().expect("no worker panicked");
        if let Some(store) = &mut results.1 {
            let stored = serde_json::to_string(&result)
                .map_err(std::io::Error::from)
                .and_then(|text| writeln!(store, "{text}"));
            stored.map_err(|error| format!("results.jsonl: {error}"))?;
        }
        if self.arguments.json {
            outln!("{line}");
        }
        results.0.push(result);
        let bad = results.0.iter().filter(|run| run.outcome.is_bad()).count();
        drop(results);
        if bad > 0 {
            self.progress.set_message(format!("({bad} bad)"));
        }
        self.progress.inc(1);
        Ok(())
    }

    /// The command that repeats a run.
    fn replay(&self, point: &str, seed: u64) -> String {
        let words: Vec<String> =
            self.arguments.target.iter().map(|word| crate::shell::quote(word).to_string()).collect();
        let is_file = matches!(&self.arguments.target[..], [file] if file.ends_with(".toml"));
        let separator = if is_file { "" } else { "-- " };
        let seeds = if seed == 1 { String::new() } else { format!(" --seeds {seed}..{seed}") };
        format!("softhca sweep --only {point}{seeds} {separator}{}", words.join(" "))
    }
}

/// The ladders of a capture, up to a damaged record.
fn draw_ladders(capture: &Path) -> String {
    let mut ladders = LadderBuilder::default();
    let records = File::open(capture)
        .map_err(drop)
        .and_then(|file| CaptureReader::new(BufReader::new(file)).map_err(drop));
    let mut start_ns = None;
    for record in records.into_iter().flatten().map_while(Result::ok) {
        ladders.record_packet(&Packet::new(&record, *start_ns.get_or_insert(record.time_ns)));
    }
    let drawn: Vec<String> =
        ladders.ladders().iter().map(|ladder| ladder.draw(LadderStyle::default())).collect();
    drawn.join("\n")
}

/// Copies the files of a run.
fn keep_files(from: &Path, to: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", to.display());
    std::fs::create_dir_all(to).map_err(failed)?;
    for entry in std::fs::read_dir(from).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        std::fs::copy(entry.path(), to.join(entry.file_name())).map_err(failed)?;
    }
    Ok(())
}
