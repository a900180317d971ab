//! `softhca doctor`: what this machine supports, and what is lost where it does not.

use crate::exit_code::CommandResult;
use softhca::{DaemonControl, Device, Error};
use softhca_udp::{HostSockets, Segmentation, SocketOptions, bind_host};
use std::path::Path;
use std::process::ExitCode;

/// Arguments of `softhca doctor`: none.
#[derive(clap::Args)]
pub struct Arguments {}

/// Runs the command: prints one line per finding.
pub fn run(_: &Arguments) -> CommandResult {
    match bind_host(SocketOptions::default()) {
        Ok(sockets) => check_sockets(&sockets),
        Err(error) => print_missing("sockets", &format!("{error}: no device can start")),
    }
    check_descriptor_limit();
    check_client_memory_access();
    check_sysfs_view();
    match DaemonControl::connect(None) {
        Ok(control) => print_ok("daemon", &format!("running, process {}", control.process_id())),
        Err(Error::NoDaemon { path, why, .. }) if Path::new(&path).exists() => {
            print_missing("daemon", &format!("{path}: {why}; the next `softhca daemon` replaces it"));
        }
        Err(error @ Error::DaemonRefused { .. }) => print_missing("daemon", &error.to_string()),
        Err(_) => print_ok("daemon", "not running; embedded devices do not need one"),
    }
    match Device::embedded() {
        Ok(device) => print_ok("device", &format!("an embedded device works, at {}", device.address())),
        Err(error) => print_missing("device", &error.to_string()),
    }
    Ok(ExitCode::SUCCESS)
}

fn print_ok(what: &str, text: &str) {
    outln!("ok      {what:<12} {text}");
}

fn print_missing(what: &str, text: &str) {
    outln!("missing {what:<12} {text}");
}

fn check_sockets(sockets: &HostSockets) {
    print_ok("sockets", &format!("ports 4791 and 4792 of {} are free", sockets.address()));
    let bytes = sockets.roce.receive_buffer();
    match bytes {
        0..1_000_000 => print_missing(
            "buffer",
            &format!(
                "receive buffers are limited to {bytes} bytes, which costs speed: sysctl -w net.core.rmem_max=4194304"
            ),
        ),
        _ => print_ok("buffer", &format!("receive buffers of {bytes} bytes")),
    }
    match sockets.roce.segmentation() {
        Segmentation::PerDatagram => {
            print_missing("gso", "UDP_SEGMENT is not supported: a quarter of the speed")
        }
        _ => print_ok("gso", "UDP_SEGMENT is supported"),
    }
}

fn check_descriptor_limit() {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    if let Some(line) = limits.lines().find(|line| line.starts_with("Max open files")) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        print_ok("descriptors", &format!("limit {}, maximum {}", fields[3], fields[4]));
    }
}

fn check_client_memory_access() {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    match scope.trim() {
        "" | "0" => print_ok("memory", "a daemon accesses its clients' memory with process_vm_readv"),
        level => print_missing(
            "memory",
            &format!(
                "ptrace_scope is {level}: a daemon accesses its clients' memory through /proc/self/mem descriptors, which is slower"
            ),
        ),
    }
}

fn check_sysfs_view() {
    match crate::exec::check_view_allowed() {
        Ok(()) => print_ok(
            "view",
            "`softhca exec` shows the emulated device in /sys/class/infiniband and /dev/infiniband",
        ),
        Err(error) => print_ok(
            "view",
            &format!(
                "no mount namespace ({error}): `softhca exec` shows the emulated device in /sys and /dev to dynamically linked programs only, by a preloaded library"
            ),
        ),
    }
}
