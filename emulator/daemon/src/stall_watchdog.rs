//! Detects a client that stalls a host: the engine thread waits for a page of the client's memory.

use crate::messages::report;
use crate::state::DaemonState;
use std::time::Instant;

/// Reports stalled hosts, and ends the client if the configuration says so.
#[derive(Default)]
pub(crate) struct StallWatchdog {
    /// Per host, the memory access that the last poll found in progress, and the time of the first poll that did.
    accesses: Vec<Option<((u64, u32), Instant)>>,
}

impl StallWatchdog {
    pub fn poll(&mut self, daemon: &DaemonState) {
        let hosts = daemon.hosts();
        self.accesses.resize(hosts.len(), None);
        for (host, seen) in hosts.iter().zip(&mut self.accesses) {
            let current = host.access_monitor.current();
            let since = seen.filter(|(access, _)| Some(*access) == current).map(|(_, since)| since);
            if let (Some((_, pid)), Some(since)) = (current, since) {
                let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                let (host, name) = (&host.device.name, name.trim());
                report!(
                    "host {host} is stalled by process {pid} ({name}): a page of its memory does not \
                     arrive; all clients of the host wait"
                );
                if daemon.config.kill_after.is_some_and(|limit| since.elapsed() >= limit) {
                    report!("killing process {pid} ({name}) because it stalls host {host}");
                    kill_process(pid);
                }
            }
            *seen = current.map(|access| (access, since.unwrap_or_else(Instant::now)));
        }
    }
}

/// Sends SIGKILL. The number cannot belong to another process yet: the engine is accessing the memory of this one.
fn kill_process(pid: u32) {
    if let Some(process) = rustix::process::Pid::from_raw(pid as i32) {
        let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
    }
}
