//! Receiving on unreliable services: UC drops broken messages silently, UD has no sequence.

use crate::card::Card;
use crate::queue_pair::QueuePair;
use crate::{Context, DropReason, Event, Packet, Reason, Refusal};
use softhca_queue::{CompletionFlags, CompletionOperation, Status};
use softhca_wire::{Envelope, Grh, ICRC_LEN, Operation, QueueKey, Transport};

impl QueuePair {
    /// Takes a packet of an unreliable connection.
    pub(crate) fn on_unreliable(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        transport: &Transport<'_>,
        packet: Packet,
    ) {
        self.note_established(ctx);
        let (operation, position) = (packet.opcode.operation(), packet.opcode.position());
        let expected = self.inbound.expected;
        self.inbound.expected = packet.psn.plus(1);
        if position.starts() {
            // A message that starts ends whatever was open, at any PSN; its receive serves this one. A copy that
            // the network made of an ONLY packet is therefore a message of its own, as on every UC responder.
            if self.inbound.open.take().is_some() {
                let reason = DropReason::UnreliableGap { expected };
                ctx.tell(Event::PacketDropped { qp: self.number, packet: None, reason });
            }
        } else if packet.psn != expected || !self.check_place(operation, position) {
            self.inbound.open = None;
            return self.tell_dropped(card, ctx, packet, DropReason::UnreliableGap { expected });
        }
        let taken = self.check_payload(position, transport.payload.len()).and_then(|()| match operation {
            Operation::Send => self.accept_send(card, ctx, transport),
            _ => self.accept_write(card, ctx, transport),
        });
        let Err(refusal) = taken else { return };
        self.inbound.open = None;
        match refusal {
            Refusal::ReceiveTooSmall { .. } => {
                card.counters.resp_local_length_error += 1;
                self.fail_receive(card, ctx, Status::LocalLength, refusal);
            }
            Refusal::ReceiveDenied(_) => self.fail_receive(card, ctx, Status::LocalProtection, refusal),
            Refusal::NotReady => self.tell_dropped(card, ctx, packet, DropReason::NoReceivePosted),
            Refusal::Access(denied) => {
                self.tell_dropped(card, ctx, packet, DropReason::UnreliableAccess(denied));
            }
            other => self.tell_dropped(card, ctx, packet, DropReason::UnreliableRequest(other)),
        }
    }

    /// The receive at hand ends in error, and the queue pair with it.
    fn fail_receive(&mut self, card: &mut Card, ctx: &mut Context<'_>, status: Status, refusal: Refusal) {
        let reason = Reason::Refused(refusal);
        if let Some(buffer) = self.inbound.buffer.take() {
            self.complete_receive(card, ctx, buffer, status, reason);
        }
        self.enter_error(card, ctx, reason, None);
    }

    /// Takes a datagram.
    pub(crate) fn on_datagram(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        transport: &Transport<'_>,
        envelope: &Envelope,
        packet: Packet,
    ) {
        let deth = transport.header.deth.expect("a datagram has a DETH");
        let wanted = match self.kind {
            crate::QpKind::Gsi => QueueKey::GSI,
            _ => self.attributes.queue_key,
        };
        let (length, mtu) = (transport.payload.len() as u32, self.attributes.mtu.bytes());
        let reason = if deth.queue_key != wanted {
            Some(DropReason::WrongQueueKey)
        } else if length > mtu {
            Some(DropReason::TooLongForPath { length, mtu })
        } else if self.ensure_buffer(card, ctx, &transport.header).is_err() {
            Some(DropReason::NoReceivePosted)
        } else {
            None
        };
        if let Some(reason) = reason {
            return self.tell_dropped(card, ctx, packet, reason);
        }
        let grh = Grh::delivered(envelope, transport.len() + ICRC_LEN);
        let placed = self
            .place(card, ctx, packet.psn, 0, &grh)
            .and_then(|at| self.place(card, ctx, packet.psn, at, transport.payload));
        match placed {
            Ok(bytes) => {
                let operation = CompletionOperation::Receive;
                let mut flags = CompletionFlags::GRH;
                flags.set(CompletionFlags::IPV4, envelope.source.is_ipv4());
                self.deliver(card, ctx, &transport.header, operation, bytes, deth.source, flags);
            }
            Err(refusal @ Refusal::ReceiveTooSmall { .. }) => {
                card.counters.resp_local_length_error += 1;
                self.fail_receive(card, ctx, Status::LocalLength, refusal);
            }
            Err(refusal) => self.fail_receive(card, ctx, Status::LocalProtection, refusal),
        }
    }
}
