//! Duplicate requests: the responder answers them without executing them again.

use super::QueuePair;
use super::responder::MAX_PENDING_RESPONSES;
use super::responder_state::PendingResponse;
use crate::core::hca_state::HcaState;
use crate::{Context, DropReason, Event, PacketSummary};
use softhca_types::AccessFlags;
use softhca_wire::{Operation, TransportPacket};

impl QueuePair {
    /// Answers a request that was already executed (IBA 9.7.5.1.5).
    pub(crate) fn on_duplicate_request(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        transport: &TransportPacket<'_>,
        packet: PacketSummary,
    ) {
        hca.counters.duplicate_request += 1;
        let header = &transport.header;
        let psn = packet.psn;
        if self.responder.pending_responses.len() >= MAX_PENDING_RESPONSES {
            return self.emit_dropped(hca, ctx, packet, DropReason::TooManyPendingResponses);
        }
        match packet.opcode.operation() {
            Operation::Send | Operation::Write => {
                if !header.bth.ack_request {
                    return self.emit_dropped(hca, ctx, packet, DropReason::Duplicate);
                }
                let latest = self.responder.expected_psn.minus(1);
                self.queue_ack(hca, latest);
            }
            Operation::ReadRequest => {
                let remote = header.reth.expect("a READ request has a RETH");
                let packets = self.attributes.path_mtu.packets(remote.dma_length);
                let known = packets <= self.responder.expected_psn.since(psn);
                let allowed = remote.dma_length == 0
                    || self.check_remote_access(hca, header, remote, AccessFlags::REMOTE_READ).is_ok();
                let (true, true, Ok(pd)) = (known, allowed, self.remote_access_pd(hca, header)) else {
                    return self.emit_dropped(hca, ctx, packet, DropReason::Duplicate);
                };
                self.responder.replay_read_response(psn, packets, remote, pd);
            }
            _ => {
                let found = self.responder.atomic_results.iter().find(|(kept, _)| *kept == psn);
                let Some((_, original)) = found.copied() else {
                    return self.emit_dropped(hca, ctx, packet, DropReason::AtomicResultNotSaved);
                };
                let msn = self.responder.msn;
                self.responder.pending_responses.push_back(PendingResponse::AtomicResponse {
                    psn,
                    original,
                    msn,
                    is_duplicate: true,
                });
            }
        }
        ctx.emit(Event::DuplicateRequestHandled { qp: self.qpn, psn, opcode: packet.opcode });
        self.schedule_transmit(hca);
    }
}
