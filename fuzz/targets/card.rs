//! A connected card is brought packets that nobody should send, and must stay in order.
#![no_main]

use libfuzzer_sys::fuzz_target;
use softhca_engine::{QpKind, Settings};
use softhca_fabric::{Connection, Frame, Line, QpOptions, World};
use softhca_queue::{Access, Receive, Sge};
use softhca_wire::{Envelope, Icrc, LocalKey};

const RIGHTS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);

fuzz_target!(|data: &[u8]| {
    let mut world = World::new(1);
    let hosts = ["a", "b"].map(|name| world.add_host(name, Settings::default()));
    world.add_cable(hosts[0], hosts[1], Line::default());
    let kinds = [QpKind::Rc, QpKind::Uc];
    let mut numbers = Vec::new();
    for kind in kinds {
        let ends = hosts.map(|host| {
            let mut verbs = world.on(host);
            let domain = verbs.allocate_domain().unwrap();
            let cq = verbs.create_completion_queue(64).unwrap();
            let qp = verbs.create_queue_pair(kind, domain, cq, QpOptions::default()).unwrap();
            let (key, address) = verbs.register(domain, 4096, RIGHTS).unwrap();
            let scatter = [Sge { address, length: 2048, key: LocalKey(key.0) }];
            (host, qp, scatter)
        });
        world.connect((ends[0].0, ends[0].1), (ends[1].0, ends[1].1), &Connection::default()).unwrap();
        let (host, qp, scatter) = ends[1];
        world.on(host).post_receive(qp, &Receive { id: 1, scatter: &scatter }).unwrap();
        numbers.push(qp);
    }
    let envelope = Envelope::between(world.host(hosts[0]).address(), world.host(hosts[1]).address());
    // Packets of the fuzzer's making, each behind its length, aimed at a queue pair that exists.
    let mut rest = data;
    while let [length, choice, tail @ ..] = rest {
        let length = usize::from(*length).min(tail.len());
        let (packet, after) = tail.split_at(length);
        rest = after;
        let mut bytes = packet.to_vec();
        bytes.resize(bytes.len().max(12), 0);
        let target = numbers[usize::from(*choice) % numbers.len()].value().to_be_bytes();
        bytes[5..8].copy_from_slice(&target[1..]);
        bytes.extend([0; 4]);
        Icrc::seal(&envelope, &mut bytes);
        world.inject(hosts[1], Frame::new(envelope, bytes));
    }
    world.run();
    assert!(world.census().balances());
});
