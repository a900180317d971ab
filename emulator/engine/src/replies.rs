//! Replies that are owed, turned into packets in the order of the requests.

use crate::card::Card;
use crate::congestion::mark_capable;
use crate::inbound::Owed;
use crate::queue_pair::QueuePair;
use crate::run::Plan;
use crate::{Context, EndToEndCredits, Refusal};
use softhca_queue::Access;
use softhca_wire::{
    Aeth, AtomicAckEth, Bth, Credits, Header, Opcode, Operation, Position, Syndrome, Trailer,
};

impl QueuePair {
    /// The next reply, if one is owed.
    pub(crate) fn plan_reply(&mut self, card: &mut Card, ctx: &mut Context<'_>) -> Option<Plan> {
        let carries = matches!(self.inbound.owed.front()?, Owed::Read { .. });
        if carries && !self.may_go(card, ctx) {
            return None;
        }
        let owed = self.inbound.owed.front()?;
        let service = self.kind.service();
        let header = |operation, position, psn| {
            let opcode = Opcode::new(service, operation, position, Trailer::None);
            let opcode = opcode.expect("a reliable service has every reply");
            Header::new(Bth::new(opcode, self.attributes.destination, psn))
        };
        let (header, payload, offset) = match *owed {
            Owed::Acknowledge { psn, syndrome, msn } => {
                let mut header = header(Operation::Acknowledge, Position::Only, psn);
                header.aeth = Some(Aeth { syndrome, msn });
                (header, 0, 0)
            }
            Owed::Atomic { psn, original, msn, .. } => {
                let mut header = header(Operation::AtomicAcknowledge, Position::Only, psn);
                header.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn });
                header.atomic_ack = Some(AtomicAckEth(original));
                (header, 0, 0)
            }
            Owed::Read { first, next, packets, remote, msn, .. } => {
                let index = next.since(first);
                let position = Position::of(index, packets);
                let mtu = self.attributes.mtu.bytes();
                let offset = u64::from(index) * u64::from(mtu);
                let payload = (u64::from(remote.length) - offset).min(u64::from(mtu)) as u32;
                let mut header = header(Operation::ReadResponse, position, next);
                header.bth.pad = (payload.wrapping_neg() & 3) as u8;
                if position != Position::Middle {
                    header.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn });
                }
                (header, payload, offset)
            }
        };
        let mut header = header;
        if let Some(Aeth { syndrome: Syndrome::Ack(code), .. }) = &mut header.aeth {
            *code = self.credits(card);
        }
        let mut envelope = self.envelope;
        if payload > 0 {
            mark_capable(card, &mut envelope);
        }
        let service_level = self.attributes.path.service_level;
        Some(Plan { header, payload, envelope, service_level, offset, reply: true })
    }

    /// What acknowledgements say of the receives that are posted. A shared queue's are nobody's.
    fn credits(&self, card: &Card) -> u8 {
        match (card.settings.credits, &self.inbound.ring) {
            (EndToEndCredits::On, Some(ring)) => ring.waiting().map_or(Credits::UNUSED, Credits::encode),
            _ => Credits::UNUSED,
        }
    }

    /// Reads the payload of the planned reply into `into`.
    #[inline]
    pub(crate) fn fill_reply(
        &self,
        card: &Card,
        ctx: &Context<'_>,
        plan: &Plan,
        into: &mut [u8],
    ) -> Result<(), Refusal> {
        let Some(Owed::Read { remote, domain, .. }) = self.inbound.owed.front() else { return Ok(()) };
        let address = remote.address.wrapping_add(plan.offset);
        let length = into.len() as u32;
        let target = card
            .protection
            .remote(*domain, self.number, remote.key, address, length, Access::REMOTE_READ)
            .map_err(Refusal::ReadFailed)?;
        ctx.memory
            .read(target.memory, target.offset, into)
            .map_err(|fault| Refusal::ReadFailed(target.unreachable(fault)))
    }

    /// The planned reply left.
    pub(crate) fn note_reply_sent(&mut self, card: &mut Card, ctx: &mut Context<'_>, plan: &Plan) {
        let again = match self.inbound.owed.front_mut() {
            Some(Owed::Read { first, next, packets, again, .. }) => {
                *next = next.plus(1);
                let again = *again;
                if next.since(*first) == *packets {
                    self.inbound.owed.pop_front();
                }
                again
            }
            Some(Owed::Atomic { again, .. }) => {
                let again = *again;
                self.inbound.owed.pop_front();
                again
            }
            _ => {
                self.inbound.owed.pop_front();
                false
            }
        };
        self.note_pace(card, ctx, plan);
        self.tell_sent(card, ctx, plan, None, again);
    }

    /// The planned reply cannot be made: the region went, or its memory.
    pub(crate) fn fail_reply(&mut self, card: &mut Card, ctx: &mut Context<'_>, plan: &Plan, why: Refusal) {
        self.inbound.owed.clear();
        self.refuse(card, ctx, plan.header.bth.psn, why);
    }
}
