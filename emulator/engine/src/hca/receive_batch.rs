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

/// The state of a sequence of packets that arrived together.
struct ReceiveSequence {
    queue_pair: Qpn,
    expected: Psn,
    operation: Operation,
    /// The target of the message in progress.
    open: Option<ContiguousRange>,
    /// The receives that the sequence has consumed.
    receives: u32,
}

impl ReceiveSequence {
    /// Returns the target of the packet's payload, if the packet continues the sequence and its queue pair will
    /// accept it.
    fn next_location(
        &mut self,
        qp: &QueuePair,
        state: &HcaState,
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
        // The last packet of a message may have side effects.
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
                qp.new_message_target(state, header, self.receives, scatter)?
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
    /// Places the payload of packets that arrived together with one access to memory, as long as they are consecutive
    /// on one queue pair. Returns the number of placed packets. The caller must pass exactly these to
    /// [`Hca::receive_placed`] before any other call.
    pub fn place_batch(
        &mut self,
        ctx: &mut Context<'_>,
        addressing: &AddressHeaders,
        packets: &mut dyn Iterator<Item = &[u8]>,
    ) -> usize {
        let first = packets.next().and_then(|bytes| TransportPacket::parse(bytes).ok());
        let Some(first) = first else { return 0 };
        let Some((qp, mut sequence)) = self.receive_sequence(addressing, &first.header) else { return 0 };
        let (mut places, mut pieces) = ([NO_LOCATION; MAX_BATCH], [&[][..]; MAX_BATCH]);
        let (mut count, mut scatter) = (0, Vec::new());
        let mut next = Some(first);
        while let Some(transport) = next.take() {
            let Some(place) = sequence.next_location(qp, &self.state, &transport, &mut scatter) else {
                break;
            };
            (places[count], pieces[count]) = (place, transport.payload);
            count += 1;
            // The next READ response belongs to another WQE.
            let is_over = sequence.open.is_none() && sequence.operation == Operation::ReadResponse;
            if count < MAX_BATCH && !is_over {
                next = packets.next().and_then(|bytes| TransportPacket::parse(bytes).ok());
            }
        }
        match count {
            0 | 1 => 0,
            _ => ctx.memory.write_batch(&places[..count], &pieces[..count]),
        }
    }

    /// The sequence that starts with a packet, if the packet is the next of its queue pair.
    fn receive_sequence(
        &self,
        addressing: &AddressHeaders,
        header: &TransportHeader,
    ) -> Option<(&QueuePair, ReceiveSequence)> {
        let Bth { opcode, psn, destination_qp: destination, .. } = header.bth;
        let operation = opcode.operation();
        let qp = self.queue_pairs.get(destination.value())?;
        let is_its_own = qp.kind == QpType::Rc
            && self.state.port_state == PortState::Active
            && addressing.source == qp.addressing.destination
            && addressing.destination == qp.addressing.source;
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

    /// Like [`Hca::receive`], for a packet whose payload [`Hca::place_batch`] has placed.
    pub fn receive_placed(&mut self, ctx: &mut Context<'_>, addressing: &AddressHeaders, bytes: &[u8]) {
        self.state.payload_placed = true;
        self.receive(ctx, addressing, bytes);
        self.state.payload_placed = false;
    }
}
