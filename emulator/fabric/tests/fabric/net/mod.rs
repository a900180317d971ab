//! Common parts of the tests of switched networks: connected hosts and an event record.

#![allow(dead_code, missing_docs, reason = "each test file uses a part")]

#[path = "../../verbs/mod.rs"]
pub mod verbs;

use softhca_engine::{CongestionSettings, CqId, Event, Instant, PayloadMode, QpType, Settings};
use softhca_fabric::{
    BuiltTopology, Direction, EventSink, FabricEvent, Fault, HostId, LinkId, LinkSettings, NetworkEvent,
    Node, Stage, SwitchSettings, Topology,
};
use softhca_types::{AccessFlags, Operation, RemoteAddress, SendFlags, SendWorkRequest, Sge};
use softhca_wire::{LocalKey, Mtu, Pfc, Qpn, RemoteKey};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::rc::Rc;
use verbs::{ConnectOptions, QpOptions, World};

pub const RIGHTS: AccessFlags =
    AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_WRITE).union(AccessFlags::REMOTE_READ);
pub const GBIT: u64 = 1_000_000_000;

pub fn line(gbit: u64, delay_ns: u64) -> LinkSettings {
    LinkSettings { bits_per_second: NonZeroU64::new(gbit * GBIT), delay_ns, ..LinkSettings::default() }
}

/// All events, and a digest.
#[derive(Default)]
pub struct Record {
    pub fabric: Vec<(u64, FabricEvent)>,
    pub cards: Vec<(u64, HostId, Event)>,
    pub pauses: Vec<(u64, LinkId, Direction, Stage, Pfc)>,
    pub faults: Vec<Fault>,
    /// Payload bytes received, by host and queue pair.
    pub received: BTreeMap<(HostId, Qpn), u64>,
    pub digest: u64,
}

impl Record {
    fn digest(&mut self, text: &str) {
        for byte in text.bytes() {
            self.digest = (self.digest ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }

    pub fn count(&self, wanted: impl Fn(&FabricEvent) -> bool) -> usize {
        self.fabric.iter().filter(|(_, event)| wanted(event)).count()
    }

    pub fn lost(&self) -> usize {
        self.count(|event| matches!(event, FabricEvent::FrameDropped { .. }))
    }

    pub fn marked(&self) -> usize {
        self.count(|event| matches!(event, FabricEvent::EcnMarked { .. }))
    }

    pub fn paused(&self) -> usize {
        self.count(|event| matches!(event, FabricEvent::PauseSent { quanta: 1.., .. }))
    }

    pub fn pauses_of(&self, node: Node) -> usize {
        self.count(
            |event| matches!(event, FabricEvent::PauseSent { node: at, quanta: 1.., .. } if *at == node),
        )
    }
}

pub struct RecordSink(pub Rc<RefCell<Record>>);

impl EventSink for RecordSink {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        let mut record = self.0.borrow_mut();
        match *event {
            NetworkEvent::Hca { host, event: Event::PacketReceived { qp, packet } } => {
                *record.received.entry((host, *qp)).or_default() += u64::from(packet.payload_length);
            }
            NetworkEvent::Hca { event: Event::PacketSent { .. } | Event::MemoryWritten { .. }, .. } => {}
            NetworkEvent::Hca { host, event } => record.cards.push((now.nanos(), host, *event)),
            NetworkEvent::Frame { link, stage, addressing, .. } => {
                record.digest(&format!("{now:?} {link:?} {stage:?} {addressing:?}"));
            }
            NetworkEvent::PauseFrame { link, direction, stage, pause } => {
                record.pauses.push((now.nanos(), link, direction, stage, *pause));
            }
            NetworkEvent::Fault { fault, .. } => record.faults.push(*fault),
            NetworkEvent::Fabric(event) => {
                record.digest(&format!("{now:?} {event:?}"));
                record.fabric.push((now.nanos(), event));
            }
            NetworkEvent::PortAttached { .. } | NetworkEvent::PeerLinkChanged { .. } => {}
        }
    }
}

/// A queue pair and its resources.
#[derive(Clone, Copy, Debug)]
pub struct Port {
    pub host: HostId,
    pub qp: Qpn,
    pub cq: CqId,
    pub key: RemoteKey,
    pub base: u64,
}

/// A connection from one host to another.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    pub from: Port,
    pub to: Port,
}

pub struct Net {
    pub world: World,
    pub hosts: Vec<HostId>,
    pub laid: BuiltTopology,
    pub record: Rc<RefCell<Record>>,
}

/// Bytes of each queue pair's region.
pub const REGION: u64 = 1 << 20;

impl Net {
    pub fn new(
        seed: u64,
        topology: Topology,
        line: LinkSettings,
        switch: SwitchSettings,
        settings: Settings,
    ) -> Net {
        let mut world = World::new(seed);
        let record = Rc::new(RefCell::new(Record::default()));
        world.set_sink(RecordSink(record.clone()));
        let hosts: Vec<_> =
            (0..topology.hosts()).map(|n| world.add_host(&format!("h{n}"), settings)).collect();
        let laid = world.build_topology(&topology, &hosts, line, switch).expect("a topology");
        Net { world, hosts, laid, record }
    }

    fn port(&mut self, host: HostId) -> Port {
        let mut verbs = self.world.verbs(host);
        let domain = verbs.allocate_protection_domain().unwrap();
        let cq = verbs.create_completion_queue(4096).unwrap();
        let options = QpOptions { max_send_wr: 1024, ..QpOptions::default() };
        let qp = verbs.create_queue_pair(QpType::Rc, domain, cq, options).unwrap();
        let (key, base) = verbs.register_memory(domain, REGION, RIGHTS).unwrap();
        Port { host, qp, cq, key, base }
    }

    pub fn connect(&mut self, from: usize, to: usize) -> Flow {
        self.connect_with(
            from,
            to,
            &ConnectOptions { path_mtu: Mtu::B4096, traffic_class: 3 << 5, ..ConnectOptions::default() },
        )
    }

    pub fn connect_with(&mut self, from: usize, to: usize, connection: &ConnectOptions) -> Flow {
        let (from, to) = (self.port(self.hosts[from]), self.port(self.hosts[to]));
        self.world.connect((from.host, from.qp), (to.host, to.qp), connection).unwrap();
        Flow { from, to }
    }

    /// Posts `count` WRITEs of `size` bytes.
    pub fn write(&mut self, flow: Flow, size: u32, count: u32) {
        for id in 0..count {
            let sge = [Sge { address: flow.from.base, length: size, lkey: LocalKey(flow.from.key.0) }];
            let remote = RemoteAddress { address: flow.to.base, rkey: flow.to.key };
            let operation = Operation::Write { remote, imm_data: None };
            let mut request = SendWorkRequest::new(u64::from(id), operation, &sge);
            request.flags = SendFlags::SIGNALED;
            self.world.verbs(flow.from.host).post_send(flow.from.qp, &request).unwrap();
        }
    }

    pub fn run_us(&mut self, until: u64) -> bool {
        self.world.run_until(Instant::from_nanos(until * 1_000))
    }

    /// Payload bytes of a flow that have arrived.
    pub fn received(&self, flow: Flow) -> u64 {
        self.record.borrow().received.get(&(flow.to.host, flow.to.qp)).copied().unwrap_or(0)
    }

    pub fn completions(&mut self, flow: Flow) -> (usize, bool) {
        let done = self.world.verbs(flow.from.host).poll_all(flow.from.cq);
        (done.len(), done.iter().all(|completion| completion.status.is_success()))
    }
}

/// Settings with elided payload.
pub fn plain() -> Settings {
    Settings { payload_mode: PayloadMode::Elided, ..Settings::default() }
}

/// Settings for DCQCN with the paper's parameters.
pub fn dcqcn() -> Settings {
    Settings { congestion: CongestionSettings::DCQCN, ..plain() }
}
