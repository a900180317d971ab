//! `softhca exec` and `softhca env`: unmodified programs on an emulated host.
//!
//! Exit codes are those of env(1): the program's own, 125 if we failed, 126 if the program cannot be run and 127
//! if it is not there.

mod daemon;
mod event_log;
mod library;
mod live_scenario;
mod program;
mod scenario_programs;
mod sysfs;

pub use scenario_programs::run_programs;

use crate::output;
use clap::Args;
use daemon::DaemonRequirements;
use event_log::DaemonEventLog;
use live_scenario::DaemonScenario;
use program::ExecError;
use softhca::{DaemonControl, HOST_VARIABLE, NAME_VARIABLE};
use softhca_daemon::MountNamespace;
use softhca_queue::control::RuntimeDir;
use softhca_scenarios::live::LiveScenario;
use softhca_scenarios::{ParameterValues, Verdict};
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Our own failure.
const EXIT_EXEC_FAILED: u8 = 125;

/// On which daemon, host and how.
#[derive(Args)]
struct DaemonOptions {
    /// The host that the program runs on; without one, the daemon's first
    #[arg(long, value_name = "NAME")]
    host: Option<String>,
    /// What a lost packet does: fatal, go-back-n or go-back-0
    #[arg(long, value_name = "MODE", value_parser = crate::daemon::parse_recovery)]
    recovery: Option<softhca::Recovery>,
    /// Where goes what a host sends to itself: socket, or card, which is faster and does not show in tcpdump
    #[arg(long, value_name = "WAY", value_parser = crate::daemon::parse_loopback)]
    loopback: Option<softhca::Loopback>,
    /// The daemon's name, for users with several
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
}

/// What `softhca exec` takes.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    daemon: DaemonOptions,
    /// A scenario file: its faults happen to the program, and its expectations are judged at the end
    #[arg(long, value_name = "FILE")]
    scenario: Option<PathBuf>,
    /// Write the packets of the daemon's cards to a pcapng file until the program ends
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
    /// Write the events of the daemon's cards to a file until the program ends, for `softhca why`
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Explain at the end why work requests failed, if some did; --scenario, --log and --lint do so too
    #[arg(long)]
    why: bool,
    /// Warn of pitfalls of verbs programming as the program meets them
    #[arg(long)]
    lint: bool,
    /// Leave /sys/class and /dev as they are: programs that look there for RDMA devices find none
    #[arg(long)]
    no_view: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// What `softhca env` takes.
#[derive(Args)]
pub struct EnvArguments {
    #[command(flatten)]
    daemon: DaemonOptions,
    /// Leave it to others to start the daemon
    #[arg(long)]
    no_start: bool,
}

impl DaemonOptions {
    fn requirements(&self) -> DaemonRequirements<'_> {
        let (name, host) = (self.name.as_deref(), self.host.as_deref());
        DaemonRequirements { name, host, hosts: &[], recovery: self.recovery, loopback: self.loopback }
    }

    /// The variables that a program needs, with the libraries in `folder`.
    fn environment(&self, folder: &Path) -> Vec<(&'static str, OsString)> {
        let mut variables = vec![("LD_LIBRARY_PATH", library_path(folder))];
        variables.extend(self.name.as_ref().map(|name| (NAME_VARIABLE, name.into())));
        variables.extend(self.host.as_ref().map(|host| (HOST_VARIABLE, host.into())));
        variables
    }
}

/// Where a program looks for libraries: in `folder`, and where it would have.
fn library_path(folder: &Path) -> OsString {
    let mut path = OsString::from(folder);
    if let Some(others) = std::env::var_os("LD_LIBRARY_PATH").filter(|others| !others.is_empty()) {
        path.push(":");
        path.push(others);
    }
    path
}

impl DaemonOptions {
    /// What the program is to see of its host's card in `/sys` and `/dev`. It is an extra: a card that cannot be
    /// opened now says so to the program.
    fn sysfs_view(&self, connection: &DaemonControl) -> Option<MountNamespace> {
        let chosen = self.host.clone().or_else(|| std::env::var(HOST_VARIABLE).ok());
        let host = chosen.or_else(|| connection.hosts().first().map(|card| card.name.clone()))?;
        sysfs::SysfsDevice::query(self.name.as_deref(), &host).ok()?.build_view(&view_folder().ok()?).ok()
    }
}

/// The folder that views are put together in.
fn view_folder() -> std::io::Result<PathBuf> {
    let folder = RuntimeDir::for_user();
    folder.create()?;
    let place = folder.path().join("view");
    std::fs::create_dir_all(&place)?;
    Ok(place)
}

/// Whether programs see the card in `/sys` and `/dev` on this machine, or why not.
pub fn check_view_allowed() -> std::io::Result<()> {
    sysfs::check_allowed(&view_folder()?)
}

fn report_failure(message: &str) -> ExitCode {
    eprintln!("softhca: {message}");
    ExitCode::from(EXIT_EXEC_FAILED)
}

/// Runs `softhca exec`.
pub fn run(arguments: &Arguments) -> ExitCode {
    match execute(arguments) {
        Ok(code) => ExitCode::from(code),
        Err(refusal) => {
            eprintln!("softhca: {}", refusal.message);
            ExitCode::from(refusal.code)
        }
    }
}

fn exec_error(message: String) -> ExecError {
    ExecError { code: EXIT_EXEC_FAILED, message }
}

/// Finds everything that the program needs, runs it, and tells what there is to be told. Everything of our own goes
/// to standard error: the output is the program's.
fn execute(arguments: &Arguments) -> Result<u8, ExecError> {
    let first = arguments.program[0].to_string_lossy();
    if first.starts_with('-') {
        return Err(exec_error(format!(
            "{first} is no option of `softhca exec`; `softhca exec --help` lists them"
        )));
    }
    let scenario = match &arguments.scenario {
        Some(path) => Some(crate::run::read_scenario(path).map_err(exec_error)?),
        None => None,
    };
    let plan = match &scenario {
        Some(scenario) => {
            let plan = scenario
                .plan(&ParameterValues::new(), scenario.seed)
                .map_err(|problem| exec_error(problem.to_string()))?;
            if !plan.commands.is_empty() {
                let advice = "`softhca run --on udp` starts them";
                return Err(exec_error(format!(
                    "{}: the file has programs of its own: {advice}",
                    scenario.name()
                )));
            }
            Some(plan)
        }
        None => None,
    };
    let path = program::find(&arguments.program[0])?;
    let folder = library::library_folder().map_err(exec_error)?;
    let mut wanted = arguments.daemon.requirements();
    let wishes = match &plan {
        Some(plan) => live_scenario::required_settings(plan, wanted.recovery).map_err(exec_error)?,
        None => (Vec::new(), wanted.recovery),
    };
    (wanted.hosts, wanted.recovery) = (&wishes.0, wishes.1);
    // The connection keeps a daemon that was started for programs from leaving before the program is done.
    let mut connection =
        daemon::connect_or_start(&wanted, daemon::DaemonLifetime::WhileUsed).map_err(exec_error)?;
    let mut events = start_recording(&mut connection, arguments).map_err(exec_error)?;
    let mut stage = match &plan {
        Some(plan) => Some(DaemonScenario::load(plan, &mut connection).map_err(exec_error)?),
        None => None,
    };
    let variables = arguments.daemon.environment(&folder);
    let view = if arguments.no_view { None } else { arguments.daemon.sysfs_view(&connection) };
    let code = program::run(&path, &arguments.program, &variables, view, &mut || {
        let next = stage.as_mut().and_then(|stage| stage.run_due_actions(&mut connection));
        let Some(events) = &mut events else { return next };
        read_events(events, stage.as_mut(), arguments.lint);
        Some(next.unwrap_or(LOG_POLL_INTERVAL).min(LOG_POLL_INTERVAL))
    })?;
    if events.is_some() || arguments.capture.is_some() {
        let ended = connection.stop_recording();
        ended.map_err(|error| exec_error(format!("what was recorded is not complete: {error}")))?;
    }
    if let Some(events) = &mut events {
        read_events(events, stage.as_mut(), arguments.lint);
        if let Some(text) = events.explanation() {
            eprintln!("\n{text}");
        }
        if arguments.lint {
            eprintln!("{}", events.lint_summary());
        }
    }
    let mut failed = false;
    if let (Some(stage), Some(scenario)) = (stage, &scenario) {
        let outcome = stage.finish(&mut connection).map_err(exec_error)?;
        let heading = format!("{}  ({})", scenario.title, scenario.name());
        eprint!("\n{}", crate::run::format_verdict(&heading, &outcome));
        if let Some(why) = outcome.error {
            return Err(exec_error(format!("the scenario could not be carried out: {why}")));
        }
        failed = outcome.verdict != Verdict::Pass;
    }
    Ok(if code == 0 && failed { 1 } else { code })
}

/// How often the log is looked at.
const LOG_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Hears what the cards told since.
fn read_events(events: &mut DaemonEventLog, stage: Option<&mut DaemonScenario<'_>>, lint: bool) {
    let heard = match stage {
        Some(stage) => events.read_new(lint, LiveScenario::uses_event, &mut |entry| stage.on_entry(entry)),
        None => events.read_new(lint, |_| false, &mut |_| {}),
    };
    if let Err(error) = heard {
        eprintln!("softhca: the event log cannot be read: {error}");
    }
}

/// Files are opened here, with the rights of whoever asked for them, and passed to the daemon.
fn start_recording(
    connection: &mut DaemonControl,
    arguments: &Arguments,
) -> Result<Option<DaemonEventLog>, String> {
    let Arguments { scenario, capture, log, why, lint, .. } = arguments;
    let packets = capture.as_ref().map(|path| output::create("--capture", path)).transpose()?;
    if scenario.is_none() && log.is_none() && !why && !lint {
        if let Some(packets) = packets {
            connection.start_recording(Some(packets.as_fd()), None).map_err(|error| error.to_string())?;
        }
        return Ok(None);
    }
    let events = DaemonEventLog::create(log.as_deref()).map_err(|error| match log {
        Some(path) => output::write_error("--log", path, &error),
        None => format!("no memory for an event log: {error}"),
    })?;
    events.start(connection, packets.as_ref())?;
    Ok(Some(events))
}

/// Runs `softhca env`.
pub fn env(arguments: &EnvArguments) -> ExitCode {
    let folder = match library::library_folder() {
        Ok(folder) => folder,
        Err(message) => return report_failure(&message),
    };
    if !arguments.no_start
        && let Err(message) =
            daemon::connect_or_start(&arguments.daemon.requirements(), daemon::DaemonLifetime::UntilStopped)
    {
        return report_failure(&message);
    }
    for (name, value) in arguments.daemon.environment(&folder) {
        say!("export {name}={}", shell_quoted(&value.to_string_lossy()));
    }
    ExitCode::SUCCESS
}

/// A word that a shell reads as it is.
fn shell_quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:=@%+,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.into()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::shell_quoted;

    #[test]
    fn words_survive_a_shell() {
        assert_eq!(shell_quoted("/run/user/0/softhca"), "/run/user/0/softhca");
        assert_eq!(shell_quoted("a b"), "'a b'");
        assert_eq!(shell_quoted("it's"), r"'it'\''s'");
    }
}
