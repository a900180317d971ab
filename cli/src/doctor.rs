//! `softhca doctor`: what this machine supports, and what is lost where it does not.

use crate::exit_code::CommandResult;
use softhca::{DaemonControl, Device, Error};
use softhca_control::{HostStatus, RuntimeDir};
use softhca_udp::{HostSockets, Segmentation, SlotGroup, SocketOptions, bind_host};
use std::path::Path;
use std::process::ExitCode;

/// The descriptors that a daemon with a few programs needs.
const MIN_OPEN_FILES: u64 = 256;

/// Arguments of `softhca doctor`.
#[derive(clap::Args)]
pub struct Arguments {
    /// After each finding that a command can fix, print the command
    #[arg(long)]
    fix_hints: bool,
}

/// Runs the command: prints one line per finding.
pub fn run(arguments: &Arguments) -> CommandResult {
    for finding in findings() {
        let word = if finding.is_ok { "ok     " } else { "missing" };
        outln!("{word} {:<12} {}", finding.subject, finding.text);
        if let Some(fix) = finding.fix.filter(|_| arguments.fix_hints) {
            outln!("fix     {:<12} {fix}", finding.subject);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A property of this machine.
struct Finding {
    subject: &'static str,
    is_ok: bool,
    text: String,
    /// The command that improves it.
    fix: Option<&'static str>,
}

fn ok(subject: &'static str, text: impl Into<String>) -> Finding {
    Finding { subject, is_ok: true, text: text.into(), fix: None }
}

fn missing(subject: &'static str, text: impl Into<String>) -> Finding {
    Finding { is_ok: false, ..ok(subject, text) }
}

impl Finding {
    fn fixed_by(self, command: &'static str) -> Finding {
        Finding { fix: Some(command), ..self }
    }
}

fn findings() -> Vec<Finding> {
    let mut findings = match bind_host(SocketOptions::default()) {
        Ok(sockets) => check_sockets(&sockets),
        Err(error) => vec![
            missing("sockets", format!("{error}: no device can start"))
                .fixed_by("ss -lunp 'sport = :4791' # lists the owners of the port"),
        ],
    };
    findings.extend(check_limits(&std::fs::read_to_string("/proc/self/limits").unwrap_or_default()));
    findings.extend([check_client_memory_access(), check_sysfs_view(), check_runtime_folder()]);
    findings.extend(check_daemon());
    findings.push(match Device::embedded() {
        Ok(device) => ok("device", format!("an embedded device works, at {}", device.address())),
        Err(error) => missing("device", error.to_string()),
    });
    findings
}

fn check_daemon() -> Vec<Finding> {
    let mut findings = Vec::new();
    let daemon = match DaemonControl::connect(None) {
        Ok(mut control) => {
            let hosts = control.status().map(|status| status.hosts).unwrap_or_default();
            for HostStatus { host, clients, .. } in &hosts {
                let direct = clients.iter().filter(|client| client.is_direct).count();
                findings.extend(check_slots(&host.name, direct));
            }
            ok("daemon", format!("running, process {}", control.process_id()))
        }
        Err(Error::NoDaemon { path, why, .. }) if Path::new(&path).exists() => {
            missing("daemon", format!("{path}: {why}; the next `softhca daemon` replaces it"))
                .fixed_by("softhca exec -- true")
        }
        Err(error @ Error::DaemonRefused { .. }) => {
            missing("daemon", error.to_string()).fixed_by("softhca stop")
        }
        Err(_) => ok("daemon", "not running; embedded devices do not need one"),
    };
    findings.insert(0, daemon);
    findings
}

/// The slots of a host, of which slot 0 is the daemon's.
fn check_slots(host: &str, direct: usize) -> Option<Finding> {
    let all = SlotGroup::MAX_SLOTS - 1;
    (direct >= all).then(|| {
        missing(
            "slots",
            format!(
                "all {all} slots of {host} are in use: further programs use the daemon's data path, which is slower"
            ),
        )
        .fixed_by("softhca status # lists the programs; each one that ends gives its slots back")
    })
}

/// The folder of the daemons' sockets, which every command that starts a daemon writes to.
fn check_runtime_folder() -> Finding {
    let folder = RuntimeDir::for_user();
    match folder.create() {
        Ok(()) => ok("runtime", format!("the sockets of daemons are in {}", folder.path().display())),
        Err(error) => missing("runtime", format!("no daemon can start: {error}"))
            .fixed_by("export XDG_RUNTIME_DIR=$(mktemp -d)"),
    }
}

fn check_sockets(sockets: &HostSockets) -> Vec<Finding> {
    let bytes = sockets.roce.receive_buffer();
    vec![
        ok("sockets", format!("ports 4791 and 4792 of {} are free", sockets.address())),
        match bytes {
            0..1_000_000 => {
                missing("buffer", format!("receive buffers are limited to {bytes} bytes, which costs speed"))
                    .fixed_by("sudo sysctl -w net.core.rmem_max=4194304")
            }
            _ => ok("buffer", format!("receive buffers of {bytes} bytes")),
        },
        match sockets.roce.segmentation() {
            Segmentation::PerDatagram => {
                missing("gso", "UDP_SEGMENT is not supported: a quarter of the speed")
            }
            _ => ok("gso", "UDP_SEGMENT is supported"),
        },
    ]
}

/// The limits of this process, which daemons and programs inherit: the text of `/proc/self/limits`.
fn check_limits(limits: &str) -> Vec<Finding> {
    let limit = |name: &str| {
        let mut fields = limits.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace();
        Some((fields.next()?.to_owned(), fields.next()?.to_owned()))
    };
    let mut findings = Vec::new();
    if let Some((soft, hard)) = limit("Max open files") {
        let text = format!("limit {soft}, maximum {hard}");
        findings.push(match soft.parse::<u64>().is_ok_and(|files| files < MIN_OPEN_FILES) {
            true => missing("descriptors", format!("{text}: a dozen programs exhaust them (EMFILE)"))
                .fixed_by("ulimit -n 65536"),
            false => ok("descriptors", text),
        });
    }
    // A daemon maps the memory of its programs, and the rings of each.
    if let Some(bytes) = limit("Max address space").and_then(|(soft, _)| soft.parse::<u64>().ok()) {
        let text =
            format!("limited to {} MiB of address space: devices and regions fail with ENOMEM", bytes >> 20);
        findings.push(missing("limits", text).fixed_by("ulimit -v unlimited"));
    }
    if let Some(bytes) = limit("Max file size").and_then(|(soft, _)| soft.parse::<u64>().ok()) {
        let text = format!(
            "files are limited to {} KiB: devices with large queues fail, and recordings end",
            bytes >> 10
        );
        findings.push(missing("limits", text).fixed_by("ulimit -f unlimited"));
    }
    findings
}

/// A setting of the kernel; empty if it does not exist.
fn kernel_setting(path: &str) -> String {
    std::fs::read_to_string(Path::new("/proc/sys").join(path)).unwrap_or_default().trim().to_owned()
}

fn check_client_memory_access() -> Finding {
    match kernel_setting("kernel/yama/ptrace_scope").as_str() {
        "" | "0" => ok("memory", "a daemon accesses its clients' memory with process_vm_readv"),
        level => missing(
            "memory",
            format!(
                "ptrace_scope is {level}: a daemon accesses its clients' memory through /proc/self/mem descriptors, which is slower"
            ),
        )
        .fixed_by("sudo sysctl -w kernel.yama.ptrace_scope=0"),
    }
}

fn check_sysfs_view() -> Finding {
    let Err(error) = crate::exec::check_view_allowed() else {
        return ok(
            "view",
            "`softhca exec` shows the emulated device in /sys/class/infiniband and /dev/infiniband",
        );
    };
    let finding = ok(
        "view",
        format!(
            "no mount namespace ({error}): `softhca exec` shows the emulated device in /sys and /dev to dynamically linked programs only, by a preloaded library"
        ),
    );
    let is = |path: &str, value: &str| kernel_setting(path) == value;
    finding.fixed_by(match () {
        () if is("user/max_user_namespaces", "0") => "sudo sysctl -w user.max_user_namespaces=15000",
        () if is("kernel/apparmor_restrict_unprivileged_userns", "1") => {
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        }
        () => "docker run --security-opt seccomp=unconfined # if this is a container",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_a_free_slot_is_a_finding() {
        assert!(check_slots("alice", SlotGroup::MAX_SLOTS - 2).is_none());
        let finding = check_slots("alice", SlotGroup::MAX_SLOTS - 1).expect("no slot is free");
        assert!(!finding.is_ok && finding.text.contains("of alice are in use"), "{}", finding.text);
    }
}
