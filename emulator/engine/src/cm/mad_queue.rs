//! Messages on their way to QP1 of other ports: built when the port asks for them.

use super::event::{CmDropReason, CmMessageKind};
use crate::hca_state::HcaState;
use crate::{CmId, Context, Event, PacketBatch, PacketSummary, TransmitGate};
use alloc::collections::{BTreeMap, VecDeque};
use core::net::IpAddr;
use softhca_wire::cm::Datagram;
use softhca_wire::{
    AddressHeaders, Bth, Deth, ICRC_LEN, ImmOrInvalidate, MadHeader, Opcode, Operation, Position, Psn, Qpn,
    QueueKey, Service, TransportHeader,
};

/// Messages that may wait. Every one that matters is sent again when it gets no answer.
const MAX_QUEUED_MADS: usize = 65_536;
/// The UDP source port of QP1, the one that Linux uses.
pub(super) const SOURCE_PORT: u16 = 0xd872;
/// Bytes of a message on the wire, from the BTH to the ICRC.
const SEGMENT: usize = Bth::LEN + Deth::LEN + MadHeader::DATAGRAM_LEN + ICRC_LEN;

struct QueuedMad {
    id: Option<CmId>,
    addressing: AddressHeaders,
    datagram: Datagram,
    retransmission: bool,
}

#[derive(Default)]
pub(crate) struct MadQueue {
    waiting: VecDeque<QueuedMad>,
    /// Messages to ports that nothing may be sent to now.
    blocked: BTreeMap<IpAddr, VecDeque<QueuedMad>>,
    count: usize,
    next_psn: Psn,
    is_scheduled: bool,
}

impl MadQueue {
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Puts a message in.
    pub fn push(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        id: Option<CmId>,
        envelope: AddressHeaders,
        datagram: Datagram,
        again: bool,
    ) {
        if self.count >= MAX_QUEUED_MADS {
            let (message, peer) = (CmMessageKind::new(&datagram.message), envelope.destination);
            return ctx.emit(Event::CmDropped { id, message, peer, reason: CmDropReason::SendQueueFull });
        }
        self.count += 1;
        self.waiting.push_back(QueuedMad { id, addressing: envelope, datagram, retransmission: again });
        self.schedule_transmit(card);
    }

    fn schedule_transmit(&mut self, card: &mut HcaState) {
        if !self.is_scheduled && !self.waiting.is_empty() {
            self.is_scheduled = true;
            card.transmit_queue.push_back(Qpn::GSI);
        }
    }

    /// Builds messages to one port in `buffer`.
    pub fn fill_batch(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        gate: &mut dyn TransmitGate,
        buffer: &mut [u8],
        most: usize,
    ) -> Option<PacketBatch> {
        self.is_scheduled = false;
        let mut run: Option<PacketBatch> = None;
        let mut most = most;
        while let Some(next) = self.waiting.front() {
            let envelope = next.addressing;
            let destination = envelope.destination;
            match &run {
                None => {
                    let held = self.blocked.contains_key(&destination);
                    most = if held { 0 } else { most.min(gate.allowed_packets(&envelope, SEGMENT)) };
                    if most == 0 {
                        if !held {
                            card.blocked_qps.entry(destination).or_default().push(Qpn::GSI);
                        }
                        let next = self.waiting.pop_front().expect("it was just looked at");
                        self.blocked.entry(destination).or_default().push_back(next);
                        most = usize::MAX;
                        continue;
                    }
                }
                Some(run) if run.addressing != envelope || run.packets == most => break,
                Some(run) if run.bytes + SEGMENT > buffer.len() => break,
                Some(_) => {}
            }
            if buffer.len() < SEGMENT {
                break;
            }
            let next = self.waiting.pop_front().expect("it was just looked at");
            self.count -= 1;
            let run = run.get_or_insert(PacketBatch {
                addressing: envelope,
                segment_size: SEGMENT,
                packets: 0,
                bytes: 0,
                qpn: Qpn::GSI,
                service_level: 0,
                elided_payload: 0,
            });
            self.build_packet(card, ctx, &next, &mut buffer[run.bytes..run.bytes + SEGMENT]);
            run.packets += 1;
            run.bytes += SEGMENT;
        }
        self.schedule_transmit(card);
        run
    }

    fn build_packet(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        next: &QueuedMad,
        buffer: &mut [u8],
    ) {
        let opcode = Opcode::new(Service::Ud, Operation::Send, Position::Only, ImmOrInvalidate::None);
        let psn = self.next_psn;
        self.next_psn = psn.plus(1);
        let mut header = TransportHeader::new(Bth::new(opcode.expect("datagrams are sent"), Qpn::GSI, psn));
        header.bth.ack_request = true;
        header.deth = Some(Deth { qkey: QueueKey::GSI, source_qp: Qpn::GSI });
        let at = header.emit(buffer);
        let end = at + MadHeader::DATAGRAM_LEN;
        buffer[at..end].copy_from_slice(&next.datagram.emit());
        buffer[end..].fill(0);
        card.counters.sent_pkts += 1;
        card.counters.sent_bytes += MadHeader::DATAGRAM_LEN as u64;
        let peer = next.addressing.destination;
        let packet = PacketSummary::new(&header, MadHeader::DATAGRAM_LEN, peer);
        ctx.emit(Event::CmSent {
            id: next.id,
            message: CmMessageKind::new(&next.datagram.message),
            peer,
            retransmission: next.retransmission,
        });
        ctx.emit(Event::PacketSent { qp: Qpn::GSI, packet, wr_id: None, retransmission: false });
    }

    /// Messages to `destination` may go again.
    pub fn unblock(&mut self, card: &mut HcaState, destination: IpAddr) {
        for message in self.blocked.remove(&destination).unwrap_or_default().into_iter().rev() {
            self.waiting.push_front(message);
        }
        self.schedule_transmit(card);
    }

    /// Messages to `destination` will never arrive.
    pub fn discard(&mut self, destination: IpAddr) {
        self.blocked.remove(&destination);
        self.waiting.retain(|message| message.addressing.destination != destination);
        self.count = self.waiting.len() + self.blocked.values().map(VecDeque::len).sum::<usize>();
    }
}
