//! Benchmarks of a simulated network: data packets per second on one core, memory, scaling.
//!
//! `cargo bench -p softhca-fabric --bench fabric`. Uses the real engine and headers; payload and ICRC are
//! elided. Prints measurements; does not assert on them.

#[path = "../tests/verbs/mod.rs"]
mod verbs;

use softhca_engine::{CongestionSettings, PayloadMode, QpType, Settings};
use softhca_fabric::{Direction, HostId, LinkSettings, Seed, SwitchSettings, Topology};
use softhca_types::{AccessFlags, Operation, RemoteAddress, SendWorkRequest, Sge};
use softhca_wire::{LocalKey, Mtu};
use std::num::NonZeroU64;
use verbs::{ConnectOptions, QpOptions, World};

const RIGHTS: AccessFlags = AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_WRITE);

/// An ACK for each packet, DCQCN with the paper's parameters.
fn settings() -> Settings {
    Settings {
        payload_mode: PayloadMode::Elided,
        congestion: CongestionSettings::DCQCN,
        ack_request_interval: 1,
        ..Settings::default()
    }
}

fn build(topology: Topology) -> (World, Vec<HostId>) {
    let mut world = World::new(1);
    let hosts: Vec<_> = (0..topology.hosts()).map(|n| world.add_host(&format!("h{n}"), settings())).collect();
    let line = LinkSettings {
        bits_per_second: NonZeroU64::new(100_000_000_000),
        delay_ns: 1_000,
        ..LinkSettings::default()
    };
    world.build_topology(&topology, &hosts, line, SwitchSettings::default()).expect("a topology");
    (world, hosts)
}

/// Posts one WRITE from one host to another.
fn start(world: &mut World, from: HostId, to: HostId, bytes: u32) {
    let ports = [from, to].map(|host| {
        let mut verbs = world.verbs(host);
        let domain = verbs.allocate_protection_domain().expect("a domain");
        let cq = verbs.create_completion_queue(16).expect("a completion queue");
        let options = QpOptions {
            max_send_wr: 4,
            max_recv_wr: 1,
            max_sge: 1,
            max_inline_data: 0,
            ..QpOptions::default()
        };
        let qp = verbs.create_queue_pair(QpType::Rc, domain, cq, options).expect("a queue pair");
        let (key, base) = verbs.register_memory(domain, bytes.into(), RIGHTS).expect("a region");
        (qp, key, base)
    });
    let [(qp, key, base), (peer, peer_key, to_base)] = ports;
    let connection =
        ConnectOptions { path_mtu: Mtu::B4096, traffic_class: 3 << 5, ..ConnectOptions::default() };
    world.connect((from, qp), (to, peer), &connection).expect("a connection");
    let sge = [Sge { address: base, length: bytes, lkey: LocalKey(key.0) }];
    let remote = RemoteAddress { address: to_base, rkey: peer_key };
    let request = SendWorkRequest::new(0, Operation::Write { remote, imm_data: None }, &sge);
    world.verbs(from).post_send(qp, &request).expect("a send");
}

/// A destination for each host: the next host of a shuffled ring.
fn permutation(hosts: &[HostId]) -> Vec<(HostId, HostId)> {
    let mut circle = hosts.to_vec();
    for index in (1..circle.len()).rev() {
        circle.swap(index, Seed(9).below(index as u64 + 1, &[index as u64]) as usize);
    }
    (0..circle.len()).map(|index| (circle[index], circle[(index + 1) % circle.len()])).collect()
}

/// Frames admitted by all links.
fn packet_links(world: &World) -> u64 {
    let links = (0..).map_while(|link| {
        let link = softhca_fabric::LinkId(link);
        world.try_link_ends(link).map(|_| world.link(link))
    });
    let ways = [Direction::Forward, Direction::Backward];
    links.map(|link| ways.iter().map(|way| link.counters(*way).admitted).sum::<u64>()).sum()
}

struct Outcome {
    packets_per_second: f64,
    ns_per_packet_link: f64,
}

/// Runs flows to completion and measures them.
fn run(
    topology: Topology,
    flows: impl Fn(&[HostId]) -> Vec<(HostId, HostId)>,
    bytes: u32,
    tell: bool,
) -> Outcome {
    let (mut world, hosts) = build(topology);
    let flows = flows(&hosts);
    for (from, to) in &flows {
        start(&mut world, *from, *to, bytes);
    }
    let begin = seconds();
    world.run();
    let seconds = seconds() - begin;
    let packets = flows.len() as u64 * u64::from(Mtu::B4096.packets(bytes));
    let links = packet_links(&world);
    if tell {
        let sum = |pick: fn(&softhca_engine::Counters) -> u64| {
            hosts.iter().map(|host| pick(world.host(*host).hca().counters())).sum::<u64>()
        };
        let counters = world.frame_counters();
        println!(
            "  {packets} data packets, {links} packet-links, {:.1} ms simulated; {} marks seen, {} CNPs, {} lost, {} sent again",
            world.now().nanos() as f64 / 1e6,
            sum(|c| c.np_ecn_marked_roce_packets),
            sum(|c| c.np_cnp_sent),
            counters.dropped,
            sum(|c| c.retransmitted_pkts),
        );
        let pauses: u64 =
            hosts.iter().map(|h| world.port_counters(*h).pauses_received.iter().sum::<u64>()).sum();
        println!("  {pauses} pause frames reached hosts");
    }
    Outcome { packets_per_second: packets as f64 / seconds, ns_per_packet_link: seconds * 1e9 / links as f64 }
}

fn incast(hosts: &[HostId]) -> Vec<(HostId, HostId)> {
    let (to, senders) = hosts.split_last().expect("hosts");
    senders.iter().map(|from| (*from, *to)).collect()
}

fn best(count: u32, mut outcome: impl FnMut(bool) -> Outcome) -> (f64, f64) {
    let rates: Vec<f64> = (0..count).map(|n| outcome(n == 0).packets_per_second).collect();
    (rates.iter().copied().fold(f64::MAX, f64::min), rates.iter().copied().fold(0.0, f64::max))
}

/// CPU seconds of this thread, independent of other load on the machine.
fn seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap_or(0) * 4096
}

fn main() {
    let wanted: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|wanted| wanted == name);
    println!(
        "4 KiB packets, an ACK each, 100 Gb/s, 1 µs, DCQCN and PFC on; payload and ICRC elided; seconds of one core"
    );
    if is_wanted("memory") {
        let before = resident_bytes();
        let (mut world, hosts) = build(Topology::FatTree { k: 16 });
        let with_hosts = resident_bytes();
        println!(
            "memory: {} bytes per host of a fat tree of 1024, switches and routes included",
            (with_hosts - before) / 1024
        );
        let pairs = 64 * hosts.len();
        for index in 0..pairs {
            start(&mut world, hosts[index % 1024], hosts[(index * 7 + 1) % 1024], 1);
        }
        let bytes = resident_bytes() - with_hosts;
        println!(
            "memory: {} bytes per queue pair with its queues (4 sends, 1 receive), completion queue and region",
            bytes / (2 * pairs)
        );
    }
    if is_wanted("incast") {
        println!("16-to-1 incast of 64 MB flows through one switch:");
        let (least, most) = best(5, |tell| run(Topology::Star { hosts: 17 }, incast, 64_000_000, tell));
        println!("  {least:.0} to {most:.0} data packets a second");
    }
    if is_wanted("permutation") {
        println!("128-host permutation of 4 MB flows over a fat tree, k = 8:");
        let (least, most) = best(5, |tell| run(Topology::FatTree { k: 8 }, permutation, 4_000_000, tell));
        println!("  {least:.0} to {most:.0} data packets a second");
    }
    if is_wanted("growth") {
        println!(
            "growth: ns per packet-link, permutation of 1 MB flows through one switch, then over fat trees"
        );
        // Small networks finish too soon to measure and run several times.
        let growth = |topology: Topology| {
            let runs = (256 / topology.hosts()).max(3);
            let all = (0..runs).map(|_| run(topology, permutation, 1_000_000, false).ns_per_packet_link);
            let all: Vec<f64> = all.collect();
            let [least, mean] =
                [all.iter().copied().fold(f64::MAX, f64::min), all.iter().sum::<f64>() / runs as f64];
            println!("  {:5} hosts, {topology:?}: {mean:.0} ns, at best {least:.0}", topology.hosts());
        };
        let at_most: u32 = wanted.iter().find_map(|word| word.parse().ok()).unwrap_or(1024);
        [2, 8, 32, 128, 512, 1024]
            .into_iter()
            .filter(|hosts| *hosts <= at_most)
            .for_each(|hosts| growth(Topology::Star { hosts }));
        [4, 8, 16]
            .into_iter()
            .filter(|k| k * k * k / 4 <= at_most)
            .for_each(|k| growth(Topology::FatTree { k }));
    }
}
