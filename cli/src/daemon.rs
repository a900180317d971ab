//! `softhca daemon`: the daemon in the foreground.

use crate::exit_code::{CommandResult, bad_input, failure};
use crate::output;
use crate::subnet::FabricOptions;
use clap::Args;
use softhca::{Entropy, Loopback, Profile, Recovery};
use softhca_daemon::{Config, Daemon, DataPath, HostConfig, Signals};
use softhca_udp::parse_addresses;
use std::fs::File;
use std::io::{self, Write};
use std::net::Ipv6Addr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Arguments of `softhca daemon`.
#[derive(Args)]
pub struct Arguments {
    /// TOML configuration file; see the reference for its keys
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Name of the daemon, if you run several
    #[arg(long)]
    name: Option<String>,
    /// Add a host, with an IP address or an IPv4 and an IPv6 address separated by a comma [default address: the
    /// first free one of 127.0.0.2, …]. May be repeated
    #[arg(long, value_name = "NAME[=ADDRESS]", value_parser = parse_host)]
    host: Vec<(HostConfig, Option<Ipv6Addr>)>,
    /// Open the sockets of a host in this network namespace, such as alice=/run/netns/alice. May be repeated
    #[arg(long, value_name = "HOST=FILE", value_parser = parse_namespace)]
    netns: Vec<(String, PathBuf)>,
    /// Use a separate UDP source port per flow, so that ECMP can spread flows over equal paths
    #[arg(long)]
    entropy: bool,
    /// Card whose behaviour the devices have where cards differ: softhca, rxe or mlx5
    #[arg(long, value_name = "CARD", value_parser = parse_profile)]
    profile: Option<&'static Profile>,
    /// Recovery from packet loss: fatal, go-back-n or go-back-0 [default: that of the profile]
    #[arg(long, value_name = "MODE", value_parser = parse_recovery)]
    recovery: Option<Recovery>,
    /// How a host's traffic to itself is carried: socket, or internal (faster, not visible to tcpdump)
    #[arg(long, value_name = "METHOD", value_parser = parse_loopback)]
    loopback: Option<Loopback>,
    /// Which process executes the transport: the daemon, or each client for itself ("direct")
    #[arg(long, value_name = "PROCESS", value_parser = parse_data_path)]
    data_path: Option<DataPath>,
    /// Write every transmitted packet to this pcapng file
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
    /// Write every event to this file, as JSON lines
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Cards of each host: softhca0, softhca1, … [default: 1]
    #[arg(long, value_name = "N", value_parser = parse_cards)]
    cards: Option<usize>,
    #[command(flatten)]
    fabric: FabricOptions,
    /// Exit after this many seconds without a client
    #[arg(long, value_name = "SECONDS")]
    idle_timeout: Option<u64>,
    /// How long an engine thread polls for work before it sleeps, in microseconds
    #[arg(long, value_name = "MICROSECONDS", hide = true)]
    busy_poll: Option<u64>,
}

fn parse_host(text: &str) -> Result<(HostConfig, Option<Ipv6Addr>), String> {
    let (name, address, ipv6) = match text.split_once('=') {
        None => (text, None, None),
        Some((name, addresses)) => {
            let (address, ipv6) = parse_addresses(addresses).ok_or_else(|| {
                format!("{addresses:?} is neither an IP address nor an IPv4 and an IPv6 address")
            })?;
            (name, Some(address), ipv6)
        }
    };
    if name.is_empty() {
        return Err("the host has no name; example: alice=127.0.0.2".into());
    }
    Ok((HostConfig { name: name.into(), address }, ipv6))
}

fn parse_namespace(text: &str) -> Result<(String, PathBuf), String> {
    let (host, file) = text.split_once('=').ok_or("expected a host and a file: alice=/run/netns/alice")?;
    Ok((host.into(), file.into()))
}

/// Parses a number of cards.
pub fn parse_cards(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|cards| (1..=64).contains(cards)).ok_or_else(|| "expected 1 to 64".into())
}

/// Parses the name of a recovery mode.
pub fn parse_recovery(text: &str) -> Result<Recovery, String> {
    Recovery::from_name(text).ok_or_else(|| "expected fatal, go-back-n or go-back-0".into())
}

/// Parses the name of a profile.
pub fn parse_profile(text: &str) -> Result<&'static Profile, String> {
    Profile::from_name(text)
        .ok_or_else(|| format!("expected one of {}", Profile::names().collect::<Vec<_>>().join(", ")))
}

/// Parses the name of a data path.
pub fn parse_data_path(text: &str) -> Result<DataPath, String> {
    DataPath::from_name(text).ok_or_else(|| "expected direct or daemon".into())
}

/// Parses the name of a loopback method.
pub fn parse_loopback(text: &str) -> Result<Loopback, String> {
    Loopback::from_name(text).ok_or_else(|| "expected socket or internal".into())
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> CommandResult {
    let config = configure(arguments).map_err(bad_input)?;
    let files = RecordingFiles::open(arguments).map_err(bad_input)?;
    serve(config, files).map_err(failure)?;
    Ok(ExitCode::SUCCESS)
}

fn configure(arguments: &Arguments) -> Result<Config, String> {
    let mut config = match &arguments.config {
        Some(path) => Config::read(path).map_err(|error| error.to_string())?,
        None => Config::default(),
    };
    if let Some(name) = &arguments.name {
        config.name = name.clone();
    }
    if !arguments.host.is_empty() {
        config.hosts = arguments.host.iter().map(|(host, _)| host.clone()).collect();
        let ipv6 = arguments.host.iter().filter_map(|(host, ipv6)| Some((host.name.clone(), (*ipv6)?)));
        config.ipv6 = ipv6.collect();
    }
    for (host, file) in &arguments.netns {
        if !config.hosts.iter().any(|other| other.name == *host) {
            return Err(format!("--netns: the daemon has no host {host:?}"));
        }
        config.namespaces.insert(host.clone(), file.clone());
    }
    if let Some(subnet) = arguments.fabric.subnet()? {
        if arguments.config.is_some() || !arguments.host.is_empty() {
            return Err(
                "--fabric infiniband: the topology has the hosts; --config and --host are for roce".into()
            );
        }
        config.hosts.clear();
        config.subnet = Some(subnet);
    }
    if let Some(cards) = arguments.cards {
        config.set_cards(cards);
    }
    if let Some(profile) = arguments.profile {
        config.set_profile(profile);
    }
    if let Some(recovery) = arguments.recovery {
        config.set_recovery(recovery);
    }
    if let Some(data_path) = arguments.data_path {
        config.data_path = data_path;
    }
    if let Some(loopback) = arguments.loopback {
        config.loopback = Some(loopback);
    }
    if arguments.entropy {
        config.entropy = Entropy::On;
    }
    if let Some(seconds) = arguments.idle_timeout {
        config.idle_exit_after = Some(Duration::from_secs(seconds));
    }
    if let Some(microseconds) = arguments.busy_poll {
        config.busy_poll = Duration::from_micros(microseconds);
    }
    Ok(config)
}

/// The capture and event log files.
struct RecordingFiles {
    capture: Option<File>,
    log: Option<File>,
}

impl RecordingFiles {
    /// Opens the files without truncating them: a running daemon may be writing to them, and then this one does not
    /// start.
    fn open(arguments: &Arguments) -> Result<RecordingFiles, String> {
        let open =
            |option, path: &Option<PathBuf>| path.as_ref().map(|path| output::open(option, path)).transpose();
        Ok(RecordingFiles {
            capture: open("--capture", &arguments.capture)?,
            log: open("--log", &arguments.log)?,
        })
    }
}

fn serve(
    config: Config,
    RecordingFiles { capture, log }: RecordingFiles,
) -> Result<(), Box<dyn std::error::Error>> {
    let signals = Signals::block_termination()?;
    Signals::ignore_file_size_limit();
    let mut daemon = Daemon::start(config)?;
    if capture.is_some() || log.is_some() {
        capture.iter().chain(&log).try_for_each(output::truncate)?;
        daemon.start_recording(capture, log)?;
    }
    // A closed standard output does not stop the daemon.
    let mut terminal = io::stdout();
    for host in daemon.status().hosts {
        let _ = writeln!(terminal, "{} {} {}", host.host.name, host.host.device_name, host.host.address);
    }
    let _ = writeln!(terminal, "ready: {}", daemon.socket().display());
    daemon.run(Some(signals.as_fd()))?;
    daemon.stop();
    Ok(())
}
