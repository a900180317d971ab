//! Payload that is moved for several packets at once, where every access to memory costs much by itself.
//!
//! Nothing is decided here: each packet is planned or checked, executed and told of in its own turn, and one whose
//! payload could not be moved ahead moves it then, so that a fault is found by the packet that it belongs to.

use crate::card::Card;
use crate::inbound::Owed;
use crate::memory::{MemoryId, Place};
use crate::outbound::Work;
use crate::queue_pair::QueuePair;
use crate::run::Plan;
use crate::{Context, Hca, Limits, PdId, PortState, QpKind};
use alloc::vec::Vec;
use core::mem::discriminant;
use softhca_queue::{Access, Operation as Request, Sge};
use softhca_wire::{
    Bth, Envelope, Header, ICRC_LEN, Opcode, Operation, PartitionKey, Position, Psn, Qpn, Syndrome, Trailer,
    Transport,
};

/// The most packets whose payload is moved at once.
const MOST: usize = 64;

const NOWHERE: Place = Place { memory: MemoryId(0), offset: 0, length: 0 };

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
#[derive(Clone, Copy)]
struct Stretch {
    memory: MemoryId,
    offset: u64,
    length: u64,
    /// Bytes of the message from there on, if that is known.
    rest: Option<u64>,
}

impl Stretch {
    /// The first `length` bytes, if there are as many.
    fn take(&mut self, length: usize) -> Option<Place> {
        let size = length as u64;
        self.length = self.length.checked_sub(size)?;
        let place = Place { memory: self.memory, offset: self.offset, length };
        self.offset += size;
        self.rest = self.rest.map(|rest| rest.saturating_sub(size));
        Some(place)
    }
}

impl Card {
    /// The bytes from `offset` on that are in one entry of a list.
    fn stretch(&self, domain: PdId, entries: &[Sge], mut offset: u64, needs: Access) -> Option<Stretch> {
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

impl QueuePair {
    /// Reads the payload of the planned packet of `size` bytes, which will be at `at`, and of those behind it into
    /// `into`, where each will be looked for: at most `packets`. Nothing is there if that does not pay, or not work.
    pub(crate) fn read_ahead(
        &self,
        card: &Card,
        ctx: &Context<'_>,
        plan: &Plan,
        (at, size): (usize, usize),
        into: &mut [u8],
        packets: usize,
    ) -> Option<ReadAhead> {
        let piece = plan.payload as usize;
        // Who is slowed down sends a packet now and then.
        if packets < 2 || piece == 0 || self.limiter.is_some() {
            return None;
        }
        let opcode = plan.header.bth.opcode;
        let stride = match opcode.position() {
            Position::Only => size,
            Position::Last => return None,
            Position::First | Position::Middle => {
                let (service, operation) = (opcode.service(), opcode.operation());
                let middle = Opcode::new(service, operation, Position::Middle, Trailer::None)?;
                piece + ICRC_LEN + middle.header_length()
            }
        };
        let most = packets.min(into.len().checked_sub(piece)? / stride + 1).min(MOST);
        let mut places = [NOWHERE; MOST];
        let count = match opcode.position() {
            Position::Only if plan.reply => 0,
            Position::Only => self.places_of_requests(card, piece, &mut places[..most]),
            _ => self.places_of_message(card, plan, piece, &mut places[..most]),
        };
        if count < 2 || !ctx.memory.read_run(&places[..count], into, stride) {
            return None;
        }
        let left = (count - 1) * piece + places[count - 1].length;
        Some(ReadAhead { reply: plan.reply, psn: plan.header.bth.psn, at, piece, stride, left })
    }

    /// Where the payload of the planned packet and of those behind it in its message is.
    fn places_of_message(&self, card: &Card, plan: &Plan, piece: usize, places: &mut [Place]) -> usize {
        let found = if plan.reply { self.replied(card, plan) } else { self.requested(card, plan) };
        let Some(mut stretch) = found else { return 0 };
        let mut count = 0;
        for place in places {
            let length = stretch.rest.unwrap_or(0).min(piece as u64) as usize;
            match stretch.take(length) {
                Some(next) if length > 0 => *place = next,
                _ => break,
            }
            count += 1;
        }
        count
    }

    /// Where the payload of the request that is being sent is and of those behind it, as far as each has one packet and
    /// they are all alike.
    fn places_of_requests(&self, card: &Card, piece: usize, places: &mut [Place]) -> usize {
        let mut works = self.outbound.works.iter().skip(self.outbound.cursor);
        let Some(first) = works.next() else { return 0 };
        let alike = |work: &&Work| {
            work.packets == 1
                && work.length as usize == piece
                && work.outcome.is_none()
                && !work.is_inline()
                && kind(work) == kind(first)
        };
        let mut count = 0;
        for (work, place) in core::iter::once(first).chain(works).take_while(alike).zip(places) {
            let stretch =
                self.domain.and_then(|domain| card.stretch(domain, &work.entries, 0, Access::empty()));
            let Some(next) = stretch.and_then(|mut stretch| stretch.take(piece)) else { break };
            *place = next;
            count += 1;
        }
        count
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

    /// Where the payload of the response with `psn` goes, and of those behind it, if it is the one that is due.
    fn answered(&self, card: &Card, psn: Psn) -> Option<Stretch> {
        let work = self.outbound.works.front()?;
        let is_due = self.state.takes_responses()
            && matches!(work.operation.0, Request::Read { .. })
            && work.outcome.is_none()
            && psn == self.outbound.unacked
            && psn.is_within(work.first, work.packets)
            && self.outbound.is_sent(psn);
        let domain = self.domain.filter(|_| is_due)?;
        let offset = u64::from(psn.since(work.first)) * u64::from(self.attributes.mtu.bytes());
        let stretch = card.stretch(domain, &work.entries, offset, Access::LOCAL_WRITE)?;
        Some(Stretch { rest: Some(u64::from(work.length) - offset), ..stretch })
    }

    /// Where the payload of the request with `psn` goes, and of those behind it, if it continues the open message.
    fn continued(&self, card: &Card, header: &Header) -> Option<Stretch> {
        let open = self.inbound.open.filter(|open| open.operation == header.bth.opcode.operation())?;
        if open.operation == Operation::Send {
            let buffer = self.inbound.buffer.as_ref()?;
            let domain = self.receive_domain(card)?;
            return card.stretch(domain, &buffer.scatter, open.placed, Access::LOCAL_WRITE);
        }
        let remote = open.remote?;
        let target = self.locate(card, header, remote, Access::REMOTE_WRITE).ok()?;
        let rest = u64::from(remote.length).checked_sub(open.placed)?;
        let offset = target.offset + open.placed;
        Some(Stretch { memory: target.memory, offset, length: rest, rest: Some(rest) })
    }

    /// Where the payload of a request goes that begins a message, when `before` receives will have been taken.
    fn begun(&self, card: &Card, header: &Header, before: u32, scatter: &mut Vec<Sge>) -> Option<Stretch> {
        if header.bth.opcode.operation() == Operation::Send {
            // What others may take too cannot be foreseen.
            let ring = self.inbound.ring.as_ref().filter(|_| self.shared_receive_queue.is_none())?;
            let is_there = self.inbound.buffer.is_none() && ring.peek(before, scatter);
            return card.stretch(self.domain.filter(|_| is_there)?, scatter, 0, Access::LOCAL_WRITE);
        }
        let remote = header.reth.filter(|remote| (1..=Limits::CARD.message).contains(&remote.length))?;
        let target = self.locate(card, header, remote, Access::REMOTE_WRITE).ok()?;
        let rest = u64::from(remote.length);
        Some(Stretch { memory: target.memory, offset: target.offset, length: rest, rest: Some(rest) })
    }
}

/// What requests have in common whose packets have headers of one length.
fn kind(work: &Work) -> impl PartialEq {
    let trailer = match work.operation.0 {
        Request::Send(trailer) => Some(discriminant(&trailer)),
        _ => None,
    };
    let is_immediate = matches!(work.operation.0, Request::Write { immediate: Some(_), .. });
    (discriminant(&work.operation.0), trailer, is_immediate)
}

/// How packets that arrived together go on.
struct Course {
    queue_pair: Qpn,
    expected: Psn,
    operation: Operation,
    /// What is open, once the first was looked at.
    open: Option<Stretch>,
    /// Receives that they take.
    receives: u32,
}

impl Course {
    /// Whether a packet is the next of these and will be accepted in its turn; where its payload goes then.
    fn follow(
        &mut self,
        qp: &QueuePair,
        card: &Card,
        transport: &Transport<'_>,
        scatter: &mut Vec<Sge>,
    ) -> Option<Place> {
        let Transport { header, payload, .. } = transport;
        let Bth { opcode, psn, destination, partition, .. } = header.bth;
        let (position, length) = (opcode.position(), payload.len());
        let is_response = self.operation == Operation::ReadResponse;
        let is_next = destination == self.queue_pair
            && psn == self.expected
            && opcode.operation() == self.operation
            && opcode.service() == qp.kind.service()
            && PartitionKey::DEFAULT.matches(partition)
            && header.aeth.is_none_or(|aeth| matches!(aeth.syndrome, Syndrome::Ack(_)));
        // At its end a message may do more than bring its payload.
        let is_plain = match opcode.trailer() {
            Trailer::None => true,
            Trailer::Immediate => self.operation == Operation::Send,
            _ => false,
        };
        if !is_next || !is_plain {
            return None;
        }
        let mut stretch = match self.open {
            Some(open) if is_response || !position.starts() => open,
            None if position.starts() && !is_response => qp.begun(card, header, self.receives, scatter)?,
            _ => return None,
        };
        let mtu = qp.attributes.mtu.bytes() as usize;
        let rest = stretch.rest.map(|rest| rest as usize);
        let fits = match position.ends() {
            true => (1..=mtu).contains(&length) && rest.is_none_or(|rest| rest == length),
            false => length == mtu && rest.is_none_or(|rest| rest > length),
        };
        let place = stretch.take(length).filter(|_| fits)?;
        self.receives += u32::from(position.ends() && self.operation == Operation::Send);
        self.expected = psn.plus(1);
        self.open = (!position.ends()).then_some(stretch);
        Some(place)
    }
}

impl Hca {
    /// Places the payload of packets that arrived together, with one access to memory, as far as they follow each other
    /// on one queue pair; returns how many of them, from the first. The caller then gives exactly these to
    /// [`Hca::receive_placed`], before it does anything else with the card.
    pub fn place_ahead(
        &mut self,
        ctx: &mut Context<'_>,
        envelope: &Envelope,
        packets: &mut dyn Iterator<Item = &[u8]>,
    ) -> usize {
        let first = packets.next().and_then(|bytes| Transport::parse(bytes).ok());
        let Some(first) = first else { return 0 };
        let Some((qp, mut course)) = self.course(envelope, &first.header) else { return 0 };
        let (mut places, mut pieces) = ([NOWHERE; MOST], [&[][..]; MOST]);
        let (mut count, mut scatter) = (0, Vec::new());
        let mut next = Some(first);
        while let Some(transport) = next.take() {
            let Some(place) = course.follow(qp, &self.card, &transport, &mut scatter) else { break };
            (places[count], pieces[count]) = (place, transport.payload);
            count += 1;
            // Of reads, the next is another work request's.
            let is_over = course.open.is_none() && course.operation == Operation::ReadResponse;
            if count < MOST && !is_over {
                next = packets.next().and_then(|bytes| Transport::parse(bytes).ok());
            }
        }
        match count {
            0 | 1 => 0,
            _ => ctx.memory.write_run(&places[..count], &pieces[..count]),
        }
    }

    /// What follows from a packet that is the next of its queue pair, and may be the first of several.
    fn course(&self, envelope: &Envelope, header: &Header) -> Option<(&QueuePair, Course)> {
        let Bth { opcode, psn, destination, .. } = header.bth;
        let operation = opcode.operation();
        let qp = self.queue_pairs.get(destination.value())?;
        let is_its_own = qp.kind == QpKind::Rc
            && self.card.port == PortState::Active
            && envelope.source == qp.envelope.destination
            && envelope.destination == qp.envelope.source;
        let open = match operation {
            _ if !is_its_own => return None,
            Operation::ReadResponse => Some(qp.answered(&self.card, psn)?),
            Operation::Send | Operation::Write => {
                if !qp.state.receives() || qp.inbound.refused || psn != qp.inbound.expected {
                    return None;
                }
                match qp.inbound.open {
                    Some(_) => Some(qp.continued(&self.card, header)?),
                    None => None,
                }
            }
            _ => return None,
        };
        Some((qp, Course { queue_pair: destination, expected: psn, operation, open, receives: 0 }))
    }

    /// As [`Hca::receive`], for a packet whose payload [`Hca::place_ahead`] placed.
    pub fn receive_placed(&mut self, ctx: &mut Context<'_>, envelope: &Envelope, bytes: &[u8]) {
        self.card.is_placed = true;
        self.receive(ctx, envelope, bytes);
        self.card.is_placed = false;
    }
}
