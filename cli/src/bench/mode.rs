//! The devices that are measured.

use super::results::BenchError;
use softhca::{Device, Loopback};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// Which devices are measured.
pub enum Mode {
    /// In this process.
    Embedded,
    Daemon(BenchDaemon),
}

/// A daemon with the hosts alice and bob that runs during the measurement.
pub struct BenchDaemon {
    name: String,
    child: Child,
}

impl Mode {
    pub fn name(&self) -> &'static str {
        match self {
            Mode::Embedded => "embedded",
            Mode::Daemon(_) => "daemon",
        }
    }

    /// Two devices on two hosts.
    pub fn devices(&self) -> Result<[Device; 2], BenchError> {
        Ok(match self {
            Mode::Embedded => [Device::embedded()?, Device::embedded()?],
            #[cfg(target_os = "linux")]
            Mode::Daemon(daemon) => {
                let open = |host| Device::daemon_host(Some(daemon.name()), Some(host));
                [open("alice")?, open("bob")?]
            }
            #[cfg(not(target_os = "linux"))]
            Mode::Daemon(daemon) => return Err(format!("no daemon {} here", daemon.name()).into()),
        })
    }
}

impl BenchDaemon {
    pub fn start(loopback: Loopback) -> Result<BenchDaemon, BenchError> {
        let name = format!("bench-{}-{}", std::process::id(), loopback.name());
        let mut child = Command::new(std::env::current_exe()?)
            .args(["daemon", "--name", &name, "--host", "alice", "--host", "bob"])
            .args(["--loopback", loopback.name()])
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take().ok_or("the daemon has no output")?;
        let daemon = BenchDaemon { name, child };
        let mut lines = BufReader::new(output).lines().map_while(Result::ok);
        match lines.find(|line| line.starts_with("ready: ")) {
            Some(_) => Ok(daemon),
            None => Err("the daemon did not start".into()),
        }
    }

    /// The name for `--name`.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for BenchDaemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
