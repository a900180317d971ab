//! No packet is lost on the way to a device, even if its process stops: 1 to 64 processes write to one that is stopped
//! until all have noticed, with the default receive buffer and with a large one. Loss would break a connection, and no
//! counter counts a dropped packet. Probes of a process that is stopped for long may fill its link control socket: they
//! are repeated, and one answered probe is enough.
//!
//! The processes run in a network namespace where that is allowed, so that the kernel counters cover only them.

use crate::Role;
use softhca::{
    AccessFlags, ConnectOptions, Device, EmbeddedOptions, Endpoint, Mtu, QpType, RemoteAddress, RemoteKey,
    SendRequest,
    trace::{EventSink, NetworkEvent},
};
use softhca_tests::process::{self, Process, TEST_TIMEOUT, receive_line, send_line};
use softhca_tests::{namespace, tools};
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// The default receive buffer of a socket.
const DEFAULT_BUFFER: usize = 212_992;
const LARGE_BUFFER: usize = 4 << 20;
/// Bytes of the receiver's memory per sender.
const RECEIVE_BYTES: usize = 65_536;
/// Completions before the receiver is stopped, and after it is resumed.
const COMPLETIONS_PER_PHASE: u64 = 32;

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
fn eight_processes_lose_nothing_with_the_default_buffer() {
    nothing_is_lost(8, DEFAULT_BUFFER);
}

#[test]
fn eight_processes_lose_nothing_with_a_large_buffer() {
    nothing_is_lost(8, LARGE_BUFFER);
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
    let start = |role: &str, last: usize| {
        let mut command = process::command(&[], role);
        Process::start(command.env("TEST_ADDRESS", host(last)).env("TEST_INDEX", last.to_string()))
    };
    let mut receiver = start("receiver", 1);
    let mut all: Vec<Process> = (0..senders).map(|index| start("sender", 2 + index)).collect();
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

/// Accepts connections and sleeps: the device's own thread does the work.
fn run_receiver() {
    let device = device(StallFlag::default());
    let context = device.open();
    let domain = context.allocate_protection_domain().unwrap();
    let queue = context.create_completion_queue(16).unwrap();
    let mut ends = Vec::new();
    while let Some(line) = receive_line().filter(|line| line != "check") {
        let (index, peer) = line.split_once(' ').unwrap();
        let index: usize = index.parse().unwrap();
        let pair =
            domain.create_queue_pair(QpType::Rc, &queue).max_send_wr(4).max_recv_wr(4).build().unwrap();
        let region = domain
            .allocate_region(RECEIVE_BYTES as u64, AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE)
            .unwrap();
        pair.connect(&peer.parse().unwrap(), &path(index)).unwrap();
        let RemoteAddress { address, rkey: key } = region.remote_address(0);
        send_line(&format!("{address} {} {}", key.0, pair.endpoint()));
        ends.push((index, pair, region));
    }
    for (index, _, region) in &ends {
        let (size, pattern) = (size(*index), *index as u8);
        assert!(region.read_at(0, size as u64).iter().all(|byte| *byte == pattern), "sender {index}");
    }
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

/// Full frames, smaller ones and tiny ones, which have the highest overhead.
fn size(index: usize) -> usize {
    [RECEIVE_BYTES, 20_000, 64][index % 3]
}

fn path(index: usize) -> ConnectOptions {
    ConnectOptions { path_mtu: [Mtu::B4096, Mtu::B1024, Mtu::B256][index % 3], ..ConnectOptions::default() }
}

/// Writes repeatedly until the coordinator ends it.
fn run_sender() {
    let index = variable("TEST_INDEX");
    let stalled = StallFlag::default();
    let device = device(stalled.clone());
    let context = device.open();
    let domain = context.allocate_protection_domain().unwrap();
    let queue = context.create_completion_queue(64).unwrap();
    let region = domain.allocate_region(RECEIVE_BYTES as u64, AccessFlags::LOCAL_WRITE).unwrap();
    region.write_at(0, &vec![index as u8; RECEIVE_BYTES]);
    let pair = domain.create_queue_pair(QpType::Rc, &queue).build().unwrap();
    send_line(&format!("{index} {}", pair.endpoint()));
    let answer = receive_line().unwrap();
    let mut fields = answer.splitn(3, ' ');
    let mut field = || fields.next().unwrap();
    let remote =
        RemoteAddress { address: field().parse().unwrap(), rkey: RemoteKey(field().parse().unwrap()) };
    let peer: Endpoint = field().parse().unwrap();
    pair.connect(&peer, &path(index)).unwrap();

    let messages = Arc::new(AtomicU64::new(0));
    std::thread::spawn({
        let messages = messages.clone();
        move || {
            while let Some(line) = receive_line() {
                if line == "await-stall" {
                    while !stalled.0.load(Ordering::Acquire) {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    send_line("stalled");
                } else {
                    messages.fetch_add(1, Ordering::Release);
                }
            }
            std::process::exit(0);
        }
    });
    let entries = [region.sge(0, size(index) as u32)];
    let post = |id| pair.post_send(&SendRequest::rdma_write(id, &entries, remote)).unwrap();
    (0..8).for_each(post);
    let (mut completed, mut next, mut marked) = (0, 8, None);
    while completed < next {
        let completion = queue.wait_for(TEST_TIMEOUT).expect("a completion");
        assert!(completion.status.is_success(), "{completion:?}");
        assert_eq!(completion.wr_id, completed);
        completed += 1;
        let received = messages.load(Ordering::Acquire);
        if received < 2 {
            post(next);
            next += 1;
        }
        if completed == COMPLETIONS_PER_PHASE {
            send_line("running");
        }
        if received >= 1 && marked.is_none() {
            marked = Some(completed + COMPLETIONS_PER_PHASE);
        }
        if marked == Some(completed) {
            send_line("resumed");
        }
    }
    send_line(&completed.to_string());
    loop {
        std::thread::park();
    }
}
