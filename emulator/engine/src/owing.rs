//! Packets without payload that the card itself owes a peer: congestion notifications, and the last words of queue pairs.
//! They go before everything else, and their queue pair need not be there any more.

use crate::card::Card;
use crate::congestion::priority;
use crate::inbound::Owed;
use crate::queue_pair::QueuePair;
use crate::{Context, Event, Gate, Hca, Packet, Run};
use core::net::IpAddr;
use softhca_wire::{Envelope, Header, ICRC_LEN, Opcode, Qpn};

/// A packet that waits to be sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owing {
    pub queue_pair: Qpn,
    pub envelope: Envelope,
    pub service_level: u8,
    pub header: Header,
    /// Bytes behind the headers, all zero.
    pub body: usize,
}

impl QueuePair {
    /// Leaves to the card what the queue pair owes for what it has received: its user has seen that it came, and may end
    /// the queue pair before the port may send. Whoever is to be answered with data is not answered any more.
    pub(crate) fn leave_last_words(&mut self, card: &mut Card, ctx: &mut Context<'_>) {
        while let Some(Owed::Acknowledge { .. }) = self.inbound.owed.front()
            && let Some(plan) = self.plan_reply(card, ctx)
        {
            self.inbound.owed.pop_front();
            card.owing.push_back(Owing {
                queue_pair: self.number,
                envelope: plan.envelope,
                service_level: plan.service_level,
                header: plan.header,
                body: 0,
            });
        }
        self.inbound.owed.clear();
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

    /// Nobody is there to be told anything.
    pub(crate) fn forget_owing(&mut self, destination: IpAddr) {
        self.card.owing.retain(|owing| owing.envelope.destination != destination);
        self.card.owing_held.retain(|owing| owing.envelope.destination != destination);
    }

    /// Builds the next of them.
    pub(crate) fn transmit_owing(
        &mut self,
        ctx: &mut Context<'_>,
        gate: &mut dyn Gate,
        buffer: &mut [u8],
    ) -> Option<Run> {
        while let Some(owing) = self.card.owing.pop_front() {
            let Owing { queue_pair, envelope, service_level, header, body } = owing;
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
            ctx.tell(Event::PacketSent { qp: queue_pair, packet, work: None, again: false });
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
