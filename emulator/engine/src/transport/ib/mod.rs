//! The InfiniBand transport of a queue pair: attributes, state, requester and responder.

mod completer;
mod congestion;
mod duplicate;
mod flush;
mod pacing;
mod pending_responses;
mod planned_packet;
pub(crate) mod rate_control;
mod receive;
pub(crate) mod recovery;
mod request_error;
mod requester;
mod requester_state;
mod responder;
mod responder_state;

mod transmit;
mod unreliable;
mod window;

pub(crate) use requester_state::RequesterState;
pub use requester_state::completion_opcode;
pub(crate) use responder_state::ResponderState;

use crate::core::hca_state::HcaState;
use crate::transport::ib::rate_control::RateControl;
use crate::{
    ClientId, CqId, Event, Instant, PdId, Peer, QpAttributes, QpConfiguration, QpSnapshot, QpState, QpType,
    Reason, Recovery, SrqId, XrcdId,
};
use alloc::boxed::Box;
use softhca_wire::{AddressHeaders, Qpn};

/// Fields that every packet touches come first: with a thousand HCAs, the queue pairs exceed the caches.
#[repr(C)]
pub(crate) struct QueuePair {
    pub qpn: Qpn,
    pub kind: QpType,
    pub state: QpState,
    /// The queue pair is in the transmit queue.
    pub is_scheduled: bool,
    /// The transmit gate of its destination is closed.
    pub is_blocked: bool,
    /// PFC pauses its priority.
    pub is_paused: bool,
    /// Requester and responder alternate when both have packets.
    pub responses_last: bool,
    /// A window was bound through it.
    pub has_bound_windows: bool,
    pub sq_sig_all: bool,
    /// The addressing headers of a connected queue pair, computed when the path is set.
    pub addressing: AddressHeaders,
    pub requester: RequesterState,
    /// The valid entry in the timer heap; later entries are stale.
    pub timer_at: Option<Instant>,
    /// Present from the first CNP on.
    pub rate_control: Option<Box<dyn RateControl>>,
    /// The valid entry in the pacing heap.
    pub pacing_timer_at: Option<Instant>,
    /// The time of its last CNP.
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
            outstanding: self.requester.wqes.len() as u32,
            sq_draining: self.state == QpState::SendQueueDrained && !self.requester.is_drained,
        }
    }

    /// The recovery mode of this connection.
    pub fn recovery(&self, state: &HcaState) -> Recovery {
        state.recovery(self.addressing.destination)
    }

    /// Whether the queue pair is connected to one of the peer's.
    pub fn is_connected_to(&self, peer: Peer) -> bool {
        peer.contains(self.addressing.destination, self.attributes.dest_qpn)
    }

    /// The attributes so far.
    pub fn configuration(&self, state: &HcaState) -> QpConfiguration {
        let attributes = &self.attributes;
        let is_connected = !self.kind.is_datagram();
        let with_capacity =
            |cq: CqId| state.completion_queues.get(cq.0).map(|queue| (cq, queue.ring.slots()));
        QpConfiguration {
            qp_type: self.kind,
            recovery: self.recovery(state),
            peer: is_connected.then_some(self.addressing.destination),
            dest_qp: is_connected.then_some(attributes.dest_qpn),
            path_mtu: attributes.path_mtu,
            sq_psn: attributes.sq_psn,
            rq_psn: attributes.rq_psn,
            timeout: attributes.timeout,
            ack_timeout: self.ack_timeout(state),
            retry_cnt: attributes.retry_count,
            rnr_retry: attributes.rnr_retry,
            qp_access_flags: attributes.access_flags,
            max_rd_atomic: attributes.max_rd_atomic,
            max_dest_rd_atomic: attributes.max_dest_rd_atomic,
            max_send_wr: self.requester.ring.as_ref().map_or(0, |ring| ring.slots()),
            max_recv_wr: self.responder.ring.as_ref().map_or(0, |ring| ring.slots()),
            send_cq: self.send_cq.and_then(with_capacity),
            recv_cq: self.effective_recv_cq(state).and_then(with_capacity),
        }
    }

    /// Puts the queue pair into the transmit queue.
    #[inline]
    pub fn schedule_transmit(&mut self, hca: &mut HcaState) {
        if !self.is_scheduled {
            self.is_scheduled = true;
            hca.transmit_queue.push_back(self.qpn);
        }
    }

    /// Schedules the queue pair if its send queue has more requests.
    #[inline]
    pub fn schedule_requester(&mut self, hca: &mut HcaState) {
        let outbound = &self.requester;
        let waits = || outbound.ring.as_ref().is_some_and(|ring| !matches!(ring.has_pending(), Ok(false)));
        if outbound.wqe_index < outbound.wqes.len() || self.state == QpState::SendQueueDrained || waits() {
            self.schedule_transmit(hca);
        }
    }

    /// Arms the timer heap for the earliest deadline.
    #[inline]
    pub fn arm_timer(&mut self, hca: &mut HcaState) {
        let deadlines = [self.requester.ack_deadline, self.requester.rnr_wait_until];
        let Some(wanted) = deadlines.into_iter().flatten().min() else { return };
        if self.timer_at.is_none_or(|at| wanted < at) {
            self.timer_at = Some(wanted);
            hca.timers.push(wanted, self.qpn);
        }
    }

    pub fn change_state(&mut self, ctx: &mut crate::Context<'_>, to: QpState, reason: Reason) {
        let from = core::mem::replace(&mut self.state, to);
        if from != to {
            ctx.emit(Event::QpStateChanged { qp: self.qpn, from, to, reason });
        }
    }
}
