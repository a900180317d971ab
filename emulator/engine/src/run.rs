//! Packets out: what is sent next, and the runs that a driver sends at once.

use crate::ahead::ReadAhead;
use crate::card::Card;
use crate::congestion::priority;
use crate::queue_pair::QueuePair;
use crate::{Answers, Context, DropReason, Event, Packet, PayloadMode};
use core::net::IpAddr;
use softhca_wire::{Envelope, Header, ICRC_LEN, Qpn};

/// Says whether the driver may send to a destination now. A queue pair that may not is parked until
/// [`crate::Hca::unpark`].
pub trait Gate {
    /// How many packets of up to `size` bytes, IP headers excluded, may go in this envelope now; zero parks.
    fn packets(&mut self, envelope: &Envelope, size: usize) -> usize;
}

/// Lets everything through.
impl Gate for () {
    fn packets(&mut self, _: &Envelope, _: usize) -> usize {
        usize::MAX
    }
}

/// Packets of one destination and one size (the last may be shorter), one behind the other in the lent
/// buffer. Each ends with four bytes of room for its ICRC, which whoever knows the IP identification seals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where they go, and how they are marked.
    pub envelope: Envelope,
    /// Bytes of each packet.
    pub segment: usize,
    /// How many packets.
    pub count: usize,
    /// Bytes of all packets.
    pub bytes: usize,
    /// The queue pair that sends them.
    pub queue_pair: Qpn,
    /// The service level of its path: their priority where their DSCP is zero.
    pub service_level: u8,
    /// Bytes of payload and pad of each packet that are not in the buffer, if payloads are elided.
    pub elided: usize,
}

/// A packet that may be sent next.
pub(crate) struct Plan {
    pub header: Header,
    pub payload: u32,
    pub envelope: Envelope,
    pub service_level: u8,
    /// Where in its message the payload begins.
    pub offset: u64,
    pub reply: bool,
}

impl QueuePair {
    /// Fills `buffer` with packets of one size, and says whether the queue pair has more.
    pub(crate) fn fill_run(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        gate: &mut dyn Gate,
        buffer: &mut [u8],
        most: usize,
    ) -> Option<Run> {
        let mut run = Run {
            envelope: self.envelope,
            segment: 0,
            count: 0,
            bytes: 0,
            queue_pair: self.number,
            service_level: 0,
            elided: 0,
        };
        let elides = card.settings.payload == PayloadMode::Elided;
        let mut most = most;
        let mut replied = false;
        let is_far = ctx.memory.is_far();
        let mut ahead = ReadAhead::default();
        if is_far {
            self.take_ahead(card, ctx, most);
        }
        while let Some(plan) = self.plan(card, ctx) {
            let largest = Header::MAX_LEN + plan.payload as usize + 3 + ICRC_LEN;
            if run.count == 0 {
                (run.envelope, run.service_level) = (plan.envelope, plan.service_level);
                if card.paused != 0 && self.is_paused(card, &plan) {
                    return None;
                }
                most = most.min(gate.packets(&plan.envelope, largest));
                if most == 0 {
                    self.park(card, plan.envelope.destination);
                    return None;
                }
            }
            // Somebody waits for a lone answer, nobody for its acknowledgement.
            let goes_alone =
                run.count == 1 && plan.reply && !replied && card.ready.is_empty() && self.answers_ahead(card);
            if run.count == most || run.bytes + largest > buffer.len() || goes_alone {
                self.wake(card);
                break;
            }
            let at = run.bytes + plan.header.emit(&mut buffer[run.bytes..]);
            let (mut payload, mut pad) = (plan.payload as usize, usize::from(plan.header.bth.pad));
            if elides {
                // Packets without their payload cannot be told apart by their size: they go one by one.
                most = 1;
                run.elided = payload + pad;
                (payload, pad) = (0, 0);
            }
            let end = at + payload + pad + ICRC_LEN;
            let size = end - run.bytes;
            // The packets of a connected queue pair all go the same way.
            let elsewhere = match self.kind.is_datagram() {
                true => plan.envelope != run.envelope,
                false => plan.envelope.traffic_class != run.envelope.traffic_class,
            };
            if run.count > 0 && (size > run.segment || elsewhere) {
                self.wake(card);
                break;
            }
            let mut is_there = is_far && ahead.holds(&plan, at, payload);
            if is_far && !is_there {
                let read = self.read_ahead(card, ctx, &plan, (at, size), &mut buffer[at..], most - run.count);
                ahead = read.unwrap_or_default();
                is_there = ahead.holds(&plan, at, payload);
            }
            if !is_there && !self.fill(card, ctx, &plan, &mut buffer[at..at + payload]) {
                continue;
            }
            buffer[at + payload..end].fill(0);
            if plan.reply {
                replied = true;
                self.note_reply_sent(card, ctx, &plan);
            } else {
                self.note_request_sent(card, ctx, &plan);
            }
            if run.count == 0 {
                run.segment = size;
            }
            run.count += 1;
            run.bytes = end;
            if size < run.segment || run.count == most {
                self.wake_for_more(card, ctx);
                break;
            }
        }
        // Whoever found no room in this run is the first in the next. An acknowledgement, being short, mostly
        // finds room behind several requests, which saves the driver a send.
        self.replies_last = replied || self.inbound.owed.is_empty();
        (run.count > 0).then_some(run)
    }

    /// Whether an answer goes before its acknowledgement. To this card itself it would not get there sooner.
    fn answers_ahead(&self, card: &Card) -> bool {
        card.settings.answers == Answers::Ahead && self.envelope.destination != self.envelope.source
    }

    /// Wakes the queue pair if it has more to send: now, or when its rate lets it.
    fn wake_for_more(&mut self, card: &mut Card, ctx: &mut Context<'_>) {
        if !self.inbound.owed.is_empty() {
            self.wake(card);
        } else if self.may_go(card, ctx) {
            self.wake_requester(card);
        }
    }

    /// Whether the priority of a packet is stopped. If so, the queue pair waits until it goes on.
    fn is_paused(&mut self, card: &mut Card, plan: &Plan) -> bool {
        let priority = priority(&plan.envelope, plan.service_level);
        let is_paused = card.paused >> priority & 1 == 1;
        if is_paused && !self.is_halted {
            self.is_halted = true;
            card.halted[usize::from(priority)].push(self.number);
        }
        is_paused
    }

    /// Waits until the driver may send to `destination`.
    fn park(&mut self, card: &mut Card, destination: IpAddr) {
        if !self.is_parked {
            self.is_parked = true;
            card.parked.entry(destination).or_default().push(self.number);
        }
    }

    /// The next packet: replies and requests take turns, so that neither starves the other.
    fn plan(&mut self, card: &mut Card, ctx: &mut Context<'_>) -> Option<Plan> {
        if self.replies_last {
            self.plan_request(card, ctx).or_else(|| self.plan_reply(card, ctx))
        } else {
            self.plan_reply(card, ctx).or_else(|| self.plan_request(card, ctx))
        }
    }

    /// Fills in the payload; false if that was not possible and the packet is not sent.
    #[inline]
    fn fill(&mut self, card: &mut Card, ctx: &mut Context<'_>, plan: &Plan, into: &mut [u8]) -> bool {
        if into.is_empty() {
            return true;
        }
        if plan.reply {
            match self.fill_reply(card, ctx, plan, into) {
                Ok(()) => true,
                Err(why) => {
                    self.fail_reply(card, ctx, plan, why);
                    false
                }
            }
        } else {
            match self.fill_request(card, ctx, plan, into) {
                Ok(()) => true,
                Err(failure) => {
                    self.fail_local(card, ctx, failure);
                    false
                }
            }
        }
    }

    pub(crate) fn tell_sent(
        &self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        plan: &Plan,
        work: Option<u64>,
        again: bool,
    ) {
        card.counters.sent_pkts += 1;
        card.counters.sent_bytes += u64::from(plan.payload);
        let packet = Packet::of(&plan.header, plan.payload as usize, plan.envelope.destination);
        ctx.tell(Event::PacketSent { qp: self.number, packet, work, again });
    }

    pub(crate) fn tell_dropped(
        &self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        packet: Packet,
        reason: DropReason,
    ) {
        card.counters.rx_dropped += 1;
        ctx.tell(Event::PacketDropped { qp: self.number, packet: Some(packet), reason });
    }
}
