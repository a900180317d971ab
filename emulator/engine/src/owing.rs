//! Packets without payload that the card itself owes a peer: congestion notifications, and the last words of queue pairs.
//! They go before everything else, and their queue pair need not be there any more.

use crate::card::Card;
use crate::congestion::priority;
use crate::inbound::Owed;
use crate::queue_pair::QueuePair;
use crate::{Context, DropReason, Event, Gate, Hca, Packet, Run};
use core::net::IpAddr;
use softhca_wire::{Envelope, Header, ICRC_LEN, Opcode, Qpn};

/// Packets that may wait: a port that never lets them go must not fill the memory.
const MOST: usize = 4096;

/// A packet that waits to be sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owing {
    pub queue_pair: Qpn,
    pub envelope: Envelope,
    pub service_level: u8,
    pub header: Header,
    /// Bytes behind the headers, all zero.
    pub body: usize,
    /// The answer to a duplicate.
    pub again: bool,
}

impl Card {
    /// Sends a packet as soon as it may.
    pub fn owe(&mut self, ctx: &mut Context<'_>, owing: Owing) {
        if self.owing.len() + self.owing_held.len() < MOST {
            return self.owing.push_back(owing);
        }
        let packet = Some(Packet::of(&owing.header, 0, owing.envelope.destination));
        let reason = DropReason::TooManyRepliesOwed;
        ctx.tell(Event::PacketDropped { qp: owing.queue_pair, packet, reason });
    }

    /// Drops what is owed and `is_void`.
    fn forget_owing(&mut self, is_void: impl Fn(&Owing) -> bool) {
        self.owing.retain(|owing| !is_void(owing));
        self.owing_held.retain(|owing| !is_void(owing));
    }
}

impl QueuePair {
    /// Leaves to the card what the queue pair owes for what it has received: its user has seen that it came, and may end
    /// the queue pair before the port may send. From the first READ on nobody is answered any more.
    pub(crate) fn leave_last_words(&mut self, card: &mut Card, ctx: &mut Context<'_>) {
        while let Some(Owed::Acknowledge { .. } | Owed::Atomic { .. }) = self.inbound.owed.front()
            && let Some(plan) = self.plan_reply(card, ctx)
        {
            let again = matches!(self.inbound.owed.pop_front(), Some(Owed::Atomic { again: true, .. }));
            let (queue_pair, service_level) = (self.number, plan.service_level);
            let (envelope, header) = (plan.envelope, plan.header);
            card.owe(ctx, Owing { queue_pair, envelope, service_level, header, body: 0, again });
        }
        self.inbound.owed.clear();
    }

    /// A new connection begins: its peer must not take the last words of an earlier one for its own.
    pub(crate) fn forget_last_words(&self, card: &mut Card) {
        let (port, peer) = (self.envelope.destination, self.attributes.destination);
        card.forget_owing(|owing| owing.envelope.destination == port && owing.header.bth.destination == peer);
    }
}

impl Hca {
    /// Whether somebody waits for something that could not be sent yet, and that nothing but the card itself would send.
    pub fn has_last_words(&self) -> bool {
        !self.card.owing.is_empty() || !self.card.owing_held.is_empty() || !self.cm.outbox.is_empty()
    }

    /// What had to wait may be tried again.
    pub(crate) fn release_owing(&mut self) {
        let waiting = core::mem::take(&mut self.card.owing_held);
        self.card.owing.extend(waiting);
    }

    /// Nobody is there who waits for it: the port is dead, or has begun a new life.
    pub fn forget_last_words(&mut self, destination: IpAddr) {
        self.card.forget_owing(|owing| owing.envelope.destination == destination);
    }

    /// Builds the next of them.
    pub(crate) fn transmit_owing(
        &mut self,
        ctx: &mut Context<'_>,
        gate: &mut dyn Gate,
        buffer: &mut [u8],
    ) -> Option<Run> {
        while let Some(owing) = self.card.owing.pop_front() {
            let Owing { queue_pair, envelope, service_level, header, body, again } = owing;
            let paused = self.card.paused >> priority(&envelope, service_level) & 1 == 1;
            if paused || gate.packets(&envelope, header.bth.opcode.header_length() + body + ICRC_LEN) == 0 {
                self.card.owing_held.push(owing);
                continue;
            }
            let at = header.emit(buffer);
            let bytes = at + body + ICRC_LEN;
            buffer[at..bytes].fill(0);
            self.card.counters.np_cnp_sent += u64::from(header.bth.opcode == Opcode::CNP);
            self.card.counters.sent_pkts += 1;
            let packet = Packet::of(&header, 0, envelope.destination);
            ctx.tell(Event::PacketSent { qp: queue_pair, packet, work: None, again });
            return Some(Run {
                envelope,
                segment: bytes,
                count: 1,
                bytes,
                queue_pair,
                service_level,
                elided: 0,
            });
        }
        None
    }
}
