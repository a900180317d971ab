//! The devices that are measured.

use super::results::BenchResult;
use softhca::{Device, Loopback};
use softhca_daemon::DataPath;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// Which devices are measured.
pub enum Mode {
    /// In this process.
    Embedded,
    /// Of a daemon whose clients execute the transport themselves.
    Direct(BenchDaemon),
    /// Of a daemon that executes it.
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
            Mode::Direct(_) => "direct",
            Mode::Daemon(_) => "daemon",
        }
    }

    /// Two devices on two hosts.
    pub fn devices(&self) -> BenchResult<[Device; 2]> {
        Ok(match self {
            Mode::Embedded => [Device::embedded()?, Device::embedded()?],
            Mode::Direct(daemon) | Mode::Daemon(daemon) => {
                let open = |host| Device::daemon_host(Some(daemon.name()), Some(host));
                [open("alice")?, open("bob")?]
            }
        })
    }
}

impl BenchDaemon {
    pub fn start(data_path: DataPath, loopback: Loopback) -> BenchResult<BenchDaemon> {
        let name = format!("bench-{}-{}-{}", std::process::id(), data_path.name(), loopback.name());
        let mut child = Command::new(std::env::current_exe()?)
            .args(["daemon", "--name", &name, "--host", "alice", "--host", "bob"])
            .args(["--loopback", loopback.name(), "--data-path", data_path.name()])
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
