//! The InfiniBand transport: BTH, PSNs, ACKs and retransmission, with the connection manager on QP1.

mod completer;
mod congestion;
mod duplicate;
mod flush;
mod host_path;
mod management;
mod pacing;
mod pending_responses;
mod planned_packet;
mod port;
mod rate_control;
mod receive;
mod recovery;
mod request_error;
mod requester;
mod requester_state;
mod responder;
mod responder_state;
mod straight;
mod transmit;
mod unreliable;
mod window;
mod wqe_queue;

use crate::cm::ConnectionManager;
use crate::core::control::QpRings;
use crate::core::hca_state::HcaState;
use crate::core::queue_pair;
use crate::core::queue_pair::Wait;
use crate::core::transport::Transport;
use crate::{
    AsyncEvent, ClientId, CmId, Context, Hca, Instant, ModifyQp, PacketBatch, QpSnapshot, QpState, Reason,
    Recovery, Settings, TransmitGate, VerbsResult,
};
use core::time::Duration;
use requester_state::{RequesterState, SendWqe};
use responder_state::ResponderState;
use softhca_types::cm;
use softhca_wire::{LocalKey, Qpn};

/// The InfiniBand transport of a device.
pub struct Ib {
    pub(crate) cm: ConnectionManager,
}

pub(crate) type QueuePair = queue_pair::QueuePair<Ib>;

impl QueuePair {
    /// The recovery mode of this connection.
    pub fn recovery(&self, state: &HcaState) -> Recovery {
        state.recovery(self.addressing.destination)
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
}

impl Hca {
    /// The event for which the posted requests of a queue pair wait; `None` without any.
    pub fn wait_of(&self, number: Qpn) -> Option<Wait> {
        let requester = &self.queue_pairs.get(number.value())?.requester;
        let (psn, until) = (requester.unacked_psn, requester.ack_deadline);
        match requester.rnr_wait_until {
            Some(until) => Some(Wait::Receive { psn, until }),
            None if requester.has_outstanding() => Some(Wait::Response { psn, until }),
            None => requester.wqes.front().map(|_| Wait::Transmission),
        }
    }
}

impl Transport for Ib {
    type Requester = RequesterState;
    type Responder = ResponderState;

    fn new(settings: &Settings) -> Ib {
        Ib { cm: ConnectionManager::new(settings.seed, settings.qpn_slot) }
    }

    fn set_secret(&mut self, secret: [u64; 2]) {
        self.cm.set_secret(secret);
    }

    fn create(rings: QpRings) -> (RequesterState, ResponderState) {
        (RequesterState::new(rings.send), ResponderState::new(rings.receive))
    }

    fn snapshot(qp: &QueuePair) -> QpSnapshot {
        QpSnapshot {
            qpn: qp.qpn,
            qp_type: qp.kind,
            state: qp.state,
            attributes: qp.attributes,
            next_psn: qp.requester.next_psn,
            expected_psn: qp.responder.expected_psn,
            outstanding: qp.requester.wqes.len() as u32,
            sq_draining: qp.state == QpState::SendQueueDrained && !qp.requester.is_drained,
        }
    }

    fn find_request(qp: &QueuePair, lkey: LocalKey) -> Option<u64> {
        let RequesterState { wqes, ring, .. } = &qp.requester;
        let uses = |wqe: &&SendWqe| wqe.outcome.is_none() && wqe.sges.iter().any(|sge| sge.lkey == lkey);
        let pending = || ring.as_ref().filter(|_| qp.state.accepts_responses())?.find_pending(lkey);
        wqes.iter().find(uses).map(|wqe| wqe.wr_id).or_else(pending)
    }

    fn find_completed_request(
        qp: &QueuePair,
        lkey: LocalKey,
        unpolled: &mut dyn Iterator<Item = u64>,
    ) -> Option<u64> {
        // A queue pair that was taken to ERR uses no memory: a program that ends need not poll what is flushed.
        let ring = qp.requester.ring.as_ref().filter(|_| qp.state.accepts_responses())?;
        ring.find_retired(lkey, unpolled)
    }

    fn ring_slots(qp: &QueuePair) -> [u32; 2] {
        let send = qp.requester.ring.as_ref().map_or(0, |ring| ring.slots());
        [send, qp.responder.ring.as_ref().map_or(0, |ring| ring.slots())]
    }

    fn ack_timeout(qp: &QueuePair, hca: &HcaState) -> Option<Duration> {
        qp.ack_timeout(hca)
    }

    fn start(qp: &mut QueuePair, hca: &mut HcaState, modify: &ModifyQp, from: QpState) {
        qp.host_slot = qp.find_host_slot(hca);
        if let Some(psn) = modify.rq_psn {
            qp.discard_orphaned_acks(hca);
            qp.responder.start_at(psn);
            qp.connect_ack_records(hca);
        }
        if let Some(psn) = modify.sq_psn {
            qp.requester.start_at(psn);
        }
        qp.requester.ack_timeout = qp.ack_timeout(hca);
        qp.requester.retries_left = qp.attributes.retry_count;
        qp.requester.rnr_retries_left = qp.attributes.rnr_retry;
        if from != QpState::SendQueueDrained {
            qp.requester.is_drained = false;
        }
    }

    fn leave(qp: &mut QueuePair, hca: &mut HcaState, ctx: &mut Context<'_>, to: QpState) {
        if to == QpState::Reset {
            qp.release_ack_record(hca);
        }
        qp.detach_acks(hca, ctx);
    }

    fn reset(qp: &mut QueuePair, hca: &mut HcaState) {
        qp.reset(hca);
    }

    fn enter_error(
        qp: &mut QueuePair,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        reason: Reason,
        event: Option<AsyncEvent>,
    ) {
        qp.enter_error(hca, ctx, reason, event);
    }

    fn destroy(qp: &mut QueuePair, hca: &mut HcaState, ctx: &mut Context<'_>) {
        qp.detach_requests(hca, ctx);
        Ib::leave(qp, hca, ctx, QpState::Reset);
        let start = qp.requester.unacked_psn;
        qp.requester.start_at(start);
        qp.update_window(hca, false);
    }

    fn on_doorbell(qp: &mut QueuePair, hca: &mut HcaState, ctx: &mut Context<'_>) {
        if let Some(ring) = &qp.requester.ring {
            ring.clear_doorbell();
        }
        match qp.state {
            QpState::Error => {
                qp.flush_send_queue(hca, ctx);
                qp.flush_receive_queue(hca, ctx);
            }
            QpState::SendQueueError => qp.flush_send_queue(hca, ctx),
            _ => qp.schedule_transmit(hca),
        }
    }

    #[inline]
    fn fill_batch(
        qp: &mut QueuePair,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        gate: &mut dyn TransmitGate,
        buffer: &mut [u8],
        max_packets: usize,
    ) -> Option<PacketBatch> {
        qp.fill_batch(hca, ctx, gate, buffer, max_packets)
    }

    fn has_deadline(qp: &QueuePair) -> bool {
        qp.requester.ack_deadline.or(qp.requester.rnr_wait_until).is_some()
    }

    fn expire(qp: &mut QueuePair, hca: &mut HcaState, ctx: &mut Context<'_>) {
        qp.expire(hca, ctx);
    }

    fn fill_management_batch(
        hca: &mut Hca,
        ctx: &mut Context<'_>,
        gate: &mut dyn TransmitGate,
        buffer: &mut [u8],
        max_packets: usize,
    ) -> Option<PacketBatch> {
        hca.transport.cm.mad_queue.fill_batch(&mut hca.state, ctx, gate, buffer, max_packets)
    }

    fn has_management_deadline(&self) -> bool {
        self.cm.has_deadline()
    }

    fn expire_management(hca: &mut Hca, ctx: &mut Context<'_>, at: Instant) {
        hca.cm_call(ctx).expire(at);
    }

    fn execute_cm(
        hca: &mut Hca,
        ctx: &mut Context<'_>,
        client: ClientId,
        call: cm::Command,
    ) -> VerbsResult<cm::Reply> {
        hca.execute_cm(ctx, client, call)
    }

    fn raise_cm_event(hca: &mut Hca, ctx: &mut Context<'_>, id: CmId, event: cm::EventType, status: i32) {
        hca.cm_call(ctx).raise_injected(id, event, status);
    }

    fn on_device_removed(hca: &mut Hca, ctx: &mut Context<'_>) {
        hca.cm_call(ctx).raise_device_removal();
    }

    fn on_client_closed(hca: &mut Hca, ctx: &mut Context<'_>, client: ClientId) {
        hca.cm_call(ctx).close_client(client);
    }
}
