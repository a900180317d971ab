//! Receiving on unreliable services: UC drops incomplete messages silently, UD has no sequence.

use super::QueuePair;
use super::responder_state::ReceivedFrom;
use crate::core::hca_state::HcaState;
use crate::{Context, DropReason, Event, PacketSummary, Reason, RequestError};
use softhca_types::{CompletionFlags, CompletionOpcode, CompletionStatus, ReceivedRoute};
use softhca_wire::{AddressHeaders, Grh, ICRC_LEN, Operation, QueueKey, TransportPacket};

impl QueuePair {
    /// Handles a packet of an unreliable connection.
    pub(crate) fn on_uc_request(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        transport: &TransportPacket<'_>,
        packet: PacketSummary,
    ) {
        self.raise_communication_established(ctx);
        let (operation, position) = (packet.opcode.operation(), packet.opcode.position());
        let expected = self.responder.expected_psn;
        self.responder.expected_psn = packet.psn.plus(1);
        if position.starts_message() {
            // A new message ends the one in progress, at any PSN, and inherits its receive WQE. A duplicate of an
            // ONLY packet is therefore a message of its own, as on every UC responder.
            if self.responder.in_progress_message.take().is_some() {
                let reason = DropReason::UcSequenceGap { expected };
                ctx.emit(Event::PacketDropped { qp: self.qpn, packet: None, reason });
            }
        } else if packet.psn != expected || !self.check_opcode_sequence(operation, position) {
            self.responder.in_progress_message = None;
            return self.emit_dropped(hca, ctx, packet, DropReason::UcSequenceGap { expected });
        }
        let taken =
            self.check_payload_length(position, transport.payload.len()).and_then(|()| match operation {
                Operation::Send => self.execute_send(hca, ctx, transport),
                _ => self.execute_write(hca, ctx, transport),
            });
        let Err(error) = taken else { return };
        self.responder.in_progress_message = None;
        match error {
            RequestError::ReceiveAccess(_) => self.fail_receive(hca, ctx, error),
            // The next message uses the receive (class D). UC queue pairs have no shared receive queue.
            RequestError::ReceiveTooSmall { .. } => {
                hca.counters.resp_local_length_error += 1;
                self.emit_dropped(hca, ctx, packet, DropReason::UcRequest(error));
            }
            RequestError::ReceiverNotReady => {
                self.emit_dropped(hca, ctx, packet, DropReason::NoReceivePosted)
            }
            RequestError::Access(error) | RequestError::WriteWithImmAccess(error) => {
                self.emit_dropped(hca, ctx, packet, DropReason::UcAccess(error));
            }
            other => self.emit_dropped(hca, ctx, packet, DropReason::UcRequest(other)),
        }
    }

    /// The receive WQE names memory that the queue pair may not write: fails both.
    fn fail_receive(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>, error: RequestError) {
        let reason = Reason::RequestRejected(error);
        if let Some(buffer) = self.responder.receive_wqe.take() {
            let status = CompletionStatus::LocalProtectionError;
            self.complete_receive_with_error(hca, ctx, buffer, status, reason);
        }
        self.enter_error(hca, ctx, reason, None);
    }

    /// Handles a datagram.
    pub(crate) fn on_datagram(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        transport: &TransportPacket<'_>,
        addressing: &AddressHeaders,
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
        } else if self.ensure_receive_wqe(hca, ctx, transport.header.xrceth).is_err() {
            Some(DropReason::NoReceivePosted)
        } else {
            None
        };
        if let Some(reason) = reason {
            return self.emit_dropped(hca, ctx, packet, reason);
        }
        let grh = Grh::for_ud_receive(addressing, transport.len() + ICRC_LEN);
        let message = (grh.len() + transport.payload.len()) as u64;
        let capacity = self.responder.receive_wqe.as_ref().map_or(0, |wqe| wqe.capacity);
        if message > capacity {
            hca.counters.resp_local_length_error += 1;
            if self.srq.is_some()
                && let Some(buffer) = self.responder.receive_wqe.take()
            {
                // Class E: another queue pair may depend on the order of a shared receive queue.
                let reason = Reason::RequestRejected(RequestError::ReceiveTooSmall { message, capacity });
                let status = CompletionStatus::LocalLengthError;
                return self.complete_receive_with_error(hca, ctx, buffer, status, reason);
            }
            // Class D: the next datagram uses the receive.
            let reason = DropReason::DatagramTooLong { length: message, capacity };
            return self.emit_dropped(hca, ctx, packet, reason);
        }
        let placed = self
            .place_payload(hca, ctx, packet.psn, 0, &grh)
            .and_then(|at| self.place_payload(hca, ctx, packet.psn, at, transport.payload));
        match placed {
            Ok(bytes) => {
                let operation = CompletionOpcode::Receive;
                let local = &addressing.local;
                let has_grh = !local.exists() || addressing.grh(0).is_some();
                let mut flags = CompletionFlags::empty();
                flags.set(CompletionFlags::GRH, has_grh);
                flags.set(CompletionFlags::IPV4, addressing.source.is_ipv4());
                let mask = hca.infiniband.as_ref().map_or(0, |port| port.path_bits_mask());
                // A multicast LID has no path bits.
                let path_bits = if local.dlid.is_unicast() { local.dlid.0 as u8 & mask } else { 0 };
                let source = ReceivedFrom {
                    qpn: deth.source_qp,
                    service_level: local.service_level,
                    route: ReceivedRoute { slid: local.slid.0, dlid_path_bits: path_bits },
                };
                self.complete_receive(hca, ctx, &transport.header, operation, bytes, source, flags);
            }
            Err(error) => self.fail_receive(hca, ctx, error),
        }
    }
}
