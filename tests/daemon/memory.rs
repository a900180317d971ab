//! What many clients cost a daemon.

use crate::data::ALL;
use crate::process::{self, Process, TestDaemon, hear, say};
use softhca::{Device, QpKind};

const PROCESSES: usize = 50;
const QUEUE_PAIRS: usize = 20;

/// A client with some queue pairs, until it is told to end.
pub fn be_owner() {
    let context = Device::daemon_host(None, Some("alice")).unwrap().open();
    let domain = context.allocate_domain().unwrap();
    let queue = context.create_completion_queue(64).unwrap();
    let _region = domain.register(1 << 16, ALL).unwrap();
    let make = |_| domain.queue_pair(QpKind::Rc, &queue).create().unwrap();
    let _pairs: Vec<_> = (0..QUEUE_PAIRS).map(make).collect();
    say("made");
    hear();
}

/// Kilobytes of a process, by the name in `/proc/PID/status`.
fn kilobytes(process: u32, name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_thousand_queue_pairs_of_fifty_processes_fit() {
    let daemon = TestDaemon::with(&[("TEST_CLIENTS", "64")]);
    let memory = || ["VmRSS", "RssAnon", "RssShmem"].map(|name| kilobytes(daemon.process.number(), name));
    let before = memory();
    let mut owners: Vec<Process> =
        (0..PROCESSES).map(|_| process::spawn("owner", &daemon.name, &[])).collect();
    for owner in &mut owners {
        assert_eq!(owner.hear(), "made");
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
        owner.say("end");
        owner.finish();
    }
}
