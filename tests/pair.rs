//! Two hosts, a cable, two connected queue pairs with a region each, and a record of all that happened.

use softhca_engine::{
    AddressVector, Counters, CqId, Event, Instant, PdId, QpKind, Reason, Recovery, Settings, SrqId, SrqInit,
    State,
};
use softhca_fabric::{
    Action, CableId, Connection, Direction, Fault, Frame, HostId, Line, Observer, QpOptions, Repeat, Role,
    Rule, RuleId, Selector, Sense, Span, Stage, Verbs, World,
};
use softhca_queue::{
    Access, Completion, Datagram, Operation, Receive, RemoteAddress, SendRequest, SendTrailer, Sge,
};
use softhca_wire::{Gid, LocalKey, Mtu, Psn, Qpn, QueueKey, RemoteKey, Transport};
use std::cell::RefCell;
use std::net::IpAddr;
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
    /// Where receives come from, if they are shared.
    pub srq: Option<SrqId>,
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
    /// Where datagrams of the first end go.
    pub datagram: Datagram,
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
    /// The second end takes its receives from a shared queue.
    pub shared: bool,
    /// The addresses of the hosts, unless the world chooses.
    pub addresses: Option<[IpAddr; 2]>,
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
            shared: false,
            addresses: None,
        }
    }
}

impl Setup {
    pub fn of(kind: QpKind) -> Setup {
        Setup::default().kind(kind)
    }

    pub fn mtu(mut self, mtu: Mtu) -> Setup {
        self.connection.mtu = mtu;
        self
    }

    pub fn kind(mut self, kind: QpKind) -> Setup {
        self.kind = kind;
        self
    }

    pub fn recovery(mut self, recovery: Recovery) -> Setup {
        self.settings.recovery = recovery;
        self
    }

    /// Changes how the two are connected.
    pub fn connection(mut self, change: impl FnOnce(&mut Connection)) -> Setup {
        change(&mut self.connection);
        self
    }

    /// A line that takes its time: 1 Gbit/s, so that packets follow each other.
    pub fn slow(mut self) -> Setup {
        self.line.bits_per_second = std::num::NonZeroU64::new(1_000_000_000);
        self
    }

    /// Two hosts with IPv6 addresses.
    pub fn ipv6(mut self) -> Setup {
        self.addresses = Some(["fd00::1", "fd00::2"].map(|address| address.parse().unwrap()));
        self
    }

    /// The second end takes its receives from a shared queue.
    pub fn shared(mut self) -> Setup {
        self.shared = true;
        self
    }

    fn end(&self, world: &mut World, host: HostId, is_second: bool) -> End {
        let mut verbs = world.on(host);
        let domain = verbs.allocate_domain().unwrap();
        let cq = verbs.create_completion_queue(1024).unwrap();
        let (mut kind, mut options, mut srq) = (self.kind, self.options, None);
        if is_second && (self.shared || kind == QpKind::XrcInitiator) {
            let mut init = SrqInit { domain, limit: 0, extended: None };
            if kind == QpKind::XrcInitiator {
                let xrc_domain = verbs.open_xrc_domain().unwrap();
                (kind, options.xrc_domain) = (QpKind::XrcTarget, Some(xrc_domain));
                init.extended = Some((cq, xrc_domain));
            }
            srq = Some(verbs.create_shared_receive_queue(init, 64, 32).unwrap());
            options.shared_receive_queue = srq.filter(|_| kind != QpKind::XrcTarget);
        }
        let qp = verbs.create_queue_pair(kind, domain, cq, options).unwrap();
        let (key, base) = verbs.register(domain, self.region, ALL).unwrap();
        End { host, domain, cq, qp, key, base, srq }
    }

    pub fn build(self) -> Pair {
        self.build_seen(|_| Box::new(()))
    }

    /// Builds a pair that somebody else sees too, from before its queue pairs are there.
    pub fn build_seen(self, see: impl FnOnce(&World) -> Box<dyn Observer>) -> Pair {
        let mut world = World::new(self.seed);
        let record = Rc::new(RefCell::new(Record::default()));
        let hosts = [("alice", 0), ("bob", 1)].map(|(name, index)| match self.addresses {
            Some(addresses) => world.add_host_at(name, addresses[index], self.settings),
            None => world.add_host(name, self.settings),
        });
        let cable = world.add_cable(hosts[0], hosts[1], self.line);
        let observers: Vec<Box<dyn Observer>> = vec![Box::new(Recorder(record.clone())), see(&world)];
        world.observe(observers);
        let a = self.end(&mut world, hosts[0], false);
        let b = self.end(&mut world, hosts[1], true);
        let mut datagram = Datagram::default();
        if self.kind.is_datagram() {
            for end in [a, b] {
                world.on(end.host).start_datagrams(end.qp, QUEUE_KEY, Psn::new(0)).unwrap();
            }
            let to = AddressVector::to(Gid::from(world.host(b.host).address()));
            let handle = world.on(a.host).create_address_handle(a.domain, to).unwrap();
            datagram = Datagram { address_handle: handle.0, queue_pair: b.qp, queue_key: QUEUE_KEY };
        } else {
            world.connect((a.host, a.qp), (b.host, b.qp), &self.connection).unwrap();
        }
        Pair { world, cable, a, b, record, datagram, rules: 0 }
    }
}

/// The key of datagram pairs.
pub const QUEUE_KEY: QueueKey = QueueKey(0x1111);

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

    /// Loses the first `times` packets that match.
    pub fn lose(&mut self, selector: Selector, times: u64) {
        self.rule(selector, Repeat::times(times), Action::Drop);
    }

    /// The verbs of an end's host.
    pub fn on(&mut self, end: End) -> Verbs<'_> {
        self.world.on(end.host)
    }

    /// Posts a signalled request at the first end.
    pub fn post(&mut self, id: u64, operation: Operation, gather: &[Sge]) {
        self.post_with(id, operation, gather, |_| {});
    }

    /// Posts a signalled request at the first end, after `change`.
    pub fn post_with(
        &mut self,
        id: u64,
        operation: Operation,
        gather: &[Sge],
        change: impl FnOnce(&mut SendRequest<'_>),
    ) {
        let mut request = SendRequest::new(id, operation, gather);
        request.datagram = self.datagram;
        request.shared_receive_queue = self.b.srq.map_or(0, |srq| srq.0);
        change(&mut request);
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
        self.post_receive_into(id, &[self.b.sge(offset, length)]);
    }

    /// Posts a receive at the second end.
    pub fn post_receive_into(&mut self, id: u64, scatter: &[Sge]) {
        let (receive, End { qp, srq, .. }) = (Receive { id, scatter }, self.b);
        let mut verbs = self.world.on(self.b.host);
        match srq {
            Some(srq) => verbs.post_shared_receive(srq, &receive).unwrap(),
            None => verbs.post_receive(qp, &receive).unwrap(),
        }
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

    /// The states of both ends.
    pub fn states(&mut self) -> [&'static str; 2] {
        [self.a, self.b].map(|end| self.state(end).name())
    }

    /// The asynchronous events of an end, by the names of the verbs.
    pub fn raised(&self, end: End) -> Vec<&'static str> {
        let record = self.record.borrow();
        let raised = record.events.iter().filter(|(_, host, _)| *host == end.host);
        raised
            .filter_map(
                |(.., event)| if let Event::Raised { event, .. } = event { Some(event.name()) } else { None },
            )
            .collect()
    }

    /// Why the request with this id ended as it did at an end.
    pub fn why(&self, end: End, id: u64) -> Reason {
        let record = self.record.borrow();
        let mut at_end = record.events.iter().filter(|(_, host, _)| *host == end.host);
        at_end
            .find_map(|(.., event)| match event {
                Event::Completed { completion, reason, .. } if completion.id == id => Some(*reason),
                _ => None,
            })
            .expect("the request completed")
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

/// The requests of the first end with these PSNs, relative to its first.
pub fn requests(psn: Span) -> Selector {
    Selector { role: Some(Role(1)), sense: Some(Sense::Request), psn: Some(psn), ..Selector::default() }
}

/// The answers to the first end with these PSNs, relative to its first.
pub fn answers(psn: Span) -> Selector {
    Selector { sense: Some(Sense::Response), ..requests(psn) }
}

/// `length` bytes that are different at every place and for every salt.
pub fn pattern(salt: u64, length: usize) -> Vec<u8> {
    (0..length as u64).map(|i| ((i + salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}
