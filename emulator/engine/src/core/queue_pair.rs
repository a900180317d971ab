//! A queue pair: its attributes and state, and the halves that its transport adds.

use crate::core::control::QpRings;
use crate::core::event::{Event, QpConfiguration};
use crate::core::hca_state::HcaState;
use crate::core::packet_batch::Peer;
use crate::core::reason::Reason;
use crate::core::time::Instant;
use crate::core::transport::Transport;
use core::net::{IpAddr, Ipv4Addr};
use softhca_types::{ClientId, CqId, PdId, QpAttributes, QpInitAttributes, QpState, QpType, SrqId, XrcdId};
use softhca_wire::{AddressHeaders, Mtu, Psn, Qpn};

/// Fields that every packet touches come first: with a thousand HCAs, the queue pairs exceed the caches.
#[repr(C)]
pub(crate) struct QueuePair<T: Transport> {
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
    /// The slot of the process that it is connected to, if that is on the same host and receives packets in memory.
    pub host_slot: Option<u16>,
    /// The addressing headers of a connected queue pair, computed when the path is set.
    pub addressing: AddressHeaders,
    pub requester: T::Requester,
    /// The valid entry in the timer heap; later entries are stale.
    pub timer_at: Option<Instant>,
    /// The valid entry in the pacing heap.
    pub pacing_timer_at: Option<Instant>,
    pub responder: T::Responder,
    pub attributes: QpAttributes,
    pub pd: Option<PdId>,
    pub client: ClientId,
    pub send_cq: Option<CqId>,
    pub recv_cq: Option<CqId>,
    pub srq: Option<SrqId>,
    pub xrcd: Option<XrcdId>,
}

impl<T: Transport> QueuePair<T> {
    pub fn new(client: ClientId, qpn: Qpn, init: &QpInitAttributes, rings: QpRings, mtu: Mtu) -> Self {
        let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let (requester, responder) = T::create(rings);
        QueuePair {
            qpn,
            client,
            kind: init.qp_type,
            pd: init.pd,
            send_cq: init.send_cq,
            recv_cq: init.recv_cq,
            srq: init.srq,
            xrcd: init.xrcd,
            sq_sig_all: init.sq_sig_all,
            host_slot: None,
            state: QpState::Reset,
            attributes: QpAttributes::reset(mtu),
            addressing: AddressHeaders::between(nowhere, nowhere),
            requester,
            responder,
            is_scheduled: false,
            is_blocked: false,
            timer_at: None,
            is_paused: false,
            pacing_timer_at: None,
            responses_last: true,
            has_bound_windows: false,
        }
    }

    /// Whether the queue pair is connected to one of the peer's.
    pub fn is_connected_to(&self, peer: Peer) -> bool {
        peer.contains(self.addressing.destination, self.attributes.dest_qpn)
    }

    /// The completion queue of receives; for XRC, the one of the shared receive queue.
    pub fn effective_recv_cq(&self, hca: &HcaState) -> Option<CqId> {
        match (self.kind, self.srq) {
            (QpType::XrcTarget, Some(number)) => {
                hca.objects.shared_receive_queues.get(number.0)?.xrc.map(|(cq, _)| cq)
            }
            _ => self.recv_cq,
        }
    }

    /// The attributes so far.
    pub fn configuration(&self, state: &HcaState) -> QpConfiguration {
        let attributes = &self.attributes;
        let is_connected = !self.kind.is_datagram();
        let with_capacity =
            |cq: CqId| state.objects.completion_queues.get(cq.0).map(|queue| (cq, queue.ring.slots()));
        let [max_send_wr, max_recv_wr] = T::ring_slots(self);
        QpConfiguration {
            qp_type: self.kind,
            recovery: state.recovery(self.addressing.destination),
            peer: is_connected.then_some(self.addressing.destination),
            dest_qp: is_connected.then_some(attributes.dest_qpn),
            path_mtu: attributes.path_mtu,
            sq_psn: attributes.sq_psn,
            rq_psn: attributes.rq_psn,
            timeout: attributes.timeout,
            ack_timeout: T::ack_timeout(self, state),
            retry_cnt: attributes.retry_count,
            rnr_retry: attributes.rnr_retry,
            qp_access_flags: attributes.access_flags,
            max_rd_atomic: attributes.max_rd_atomic,
            max_dest_rd_atomic: attributes.max_dest_rd_atomic,
            max_send_wr,
            max_recv_wr,
            send_cq: self.send_cq.and_then(with_capacity),
            recv_cq: self.effective_recv_cq(state).and_then(with_capacity),
        }
    }

    /// Puts the queue pair into the transmit queue.
    #[inline]
    pub fn schedule_transmit(&mut self, hca: &mut HcaState) {
        if !self.is_scheduled {
            self.is_scheduled = true;
            hca.egress.queue.push_back(self.qpn);
        }
    }

    pub fn change_state(&mut self, ctx: &mut crate::core::context::Context<'_>, to: QpState, reason: Reason) {
        let from = core::mem::replace(&mut self.state, to);
        if from != to {
            ctx.emit(Event::QpStateChanged { qp: self.qpn, from, to, reason });
        }
    }
}

/// The event for which the requester of a queue pair waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the comments of the variants name the fields")]
pub enum Wait {
    /// The ACK of a packet, or the response to it. Without a deadline it waits forever.
    Response { psn: Psn, until: Option<Instant> },
    /// The time to send a packet again, for which the peer had no receive.
    Receive { psn: Psn, until: Instant },
    /// Permission to send: a pause, a rate limit, a state.
    Transmission,
}
