//! A queue pair: its attributes, its state and its two halves.

pub(crate) mod batch_copy;
mod completer;
mod duplicate;
mod flush;
mod pacing;
mod pending_responses;
mod planned_packet;
mod request_error;
mod requester;
mod requester_state;
mod responder;
mod responder_state;
mod transition;
mod transmit;
mod unreliable;

pub(crate) use requester_state::RequesterState;
pub(crate) use responder_state::ResponderState;
pub(crate) use transition::check_modify;
pub use transition::{Transition, transition};

use crate::hca_state::HcaState;
use crate::rate_control::RateControl;
use crate::{
    ClientId, CqId, Event, Instant, PdId, QpAttributes, QpConfiguration, QpSnapshot, QpState, QpType, Reason,
    SrqId, XrcdId,
};
use alloc::boxed::Box;
use softhca_wire::{AddressHeaders, Qpn};

/// What every packet touches stands together and first: with a thousand cards, queue pairs do not fit the caches.
#[repr(C)]
pub(crate) struct QueuePair {
    pub qpn: Qpn,
    pub kind: QpType,
    pub state: QpState,
    /// It stands in the ready list.
    pub is_scheduled: bool,
    /// It waits until the driver may send to its destination.
    pub is_blocked: bool,
    /// It waits until the port's priority goes on.
    pub is_paused: bool,
    /// Whose turn it is when both halves have something to send.
    pub responses_last: bool,
    pub sq_sig_all: bool,
    /// The envelope of a connected queue pair, made when the path is set.
    pub addressing: AddressHeaders,
    pub requester: RequesterState,
    /// The earliest entry in the timer heap that counts.
    pub timer_at: Option<Instant>,
    /// Its rate, from the first congestion notification on.
    pub rate_control: Option<Box<dyn RateControl>>,
    /// The entry in the pacers' heap that counts.
    pub pacing_timer_at: Option<Instant>,
    /// When it last owed a congestion notification.
    pub last_cnp_at: Option<Instant>,
    pub responder: ResponderState,
    pub attributes: QpAttributes,
    pub pd: Option<PdId>,
    pub client: ClientId,
    pub send_cq: Option<CqId>,
    pub recv_cq: Option<CqId>,
    pub srq: Option<SrqId>,
    pub xrcd: Option<XrcdId>,
}

impl QueuePair {
    pub fn view(&self) -> QpSnapshot {
        QpSnapshot {
            qpn: self.qpn,
            qp_type: self.kind,
            state: self.state,
            attributes: self.attributes,
            next_psn: self.requester.next_psn,
            expected_psn: self.responder.expected_psn,
            outstanding: self.requester.wqes.len(),
            sq_draining: self.state == QpState::SendQueueDrained && !self.requester.is_drained,
        }
    }

    /// What it was told so far.
    pub fn configuration(&self, card: &HcaState) -> QpConfiguration {
        let attributes = &self.attributes;
        let slots = |cq: CqId| card.completion_queues.get(cq.0).map(|queue| (cq, queue.ring.slots()));
        QpConfiguration {
            kind: self.kind,
            recovery: card.settings.recovery,
            peer: (!self.kind.is_datagram()).then_some((self.addressing.destination, attributes.dest_qpn)),
            pmtu: attributes.path_mtu,
            psns: [attributes.sq_psn, attributes.rq_psn],
            timeout: attributes.timeout,
            ack_timeout: self.ack_timeout(card),
            retry_count: attributes.retry_count,
            rnr_retry: attributes.rnr_retry,
            access_flags: attributes.access_flags,
            max_rd_atomic: [attributes.max_rd_atomic, attributes.max_dest_rd_atomic],
            max_wr: [
                self.requester.ring.as_ref().map_or(0, |ring| ring.slots()),
                self.responder.ring.as_ref().map_or(0, |ring| ring.slots()),
            ],
            cqs: [self.send_cq, self.effective_recv_cq(card)].map(|cq| cq.and_then(slots)),
        }
    }

    /// Puts the queue pair into the ready list, unless it stands there.
    #[inline]
    pub fn schedule_transmit(&mut self, card: &mut HcaState) {
        if !self.is_scheduled {
            self.is_scheduled = true;
            card.transmit_queue.push_back(self.qpn);
        }
    }

    /// Wakes the queue pair if its send queue has something left.
    #[inline]
    pub fn schedule_requester(&mut self, card: &mut HcaState) {
        let outbound = &self.requester;
        let waits = || outbound.ring.as_ref().is_some_and(|ring| !matches!(ring.has_pending(), Ok(false)));
        if outbound.wqe_index < outbound.wqes.len() || self.state == QpState::SendQueueDrained || waits() {
            self.schedule_transmit(card);
        }
    }

    /// Makes sure that the timer heap wakes the queue pair for its earliest deadline.
    #[inline]
    pub fn arm_timer(&mut self, card: &mut HcaState) {
        let deadlines = [self.requester.ack_deadline, self.requester.rnr_wait_until];
        let Some(wanted) = deadlines.into_iter().flatten().min() else { return };
        if self.timer_at.is_none_or(|at| wanted < at) {
            self.timer_at = Some(wanted);
            card.timers.push(wanted, self.qpn);
        }
    }

    pub fn change_state(&mut self, ctx: &mut crate::Context<'_>, to: QpState, reason: Reason) {
        let from = core::mem::replace(&mut self.state, to);
        if from != to {
            ctx.emit(Event::QpStateChanged { qp: self.qpn, from, to, reason });
        }
    }
}
