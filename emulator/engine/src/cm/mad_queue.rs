//! The send queue of QP1: MADs are built when the port transmits.

use crate::core::hca_state::HcaState;
use crate::{CmDropReason, CmId, Context, Event, PacketBatch, PacketSummary, Peer, TransmitGate};
use alloc::collections::{BTreeMap, VecDeque};
use core::net::IpAddr;
use softhca_wire::cm::{Datagram, Message};
use softhca_wire::{
    AddressHeaders, Bth, Deth, ICRC_LEN, ImmOrInvalidate, MadHeader, Opcode, Operation, Position, Psn, Qpn,
    QpnSlot, QueueKey, Service, TransportHeader,
};

/// The maximum number of queued MADs. Messages without a reply are retransmitted.
const MAX_QUEUED_MADS: usize = 65_536;
/// The UDP source port of QP1, as on Linux.
pub(super) const SOURCE_PORT: u16 = 0xd872;
/// The bytes of a MAD on the wire, from the BTH to the ICRC.
const SEGMENT: usize = Bth::LEN + Deth::LEN + MadHeader::DATAGRAM_LEN + ICRC_LEN;

struct QueuedMad {
    id: Option<CmId>,
    addressing: AddressHeaders,
    datagram: Datagram,
    retransmission: bool,
}

impl QueuedMad {
    /// The number that leads to the process which it is for.
    fn target(&self) -> Qpn {
        self.datagram.target().qpn()
    }
}

/// Whether packets to both queue pairs of a host with this many slot bits arrive at the same port.
fn is_same_port(bits: u8, one: Qpn, other: Qpn) -> bool {
    QpnSlot::of(one, bits) == QpnSlot::of(other, bits)
}

#[derive(Default)]
pub(crate) struct MadQueue {
    waiting: VecDeque<QueuedMad>,
    /// MADs to destinations whose transmit gate is closed.
    blocked: BTreeMap<IpAddr, VecDeque<QueuedMad>>,
    count: usize,
    next_psn: Psn,
    is_scheduled: bool,
}

impl MadQueue {
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Queues a MAD.
    pub fn push(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        id: Option<CmId>,
        addressing: AddressHeaders,
        datagram: Datagram,
        again: bool,
    ) {
        if self.count >= MAX_QUEUED_MADS {
            let (message, peer) = (datagram.message.kind(), addressing.destination);
            return ctx.emit(Event::CmDropped { id, message, peer, reason: CmDropReason::SendQueueFull });
        }
        self.count += 1;
        self.waiting.push_back(QueuedMad { id, addressing, datagram, retransmission: again });
        self.schedule_transmit(hca);
    }

    fn schedule_transmit(&mut self, hca: &mut HcaState) {
        if !self.is_scheduled && !self.waiting.is_empty() {
            self.is_scheduled = true;
            hca.egress.queue.push_back(Qpn::GSI);
        }
    }

    /// Builds MADs for one destination in `buffer`.
    pub fn fill_batch(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        gate: &mut dyn TransmitGate,
        buffer: &mut [u8],
        max_packets: usize,
    ) -> Option<PacketBatch> {
        self.is_scheduled = false;
        let mut batch: Option<PacketBatch> = None;
        let mut max_packets = max_packets;
        let mut first_target = Qpn::GSI;
        while let Some(next) = self.waiting.front_mut() {
            let addressing = next.addressing;
            let destination = addressing.destination;
            let bits = gate.slot_bits(destination);
            if let (Message::Req(req), true) = (&next.datagram.message, bits > 0) {
                // A REQ without a reply may have gone to a process that does not listen any more.
                let listener = hca.processes.listener(destination, req.service_id);
                let listener = listener.filter(|_| !next.retransmission);
                let slot = listener.map_or(0, |id| QpnSlot::of(id.qpn(), bits).number);
                next.datagram.set_listener_slot(slot);
            }
            let target = next.target();
            match &batch {
                None => {
                    let blocked = self.blocked.get(&destination);
                    let is_held = blocked.is_some_and(|blocked| {
                        blocked.iter().any(|other| is_same_port(bits, target, other.target()))
                    });
                    max_packets = if is_held {
                        0
                    } else {
                        max_packets.min(gate.allowed_packets(&addressing, target, SEGMENT, false))
                    };
                    if max_packets == 0 {
                        if blocked.is_none() {
                            hca.egress.blocked_qps.entry(destination).or_default().push(Qpn::GSI);
                        }
                        let next = self.waiting.pop_front().expect("front() has returned it");
                        self.blocked.entry(destination).or_default().push_back(next);
                        max_packets = usize::MAX;
                        continue;
                    }
                }
                Some(batch) if batch.addressing != addressing || batch.packets == max_packets => break,
                Some(_) if !is_same_port(bits, target, first_target) => break,
                Some(batch) if batch.bytes + SEGMENT > buffer.len() => break,
                Some(_) => {}
            }
            if buffer.len() < SEGMENT {
                break;
            }
            let next = self.waiting.pop_front().expect("front() has returned it");
            self.count -= 1;
            first_target = target;
            let batch = batch.get_or_insert(PacketBatch {
                addressing,
                segment_size: SEGMENT,
                packets: 0,
                bytes: 0,
                is_unacknowledged: false,
                qpn: Qpn::GSI,
                service_level: 0,
                elided_payload: 0,
            });
            self.build_packet(hca, ctx, &next, &mut buffer[batch.bytes..batch.bytes + SEGMENT]);
            batch.packets += 1;
            batch.bytes += SEGMENT;
        }
        self.schedule_transmit(hca);
        batch
    }

    fn build_packet(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        next: &QueuedMad,
        buffer: &mut [u8],
    ) {
        let opcode = Opcode::new(Service::Ud, Operation::Send, Position::Only, ImmOrInvalidate::None);
        let psn = self.next_psn;
        self.next_psn = psn.plus(1);
        let mut header = TransportHeader::new(Bth::new(opcode.expect("UD has a SEND opcode"), Qpn::GSI, psn));
        header.bth.ack_request = true;
        header.deth = Some(Deth { qkey: QueueKey::GSI, source_qp: Qpn::GSI });
        let at = header.emit(buffer);
        let end = at + MadHeader::DATAGRAM_LEN;
        buffer[at..end].copy_from_slice(&next.datagram.emit());
        buffer[end..].fill(0);
        hca.counters.sent_pkts += 1;
        hca.counters.sent_bytes += MadHeader::DATAGRAM_LEN as u64;
        let peer = next.addressing.destination;
        let packet = PacketSummary::new(&header, MadHeader::DATAGRAM_LEN, peer);
        ctx.emit(Event::CmSent {
            id: next.id,
            message: next.datagram.message.kind(),
            peer,
            retransmission: next.retransmission,
        });
        ctx.emit(Event::PacketSent { qp: Qpn::GSI, packet, wr_id: None, retransmission: false });
    }

    /// The transmit gate of `destination` is open again.
    pub fn unblock(&mut self, hca: &mut HcaState, destination: IpAddr) {
        for message in self.blocked.remove(&destination).unwrap_or_default().into_iter().rev() {
            self.waiting.push_front(message);
        }
        self.schedule_transmit(hca);
    }

    /// Discards the MADs to `peer`.
    pub fn discard(&mut self, peer: Peer) {
        let is_other = |message: &QueuedMad| !peer.contains(message.addressing.destination, message.target());
        self.blocked.values_mut().for_each(|blocked| blocked.retain(is_other));
        self.blocked.retain(|_, blocked| !blocked.is_empty());
        self.waiting.retain(is_other);
        self.count = self.waiting.len() + self.blocked.values().map(VecDeque::len).sum::<usize>();
    }
}
