//! Two processes in two network namespaces, connected by a veth pair: MTU 1500 and 9000, IPv4 and IPv6; and a foreign
//! peer behind a slow link with a small queue. The test creates the namespaces; without permission it counts as ignored.

use super::Role;
use libtest_mimic::Trial;
use softhca::{
    AccessFlags, CompletionStatus, ConnectOptions, Device, EmbeddedOptions, Endpoint, Mtu, QpType,
    ReceiveRequest, Recovery, RemoteAddress, RemoteKey, SendRequest, Settings,
};
use softhca_tests::process::{self, Process, TEST_TIMEOUT, receive_line, send_line};
use softhca_tests::{namespace, tools};
use std::process::Command;

const BYTES: usize = 4 << 20;
const MESSAGES: u64 = 64;

/// The roles of this binary inside the namespaces.
pub const ROLES: &[Role] = &[
    ("alice", run_alice),
    ("bob", run_bob),
    ("requester", run_requester),
    ("foreign responder", run_foreign_responder),
];

pub fn trials() -> Vec<Trial> {
    let mut tests = Vec::new();
    for mtu in [1500, 9000] {
        for version in [4, 6] {
            let name = format!("two_hosts_on_a_link_of_mtu_{mtu}_over_ipv{version}");
            tests.push(tools::needs_namespace(&name, move || run(mtu, version)));
        }
    }
    for (recovery, queue) in [(Recovery::Fatal, "400kb"), (Recovery::GoBackN, "48kb")] {
        let name = format!("foreign_peer_behind_a_queue_of_{queue}_with_recovery_{}", recovery.name());
        tests.push(tools::needs_namespace(&name, move || run_foreign(recovery, queue)));
    }
    tests
}

fn run(mtu: u32, version: u32) {
    let mut command = process::command(namespace::wrapper().unwrap(), "alice");
    command.env("TEST_MTU", mtu.to_string()).env("TEST_VERSION", version.to_string());
    let mut alice = Process::start(&mut command);
    println!("MTU {mtu}, IPv{version}: {}", alice.receive_line());
    alice.finish();
}

fn run_tool(program: &str, arguments: &str) {
    let status = Command::new(program).args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "{program} {arguments}");
}

fn ip(arguments: &str) {
    run_tool("ip", arguments);
}

fn number(name: &str) -> u32 {
    std::env::var(name).unwrap().parse().unwrap()
}

/// Configures the addresses of the interface and waits until it is up.
fn configure(interface: &str, host: u32) {
    ip(&format!("link set {interface} mtu {} up", number("TEST_MTU")));
    ip(&format!("addr add 10.77.0.{host}/24 dev {interface}"));
    ip(&format!("-6 addr add fd77::{host}/64 dev {interface} nodad"));
}

fn open_device(host: u32) -> Device {
    let address = match number("TEST_VERSION") {
        4 => format!("10.77.0.{host}"),
        _ => format!("fd77::{host}"),
    };
    let options = EmbeddedOptions { address: Some(address.parse().unwrap()), ..EmbeddedOptions::default() };
    Device::embedded_with(options).unwrap()
}

/// The largest path MTU of the interface.
fn path() -> ConnectOptions {
    let mtu = if number("TEST_MTU") >= 4096 + 128 { Mtu::B4096 } else { Mtu::B1024 };
    ConnectOptions { path_mtu: mtu, ..ConnectOptions::default() }
}

fn assert_nothing_dropped(device: &Device) {
    let [roce, link] = device.receive_buffer_usage().unwrap().unwrap();
    assert_eq!([roce.dropped, link.dropped], [0, 0], "{roce:?} {link:?}");
}

const ACCESS: AccessFlags =
    AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_WRITE).union(AccessFlags::REMOTE_READ);

/// Creates the link and runs every kind of transfer.
fn run_alice() {
    let mut bob = Process::start(&mut process::command(&["unshare", "--net"], "bob"));
    assert_eq!(bob.receive_line(), "here");
    ip("link add alice0 type veth peer name bob0");
    ip(&format!("link set bob0 netns {}", bob.id()));
    configure("alice0", 1);
    bob.send_line("the link is up");

    let device = open_device(1);
    let context = device.open();
    let domain = context.allocate_protection_domain().unwrap();
    let queue = context.create_completion_queue(256).unwrap();
    let region = domain.allocate_region(BYTES as u64, ACCESS).unwrap();
    let pair = domain.create_queue_pair(QpType::Rc, &queue).build().unwrap();
    let answer = bob.receive_line();
    let mut fields = answer.splitn(3, ' ');
    let mut field = || fields.next().unwrap();
    let remote =
        RemoteAddress { address: field().parse().unwrap(), rkey: RemoteKey(field().parse().unwrap()) };
    let peer: Endpoint = field().parse().unwrap();
    pair.connect(&peer, &path()).unwrap();
    bob.send_line(&pair.endpoint().to_string());
    assert_eq!(bob.receive_line(), "connected");

    let finish = |count: usize| {
        for _ in 0..count {
            let completion = queue.wait_for(TEST_TIMEOUT).expect("a completion");
            assert!(completion.status.is_success(), "{completion:?}");
        }
    };
    let half = BYTES / 2;
    let data: Vec<u8> = (0..half as u32).map(|index| (index % 251) as u8).collect();
    region.write_at(0, &data);
    let whole = [region.sge(0, half as u32)];
    pair.post_send(&SendRequest::rdma_write(1, &whole, remote)).unwrap();
    finish(1);
    pair.post_send(&SendRequest::rdma_read(2, &[region.sge(half as u64, half as u32)], remote)).unwrap();
    finish(1);
    assert_eq!(region.read_at(half as u64, half as u64), data);
    for id in 0..MESSAGES {
        pair.post_send(&SendRequest::send(id, &[region.sge(0, 10_000)])).unwrap();
    }
    finish(MESSAGES as usize);
    // Frames of all sizes, as fast as grants allow.
    for id in 0..128 {
        pair.post_send(&SendRequest::rdma_write(id, &[region.sge(0, 1 + id as u32 * 400)], remote)).unwrap();
    }
    finish(128);
    assert_eq!(bob.receive_line(), "received");
    assert_nothing_dropped(&device);
    let counters = context.counters();
    assert_eq!((counters.packet_seq_err, counters.implied_nak_seq_err), (0, 0));
    bob.send_line("done");
    bob.finish();
    send_line(&format!("{} packets sent, {} received", counters.sent_pkts, counters.rcvd_pkts));
}

fn run_bob() {
    send_line("here");
    assert_eq!(receive_line().unwrap(), "the link is up");
    configure("bob0", 2);
    let device = open_device(2);
    let context = device.open();
    let domain = context.allocate_protection_domain().unwrap();
    let queue = context.create_completion_queue(256).unwrap();
    let region = domain.allocate_region(BYTES as u64, ACCESS).unwrap();
    let pair = domain.create_queue_pair(QpType::Rc, &queue).build().unwrap();
    let RemoteAddress { address, rkey: key } = region.remote_address(0);
    send_line(&format!("{address} {} {}", key.0, pair.endpoint()));
    pair.init(&path()).unwrap();
    for id in 0..MESSAGES {
        let scatter = [region.sge((BYTES / 2) as u64 + id * 16_384, 16_384)];
        pair.post_recv(&ReceiveRequest { wr_id: id, sg_list: &scatter }).unwrap();
    }
    pair.connect(&receive_line().unwrap().parse().unwrap(), &path()).unwrap();
    send_line("connected");
    for id in 0..MESSAGES {
        let completion = queue.wait_for(TEST_TIMEOUT).expect("a message");
        assert!(completion.status.is_success() && completion.wr_id == id, "{completion:?}");
        assert_eq!(completion.byte_len, 10_000);
    }
    send_line("received");
    assert_eq!(receive_line().unwrap(), "done");
    assert_nothing_dropped(&device);
    assert_eq!(context.counters().out_of_sequence, 0);
}

/// Messages of each kind and size to a foreign peer.
const FOREIGN_MESSAGES: u64 = 8;
const FOREIGN_SIZES: [u32; 2] = [64 << 10, 1 << 20];

fn run_foreign(recovery: Recovery, queue: &str) {
    let mut command = process::command(namespace::wrapper().unwrap(), "requester");
    command.env("TEST_MTU", "1500").env("TEST_VERSION", "4");
    command.env("TEST_RECOVERY", recovery.name()).env("TEST_QUEUE", queue);
    for _ in 0..5 {
        let mut requester = Process::start(&mut command);
        let report = requester.receive_line();
        println!("{}, queue of {queue}: {report}", recovery.name());
        requester.finish();
        if report != REORDERED {
            return;
        }
    }
    panic!("{REORDERED} in every run");
}

/// What the requester reports if packets arrived in another order: to a foreign peer that is loss. A veth pair keeps the
/// order of what one processor sends, in most runs.
const REORDERED: &str = "reordered by the link";

fn open_foreign_device(host: u32, link_control: bool) -> Device {
    let foreign_recovery = Recovery::from_name(&std::env::var("TEST_RECOVERY").unwrap()).unwrap();
    let defaults = EmbeddedOptions::default();
    let settings = Settings { foreign_recovery, ..defaults.settings };
    let address = Some(format!("10.77.0.{host}").parse().unwrap());
    Device::embedded_with(EmbeddedOptions { address, settings, link_control, ..defaults }).unwrap()
}

/// Sends to a peer without link control over a link of 400 Mb/s. Its queue is larger than the window in `fatal`, and
/// overflows in `go-back-n`.
fn run_requester() {
    process::use_one_processor();
    let is_fatal = std::env::var("TEST_RECOVERY").unwrap() == Recovery::Fatal.name();
    let mut responder = Process::start(&mut process::command(&["unshare", "--net"], "foreign responder"));
    assert_eq!(responder.receive_line(), "here");
    ip("link add alice0 type veth peer name bob0");
    ip(&format!("link set bob0 netns {}", responder.id()));
    configure("alice0", 1);
    let queue = std::env::var("TEST_QUEUE").unwrap();
    run_tool("tc", &format!("qdisc add dev alice0 root tbf rate 400mbit burst 16kb limit {queue}"));
    responder.send_line("the link is up");
    let device = open_foreign_device(1, true);
    let context = device.open();
    let domain = context.allocate_protection_domain().unwrap();
    let cq = context.create_completion_queue(256).unwrap();
    let region = domain.allocate_region(1 << 20, ACCESS).unwrap();
    let qp = domain.create_queue_pair(QpType::Rc, &cq).build().unwrap();
    let answer = responder.receive_line();
    let mut fields = answer.splitn(3, ' ');
    let mut field = || fields.next().unwrap();
    let remote =
        RemoteAddress { address: field().parse().unwrap(), rkey: RemoteKey(field().parse().unwrap()) };
    let peer: Endpoint = field().parse().unwrap();
    qp.connect(&peer, &path()).unwrap();
    responder.send_line(&qp.endpoint().to_string());
    assert_eq!(responder.receive_line(), "connected");
    let data: Vec<u8> = (0..1u32 << 20).map(|index| (index % 251) as u8).collect();
    region.write_at(0, &data);
    for size in FOREIGN_SIZES {
        let sges = [region.sge(0, size)];
        for id in 0..FOREIGN_MESSAGES {
            qp.post_send(&SendRequest::rdma_write(id, &sges, remote)).unwrap();
            qp.post_send(&SendRequest::send(id, &sges)).unwrap();
        }
        for _ in 0..2 * FOREIGN_MESSAGES {
            let completion = cq.wait_for(TEST_TIMEOUT).expect("a completion");
            if is_fatal && completion.status == CompletionStatus::RetryExceededError && !has_dropped("alice0")
            {
                return send_line(REORDERED);
            }
            assert!(completion.status.is_success(), "{completion:?}");
        }
    }
    assert_eq!(responder.receive_line(), "received");
    let counters = context.counters();
    let report = format!("{} packets, {} retransmitted", counters.sent_pkts, counters.retransmitted_pkts);
    let most = if is_fatal { 0 } else { counters.sent_pkts / 4 };
    assert!(counters.retransmitted_pkts <= most, "{report}");
    responder.send_line("done");
    responder.finish();
    send_line(&report);
}

/// Whether the queue of an interface has dropped a packet.
fn has_dropped(interface: &str) -> bool {
    let output = Command::new("tc").args(["-s", "qdisc", "show", "dev", interface]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("dropped"), "{text}");
    !text.contains("dropped 0,")
}

fn run_foreign_responder() {
    send_line("here");
    assert_eq!(receive_line().unwrap(), "the link is up");
    configure("bob0", 2);
    let device = open_foreign_device(2, false);
    let context = device.open();
    let domain = context.allocate_protection_domain().unwrap();
    let cq = context.create_completion_queue(256).unwrap();
    let region = domain.allocate_region(2 << 20, ACCESS).unwrap();
    let qp = domain.create_queue_pair(QpType::Rc, &cq).build().unwrap();
    let RemoteAddress { address, rkey } = region.remote_address(0);
    send_line(&format!("{address} {} {}", rkey.0, qp.endpoint()));
    qp.init(&path()).unwrap();
    for id in 0..FOREIGN_SIZES.len() as u64 * FOREIGN_MESSAGES {
        qp.post_recv(&ReceiveRequest { wr_id: id, sg_list: &[region.sge(1 << 20, 1 << 20)] }).unwrap();
    }
    qp.connect(&receive_line().unwrap().parse().unwrap(), &path()).unwrap();
    send_line("connected");
    for size in FOREIGN_SIZES {
        for _ in 0..FOREIGN_MESSAGES {
            let completion = cq.wait_for(TEST_TIMEOUT).expect("a message");
            assert!(completion.status.is_success() && completion.byte_len == size, "{completion:?}");
        }
    }
    let data: Vec<u8> = (0..1u32 << 20).map(|index| (index % 251) as u8).collect();
    assert_eq!(region.read_at(0, 1 << 20), data, "written");
    assert_eq!(region.read_at(1 << 20, 1 << 20), data, "sent");
    send_line("received");
    assert_eq!(receive_line().unwrap(), "done");
}
