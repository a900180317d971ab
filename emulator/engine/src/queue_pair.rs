//! A queue pair: its attributes, its state and its two halves.

use crate::card::Card;
use crate::inbound::Inbound;
use crate::limiter::Limiter;
use crate::outbound::Outbound;
use crate::{
    Attributes, ClientId, CqId, Event, Instant, PdId, Profile, QpKind, QpView, Reason, SrqId, State, XrcdId,
};
use alloc::boxed::Box;
use softhca_wire::{Envelope, Qpn};

/// What every packet touches stands together and first: with a thousand cards, queue pairs do not fit the caches.
#[repr(C)]
pub(crate) struct QueuePair {
    pub number: Qpn,
    pub kind: QpKind,
    pub state: State,
    /// It stands in the ready list.
    pub is_ready: bool,
    /// It waits until the driver may send to its destination.
    pub is_parked: bool,
    /// It waits until the port's priority goes on.
    pub is_halted: bool,
    /// Whose turn it is when both halves have something to send.
    pub replies_last: bool,
    pub signal_all: bool,
    /// The envelope of a connected queue pair, made when the path is set.
    pub envelope: Envelope,
    pub outbound: Outbound,
    /// The earliest entry in the timer heap that counts.
    pub timer_at: Option<Instant>,
    /// Its rate, from the first congestion notification on.
    pub limiter: Option<Box<Limiter>>,
    /// The entry in the pacers' heap that counts.
    pub paced_at: Option<Instant>,
    /// When it last owed a congestion notification.
    pub notified_at: Option<Instant>,
    pub inbound: Inbound,
    pub attributes: Attributes,
    pub domain: Option<PdId>,
    pub client: ClientId,
    pub send_cq: Option<CqId>,
    pub receive_cq: Option<CqId>,
    pub shared_receive_queue: Option<SrqId>,
    pub xrc_domain: Option<XrcdId>,
}

impl QueuePair {
    pub fn view(&self) -> QpView {
        QpView {
            number: self.number,
            kind: self.kind,
            state: self.state,
            attributes: self.attributes,
            next_psn: self.outbound.next,
            expected_psn: self.inbound.expected,
            outstanding: self.outbound.works.len(),
            draining: self.state == State::SendQueueDrained && !self.outbound.drained,
        }
    }

    /// What it was told so far.
    pub fn profile(&self, card: &Card) -> Profile {
        let attributes = &self.attributes;
        let slots = |cq: CqId| card.completion_queues.get(cq.0).map(|queue| (cq, queue.ring.slots()));
        Profile {
            kind: self.kind,
            recovery: card.settings.recovery,
            peer: (!self.kind.is_datagram()).then_some((self.envelope.destination, attributes.destination)),
            mtu: attributes.mtu,
            psns: [attributes.send_psn, attributes.receive_psn],
            timeout: attributes.timeout,
            patience: self.patience(card),
            retry_count: attributes.retry_count,
            rnr_retry: attributes.rnr_retry,
            access: attributes.access,
            reads: [attributes.max_reads_out, attributes.max_reads_in],
            slots: [
                self.outbound.ring.as_ref().map_or(0, |ring| ring.slots()),
                self.inbound.ring.as_ref().map_or(0, |ring| ring.slots()),
            ],
            completion_queues: [self.send_cq, self.receive_completion_queue(card)]
                .map(|cq| cq.and_then(slots)),
        }
    }

    /// Puts the queue pair into the ready list, unless it stands there.
    #[inline]
    pub fn wake(&mut self, card: &mut Card) {
        if !self.is_ready {
            self.is_ready = true;
            card.ready.push_back(self.number);
        }
    }

    /// Wakes the queue pair if its send queue has something left.
    #[inline]
    pub fn wake_requester(&mut self, card: &mut Card) {
        let outbound = &self.outbound;
        let waits = || outbound.ring.as_ref().is_some_and(|ring| !matches!(ring.is_waiting(), Ok(false)));
        if outbound.cursor < outbound.works.len() || self.state == State::SendQueueDrained || waits() {
            self.wake(card);
        }
    }

    /// Makes sure that the timer heap wakes the queue pair for its earliest deadline.
    #[inline]
    pub fn schedule(&mut self, card: &mut Card) {
        let deadlines = [self.outbound.ack_deadline, self.outbound.rnr_until];
        let Some(wanted) = deadlines.into_iter().flatten().min() else { return };
        if self.timer_at.is_none_or(|at| wanted < at) {
            self.timer_at = Some(wanted);
            card.timers.push(wanted, self.number);
        }
    }

    pub fn change_state(&mut self, ctx: &mut crate::Context<'_>, to: State, reason: Reason) {
        let from = core::mem::replace(&mut self.state, to);
        if from != to {
            ctx.tell(Event::StateChanged { qp: self.number, from, to, reason });
        }
    }
}
