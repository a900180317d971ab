//! `softhca sweep`: every error path of a program, once.
//!
//! A first run without faults records the calls, completions and events of the programs. Then each is run again with
//! one fault at one point, and the outcome is classified. A point is addressed by program, verb, object in order of
//! creation and call on that object. A fault thus hits that point although timing varies.

mod core_dump;
mod coverage;
mod injection;
mod interruption;
mod outcome;
mod point;
mod recording;
mod report;
mod runner;
mod target;

use crate::exec::sweep_support::{RequiredSettings, required_settings};
use crate::exit_code::{BAD_INPUT, CommandResult, INTERRUPTED, bad_input, error};
use crate::output::ScratchFolder;
use crate::selection::{SeedRange, Shard};
use crate::terminal;
use clap::Args;
use core_dump::CoreDump;
use coverage::Coverage;
use indicatif::ProgressBar;
use injection::Injection;
use outcome::{Baseline, Outcome, classify};
use report::{Report, RunResult};
pub use runner::Surroundings;
use runner::{Limits, RunFaults, Worker};
use softhca_scenarios::Plan;
use softhca_scenarios::plan::{Change, FaultKind, FaultPlan};
use softhca_trace::{CaptureReader, LadderBuilder, LadderStyle, Packet};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
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
    /// Run at most this many points of each group: the calls of one verb from one place of the program, in one state of
    /// the queue pair
    #[arg(long, value_name = "N", default_value_t = 4)]
    per_group: usize,
    /// Run at most this many faults: one of each group before a second one of any
    #[arg(long, value_name = "N", conflicts_with = "only", value_parser = parse_limit)]
    limit: Option<usize>,
    /// Seeds: each fault runs once for each
    #[arg(long, value_name = "A..B")]
    seeds: Option<SeedRange>,
    /// Run only part K of N of the faults
    #[arg(long, value_name = "K/N")]
    shard: Option<Shard>,
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
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    timeout: Option<Duration>,
    /// Longest time without a call, packet, completion or output, in seconds [default: three times that of the run
    /// without faults, at least 6]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    idle: Option<Duration>,
    /// Write a JUnit report to this file
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Print one JSON object per run, and the totals
    #[arg(long)]
    json: bool,
    /// Keep the outputs, event log, capture, ladder, fault and core file of each bad run in this folder, and all results
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// List the faults and exit
    #[arg(long)]
    list: bool,
    /// A file that names the programs, or after `--` a program and its arguments
    #[arg(required = true, value_name = "FILE | -- PROGRAM")]
    target: Vec<String>,
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let time = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.filter(|time| !time.is_zero())
        .ok_or_else(|| format!("{text:?} is not a number of seconds such as 2.5"))
}

fn parse_limit(text: &str) -> Result<usize, String> {
    let limit = text.parse().ok().filter(|limit| *limit > 0);
    limit.ok_or_else(|| format!("{text:?} is not a number of faults such as 100"))
}

/// Runs `softhca sweep`.
pub fn run(arguments: &Arguments) -> CommandResult {
    let surroundings = Surroundings::new(arguments.out.is_some()).map_err(bad_input)?;
    let swept = sweep(arguments, &surroundings);
    let code = if swept.is_err() && surroundings.are_interrupted() { INTERRUPTED } else { BAD_INPUT };
    Ok(if swept.map_err(error(code))? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The programs that the words name: a file, if it is one word that ends with `.toml`, or a program with its arguments.
pub fn read_target(words: &[String]) -> Result<Target, String> {
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

fn sweep(arguments: &Arguments, surroundings: &Surroundings) -> Result<bool, String> {
    let target = read_target(&arguments.target)?;
    let coverage = Coverage {
        verbs: arguments.verbs || arguments.all || !(arguments.events || arguments.packets),
        events: arguments.events || arguments.all,
        packets: arguments.packets || arguments.all,
    };
    for injection in &arguments.only {
        if target.role_of(&injection.point.role).is_none() {
            return Err(format!("--only {injection}: no program has the name {:?}", injection.point.role));
        }
    }
    if let Some(folder) = &arguments.out {
        std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    let scratch = ScratchFolder::new("softhca-sweep-")?;
    let mut first = Worker::start(&target, surroundings, &RequiredSettings::default(), 0, &scratch.0)?;
    let clean = clean_runs(&target, &mut first)?;
    let groups = coverage::plan(&target, &clean.recording, coverage, arguments.per_group);
    let injections = match &arguments.only[..] {
        [] => coverage::choose(&groups, arguments.limit),
        only => only.to_vec(),
    };
    let seeds = arguments.seeds.clone().map_or(1..=1, |SeedRange(seeds)| seeds);
    let job =
        |injection: Injection| seeds.clone().map(move |seed| Job { injection: injection.clone(), seed });
    let all = injections.into_iter().flat_map(job).collect();
    let mut jobs: Vec<Job> = Shard::select(arguments.shard, all).collect();
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
    let usual = clean.limits();
    let limits = Limits {
        total: arguments.timeout.unwrap_or(usual.total),
        idle: arguments.idle.unwrap_or(usual.idle),
    };
    let store = match &results_path {
        Some(path) => {
            let failed = |error: std::io::Error| format!("{}: {error}", path.display());
            let mut options = File::options();
            options.create(true).read(true).write(true).truncate(!arguments.resume).append(arguments.resume);
            let mut store = options.open(path).map_err(failed)?;
            let mut text = Vec::new();
            store.read_to_end(&mut text).map_err(failed)?;
            if text.last().is_some_and(|last| *last != b'\n') {
                store.write_all(b"\n").map_err(failed)?;
            }
            Some(store)
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
        progress: terminal::progress_of_runs(Some(jobs.len())),
        results: Mutex::new((earlier, store)),
    };
    let begin = Instant::now();
    let workers =
        arguments.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let workers = workers.clamp(1, jobs.len().max(1));
    let errors: Vec<String> = std::thread::scope(|scope| {
        let (run, scratch) = (&run, &scratch.0);
        let others: Vec<_> = (1..workers)
            .map(|number| {
                scope.spawn(move || {
                    Worker::start(run.target, surroundings, &RequiredSettings::default(), number, scratch)
                        .and_then(|mut worker| run.work(&mut worker))
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
    let (mut results, _) = run.results.into_inner().expect("no worker panicked");
    if surroundings.are_interrupted() {
        let next = match &arguments.out {
            Some(folder) => format!("continue with --resume --out {}", folder.display()),
            None => "with --out DIR, a sweep can continue".into(),
        };
        return Err(format!("interrupted: {} runs have results; {next}", results.len()));
    }
    if let Some(error) = errors.into_iter().next() {
        return Err(error);
    }
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
        let run = worker.run(RunFaults::None, 1, CLEAN_LIMITS)?;
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

/// The state that the workers share.
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
        let plan = job.injection.plan(self.target)?;
        let faults = plan.as_ref().map_or(RunFaults::One(&job.injection), RunFaults::Scenario);
        let run = worker.run(faults, job.seed, self.limits)?;
        let faulted = self.target.role_of(&job.injection.point.role).unwrap_or(0);
        let (outcome, detail) = classify(self.target, self.clean, faulted, &run);
        let point = job.injection.to_string();
        let replay = self.replay(&point, job.seed);
        let mut cores = if outcome.is_bad() { run.cores(self.target) } else { Vec::new() };
        let mut kept = None;
        if let (true, Some(out)) = (outcome.is_bad(), &self.arguments.out) {
            let seed = if job.seed == 1 { String::new() } else { format!("-seed-{}", job.seed) };
            let folder = out.join(point.replace(':', "-").replace('+', "-always") + &seed);
            keep_files(worker.folder(), &folder)?;
            let write = |name: &str, text: String| {
                std::fs::write(folder.join(name), text).map_err(|error| format!("{name}: {error}"))
            };
            write("ladder.txt", draw_ladders(&worker.folder().join("packets.pcapng")))?;
            write("fault.toml", job.injection.scenario(self.target))?;
            for (program, core) in &mut cores {
                core.move_to(&folder.join(format!("{program}.core")));
            }
            let mut lines =
                vec![format!("{} at {point}: {detail}", outcome.name()), format!("replay: {replay}")];
            lines.extend(core_lines(&cores));
            write("outcome.txt", lines.join("\n") + "\n")?;
            kept = Some(folder.display().to_string());
        }
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
            cores: core_lines(&cores),
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

/// The core dump of each program, or why there is none.
fn core_lines(cores: &[(String, CoreDump)]) -> Vec<String> {
    cores.iter().map(|(program, core)| format!("{program}: {}", core.text)).collect()
}

/// Runs of programs with the faults of scenarios, for `softhca shrink`.
pub struct ScenarioRuns<'t> {
    target: &'t Target,
    worker: Worker<'t>,
    clean: Baseline,
    _scratch: ScratchFolder,
}

impl<'t> ScenarioRuns<'t> {
    /// Runs the programs without faults. The daemon has the settings of the plan.
    pub fn start(
        target: &'t Target,
        surroundings: &'t Surroundings,
        plan: &Plan,
    ) -> Result<ScenarioRuns<'t>, String> {
        let hosts = target.hosts();
        if let Some(host) = plan.hosts.iter().find(|host| !hosts.contains(&host.name)) {
            let (name, hosts) = (&host.name, hosts.join(", "));
            return Err(format!("the scenario has the host {name}; the programs run on {hosts}"));
        }
        if !plan.commands.is_empty() {
            return Err("the scenario starts programs of its own: those of the sweep take their place".into());
        }
        let restart = |(_, change): &(u64, Change)| {
            matches!(change, Change::RestartProgram { .. } | Change::KillDaemon { .. })
        };
        let restarts = |fault: &&FaultPlan| match &fault.kind {
            FaultKind::Timed { changes, .. } => changes.iter().any(restart),
            _ => false,
        };
        if let Some(fault) = plan.faults.iter().find(restarts) {
            return Err(format!("fault {:?}: a sweep restarts neither programs nor the daemon", fault.name));
        }
        let settings = required_settings(plan, RequiredSettings::default())?;
        if settings.cards.is_some() {
            return Err("the hosts of a sweep have one card: remove `cards` from the scenario".into());
        }
        let scratch = ScratchFolder::new("softhca-sweep-")?;
        let mut worker = Worker::start(target, surroundings, &settings, 0, &scratch.0)?;
        let clean = clean_runs(target, &mut worker)?;
        Ok(ScenarioRuns { target, worker, clean, _scratch: scratch })
    }

    /// Runs the programs with the faults of a plan. Returns the outcome, its details, and how often each fault happened.
    pub fn run(&mut self, plan: &Plan) -> Result<(Outcome, String, Vec<u64>), String> {
        let limits = self.clean.limits();
        let run = self.worker.run(RunFaults::Scenario(plan), plan.seed, limits)?;
        let faulted = run.recording.faulted.unwrap_or(0);
        let (outcome, detail) = classify(self.target, &self.clean, faulted, &run);
        Ok((outcome, detail, run.rules.iter().map(|rule| rule.fired).collect()))
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
