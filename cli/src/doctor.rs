//! `softhca doctor`: what this machine allows, and what is lost without it.

use softhca::{DaemonControl, Device, Error};
use softhca_udp::{HostSockets, Segmentation, SocketOptions, bind_host};
use std::path::Path;
use std::process::ExitCode;

/// Runs the command: one line per finding.
pub fn run() -> ExitCode {
    match bind_host(SocketOptions::default()) {
        Ok(sockets) => tell_sockets(&sockets),
        Err(error) => bad("sockets", &format!("{error}: no card can start")),
    }
    tell_descriptors();
    tell_reach();
    tell_view();
    match DaemonControl::connect(None) {
        Ok(control) => good("daemon", &format!("process {} is running", control.process())),
        Err(Error::NoDaemon { path, why, .. }) if Path::new(&path).exists() => {
            bad("daemon", &format!("{path}: {why}; the next `softhca daemon` takes its place"));
        }
        Err(_) => good("daemon", "none is running, and embedded cards need none"),
    }
    match Device::embedded() {
        Ok(device) => good("card", &format!("an embedded card works, on {}", device.address())),
        Err(error) => bad("card", &error.to_string()),
    }
    ExitCode::SUCCESS
}

fn good(what: &str, text: &str) {
    say!("ok      {what:<12} {text}");
}

fn bad(what: &str, text: &str) {
    say!("missing {what:<12} {text}");
}

fn tell_sockets(sockets: &HostSockets) {
    good("sockets", &format!("ports 4791 and 4792 of {} are free", sockets.address()));
    let bytes = sockets.roce.receive_buffer();
    match bytes {
        0..1_000_000 => bad(
            "buffer",
            &format!("receive buffers of {bytes} bytes only: slower; sysctl -w net.core.rmem_max=4194304"),
        ),
        _ => good("buffer", &format!("receive buffers of {bytes} bytes")),
    }
    match sockets.roce.segmentation() {
        Segmentation::Separate => {
            bad("gso", "the kernel does not cut runs of packets: a quarter of the speed")
        }
        _ => good("gso", "the kernel cuts runs of packets (UDP_SEGMENT)"),
    }
}

fn tell_descriptors() {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    if let Some(line) = limits.lines().find(|line| line.starts_with("Max open files")) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        good("descriptors", &format!("{} now, {} at most", fields[3], fields[4]));
    }
}

fn tell_reach() {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    match scope.trim() {
        "" | "0" => good("memory", "a daemon reaches its clients' memory (process_vm_readv)"),
        level => bad(
            "memory",
            &format!("ptrace_scope is {level}: a daemon reaches its clients through a passed /proc/self/mem"),
        ),
    }
}

fn tell_view() {
    match crate::exec::view_is_allowed() {
        Ok(()) => good(
            "view",
            "`softhca exec` shows programs their card in /sys/class/infiniband and /dev/infiniband",
        ),
        Err(error) => bad(
            "view",
            &format!("no mount namespace ({error}): programs that look for a card in /sys or /dev see none"),
        ),
    }
}
