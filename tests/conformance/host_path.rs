//! Packets between the processes of one host: what stays in memory has the effects of what passes the port.

use proptest::collection::vec;
use proptest::prelude::*;
use softhca_engine::{
    AckPolicy, ClientId, Context, CqId, Event, Hca, HostWire, Instant, MemoryObjects, MemoryRegion, ModifyQp,
    PdId, QpInitAttributes, QpRings, QpState, QpType, Settings,
};
use softhca_queue::{
    CompletionConsumer, DoorbellProducer, MemoryBlock, ReceiveProducer, SendProducer, completion_ring,
    doorbell_ring, receive_ring, send_ring,
};
use softhca_types::{
    AccessFlags, AddressVector, Completion, DeviceLimits, Operation, Payload, ReceiveWorkRequest,
    RemoteAddress, SendFlags, SendImmOrInvalidate, SendWorkRequest, Sge,
};
use softhca_wire::{AddressHeaders, Gid, ICRC_LEN, LocalKey, Mtu, Psn, Qpn, QpnSlot, RemoteKey, RnrTimer};
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
/// The memory of a queue pair: packets of different queue pairs have no order.
const PART: u64 = 16 << 10;
const MEMORY: usize = 3 * PART as usize;
const DEPTH: u32 = 4;
/// The bit of the IDs of receives.
const RECEIVE: u64 = 1 << 32;
const MTU: Mtu = Mtu::B1024;
const RIGHTS: AccessFlags =
    AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_WRITE).union(AccessFlags::REMOTE_READ);

/// A queue pair with its rings.
struct Pair {
    qpn: Qpn,
    send: SendProducer,
    receive: ReceiveProducer,
}

/// A process of the host.
struct Process {
    hca: Hca,
    memory: MemoryObjects,
    block: Arc<MemoryBlock>,
    client: ClientId,
    completions: CompletionConsumer,
    doorbell: DoorbellProducer,
    key: RemoteKey,
    pairs: Vec<Pair>,
    /// What the others have sent.
    inbox: VecDeque<(AddressHeaders, usize, Vec<u8>)>,
    events: Vec<Event>,
}

impl Process {
    fn new(slot: u16, pairs: usize) -> Process {
        let qpn_slot = QpnSlot { number: slot, bits: QpnSlot::BITS };
        let settings = Settings { ack_policy: AckPolicy::Coalesce, qpn_slot, ..Settings::default() };
        let mut hca = Hca::new(settings, vec![Gid::from(ADDRESS)]);
        let (doorbell, consumer) = doorbell_ring(DeviceLimits::HCA.max_qp);
        let client = hca.open_client(consumer).unwrap();
        let domain = hca.allocate_protection_domain(client).unwrap();
        let (producer, completions) = completion_ring(1024);
        let cq = hca.create_completion_queue(client, producer).unwrap();
        let (mut memory, block) = (MemoryObjects::default(), Arc::new(MemoryBlock::new(MEMORY)));
        block
            .write(0, &(0..MEMORY).map(|at| (at * 7 + usize::from(slot)) as u8).collect::<Vec<_>>())
            .unwrap();
        let (id, length) = (memory.add(block.clone()), MEMORY as u64);
        let region = MemoryRegion { client, pd: domain, iova: 0, length, access_flags: RIGHTS, memory: id };
        let key = hca.register_memory_region(region).unwrap();
        let pairs = (0..pairs).map(|_| Self::create_pair(&mut hca, client, domain, cq)).collect();
        let (inbox, events) = (VecDeque::new(), Vec::new());
        Process { hca, memory, block, client, completions, doorbell, key, pairs, inbox, events }
    }

    fn create_pair(hca: &mut Hca, client: ClientId, domain: PdId, cq: CqId) -> Pair {
        let (send, taken) = send_ring(DEPTH, 2, 64);
        let (receive, posted) = receive_ring(DEPTH, 2);
        let init = QpInitAttributes {
            qp_type: QpType::Rc,
            pd: Some(domain),
            send_cq: Some(cq),
            recv_cq: Some(cq),
            srq: None,
            xrcd: None,
            sq_sig_all: false,
        };
        let rings = QpRings { send: Some(taken), receive: Some(posted) };
        Pair { qpn: hca.create_queue_pair(client, init, rings).unwrap(), send, receive }
    }

    fn call<R>(&mut self, now: Instant, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R {
        let Process { hca, memory, events, .. } = self;
        let mut record = |_, event: &Event| events.push(*event);
        act(hca, &mut Context { now, memory, events: &mut record })
    }

    fn connect(&mut self, index: usize, peer: Qpn) {
        let (client, qpn, modify) = (self.client, self.pairs[index].qpn, ModifyQp::default());
        let steps = [
            modify.state(QpState::Init).pkey_index(0).port(1).access_flags(RIGHTS),
            modify
                .state(QpState::ReadyToReceive)
                .address_vector(AddressVector::to(Gid::from(ADDRESS)))
                .path_mtu(MTU)
                .dest_qpn(peer)
                .rq_psn(Psn::new(0xff_fffa))
                .max_dest_rd_atomic(4)
                .min_rnr_timer(RnrTimer::new(1)),
            modify
                .state(QpState::ReadyToSend)
                .sq_psn(Psn::new(0xff_fffa))
                .timeout(14)
                .retry_count(7)
                .rnr_retry(7)
                .max_rd_atomic(4),
        ];
        for step in steps {
            self.call(Instant::ZERO, |hca, ctx| hca.modify_queue_pair(ctx, client, qpn, &step)).unwrap();
        }
    }
}

/// Packets on their way to a process, and how much room its ring still has.
struct Wire<'a> {
    room: usize,
    sent: &'a mut Vec<(u16, AddressHeaders, usize, Vec<u8>)>,
}

impl HostWire for Wire<'_> {
    fn room(&mut self, _: u16) -> usize {
        self.room
    }

    fn send(&mut self, slot: u16, path: &AddressHeaders, segment_size: usize, packets: &[u8]) {
        assert!(packets.len() <= self.room, "what does not fit is not sent");
        self.room -= packets.len();
        self.sent.push((slot, *path, segment_size, packets.to_vec()));
    }
}

/// How packets travel.
#[derive(Clone, Copy)]
struct Way {
    /// In memory, as far as they can.
    in_host: bool,
    /// The bytes that a ring takes in a turn.
    room: usize,
}

/// The ends of each connection: one within process 1, and one between both processes.
const CONNECTIONS: [[(usize, usize); 2]; 2] = [[(0, 0), (0, 1)], [(0, 2), (1, 0)]];

#[derive(Clone, Debug)]
enum Step {
    Send { end: (usize, usize), length: u32, inline: bool, kind: u8, signaled: bool },
    Receive { end: (usize, usize), length: u32, parts: bool },
    Turn,
}

fn any_step() -> impl Strategy<Value = Step> {
    let end = (0..2usize, 0..2usize).prop_map(|(connection, side)| CONNECTIONS[connection][side]);
    let length = prop_oneof![Just(0), 1..=64u32, 1..=1024u32, 1..=3000u32];
    prop_oneof![
        4 => (end.clone(), length, any::<bool>(), 0..40u8, any::<bool>())
            .prop_map(|(end, length, inline, kind, signaled)| Step::Send { end, length, inline, kind, signaled }),
        4 => (end, prop_oneof![6 => Just(3000), 1 => 0..200u32], any::<bool>())
            .prop_map(|(end, length, parts)| Step::Receive { end, length, parts }),
        3 => Just(Step::Turn),
    ]
}

struct Host {
    processes: [Process; 2],
    way: Way,
    turns: u64,
    /// The packets that stayed in memory.
    in_host: u64,
}

impl Host {
    fn new(way: Way) -> Host {
        let mut processes = [Process::new(1, 3), Process::new(2, 1)];
        for ends in CONNECTIONS {
            for [(process, pair), (peer, peer_pair)] in [ends, [ends[1], ends[0]]] {
                let qpn = processes[peer].pairs[peer_pair].qpn;
                processes[process].connect(pair, qpn);
            }
        }
        Host { processes, way, turns: 0, in_host: 0 }
    }

    fn post(&mut self, step: &Step, id: u64) {
        match *step {
            Step::Turn => self.turn(),
            Step::Receive { end: (process, pair), length, parts } => {
                let process = &mut self.processes[process];
                let lkey = LocalKey(process.key.0);
                let at = pair as u64 * PART + (8 << 10);
                let whole = [Sge { address: at, length, lkey }];
                let halves = [
                    Sge { address: at, length: length / 2, lkey },
                    Sge { address: at + 4096, length: length - length / 2, lkey },
                ];
                let sg_list = if parts { &halves[..] } else { &whole[..] };
                let pair = &mut process.pairs[pair];
                let wr_id = RECEIVE | id;
                if pair.receive.enqueue(&ReceiveWorkRequest { wr_id, sg_list }).is_ok() {
                    let _ = pair.receive.publish();
                }
            }
            Step::Send { end, length, inline, kind, signaled } => {
                let connection = CONNECTIONS.iter().flatten().position(|other| *other == end).unwrap();
                let (peer, peer_pair) = CONNECTIONS[connection / 2][1 - connection % 2];
                let rkey = RemoteKey(self.processes[peer].key.0 ^ u32::from(kind == 7));
                let remote = RemoteAddress { address: peer_pair as u64 * PART + 4096 + id % 64, rkey };
                let process = &mut self.processes[end.0];
                let lkey = LocalKey(process.key.0 ^ u32::from(kind == 8));
                let operation = match kind {
                    0 => Operation::Send(SendImmOrInvalidate::Immediate(7)),
                    1 => Operation::Write { remote, imm_data: Some(9) },
                    2 => Operation::Read { remote },
                    3..=6 => Operation::Write { remote, imm_data: None },
                    7 => Operation::Write { remote, imm_data: None },
                    _ => Operation::Send(SendImmOrInvalidate::None),
                };
                let bytes: Vec<u8> = (0..length.min(64)).map(|at| (u64::from(at) + id) as u8).collect();
                let sges = [Sge { address: end.1 as u64 * PART + id % 512, length, lkey }];
                let mut request = SendWorkRequest::new(id, operation, &sges);
                if inline && kind != 2 {
                    (request.payload, request.flags) = (Payload::Inline(&bytes), SendFlags::INLINE);
                }
                if signaled {
                    request.flags |= SendFlags::SIGNALED | SendFlags::SOLICITED;
                }
                let pair = &mut process.pairs[end.1];
                if pair.send.enqueue(&request).is_ok() {
                    pair.send.publish();
                    pair.send.ring(&process.doorbell, pair.qpn);
                }
            }
        }
    }

    /// Everything that can travel does. Then time passes.
    fn turn(&mut self) {
        self.turns += 1;
        let now = Instant::from_nanos(self.turns * 1_000_000);
        for process in &mut self.processes {
            process.call(now, |hca, ctx| {
                hca.process_doorbells(ctx);
                if hca.next_timeout().is_some_and(|at| at <= now) {
                    hca.expire(ctx);
                }
            });
        }
        let mut is_quiet = false;
        while !is_quiet {
            is_quiet = true;
            for index in 0..2 {
                is_quiet &= !self.transmit(now, index) & !self.receive(now, index);
            }
        }
    }

    fn transmit(&mut self, now: Instant, index: usize) -> bool {
        let (mut buffer, mut sent) = (vec![0; 8192], Vec::new());
        let own = index as u16 + 1;
        let process = &mut self.processes[index];
        let mut moved = false;
        if self.way.in_host {
            let mut wire = Wire { room: self.way.room, sent: &mut sent };
            moved = process.call(now, |hca, ctx| hca.transmit_in_host(ctx, &mut wire, &mut buffer));
            self.in_host += u64::from(moved);
        }
        while let Some(batch) = process.call(now, |hca, ctx| hca.transmit(ctx, &mut (), &mut buffer, 16)) {
            moved = true;
            let (bytes, size) = (buffer[..batch.bytes].to_vec(), batch.segment_size);
            let to = QpnSlot::of(softhca_wire::Bth::parse(&bytes).unwrap().destination_qp, QpnSlot::BITS);
            if to.number != own {
                sent.push((to.number, batch.addressing, size, bytes));
                continue;
            }
            for packet in bytes.chunks(size) {
                let transport = &packet[..packet.len() - ICRC_LEN];
                process.call(now, |hca, ctx| hca.receive(ctx, &batch.addressing, transport));
            }
        }
        for (to, path, size, bytes) in sent {
            self.processes[usize::from(to) - 1].inbox.push_back((path, size, bytes));
        }
        moved
    }

    fn receive(&mut self, now: Instant, index: usize) -> bool {
        let process = &mut self.processes[index];
        let mut moved = false;
        while let Some((path, size, bytes)) = process.inbox.pop_front() {
            moved = true;
            let received = match self.way.in_host {
                true => process.call(now, |hca, ctx| hca.receive_in_host(ctx, ADDRESS, 0, size, &bytes)),
                false => 0,
            };
            for packet in bytes[received..].chunks(size) {
                let transport = &packet[..packet.len() - ICRC_LEN];
                process.call(now, |hca, ctx| hca.receive(ctx, &path, transport));
            }
        }
        moved
    }

    /// Everything that does not depend on how many packets travel at once.
    fn outcome(&mut self) -> Outcome {
        let mut outcome = Outcome::default();
        for process in &mut self.processes {
            let mut bytes = vec![0; MEMORY];
            process.block.read(0, &mut bytes).unwrap();
            outcome.memory.push(bytes);
            while let Some(completion) = process.completions.pop() {
                // Completions of a send queue and of a receive queue have no order.
                let queue = (completion.qpn, completion.wr_id & RECEIVE);
                outcome.completions.entry(queue).or_default().push(completion);
            }
            for event in &process.events {
                let (qpn, kind) = match event {
                    Event::PacketSent { qp, packet, retransmission: false, .. } => {
                        match packet.opcode.operation() {
                            softhca_wire::Operation::Acknowledge => continue,
                            operation => (*qp, if operation.is_request() { "request" } else { "response" }),
                        }
                    }
                    Event::RnrWaitStarted { .. } => {
                        outcome.has_waited = true;
                        continue;
                    }
                    Event::QpStateChanged { qp, .. } => (*qp, "state"),
                    Event::RequestRejected { qp, .. } => (*qp, "rejection"),
                    _ => continue,
                };
                outcome.events.entry((qpn, kind)).or_default().push(*event);
            }
        }
        // What follows a request without a receive may be sent, and rejected, before the wait begins.
        if outcome.has_waited {
            outcome.events.retain(|(_, kind), _| *kind == "state");
        }
        outcome
    }
}

impl Outcome {
    fn has_failed(&self) -> bool {
        self.completions.values().flatten().any(|completion| !completion.status.is_success())
    }
}

/// The effects of a run.
#[derive(Default)]
struct Outcome {
    memory: Vec<Vec<u8>>,
    completions: BTreeMap<(Qpn, u64), Vec<Completion>>,
    events: BTreeMap<(Qpn, &'static str), Vec<Event>>,
    has_waited: bool,
}

fn play(steps: &[Step], way: Way) -> Host {
    let mut host = Host::new(way);
    for (id, step) in steps.iter().enumerate() {
        host.post(step, id as u64);
    }
    (0..8).for_each(|_| host.turn());
    host
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn packets_in_memory_have_the_effects_of_packets_through_the_port(
        steps in vec(any_step(), 1..60),
        room in prop_oneof![Just(1 << 20), Just(0), 100..3000usize],
    ) {
        let [mut general, mut in_host] =
            [false, true].map(|in_host| play(&steps, Way { in_host, room }));
        let (expected, got) = (general.outcome(), in_host.outcome());
        prop_assert_eq!(expected.has_failed(), got.has_failed());
        // An error ends both directions of a connection: timing decides what was complete.
        if expected.has_failed() {
            return Ok(());
        }
        prop_assert!(expected.memory == got.memory);
        prop_assert_eq!(expected.completions, got.completions);
        prop_assert_eq!(expected.events, got.events);
    }
}

#[test]
fn messages_of_one_packet_stay_in_memory() {
    for [end, _] in CONNECTIONS {
        let steps: Vec<_> = (0..4)
            .map(|_| Step::Send { end, length: 64, inline: false, kind: 3, signaled: true })
            .chain([Step::Turn])
            .collect();
        let mut host = play(&steps, Way { in_host: true, room: 1 << 20 });
        assert!(host.in_host > 0);
        let outcome = host.outcome();
        let done: Vec<_> = outcome.completions.values().flatten().collect();
        assert_eq!(done.len(), 4);
        assert!(done.iter().all(|completion| completion.status.is_success()));
    }
}
