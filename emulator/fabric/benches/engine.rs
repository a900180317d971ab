//! Benchmarks of the engine and of a world: `cargo bench -p softhca-fabric --bench engine`.
//!
//! Prints measurements; does not assert on them.

#[path = "../tests/bare/mod.rs"]
mod bare;
mod card;
#[path = "../tests/verbs/mod.rs"]
mod verbs;

use bare::RIGHTS;
use card::Card;
use softhca_engine::{Context, Instant, QpType, Settings};
use softhca_fabric::LinkSettings;
use softhca_types::{Operation, RemoteAddress, SendWorkRequest, Sge};
use softhca_wire::{Icrc, LocalKey, Mtu};
use std::time::Instant as Clock;
use verbs::{ConnectOptions, QpOptions, World};

/// Sends all pending packets of `from` to `to`. Returns their number.
fn exchange(now: Instant, from: &mut Card, to: &mut Card, buffer: &mut [u8]) -> u64 {
    let mut packets = 0;
    let mut ctx = Context { now, memory: &mut from.store, events: &mut |_, _| {} };
    from.hca.process_doorbells(&mut ctx);
    loop {
        let mut ctx = Context { now, memory: &mut from.store, events: &mut |_, _| {} };
        let Some(run) = from.hca.transmit(&mut ctx, &mut (), buffer, 64) else { return packets };
        let mut ctx = Context { now, memory: &mut to.store, events: &mut |_, _| {} };
        for (index, packet) in buffer[..run.bytes].chunks_mut(run.segment_size).enumerate() {
            let mut addressing = run.addressing;
            addressing.identification = index as u16;
            Icrc::write(&addressing, packet);
            let (transport, icrc) = Icrc::split(packet).unwrap();
            assert_eq!(Icrc::compute(&addressing, transport), icrc);
            to.hca.receive(&mut ctx, &addressing, transport);
            packets += 1;
        }
    }
}

/// Nanoseconds per data packet through requester, wire, responder and completer: the best of several rounds.
fn per_packet(mtu: Mtu, message: u32, idle: usize, busy: usize) -> f64 {
    rounds(mtu, message, idle, busy, 8, 200_000)
}

fn rounds(mtu: Mtu, message: u32, idle: usize, busy: usize, count: u32, each: u64) -> f64 {
    let (mut a, mut b) = (Card::new(1, 64, idle), Card::new(2, 64, idle));
    for index in 0..busy {
        a.connect(index, &b, mtu);
        b.connect(index, &a, mtu);
    }
    let mut buffer = vec![0; 65_536];
    let (mut now, mut packets) = (0, 0);
    let mut best = f64::INFINITY;
    let mut next = 0;
    for _ in 0..count {
        let start = Clock::now();
        let before = packets;
        while packets - before < each {
            now += 1_000;
            let at = Instant::from_nanos(now);
            for _ in 0..32 {
                next = (next + 1) % busy;
                a.post_write(next, &b, message);
            }
            packets += exchange(at, &mut a, &mut b, &mut buffer);
            exchange(at, &mut b, &mut a, &mut buffer);
            while a.completions.pop().is_some() {}
        }
        best = best.min(start.elapsed().as_nanos() as f64 / (packets - before) as f64);
    }
    best
}

/// Simulated data packets per second in a world of two hosts, with an ACK per message.
fn world(mtu: Mtu, message: u32) -> f64 {
    let mut world = World::new(1);
    let hosts = ["a", "b"].map(|name| world.add_host(name, Settings::default()));
    world.add_link(hosts[0], hosts[1], LinkSettings { delay_ns: 1_000, ..LinkSettings::default() });
    let ends = hosts.map(|host| {
        let mut verbs = world.verbs(host);
        let domain = verbs.allocate_protection_domain().unwrap();
        let cq = verbs.create_completion_queue(4096).unwrap();
        let qp = verbs.create_queue_pair(QpType::Rc, domain, cq, QpOptions::default()).unwrap();
        let (key, base) = verbs.register_memory(domain, 4 << 20, RIGHTS).unwrap();
        (host, qp, cq, key, base)
    });
    let [(a, qa, cq, key, base), (b, qb, _, peer, to)] = ends;
    world.connect((a, qa), (b, qb), &ConnectOptions { path_mtu: mtu, ..ConnectOptions::default() }).unwrap();
    let start = Clock::now();
    let mut messages = 0;
    while start.elapsed().as_millis() < 1_000 {
        for _ in 0..32 {
            let sge = [Sge { address: base, length: message, lkey: LocalKey(key.0) }];
            let remote = RemoteAddress { address: to, rkey: peer };
            let request = SendWorkRequest::new(0, Operation::Write { remote, imm_data: None }, &sge);
            world.verbs(a).post_send(qa, &request).unwrap();
            messages += 1;
        }
        world.run();
        assert_eq!(world.verbs(a).poll_all(cq).len(), 32);
    }
    f64::from(messages * mtu.packets(message)) / start.elapsed().as_secs_f64()
}

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap_or(0) * 4096
}

fn main() {
    // For instruction counts: valgrind --tool=callgrind target/release/deps/engine-… profile
    if std::env::args().any(|argument| argument == "profile") {
        rounds(Mtu::B1024, 65_536, 0, 1, 1, 200_000);
        return;
    }
    println!("ns per packet through requester, wire, responder and completer, ICRC included:");
    for (name, mtu, message) in [
        ("64 B messages", Mtu::B1024, 64),
        ("1 KiB packets of 64 KiB messages", Mtu::B1024, 65_536),
        ("4 KiB packets of 256 KiB messages", Mtu::B4096, 262_144),
    ] {
        println!("  {name:36} {:7.0}", per_packet(mtu, message, 0, 1));
    }
    let before = resident_bytes();
    let crowd = Card::new(3, 16, 10_000);
    let idle = (resident_bytes() - before) / 10_000;
    println!("bytes per idle queue pair (16 sends, 1 receive):   {idle}");
    drop(crowd);
    let alone = per_packet(Mtu::B1024, 64, 0, 1);
    let crowded = per_packet(Mtu::B1024, 64, 10_000, 1);
    let spread = per_packet(Mtu::B1024, 64, 10_000, 10_000);
    println!(
        "64 B: 1 queue pair {alone:.0} ns, beside 10,000 idle ones {crowded:.0} ns (ratio {:.2})",
        crowded / alone
    );
    println!("64 B: round robin over 10,000 queue pairs {spread:.0} ns (ratio {:.2})", spread / alone);
    let alone = per_packet(Mtu::B1024, 65_536, 0, 1);
    let spread = per_packet(Mtu::B1024, 65_536, 10_000, 10_000);
    println!(
        "1 KiB packets: one queue pair {alone:.0} ns, round robin over 10,000 {spread:.0} ns (ratio {:.2})",
        spread / alone
    );
    println!("simulated data packets per second in a world, one core:");
    for (name, mtu, message) in [
        ("64 B messages, an ACK each", Mtu::B1024, 64),
        ("1 KiB packets of 64 KiB messages", Mtu::B1024, 65_536),
        ("4 KiB packets, an ACK each", Mtu::B4096, 4096),
    ] {
        println!("  {name:36} {:10.0}", world(mtu, message));
    }
}
