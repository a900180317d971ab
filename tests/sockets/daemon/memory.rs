//! The memory that many clients cost a daemon.

use super::data::ALL_ACCESS;
use super::process::{self, Process, TestDaemon, receive_line, send_line};
use softhca::{Device, QpType};

const PROCESSES: usize = 50;
const QUEUE_PAIRS: usize = 20;

/// A client with some queue pairs that waits for the parent.
pub fn run_owner() {
    let context = Device::daemon_host(None, Some("alice")).unwrap().open();
    let domain = context.allocate_protection_domain().unwrap();
    let queue = context.create_completion_queue(64).unwrap();
    let _region = domain.allocate_region(1 << 16, ALL_ACCESS).unwrap();
    let make = |_| domain.create_queue_pair(QpType::Rc, &queue).build().unwrap();
    let _pairs: Vec<_> = (0..QUEUE_PAIRS).map(make).collect();
    send_line("made");
    receive_line();
}

/// A size in kilobytes from `/proc/PID/status`.
fn kilobytes(process: u32, name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn fifty_processes_can_have_a_thousand_queue_pairs() {
    let _crowd = crate::crowd();
    let daemon = TestDaemon::with(&[("TEST_CLIENTS", "64")]);
    let memory = || ["VmRSS", "RssAnon", "RssShmem"].map(|name| kilobytes(daemon.process.id(), name));
    let before = memory();
    let mut owners: Vec<Process> =
        (0..PROCESSES).map(|_| process::spawn("owner", &daemon.name, &[])).collect();
    for owner in &mut owners {
        assert_eq!(owner.receive_line(), "made");
    }
    let after = memory();
    let pairs = PROCESSES * QUEUE_PAIRS;
    println!(
        "daemon: {} KiB without clients, {} KiB with {pairs} queue pairs of {PROCESSES} processes \
         ({} KiB of its own, {} KiB shared with them): {} bytes a queue pair",
        before[0],
        after[0],
        after[1],
        after[2],
        (after[0] - before[0]) * 1024 / pairs as u64
    );
    assert!(after[0] - before[0] < 64 << 10, "{before:?}, {after:?}");
    for mut owner in owners {
        owner.send_line("end");
        owner.finish();
    }
}
