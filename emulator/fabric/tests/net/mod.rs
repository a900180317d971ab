//! What the tests of the switched network share: hosts with connected queue pairs, and what happened.

#![allow(dead_code, missing_docs, reason = "each test file uses a part")]

use softhca_engine::{Congestion, CqId, Event, Instant, PayloadMode, QpKind, Settings};
use softhca_fabric::{
    CableId, Connection, Direction, FabricEvent, Fault, Frame, HostId, Laid, Line, Node, Observer, QpOptions,
    Stage, SwitchSettings, Topology, World,
};
use softhca_queue::{Access, Operation, RemoteAddress, SendFlags, SendRequest, Sge};
use softhca_wire::{LocalKey, Mtu, Pfc, Qpn, RemoteKey};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::rc::Rc;

pub const RIGHTS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ);
pub const GBIT: u64 = 1_000_000_000;

pub fn line(gbit: u64, delay_ns: u64) -> Line {
    Line { bits_per_second: NonZeroU64::new(gbit * GBIT), delay_ns, ..Line::default() }
}

/// Everything that happened, and a digest of it.
#[derive(Default)]
pub struct Record {
    pub fabric: Vec<(u64, FabricEvent)>,
    pub cards: Vec<(u64, HostId, Event)>,
    pub pauses: Vec<(u64, CableId, Direction, Stage, Pfc)>,
    pub faults: Vec<Fault>,
    /// Payload bytes that each host received, by queue pair.
    pub received: BTreeMap<(HostId, Qpn), u64>,
    pub digest: u64,
}

impl Record {
    fn note(&mut self, text: &str) {
        for byte in text.bytes() {
            self.digest = (self.digest ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }

    pub fn count(&self, wanted: impl Fn(&FabricEvent) -> bool) -> usize {
        self.fabric.iter().filter(|(_, event)| wanted(event)).count()
    }

    pub fn lost(&self) -> usize {
        self.count(|event| matches!(event, FabricEvent::Lost { .. }))
    }

    pub fn marked(&self) -> usize {
        self.count(|event| matches!(event, FabricEvent::Marked { .. }))
    }

    pub fn paused(&self) -> usize {
        self.count(|event| matches!(event, FabricEvent::PauseSent { quanta: 1.., .. }))
    }

    pub fn pauses_of(&self, node: Node) -> usize {
        self.count(|event| matches!(event, FabricEvent::PauseSent { at, quanta: 1.., .. } if *at == node))
    }
}

pub struct Eye(pub Rc<RefCell<Record>>);

impl Observer for Eye {
    fn card(&mut self, now: Instant, host: HostId, event: &Event) {
        let mut record = self.0.borrow_mut();
        match event {
            Event::PacketReceived { qp, packet } => {
                *record.received.entry((host, *qp)).or_default() += u64::from(packet.payload);
            }
            Event::PacketSent { .. } | Event::MemoryWritten { .. } => {}
            event => record.cards.push((now.nanos(), host, *event)),
        }
    }

    fn frame(&mut self, now: Instant, cable: CableId, _: Direction, stage: Stage, frame: &Frame) {
        self.0.borrow_mut().note(&format!("{now:?} {cable:?} {stage:?} {:?}", frame.envelope));
    }

    fn pause(&mut self, now: Instant, cable: CableId, direction: Direction, stage: Stage, pause: &Pfc) {
        self.0.borrow_mut().pauses.push((now.nanos(), cable, direction, stage, *pause));
    }

    fn fault(&mut self, _: Instant, _: CableId, fault: &Fault) {
        self.0.borrow_mut().faults.push(*fault);
    }

    fn fabric(&mut self, now: Instant, event: &FabricEvent) {
        let mut record = self.0.borrow_mut();
        record.note(&format!("{now:?} {event:?}"));
        record.fabric.push((now.nanos(), *event));
    }
}

/// One queue pair and what it works with.
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
    pub laid: Laid,
    pub record: Rc<RefCell<Record>>,
}

/// Bytes of the region of every queue pair.
pub const REGION: u64 = 1 << 20;

impl Net {
    pub fn new(seed: u64, topology: Topology, line: Line, switch: SwitchSettings, settings: Settings) -> Net {
        let mut world = World::new(seed);
        let record = Rc::new(RefCell::new(Record::default()));
        world.observe(Eye(record.clone()));
        let hosts: Vec<_> =
            (0..topology.hosts()).map(|n| world.add_host(&format!("h{n}"), settings)).collect();
        let laid = world.lay_out(&topology, &hosts, line, switch).expect("a topology");
        Net { world, hosts, laid, record }
    }

    fn port(&mut self, host: HostId) -> Port {
        let mut verbs = self.world.on(host);
        let domain = verbs.allocate_domain().unwrap();
        let cq = verbs.create_completion_queue(4096).unwrap();
        let options = QpOptions { sends: 1024, ..QpOptions::default() };
        let qp = verbs.create_queue_pair(QpKind::Rc, domain, cq, options).unwrap();
        let (key, base) = verbs.register(domain, REGION, RIGHTS).unwrap();
        Port { host, qp, cq, key, base }
    }

    pub fn connect(&mut self, from: usize, to: usize) -> Flow {
        self.connect_with(
            from,
            to,
            &Connection { mtu: Mtu::B4096, traffic_class: 3 << 5, ..Connection::default() },
        )
    }

    pub fn connect_with(&mut self, from: usize, to: usize, connection: &Connection) -> Flow {
        let (from, to) = (self.port(self.hosts[from]), self.port(self.hosts[to]));
        self.world.connect((from.host, from.qp), (to.host, to.qp), connection).unwrap();
        Flow { from, to }
    }

    /// Posts WRITEs of `size` bytes, `count` of them.
    pub fn write(&mut self, flow: Flow, size: u32, count: u32) {
        for id in 0..count {
            let sge = [Sge { address: flow.from.base, length: size, key: LocalKey(flow.from.key.0) }];
            let remote = RemoteAddress { address: flow.to.base, key: flow.to.key };
            let operation = Operation::Write { remote, immediate: None };
            let mut request = SendRequest::new(u64::from(id), operation, &sge);
            request.flags = SendFlags::SIGNALED;
            self.world.on(flow.from.host).post_send(flow.from.qp, &request).unwrap();
        }
    }

    pub fn run_us(&mut self, until: u64) -> bool {
        self.world.run_until(Instant::from_nanos(until * 1_000))
    }

    /// Payload bytes of a flow that arrived so far.
    pub fn received(&self, flow: Flow) -> u64 {
        self.record.borrow().received.get(&(flow.to.host, flow.to.qp)).copied().unwrap_or(0)
    }

    pub fn completions(&mut self, flow: Flow) -> (usize, bool) {
        let done = self.world.on(flow.from.host).poll_all(flow.from.cq);
        (done.len(), done.iter().all(|completion| completion.status.is_success()))
    }
}

/// Cards whose packets carry no payload: what these tests ask does not depend on it.
pub fn plain() -> Settings {
    Settings { payload: PayloadMode::Elided, ..Settings::default() }
}

/// Cards that do DCQCN with the paper's parameters.
pub fn dcqcn() -> Settings {
    Settings { congestion: Congestion::DCQCN, ..plain() }
}
