//! Captures of congestion: alice and bob write to carol at once through a switch whose queue grows.

use softhca_engine::{CongestionSettings, QpType, Settings};
use softhca_fabric::{EcnMarking, HostId, LinkSettings, PfcSettings, SwitchSettings, Topology};
use softhca_tests::verbs::{ConnectOptions, QpOptions, World};
use softhca_types::{AccessFlags, Operation, RemoteAddress, SendWorkRequest, Sge};
use softhca_wire::{LocalKey, Mtu};
use std::num::NonZeroU64;

/// One capture.
pub struct CongestionCapture {
    pub name: &'static str,
    pub about: &'static str,
    pub switch: fn() -> SwitchSettings,
    pub settings: fn() -> Settings,
}

/// Every capture.
pub const CONGESTION_CAPTURES: &[CongestionCapture] = &[
    CongestionCapture {
        name: "cnp",
        about: "Congestion: a switch sets CE marks, and carol's device sends CNPs to slow down the senders",
        // Marks packets behind more than two others.
        switch: || SwitchSettings {
            ecn_marking: Some(EcnMarking { kmin: 700, kmax: 701, pmax_per_billion: 1_000_000_000 }),
            ..SwitchSettings::default()
        },
        settings: || Settings { congestion: CongestionSettings::DCQCN, ..Settings::default() },
    },
    CongestionCapture {
        name: "pfc",
        about: "Priority flow control: a switch with too many queued packets of priority 3 pauses and resumes both senders",
        switch: || SwitchSettings {
            ecn_marking: None,
            pfc: Some(PfcSettings { xoff: 1_500, xon: 700, ..PfcSettings::default() }),
            ..SwitchSettings::default()
        },
        settings: Settings::default,
    },
];

const ACCESS: AccessFlags = AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_WRITE);
const BYTES: u32 = 4096;

impl CongestionCapture {
    /// Three hosts connected by a switch.
    pub fn world(&self) -> (World, [HostId; 3]) {
        let mut world = World::new(1);
        let hosts = ["alice", "bob", "carol"].map(|name| world.add_host(name, (self.settings)()));
        let line = LinkSettings {
            bits_per_second: NonZeroU64::new(10_000_000_000),
            delay_ns: 500,
            ..LinkSettings::default()
        };
        world.build_topology(&Topology::Star { hosts: 3 }, &hosts, line, (self.switch)()).expect("a star");
        (world, hosts)
    }
}

/// A WRITE from one host to another, with priority 3.
pub fn write(world: &mut World, from: HostId, to: HostId) {
    let ends = [from, to].map(|host| {
        let mut verbs = world.verbs(host);
        let domain = verbs.allocate_protection_domain().expect("a domain");
        let cq = verbs.create_completion_queue(16).expect("a completion queue");
        let qp = verbs.create_queue_pair(QpType::Rc, domain, cq, QpOptions::default()).expect("a queue pair");
        let (key, base) = verbs.register_memory(domain, BYTES.into(), ACCESS).expect("a region");
        (qp, key, base)
    });
    let [(qp, key, base), (peer, remote_key, remote_base)] = ends;
    let connection =
        ConnectOptions { path_mtu: Mtu::B256, traffic_class: 3 << 5, ..ConnectOptions::default() };
    world.connect((from, qp), (to, peer), &connection).expect("a connection");
    let gather = [Sge { address: base, length: BYTES, lkey: LocalKey(key.0) }];
    let remote = RemoteAddress { address: remote_base, rkey: remote_key };
    let request = SendWorkRequest::new(1, Operation::Write { remote, imm_data: None }, &gather);
    world.verbs(from).post_send(qp, &request).expect("room in the queue");
}
