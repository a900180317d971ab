//! Payload that is moved for several packets at once, where every access to memory costs much by itself.
//!
//! Nothing is decided here: each packet is planned or checked, executed and told of in its own turn, and one whose
//! payload could not be moved ahead moves it then, so that a fault is found by the packet that it belongs to.

use crate::card::Card;
use crate::hca::Plan;
use crate::inbound::Owed;
use crate::memory::MemoryId;
use crate::queue_pair::QueuePair;
use crate::{Context, Hca, PortState, QpKind};
use softhca_queue::{Access, Operation as Request};
use softhca_wire::{
    Bth, Envelope, ICRC_LEN, Opcode, Operation, PartitionKey, Position, Psn, Syndrome, Trailer, Transport,
};

/// The most packets whose payload is placed at once.
const MOST: usize = 64;

/// Payload that stands in the buffer of a run although its packets are still to be planned.
#[derive(Default)]
pub(crate) struct ReadAhead {
    reply: bool,
    /// The packet that carries the next of it, and where in the buffer that is.
    psn: Psn,
    at: usize,
    /// Bytes of each packet but the last, and from one to the next.
    piece: usize,
    stride: usize,
    left: usize,
}

impl ReadAhead {
    /// Whether the payload of the planned packet stands at `at` already.
    #[inline]
    pub fn holds(&mut self, plan: &Plan, at: usize, payload: usize) -> bool {
        if self.left == 0 {
            return false;
        }
        let is_next = (plan.reply, plan.header.bth.psn, at) == (self.reply, self.psn, self.at)
            && payload == self.left.min(self.piece);
        self.psn = self.psn.plus(1);
        self.at += self.stride;
        self.left = if is_next { self.left - payload } else { 0 };
        is_next
    }
}

/// Bytes of one message that stand behind each other in memory.
struct Stretch {
    memory: MemoryId,
    offset: u64,
    length: u64,
    /// Bytes of the message from there on, if that is known.
    rest: Option<u64>,
}

impl QueuePair {
    /// Reads the payload of the planned packet and of those behind it into `into`, where each will be looked for: at most
    /// `packets`. Nothing is there if that does not pay, or does not work.
    pub(crate) fn read_ahead(
        &self,
        card: &Card,
        ctx: &Context<'_>,
        plan: &Plan,
        at: usize,
        into: &mut [u8],
        packets: usize,
    ) -> Option<ReadAhead> {
        let piece = plan.payload as usize;
        let opcode = plan.header.bth.opcode;
        // Who is slowed down sends a packet now and then.
        if packets < 2 || opcode.position().ends() || self.limiter.is_some() {
            return None;
        }
        let middle = Opcode::new(opcode.service(), opcode.operation(), Position::Middle, Trailer::None)?;
        let stride = piece + ICRC_LEN + middle.header_length();
        let packets = packets.min(into.len().checked_sub(piece)? / stride + 1).min(MOST);
        let stretch = if plan.reply { self.replied(card, plan)? } else { self.requested(card, plan)? };
        let wanted = stretch.length.min((packets * piece) as u64) as usize;
        // What is not the end of the message ends with a packet.
        let length = if stretch.rest == Some(wanted as u64) { wanted } else { wanted - wanted % piece };
        if length <= piece
            || !ctx.memory.read_run(stretch.memory, stretch.offset, length, into, piece, stride)
        {
            return None;
        }
        let (psn, left) = (plan.header.bth.psn, length);
        Some(ReadAhead { reply: plan.reply, psn, at, piece, stride, left })
    }

    /// What the request that is being sent has from the planned packet on.
    fn requested(&self, card: &Card, plan: &Plan) -> Option<Stretch> {
        let work = &self.outbound.works[self.outbound.cursor];
        if work.is_inline() {
            return None;
        }
        let stretch = card.stretch(self.domain?, &work.entries, plan.offset, Access::empty())?;
        Some(Stretch { rest: Some(u64::from(work.length) - plan.offset), ..stretch })
    }

    /// What the read that is being answered has from the planned packet on.
    fn replied(&self, card: &Card, plan: &Plan) -> Option<Stretch> {
        let Some(Owed::Read { remote, domain, .. }) = self.inbound.owed.front() else { return None };
        let (address, rest) = (remote.address.wrapping_add(plan.offset), remote.length - plan.offset as u32);
        let target = card
            .protection
            .remote(*domain, self.number, remote.key, address, rest, Access::REMOTE_READ)
            .ok()?;
        let rest = u64::from(rest);
        Some(Stretch { memory: target.memory, offset: target.offset, length: rest, rest: Some(rest) })
    }

    /// Where the payload of a packet goes that continues what is being received, and of those behind it.
    fn awaited(&self, card: &Card, transport: &Transport<'_>) -> Option<Stretch> {
        let bth = &transport.header.bth;
        let operation = bth.opcode.operation();
        if operation == Operation::ReadResponse {
            let work = self.outbound.works.front()?;
            let is_next = self.state.takes_responses()
                && matches!(work.operation.0, Request::Read { .. })
                && work.outcome.is_none()
                && bth.psn == self.outbound.unacked
                && bth.psn.is_within(work.first, work.packets)
                && self.outbound.is_sent(bth.psn);
            let offset = u64::from(bth.psn.since(work.first)) * u64::from(self.attributes.mtu.bytes());
            let stretch =
                card.stretch(self.domain.filter(|_| is_next)?, &work.entries, offset, Access::LOCAL_WRITE)?;
            return Some(Stretch { rest: Some(u64::from(work.length) - offset), ..stretch });
        }
        let open = self.inbound.open.filter(|open| open.operation == operation)?;
        if !self.state.receives() || self.inbound.refused || bth.psn != self.inbound.expected {
            return None;
        }
        if operation == Operation::Send {
            let buffer = self.inbound.buffer.as_ref()?;
            return card.stretch(
                self.receive_domain(card)?,
                &buffer.scatter,
                open.placed,
                Access::LOCAL_WRITE,
            );
        }
        let remote = open.remote?;
        let target = self.locate(card, &transport.header, remote, Access::REMOTE_WRITE).ok()?;
        let rest = u64::from(remote.length).checked_sub(open.placed)?;
        Some(Stretch {
            memory: target.memory,
            offset: target.offset + open.placed,
            length: rest,
            rest: Some(rest),
        })
    }
}

impl Card {
    /// The bytes from `offset` on that are in one entry of a list.
    fn stretch(
        &self,
        domain: crate::PdId,
        entries: &[softhca_queue::Sge],
        mut offset: u64,
        needs: Access,
    ) -> Option<Stretch> {
        for entry in entries {
            let size = u64::from(entry.length);
            if offset >= size {
                offset -= size;
                continue;
            }
            let (skip, length) = (offset as u32, entry.length - offset as u32);
            let located = self.protection.local(domain, entry, skip, length, needs).ok()?;
            let length = u64::from(length);
            return Some(Stretch { memory: located.memory, offset: located.offset, length, rest: None });
        }
        None
    }
}

impl Hca {
    /// Places the payload of packets that arrived together, with one access to memory, as far as they continue one
    /// message; returns how many of them, from the first. The caller then gives exactly these to
    /// [`Hca::receive_placed`], before it does anything else with the card.
    pub fn place_ahead(
        &mut self,
        ctx: &mut Context<'_>,
        envelope: &Envelope,
        packets: &mut dyn Iterator<Item = &[u8]>,
    ) -> usize {
        let Some((qp, first)) = self.continued(envelope, packets.next()) else { return 0 };
        let Some(stretch) = qp.awaited(&self.card, &first) else { return 0 };
        let mtu = qp.attributes.mtu.bytes() as usize;
        let Bth { opcode, destination, mut psn, .. } = first.header.bth;
        let (operation, service) = (opcode.operation(), opcode.service());
        let (mut rest, mut room) = (stretch.rest, stretch.length);
        let mut pieces: [&[u8]; MOST] = [&[]; MOST];
        let mut count = 0;
        let mut next = Some(first);
        while let Some(Transport { header, payload, .. }) = next.take() {
            let Bth { opcode, .. } = header.bth;
            let position = opcode.position();
            let length = payload.len() as u64;
            let is_next = header.bth.destination == destination
                && header.bth.psn == psn
                && PartitionKey::DEFAULT.matches(header.bth.partition)
                && (opcode.service(), opcode.operation(), opcode.trailer())
                    == (service, operation, Trailer::None)
                && (!position.starts() || (count == 0 && operation == Operation::ReadResponse))
                && header.aeth.is_none_or(|aeth| matches!(aeth.syndrome, Syndrome::Ack(_)));
            let fits = match position.ends() {
                true => (1..=mtu).contains(&payload.len()) && rest.is_none_or(|rest| rest == length),
                false => payload.len() == mtu && rest.is_none_or(|rest| rest > length),
            };
            if !is_next || !fits || length > room {
                break;
            }
            pieces[count] = payload;
            count += 1;
            (psn, room) = (psn.plus(1), room - length);
            rest = rest.map(|rest| rest - length);
            if position.ends() || count == MOST {
                break;
            }
            next = packets.next().and_then(|bytes| Transport::parse(bytes).ok());
        }
        match count {
            0 | 1 => 0,
            _ => ctx.memory.write_run(stretch.memory, stretch.offset, &pieces[..count]),
        }
    }

    /// The queue pair that a packet belongs to and its parts, if it may be one of several with parts of one message.
    fn continued<'p>(
        &self,
        envelope: &Envelope,
        packet: Option<&'p [u8]>,
    ) -> Option<(&QueuePair, Transport<'p>)> {
        let bth = Bth::parse(packet?).ok()?;
        let operation = bth.opcode.operation();
        let carries = matches!(operation, Operation::Send | Operation::Write | Operation::ReadResponse);
        if !carries || bth.opcode.position().ends() || self.card.port == PortState::Down {
            return None;
        }
        let qp = self.queue_pairs.get(bth.destination.value())?;
        let is_its_own = qp.kind == QpKind::Rc
            && bth.opcode.service() == qp.kind.service()
            && envelope.source == qp.envelope.destination
            && envelope.destination == qp.envelope.source;
        Some((qp, Transport::parse(packet?).ok().filter(|_| is_its_own)?))
    }

    /// As [`Hca::receive`], for a packet whose payload [`Hca::place_ahead`] placed.
    pub fn receive_placed(&mut self, ctx: &mut Context<'_>, envelope: &Envelope, bytes: &[u8]) {
        self.card.is_placed = true;
        self.receive(ctx, envelope, bytes);
        self.card.is_placed = false;
    }
}
