//! Receiving on unreliable services: UC drops broken messages silently, UD has no sequence.

use super::QueuePair;
use crate::hca_state::HcaState;
use crate::{Context, DropReason, Event, PacketSummary, Reason, RequestError};
use softhca_queue::{CompletionFlags, CompletionOpcode, CompletionStatus};
use softhca_wire::{AddressHeaders, Grh, ICRC_LEN, Operation, QueueKey, TransportPacket};

impl QueuePair {
    /// Takes a packet of an unreliable connection.
    pub(crate) fn on_uc_request(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        transport: &TransportPacket<'_>,
        packet: PacketSummary,
    ) {
        self.raise_communication_established(ctx);
        let (operation, position) = (packet.opcode.operation(), packet.opcode.position());
        let expected = self.responder.expected_psn;
        self.responder.expected_psn = packet.psn.plus(1);
        if position.starts_message() {
            // A message that starts ends whatever was open, at any PSN; its receive serves this one. A copy that
            // the network made of an ONLY packet is therefore a message of its own, as on every UC responder.
            if self.responder.in_progress_message.take().is_some() {
                let reason = DropReason::UcSequenceGap { expected };
                ctx.emit(Event::PacketDropped { qp: self.qpn, packet: None, reason });
            }
        } else if packet.psn != expected || !self.check_opcode_sequence(operation, position) {
            self.responder.in_progress_message = None;
            return self.emit_dropped(card, ctx, packet, DropReason::UcSequenceGap { expected });
        }
        let taken =
            self.check_payload_length(position, transport.payload.len()).and_then(|()| match operation {
                Operation::Send => self.execute_send(card, ctx, transport),
                _ => self.execute_write(card, ctx, transport),
            });
        let Err(refusal) = taken else { return };
        self.responder.in_progress_message = None;
        match refusal {
            RequestError::ReceiveTooSmall { .. } => {
                card.counters.resp_local_length_error += 1;
                self.fail_receive(card, ctx, CompletionStatus::LocalLengthError, refusal);
            }
            RequestError::ReceiveAccess(_) => {
                self.fail_receive(card, ctx, CompletionStatus::LocalProtectionError, refusal)
            }
            RequestError::ReceiverNotReady => {
                self.emit_dropped(card, ctx, packet, DropReason::NoReceivePosted)
            }
            RequestError::Access(denied) => {
                self.emit_dropped(card, ctx, packet, DropReason::UcAccess(denied));
            }
            other => self.emit_dropped(card, ctx, packet, DropReason::UcRequest(other)),
        }
    }

    /// The receive at hand ends in error, and the queue pair with it.
    fn fail_receive(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        status: CompletionStatus,
        refusal: RequestError,
    ) {
        let reason = Reason::RequestRejected(refusal);
        if let Some(buffer) = self.responder.receive_wqe.take() {
            self.complete_receive_with_error(card, ctx, buffer, status, reason);
        }
        self.enter_error(card, ctx, reason, None);
    }

    /// Takes a datagram.
    pub(crate) fn on_datagram(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        transport: &TransportPacket<'_>,
        envelope: &AddressHeaders,
        packet: PacketSummary,
    ) {
        let deth = transport.header.deth.expect("a datagram has a DETH");
        let wanted = match self.kind {
            crate::QpType::Gsi => QueueKey::GSI,
            _ => self.attributes.qkey,
        };
        let (length, mtu) = (transport.payload.len() as u32, self.attributes.path_mtu.bytes());
        let reason = if deth.qkey != wanted {
            Some(DropReason::QkeyMismatch)
        } else if length > mtu {
            Some(DropReason::PayloadExceedsPmtu { length, mtu })
        } else if self.ensure_receive_wqe(card, ctx, &transport.header).is_err() {
            Some(DropReason::NoReceivePosted)
        } else {
            None
        };
        if let Some(reason) = reason {
            return self.emit_dropped(card, ctx, packet, reason);
        }
        let grh = Grh::for_ud_receive(envelope, transport.len() + ICRC_LEN);
        let placed = self
            .place_payload(card, ctx, packet.psn, 0, &grh)
            .and_then(|at| self.place_payload(card, ctx, packet.psn, at, transport.payload));
        match placed {
            Ok(bytes) => {
                let operation = CompletionOpcode::Receive;
                let mut flags = CompletionFlags::GRH;
                flags.set(CompletionFlags::IPV4, envelope.source.is_ipv4());
                self.complete_receive(card, ctx, &transport.header, operation, bytes, deth.source_qp, flags);
            }
            Err(refusal @ RequestError::ReceiveTooSmall { .. }) => {
                card.counters.resp_local_length_error += 1;
                self.fail_receive(card, ctx, CompletionStatus::LocalLengthError, refusal);
            }
            Err(refusal) => self.fail_receive(card, ctx, CompletionStatus::LocalProtectionError, refusal),
        }
    }
}
