//! Packets without payload that the card itself owes a peer: congestion notifications, and the last words of queue pairs.
//! They go before everything else, and their queue pair need not be there any more.

use crate::congestion::priority;
use crate::hca_state::HcaState;
use crate::queue_pair::QueuePair;
use crate::responder_state::PendingResponse;
use crate::{Context, DropReason, Event, Hca, PacketBatch, PacketSummary, TransmitGate};
use core::net::IpAddr;
use softhca_wire::{AddressHeaders, ICRC_LEN, Opcode, Qpn, TransportHeader};

/// Packets that may wait: a port that never lets them go must not fill the memory.
const MAX_CONTROL_PACKETS: usize = 4096;

/// A packet that waits to be sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ControlPacket {
    pub qpn: Qpn,
    pub addressing: AddressHeaders,
    pub service_level: u8,
    pub header: TransportHeader,
    /// Bytes behind the headers, all zero.
    pub body_length: usize,
    /// The answer to a duplicate.
    pub retransmission: bool,
}

impl HcaState {
    /// Sends a packet as soon as it may.
    pub fn queue_control_packet(&mut self, ctx: &mut Context<'_>, owing: ControlPacket) {
        if self.control_packets.len() + self.blocked_control_packets.len() < MAX_CONTROL_PACKETS {
            return self.control_packets.push_back(owing);
        }
        let packet = Some(PacketSummary::new(&owing.header, 0, owing.addressing.destination));
        let reason = DropReason::TooManyPendingResponses;
        ctx.emit(Event::PacketDropped { qp: owing.qpn, packet, reason });
    }

    /// Drops what is owed and `is_void`.
    fn discard_control_packets(&mut self, is_void: impl Fn(&ControlPacket) -> bool) {
        self.control_packets.retain(|owing| !is_void(owing));
        self.blocked_control_packets.retain(|owing| !is_void(owing));
    }
}

impl QueuePair {
    /// Leaves to the card what the queue pair owes for what it has received: its user has seen that it came, and may end
    /// the queue pair before the port may send. From the first READ on nobody is answered any more.
    pub(crate) fn detach_acks(&mut self, card: &mut HcaState, ctx: &mut Context<'_>) {
        while let Some(PendingResponse::Ack { .. } | PendingResponse::AtomicResponse { .. }) =
            self.responder.pending_responses.front()
            && let Some(plan) = self.plan_response(card, ctx)
        {
            let again = matches!(
                self.responder.pending_responses.pop_front(),
                Some(PendingResponse::AtomicResponse { is_duplicate: true, .. })
            );
            let (queue_pair, service_level) = (self.qpn, plan.service_level);
            let (envelope, header) = (plan.addressing, plan.header);
            card.queue_control_packet(
                ctx,
                ControlPacket {
                    qpn: queue_pair,
                    addressing: envelope,
                    service_level,
                    header,
                    body_length: 0,
                    retransmission: again,
                },
            );
        }
        self.responder.pending_responses.clear();
    }

    /// A new connection begins: its peer must not take the last words of an earlier one for its own.
    pub(crate) fn discard_orphaned_acks(&self, card: &mut HcaState) {
        let (port, peer) = (self.addressing.destination, self.attributes.dest_qpn);
        card.discard_control_packets(|owing| {
            owing.addressing.destination == port && owing.header.bth.destination_qp == peer
        });
    }
}

impl Hca {
    /// Whether somebody waits for something that could not be sent yet, and that nothing but the card itself would send.
    pub fn has_orphaned_acks(&self) -> bool {
        !self.state.control_packets.is_empty()
            || !self.state.blocked_control_packets.is_empty()
            || !self.cm.mad_queue.is_empty()
    }

    /// What had to wait may be tried again.
    pub(crate) fn unblock_control_packets(&mut self) {
        let waiting = core::mem::take(&mut self.state.blocked_control_packets);
        self.state.control_packets.extend(waiting);
    }

    /// Nobody is there who waits for it: the port is dead, or has begun a new life.
    pub fn discard_orphaned_acks(&mut self, destination: IpAddr) {
        self.state.discard_control_packets(|owing| owing.addressing.destination == destination);
    }

    /// Builds the next of them.
    pub(crate) fn transmit_control_packet(
        &mut self,
        ctx: &mut Context<'_>,
        gate: &mut dyn TransmitGate,
        buffer: &mut [u8],
    ) -> Option<PacketBatch> {
        while let Some(owing) = self.state.control_packets.pop_front() {
            let ControlPacket {
                qpn: queue_pair,
                addressing: envelope,
                service_level,
                header,
                body_length: body,
                retransmission: again,
            } = owing;
            let paused = self.state.paused_priorities >> priority(&envelope, service_level) & 1 == 1;
            if paused
                || gate.allowed_packets(&envelope, header.bth.opcode.header_length() + body + ICRC_LEN) == 0
            {
                self.state.blocked_control_packets.push(owing);
                continue;
            }
            let at = header.emit(buffer);
            let bytes = at + body + ICRC_LEN;
            buffer[at..bytes].fill(0);
            self.state.counters.np_cnp_sent += u64::from(header.bth.opcode == Opcode::CNP);
            self.state.counters.sent_pkts += 1;
            let packet = PacketSummary::new(&header, 0, envelope.destination);
            ctx.emit(Event::PacketSent { qp: queue_pair, packet, wr_id: None, retransmission: again });
            return Some(PacketBatch {
                addressing: envelope,
                segment_size: bytes,
                packets: 1,
                bytes,
                qpn: queue_pair,
                service_level,
                elided_payload: 0,
            });
        }
        None
    }
}
