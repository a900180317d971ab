//! Plays a walk in a world, and keeps what can be seen afterwards.

use crate::model::{INLINE, Lane, SOURCE, TARGET, lanes, split};
use crate::walk::{Step, Verb, Walk};
use softhca_engine::{Event, QpKind, Settings, State};
use softhca_fabric::{Connection, HostId, Line, QpOptions, Role, Rule, RuleId, Selector, World};
use softhca_queue::{
    Completion, Datagram, Operation, Payload, Receive, RemoteAddress, SendFlags, SendRequest, SendTrailer,
    Sge,
};
use softhca_tests::pair::{ALL, Record, Recorder};
use softhca_wire::{Gid, LocalKey, Psn, Qpn, QueueKey, RemoteKey, RnrTimer};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

const QUEUE_KEY: QueueKey = QueueKey(0x1234);

/// One end of a connection.
#[derive(Clone, Copy)]
struct End {
    host: HostId,
    qp: Qpn,
    send_cq: softhca_engine::CqId,
    receive_cq: softhca_engine::CqId,
    key: RemoteKey,
    base: u64,
    /// Where the memory of the lane that it receives begins: the target, then the receives.
    inbox: u64,
    address_handle: u32,
}

impl End {
    fn entries(&self, pieces: &[(u64, u32)]) -> Vec<Sge> {
        let entry = |(at, length): &(u64, u32)| Sge {
            address: self.base + at,
            length: *length,
            key: LocalKey(self.key.0),
        };
        pieces.iter().map(entry).collect()
    }
}

/// What became of a lane.
pub struct Outcome {
    pub sends: Vec<Completion>,
    pub receives: Vec<Completion>,
    /// PSNs that the receiver executed.
    pub reached: u32,
    pub sender_state: State,
    pub receiver_state: State,
    /// The sender's memory, the receiver's target and its receives.
    pub sender: Vec<u8>,
    pub target: Vec<u8>,
    pub inbox: Vec<u8>,
    /// PSN and address of what was stored at the receiver, in order.
    pub stored: Vec<(u32, u64)>,
    /// Copies that the cables made of packets.
    pub copies: u64,
}

/// A world in which a walk is played.
pub struct Play<'a> {
    walk: &'a Walk,
    pub lanes: Vec<Lane>,
    world: World,
    pub record: Rc<RefCell<Record>>,
    ends: Vec<End>,
    posted: Vec<usize>,
    received: Vec<usize>,
}

impl<'a> Play<'a> {
    pub fn new(walk: &'a Walk) -> Play<'a> {
        let mut world = World::new(walk.seed);
        let record = Rc::new(RefCell::new(Record::default()));
        world.observe(Recorder(record.clone()));
        let settings = Settings {
            recovery: walk.recovery,
            acks: walk.acks,
            ack_request_every: walk.ack_request_every,
            mtu: walk.mtu,
            ..Settings::default()
        };
        let hosts: Vec<_> = ["alice", "bob", "carol"][..walk.hosts]
            .iter()
            .map(|name| world.add_host(name, settings))
            .collect();
        for (first, second) in [(0, 1), (1, 2), (2, 0)].into_iter().filter(|(a, b)| a.max(b) < &hosts.len()) {
            let line =
                Line { delay_ns: 1_000, bits_per_second: 100_000_000_000.try_into().ok(), ..Line::default() };
            let cable = world.add_cable(hosts[first], hosts[second], line);
            for (index, trouble) in walk.troubles.iter().enumerate() {
                let selector = Selector { classes: trouble.classes, ..Selector::default() };
                let id = RuleId(cable.0 * 100 + index as u32);
                let rule = Rule { id, selector, repeat: trouble.repeat, action: trouble.action };
                world.add_rule(cable, rule);
            }
        }
        let lanes = lanes(walk);
        let mut ends = Vec::new();
        for pair in 0..walk.psns.len() {
            let between = [hosts[pair % hosts.len()], hosts[(pair + 1) % hosts.len()]];
            for side in 0..2 {
                ends.push(make_end(&mut world, walk, between, side, &lanes, pair));
            }
            let [first, second] = [ends[pair * 2], ends[pair * 2 + 1]];
            let psns = walk.psns[pair].map(Psn::new);
            match walk.kind {
                QpKind::Ud => {
                    for (end, psn) in [first, second].into_iter().zip(psns) {
                        world.on(end.host).start_datagrams(end.qp, QUEUE_KEY, psn).unwrap();
                    }
                }
                _ => {
                    let connection = Connection {
                        mtu: walk.mtu,
                        psns,
                        reads: walk.reads,
                        timeout: 8,
                        min_rnr_timer: RnrTimer::new(walk.rnr_timer),
                        roles: [0, 1].map(|side| Some(Role(pair as u32 * 2 + side))),
                        ..Connection::default()
                    };
                    world.connect((first.host, first.qp), (second.host, second.qp), &connection).unwrap();
                }
            }
        }
        let count = lanes.len();
        Play { walk, lanes, world, record, ends, posted: vec![0; count], received: vec![0; count] }
    }

    /// Plays the whole script, then gives every receive that is still missing and waits for silence.
    pub fn run(&mut self) {
        for step in &self.walk.steps {
            match step {
                Step::Post { lane, .. } => self.post(lane % self.lanes.len()),
                Step::Receive { lane, count } => {
                    (0..*count).for_each(|_| self.receive(lane % self.lanes.len()));
                }
                Step::Run { nanoseconds } => {
                    self.world.run_for(Duration::from_nanos(*nanoseconds));
                }
            }
        }
        for lane in 0..self.lanes.len() {
            while self.received[lane] < self.lanes[lane].receives {
                self.receive(lane);
            }
        }
        let is_busy = self.world.run_for(Duration::from_secs(10));
        assert!(!is_busy, "something still happens ten seconds later");
        let census = self.world.census();
        assert!(census.balances() && census.in_flight == 0, "{census:?}");
    }

    fn post(&mut self, lane: usize) {
        let (sender, receiver) = (self.ends[lane], self.ends[lane ^ 1]);
        let number = self.posted[lane];
        self.posted[lane] += 1;
        let deed = &self.lanes[lane].deeds[number];
        let remote =
            RemoteAddress { address: receiver.base + receiver.inbox + deed.remote, key: receiver.key };
        let (compare, operand) = deed.operands();
        let operation = match deed.request.verb {
            Verb::Send => Operation::Send(deed.immediate.map_or(SendTrailer::None, SendTrailer::Immediate)),
            Verb::Write => Operation::Write { remote, immediate: deed.immediate },
            Verb::Read => Operation::Read { remote },
            Verb::CompareSwap => Operation::CompareSwap { remote, compare, swap: operand },
            Verb::FetchAdd => Operation::FetchAdd { remote, add: operand },
        };
        let gather = sender.entries(&deed.pieces);
        let inline = deed.inline.then(|| self.lanes[lane].data(deed, &Lane::source(lane)));
        let mut request = SendRequest::new(number as u64, operation, &gather);
        request.flags.set(SendFlags::SIGNALED, deed.request.signalled);
        request.flags.set(SendFlags::FENCE, deed.fence);
        if let Some(bytes) = &inline {
            request.flags |= SendFlags::INLINE;
            request.payload = Payload::Inline(bytes);
        }
        request.datagram =
            Datagram { address_handle: sender.address_handle, queue_pair: receiver.qp, queue_key: QUEUE_KEY };
        self.world.on(sender.host).post_send(sender.qp, &request).unwrap();
    }

    fn receive(&mut self, lane: usize) {
        let end = self.ends[lane ^ 1];
        let number = self.received[lane];
        self.received[lane] += 1;
        let room = self.lanes[lane].room;
        let at = end.inbox + TARGET + number as u64 * u64::from(room);
        let scatter = end.entries(&split(at, room, 1 + number % 3));
        let receive = Receive { id: number as u64, scatter: &scatter };
        self.world.on(end.host).post_receive(end.qp, &receive).unwrap();
    }

    pub fn outcome(&mut self, lane: usize) -> Outcome {
        let (sender, receiver) = (self.ends[lane], self.ends[lane ^ 1]);
        let model = &self.lanes[lane];
        let first = self.walk.psns[lane / 2][lane % 2];
        let from = receiver.base + receiver.inbox;
        let inbox = model.receives * model.room as usize;
        let record = self.record.borrow();
        let stored = record.events.iter().filter_map(|(_, host, event)| match event {
            Event::MemoryWritten { qp, address, psn, .. }
                if *host == receiver.host && *qp == receiver.qp && *address >= from =>
            {
                Some((psn.since(Psn::new(first)), *address))
            }
            _ => None,
        });
        let stored = stored.collect();
        let copies = record.faults.iter().map(|fault| match fault.effect {
            softhca_fabric::Effect::Duplicated { copies } => u64::from(copies),
            _ => 0,
        });
        let copies = copies.sum();
        let mut verbs = self.world.on(receiver.host);
        let view = verbs.query(receiver.qp).unwrap();
        let receives = verbs.poll_all(receiver.receive_cq);
        let target = verbs.read(receiver.key, from, TARGET as usize);
        let inbox = verbs.read(receiver.key, from + TARGET, inbox);
        let mut verbs = self.world.on(sender.host);
        Outcome {
            sends: verbs.poll_all(sender.send_cq),
            receives,
            reached: view.expected_psn.since(Psn::new(first)),
            sender_state: verbs.query(sender.qp).unwrap().state,
            receiver_state: view.state,
            sender: verbs.read(sender.key, sender.base, model.sender as usize),
            target,
            inbox,
            stored,
            copies,
        }
    }
}

fn make_end(
    world: &mut World,
    walk: &Walk,
    between: [HostId; 2],
    side: usize,
    lanes: &[Lane],
    pair: usize,
) -> End {
    let host = between[side];
    let peer = world.host(between[1 - side]).address();
    let (out, back) = (pair * 2 + side, pair * 2 + 1 - side);
    let inbox = lanes[out].sender;
    let room = TARGET + lanes[back].receives as u64 * u64::from(lanes[back].room);
    let mut verbs = world.on(host);
    let domain = verbs.allocate_domain().unwrap();
    let send_cq = verbs.create_completion_queue(256).unwrap();
    let receive_cq = verbs.create_completion_queue(256).unwrap();
    let options = QpOptions { sends: 64, receives: 256, inline: INLINE as usize, ..QpOptions::default() };
    let qp = verbs.create_queue_pair_with(walk.kind, domain, [send_cq, receive_cq], options, None).unwrap();
    let (key, base) = verbs.register(domain, inbox + room, ALL).unwrap();
    verbs.write(key, base, &Lane::source(out));
    verbs.write(key, base + inbox, &Lane::target(back));
    let vector = softhca_engine::AddressVector::to(Gid::from(peer));
    let address_handle = verbs.create_address_handle(domain, vector).unwrap().0;
    debug_assert_eq!(SOURCE, Lane::source(out).len() as u64);
    End { host, qp, send_cq, receive_cq, key, base, inbox, address_handle }
}
