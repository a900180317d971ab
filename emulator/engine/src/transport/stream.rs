//! A second transport, for a test of the seam: SENDs as a stream of bytes, as over TCP, without PSNs, ACKs and RNR NAKs.

use crate::core::control::QpRings;
use crate::core::hca::Hca;
use crate::core::hca_state::HcaState;
use crate::core::queue_pair::QueuePair;
use crate::core::transport::Transport;
use crate::{
    AddressVector, AsyncEvent, Context, Event, Instant, Memory, MemoryFault, MemoryId, MemoryRegion,
    ModifyQp, PacketBatch, QpInitAttributes, QpSnapshot, QpState, QpType, Reason, Settings, TransmitGate,
    WriterRole,
};
use alloc::vec;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr};
use softhca_queue::{
    AtomicOperation, CompletionConsumer, DoorbellProducer, ReceiveConsumer, ReceiveProducer, SendConsumer,
    SendProducer, completion_ring, doorbell_ring, receive_ring, send_ring,
};
use softhca_types::{
    AccessFlags, Completion, CompletionFlags, CompletionOpcode, CompletionStatus, Operation, Payload,
    ReceiveWorkRequest, ReceivedRoute, SendImmOrInvalidate, SendWorkRequest, Sge,
};
use softhca_wire::{Gid, LocalKey, Mtu, Psn, Qpn, RnrTimer};

struct Stream;

struct Receiver {
    ring: Option<ReceiveConsumer>,
    /// Bytes of an incomplete message.
    bytes: Vec<u8>,
}

type StreamQp = QueuePair<Stream>;

impl Transport for Stream {
    type Requester = Option<SendConsumer>;
    type Responder = Receiver;

    fn new(_: &Settings) -> Stream {
        Stream
    }

    fn create(rings: QpRings) -> (Option<SendConsumer>, Receiver) {
        (rings.send, Receiver { ring: rings.receive, bytes: Vec::new() })
    }

    fn snapshot(qp: &StreamQp) -> QpSnapshot {
        QpSnapshot {
            qpn: qp.qpn,
            qp_type: qp.kind,
            state: qp.state,
            attributes: qp.attributes,
            next_psn: Psn::default(),
            expected_psn: Psn::default(),
            outstanding: 0,
            sq_draining: false,
        }
    }

    fn ring_slots(qp: &StreamQp) -> [u32; 2] {
        let receives = qp.responder.ring.as_ref().map_or(0, ReceiveConsumer::slots);
        [qp.requester.as_ref().map_or(0, SendConsumer::slots), receives]
    }

    fn start(_: &mut StreamQp, _: &mut HcaState, _: &ModifyQp, _: QpState) {}

    fn leave(_: &mut StreamQp, _: &mut HcaState, _: &mut Context<'_>, _: QpState) {}

    fn reset(qp: &mut StreamQp, _: &mut HcaState) {
        qp.responder.bytes.clear();
    }

    fn enter_error(
        qp: &mut StreamQp,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        reason: Reason,
        _: Option<AsyncEvent>,
    ) {
        qp.change_state(ctx, QpState::Error, reason);
        let mut entries = Vec::new();
        while let Some(Ok(Some(wr_id))) = qp.responder.ring.as_mut().map(|ring| ring.dequeue(&mut entries)) {
            let status = CompletionStatus::WrFlushError;
            complete(qp, hca, ctx, (wr_id, CompletionOpcode::Receive, 0), status, Reason::Flushed);
        }
    }

    fn destroy(_: &mut StreamQp, _: &mut HcaState, _: &mut Context<'_>) {}

    fn on_doorbell(qp: &mut StreamQp, hca: &mut HcaState, _: &mut Context<'_>) {
        qp.schedule_transmit(hca);
    }

    fn fill_batch(
        qp: &mut StreamQp,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        _: &mut dyn TransmitGate,
        buffer: &mut [u8],
        _: usize,
    ) -> Option<PacketBatch> {
        let (mut entries, mut inline) = (Vec::new(), Vec::new());
        let ring = qp.requester.as_mut()?;
        let request = ring.dequeue(&mut entries, &mut inline).ok()??.ok()?;
        let Payload::Gather(list) = request.payload else { return None };
        let (wr_id, length) = (request.wr_id, list.iter().map(|sge| sge.length).sum::<u32>());
        let bytes = 4 + length as usize;
        buffer[..4].copy_from_slice(&length.to_be_bytes());
        let gathered = hca.gather(ctx, qp.pd?, list, 0, &mut buffer[4..bytes]);
        ring.retire();
        let end = (wr_id, CompletionOpcode::Send, length);
        if let Err(error) = gathered {
            let reason = Reason::LocalAccess(error);
            complete(qp, hca, ctx, end, CompletionStatus::LocalProtectionError, reason);
            Stream::enter_error(qp, hca, ctx, reason, None);
            return None;
        }
        complete(qp, hca, ctx, end, CompletionStatus::Success, Reason::None);
        qp.schedule_transmit(hca);
        Some(PacketBatch {
            addressing: qp.addressing,
            segment_size: bytes,
            packets: 1,
            bytes,
            is_unacknowledged: false,
            qpn: qp.qpn,
            service_level: 0,
            elided_payload: 0,
        })
    }
}

fn complete(
    qp: &StreamQp,
    hca: &mut HcaState,
    ctx: &mut Context<'_>,
    (wr_id, opcode, byte_len): (u64, CompletionOpcode, u32),
    status: CompletionStatus,
    reason: Reason,
) {
    let completion = Completion {
        wr_id,
        status,
        opcode,
        flags: CompletionFlags::empty(),
        byte_len,
        imm_data: 0,
        qpn: qp.qpn,
        src_qp: Qpn::default(),
        service_level: 0,
        route: ReceivedRoute::default(),
        vendor_error: 0,
        timestamp: 0,
    };
    hca.post_completion(ctx, qp.send_cq.expect("a queue pair with a completion queue"), completion, reason);
}

impl Hca<Stream> {
    /// The next bytes of the stream to a queue pair.
    fn receive_stream(&mut self, ctx: &mut Context<'_>, qpn: Qpn, bytes: &[u8]) {
        let (qp, state) = (self.queue_pairs.get_mut(qpn.value()).unwrap(), &mut self.state);
        qp.responder.bytes.extend_from_slice(bytes);
        while let Some((head, rest)) = qp.responder.bytes.split_first_chunk() {
            let length = u32::from_be_bytes(*head);
            let Some(message) = rest.get(..length as usize).map(<[u8]>::to_vec) else { return };
            qp.responder.bytes.drain(..4 + message.len());
            let mut entries = Vec::new();
            let wr_id = qp.responder.ring.as_mut().unwrap().dequeue(&mut entries).unwrap().unwrap();
            state
                .scatter(
                    ctx,
                    (qpn, WriterRole::Responder, Psn::default()),
                    qp.pd.unwrap(),
                    &entries,
                    0,
                    &message,
                )
                .unwrap();
            let end = (wr_id, CompletionOpcode::Receive, length);
            complete(qp, state, ctx, end, CompletionStatus::Success, Reason::None);
        }
    }
}

struct Bytes(Vec<u8>);

impl Memory for Bytes {
    fn read(&self, _: MemoryId, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        into.copy_from_slice(&self.0[offset as usize..][..into.len()]);
        Ok(())
    }

    fn write(&mut self, _: MemoryId, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        self.0[offset as usize..][..from.len()].copy_from_slice(from);
        Ok(())
    }

    fn atomic(&mut self, _: MemoryId, _: u64, _: AtomicOperation) -> Result<u64, MemoryFault> {
        Err(MemoryFault)
    }
}

/// A device with a queue pair in RTS.
struct End {
    hca: Hca<Stream>,
    memory: Bytes,
    doorbell: DoorbellProducer,
    completions: CompletionConsumer,
    send: SendProducer,
    receive: ReceiveProducer,
    qpn: Qpn,
    lkey: LocalKey,
    events: Vec<Event>,
}

impl End {
    fn new(fill: u8) -> End {
        let gid = Gid::from(IpAddr::V4(Ipv4Addr::new(10, 0, 0, fill)));
        let mut hca = Hca::<Stream>::new(Settings::default(), vec![gid]);
        let (doorbell, rung) = doorbell_ring(8);
        let client = hca.open_client(rung).unwrap();
        let pd = hca.allocate_protection_domain(client).unwrap();
        let (producer, completions) = completion_ring(16);
        let cq = Some(hca.create_completion_queue(client, producer).unwrap());
        let (iova, memory, access_flags) = (0, MemoryId(0), AccessFlags::LOCAL_WRITE);
        let region = MemoryRegion { client, pd, iova, length: 64, access_flags, memory };
        let lkey = LocalKey(hca.register_memory_region(region).unwrap().0);
        let ((send, sends), (receive, receives)) = (send_ring(8, 2, 0), receive_ring(8, 2));
        let (qp_type, pd) = (QpType::Rc, Some(pd));
        let init = QpInitAttributes {
            qp_type,
            pd,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            xrcd: None,
            sq_sig_all: true,
        };
        let rings = QpRings { send: Some(sends), receive: Some(receives) };
        let qpn = hca.create_queue_pair(client, init, rings).unwrap();
        let (memory, events) = (Bytes(vec![fill; 64]), Vec::new());
        let mut end = End { hca, memory, doorbell, completions, send, receive, qpn, lkey, events };
        let modify = ModifyQp::default();
        let address_vector = AddressVector { dgid: gid, ..AddressVector::default() };
        for step in [
            modify.state(QpState::Init).pkey_index(0).port(1).access_flags(AccessFlags::empty()),
            modify
                .state(QpState::ReadyToReceive)
                .address_vector(address_vector)
                .path_mtu(Mtu::B1024)
                .dest_qpn(qpn)
                .rq_psn(Psn::new(0))
                .max_dest_rd_atomic(1)
                .min_rnr_timer(RnrTimer::new(1)),
            modify
                .state(QpState::ReadyToSend)
                .timeout(14)
                .retry_count(7)
                .rnr_retry(7)
                .sq_psn(Psn::new(0))
                .max_rd_atomic(1),
        ] {
            end.call(|hca, ctx| hca.modify_queue_pair(ctx, client, qpn, &step)).unwrap();
        }
        end
    }

    fn call<R>(&mut self, call: impl FnOnce(&mut Hca<Stream>, &mut Context<'_>) -> R) -> R {
        let mut events = |_, event: &Event| self.events.push(*event);
        let mut ctx = Context { now: Instant::ZERO, memory: &mut self.memory, events: &mut events };
        call(&mut self.hca, &mut ctx)
    }

    fn sge(&self, address: u64, length: u32) -> Sge {
        Sge { address, length, lkey: self.lkey }
    }

    fn post_send(&mut self, wr_id: u64, gather: &[Sge]) {
        let operation = Operation::Send(SendImmOrInvalidate::None);
        self.send.enqueue(&SendWorkRequest::new(wr_id, operation, gather)).unwrap();
        self.send.publish();
        self.send.ring(&self.doorbell, self.qpn);
    }

    fn post_receive(&mut self, wr_id: u64, scatter: &[Sge]) {
        self.receive.enqueue(&ReceiveWorkRequest { wr_id, sg_list: scatter }).unwrap();
        assert!(!self.receive.publish(), "only a queue pair in ERR asks for a doorbell");
    }

    /// Everything that the device sends now.
    fn transmit(&mut self) -> Vec<u8> {
        let (mut stream, mut buffer) = (Vec::new(), [0; 256]);
        self.call(Hca::process_doorbells);
        while let Some(batch) = self.call(|hca, ctx| hca.transmit(ctx, &mut (), &mut buffer, 8)) {
            stream.extend_from_slice(&buffer[..batch.bytes]);
        }
        stream
    }

    fn completed(&mut self) -> Vec<(u64, CompletionStatus, u32)> {
        let next = || self.completions.pop().map(|done| (done.wr_id, done.status, done.byte_len));
        core::iter::from_fn(next).collect()
    }
}

#[test]
fn a_transport_without_packets_uses_the_core_as_it_is() {
    let (mut a, mut b) = (End::new(1), End::new(2));
    b.post_receive(10, &[b.sge(0, 8), b.sge(32, 8)]);
    b.post_receive(11, &[b.sge(16, 8)]);
    a.post_send(1, &[a.sge(0, 12)]);
    a.post_send(2, &[a.sge(0, 3)]);
    let stream = a.transmit();
    // The stream has no packets: the bytes arrive in pieces that no message knows.
    for piece in stream.chunks(5) {
        let qpn = b.qpn;
        b.call(|hca, ctx| hca.receive_stream(ctx, qpn, piece));
    }
    let ok = CompletionStatus::Success;
    assert_eq!(a.completed(), [(1, ok, 12), (2, ok, 3)]);
    assert_eq!(b.completed(), [(10, ok, 12), (11, ok, 3)]);
    let written: Vec<usize> = (0..64).filter(|index| b.memory.0[*index] == 1).collect();
    assert_eq!(written, [0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 32, 33, 34, 35]);
    assert_eq!(a.hca.next_timeout(), None, "no ACK, no timer");
    let sent = a.events.iter().filter(|event| matches!(event, Event::PacketSent { .. }));
    assert_eq!(sent.count(), 0, "no packet");
}

#[test]
fn the_core_protects_memory_for_every_transport() {
    let mut a = End::new(1);
    a.post_receive(10, &[a.sge(0, 8)]);
    a.post_send(1, &[Sge { address: 60, length: 8, lkey: a.lkey }]);
    assert!(a.transmit().is_empty());
    let statuses = [(1, CompletionStatus::LocalProtectionError, 8), (10, CompletionStatus::WrFlushError, 0)];
    assert_eq!(a.completed(), statuses);
    assert_eq!(a.hca.queue_pairs().next().map(|qp| qp.state), Some(QpState::Error));
}
