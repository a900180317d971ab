//! The programs of a scenario: each on its host, on a daemon of the run's own, under the faults of the file.

use super::daemon::{self, Wanted};
use super::events::Events;
use super::stage::{self, Stage};
use super::{LOOK, library, listen, program};
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
const PATIENCE: Duration = Duration::from_secs(120);
/// How often it is looked whether a program ended.
const GLANCE: Duration = Duration::from_millis(10);
/// So many of the last lines of a program are told.
const LAST_LINES: usize = 4;

/// Carries a plan out that starts programs.
pub fn perform(plan: &Plan) -> Outcome {
    carry_out(plan).unwrap_or_else(Outcome::broken)
}

/// A program that runs, and what it says.
struct Started {
    command: usize,
    child: Child,
    output: File,
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn carry_out(plan: &Plan) -> Result<Outcome, String> {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let name = format!("run-{}-{}", std::process::id(), SERIAL.fetch_add(1, Ordering::Relaxed));
    let folder = library::folder()?;
    let (hosts, recovery) = stage::wishes(plan, None)?;
    let wanted = Wanted { name: Some(&name), host: None, hosts: &hosts, recovery, loopback: None };
    let mut connection = daemon::connect_or_start(&wanted, daemon::Stay::WhileUsed)?;
    let mut events = Events::create(None).map_err(|error| format!("no memory for an event log: {error}"))?;
    events.begin(&mut connection, None)?;
    let mut stage = Stage::load(plan, &mut connection)?;
    let started = Instant::now();
    let patience = plan.ends_ns.map_or(PATIENCE, Duration::from_nanos);
    let mut waiting: Vec<usize> = (0..plan.commands.len()).collect();
    let mut running: Vec<Started> = Vec::new();
    let mut looked = Instant::now();
    while (!waiting.is_empty() || !running.is_empty()) && started.elapsed() < patience {
        let due = |index: &usize| Duration::from_nanos(plan.commands[*index].at_ns) <= started.elapsed();
        for index in waiting.extract_if(.., |index| due(index)) {
            running.push(start(plan, index, &name, &folder, &connection)?);
        }
        for index in (0..running.len()).rev() {
            let ended = running[index].child.try_wait().map_err(|error| error.to_string())?;
            if let Some(status) = ended {
                let mut ended = running.remove(index);
                stage.exited(ended.command, program::code(status).into(), last_words(&mut ended.output));
            }
        }
        stage.act(&mut connection);
        if looked.elapsed() > LOOK {
            looked = Instant::now();
            listen(&mut events, Some(&mut stage), false);
        }
        std::thread::sleep(GLANCE);
    }
    drop(running);
    connection.end_records().map_err(|error| format!("the event log is not complete: {error}"))?;
    listen(&mut events, Some(&mut stage), false);
    let outcome = stage.finish(&mut connection)?;
    // It would leave by itself; nobody is to meet it meanwhile.
    let _ = connection.stop();
    Ok(outcome)
}

/// Starts a program of the plan.
fn start(
    plan: &Plan,
    index: usize,
    daemon: &str,
    folder: &Path,
    connection: &DaemonControl,
) -> Result<Started, String> {
    let CommandPlan { words, host, .. } = &plan.commands[index];
    let host = &plan.hosts[*host].name;
    let words: Vec<OsString> = words.iter().map(|word| with_addresses(word, connection).into()).collect();
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
    Ok(Started { command: index, child, output })
}

/// `${ADDRESS_alice}` is the address of alice.
fn with_addresses(word: &str, connection: &DaemonControl) -> String {
    let mut text = word.to_owned();
    for host in connection.hosts() {
        text = text.replace(&format!("${{ADDRESS_{}}}", host.name), &host.address.to_string());
    }
    text
}

/// The end of what a program said.
fn last_words(output: &mut File) -> String {
    let mut said = Vec::new();
    let _ = output.rewind().and_then(|()| output.read_to_end(&mut said));
    let said = String::from_utf8_lossy(&said);
    let lines: Vec<&str> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].join(" / ")
}
