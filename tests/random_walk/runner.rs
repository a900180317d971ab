//! Runs a walk in a simulation and collects the results.

use crate::model::{DirectionModel, MAX_INLINE, SOURCE_BYTES, TARGET_BYTES, directions, split};
use crate::walk::{Step, Verb, Walk};
use softhca_engine::{Event, QpState, QpType, Settings};
use softhca_fabric::{
    ConnectOptions, FlowId, HostId, LinkSettings, QpOptions, Rule, RuleId, Selector, World,
};
use softhca_queue::{
    Completion, CompletionStatus, Operation, Payload, ReceiveWorkRequest, RemoteAddress, SendFlags,
    SendImmOrInvalidate, SendWorkRequest, Sge, UdDestination,
};
use softhca_tests::pair::{ALL_ACCESS, Recorder, Recording};
use softhca_wire::{Gid, LocalKey, Psn, Qpn, QueueKey, RemoteKey, RnrTimer};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

const QUEUE_KEY: QueueKey = QueueKey(0x1234);

/// One end of a connection.
#[derive(Clone, Copy)]
struct ConnectionEnd {
    host: HostId,
    qp: Qpn,
    send_cq: softhca_engine::CqId,
    receive_cq: softhca_engine::CqId,
    rkey: RemoteKey,
    base: u64,
    /// The offset of the incoming direction's memory: the target, then the receives.
    receive_offset: u64,
    address_handle: u32,
}

impl ConnectionEnd {
    fn sges(&self, sges: &[(u64, u32)]) -> Vec<Sge> {
        let entry = |(at, length): &(u64, u32)| Sge {
            address: self.base + at,
            length: *length,
            lkey: LocalKey(self.rkey.0),
        };
        sges.iter().map(entry).collect()
    }
}

/// The result of a direction.
pub struct Outcome {
    pub sends: Vec<Completion>,
    pub receives: Vec<Completion>,
    /// The number of PSNs that the receiver executed.
    pub executed_psns: u32,
    pub sender_state: QpState,
    pub receiver_state: QpState,
    /// The sender's memory, the receiver's target and its receives.
    pub sender: Vec<u8>,
    pub target: Vec<u8>,
    pub receive_memory: Vec<u8>,
    /// PSN and address of the stores at the receiver, in order.
    pub stored: Vec<(u32, u64)>,
    /// The number of packets that the links duplicated.
    pub copies: u64,
}

/// A simulation that runs a walk.
pub struct WalkRun<'a> {
    walk: &'a Walk,
    pub directions: Vec<DirectionModel>,
    world: World,
    pub recording: Rc<RefCell<Recording>>,
    ends: Vec<ConnectionEnd>,
    posted: Vec<usize>,
    received: Vec<usize>,
}

impl<'a> WalkRun<'a> {
    pub fn new(walk: &'a Walk) -> WalkRun<'a> {
        let mut world = World::new(walk.seed);
        let record = Rc::new(RefCell::new(Recording::default()));
        world.set_sink(Recorder(record.clone()));
        let settings = Settings {
            recovery: walk.recovery,
            ack_policy: walk.acks,
            ack_request_interval: walk.ack_request_every,
            mtu: walk.mtu,
            ..Settings::default()
        };
        let hosts: Vec<_> = ["alice", "bob", "carol"][..walk.hosts]
            .iter()
            .map(|name| world.add_host(name, settings))
            .collect();
        for (first, second) in [(0, 1), (1, 2), (2, 0)].into_iter().filter(|(a, b)| a.max(b) < &hosts.len()) {
            let line = LinkSettings {
                delay_ns: 1_000,
                bits_per_second: 100_000_000_000.try_into().ok(),
                ..LinkSettings::default()
            };
            let link = world.add_link(hosts[first], hosts[second], line);
            for (index, fault) in walk.faults.iter().enumerate() {
                let selector = Selector { classes: fault.classes, ..Selector::default() };
                let id = RuleId(link.0 * 100 + index as u32);
                let rule = Rule { id, selector, repeat: fault.repeat, action: fault.action };
                world.add_rule(link, rule);
            }
        }
        let directions = directions(walk);
        let mut ends = Vec::new();
        for pair in 0..walk.psns.len() {
            let between = [hosts[pair % hosts.len()], hosts[(pair + 1) % hosts.len()]];
            for side in 0..2 {
                ends.push(create_end(&mut world, walk, between, side, &directions, pair));
            }
            let [first, second] = [ends[pair * 2], ends[pair * 2 + 1]];
            let psns = walk.psns[pair].map(Psn::new);
            match walk.kind {
                QpType::Ud => {
                    for (end, psn) in [first, second].into_iter().zip(psns) {
                        world.verbs(end.host).start_datagrams(end.qp, QUEUE_KEY, psn).unwrap();
                    }
                }
                _ => {
                    let connection = ConnectOptions {
                        path_mtu: walk.mtu,
                        first_psns: psns,
                        max_rd_atomic: walk.max_rd_atomic,
                        timeout: 8,
                        min_rnr_timer: RnrTimer::new(walk.rnr_timer),
                        flow_ids: [0, 1].map(|side| Some(FlowId(pair as u32 * 2 + side))),
                        ..ConnectOptions::default()
                    };
                    world.connect((first.host, first.qp), (second.host, second.qp), &connection).unwrap();
                }
            }
        }
        let count = directions.len();
        WalkRun {
            walk,
            directions,
            world,
            recording: record,
            ends,
            posted: vec![0; count],
            received: vec![0; count],
        }
    }

    /// Runs all steps, posts the missing receives and waits until the network is idle.
    pub fn run(&mut self) {
        for step in &self.walk.steps {
            match step {
                Step::Post { direction, .. } => self.post(direction % self.directions.len()),
                Step::Receive { direction, count } => {
                    (0..*count).for_each(|_| self.post_receive(direction % self.directions.len()));
                }
                Step::Run { nanoseconds } => {
                    self.world.run_for(Duration::from_nanos(*nanoseconds));
                }
            }
        }
        for direction in 0..self.directions.len() {
            while self.received[direction] < self.directions[direction].receives {
                self.post_receive(direction);
            }
        }
        let is_busy = self.world.run_for(Duration::from_secs(10));
        assert!(!is_busy, "the network is still busy after ten seconds");
        let census = self.world.frame_counters();
        assert!(census.is_balanced() && census.in_flight == 0, "{census:?}");
    }

    fn post(&mut self, direction: usize) {
        let (sender, receiver) = (self.ends[direction], self.ends[direction ^ 1]);
        let number = self.posted[direction];
        self.posted[direction] += 1;
        let deed = &self.directions[direction].requests[number];
        // The right key with another variant.
        let spoil = |status| if deed.failure == Some(status) { 0xff } else { 0 };
        let remote = RemoteAddress {
            address: receiver.base + receiver.receive_offset + deed.remote_offset,
            rkey: RemoteKey(receiver.rkey.0 ^ spoil(CompletionStatus::RemoteAccessError)),
        };
        let (compare, operand) = deed.operands();
        let operation = match deed.request.verb {
            Verb::Send => Operation::Send(
                deed.immediate.map_or(SendImmOrInvalidate::None, SendImmOrInvalidate::Immediate),
            ),
            Verb::Write => Operation::Write { remote, imm_data: deed.immediate },
            Verb::Read => Operation::Read { remote },
            Verb::CompareSwap => Operation::CompareSwap { remote, compare, swap: operand },
            Verb::FetchAdd => Operation::FetchAdd { remote, add: operand },
        };
        let mut gather = sender.sges(&deed.sges);
        gather.iter_mut().for_each(|entry| entry.lkey.0 ^= spoil(CompletionStatus::LocalProtectionError));
        let inline = deed
            .inline
            .then(|| self.directions[direction].data(deed, &DirectionModel::initial_source(direction)));
        let mut request = SendWorkRequest::new(number as u64, operation, &gather);
        request.flags.set(SendFlags::SIGNALED, deed.request.signalled);
        request.flags.set(SendFlags::FENCE, deed.fence);
        if let Some(bytes) = &inline {
            request.flags |= SendFlags::INLINE;
            request.payload = Payload::Inline(bytes);
        }
        request.ud =
            UdDestination { ah: sender.address_handle, remote_qpn: receiver.qp, remote_qkey: QUEUE_KEY };
        self.world.verbs(sender.host).post_send(sender.qp, &request).unwrap();
    }

    fn post_receive(&mut self, direction: usize) {
        let end = self.ends[direction ^ 1];
        let number = self.received[direction];
        self.received[direction] += 1;
        let room = self.directions[direction].receive_bytes;
        let at = end.receive_offset + TARGET_BYTES + number as u64 * u64::from(room);
        let scatter = end.sges(&split(at, room, 1 + number % 3));
        let receive = ReceiveWorkRequest { wr_id: number as u64, sg_list: &scatter };
        self.world.verbs(end.host).post_receive(end.qp, &receive).unwrap();
    }

    pub fn outcome(&mut self, direction: usize) -> Outcome {
        let (sender, receiver) = (self.ends[direction], self.ends[direction ^ 1]);
        let model = &self.directions[direction];
        let first = self.walk.psns[direction / 2][direction % 2];
        let from = receiver.base + receiver.receive_offset;
        let inbox = model.receives * model.receive_bytes as usize;
        let record = self.recording.borrow();
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
            softhca_fabric::FaultEffect::Duplicated { copies } => u64::from(copies),
            _ => 0,
        });
        let copies = copies.sum();
        let mut verbs = self.world.verbs(receiver.host);
        let view = verbs.query_queue_pair(receiver.qp).unwrap();
        let receives = verbs.poll_all(receiver.receive_cq);
        let target = verbs.read_memory(receiver.rkey, from, TARGET_BYTES as usize);
        let inbox = verbs.read_memory(receiver.rkey, from + TARGET_BYTES, inbox);
        let mut verbs = self.world.verbs(sender.host);
        Outcome {
            sends: verbs.poll_all(sender.send_cq),
            receives,
            executed_psns: view.expected_psn.since(Psn::new(first)),
            sender_state: verbs.query_queue_pair(sender.qp).unwrap().state,
            receiver_state: view.state,
            sender: verbs.read_memory(sender.rkey, sender.base, model.sender_bytes as usize),
            target,
            receive_memory: inbox,
            stored,
            copies,
        }
    }
}

fn create_end(
    world: &mut World,
    walk: &Walk,
    between: [HostId; 2],
    side: usize,
    directions: &[DirectionModel],
    pair: usize,
) -> ConnectionEnd {
    let host = between[side];
    let peer = world.host(between[1 - side]).address();
    let (out, back) = (pair * 2 + side, pair * 2 + 1 - side);
    let inbox = directions[out].sender_bytes;
    let room = TARGET_BYTES + directions[back].receives as u64 * u64::from(directions[back].receive_bytes);
    let mut verbs = world.verbs(host);
    let domain = verbs.allocate_protection_domain().unwrap();
    let send_cq = verbs.create_completion_queue(256).unwrap();
    let receive_cq = verbs.create_completion_queue(256).unwrap();
    let options = QpOptions {
        max_send_wr: 64,
        max_recv_wr: 256,
        max_inline_data: MAX_INLINE as usize,
        ..QpOptions::default()
    };
    let qp = verbs.create_queue_pair_with(walk.kind, domain, [send_cq, receive_cq], options, None).unwrap();
    let (key, base) = verbs.register_memory(domain, inbox + room, ALL_ACCESS).unwrap();
    verbs.write_memory(key, base, &DirectionModel::initial_source(out));
    verbs.write_memory(key, base + inbox, &DirectionModel::initial_target(back));
    let vector = softhca_engine::AddressVector::to(Gid::from(peer));
    let address_handle = verbs.create_address_handle(domain, vector).unwrap().0;
    debug_assert_eq!(SOURCE_BYTES, DirectionModel::initial_source(out).len() as u64);
    ConnectionEnd { host, qp, send_cq, receive_cq, rkey: key, base, receive_offset: inbox, address_handle }
}
