//! The programs of a scenario: each on its host of a dedicated daemon, with the faults of the scenario.

use super::daemon::{self, DaemonRequirements};
use super::event_log::{DaemonEventLog, LOG_POLL_INTERVAL};
use super::live_scenario::{self, DaemonScenario, RequiredSettings, read_events};
use super::{library, program};
use rustix::fs::MemfdFlags;
use rustix::process::Pid;
use softhca::fault::{FAULTS_VARIABLE, ProgramFaults};
use softhca::{DaemonControl, HOST_VARIABLE, NAME_VARIABLE};
use softhca_scenarios::plan::CommandPlan;
use softhca_scenarios::{Outcome, Plan};
use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How often programs are checked for their exit.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// The number of lines of a program's output that are reported.
const LAST_LINES: usize = 4;

/// Runs a plan that starts programs.
pub fn run_programs(plan: &Plan) -> Outcome {
    try_run_programs(plan).unwrap_or_else(Outcome::failed_to_run)
}

/// A running program and its output.
struct RunningProgram {
    command: usize,
    child: Child,
    output: File,
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn try_run_programs(plan: &Plan) -> Result<Outcome, String> {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let name = format!("run-{}-{}", std::process::id(), SERIAL.fetch_add(1, Ordering::Relaxed));
    let folder = library::library_folder()?;
    let RequiredSettings { hosts, cards, recovery } =
        live_scenario::required_settings(plan, RequiredSettings::default())?;
    let requirements =
        DaemonRequirements { name: Some(&name), hosts: &hosts, cards, recovery, ..Default::default() };
    let mut connection = daemon::connect_or_start(&requirements, daemon::DaemonLifetime::WhileUsed)?;
    let mut events = DaemonEventLog::create(None)
        .map_err(|error| format!("cannot allocate memory for the event log: {error}"))?;
    events.start(&mut connection, None)?;
    let mut live = DaemonScenario::load(plan, &mut connection, Some(&name))?;
    let started = Instant::now();
    let timeout = Duration::from_nanos(plan.program_timeout_ns());
    let mut waiting: Vec<usize> = (0..plan.commands.len()).collect();
    let mut running: Vec<RunningProgram> = Vec::new();
    let mut log_read = Instant::now();
    while (!waiting.is_empty() || !running.is_empty()) && started.elapsed() < timeout {
        let due = |index: &usize| Duration::from_nanos(plan.commands[*index].at_ns) <= started.elapsed();
        for index in waiting.extract_if(.., |index| due(index)) {
            let faults = live.scenario.program_faults(plan.commands[index].host);
            running.push(start_program(plan, index, &name, &folder, &connection, faults)?);
        }
        for index in (0..running.len()).rev() {
            let ended = running[index].child.try_wait().map_err(|error| error.to_string())?;
            if let Some(status) = ended {
                let mut ended = running.remove(index);
                if live.take_restart(plan.commands[ended.command].host) {
                    waiting.push(ended.command);
                    continue;
                }
                live.scenario.on_exit(
                    ended.command,
                    program::shell_exit_code(status).into(),
                    output_tail(&mut ended.output),
                );
            }
        }
        let host_of =
            |program: &RunningProgram| (plan.commands[program.command].host, Pid::from_child(&program.child));
        let programs = running.iter().map(host_of).collect();
        let due = live.run_due_actions(&mut connection, &programs, Some(&mut events));
        if log_read.elapsed() > due.unwrap_or(LOG_POLL_INTERVAL).min(LOG_POLL_INTERVAL) {
            log_read = Instant::now();
            read_events(&mut events, Some(&mut live), false);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    drop(running);
    if !live.is_daemon_gone() {
        connection.stop_recording().map_err(|error| format!("the event log is incomplete: {error}"))?;
    }
    read_events(&mut events, Some(&mut live), false);
    let outcome = live.finish(&mut connection)?;
    // The daemon would exit when idle; stop it now so that no other process connects to it.
    let _ = connection.stop();
    Ok(outcome)
}

/// Starts a program of the plan.
fn start_program(
    plan: &Plan,
    index: usize,
    daemon: &str,
    folder: &Path,
    connection: &DaemonControl,
    faults: Option<ProgramFaults>,
) -> Result<RunningProgram, String> {
    let CommandPlan { argv, host, .. } = &plan.commands[index];
    let host = &plan.hosts[*host].name;
    let argv: Vec<OsString> = argv.iter().map(|word| substitute_addresses(word, connection).into()).collect();
    let path = program::find(&argv[0]).map_err(|error| error.message)?;
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let output = rustix::fs::memfd_create("softhca-output", MemfdFlags::CLOEXEC);
    let output = File::from(output.map_err(|error| failed(error.into()))?);
    let mut command = Command::new(&path);
    command.args(&argv[1..]).env("LD_LIBRARY_PATH", library::search_path(folder));
    command.env(NAME_VARIABLE, daemon).env(HOST_VARIABLE, host);
    command.envs(faults.map(|faults| (FAULTS_VARIABLE, softhca_control::faults_to_text(&faults))));
    command.stdin(Stdio::null());
    command.stdout(output.try_clone().map_err(failed)?).stderr(output.try_clone().map_err(failed)?);
    let child = command.spawn().map_err(failed)?;
    Ok(RunningProgram { command: index, child, output })
}

/// Replaces `${ADDRESS_alice}` with the address of alice.
pub fn substitute_addresses(word: &str, connection: &DaemonControl) -> String {
    let mut text = word.to_owned();
    for host in connection.hosts() {
        text = text.replace(&format!("${{ADDRESS_{}}}", host.name), &host.address.to_string());
    }
    text
}

/// The last lines of a program's output.
fn output_tail(output: &mut File) -> String {
    let mut text = Vec::new();
    let _ = output.rewind().and_then(|()| output.read_to_end(&mut text));
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].join(" / ")
}
