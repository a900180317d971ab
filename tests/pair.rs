//! Two hosts, a link, two connected queue pairs with a memory region each, and a recording of all events.

use crate::verbs::{ConnectOptions, QpOptions, Verbs, World};
use softhca_engine::{
    AddressVector, Counters, CqId, Event, Instant, PdId, QpState, QpType, Reason, Recovery, Settings, SrqId,
    SrqInitAttributes,
};
use softhca_fabric::{
    Action, Direction, EventSink, Fault, FlowId, Frame, HostId, InclusiveRange, LinkId, LinkSettings,
    NetworkEvent, PacketType, Repeat, Rule, RuleId, Selector, Stage,
};
use softhca_types::{
    AccessFlags, Completion, Operation, ReceiveWorkRequest, RemoteAddress, SendImmOrInvalidate,
    SendWorkRequest, Sge, UdDestination,
};
use softhca_wire::{Gid, LocalKey, Mtu, Psn, Qpn, QueueKey, RemoteKey, TransportPacket};
use std::cell::RefCell;
use std::net::IpAddr;
use std::rc::Rc;

/// What a test can inspect afterwards.
#[derive(Default)]
pub struct Recording {
    /// Every event of every HCA.
    pub events: Vec<(Instant, HostId, Event)>,
    /// Every frame that a host sent on a link.
    pub sent: Vec<(Direction, Frame)>,
    /// Every fault.
    pub faults: Vec<Fault>,
}

/// Writes to a [`Recording`] that the test keeps.
pub struct Recorder(pub Rc<RefCell<Recording>>);

impl EventSink for Recorder {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        let mut recording = self.0.borrow_mut();
        match *event {
            NetworkEvent::Hca { host, event } => recording.events.push((now, host, *event)),
            NetworkEvent::Frame { direction, stage: Stage::Admitted, addressing, packet, .. } => {
                recording.sent.push((direction, Frame::new(*addressing, packet.to_vec())));
            }
            NetworkEvent::Fault { fault, .. } => recording.faults.push(*fault),
            _ => {}
        }
    }
}

/// One end of the pair.
#[derive(Clone, Copy, Debug)]
pub struct PairEnd {
    pub host: HostId,
    pub domain: PdId,
    pub cq: CqId,
    pub qp: Qpn,
    /// The rkey of a memory region of 1 MiB with all access flags.
    pub rkey: RemoteKey,
    pub base: u64,
    /// The shared receive queue, if there is one.
    pub srq: Option<SrqId>,
}

impl PairEnd {
    /// An SGE at an offset into the region.
    pub fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge { address: self.base + offset, length, lkey: LocalKey(self.rkey.0) }
    }

    /// The remote address of an offset into the region.
    pub fn remote(&self, offset: u64) -> RemoteAddress {
        RemoteAddress { address: self.base + offset, rkey: self.rkey }
    }
}

/// Two connected ends.
pub struct Pair {
    pub world: World,
    pub link: LinkId,
    pub a: PairEnd,
    pub b: PairEnd,
    pub recording: Rc<RefCell<Recording>>,
    /// The destination of datagrams from the first end.
    pub datagram: UdDestination,
    rules: u32,
}

/// The parameters of a pair.
#[derive(Clone, Copy)]
pub struct Setup {
    pub seed: u64,
    pub kind: QpType,
    pub settings: Settings,
    pub connection: ConnectOptions,
    pub options: QpOptions,
    pub link: LinkSettings,
    pub region_bytes: u64,
    /// The second end uses a shared receive queue.
    pub shared_receive_queue: bool,
    /// The addresses of the hosts, unless the simulation chooses.
    pub addresses: Option<[IpAddr; 2]>,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            seed: 1,
            kind: QpType::Rc,
            settings: Settings::default(),
            connection: ConnectOptions {
                flow_ids: [Some(FlowId(1)), Some(FlowId(2))],
                ..ConnectOptions::default()
            },
            options: QpOptions { max_sge: 32, ..QpOptions::default() },
            link: LinkSettings { delay_ns: 1_000, ..LinkSettings::default() },
            region_bytes: 1 << 20,
            shared_receive_queue: false,
            addresses: None,
        }
    }
}

impl Setup {
    pub fn with_kind(kind: QpType) -> Setup {
        Setup::default().kind(kind)
    }

    pub fn mtu(mut self, mtu: Mtu) -> Setup {
        self.connection.path_mtu = mtu;
        self
    }

    pub fn kind(mut self, kind: QpType) -> Setup {
        self.kind = kind;
        self
    }

    pub fn recovery(mut self, recovery: Recovery) -> Setup {
        self.settings.recovery = recovery;
        self
    }

    /// Changes the connection parameters.
    pub fn connection(mut self, change: impl FnOnce(&mut ConnectOptions)) -> Setup {
        change(&mut self.connection);
        self
    }

    /// A link of 1 Gbit/s, so that serialization separates packets.
    pub fn one_gigabit(mut self) -> Setup {
        self.link.bits_per_second = std::num::NonZeroU64::new(1_000_000_000);
        self
    }

    /// Gives the hosts IPv6 addresses.
    pub fn ipv6(mut self) -> Setup {
        self.addresses = Some(["fd00::1", "fd00::2"].map(|address| address.parse().unwrap()));
        self
    }

    /// The second end uses a shared receive queue.
    pub fn with_shared_receive_queue(mut self) -> Setup {
        self.shared_receive_queue = true;
        self
    }

    fn create_end(&self, world: &mut World, host: HostId, is_second: bool) -> PairEnd {
        let mut verbs = world.verbs(host);
        let domain = verbs.allocate_protection_domain().unwrap();
        let cq = verbs.create_completion_queue(1024).unwrap();
        let (mut kind, mut options, mut srq) = (self.kind, self.options, None);
        if is_second && (self.shared_receive_queue || kind == QpType::XrcInitiator) {
            let mut init = SrqInitAttributes { pd: domain, srq_limit: 0, xrc: None };
            if kind == QpType::XrcInitiator {
                let xrc_domain = verbs.open_xrc_domain().unwrap();
                (kind, options.xrc_domain) = (QpType::XrcTarget, Some(xrc_domain));
                init.xrc = Some((cq, xrc_domain));
            }
            srq = Some(verbs.create_shared_receive_queue(init, 64, 32).unwrap());
            options.shared_receive_queue = srq.filter(|_| kind != QpType::XrcTarget);
        }
        let qp = verbs.create_queue_pair(kind, domain, cq, options).unwrap();
        let (key, base) = verbs.register_memory(domain, self.region_bytes, ALL_ACCESS).unwrap();
        PairEnd { host, domain, cq, qp, rkey: key, base, srq }
    }

    pub fn build(self) -> Pair {
        self.build_with_sink(|_| Box::new(()))
    }

    /// Builds a pair with an additional event sink that also sees the creation of the queue pairs.
    pub fn build_with_sink(self, see: impl FnOnce(&World) -> Box<dyn EventSink>) -> Pair {
        let mut world = World::new(self.seed);
        let recording = Rc::new(RefCell::new(Recording::default()));
        let hosts = [("alice", 0), ("bob", 1)].map(|(name, index)| match self.addresses {
            Some(addresses) => world.add_host_at(name, addresses[index], self.settings),
            None => world.add_host(name, self.settings),
        });
        let link = world.add_link(hosts[0], hosts[1], self.link);
        let observers: Vec<Box<dyn EventSink>> = vec![Box::new(Recorder(recording.clone())), see(&world)];
        world.set_sink(observers);
        let a = self.create_end(&mut world, hosts[0], false);
        let b = self.create_end(&mut world, hosts[1], true);
        let mut datagram = UdDestination::default();
        if self.kind.is_datagram() {
            for end in [a, b] {
                world.verbs(end.host).start_datagrams(end.qp, QUEUE_KEY, Psn::new(0)).unwrap();
            }
            let to = AddressVector::to(Gid::from(world.host(b.host).address()));
            let handle = world.verbs(a.host).create_address_handle(a.domain, to).unwrap();
            datagram = UdDestination { ah: handle.0, remote_qpn: b.qp, remote_qkey: QUEUE_KEY };
        } else {
            world.connect((a.host, a.qp), (b.host, b.qp), &self.connection).unwrap();
        }
        Pair { world, link, a, b, recording, datagram, rules: 0 }
    }
}

/// The Q_Key of datagram pairs.
pub const QUEUE_KEY: QueueKey = QueueKey(0x1111);

/// All access flags of a memory region.
pub const ALL_ACCESS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC)
    .union(AccessFlags::MW_BIND);

impl Pair {
    pub fn new() -> Pair {
        Setup::default().build()
    }

    /// Adds a fault rule to the link.
    pub fn add_rule(&mut self, selector: Selector, repeat: Repeat, action: Action) {
        self.rules += 1;
        self.world.add_rule(self.link, Rule { id: RuleId(self.rules), selector, repeat, action });
    }

    /// Drops the first `times` packets that match.
    pub fn drop_packets(&mut self, selector: Selector, times: u64) {
        self.add_rule(selector, Repeat::times(times), Action::Drop);
    }

    /// The verbs of an end's host.
    pub fn on(&mut self, end: PairEnd) -> Verbs<'_> {
        self.world.verbs(end.host)
    }

    /// Posts a signaled request at the first end.
    pub fn post(&mut self, id: u64, operation: Operation, gather: &[Sge]) {
        self.post_with(id, operation, gather, |_| {});
    }

    /// Posts a signaled request at the first end, after `change`.
    pub fn post_with(
        &mut self,
        id: u64,
        operation: Operation,
        gather: &[Sge],
        change: impl FnOnce(&mut SendWorkRequest<'_>),
    ) {
        let mut request = SendWorkRequest::new(id, operation, gather);
        request.ud = self.datagram;
        request.remote_srqn = self.b.srq.map_or(0, |srq| srq.0);
        change(&mut request);
        self.world.verbs(self.a.host).post_send(self.a.qp, &request).unwrap();
    }

    pub fn post_send(&mut self, id: u64, offset: u64, length: u32) {
        self.post(id, Operation::Send(SendImmOrInvalidate::None), &[self.a.sge(offset, length)]);
    }

    pub fn post_write(&mut self, id: u64, offset: u64, to: u64, length: u32) {
        let remote = self.b.remote(to);
        self.post(id, Operation::Write { remote, imm_data: None }, &[self.a.sge(offset, length)]);
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
        let (receive, PairEnd { qp, srq, .. }) = (ReceiveWorkRequest { wr_id: id, sg_list: scatter }, self.b);
        let mut verbs = self.world.verbs(self.b.host);
        match srq {
            Some(srq) => verbs.post_srq_receive(srq, &receive).unwrap(),
            None => verbs.post_receive(qp, &receive).unwrap(),
        }
    }

    /// Runs until no event is left, and checks that every frame is accounted for.
    pub fn run(&mut self) {
        self.world.run();
        let counters = self.world.frame_counters();
        assert!(counters.is_balanced(), "{counters:?}");
        assert_eq!(counters.in_flight, 0);
    }

    /// The completions at an end.
    pub fn completions(&mut self, end: PairEnd) -> Vec<Completion> {
        self.world.verbs(end.host).poll_all(end.cq)
    }

    /// wr_id and status of the completions at an end.
    pub fn completion_statuses(&mut self, end: PairEnd) -> Vec<(u64, &'static str)> {
        self.completions(end).iter().map(|c| (c.wr_id, c.status.name())).collect()
    }

    pub fn state(&mut self, end: PairEnd) -> QpState {
        self.world.verbs(end.host).query_queue_pair(end.qp).unwrap().state
    }

    pub fn write_memory(&mut self, end: PairEnd, offset: u64, bytes: &[u8]) {
        self.world.verbs(end.host).write_memory(end.rkey, end.base + offset, bytes);
    }

    pub fn read_memory(&mut self, end: PairEnd, offset: u64, length: usize) -> Vec<u8> {
        self.world.verbs(end.host).read_memory(end.rkey, end.base + offset, length)
    }

    pub fn counters(&self, end: PairEnd) -> Counters {
        *self.world.host(end.host).hca().counters()
    }

    /// The states of both ends.
    pub fn states(&mut self) -> [&'static str; 2] {
        [self.a, self.b].map(|end| self.state(end).name())
    }

    /// The asynchronous events of an end, by their verbs names.
    pub fn async_events(&self, end: PairEnd) -> Vec<&'static str> {
        let record = self.recording.borrow();
        let raised = record.events.iter().filter(|(_, host, _)| *host == end.host);
        raised
            .filter_map(|(.., event)| {
                if let Event::AsyncEventRaised { event, .. } = event { Some(event.name()) } else { None }
            })
            .collect()
    }

    /// The reason of the completion with this wr_id at an end.
    pub fn completion_reason(&self, end: PairEnd, id: u64) -> Reason {
        let record = self.recording.borrow();
        let mut at_end = record.events.iter().filter(|(_, host, _)| *host == end.host);
        at_end
            .find_map(|(.., event)| match event {
                Event::Completed { completion, reason, .. } if completion.wr_id == id => Some(*reason),
                _ => None,
            })
            .expect("the request completed")
    }

    /// The packets that were sent, in order, without addresses and keys.
    pub fn packets(&self) -> Vec<String> {
        let record = self.recording.borrow();
        let show = |(direction, frame): &(Direction, Frame)| {
            let transport = TransportPacket::parse(&frame.bytes[..frame.bytes.len() - 4]).unwrap();
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

/// Selects requests of the first end by PSN, relative to its first.
pub fn requests(psn: InclusiveRange) -> Selector {
    Selector {
        flow_id: Some(FlowId(1)),
        packet_type: Some(PacketType::Request),
        psn: Some(psn),
        ..Selector::default()
    }
}

/// Selects responses to the first end by PSN, relative to its first.
pub fn responses(psn: InclusiveRange) -> Selector {
    Selector { packet_type: Some(PacketType::Response), ..requests(psn) }
}

/// `length` pseudo-random bytes that depend on the offset and the salt.
pub fn pattern(salt: u64, length: usize) -> Vec<u8> {
    (0..length as u64).map(|i| ((i + salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}
