//! `softhca lab`: emulated hosts with an `eth0` each, in network namespaces behind a bridge.
//!
//! unshare(1), nsenter(1) and ip(8) create everything, without root in a user namespace. One daemon opens the sockets of
//! each host in its namespace. Everything ends with the program.

use crate::exec::{NextPoll, own_path, run_program};
use crate::exit_code::{CommandResult, EXEC_FAILED, error};
use clap::Args;
use softhca::{HOST_VARIABLE, NAME_VARIABLE};
use softhca_daemon::Signals;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

/// The hosts of the surrounding lab: `alice=PID,bob=PID`. Each process is in the namespaces of its host.
const LAB_VARIABLE: &str = "SOFTHCA_LAB";
/// The hosts of a lab by default.
const DEFAULT_HOSTS: [&str; 2] = ["alice", "bob"];
/// Makes the namespaces of a host, and keeps them until its standard input ends.
const HOLDER: &str = "mount -t sysfs sysfs /sys 2> /dev/null; ip link set lo up && echo ready && exec cat";

/// Arguments of `softhca lab`.
#[derive(Args)]
pub struct Arguments {
    /// Add a host to the lab [default: alice and bob]. May be repeated
    #[arg(long, value_name = "NAME")]
    host: Vec<String>,
    /// Host that the program runs on [default: the first one]. Inside of a lab: one of its hosts
    #[arg(long, value_name = "HOST")]
    on: Option<String>,
    /// MTU of the network between the hosts
    #[arg(long, value_name = "BYTES", default_value_t = 9000)]
    mtu: u32,
    /// This process is in the namespaces of the network
    #[arg(long, hide = true)]
    inside: bool,
    /// Program to run, with its arguments [default: a shell]
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Runs the command. The exit code is that of the program, or as for `softhca exec`.
pub fn run(arguments: &Arguments) -> CommandResult {
    let result = match (arguments.inside, std::env::var(LAB_VARIABLE)) {
        (true, _) => create(arguments),
        (false, Ok(hosts)) => enter(arguments, &hosts),
        (false, Err(_)) => unshare(arguments),
    };
    result.map(ExitCode::from).map_err(error(EXEC_FAILED))
}

fn execute(words: Vec<OsString>, variables: &[(&'static str, OsString)]) -> Result<u8, String> {
    let path = PathBuf::from(&words[0]);
    run_program(&path, &words, variables, Vec::new(), &mut |_| NextPoll::default())
        .map_err(|error| error.message)
}

/// The options of unshare(1) that give a program new namespaces, and the PATH with system programs.
pub struct Namespaces {
    pub options: Vec<&'static str>,
    pub path: OsString,
}

/// Finds out whether the kernel allows these namespaces, as root or else in a user namespace. The error says what is
/// missing, after `need`: "a lab needs network namespaces".
pub fn find_namespaces(need: &str, options: &[&'static str]) -> Result<Namespaces, String> {
    // Not every user has the folders of system programs in PATH.
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from);
    let folders: Vec<PathBuf> = std::env::split_paths(&folders).chain(more).collect();
    let is_missing = |name: &&str| !folders.iter().any(|folder| folder.join(name).is_file());
    if let Some(missing) = ["unshare", "nsenter", "ip"].into_iter().find(is_missing) {
        return Err(format!(
            "{need}, and therefore the program {missing}: install util-linux and iproute2 (Debian's packages)"
        ));
    }
    // Real root first, because it is not subject to the limits of unprivileged users.
    let choices = [options.to_vec(), [&["--user", "--map-root-user"], options].concat()];
    let mut why = String::new();
    let allowed = choices.into_iter().find(|options| {
        let output = Command::new("unshare").args(options).arg("true").stdin(Stdio::null()).output();
        match output {
            Ok(output) if output.status.success() => true,
            Ok(output) => {
                why = String::from_utf8_lossy(&output.stderr).trim().into();
                false
            }
            Err(error) => {
                why = error.to_string();
                false
            }
        }
    });
    let options = allowed.ok_or_else(|| {
        format!(
            "{need}, which the kernel forbids here ({why}). Allow unprivileged user namespaces \
             (sysctl kernel.apparmor_restrict_unprivileged_userns=0, kernel.unprivileged_userns_clone=1 or \
             user.max_user_namespaces), run as root, or start the container with --privileged"
        )
    })?;
    let path = std::env::join_paths(folders).map_err(|error| format!("PATH: {error}"))?;
    Ok(Namespaces { options, path })
}

/// Runs this command again in new namespaces.
fn unshare(arguments: &Arguments) -> Result<u8, String> {
    let Namespaces { options, path } =
        find_namespaces("a lab needs network namespaces", &["--net", "--mount"])?;
    let mut words: Vec<OsString> = vec!["unshare".into()];
    words.extend(options.iter().map(OsString::from));
    words.push(own_path()?.into());
    words.extend(["lab", "--inside", "--mtu", &arguments.mtu.to_string()].map(OsString::from));
    for (option, names) in [("--host", arguments.host.as_slice()), ("--on", arguments.on.as_slice())] {
        words.extend(names.iter().flat_map(|name| [OsString::from(option), OsString::from(name)]));
    }
    words.push("--".into());
    words.extend_from_slice(&arguments.program);
    execute(words, &[("PATH", path)])
}

/// Runs the program on another host of the lab that this process runs in.
fn enter(arguments: &Arguments, hosts: &str) -> Result<u8, String> {
    if !arguments.host.is_empty() {
        return Err("--host: this is a lab already, which has its hosts; use --on".into());
    }
    let hosts: Vec<(&str, &str)> = hosts.split(',').filter_map(|host| host.split_once('=')).collect();
    let names: Vec<&str> = hosts.iter().map(|(name, _)| *name).collect();
    let name = arguments.on.as_deref().unwrap_or(names.first().copied().unwrap_or_default());
    let host = hosts.iter().find(|(host, _)| *host == name);
    let (name, process) =
        host.ok_or_else(|| format!("--on: the lab has no host {name:?}, only {}", names.join(", ")))?;
    run_on(name, process, arguments, &[])
}

/// Runs the program on a host, in the namespaces of a process.
fn run_on(
    host: &str,
    process: &str,
    arguments: &Arguments,
    variables: &[(&'static str, OsString)],
) -> Result<u8, String> {
    let mut words: Vec<OsString> = vec!["nsenter".into()];
    words.extend(["--target", process, "--net", "--mount"].map(OsString::from));
    if let Ok(folder) = std::env::current_dir() {
        let mut option = OsString::from("--wdns=");
        option.push(folder);
        words.push(option);
    }
    words.push(own_path()?.into());
    words.extend(["exec", "--host", host, "--"].map(OsString::from));
    match arguments.program.is_empty() {
        true => words.push(std::env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into())),
        false => words.extend_from_slice(&arguments.program),
    }
    execute(words, variables)
}

/// A host of the lab: a process that keeps its namespaces, and its addresses.
struct LabHost {
    name: String,
    number: usize,
    holder: Child,
}

impl LabHost {
    fn addresses(&self) -> [String; 2] {
        [format!("10.77.0.{}", self.number), format!("fd77::{:x}", self.number)]
    }
}

/// Starts a program that ends with this process, and waits for its line with `word`.
fn start(command: &mut Command, word: &str) -> Result<Child, String> {
    Signals::kill_with_parent(command);
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = command.stdout(Stdio::piped()).spawn().map_err(|error| format!("{name}: {error}"))?;
    let output = child.stdout.take().expect("it is piped");
    match BufReader::new(output).lines().map_while(Result::ok).any(|line| line.starts_with(word)) {
        true => Ok(child),
        false => {
            let _ = child.wait();
            Err(format!("{name} did not start"))
        }
    }
}

fn ip(prefix: &[&str], words: &str) -> Result<(), String> {
    let all: Vec<&str> = prefix.iter().copied().chain(["ip"]).chain(words.split(' ')).collect();
    let output = Command::new(all[0]).args(&all[1..]).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{}: {error}", all[0]))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("`ip {words}` failed: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

/// Creates the network, the hosts and the daemon in the namespaces of this process, and runs the program.
fn create(arguments: &Arguments) -> Result<u8, String> {
    let names: Vec<String> = match arguments.host.is_empty() {
        true => DEFAULT_HOSTS.map(String::from).into(),
        false => arguments.host.clone(),
    };
    if names.len() > 250 {
        return Err(format!("{} hosts: a lab has 250 at most", names.len()));
    }
    let mtu = arguments.mtu;
    ip(&[], "link set lo up")?;
    ip(&[], &format!("link add lab mtu {mtu} type bridge"))?;
    ip(&[], "link set lab up")?;
    let mut hosts = Vec::new();
    for (index, name) in names.into_iter().enumerate() {
        let mut command = Command::new("unshare");
        command.args(["--net", "--mount", "sh", "-c", HOLDER]).stdin(Stdio::piped());
        let host = LabHost { name, number: index + 1, holder: start(&mut command, "ready")? };
        let (number, process) = (host.number, host.holder.id().to_string());
        let peer = format!("type veth peer name eth0 mtu {mtu} netns {process}");
        ip(&[], &format!("link add host{number} mtu {mtu} {peer}"))?;
        ip(&[], &format!("link set host{number} master lab up"))?;
        let [ipv4, ipv6] = host.addresses();
        let inside = ["nsenter", "--target", &process, "--net"];
        ip(&inside, &format!("addr add {ipv4}/24 dev eth0"))?;
        ip(&inside, "link set eth0 up")?;
        // A kernel without IPv6 has no second address.
        let _ = ip(&inside, &format!("-6 addr add {ipv6}/64 dev eth0 nodad"));
        hosts.push(host);
    }
    let first = arguments.on.as_deref().unwrap_or(&hosts[0].name);
    let Some(host) = hosts.iter().find(|host| host.name == *first) else {
        return Err(format!("--on: the lab has no host {first:?}"));
    };
    let daemon = format!("lab-{}", std::process::id());
    let _daemon = Killed(start_daemon(&daemon, &hosts)?);
    let list: Vec<String> = hosts.iter().map(|host| format!("{}={}", host.name, host.holder.id())).collect();
    let variables = [
        (LAB_VARIABLE, list.join(",").into()),
        (NAME_VARIABLE, daemon.into()),
        // An outer `softhca exec` may have set it.
        (HOST_VARIABLE, first.into()),
    ];
    run_on(&host.name, &host.holder.id().to_string(), arguments, &variables)
}

/// A process that is terminated at the end.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let process = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process(process, rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
}

fn start_daemon(name: &str, hosts: &[LabHost]) -> Result<Child, String> {
    let mut command = Command::new(own_path()?);
    command.args(["daemon", "--name", name]).stdin(Stdio::null());
    for host in hosts {
        let [ipv4, ipv6] = host.addresses();
        let process = host.holder.id();
        let addresses = match Path::new("/proc/sys/net/ipv6").exists() {
            true => format!("{ipv4},{ipv6}"),
            false => ipv4,
        };
        command.arg("--host").arg(format!("{}={addresses}", host.name));
        command.arg("--netns").arg(format!("{}=/proc/{process}/ns/net", host.name));
    }
    start(&mut command, "ready")
}
