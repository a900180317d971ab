//! `softhca daemon`: the shared cards, in the foreground.

use clap::Args;
use softhca::Recovery;
use softhca_daemon::{Config, Daemon, HostConfig, Signals};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// What `softhca daemon` takes.
#[derive(Args)]
pub struct Arguments {
    /// A TOML file: name, recovery, clients, [hosts], [share]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The daemon's name, for users with several
    #[arg(long)]
    name: Option<String>,
    /// A host and its address (127.0.0.2, …); without an address, the first that is free. May be repeated
    #[arg(long, value_name = "NAME[=ADDRESS]", value_parser = parse_host)]
    host: Vec<HostConfig>,
    /// What a lost packet does: fatal, go-back-n or go-back-0
    #[arg(long, value_name = "MODE", value_parser = parse_recovery)]
    recovery: Option<Recovery>,
    /// Leave when no client was there for so many seconds
    #[arg(long, value_name = "SECONDS")]
    leave_after: Option<u64>,
    /// How long an engine thread looks for more to do before it sleeps, in microseconds
    #[arg(long, value_name = "MICROSECONDS", hide = true)]
    linger: Option<u64>,
}

fn parse_host(text: &str) -> Result<HostConfig, String> {
    let (name, address) = match text.split_once('=') {
        None => (text, None),
        Some((name, address)) => {
            let parsed: IpAddr = address.parse().map_err(|_| format!("{address:?} is not an IP address"))?;
            (name, Some(parsed))
        }
    };
    if name.is_empty() {
        return Err("a host needs a name: alice=127.0.0.2".into());
    }
    Ok(HostConfig { name: name.into(), address })
}

/// Reads the name of a recovery mode.
pub fn parse_recovery(text: &str) -> Result<Recovery, String> {
    Recovery::from_name(text).ok_or_else(|| "one of fatal, go-back-n, go-back-0".into())
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> ExitCode {
    let config = match configure(arguments) {
        Ok(config) => config,
        Err(message) => {
            eprintln!("softhca: {message}");
            return ExitCode::from(crate::BAD_INPUT);
        }
    };
    match serve(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("softhca: {error}");
            ExitCode::FAILURE
        }
    }
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
        config.hosts = arguments.host.clone();
    }
    if let Some(recovery) = arguments.recovery {
        config.recovery = recovery;
    }
    if let Some(seconds) = arguments.leave_after {
        config.leave_after = Some(Duration::from_secs(seconds));
    }
    if let Some(microseconds) = arguments.linger {
        config.linger = Duration::from_micros(microseconds);
    }
    Ok(config)
}

fn serve(config: Config) -> Result<(), Box<dyn std::error::Error>> {
    let signals = Signals::take()?;
    let mut daemon = Daemon::start(config)?;
    for host in daemon.status().hosts {
        println!("{} {} {}", host.host.name, host.host.device, host.host.address);
    }
    println!("ready: {}", daemon.socket().display());
    daemon.run(Some(signals.as_fd()))?;
    daemon.stop();
    Ok(())
}
