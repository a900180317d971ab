//! The programs of a scenario: each on its host of a dedicated daemon, with the faults of the scenario.

use super::daemon::{self, DaemonRequirements};
use super::events::DaemonEvents;
use super::live_scenario::{self, DaemonScenario, RequiredSettings, read_events};
use super::readiness::{self, host_listens, listens_on};
use super::{CALL_SITES_VARIABLE, library, program};
use crate::output::ScratchFolder;
use rustix::fs::MemfdFlags;
use rustix::process::Pid;
use softhca::fault::{FAULTS_VARIABLE, ProgramFaults};
use softhca::{DaemonControl, HOST_VARIABLE, NAME_VARIABLE};
use softhca_scenarios::live::ProgramEnd;
use softhca_scenarios::plan::{CommandPlan, ReadyPlan};
use softhca_scenarios::quantity::Time;
use softhca_scenarios::{Artifacts, Outcome, Plan, Recording, Verdict};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How often programs are checked for their exit.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// The number of lines of a program's output that are reported.
const LAST_LINES: usize = 4;
/// The output of a program is kept in memory. One that prints more is killed.
const MAX_OUTPUT_BYTES: u64 = 64 << 20;
/// The time in which the other programs can end by themselves after one has failed.
const TIME_AFTER_FAILURE: Duration = Duration::from_secs(2);

/// Runs a plan that starts programs. A failed run keeps its event log and the outputs; with `Recording::Everything`,
/// every run keeps them and its packets.
pub fn run_programs(plan: &Plan, recording: Recording) -> Outcome {
    try_run_programs(plan, recording).unwrap_or_else(Outcome::failed_to_run)
}

/// A running program and its output.
struct RunningProgram {
    command: usize,
    child: Child,
    started: Instant,
    output: File,
    /// The bytes of the output in which the text of `ready` was looked for, and whether it was found.
    searched: u64,
    has_printed: bool,
    /// Whether the programs after it can start.
    is_ready: bool,
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl RunningProgram {
    /// Looks for the text of `ready` in the new output.
    fn look_for(&mut self, ready: &str) -> std::io::Result<()> {
        let length = self.output.metadata()?.len();
        if self.has_printed || length == self.searched {
            return Ok(());
        }
        // The text may have begun in the part before.
        let start = self.searched.saturating_sub(ready.len() as u64);
        let mut bytes = vec![0; (length - start) as usize];
        // The program writes at the position of the file: a read must not move it.
        self.output.read_exact_at(&mut bytes, start)?;
        self.has_printed = bytes.windows(ready.len()).any(|window| window == ready.as_bytes());
        self.searched = length;
        Ok(())
    }

    /// The conditions that the next programs still wait for.
    fn missing(
        &mut self,
        plan: &Plan,
        port: u16,
        connection: &mut DaemonControl,
    ) -> Result<Option<String>, String> {
        let CommandPlan { ready, host, .. } = &plan.commands[self.command];
        if let Some(text) = &ready.output {
            self.look_for(text).map_err(|error| error.to_string())?;
            if !self.has_printed {
                let buffers = "many programs print only full buffers into a file";
                return Ok(Some(format!(
                    "had not printed {text:?} ({buffers}: ready-tcp or ready-listen do not need its output)"
                )));
            }
        }
        if ready.tcp && !listens_on(port) {
            return Ok(Some(format!("did not listen on TCP port {port}")));
        }
        let host = &plan.hosts[*host].name;
        // A daemon that a fault killed has no listener.
        if ready.listen && !host_listens(connection, host).unwrap_or(false) {
            return Ok(Some("did not listen for connections of the connection manager".into()));
        }
        Ok(None)
    }

    /// Why the program must not go on.
    fn reason_to_stop(&self, plan: &CommandPlan) -> Option<String> {
        let limit = Duration::from_nanos(plan.timeout_ns.unwrap_or(u64::MAX));
        if self.started.elapsed() >= limit {
            return Some(format!("it did not end within {}", Time(limit.as_nanos() as u64)));
        }
        let is_long = self.output.metadata().is_ok_and(|output| output.len() > MAX_OUTPUT_BYTES);
        is_long.then(|| format!("it printed more than {} MiB", MAX_OUTPUT_BYTES >> 20))
    }
}

/// The programs of a run.
struct Programs<'p> {
    plan: &'p Plan,
    waiting: Vec<usize>,
    running: Vec<RunningProgram>,
    /// The TCP port that `${PORT}` stands for.
    port: u16,
    /// The conditions of the waiting programs.
    missing: Option<String>,
    /// The outputs of the programs that ended.
    outputs: BTreeMap<usize, Vec<u8>>,
    /// When a program failed first, and its name.
    failed: Option<(Instant, &'p str)>,
}

impl<'p> Programs<'p> {
    fn name(&self, command: usize) -> &'p str {
        &self.plan.workloads[self.plan.commands[command].workload]
    }

    /// Whether the programs before this one in the file are ready.
    fn can_start(&self, command: usize) -> bool {
        let is_ready = |earlier: usize| {
            let mut running = self.running.iter().filter(|program| program.command == earlier);
            let ReadyPlan { output, tcp, listen } = &self.plan.commands[earlier].ready;
            (output.is_none() && !tcp && !listen)
                || (!self.waiting.contains(&earlier) && running.all(|program| program.is_ready))
        };
        (0..command).all(is_ready)
    }

    /// Notes the ends of programs, and kills those that must not go on.
    fn check(&mut self, live: &mut DaemonScenario<'_>, connection: &mut DaemonControl) -> Result<(), String> {
        self.missing = None;
        for index in (0..self.running.len()).rev() {
            let program = &mut self.running[index];
            let plan = &self.plan.commands[program.command];
            if !program.is_ready && !self.waiting.is_empty() {
                let missing = program.missing(self.plan, self.port, connection)?;
                program.is_ready = missing.is_none();
                let name = &self.plan.workloads[plan.workload];
                self.missing = missing.map(|what| format!("{name:?} {what}")).or(self.missing.take());
            }
            let status = program.child.try_wait().map_err(|error| error.to_string())?;
            let stopped = match status {
                Some(_) => None,
                None => program.reason_to_stop(plan),
            };
            if status.is_none() && stopped.is_none() {
                continue;
            }
            let mut ended = self.running.remove(index);
            let command = ended.command;
            if stopped.is_none() && live.take_restart(plan.host) {
                self.waiting.push(command);
                continue;
            }
            let output = read_output(&mut ended.output);
            let end = match (status, stopped) {
                (Some(status), _) => {
                    ProgramEnd::Exited(program::shell_exit_code(status).into(), last_lines(&output))
                }
                (None, why) => ProgramEnd::Stopped(why.unwrap_or_default()),
            };
            self.outputs.insert(command, output);
            if !live.scenario.on_end(command, end) {
                let name = self.name(command);
                self.failed.get_or_insert((Instant::now(), name));
            }
        }
        Ok(())
    }

    /// Ends all programs.
    fn stop(&mut self, live: &mut DaemonScenario<'_>) {
        let failed = self.failed.map(|(_, name)| name);
        for mut program in std::mem::take(&mut self.running) {
            let _ = program.child.kill();
            let _ = program.child.wait();
            let output = read_output(&mut program.output);
            self.outputs.insert(program.command, output);
            if let Some(name) = failed {
                let why = format!("it was stopped, because {name:?} had failed");
                live.scenario.on_end(program.command, ProgramEnd::Stopped(why));
            }
        }
        for command in std::mem::take(&mut self.waiting) {
            let why = match failed {
                Some(name) => format!("it did not start, because {name:?} had failed"),
                None => match &self.missing {
                    Some(missing) => format!("it did not start within the time of the run: {missing}"),
                    None => "it did not start within the time of the run".into(),
                },
            };
            live.scenario.on_end(command, ProgramEnd::Stopped(why));
        }
    }

    fn has_ended(&self) -> bool {
        match self.failed {
            Some((at, _)) => self.running.is_empty() || at.elapsed() >= TIME_AFTER_FAILURE,
            None => self.waiting.is_empty() && self.running.is_empty(),
        }
    }
}

/// The files into which the daemon records the run.
struct RecordingFiles {
    events: File,
    packets: Option<File>,
    _folder: ScratchFolder,
}

impl RecordingFiles {
    fn create(recording: Recording) -> Result<RecordingFiles, String> {
        let folder = ScratchFolder::new("softhca-run-")?;
        let create = |name| {
            let path = folder.0.join(name);
            let mut options = File::options();
            let file = options.read(true).write(true).create_new(true).open(&path);
            file.map_err(|error| format!("{}: {error}", path.display()))
        };
        let events = create("events.jsonl")?;
        let packets = (recording != Recording::Digest).then(|| create("capture.pcapng")).transpose()?;
        Ok(RecordingFiles { events, packets, _folder: folder })
    }

    /// The files that a run keeps.
    fn artifacts(mut self, outputs: Vec<(String, Vec<u8>)>) -> Artifacts {
        let events = read_output(&mut self.events);
        let capture = self.packets.as_mut().map(read_output).unwrap_or_default();
        Artifacts { events, capture, ladders: Vec::new(), outputs }
    }
}

fn try_run_programs(plan: &Plan, recording: Recording) -> Result<Outcome, String> {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let name = format!("run-{}-{}", std::process::id(), SERIAL.fetch_add(1, Ordering::Relaxed));
    let folder = library::library_folder()?;
    let RequiredSettings { hosts, cards, profile, recovery } =
        live_scenario::required_settings(plan, RequiredSettings::default())?;
    let requirements = DaemonRequirements {
        name: Some(&name),
        hosts: &hosts,
        cards,
        profile,
        recovery,
        ..Default::default()
    };
    let mut connection = daemon::connect_or_start(&requirements, daemon::DaemonLifetime::WhileUsed)?;
    let files = RecordingFiles::create(recording)?;
    let (packets, log) = (files.packets.as_ref().map(AsFd::as_fd), files.events.as_fd());
    let mut events = DaemonEvents::start(&mut connection, packets, Some(log), None)?;
    let mut live = DaemonScenario::load(plan, &mut connection, Some(&name))?;
    let started = Instant::now();
    let timeout = Duration::from_nanos(plan.program_timeout_ns());
    let (running, outputs) = (Vec::new(), BTreeMap::new());
    let waiting = (0..plan.commands.len()).collect();
    let port = readiness::free_tcp_port()?;
    let mut programs = Programs { plan, waiting, running, port, missing: None, outputs, failed: None };
    while !programs.has_ended() && started.elapsed() < timeout {
        for index in programs.waiting.clone() {
            let is_due = Duration::from_nanos(plan.commands[index].at_ns) <= started.elapsed();
            if is_due && programs.failed.is_none() && programs.can_start(index) {
                programs.waiting.retain(|other| *other != index);
                let faults = live.scenario.program_faults(plan.commands[index].host);
                let words = plan.commands[index].argv.iter();
                let words = words.map(|word| word.replace("${PORT}", &port.to_string()));
                let words = words.map(|word| substitute_addresses(&word, &connection).into()).collect();
                programs.running.push(start_program(plan, index, words, &name, &folder, faults)?);
            }
        }
        programs.check(&mut live, &mut connection)?;
        let host_of =
            |program: &RunningProgram| (plan.commands[program.command].host, Pid::from_child(&program.child));
        let of_hosts = programs.running.iter().map(host_of).collect();
        let due = live.run_due_actions(&mut connection, &of_hosts, &mut events);
        if !read_events(&mut events, Some(&mut live)) {
            events.wait(due.unwrap_or(POLL_INTERVAL).min(POLL_INTERVAL));
        }
    }
    programs.stop(&mut live);
    if !live.is_daemon_gone() {
        events.stop(&mut connection).map_err(|error| format!("the event log is incomplete: {error}"))?;
    }
    while read_events(&mut events, Some(&mut live)) {}
    let mut outcome = live.finish(&mut connection)?;
    // The daemon would exit when idle; stop it now so that no other process connects to it.
    let _ = connection.stop();
    if recording != Recording::Digest || outcome.verdict != Verdict::Pass {
        let outputs = std::mem::take(&mut programs.outputs).into_iter();
        let outputs = outputs.map(|(command, output)| (programs.name(command).to_owned(), output));
        outcome.artifacts = Some(files.artifacts(outputs.collect()));
    }
    Ok(outcome)
}

/// Starts a program of the plan.
fn start_program(
    plan: &Plan,
    index: usize,
    argv: Vec<OsString>,
    daemon: &str,
    folder: &Path,
    faults: Option<ProgramFaults>,
) -> Result<RunningProgram, String> {
    let host = &plan.hosts[plan.commands[index].host].name;
    let path = program::find(&argv[0]).map_err(|error| error.message)?;
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let output = rustix::fs::memfd_create("softhca-output", MemfdFlags::CLOEXEC);
    let output = File::from(output.map_err(|error| failed(error.into()))?);
    let mut command = Command::new(&path);
    command.args(&argv[1..]).env("LD_LIBRARY_PATH", library::search_path(folder));
    command.env(NAME_VARIABLE, daemon).env(HOST_VARIABLE, host).env(CALL_SITES_VARIABLE, "1");
    command.envs(faults.map(|faults| (FAULTS_VARIABLE, softhca_control::faults_to_text(&faults))));
    command.stdin(Stdio::null());
    command.stdout(output.try_clone().map_err(failed)?).stderr(output.try_clone().map_err(failed)?);
    let child = command.spawn().map_err(failed)?;
    let started = Instant::now();
    Ok(RunningProgram {
        command: index,
        child,
        started,
        output,
        searched: 0,
        has_printed: false,
        is_ready: false,
    })
}

/// Replaces `${ADDRESS_alice}` with the address of alice.
pub fn substitute_addresses(word: &str, connection: &DaemonControl) -> String {
    let mut text = word.to_owned();
    for host in connection.hosts() {
        text = text.replace(&format!("${{ADDRESS_{}}}", host.name), &host.address.to_string());
    }
    text
}

fn read_output(output: &mut File) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = output.rewind().and_then(|()| output.read_to_end(&mut bytes));
    bytes
}

/// The last lines of a program's output.
fn last_lines(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].join(" / ")
}
