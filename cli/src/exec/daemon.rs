//! Connects to the running daemon or starts one.

use super::own_path::own_path;
use crate::output;
use crate::subnet::FabricOptions;
use softhca::{DEFAULT_NAME, DaemonControl, Error, HostDevice, Loopback, NAME_VARIABLE, Profile, Recovery};
use softhca_control::{LockFile, RuntimeDir};
use softhca_udp::{ADDRESS_VARIABLE, BindError, parse_addresses};
use softhca_wire::link_control::LINK_PORT;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader};
use std::net::{IpAddr, UdpSocket};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The hosts of an auto-started daemon.
const DEFAULT_HOSTS: [&str; 2] = ["alice", "bob"];

/// A program's requirements of a daemon.
#[derive(Default)]
pub struct DaemonRequirements<'a> {
    pub name: Option<&'a str>,
    pub host: Option<&'a str>,
    /// The address of the program's host: the value of `SOFTHCA_ADDRESS`.
    pub address: Option<String>,
    /// The hosts of a scenario.
    pub hosts: &'a [String],
    /// The cards of each host.
    pub cards: Option<usize>,
    pub profile: Option<&'static Profile>,
    pub recovery: Option<Recovery>,
    pub loopback: Option<Loopback>,
    pub fabric: FabricOptions,
}

/// When an auto-started daemon exits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum DaemonLifetime {
    /// Two seconds after its last client.
    WhileUsed,
    /// When it is stopped.
    UntilStopped,
}

/// The name of the daemon: the one given, that of the environment, or the usual one.
pub fn daemon_name(given: Option<&str>) -> String {
    let given = given.map(String::from).or_else(|| std::env::var(NAME_VARIABLE).ok());
    given.unwrap_or_else(|| DEFAULT_NAME.into())
}

/// Connects to the daemon, and starts it if it is not running. A lock prevents other processes from starting one, and
/// an idle daemon from exiting, meanwhile.
pub fn connect_or_start(
    requirements: &DaemonRequirements<'_>,
    stay: DaemonLifetime,
) -> Result<DaemonControl, String> {
    let name = daemon_name(requirements.name);
    if !RuntimeDir::is_valid_name(&name) {
        return Err(format!("{name:?} is not a valid daemon name: use letters, digits, '-', '_' and '.'"));
    }
    let folder = RuntimeDir::for_user();
    folder.create().map_err(|error| error.to_string())?;
    let _lock = lock_start(&folder, &name)?;
    let connection = match DaemonControl::connect(Some(&name)) {
        Ok(connection) => {
            requirements.fabric.check(connection.subnet_settings(), &name)?;
            if !requirements.fabric.is_infiniband() {
                check_settings(&connection, requirements, &name)?;
            }
            connection
        }
        Err(Error::NoDaemon { is_absent: true, .. }) => {
            start(&folder, &name, requirements, stay)?;
            DaemonControl::connect(Some(&name)).map_err(|error| error.to_string())?
        }
        Err(error) => return Err(error.to_string()),
    };
    Ok(connection)
}

/// Locks the start of a daemon with this name.
fn lock_start(folder: &RuntimeDir, name: &str) -> Result<LockFile, String> {
    let path = folder.start_lock(name);
    LockFile::lock(&path).map_err(|error| format!("{}: {error}", path.display()))
}

/// How a daemon was started: its command line, with the addresses that its hosts have.
pub struct StartCommand {
    words: Vec<OsString>,
    addresses: Vec<IpAddr>,
}

/// How long programs may take to close the sockets of a daemon that is gone.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

impl StartCommand {
    /// The start command of a running daemon.
    pub fn of(connection: &DaemonControl) -> Result<StartCommand, String> {
        let path = format!("/proc/{}/cmdline", connection.process_id());
        let text = std::fs::read(&path).map_err(|error| format!("{path}: {error}"))?;
        let mut words: Vec<OsString> =
            text.split(|byte| *byte == 0).skip(1).map(|word| OsString::from_vec(word.to_vec())).collect();
        words.pop();
        for index in 1..words.len() {
            let device = connection.hosts().iter().find(|device| words[index] == *device.name);
            if let (true, Some(device)) = (words[index - 1] == "--host", device) {
                words[index] = format!("{}={}", device.name, device.address).into();
            }
        }
        let addresses = connection.hosts().iter().map(|device| device.address).collect();
        Ok(StartCommand { words, addresses })
    }

    /// Waits until the programs of the daemon that is gone have closed its sockets.
    fn await_ports(&self) {
        let is_used = |address: &IpAddr| {
            let bound = UdpSocket::bind((*address, LINK_PORT));
            bound.is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
        };
        let until = Instant::now() + CLOSE_TIMEOUT;
        while self.addresses.iter().any(is_used) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Starts a daemon in place of one that is gone, and connects to it.
    pub fn start_again(&self, name: Option<&str>) -> Result<DaemonControl, String> {
        let name = daemon_name(name);
        let folder = RuntimeDir::for_user();
        let _lock = lock_start(&folder, &name)?;
        self.await_ports();
        let mut command = Command::new(own_path()?);
        command.args(&self.words);
        spawn(&folder, &name, command)?;
        DaemonControl::connect(Some(&name)).map_err(|error| error.to_string())
    }
}

/// Settings apply when a daemon starts: a running daemon must already have them.
fn check_settings(
    connection: &DaemonControl,
    requirements: &DaemonRequirements<'_>,
    name: &str,
) -> Result<(), String> {
    let advice = "stop it with `softhca stop`, or start another one with `--name`";
    // A scenario can name a device of a host with several.
    let missing = |host: &&str| {
        !connection.hosts().iter().any(|device| device.name == **host || device.device_name == **host)
    };
    let hosts = requirements.host.into_iter().chain(requirements.hosts.iter().map(String::as_str));
    if let Some(host) = hosts.into_iter().find(missing) {
        let names: Vec<&str> = connection.hosts().iter().map(|device| device.name.as_str()).collect();
        let names = names.join(", ");
        return Err(format!("the running daemon {name:?} has no host {host:?}, only {names}: {advice}"));
    }
    let Some(device) = connection.hosts().first() else { return Ok(()) };
    if let Some(text) = &requirements.address {
        let (address, _) = parse_addresses(text)
            .ok_or_else(|| BindError::BadVariable { value: text.clone() }.to_string())?;
        let is_program_host = |device: &&HostDevice| requirements.host.is_none_or(|host| device.name == host);
        let device = connection.hosts().iter().find(is_program_host).unwrap_or(device);
        if device.address != address {
            let HostDevice { name: host, address: current, .. } = device;
            return Err(format!(
                "{ADDRESS_VARIABLE} is {address}, but host {host:?} of the running daemon {name:?} has {current}: {advice}"
            ));
        }
    }
    if let Some(required) = requirements.cards {
        let cards = connection.hosts().iter().filter(|other| other.host == device.host).count();
        if cards != required {
            return Err(format!(
                "the hosts of the running daemon {name:?} have {cards} cards, not {required}: {advice}"
            ));
        }
    }
    let settings = [
        ("profile", &device.profile, requirements.profile.map(|profile| profile.name)),
        ("recovery", &device.recovery, requirements.recovery.map(Recovery::name)),
        ("loopback", &device.loopback, requirements.loopback.map(Loopback::name)),
    ];
    for (setting, current, required) in settings {
        if let Some(required) = required.filter(|required| current != required) {
            return Err(format!(
                "the running daemon {name:?} has {setting} {current}, not {required}: {advice}"
            ));
        }
    }
    Ok(())
}

/// Starts a daemon that a program needs.
fn start(
    folder: &RuntimeDir,
    name: &str,
    requirements: &DaemonRequirements<'_>,
    stay: DaemonLifetime,
) -> Result<(), String> {
    if folder.socket(name).exists() {
        warnln!(
            "the daemon {name:?} has died; starting a new one with the settings of this command, not of that daemon"
        );
    }
    let mut command = Command::new(own_path()?);
    command.args(["daemon", "--name", name]);
    let subnet = requirements.fabric.daemon_arguments()?;
    if !subnet.is_empty() {
        command.args(subnet).env_remove(ADDRESS_VARIABLE);
        return spawn_for(stay, folder, name, command);
    }
    let mut hosts: Vec<&str> = requirements.hosts.iter().map(String::as_str).collect();
    if hosts.is_empty() {
        hosts.extend(DEFAULT_HOSTS);
    }
    if let Some(host) = requirements.host.filter(|host| !hosts.contains(host)) {
        hosts.push(host);
    }
    let program_host = requirements.host.unwrap_or(hosts[0]);
    for host in hosts {
        match &requirements.address {
            Some(address) if host == program_host => command.arg("--host").arg(format!("{host}={address}")),
            _ => command.args(["--host", host]),
        };
    }
    command.env_remove(ADDRESS_VARIABLE);
    if let Some(cards) = requirements.cards {
        command.args(["--cards", &cards.to_string()]);
    }
    if let Some(profile) = requirements.profile {
        command.args(["--profile", profile.name]);
    }
    if let Some(recovery) = requirements.recovery {
        command.args(["--recovery", recovery.name()]);
    }
    if let Some(loopback) = requirements.loopback {
        command.args(["--loopback", loopback.name()]);
    }
    spawn_for(stay, folder, name, command)
}

fn spawn_for(
    stay: DaemonLifetime,
    folder: &RuntimeDir,
    name: &str,
    mut command: Command,
) -> Result<(), String> {
    if stay == DaemonLifetime::WhileUsed {
        command.args(["--idle-timeout", "2"]);
    }
    spawn(folder, name, command)
}

/// Starts a daemon and waits until it is ready.
fn spawn(folder: &RuntimeDir, name: &str, mut command: Command) -> Result<(), String> {
    let path = folder.log(name);
    let log = output::Access::Owner.create(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    // The daemon outlives this process and does not receive the terminal's signals.
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).current_dir("/").process_group(0);
    let mut child = command.spawn().map_err(|error| format!("cannot start a daemon: {error}"))?;
    let output = child.stdout.take().expect("it is piped");
    let is_ready = BufReader::new(output).lines().map_while(Result::ok).any(|line| line.starts_with("ready"));
    if is_ready {
        return Ok(());
    }
    let _ = child.wait();
    let log_text = std::fs::read_to_string(&path).unwrap_or_default();
    Err(format!("the daemon did not start: {}", log_text.trim().trim_start_matches("softhca daemon: ")))
}
