//! The daemon that a program needs: the one that runs, or a new one.

use rustix::fs::FlockOperation;
use softhca::{DEFAULT_NAME, DaemonControl, Error, Loopback, NAME_VARIABLE, Recovery};
use softhca_queue::control::RuntimeDir;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// The hosts of a daemon that was started for programs.
const DEFAULT_HOSTS: [&str; 2] = ["alice", "bob"];

/// What the program is to have.
pub struct DaemonRequirements<'a> {
    pub name: Option<&'a str>,
    pub host: Option<&'a str>,
    /// The hosts of a scenario.
    pub hosts: &'a [String],
    pub recovery: Option<Recovery>,
    pub loopback: Option<Loopback>,
}

/// How long a daemon stays that is started here.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum DaemonLifetime {
    /// Two seconds after its last client.
    WhileUsed,
    /// Until somebody stops it.
    UntilStopped,
}

/// Connects to the daemon, and starts it before if it does not run. Nobody else starts one meanwhile, and it does
/// not leave.
pub fn connect_or_start(
    wanted: &DaemonRequirements<'_>,
    stay: DaemonLifetime,
) -> Result<DaemonControl, String> {
    let name = match wanted.name {
        Some(name) => name.into(),
        None => std::env::var(NAME_VARIABLE).unwrap_or_else(|_| DEFAULT_NAME.into()),
    };
    if !RuntimeDir::is_valid_name(&name) {
        return Err(format!("{name:?} cannot be a daemon's name: letters, digits, '-', '_' and '.'"));
    }
    let folder = RuntimeDir::for_user();
    folder.create().map_err(|error| error.to_string())?;
    let path = folder.start_lock(&name);
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let door = File::options().create(true).truncate(false).write(true).open(&path).map_err(failed)?;
    rustix::fs::flock(&door, FlockOperation::LockExclusive).map_err(|error| failed(error.into()))?;
    let connection = match DaemonControl::connect(Some(&name)) {
        Ok(connection) => {
            check_settings(&connection, wanted, &name)?;
            connection
        }
        Err(Error::NoDaemon { is_absent: true, .. }) => {
            start(&folder, &name, wanted, stay)?;
            DaemonControl::connect(Some(&name)).map_err(|error| error.to_string())?
        }
        Err(error) => return Err(error.to_string()),
    };
    Ok(connection)
}

/// Settings were given to the daemon when it started: others cannot be had from it.
fn check_settings(
    connection: &DaemonControl,
    wanted: &DaemonRequirements<'_>,
    name: &str,
) -> Result<(), String> {
    let another = "`softhca stop` ends it, or `--name` starts another beside it";
    let missing = |host: &&str| !connection.hosts().iter().any(|card| card.name == **host);
    let hosts = wanted.host.into_iter().chain(wanted.hosts.iter().map(String::as_str));
    if let Some(host) = hosts.into_iter().find(missing) {
        let names: Vec<&str> = connection.hosts().iter().map(|card| card.name.as_str()).collect();
        let names = names.join(", ");
        return Err(format!("the daemon {name:?} that runs has no host {host:?}, only {names}: {another}"));
    }
    let Some(card) = connection.hosts().first() else { return Ok(()) };
    let settings = [
        ("recovery", &card.recovery, wanted.recovery.map(Recovery::name)),
        ("loopback", &card.loopback, wanted.loopback.map(Loopback::name)),
    ];
    for (setting, has, wants) in settings {
        if let Some(wants) = wants.filter(|wants| has != wants) {
            return Err(format!("the daemon {name:?} that runs has {setting} {has}, not {wants}: {another}"));
        }
    }
    Ok(())
}

/// Starts a daemon and waits until it is ready.
fn start(
    folder: &RuntimeDir,
    name: &str,
    wanted: &DaemonRequirements<'_>,
    stay: DaemonLifetime,
) -> Result<(), String> {
    let own = std::env::current_exe().map_err(|error| format!("cannot find myself: {error}"))?;
    let path = folder.log(name);
    let log = File::create(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut command = Command::new(own);
    command.args(["daemon", "--name", name]);
    let mut hosts: Vec<&str> = wanted.hosts.iter().map(String::as_str).collect();
    if hosts.is_empty() {
        hosts.extend(DEFAULT_HOSTS);
    }
    if let Some(host) = wanted.host.filter(|host| !hosts.contains(host)) {
        hosts.push(host);
    }
    for host in hosts {
        command.args(["--host", host]);
    }
    if let Some(recovery) = wanted.recovery {
        command.args(["--recovery", recovery.name()]);
    }
    if let Some(loopback) = wanted.loopback {
        command.args(["--loopback", loopback.name()]);
    }
    if stay == DaemonLifetime::WhileUsed {
        command.args(["--leave-after", "2"]);
    }
    // It outlives this program, and the terminal's signals are not for it.
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).current_dir("/").process_group(0);
    let mut child = command.spawn().map_err(|error| format!("cannot start a daemon: {error}"))?;
    let output = child.stdout.take().expect("it is piped");
    let is_ready = BufReader::new(output).lines().map_while(Result::ok).any(|line| line.starts_with("ready"));
    if is_ready {
        return Ok(());
    }
    let _ = child.wait();
    let said = std::fs::read_to_string(&path).unwrap_or_default();
    Err(format!("the daemon did not start: {}", said.trim().trim_start_matches("softhca: ")))
}
