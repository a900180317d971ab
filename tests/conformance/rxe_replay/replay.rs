//! Runs our HCA in the role of one of the two rxe hosts of a capture.

use super::captured_flow::{CapturedFlow, Packet};
use softhca_engine::{AddressVector, CqId, MemoryWindowType, PdId, QpType, Recovery, Settings};
use softhca_fabric::{HostId, LinkSettings};
use softhca_tests::pair::{ALL_ACCESS, Recorder, Recording};
use softhca_tests::verbs::{ConnectOptions, QpOptions, World};
use softhca_types::{
    MemoryWindowBind, Operation, ReceiveWorkRequest, RemoteAddress, SendFlags, SendImmOrInvalidate,
    SendWorkRequest, Sge, UdDestination,
};
use softhca_wire::{
    Gid, Icrc, ImmOrInvalidate, LocalKey, Mtu, Psn, Qpn, QueueKey, RemoteKey, RnrTimer, Syndrome,
};
use std::cell::RefCell;
use std::collections::HashSet;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

/// Attributes of queue pairs that a capture does not contain, or shows only through a NAK.
#[derive(Clone, Copy, Default)]
pub struct FlowAssumptions {
    /// The PSN that the responder expects, if not the first one.
    pub expected_psn: Option<u32>,
    pub mtu: Option<Mtu>,
    /// Bytes of a receive.
    pub receive_bytes: Option<u32>,
    /// A region that is too short: rkey, first and last byte.
    pub short_region: Option<(u32, u64, u64)>,
    /// The rkey of a memory window.
    pub window: Option<u32>,
    /// There is no responder.
    pub responder_absent: bool,
    /// The RNR retry count of the requester.
    pub rnr_retry: Option<u8>,
}

/// Our HCA in a simulation where the other host is only an address.
struct ReplayHost {
    world: World,
    recording: Rc<RefCell<Recording>>,
    host: HostId,
    peer: HostId,
    domain: PdId,
    cq: CqId,
    qp: Qpn,
}

impl ReplayHost {
    fn new(dialogue: &CapturedFlow, (address, number): (IpAddr, Qpn), peer: IpAddr) -> ReplayHost {
        let mut world = World::new(1);
        let record = Rc::new(RefCell::new(Recording::default()));
        world.set_sink(Recorder(record.clone()));
        // rxe requests an ACK every 66 packets.
        let settings =
            Settings { recovery: Recovery::GoBackN, ack_request_interval: 66, ..Settings::default() };
        let host = world.add_host_at("we", address, settings);
        let peer = world.add_host_at("rxe", peer, settings);
        world.add_link(host, peer, LinkSettings::default());
        let mut verbs = world.verbs(host);
        let domain = verbs.allocate_protection_domain().unwrap();
        let cq = verbs.create_completion_queue(4096).unwrap();
        let options = QpOptions { max_send_wr: 256, max_recv_wr: 256, ..QpOptions::default() };
        let qp =
            verbs.create_queue_pair_with(dialogue.kind, domain, [cq, cq], options, Some(number)).unwrap();
        ReplayHost { world, recording: record, host, peer, domain, cq, qp }
    }

    fn connect(
        &mut self,
        dialogue: &CapturedFlow,
        priming: FlowAssumptions,
        peer: Qpn,
        mtu: Mtu,
        psns: [Psn; 2],
    ) {
        let mut verbs = self.world.verbs(self.host);
        if dialogue.kind == QpType::Ud {
            return verbs.start_datagrams(self.qp, dialogue.queue_key(), psns[0]).unwrap();
        }
        let min_rnr_timer = dialogue.rnr_timer().unwrap_or(RnrTimer::new(12));
        let rnr_retry = priming.rnr_retry.unwrap_or(7);
        let connection =
            ConnectOptions { path_mtu: mtu, min_rnr_timer, rnr_retry, ..ConnectOptions::default() };
        verbs.connect(self.qp, (self.peer, peer), &connection, psns).unwrap();
    }

    /// Registers memory for application data.
    fn register(&mut self, length: u64) -> (RemoteKey, u64) {
        self.world.verbs(self.host).register_memory(self.domain, length.max(1), ALL_ACCESS).unwrap()
    }

    fn sent(&self) -> Vec<Packet> {
        self.recording.borrow().sent.iter().map(|(_, frame)| Packet::new(frame.clone())).collect()
    }
}

/// Delivers the requests of a capture to our HCA and returns its responses.
pub fn respond(dialogue: &CapturedFlow, priming: FlowAssumptions) -> Vec<Packet> {
    let CapturedFlow { requester, responder, .. } = dialogue;
    let mut stage = ReplayHost::new(dialogue, *responder, requester.0);
    let expected = priming.expected_psn.map_or(dialogue.first_psn(), Psn::new);
    let mtu = priming.mtu.unwrap_or(dialogue.mtu());
    stage.connect(dialogue, priming, requester.1, mtu, [Psn::new(0), expected]);
    let window = register_remote_ranges(&mut stage, dialogue, priming);
    let room = priming.receive_bytes.unwrap_or(1 << 20);
    let (key, base) = stage.register(u64::from(room));
    let scatter = [Sge { address: base, length: room, lkey: LocalKey(key.0) }];
    if priming.responder_absent {
        stage.world.verbs(stage.host).destroy_queue_pair(stage.qp).unwrap();
    }
    let mut missing = dialogue.rnr_naks();
    let mut given = HashSet::new();
    for packet in dialogue.requests() {
        let psn = packet.psn();
        if consumes_receive(packet) && !priming.responder_absent && !given.contains(&psn) {
            match missing.get_mut(&psn).filter(|count| **count > 0) {
                Some(count) => *count -= 1,
                None => {
                    given.insert(psn);
                    let receive = ReceiveWorkRequest { wr_id: 0, sg_list: &scatter };
                    stage.world.verbs(stage.host).post_receive(stage.qp, &receive).unwrap();
                }
            }
        }
        let mut frame = packet.frame.clone();
        if let (Some(theirs), Some(ours)) = (priming.window, window) {
            replace(&mut frame.bytes, theirs, ours.0);
            Icrc::write(&frame.addressing, &mut frame.bytes);
        }
        stage.world.inject(stage.host, frame);
    }
    stage.sent()
}

/// Whether a packet consumes a receive.
fn consumes_receive(packet: &Packet) -> bool {
    let opcode = packet.header.bth.opcode;
    match packet.operation() {
        softhca_wire::Operation::Send => opcode.position().starts_message(),
        _ => packet.header.immediate.is_some(),
    }
}

/// Registers the address ranges of the requests, with the contents of rxe's memory.
fn register_remote_ranges(
    stage: &mut ReplayHost,
    dialogue: &CapturedFlow,
    priming: FlowAssumptions,
) -> Option<RemoteKey> {
    let mut regions = dialogue.regions();
    if let Some((key, from, to)) = priming.short_region {
        regions.insert(RemoteKey(key), (from, to));
    }
    let memory = dialogue.memory();
    let mut window = None;
    for (key, (from, to)) in regions {
        let mut verbs = stage.world.verbs(stage.host);
        // A window needs a region with another rkey.
        let region = if priming.window == Some(key.0) { RemoteKey(0x7f00) } else { key };
        verbs.register_memory_with_key(stage.domain, from, to - from, ALL_ACCESS, region).unwrap();
        for (address, byte) in memory.range(from..to) {
            verbs.write_memory(region, *address, &[*byte]);
        }
        if priming.window == Some(key.0) {
            let unbound = verbs.allocate_memory_window(stage.domain, MemoryWindowType::Type2).unwrap();
            let bind = MemoryWindowBind {
                mw_rkey: unbound,
                new_rkey: unbound,
                mr_lkey: LocalKey(region.0),
                address: from,
                length: to - from,
                access: ALL_ACCESS & !softhca_types::AccessFlags::MW_BIND,
            };
            verbs
                .post_send(stage.qp, &SendWorkRequest::new(0, Operation::BindMemoryWindow(bind), &[]))
                .unwrap();
            let bound = verbs.poll(stage.cq).expect("a bind completes at once");
            assert!(bound.status.is_success(), "{bound:?}");
            window = Some(unbound);
        }
    }
    window
}

/// Replaces their rkey by ours.
fn replace(bytes: &mut [u8], theirs: u32, ours: u32) {
    let (theirs, ours) = (theirs.to_be_bytes(), ours.to_be_bytes());
    if let Some(at) = bytes.windows(4).position(|window| window == theirs) {
        bytes[at..at + 4].copy_from_slice(&ours);
    }
}

/// A message of a capture as a work request.
struct Message {
    operation: Operation,
    flags: SendFlags,
    data: Vec<u8>,
    /// Bytes of the response.
    back: u32,
    datagram: Option<(Qpn, QueueKey)>,
}

/// Posts the work requests of a capture to our HCA, delivers the responses, and returns the first transmission of each
/// request and the completion statuses.
pub fn request(dialogue: &CapturedFlow, priming: FlowAssumptions) -> (Vec<Packet>, Vec<&'static str>) {
    let CapturedFlow { requester, responder, .. } = dialogue;
    let mut stage = ReplayHost::new(dialogue, *requester, responder.0);
    stage.connect(dialogue, priming, responder.1, dialogue.mtu(), [dialogue.first_psn(), Psn::new(0)]);
    let destination = Gid::from(responder.0);
    let vector = AddressVector::to(destination);
    let handle = stage.world.verbs(stage.host).create_address_handle(stage.domain, vector).unwrap().0;
    for message in messages(dialogue) {
        let length = message.data.len() as u32 + message.back;
        let (key, base) = stage.register(u64::from(length));
        let gather = [Sge { address: base, length, lkey: LocalKey(key.0) }];
        let mut request = SendWorkRequest::new(0, message.operation, &gather);
        request.flags |= message.flags;
        if let Some((queue_pair, queue_key)) = message.datagram {
            request.ud = UdDestination { ah: handle, remote_qpn: queue_pair, remote_qkey: queue_key };
        }
        let mut verbs = stage.world.verbs(stage.host);
        verbs.write_memory(key, base, &message.data);
        verbs.post_send(stage.qp, &request).unwrap();
    }
    for packet in dialogue.responses() {
        // After a repeated RNR NAK, the request was retried after the first wait.
        if let Some(Syndrome::RnrNak(timer)) = packet.header.aeth.map(|aeth| aeth.syndrome) {
            stage.world.run_for(Duration::from_nanos(timer.nanoseconds()));
        }
        stage.world.inject(stage.host, packet.frame.clone());
    }
    // Requests without a response exhaust their retries.
    stage.world.run_for(Duration::from_secs(10));
    let mut seen = HashSet::new();
    let mut sent = stage.sent();
    sent.retain(|packet| seen.insert(packet.psn()));
    let completions = stage.world.verbs(stage.host).poll_all(stage.cq);
    (sent, completions.iter().map(|completion| completion.status.name()).collect())
}

/// The work requests of a capture.
fn messages(dialogue: &CapturedFlow) -> Vec<Message> {
    let mut messages: Vec<Message> = Vec::new();
    for packet in dialogue.without_retransmissions() {
        let header = &packet.header;
        let opcode = header.bth.opcode;
        let reth = header.reth.map(|reth| RemoteAddress { address: reth.virtual_address, rkey: reth.rkey });
        let atomic =
            header.atomic.map(|eth| (RemoteAddress { address: eth.virtual_address, rkey: eth.rkey }, eth));
        if opcode.position().starts_message() {
            let operation = match (packet.operation(), reth, atomic) {
                (softhca_wire::Operation::Write, Some(remote), _) => {
                    Operation::Write { remote, imm_data: None }
                }
                (softhca_wire::Operation::ReadRequest, Some(remote), _) => Operation::Read { remote },
                (softhca_wire::Operation::CompareSwap, _, Some((remote, eth))) => {
                    Operation::CompareSwap { remote, compare: eth.compare, swap: eth.swap_or_add }
                }
                (softhca_wire::Operation::FetchAdd, _, Some((remote, eth))) => {
                    Operation::FetchAdd { remote, add: eth.swap_or_add }
                }
                _ => Operation::Send(SendImmOrInvalidate::None),
            };
            let back = match operation {
                Operation::Read { .. } => header.reth.map_or(0, |reth| reth.dma_length),
                Operation::CompareSwap { .. } | Operation::FetchAdd { .. } => 8,
                _ => 0,
            };
            let datagram = header.deth.map(|deth| (header.bth.destination_qp, deth.qkey));
            let flags = SendFlags::empty();
            messages.push(Message { operation, flags, data: Vec::new(), back, datagram });
        }
        let message = messages.last_mut().expect("a message starts with its start");
        message.data.extend(&packet.payload);
        message.flags.set(SendFlags::SOLICITED, header.bth.solicited_event);
        match (opcode.imm_or_invalidate(), &mut message.operation) {
            (ImmOrInvalidate::Immediate, Operation::Send(imm_or_invalidate)) => {
                *imm_or_invalidate =
                    SendImmOrInvalidate::Immediate(header.immediate.expect("immediate data").0);
            }
            (ImmOrInvalidate::Immediate, Operation::Write { imm_data: immediate, .. }) => {
                *immediate = header.immediate.map(|immediate| immediate.0);
            }
            (ImmOrInvalidate::Invalidate, Operation::Send(imm_or_invalidate)) => {
                *imm_or_invalidate =
                    SendImmOrInvalidate::Invalidate(RemoteKey(header.ieth.expect("a key").0));
            }
            _ => {}
        }
    }
    messages
}
