//! Duplicate requests: answered, not executed again.

use crate::card::Card;
use crate::inbound::Owed;
use crate::queue_pair::QueuePair;
use crate::responder::MAX_OWED;
use crate::{Context, DropReason, Event, Packet, PdId};
use softhca_queue::Access;
use softhca_wire::{Operation, Psn, Reth, Syndrome, Transport};

impl QueuePair {
    /// Answers a request that was executed before, without executing it again (IBA 9.7.5.1.5).
    pub(crate) fn on_duplicate(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        transport: &Transport<'_>,
        packet: Packet,
    ) {
        card.counters.duplicate_request += 1;
        let header = &transport.header;
        let psn = packet.psn;
        if self.inbound.owed.len() >= MAX_OWED {
            return self.tell_dropped(card, ctx, packet, DropReason::TooManyRepliesOwed);
        }
        match packet.opcode.operation() {
            Operation::Send | Operation::Write => {
                if !header.bth.ack_request {
                    return self.tell_dropped(card, ctx, packet, DropReason::DuplicateOfNoInterest);
                }
                let latest = self.inbound.expected.minus(1);
                self.owe_acknowledge(card, latest, Syndrome::ACK);
            }
            Operation::ReadRequest => {
                let remote = header.reth.expect("a READ request has a RETH");
                let packets = self.attributes.mtu.packets(remote.length);
                let known = packets <= self.inbound.expected.since(psn);
                let allowed =
                    remote.length == 0 || self.locate(card, header, remote, Access::REMOTE_READ).is_ok();
                let (true, true, Ok(domain)) = (known, allowed, self.access_domain(card, header)) else {
                    return self.tell_dropped(card, ctx, packet, DropReason::DuplicateOfNoInterest);
                };
                self.answer_again(psn, packets, remote, domain);
            }
            _ => {
                let found = self.inbound.atomics.iter().find(|(kept, _)| *kept == psn);
                let Some((_, original)) = found.copied() else {
                    return self.tell_dropped(card, ctx, packet, DropReason::DuplicateWithoutRecord);
                };
                let msn = self.inbound.msn;
                self.inbound.owed.push_back(Owed::Atomic { psn, original, msn, again: true });
            }
        }
        ctx.tell(Event::DuplicateAnswered { qp: self.number, psn, opcode: packet.opcode });
        self.wake(card);
    }

    /// Owes the responses from `psn` on again: by going back in those that are being sent, or anew.
    fn answer_again(&mut self, psn: Psn, count: u32, asked: Reth, domain: PdId) {
        for owed in &mut self.inbound.owed {
            if let Owed::Read { first, next, packets, remote, .. } = owed
                && psn.is_within(*first, *packets)
            {
                // The answer to a request begins with a FIRST or ONLY packet, whatever was sent before.
                if psn.is_before(*next) {
                    (*first, *next, *packets, *remote) = (psn, psn, count, asked);
                }
                return;
            }
        }
        let msn = self.inbound.msn;
        let (first, next, packets, remote) = (psn, psn, count, asked);
        self.inbound.owed.push_back(Owed::Read { first, next, packets, remote, domain, msn, again: true });
    }
}
