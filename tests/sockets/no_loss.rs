//! No packet is lost on the way to a device, even if its process stops: 1 or 64 processes write to one that is stopped
//! until all have noticed, with the default receive buffer and with a large one. Loss would break a connection, and no
//! counter counts a dropped packet. Probes of a process that is stopped for long may fill its link control socket: they
//! are repeated, and one answered probe is enough.
//!
//! The processes run in a network namespace where that is allowed, so that the kernel counters cover only them.

use crate::{Role, stopped_receiver};
use softhca::{
    Device, EmbeddedOptions,
    trace::{EventSink, NetworkEvent},
};
use softhca_tests::process::{self, Process, receive_line, send_line};
use softhca_tests::{namespace, tools};
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The default receive buffer of a socket.
const DEFAULT_BUFFER: usize = 212_992;
const LARGE_BUFFER: usize = 4 << 20;

pub const ROLES: &[Role] =
    &[("coordinator", run_coordinator), ("receiver", run_receiver), ("sender", run_sender)];

#[test]
fn one_process_loses_nothing_with_the_default_buffer() {
    nothing_is_lost(1, DEFAULT_BUFFER);
}

#[test]
fn one_process_loses_nothing_with_a_large_buffer() {
    nothing_is_lost(1, LARGE_BUFFER);
}

#[test]
fn sixty_four_processes_lose_nothing_with_the_default_buffer() {
    nothing_is_lost(64, DEFAULT_BUFFER);
}

#[test]
fn sixty_four_processes_lose_nothing_with_a_large_buffer() {
    nothing_is_lost(64, LARGE_BUFFER);
}

fn nothing_is_lost(senders: usize, buffer: usize) {
    let _crowd = crate::crowd();
    let wrapper = namespace::wrapper();
    if wrapper.is_none() {
        assert!(!tools::is_required(), "{}", namespace::NOT_ALLOWED);
        println!("{}: only the receiver's own sockets are asked", namespace::NOT_ALLOWED);
    }
    let mut command = process::command(wrapper.unwrap_or_default(), "coordinator");
    command.env("TEST_SENDERS", senders.to_string()).env("TEST_BUFFER", buffer.to_string());
    command.env("TEST_ALONE", if wrapper.is_some() { "1" } else { "0" });
    let mut coordinator = Process::start(&mut command);
    println!("{senders} processes: {}", coordinator.receive_line());
    coordinator.finish();
}

fn variable(name: &str) -> usize {
    std::env::var(name).unwrap().parse().unwrap()
}

/// Datagrams that the kernel dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct KernelDrops {
    /// Because of full receive buffers and lack of memory, in this network namespace.
    receive_buffer: u64,
    memory: u64,
    /// In the per-CPU backlog queues, system-wide.
    backlog: u64,
}

impl KernelDrops {
    fn read() -> KernelDrops {
        let snmp = fs::read_to_string("/proc/net/snmp").unwrap();
        let mut lines = snmp.lines().filter(|line| line.starts_with("Udp:"));
        let [names, values] = [(); 2].map(|()| lines.next().unwrap().split_whitespace());
        let field = |wanted: &str| {
            let found = names.clone().zip(values.clone()).find(|(name, _)| *name == wanted);
            found.map_or(0, |(_, value)| value.parse().unwrap())
        };
        let softnet = fs::read_to_string("/proc/net/softnet_stat").unwrap();
        let backlog =
            softnet.lines().map(|line| u64::from_str_radix(line.split(' ').nth(1).unwrap(), 16).unwrap());
        KernelDrops {
            receive_buffer: field("RcvbufErrors"),
            memory: field("MemErrors"),
            backlog: backlog.sum(),
        }
    }

    fn since(self, before: KernelDrops) -> KernelDrops {
        KernelDrops {
            receive_buffer: self.receive_buffer - before.receive_buffer,
            memory: self.memory - before.memory,
            backlog: self.backlog - before.backlog,
        }
    }
}

/// Starts receiver and senders, stops and resumes the receiver, and checks the counters.
fn run_coordinator() {
    let senders = variable("TEST_SENDERS");
    let number = std::process::id();
    let host = |last: usize| {
        let octets = [127, 64 + (number / 250 % 64) as u8, (number % 250) as u8, last as u8];
        Ipv4Addr::from(octets).to_string()
    };
    let before = KernelDrops::read();
    let start = |role: &str, index: usize, last: usize| {
        let mut command = process::command(&[], role);
        Process::start(command.env("TEST_ADDRESS", host(last)).env("TEST_INDEX", index.to_string()))
    };
    let mut receiver = start("receiver", 0, 1);
    let mut all: Vec<Process> = (0..senders).map(|index| start("sender", index, 2 + index)).collect();
    for sender in &mut all {
        receiver.send_line(&sender.receive_line());
        sender.send_line(&receiver.receive_line());
    }
    all.iter_mut().for_each(|sender| assert_eq!(sender.receive_line(), "running"));
    let stopped = rustix::process::Pid::from_raw(receiver.id() as i32).unwrap();
    rustix::process::kill_process(stopped, rustix::process::Signal::STOP).unwrap();
    // Every sender has written as much as was granted, and has missed the receiver's heartbeats.
    all.iter_mut().for_each(|sender| sender.send_line("await-stall"));
    all.iter_mut().for_each(|sender| assert_eq!(sender.receive_line(), "stalled"));
    rustix::process::kill_process(stopped, rustix::process::Signal::CONT).unwrap();
    all.iter_mut().for_each(|sender| sender.send_line("mark"));
    all.iter_mut().for_each(|sender| assert_eq!(sender.receive_line(), "resumed"));
    all.iter_mut().for_each(|sender| sender.send_line("end"));
    let completed: u64 = all.iter_mut().map(|sender| sender.receive_line().parse::<u64>().unwrap()).sum();
    receiver.send_line("check");
    let report = receiver.receive_line();
    let dropped = KernelDrops::read().since(before);
    if variable("TEST_ALONE") == 1 {
        let probes: u64 = report.split(' ').next().unwrap().parse().unwrap();
        assert_eq!((dropped.receive_buffer, dropped.memory), (probes, 0), "{dropped:?}");
    }
    if tools::is_required() {
        assert_eq!(dropped.backlog, 0, "{dropped:?}");
    }
    send_line(&format!("{completed} transfers, {report}, {dropped:?}"));
}

/// Whether the peer of a sender is stalled.
#[derive(Clone, Default)]
struct StallFlag(Arc<AtomicBool>);

impl EventSink for StallFlag {
    fn on_event(&mut self, _: softhca::Instant, event: &NetworkEvent<'_>) {
        if let NetworkEvent::PeerLinkChanged { change, .. } = event {
            self.0.store(*change == "stalled", Ordering::Release);
        }
    }
}

fn device(stalled: StallFlag) -> Device {
    let address: IpAddr = std::env::var("TEST_ADDRESS").unwrap().parse().unwrap();
    // The kernel doubles the requested size.
    let receive_buffer = variable("TEST_BUFFER") as u32 / 2;
    let options = EmbeddedOptions {
        address: Some(address),
        receive_buffer,
        event_sink: Box::new(stalled),
        ..EmbeddedOptions::default()
    };
    Device::embedded_with(options).unwrap()
}

fn run_receiver() {
    let device = device(StallFlag::default());
    let _ends = stopped_receiver::receive(&device);
    let [roce, link] = device.receive_buffer_usage().unwrap().unwrap();
    assert_eq!(roce.dropped, 0, "{roce:?} {link:?}");
    let wanted = variable("TEST_BUFFER");
    let granted = if roce.limit as usize == wanted { "as asked" } else { "less than asked" };
    let (limit, probes) = (roce.limit, link.dropped);
    send_line(&format!(
        "{probes} probes and no packet dropped by the receiver, buffer {limit} bytes ({granted})"
    ));
    while receive_line().is_some() {}
}

/// Writes repeatedly until the coordinator ends it.
fn run_sender() {
    let stalled = StallFlag::default();
    let device = device(stalled.clone());
    stopped_receiver::send(&device, variable("TEST_INDEX"), 8, move |line| {
        if line != "await-stall" {
            return false;
        }
        while !stalled.0.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(5));
        }
        send_line("stalled");
        true
    });
}
