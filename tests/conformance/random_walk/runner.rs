//! Runs a walk in a simulation and collects the results.

use super::model::{DirectionModel, MAX_INLINE, SOURCE_BYTES, TARGET_BYTES, directions, split};
use super::walk::{Step, Verb, Walk, Window};
use softhca_engine::{
    CqId, EndToEndCredits, Event, Instant, MemoryWindowType, ModifyQp, PdId, QpState, QpType, Settings,
    SrqId, SrqInitAttributes, XrcdId,
};
use softhca_fabric::{FlowId, HostId, LinkSettings, Rule, RuleId, Selector};
use softhca_tests::pair::{ALL_ACCESS, Recorder, Recording};
use softhca_tests::verbs::{ConnectOptions, QpOptions, World};
use softhca_types::{
    AccessFlags, Completion, CompletionOpcode, CompletionStatus, MemoryWindowBind, Operation, Payload,
    ReceiveWorkRequest, RemoteAddress, SendFlags, SendImmOrInvalidate, SendWorkRequest, Sge, UdDestination,
};
use softhca_wire::{Gid, LocalKey, Psn, Qpn, QueueKey, RemoteKey, RnrTimer};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

const QUEUE_KEY: QueueKey = QueueKey(0x1234);

/// The wr_id of binds and invalidations. They are unsignaled: a completion with it is an error.
const LOCAL_OPERATION: u64 = 1 << 32;

/// One end of a connection.
#[derive(Clone, Copy)]
struct ConnectionEnd {
    host: HostId,
    /// The queue pair that sends.
    qp: Qpn,
    /// The queue pair that receives: another one only for XRC.
    receive_qp: Qpn,
    send_cq: CqId,
    receive_cq: CqId,
    rkey: RemoteKey,
    base: u64,
    /// The offset of the incoming direction's memory: the target, then the receives.
    receive_offset: u64,
    address_handle: u32,
    /// The window onto the target, its present key, and whether it is bound.
    window: Option<(Window, RemoteKey, bool)>,
    /// The work requests on its send queue.
    posted: usize,
}

impl ConnectionEnd {
    fn sges(&self, sges: &[(u64, u32)]) -> Vec<Sge> {
        to_sges(self.rkey, self.base, sges)
    }

    /// How a peer addresses a byte of the target.
    fn remote(&self, offset: u64) -> RemoteAddress {
        let address = self.base + self.receive_offset + offset;
        match self.window {
            Some((Window { zero_based: true, .. }, rkey, _)) => RemoteAddress { address: offset, rkey },
            Some((_, rkey, _)) => RemoteAddress { address, rkey },
            None => RemoteAddress { address, rkey: self.rkey },
        }
    }
}

fn to_sges(rkey: RemoteKey, base: u64, sges: &[(u64, u32)]) -> Vec<Sge> {
    let entry =
        |(at, length): &(u64, u32)| Sge { address: base + at, length: *length, lkey: LocalKey(rkey.0) };
    sges.iter().map(entry).collect()
}

/// What the ends of a host share.
struct WalkHost {
    id: HostId,
    domain: PdId,
    receives: Option<SharedReceives>,
}

/// A shared receive queue and the memory of its receives.
struct SharedReceives {
    srq: SrqId,
    cq: CqId,
    xrc_domain: Option<XrcdId>,
    rkey: RemoteKey,
    base: u64,
    posted: usize,
    capacity: usize,
}

/// The result of a direction.
pub struct Outcome {
    pub sends: Vec<Completion>,
    pub receives: Vec<Completion>,
    /// The number of PSNs that the receiver executed.
    pub executed_psns: u32,
    pub sender_state: QpState,
    pub receiver_state: QpState,
    /// The sender's memory and the receiver's target.
    pub sender: Vec<u8>,
    pub target: Vec<u8>,
    /// The memory of each completed receive.
    pub receive_memory: Vec<Vec<u8>>,
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
    hosts: Vec<WalkHost>,
    ends: Vec<ConnectionEnd>,
    posted: Vec<usize>,
    received: Vec<usize>,
    /// The completions of receives, by host and queue pair.
    receive_completions: BTreeMap<(u32, u32), Vec<Completion>>,
    /// For each direction, the number of events when its sender was moved to SQD, until it is resumed.
    drained_at: Vec<Option<usize>>,
    /// The times in SQD: a direction, and the range of events.
    pub drains: Vec<(usize, Range<usize>)>,
    /// For each direction, the number of events when each of its receives was posted.
    receive_posts: Vec<Vec<usize>>,
}

impl<'a> WalkRun<'a> {
    pub fn new(walk: &'a Walk) -> WalkRun<'a> {
        WalkRun::with_straight_path(walk, true)
    }

    pub fn with_straight_path(walk: &'a Walk, straight_path: bool) -> WalkRun<'a> {
        let mut world = World::new(walk.seed);
        let record = Rc::new(RefCell::new(Recording::default()));
        world.set_sink(Recorder(record.clone()));
        let settings = Settings {
            recovery: walk.recovery,
            ack_policy: walk.acks,
            ack_request_interval: walk.ack_request_every,
            mtu: walk.mtu,
            end_to_end_credits: if walk.credits { EndToEndCredits::On } else { EndToEndCredits::Off },
            straight_path,
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
        let pairs: Vec<[usize; 2]> =
            (0..walk.psns.len()).map(|pair| [pair % hosts.len(), (pair + 1) % hosts.len()]).collect();
        let hosts: Vec<WalkHost> = hosts
            .iter()
            .enumerate()
            .map(|(index, host)| {
                let here = |side: &usize| pairs[side / 2][side % 2] == index;
                let incoming: Vec<usize> = (0..directions.len()).filter(here).map(|side| side ^ 1).collect();
                // A queue pair that fails in the middle of a message flushes one receive more.
                let capacity = incoming.iter().map(|index| directions[*index].receives + 1).sum();
                create_host(&mut world, walk, *host, capacity)
            })
            .collect();
        let mut ends = Vec::new();
        for (pair, between) in pairs.iter().enumerate() {
            for side in 0..2 {
                let [host, peer] = [between[side], between[1 - side]];
                let peer = world.host(hosts[peer].id).address();
                ends.push(create_end(&mut world, walk, &hosts[host], peer, &directions, pair * 2 + side));
            }
            let [first, second] = [ends[pair * 2], ends[pair * 2 + 1]];
            let psns = walk.psns[pair].map(Psn::new);
            let connection = |psns, flow: u32| ConnectOptions {
                path_mtu: walk.mtu,
                first_psns: psns,
                max_rd_atomic: walk.max_rd_atomic,
                timeout: 8,
                min_rnr_timer: RnrTimer::new(walk.rnr_timer),
                flow_ids: [0, 1].map(|side| Some(FlowId(pair as u32 * 4 + flow + side))),
                ..ConnectOptions::default()
            };
            match walk.kind {
                QpType::Ud => {
                    for (end, psn) in [first, second].into_iter().zip(psns) {
                        world.verbs(end.host).start_datagrams(end.qp, QUEUE_KEY, psn).unwrap();
                    }
                }
                QpType::XrcInitiator => {
                    for (from, to, psn, flow) in [(first, second, psns[0], 0), (second, first, psns[1], 2)] {
                        let options = connection([psn, Psn::new(0)], flow);
                        world.connect((from.host, from.qp), (to.host, to.receive_qp), &options).unwrap();
                    }
                }
                _ => {
                    let options = connection(psns, 0);
                    world.connect((first.host, first.qp), (second.host, second.qp), &options).unwrap();
                }
            }
        }
        let count = directions.len();
        let mut run = WalkRun {
            walk,
            directions,
            world,
            recording: record,
            hosts,
            ends,
            posted: vec![0; count],
            received: vec![0; count],
            receive_completions: BTreeMap::new(),
            drained_at: vec![None; count],
            drains: Vec::new(),
            receive_posts: vec![Vec::new(); count],
        };
        (0..count).for_each(|direction| run.bind_window(direction));
        run
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
                Step::Drain { direction } => {
                    // A queue pair that failed stays in ERR.
                    let direction = direction % self.directions.len();
                    let end = self.ends[direction];
                    let drain = ModifyQp::default().state(QpState::SendQueueDrained);
                    if self.world.verbs(end.host).modify_queue_pair(end.qp, drain).is_ok() {
                        self.drained_at[direction].get_or_insert(self.recording.borrow().events.len());
                    }
                }
                Step::Resume { direction } => self.resume(direction % self.directions.len()),
                Step::Rebind { direction } => self.bind_window(direction % self.directions.len()),
            }
        }
        for direction in 0..self.directions.len() {
            while self.received[direction] < self.directions[direction].receives {
                self.post_receive(direction);
            }
        }
        for host in 0..self.hosts.len() {
            let ready = |host: &WalkHost| host.receives.as_ref().is_none_or(|all| all.posted == all.capacity);
            while !ready(&self.hosts[host]) {
                self.post_shared_receive(host);
            }
        }
        self.world.run_for(Duration::from_secs(1));
        (0..self.directions.len()).for_each(|direction| self.resume(direction));
        let is_busy = self.world.run_for(Duration::from_secs(10));
        let mut queues: Vec<(HostId, CqId)> =
            self.ends.iter().map(|end| (end.host, end.receive_cq)).collect();
        queues.extend(self.hosts.iter().filter_map(|host| Some((host.id, host.receives.as_ref()?.cq))));
        for (host, cq) in queues {
            for completion in self.world.verbs(host).poll_all(cq) {
                let key = (host.0, completion.qpn.value());
                self.receive_completions.entry(key).or_default().push(completion);
            }
        }
        assert!(!is_busy, "the network is still busy after ten seconds");
        let counters = self.world.frame_counters();
        assert!(counters.is_balanced() && counters.in_flight == 0, "{counters:?}");
    }

    /// Moves the sending queue pair of a direction from SQD to RTS.
    fn resume(&mut self, direction: usize) {
        let end = self.ends[direction];
        if let Some(start) = self.drained_at[direction].take() {
            self.drains.push((direction, start..self.recording.borrow().events.len()));
        }
        let mut verbs = self.world.verbs(end.host);
        if verbs.query_queue_pair(end.qp).unwrap().state == QpState::SendQueueDrained {
            let resume = ModifyQp::default().state(QpState::ReadyToSend);
            verbs.modify_queue_pair(end.qp, resume).unwrap();
        }
    }

    /// Whether an end is in RTS and all its sends have completed.
    fn is_idle(&mut self, index: usize) -> bool {
        let end = self.ends[index];
        let record = self.recording.borrow();
        let completed = record.events.iter().filter(|(_, host, event)| {
            *host == end.host
                && match event {
                    Event::UnsignaledCompleted { qp, .. } => *qp == end.qp,
                    Event::Completed { completion, .. } => {
                        let is_send = (completion.opcode as u8) < CompletionOpcode::Receive as u8;
                        completion.qpn == end.qp && is_send
                    }
                    _ => false,
                }
        });
        let completed = completed.count();
        drop(record);
        let state = self.world.verbs(end.host).query_queue_pair(end.qp).unwrap().state;
        completed == end.posted && state == QpState::ReadyToSend
    }

    /// Binds the window of a direction under its next key, if the direction has one and nothing is outstanding.
    fn bind_window(&mut self, direction: usize) {
        let owner = direction ^ 1;
        let Some((window, rkey, is_bound)) = self.ends[owner].window else { return };
        if !self.is_idle(direction) || !self.is_idle(owner) {
            return;
        }
        let end = self.ends[owner];
        let new_rkey = RemoteKey(rkey.0 & !0xff | u32::from((rkey.0 as u8).wrapping_add(1)));
        let mut access = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC;
        access.set(AccessFlags::ZERO_BASED, window.zero_based);
        let bind = Operation::BindMemoryWindow(MemoryWindowBind {
            mw_rkey: rkey,
            new_rkey,
            mr_lkey: LocalKey(end.rkey.0),
            address: end.base + end.receive_offset,
            length: TARGET_BYTES,
            access,
        });
        let invalidates = is_bound && window.kind == MemoryWindowType::Type2;
        let invalidate = invalidates.then_some(Operation::LocalInvalidate { rkey });
        for operation in invalidate.into_iter().chain([bind]) {
            let mut request = SendWorkRequest::new(LOCAL_OPERATION, operation, &[]);
            request.flags = SendFlags::empty();
            self.world.verbs(end.host).post_send(end.qp, &request).unwrap();
            self.ends[owner].posted += 1;
        }
        self.ends[owner].window = Some((window, new_rkey, true));
        // Packets of other queue pairs may occupy the port.
        let is_done = (0..1000).any(|_| {
            let is_idle = self.is_idle(owner);
            if !is_idle {
                self.world.run_for(Duration::from_micros(1));
            }
            is_idle
        });
        assert!(is_done, "a local operation waits for nothing but the port");
    }

    fn post(&mut self, direction: usize) {
        let (sender, receiver) = (self.ends[direction], self.ends[direction ^ 1]);
        self.ends[direction].posted += 1;
        let number = self.posted[direction];
        self.posted[direction] += 1;
        let deed = &self.directions[direction].requests[number];
        // The right key with another variant.
        let spoil = |status| if deed.failure == Some(status) { 0xff } else { 0 };
        let mut remote = receiver.remote(deed.remote_offset);
        remote.rkey.0 ^= spoil(CompletionStatus::RemoteAccessError);
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
        let peer = self.hosts.iter().find(|host| host.id == receiver.host);
        request.remote_srqn =
            peer.and_then(|host| host.receives.as_ref()).map_or(0, |receives| receives.srq.0);
        self.world.verbs(sender.host).post_send(sender.qp, &request).unwrap();
    }

    /// Posts a receive for a direction. A shared receive may serve any direction.
    fn post_receive(&mut self, direction: usize) {
        let end = self.ends[direction ^ 1];
        let number = self.received[direction];
        self.received[direction] += 1;
        self.receive_posts[direction].push(self.recording.borrow().events.len());
        if self.walk.shared_receives {
            let host = self.hosts.iter().position(|host| host.id == end.host);
            return self.post_shared_receive(host.expect("an end is on a host"));
        }
        let room = self.directions[direction].receive_bytes;
        let at = end.receive_offset + TARGET_BYTES + number as u64 * u64::from(room);
        let scatter = end.sges(&split(at, room, 1 + number % 3));
        let receive = ReceiveWorkRequest { wr_id: number as u64, sg_list: &scatter };
        self.world.verbs(end.host).post_receive(end.qp, &receive).unwrap();
    }

    fn post_shared_receive(&mut self, host: usize) {
        let WalkHost { id, receives: Some(receives), .. } = &mut self.hosts[host] else { return };
        let (number, room) = (receives.posted, self.walk.receive_bytes());
        receives.posted += 1;
        let pieces = split(number as u64 * u64::from(room), room, 1 + number % 3);
        let scatter = to_sges(receives.rkey, receives.base, &pieces);
        let receive = ReceiveWorkRequest { wr_id: number as u64, sg_list: &scatter };
        self.world.verbs(*id).post_srq_receive(receives.srq, &receive).unwrap();
    }

    /// The WQEs with packets that the sender of a direction fetched in a range of events. Flushed ones have none.
    pub fn fetched(&self, direction: usize, range: Range<usize>) -> usize {
        let end = self.ends[direction];
        let is_fetch = |(_, host, event): &&(Instant, HostId, Event)| {
            *host == end.host && matches!(event, Event::WqeFetched { qp, packets: 1.., .. } if *qp == end.qp)
        };
        self.recording.borrow().events[range].iter().filter(is_fetch).count()
    }

    /// For each request that consumes a receive and was sent: its place among them, and the receives that were posted
    /// when its first packet was sent.
    pub fn receives_when_sent(&self, direction: usize) -> Vec<(usize, usize)> {
        let end = self.ends[direction];
        let record = self.recording.borrow();
        let consuming = self.directions[direction].requests.iter().enumerate();
        let consuming = consuming.filter(|(_, request)| request.consumes_receive()).map(|(id, _)| id as u64);
        let first_packet = |id: u64| {
            record.events.iter().position(|(_, host, event)| {
                *host == end.host
                    && matches!(event, Event::PacketSent { qp, packet, wr_id, .. }
                        if *qp == end.qp && *wr_id == Some(id) && packet.opcode.operation().is_request())
            })
        };
        let posts = &self.receive_posts[direction];
        let when_sent = consuming.enumerate().filter_map(|(place, id)| Some((place, first_packet(id)?)));
        when_sent.map(|(place, at)| (place, posts.iter().filter(|post| **post <= at).count())).collect()
    }

    pub fn outcome(&mut self, direction: usize) -> Outcome {
        let (sender, receiver) = (self.ends[direction], self.ends[direction ^ 1]);
        let model = &self.directions[direction];
        let first = self.walk.psns[direction / 2][direction % 2];
        let from = receiver.base + receiver.receive_offset;
        let shared = self.hosts.iter().find(|host| host.id == receiver.host);
        let shared = shared.and_then(|host| host.receives.as_ref());
        let record = self.recording.borrow();
        let stored = record.events.iter().filter_map(|(_, host, event)| match event {
            Event::MemoryWritten { qp, key, address, psn, .. }
                if *host == receiver.host && *qp == receiver.receive_qp =>
            {
                // Its own READs and atomics store below the target.
                let is_window = receiver.window.is_some_and(|(_, rkey, _)| rkey.0 >> 8 == key >> 8);
                let is_shared = shared.is_some_and(|shared| shared.rkey.0 == *key);
                let is_incoming = is_window || is_shared || *key == receiver.rkey.0 && *address >= from;
                is_incoming.then(|| (psn.since(Psn::new(first)), *address))
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
        let view = verbs.query_queue_pair(receiver.receive_qp).unwrap();
        let target = verbs.read_memory(receiver.rkey, from, TARGET_BYTES as usize);
        let key = (receiver.host.0, receiver.receive_qp.value());
        let receives = self.receive_completions.remove(&key).unwrap_or_default();
        let (rkey, inbox) = match shared {
            Some(shared) => (shared.rkey, shared.base),
            None => (receiver.rkey, from + TARGET_BYTES),
        };
        let room = model.receive_bytes;
        let read_receive = |completion: &Completion| {
            verbs.read_memory(rkey, inbox + completion.wr_id * u64::from(room), room as usize)
        };
        let receive_memory = receives.iter().map(read_receive).collect();
        let mut verbs = self.world.verbs(sender.host);
        Outcome {
            sends: verbs.poll_all(sender.send_cq),
            receives,
            executed_psns: view.expected_psn.since(Psn::new(first)),
            sender_state: verbs.query_queue_pair(sender.qp).unwrap().state,
            receiver_state: view.state,
            sender: verbs.read_memory(sender.rkey, sender.base, model.sender_bytes as usize),
            target,
            receive_memory,
            stored,
            copies,
        }
    }
}

fn create_host(world: &mut World, walk: &Walk, id: HostId, capacity: usize) -> WalkHost {
    let mut verbs = world.verbs(id);
    let domain = verbs.allocate_protection_domain().unwrap();
    let receives = walk.shared_receives.then(|| {
        let cq = verbs.create_completion_queue(2048).unwrap();
        let is_xrc = walk.kind == QpType::XrcInitiator;
        let xrc_domain = is_xrc.then(|| verbs.open_xrc_domain().unwrap());
        let xrc = xrc_domain.map(|domain| (cq, domain));
        let init = SrqInitAttributes { pd: domain, srq_limit: 0, xrc };
        let srq = verbs.create_shared_receive_queue(init, 2048, 3).unwrap();
        let bytes = capacity as u64 * u64::from(walk.receive_bytes());
        let (rkey, base) = verbs.register_memory(domain, bytes, ALL_ACCESS).unwrap();
        SharedReceives { srq, cq, xrc_domain, rkey, base, posted: 0, capacity }
    });
    WalkHost { id, domain, receives }
}

fn create_end(
    world: &mut World,
    walk: &Walk,
    host: &WalkHost,
    peer: IpAddr,
    directions: &[DirectionModel],
    out: usize,
) -> ConnectionEnd {
    let back = out ^ 1;
    let inbox = directions[out].sender_bytes;
    let receives = if walk.shared_receives { 0 } else { directions[back].receives as u64 };
    let room = TARGET_BYTES + receives * u64::from(directions[back].receive_bytes);
    let mut verbs = world.verbs(host.id);
    let domain = host.domain;
    let send_cq = verbs.create_completion_queue(256).unwrap();
    let receive_cq = verbs.create_completion_queue(2048).unwrap();
    let shared = host.receives.as_ref();
    let is_xrc = walk.kind == QpType::XrcInitiator;
    let options = QpOptions {
        max_send_wr: 64,
        max_recv_wr: 256,
        max_inline_data: MAX_INLINE as usize,
        shared_receive_queue: shared.filter(|_| !is_xrc).map(|shared| shared.srq),
        ..QpOptions::default()
    };
    let queues = [send_cq, receive_cq];
    let qp = verbs.create_queue_pair_with(walk.kind, domain, queues, options, None).unwrap();
    let receive_qp = match shared.and_then(|shared| shared.xrc_domain) {
        Some(xrc_domain) => {
            let options = QpOptions { xrc_domain: Some(xrc_domain), ..QpOptions::default() };
            verbs.create_queue_pair_with(QpType::XrcTarget, domain, queues, options, None).unwrap()
        }
        None => qp,
    };
    let (key, base) = verbs.register_memory(domain, inbox + room, ALL_ACCESS).unwrap();
    verbs.write_memory(key, base, &DirectionModel::initial_source(out));
    verbs.write_memory(key, base + inbox, &DirectionModel::initial_target(back));
    let vector = softhca_engine::AddressVector::to(Gid::from(peer));
    let address_handle = verbs.create_address_handle(domain, vector).unwrap().0;
    let window = walk.windows[out].map(|w| (w, verbs.allocate_memory_window(domain, w.kind).unwrap(), false));
    debug_assert_eq!(SOURCE_BYTES, DirectionModel::initial_source(out).len() as u64);
    ConnectionEnd {
        host: host.id,
        qp,
        receive_qp,
        send_cq,
        receive_cq,
        rkey: key,
        base,
        receive_offset: inbox,
        address_handle,
        window,
        posted: 0,
    }
}
