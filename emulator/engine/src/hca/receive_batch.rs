//! Places the payload of packets that arrived together with one access to memory.

use super::Hca;
use crate::hca_state::HcaState;
use crate::memory::MemoryLocation;
use crate::queue_pair::QueuePair;
use crate::queue_pair::batch_copy::{ContiguousRange, MAX_BATCH, NO_LOCATION};
use crate::{Context, PortState, QpType};
use alloc::vec::Vec;
use softhca_queue::Sge;
use softhca_wire::{
    AddressHeaders, Bth, ImmOrInvalidate, Operation, PartitionKey, Psn, Qpn, Syndrome, TransportHeader,
    TransportPacket,
};

/// How packets that arrived together go on.
struct ReceiveSequence {
    queue_pair: Qpn,
    expected: Psn,
    operation: Operation,
    /// What is open, once the first was looked at.
    open: Option<ContiguousRange>,
    /// Receives that they take.
    receives: u32,
}

impl ReceiveSequence {
    /// Whether a packet is the next of these and will be accepted in its turn; where its payload goes then.
    fn next_location(
        &mut self,
        qp: &QueuePair,
        card: &HcaState,
        transport: &TransportPacket<'_>,
        scatter: &mut Vec<Sge>,
    ) -> Option<MemoryLocation> {
        let TransportPacket { header, payload, .. } = transport;
        let Bth { opcode, psn, destination_qp: destination, pkey: partition, .. } = header.bth;
        let (position, length) = (opcode.position(), payload.len());
        let is_response = self.operation == Operation::ReadResponse;
        let is_next = destination == self.queue_pair
            && psn == self.expected
            && opcode.operation() == self.operation
            && opcode.service() == qp.kind.service()
            && PartitionKey::DEFAULT.matches(partition)
            && header.aeth.is_none_or(|aeth| matches!(aeth.syndrome, Syndrome::Ack(_)));
        // At its end a message may do more than bring its payload.
        let is_plain = match opcode.imm_or_invalidate() {
            ImmOrInvalidate::None => true,
            ImmOrInvalidate::Immediate => self.operation == Operation::Send,
            _ => false,
        };
        if !is_next || !is_plain {
            return None;
        }
        let mut stretch = match self.open {
            Some(open) if is_response || !position.starts_message() => open,
            None if position.starts_message() && !is_response => {
                qp.new_message_target(card, header, self.receives, scatter)?
            }
            _ => return None,
        };
        let mtu = qp.attributes.path_mtu.bytes() as usize;
        let rest = stretch.bytes_left_in_message.map(|rest| rest as usize);
        let fits = match position.ends_message() {
            true => (1..=mtu).contains(&length) && rest.is_none_or(|rest| rest == length),
            false => length == mtu && rest.is_none_or(|rest| rest > length),
        };
        let place = stretch.split_front(length).filter(|_| fits)?;
        self.receives += u32::from(position.ends_message() && self.operation == Operation::Send);
        self.expected = psn.plus(1);
        self.open = (!position.ends_message()).then_some(stretch);
        Some(place)
    }
}

impl Hca {
    /// Places the payload of packets that arrived together, with one access to memory, as far as they follow each other
    /// on one queue pair; returns how many of them, from the first. The caller then gives exactly these to
    /// [`Hca::receive_placed`], before it does anything else with the card.
    pub fn place_batch(
        &mut self,
        ctx: &mut Context<'_>,
        envelope: &AddressHeaders,
        packets: &mut dyn Iterator<Item = &[u8]>,
    ) -> usize {
        let first = packets.next().and_then(|bytes| TransportPacket::parse(bytes).ok());
        let Some(first) = first else { return 0 };
        let Some((qp, mut course)) = self.receive_sequence(envelope, &first.header) else { return 0 };
        let (mut places, mut pieces) = ([NO_LOCATION; MAX_BATCH], [&[][..]; MAX_BATCH]);
        let (mut count, mut scatter) = (0, Vec::new());
        let mut next = Some(first);
        while let Some(transport) = next.take() {
            let Some(place) = course.next_location(qp, &self.state, &transport, &mut scatter) else { break };
            (places[count], pieces[count]) = (place, transport.payload);
            count += 1;
            // Of reads, the next is another work request's.
            let is_over = course.open.is_none() && course.operation == Operation::ReadResponse;
            if count < MAX_BATCH && !is_over {
                next = packets.next().and_then(|bytes| TransportPacket::parse(bytes).ok());
            }
        }
        match count {
            0 | 1 => 0,
            _ => ctx.memory.write_batch(&places[..count], &pieces[..count]),
        }
    }

    /// What follows from a packet that is the next of its queue pair, and may be the first of several.
    fn receive_sequence(
        &self,
        envelope: &AddressHeaders,
        header: &TransportHeader,
    ) -> Option<(&QueuePair, ReceiveSequence)> {
        let Bth { opcode, psn, destination_qp: destination, .. } = header.bth;
        let operation = opcode.operation();
        let qp = self.queue_pairs.get(destination.value())?;
        let is_its_own = qp.kind == QpType::Rc
            && self.state.port_state == PortState::Active
            && envelope.source == qp.addressing.destination
            && envelope.destination == qp.addressing.source;
        let open = match operation {
            _ if !is_its_own => return None,
            Operation::ReadResponse => Some(qp.read_response_target(&self.state, psn)?),
            Operation::Send | Operation::Write => {
                if !qp.state.accepts_requests() || qp.responder.nak_sent || psn != qp.responder.expected_psn {
                    return None;
                }
                match qp.responder.in_progress_message {
                    Some(_) => Some(qp.in_progress_target(&self.state, header)?),
                    None => None,
                }
            }
            _ => return None,
        };
        Some((qp, ReceiveSequence { queue_pair: destination, expected: psn, operation, open, receives: 0 }))
    }

    /// As [`Hca::receive`], for a packet whose payload [`Hca::place_ahead`] placed.
    pub fn receive_placed(&mut self, ctx: &mut Context<'_>, envelope: &AddressHeaders, bytes: &[u8]) {
        self.state.payload_placed = true;
        self.receive(ctx, envelope, bytes);
        self.state.payload_placed = false;
    }
}
