//! The programs of a scenario: each on its host, on a daemon of the run's own, under the faults of the file.

use super::daemon::{self, DaemonRequirements};
use super::event_log::DaemonEventLog;
use super::live_scenario::{self, DaemonScenario};
use super::{LOG_POLL_INTERVAL, library, program, read_events};
use rustix::fs::MemfdFlags;
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

/// Programs that have not ended by then have got stuck, unless the file says when the run ends.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(120);
/// How often it is looked whether a program ended.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// So many of the last lines of a program are told.
const LAST_LINES: usize = 4;

/// Carries a plan out that starts programs.
pub fn run_programs(plan: &Plan) -> Outcome {
    try_run_programs(plan).unwrap_or_else(Outcome::failed_to_run)
}

/// A program that runs, and what it says.
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
    let (hosts, recovery) = live_scenario::required_settings(plan, None)?;
    let wanted =
        DaemonRequirements { name: Some(&name), host: None, hosts: &hosts, recovery, loopback: None };
    let mut connection = daemon::connect_or_start(&wanted, daemon::DaemonLifetime::WhileUsed)?;
    let mut events =
        DaemonEventLog::create(None).map_err(|error| format!("no memory for an event log: {error}"))?;
    events.start(&mut connection, None)?;
    let mut stage = DaemonScenario::load(plan, &mut connection)?;
    let started = Instant::now();
    let patience = plan.duration_ns.map_or(PROGRAM_TIMEOUT, Duration::from_nanos);
    let mut waiting: Vec<usize> = (0..plan.commands.len()).collect();
    let mut running: Vec<RunningProgram> = Vec::new();
    let mut looked = Instant::now();
    while (!waiting.is_empty() || !running.is_empty()) && started.elapsed() < patience {
        let due = |index: &usize| Duration::from_nanos(plan.commands[*index].at_ns) <= started.elapsed();
        for index in waiting.extract_if(.., |index| due(index)) {
            running.push(start_program(plan, index, &name, &folder, &connection)?);
        }
        for index in (0..running.len()).rev() {
            let ended = running[index].child.try_wait().map_err(|error| error.to_string())?;
            if let Some(status) = ended {
                let mut ended = running.remove(index);
                stage.on_exit(
                    ended.command,
                    program::exit_code(status).into(),
                    output_tail(&mut ended.output),
                );
            }
        }
        stage.run_due_actions(&mut connection);
        if looked.elapsed() > LOG_POLL_INTERVAL {
            looked = Instant::now();
            read_events(&mut events, Some(&mut stage), false);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    drop(running);
    connection.stop_recording().map_err(|error| format!("the event log is not complete: {error}"))?;
    read_events(&mut events, Some(&mut stage), false);
    let outcome = stage.finish(&mut connection)?;
    // It would leave by itself; nobody is to meet it meanwhile.
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
) -> Result<RunningProgram, String> {
    let CommandPlan { argv: words, host, .. } = &plan.commands[index];
    let host = &plan.hosts[*host].name;
    let words: Vec<OsString> =
        words.iter().map(|word| substitute_addresses(word, connection).into()).collect();
    let path = program::find(&words[0]).map_err(|refusal| refusal.message)?;
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let output = rustix::fs::memfd_create("softhca-output", MemfdFlags::CLOEXEC);
    let output = File::from(output.map_err(|error| failed(error.into()))?);
    let mut command = Command::new(&path);
    command.args(&words[1..]).env("LD_LIBRARY_PATH", super::library_path(folder));
    command.env(NAME_VARIABLE, daemon).env(HOST_VARIABLE, host);
    command.stdin(Stdio::null());
    command.stdout(output.try_clone().map_err(failed)?).stderr(output.try_clone().map_err(failed)?);
    let child = command.spawn().map_err(failed)?;
    Ok(RunningProgram { command: index, child, output })
}

/// `${ADDRESS_alice}` is the address of alice.
fn substitute_addresses(word: &str, connection: &DaemonControl) -> String {
    let mut text = word.to_owned();
    for host in connection.hosts() {
        text = text.replace(&format!("${{ADDRESS_{}}}", host.name), &host.address.to_string());
    }
    text
}

/// The end of what a program said.
fn output_tail(output: &mut File) -> String {
    let mut said = Vec::new();
    let _ = output.rewind().and_then(|()| output.read_to_end(&mut said));
    let said = String::from_utf8_lossy(&said);
    let lines: Vec<&str> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].join(" / ")
}
