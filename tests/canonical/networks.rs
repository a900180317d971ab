//! Congestion: alice and bob write to carol at once, through a switch whose queue grows.

use softhca_engine::{Congestion, QpKind, Settings};
use softhca_fabric::{
    Connection, FlowControl, HostId, Line, Marking, QpOptions, SwitchSettings, Topology, World,
};
use softhca_queue::{Access, Operation, RemoteAddress, SendRequest, Sge};
use softhca_wire::{LocalKey, Mtu};
use std::num::NonZeroU64;

/// One capture.
pub struct Network {
    pub name: &'static str,
    pub about: &'static str,
    pub switch: fn() -> SwitchSettings,
    pub card: fn() -> Settings,
}

/// Every capture.
pub const NETWORKS: &[Network] = &[
    Network {
        name: "cnp",
        about: "Congestion: a switch marks what leaves its queue, and carol's card asks the senders with CNPs to slow down",
        // What finds more than two packets before it is marked.
        switch: || SwitchSettings {
            marking: Some(Marking { least: 700, most: 701, per_billion: 1_000_000_000 }),
            ..SwitchSettings::default()
        },
        card: || Settings { congestion: Congestion::DCQCN, ..Settings::default() },
    },
    Network {
        name: "pfc",
        about: "Priority flow control: a switch that holds too much of priority 3 pauses both senders, and lets them go on",
        switch: || SwitchSettings {
            marking: None,
            flow_control: Some(FlowControl { xoff: 1_500, xon: 700, ..FlowControl::default() }),
            ..SwitchSettings::default()
        },
        card: Settings::default,
    },
];

const RIGHTS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);
const BYTES: u32 = 4096;

impl Network {
    /// Three hosts and a switch between them.
    pub fn world(&self) -> (World, [HostId; 3]) {
        let mut world = World::new(1);
        let hosts = ["alice", "bob", "carol"].map(|name| world.add_host(name, (self.card)()));
        let line =
            Line { bits_per_second: NonZeroU64::new(10_000_000_000), delay_ns: 500, ..Line::default() };
        world.lay_out(&Topology::Star { hosts: 3 }, &hosts, line, (self.switch)()).expect("a star");
        (world, hosts)
    }
}

/// A WRITE from one host to another, with priority 3.
pub fn write(world: &mut World, from: HostId, to: HostId) {
    let ends = [from, to].map(|host| {
        let mut verbs = world.on(host);
        let domain = verbs.allocate_domain().expect("a domain");
        let cq = verbs.create_completion_queue(16).expect("a completion queue");
        let qp = verbs.create_queue_pair(QpKind::Rc, domain, cq, QpOptions::default()).expect("a queue pair");
        let (key, base) = verbs.register(domain, BYTES.into(), RIGHTS).expect("a region");
        (qp, key, base)
    });
    let [(qp, key, base), (peer, remote_key, remote_base)] = ends;
    let connection = Connection { mtu: Mtu::B256, traffic_class: 3 << 5, ..Connection::default() };
    world.connect((from, qp), (to, peer), &connection).expect("a connection");
    let gather = [Sge { address: base, length: BYTES, key: LocalKey(key.0) }];
    let remote = RemoteAddress { address: remote_base, key: remote_key };
    let request = SendRequest::new(1, Operation::Write { remote, immediate: None }, &gather);
    world.on(from).post_send(qp, &request).expect("room in the queue");
}
