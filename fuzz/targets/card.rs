//! Arbitrary packets to a connected HCA: it must keep its invariants.
#![no_main]

#[path = "../../emulator/fabric/tests/verbs/mod.rs"]
mod verbs;

use libfuzzer_sys::fuzz_target;
use softhca_engine::{QpType, Settings};
use softhca_fabric::{Frame, LinkSettings};
use softhca_types::{AccessFlags, ReceiveWorkRequest, Sge};
use softhca_wire::{AddressHeaders, Icrc, LocalKey};
use verbs::{ConnectOptions, QpOptions, World};

const RIGHTS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC);

fuzz_target!(|data: &[u8]| {
    let mut world = World::new(1);
    let hosts = ["a", "b"].map(|name| world.add_host(name, Settings::default()));
    world.add_link(hosts[0], hosts[1], LinkSettings::default());
    let types = [QpType::Rc, QpType::Uc];
    let mut qpns = Vec::new();
    for qp_type in types {
        let ends = hosts.map(|host| {
            let mut verbs = world.verbs(host);
            let pd = verbs.allocate_protection_domain().unwrap();
            let cq = verbs.create_completion_queue(64).unwrap();
            let qp = verbs.create_queue_pair(qp_type, pd, cq, QpOptions::default()).unwrap();
            let (key, address) = verbs.register_memory(pd, 4096, RIGHTS).unwrap();
            let scatter = [Sge { address, length: 2048, lkey: LocalKey(key.0) }];
            (host, qp, scatter)
        });
        world.connect((ends[0].0, ends[0].1), (ends[1].0, ends[1].1), &ConnectOptions::default()).unwrap();
        let (host, qp, scatter) = ends[1];
        world.verbs(host).post_receive(qp, &ReceiveWorkRequest { wr_id: 1, sg_list: &scatter }).unwrap();
        qpns.push(qp);
    }
    let addressing = AddressHeaders::between(world.host(hosts[0]).address(), world.host(hosts[1]).address());
    // Packets from the fuzzer, each after its length, addressed to an existing queue pair.
    let mut rest = data;
    while let [length, choice, tail @ ..] = rest {
        let length = usize::from(*length).min(tail.len());
        let (packet, after) = tail.split_at(length);
        rest = after;
        let mut bytes = packet.to_vec();
        bytes.resize(bytes.len().max(12), 0);
        let target = qpns[usize::from(*choice) % qpns.len()].value().to_be_bytes();
        bytes[5..8].copy_from_slice(&target[1..]);
        bytes.extend([0; 4]);
        Icrc::write(&addressing, &mut bytes);
        world.inject(hosts[1], Frame::new(addressing, bytes));
    }
    world.run();
    assert!(world.frame_counters().is_balanced());
});
