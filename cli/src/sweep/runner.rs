//! One run of a target: starts the programs with a fault, and watches them.

use super::core_dump::{CoreDump, CoreDumps};
use super::injection::Injection;
use super::interruption::Interruption;
use super::point::flows_of_host;
use super::recording::Recording;
use super::target::Target;
use crate::exec::sweep_support::{
    DaemonEvents, DaemonScenario, RequiredSettings, View, connect, free_tcp_port, host_listens, library_path,
    listens_on, substitute_addresses, views,
};
use rustix::process::{Pid, Signal, kill_process_group};
use softhca::fault::{FAULTS_VARIABLE, ProgramFaults, Rule};
use softhca::{DaemonControl, HOST_VARIABLE, NAME_VARIABLE};
use softhca_scenarios::{Plan, RuleOutcome};
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime};

/// How often a run is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(4);
/// A program that meets the same fault so often retries without end.
const MAX_FIRINGS: u64 = 2_000;
/// A program with more events does not end.
const MAX_EVENTS: u64 = 1 << 20;
/// How long a service may take to end, and a program that hangs to write its core file.
const SERVICE_END: Duration = Duration::from_secs(2);
/// The clock of files lags behind that of programs by a tick.
const FILE_CLOCK_LAG: Duration = Duration::from_millis(20);

/// The end of a program.
#[derive(Clone, Debug)]
pub struct ProgramEnd {
    pub status: Option<ExitStatus>,
    pub stdout: String,
    pub stderr: String,
    /// Its core dump, if a signal ended it.
    pub core: Option<CoreDump>,
}

/// How a run went.
#[derive(Debug)]
pub struct RunOutcome {
    pub ends: Vec<ProgramEnd>,
    pub recording: Recording,
    pub duration: Duration,
    /// The longest time without an event or output.
    pub longest_gap: Duration,
    /// Why the run was stopped, and the programs that had not ended.
    pub stopped: Option<(String, Vec<usize>)>,
    /// Whether the check of the target failed, with its output.
    pub check_failed: Option<String>,
    /// The faults of the scenario, and how often each happened.
    pub rules: Vec<RuleOutcome>,
}

impl RunOutcome {
    /// The core dumps of the programs that a signal ended. A program that hung and was killed need not have one.
    pub fn cores(&self, target: &Target) -> Vec<(String, CoreDump)> {
        let ends = self.ends.iter().zip(&target.program).filter(|(_, program)| !program.service);
        let cores = ends.filter_map(|(end, program)| Some((program.name.clone(), end.core.clone()?)));
        cores.filter(|(_, core)| core.file.is_some() || self.stopped.is_none()).collect()
    }
}

/// The faults of a run.
#[derive(Clone, Copy)]
pub enum RunFaults<'f> {
    /// None.
    None,
    /// One, at a point.
    One(&'f Injection),
    /// The programs of a scenario. The programs of a host have the faults of the host.
    Scenario(&'f Plan),
}

/// When a run is stopped.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The longest run.
    pub total: Duration,
    /// The longest time without an event or output.
    pub idle: Duration,
}

/// The surroundings that all workers share.
pub struct Surroundings {
    core_dumps: CoreDumps,
    keeps_cores: bool,
    interruption: Interruption,
}

impl Surroundings {
    /// Receives signals from now on. With `keeps_cores`, programs write core files.
    pub fn new(keeps_cores: bool) -> Result<Surroundings, String> {
        let interruption = Interruption::watch()?;
        Ok(Surroundings { core_dumps: CoreDumps::of_system(keeps_cores), keeps_cores, interruption })
    }

    /// Whether the user wants to end.
    pub fn are_interrupted(&self) -> bool {
        self.interruption.is_requested()
    }
}

/// A daemon, which ends with its last connection, and the folder of the outputs of its runs.
pub struct Worker<'t> {
    target: &'t Target,
    surroundings: &'t Surroundings,
    daemon: String,
    connection: DaemonControl,
    libraries: OsString,
    /// How the programs can see their devices, in the order of the programs.
    views: Vec<Vec<View>>,
    folder: PathBuf,
    /// A TCP port for the programs.
    port: u16,
}

/// Reads new events of the daemon. Returns whether there are more.
fn read_events(
    events: &mut DaemonEvents,
    target: &Target,
    recording: &mut Recording,
    mut live: Option<&mut DaemonScenario<'_>>,
) -> Result<bool, String> {
    let more = events.read_new(&mut |now, names, event| {
        if let Some(live) = live.as_deref_mut() {
            live.scenario.on_event(now, names, event);
        }
        recording.add(target, names, event);
    });
    let more = more.map_err(|error| format!("cannot read the events of the daemon: {error}"))?;
    events.gap().map_or(Ok(more), Err)
}

struct Running {
    child: Child,
    status: Option<ExitStatus>,
    stdout: PathBuf,
    stderr: PathBuf,
    core: Option<CoreDump>,
}

impl Running {
    fn signal(&self, signal: Signal) {
        if self.status.is_none() {
            let _ = kill_process_group(Pid::from_child(&self.child), signal);
        }
    }

    fn output_bytes(&self) -> u64 {
        [&self.stdout, &self.stderr]
            .iter()
            .filter_map(|path| std::fs::metadata(path).ok())
            .map(|file| file.len())
            .sum()
    }

    fn has_printed(&self, text: &str) -> bool {
        [&self.stdout, &self.stderr].iter().any(|path| read_lossy(path).contains(text))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        let _ = self.child.wait();
    }
}

fn create(path: &Path) -> Result<File, String> {
    File::create(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn read_lossy(path: &Path) -> String {
    std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

impl<'t> Worker<'t> {
    /// Starts a daemon of its own.
    pub fn start(
        target: &'t Target,
        surroundings: &'t Surroundings,
        settings: &RequiredSettings,
        number: usize,
        folder: &Path,
    ) -> Result<Worker<'t>, String> {
        let daemon = format!("sweep-{}-{number}", std::process::id());
        let connection = connect(&daemon, &target.hosts(), settings)?;
        let folder = folder.join(format!("worker-{number}"));
        std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let port = free_tcp_port()?;
        let views = target.program.iter().map(|program| views(&daemon, &program.host));
        let (libraries, views) = (library_path()?, views.collect::<Result<_, _>>()?);
        Ok(Worker { target, surroundings, daemon, connection, libraries, views, folder, port })
    }

    /// The folder of the outputs of the last run.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Runs the target once.
    pub fn run(&mut self, faults: RunFaults<'_>, seed: u64, limits: Limits) -> Result<RunOutcome, String> {
        let log_path = self.folder.join("events.jsonl");
        let capture_path = self.folder.join("packets.pcapng");
        let (log, capture) = (create(&log_path)?, create(&capture_path)?);
        let (capture, log) = (Some(capture.as_fd()), Some(log.as_fd()));
        let mut events = DaemonEvents::start(&mut self.connection, capture, log, None)?;
        let mut live = None;
        let rule = match faults {
            RunFaults::None => None,
            RunFaults::One(injection) => injection.packet_rule(self.target),
            RunFaults::Scenario(plan) => {
                live = Some(DaemonScenario::load(plan, &mut self.connection, Some(&self.daemon))?);
                None
            }
        };
        if let Some(rule) = &rule {
            self.add_packet_rule(rule, seed).map_err(|error| error.to_string())?;
        }
        let is_clean = matches!(faults, RunFaults::None);
        let mut recording = Recording::new(is_clean);
        let (begin, since) = (Instant::now(), SystemTime::now() - FILE_CLOCK_LAG);
        let mut watch = Watch { begin, last: begin, seen: 0, longest_gap: Duration::ZERO };
        let mut running: Vec<Running> = Vec::new();
        let mut stopped = None;
        for index in 0..self.target.program.len() {
            let faults = self.program_faults(index, faults, seed, live.as_ref());
            running.push(self.spawn(index, &faults)?);
            while stopped.is_none() && !self.is_ready(index, &mut running)? {
                let live = live.as_mut();
                stopped = self.look(&mut running, &mut events, &mut recording, live, &mut watch, limits)?;
            }
            if stopped.is_some() || running.iter().any(|program| program.status.is_some()) {
                break;
            }
        }
        while stopped.is_none() && self.is_active(&mut running)? {
            let live = live.as_mut();
            stopped = self.look(&mut running, &mut events, &mut recording, live, &mut watch, limits)?;
        }
        let duration = begin.elapsed();
        for (program, plan) in running.iter_mut().zip(&self.target.program) {
            program.signal(match &self.surroundings.core_dumps {
                _ if plan.service => Signal::TERM,
                // The core file shows where the program hangs.
                CoreDumps::Files(_) if !is_clean => Signal::ABORT,
                _ => Signal::KILL,
            });
            let until = Instant::now() + SERVICE_END;
            while program.status.is_none() && Instant::now() < until {
                program.status = program.child.try_wait().map_err(|error| error.to_string())?;
                std::thread::sleep(Duration::from_millis(1));
            }
            program.signal(Signal::KILL);
            if program.status.is_none() {
                program.status = program.child.wait().ok();
            }
            // Before the next program ends: its core file may have the same name.
            program.core = self.core_of(program, &plan.name, since);
        }
        let ended = events.stop(&mut self.connection);
        ended.map_err(|error| format!("the recording is incomplete: {error}"))?;
        for host in self.target.hosts().iter().filter(|_| rule.is_some()) {
            self.connection.clear_rules(host).map_err(|error| error.to_string())?;
        }
        while read_events(&mut events, self.target, &mut recording, live.as_mut())? {}
        let finished = live.map(|live| live.finish(&mut self.connection)).transpose()?;
        let rules = finished.map(|outcome| outcome.rules).unwrap_or_default();
        let ends: Vec<ProgramEnd> = running
            .iter_mut()
            .map(|program| ProgramEnd {
                status: program.status,
                stdout: read_lossy(&program.stdout),
                stderr: read_lossy(&program.stderr),
                core: program.core.take(),
            })
            .collect();
        let check_failed = match (&self.target.check, &stopped) {
            (Some(check), None) => self.run_check(check)?,
            _ => None,
        };
        let longest_gap = watch.longest_gap;
        Ok(RunOutcome { ends, recording, duration, longest_gap, stopped, check_failed, rules })
    }

    /// The core dump of a program that a signal ended. A file that is kept moves to the folder of the outputs.
    fn core_of(&self, program: &Running, name: &str, since: SystemTime) -> Option<CoreDump> {
        let kept = self.folder.join(format!("{name}.core"));
        // A file of an earlier run.
        let _ = std::fs::remove_file(&kept);
        let status = program.status.filter(|status| status.signal().is_some())?;
        let (process, folder) = (program.child.id(), &self.target.folder);
        let Surroundings { core_dumps, keeps_cores, .. } = self.surroundings;
        let mut core = core_dumps.find(process, status.core_dumped(), folder, since);
        if *keeps_cores {
            core.move_to(&kept);
        }
        Some(core)
    }

    /// Installs the rule on all hosts: the flow that it selects decides where it acts.
    fn add_packet_rule(&mut self, rule: &Rule, seed: u64) -> Result<(), softhca::Error> {
        for (index, host) in self.target.hosts().iter().enumerate() {
            self.connection.assign_roles(host, seed, &flows_of_host(index))?;
            self.connection.add_rules(host, seed, &[(rule.clone(), "fault")])?;
        }
        Ok(())
    }

    fn run_check(&self, check: &[String]) -> Result<Option<String>, String> {
        let mut command = Command::new(&check[0]);
        command.args(&check[1..]).current_dir(&self.folder).stdin(Stdio::null());
        let output = command.output().map_err(|error| format!("check {:?}: {error}", check[0]))?;
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text).trim().to_owned();
        Ok((!output.status.success()).then_some(text))
    }

    /// The faults of the processes of a program, whose calls are recorded.
    fn program_faults(
        &self,
        index: usize,
        faults: RunFaults<'_>,
        seed: u64,
        live: Option<&DaemonScenario<'_>>,
    ) -> ProgramFaults {
        let program = &self.target.program[index];
        let own = match faults {
            RunFaults::None => None,
            RunFaults::One(injection) => {
                let rule = Some(injection).filter(|injection| injection.point.role == program.name);
                let faults = rule.and_then(Injection::rule).into_iter().collect();
                Some(ProgramFaults { seed, faults, ..ProgramFaults::default() })
            }
            RunFaults::Scenario(plan) => {
                let host = plan.hosts.iter().position(|host| host.name == program.host);
                host.zip(live).and_then(|(host, live)| live.scenario.program_faults(host))
            }
        };
        ProgramFaults { role: index as u32, record: true, ..own.unwrap_or_default() }
    }

    fn spawn(&self, index: usize, faults: &ProgramFaults) -> Result<Running, String> {
        let program = &self.target.program[index];
        let word = |word: &String| {
            substitute_addresses(&word.replace("${PORT}", &self.port.to_string()), &self.connection)
        };
        let words: Vec<String> = program.command.iter().map(word).collect();
        let (stdout, stderr) = (
            self.folder.join(format!("{}.stdout", program.name)),
            self.folder.join(format!("{}.stderr", program.name)),
        );
        let (out, err) = (create(&stdout)?, create(&stderr)?);
        let start = |view: &View| {
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]).current_dir(&self.target.folder).process_group(0);
            command.env("LD_LIBRARY_PATH", &self.libraries);
            command.env(NAME_VARIABLE, &self.daemon).env(HOST_VARIABLE, &program.host);
            command
                .env(FAULTS_VARIABLE, softhca_control::faults_to_text(faults))
                .envs(view.variables.clone());
            command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(err.try_clone()?);
            self.surroundings.interruption.prepare(&mut command);
            if let Some(mounts) = view.mounts.clone() {
                mounts.apply_to(&mut command);
            }
            command.spawn()
        };
        let with_view = self.views[index].iter().find_map(|view| start(view).ok());
        let child = with_view.map_or_else(|| start(&View::default()), Ok);
        let child = child.map_err(|error| format!("{}: {error}", words[0]))?;
        Ok(Running { child, status: None, stdout, stderr, core: None })
    }

    /// Whether the program that started last is ready, or no program can become ready any more.
    fn is_ready(&mut self, index: usize, running: &mut [Running]) -> Result<bool, String> {
        let program = &self.target.program[index];
        let state = &mut running[index];
        state.status = state.child.try_wait().map_err(|error| error.to_string())?;
        if state.status.is_some() {
            return Ok(true);
        }
        if let Some(text) = &program.ready
            && !state.has_printed(text)
        {
            return Ok(false);
        }
        if program.ready_tcp && !listens_on(self.port) {
            return Ok(false);
        }
        if program.ready_listen {
            return host_listens(&mut self.connection, &program.host);
        }
        Ok(true)
    }

    fn is_active(&self, running: &mut [Running]) -> Result<bool, String> {
        let mut active = false;
        for (program, plan) in running.iter_mut().zip(&self.target.program) {
            if program.status.is_none() {
                program.status = program.child.try_wait().map_err(|error| error.to_string())?;
            }
            active |= program.status.is_none() && !plan.service;
        }
        Ok(active)
    }

    /// Waits a moment and reads the events. Returns why the run must be stopped, if it must.
    fn look(
        &mut self,
        running: &mut [Running],
        events: &mut DaemonEvents,
        recording: &mut Recording,
        mut live: Option<&mut DaemonScenario<'_>>,
        watch: &mut Watch,
        limits: Limits,
    ) -> Result<Option<(String, Vec<usize>)>, String> {
        events.wait(POLL_INTERVAL);
        if self.surroundings.are_interrupted() {
            return Err("interrupted".into());
        }
        read_events(events, self.target, recording, live.as_deref_mut())?;
        if let Some(live) = live {
            let pid = |program: &Running| program.status.is_none().then(|| Pid::from_child(&program.child));
            let host = |name: &str| live.plan().hosts.iter().position(|host| host.name == name);
            let programs = running.iter().zip(&self.target.program);
            let programs = programs.filter_map(|(program, plan)| Some((host(&plan.host)?, pid(program)?)));
            let programs = programs.collect();
            live.run_due_actions(&mut self.connection, &programs, events);
        }
        let now = Instant::now();
        let ended = running.iter().filter(|program| program.status.is_some()).count() as u64;
        let seen = events.count() + ended + running.iter().map(Running::output_bytes).sum::<u64>();
        if seen != watch.seen {
            watch.longest_gap = watch.longest_gap.max(now - watch.last);
            (watch.seen, watch.last) = (seen, now);
        }
        let why = if recording.fired > MAX_FIRINGS {
            format!("the program met the fault {} times: it retries without end", recording.fired)
        } else if events.count() > MAX_EVENTS {
            "the program calls verbs without end".to_owned()
        } else if now - watch.last > limits.idle && !self.has_pending_timer()? {
            format!("no call, packet, completion, output or timer for {} s", limits.idle.as_secs_f32())
        } else if now - watch.begin > limits.total {
            format!("it did not end within {} s", limits.total.as_secs_f32())
        } else {
            return Ok(None);
        };
        let waiting = (0..running.len())
            .filter(|index| running[*index].status.is_none() && !self.target.program[*index].service)
            .collect();
        Ok(Some((why, waiting)))
    }
}

impl Worker<'_> {
    /// Whether a device waits for a time to pass, after which the programs may go on.
    fn has_pending_timer(&mut self) -> Result<bool, String> {
        let status = self.connection.status().map_err(|error| error.to_string())?;
        Ok(status.hosts.iter().any(|host| host.has_pending_timer))
    }
}

struct Watch {
    begin: Instant,
    last: Instant,
    seen: u64,
    longest_gap: Duration,
}
