//! Two hosts, a cable, two connected queue pairs with a region each, and a record of all that happened.

use softhca_engine::{Counters, CqId, Event, Instant, PdId, QpKind, Settings, State};
use softhca_fabric::{
    Action, CableId, Connection, Direction, Fault, Frame, HostId, Line, Observer, QpOptions, Repeat, Role,
    Rule, RuleId, Selector, Stage, World,
};
use softhca_queue::{Access, Completion, Operation, Receive, RemoteAddress, SendRequest, SendTrailer, Sge};
use softhca_wire::{LocalKey, Mtu, Qpn, RemoteKey, Transport};
use std::cell::RefCell;
use std::rc::Rc;

/// What a test may look at afterwards.
#[derive(Default)]
pub struct Record {
    /// Every event of every card.
    pub events: Vec<(Instant, HostId, Event)>,
    /// Every frame that a host put on a cable.
    pub sent: Vec<(Direction, Frame)>,
    /// Every fault.
    pub faults: Vec<Fault>,
}

/// Writes into a [`Record`] that the test keeps.
pub struct Recorder(pub Rc<RefCell<Record>>);

impl Observer for Recorder {
    fn card(&mut self, now: Instant, host: HostId, event: &Event) {
        self.0.borrow_mut().events.push((now, host, *event));
    }

    fn frame(&mut self, _: Instant, _: CableId, direction: Direction, stage: Stage, frame: &Frame) {
        if stage == Stage::Admitted {
            self.0.borrow_mut().sent.push((direction, frame.clone()));
        }
    }

    fn fault(&mut self, _: Instant, _: CableId, fault: &Fault) {
        self.0.borrow_mut().faults.push(*fault);
    }
}

/// One end of the pair.
#[derive(Clone, Copy, Debug)]
pub struct End {
    pub host: HostId,
    pub domain: PdId,
    pub cq: CqId,
    pub qp: Qpn,
    /// A region of 1 MiB with every right.
    pub key: RemoteKey,
    pub base: u64,
}

impl End {
    /// A gather entry at an offset into the region.
    pub fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge { address: self.base + offset, length, key: LocalKey(self.key.0) }
    }

    /// The region as a peer names it.
    pub fn remote(&self, offset: u64) -> RemoteAddress {
        RemoteAddress { address: self.base + offset, key: self.key }
    }
}

/// Two connected ends.
pub struct Pair {
    pub world: World,
    pub cable: CableId,
    pub a: End,
    pub b: End,
    pub record: Rc<RefCell<Record>>,
    rules: u32,
}

/// Everything that a pair may differ in.
#[derive(Clone, Copy)]
pub struct Setup {
    pub seed: u64,
    pub kind: QpKind,
    pub settings: Settings,
    pub connection: Connection,
    pub options: QpOptions,
    pub line: Line,
    pub region: u64,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            seed: 1,
            kind: QpKind::Rc,
            settings: Settings::default(),
            connection: Connection { roles: [Some(Role(1)), Some(Role(2))], ..Connection::default() },
            options: QpOptions { entries: 32, ..QpOptions::default() },
            line: Line { delay_ns: 1_000, ..Line::default() },
            region: 1 << 20,
        }
    }
}

impl Setup {
    pub fn mtu(mut self, mtu: Mtu) -> Setup {
        self.connection.mtu = mtu;
        self
    }

    pub fn kind(mut self, kind: QpKind) -> Setup {
        self.kind = kind;
        self
    }

    pub fn recovery(mut self, recovery: softhca_engine::Recovery) -> Setup {
        self.settings.recovery = recovery;
        self
    }

    pub fn build(self) -> Pair {
        let mut world = World::new(self.seed);
        let record = Rc::new(RefCell::new(Record::default()));
        world.observe(Recorder(record.clone()));
        let hosts = ["alice", "bob"].map(|name| world.add_host(name, self.settings));
        let cable = world.add_cable(hosts[0], hosts[1], self.line);
        let [a, b] = hosts.map(|host| {
            let mut verbs = world.on(host);
            let domain = verbs.allocate_domain().unwrap();
            let cq = verbs.create_completion_queue(1024).unwrap();
            let qp = verbs.create_queue_pair(self.kind, domain, cq, self.options).unwrap();
            let (key, base) = verbs.register(domain, self.region, ALL).unwrap();
            End { host, domain, cq, qp, key, base }
        });
        world.connect((a.host, a.qp), (b.host, b.qp), &self.connection).unwrap();
        Pair { world, cable, a, b, record, rules: 0 }
    }
}

/// Every right that a region can have.
pub const ALL: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::WINDOW_BIND);

impl Pair {
    pub fn new() -> Pair {
        Setup::default().build()
    }

    /// Adds a fault rule to the cable.
    pub fn rule(&mut self, selector: Selector, repeat: Repeat, action: Action) {
        self.rules += 1;
        self.world.add_rule(self.cable, Rule { id: RuleId(self.rules), selector, repeat, action });
    }

    /// Posts a signalled request at the first end.
    pub fn post(&mut self, id: u64, operation: Operation, gather: &[Sge]) {
        let request = SendRequest::new(id, operation, gather);
        self.world.on(self.a.host).post_send(self.a.qp, &request).unwrap();
    }

    pub fn post_send(&mut self, id: u64, offset: u64, length: u32) {
        self.post(id, Operation::Send(SendTrailer::None), &[self.a.sge(offset, length)]);
    }

    pub fn post_write(&mut self, id: u64, offset: u64, to: u64, length: u32) {
        let remote = self.b.remote(to);
        self.post(id, Operation::Write { remote, immediate: None }, &[self.a.sge(offset, length)]);
    }

    pub fn post_read(&mut self, id: u64, offset: u64, from: u64, length: u32) {
        let remote = self.b.remote(from);
        self.post(id, Operation::Read { remote }, &[self.a.sge(offset, length)]);
    }

    /// Posts a receive at the second end.
    pub fn post_receive(&mut self, id: u64, offset: u64, length: u32) {
        let scatter = [self.b.sge(offset, length)];
        self.world.on(self.b.host).post_receive(self.b.qp, &Receive { id, scatter: &scatter }).unwrap();
    }

    /// Goes on until nothing is left to happen, and checks that no frame appeared or vanished.
    pub fn run(&mut self) {
        self.world.run();
        let census = self.world.census();
        assert!(census.balances(), "{census:?}");
        assert_eq!(census.in_flight, 0);
    }

    /// Everything that completed at an end.
    pub fn completions(&mut self, end: End) -> Vec<Completion> {
        self.world.on(end.host).poll_all(end.cq)
    }

    /// Id and status of everything that completed at an end.
    pub fn outcomes(&mut self, end: End) -> Vec<(u64, &'static str)> {
        self.completions(end).iter().map(|c| (c.id, c.status.name())).collect()
    }

    pub fn state(&mut self, end: End) -> State {
        self.world.on(end.host).query(end.qp).unwrap().state
    }

    pub fn fill(&mut self, end: End, offset: u64, bytes: &[u8]) {
        self.world.on(end.host).write(end.key, end.base + offset, bytes);
    }

    pub fn read(&mut self, end: End, offset: u64, length: usize) -> Vec<u8> {
        self.world.on(end.host).read(end.key, end.base + offset, length)
    }

    pub fn counters(&self, end: End) -> Counters {
        *self.world.host(end.host).card().counters()
    }

    /// The packets that were sent, in order: direction and one-line display without addresses and keys.
    pub fn packets(&self) -> Vec<String> {
        let record = self.record.borrow();
        let show = |(direction, frame): &(Direction, Frame)| {
            let transport = Transport::parse(&frame.bytes[..frame.bytes.len() - 4]).unwrap();
            let header = &transport.header;
            let arrow = if *direction == Direction::Forward { "->" } else { "<-" };
            let mut line = format!("{arrow} {} {}", header.bth.opcode.name(), header.bth.psn);
            if let Some(aeth) = header.aeth {
                line += &format!(" {aeth}");
            }
            if header.bth.opcode.has_payload() {
                line += &format!(" {}B", transport.payload.len());
            }
            line
        };
        record.sent.iter().map(show).collect()
    }
}

impl Default for Pair {
    fn default() -> Pair {
        Pair::new()
    }
}

/// `length` bytes that are different at every place and for every salt.
pub fn pattern(salt: u64, length: usize) -> Vec<u8> {
    (0..length as u64).map(|i| ((i + salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}
