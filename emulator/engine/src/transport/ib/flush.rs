//! Stopping a queue pair: the failed request completes first, then both queues are flushed in order.

use super::QueuePair;
use super::responder_state::ReceiveWqe;
use crate::core::hca_state::HcaState;
use crate::{AsyncEvent, Context, Event, QpState, QpType, Reason};
use softhca_types::{
    Completion, CompletionFlags, CompletionOpcode, CompletionStatus, CorruptRing, ReceivedRoute,
};
use softhca_wire::Qpn;

impl QueuePair {
    /// Completes the oldest send WQE with an error and stops the queue pair.
    ///
    /// A reliable connection enters ERR. An unreliable service stops only its send queue (IBA 10.3.1.6).
    pub(crate) fn fail_oldest_wqe(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        status: CompletionStatus,
        reason: Reason,
    ) {
        if let Some(wqe) = self.requester.pop_wqe() {
            self.complete_send(hca, ctx, wqe, status, reason);
        }
        if self.kind.is_reliable() {
            self.enter_error(hca, ctx, reason, None);
        } else {
            self.change_state(ctx, QpState::SendQueueError, reason);
            self.flush_send_queue(hca, ctx);
        }
    }

    /// Enters ERR and flushes both queues.
    pub(crate) fn enter_error(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        reason: Reason,
        event: Option<AsyncEvent>,
    ) {
        let was_error = self.state == QpState::Error;
        self.change_state(ctx, QpState::Error, reason);
        self.requester.ack_deadline = None;
        self.requester.rnr_wait_until = None;
        if let Some(event) = event.filter(|_| !was_error) {
            hca.processes.on_async_event(event.name());
            ctx.emit(Event::AsyncEventRaised { client: Some(self.client), event });
        }
        self.flush_send_queue(hca, ctx);
        if let Some(ring) = &self.responder.ring {
            ring.request_doorbell(true);
        }
        self.flush_receive_queue(hca, ctx);
        if self.srq.is_some() && self.kind != QpType::XrcTarget && !was_error {
            let event = AsyncEvent::LastWorkRequestReached(self.qpn);
            ctx.emit(Event::AsyncEventRaised { client: Some(self.client), event });
        }
    }

    /// Flushes the send queue. Requests that are posted later are flushed when their doorbell rings.
    pub(crate) fn flush_send_queue(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>) {
        while let Some(wqe) = self.requester.pop_wqe() {
            self.complete_send(hca, ctx, wqe, CompletionStatus::WrFlushError, Reason::Flushed);
        }
        let start = self.requester.next_new_psn;
        self.requester.start_at(start);
        self.requester.wqe_index = 0;
        self.update_window(hca, false);
        loop {
            let Some(ring) = &mut self.requester.ring else { return };
            let wqe = self.requester.wqes.spare();
            match wqe.copy_from(ring) {
                Ok(Some(copied)) => {
                    ring.retire();
                    (wqe.first_psn, wqe.packets) = (start, 0);
                    if hca.is_observed {
                        let call_site = (self.client, copied.call_site);
                        let call_site = hca.objects.call_sites.get(&call_site).copied();
                        ctx.emit(wqe.fetched(self.qpn, call_site));
                    }
                    let completed = wqe.to_completed();
                    self.complete_send(hca, ctx, completed, CompletionStatus::WrFlushError, Reason::Flushed);
                }
                Ok(None) => return,
                Err(why) => {
                    let event = Event::ClientFaulted { client: self.client, qp: self.qpn, corrupt_ring: why };
                    self.requester.ring = None;
                    return ctx.emit(event);
                }
            }
        }
    }

    /// Flushes the receive WQE in use and the receive queue. Receives of a shared receive queue stay there.
    pub(crate) fn flush_receive_queue(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>) {
        const STATUS: CompletionStatus = CompletionStatus::WrFlushError;
        self.responder.in_progress_message = None;
        if let Some(buffer) = self.responder.receive_wqe.take() {
            self.complete_receive_with_error(hca, ctx, buffer, STATUS, Reason::Flushed);
        }
        if self.srq.is_some() {
            return;
        }
        loop {
            let Some(ring) = &mut self.responder.ring else { return };
            let mut buffer = self.responder.spare_receive_wqes.pop().unwrap_or_default();
            match ring.dequeue(&mut buffer.sges) {
                Ok(Some(id)) => {
                    buffer.wr_id = id;
                    self.complete_receive_with_error(hca, ctx, buffer, STATUS, Reason::Flushed);
                }
                Ok(None) => return self.responder.spare_receive_wqes.push(buffer),
                Err(why) => {
                    let event = Event::ClientFaulted { client: self.client, qp: self.qpn, corrupt_ring: why };
                    self.responder.ring = None;
                    return ctx.emit(event);
                }
            }
        }
    }

    /// Completes a receive WQE with an error.
    pub(crate) fn complete_receive_with_error(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        buffer: ReceiveWqe,
        status: CompletionStatus,
        reason: Reason,
    ) {
        if let Some(cq) = self.effective_recv_cq(hca) {
            let completion = Completion {
                wr_id: buffer.wr_id,
                status,
                opcode: CompletionOpcode::Receive,
                flags: CompletionFlags::empty(),
                byte_len: 0,
                imm_data: 0,
                qpn: self.qpn,
                src_qp: Qpn::default(),
                service_level: 0,
                route: ReceivedRoute::default(),
                vendor_error: 0,
                timestamp: 0,
            };
            hca.post_completion(ctx, cq, completion, reason);
        }
        self.responder.spare_receive_wqes.push(buffer);
    }

    /// A client's ring has an invalid index: stops this queue pair without an effect on others.
    pub(crate) fn on_corrupt_ring(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>, why: CorruptRing) {
        ctx.emit(Event::ClientFaulted { client: self.client, qp: self.qpn, corrupt_ring: why });
        self.requester.ring = None;
        self.responder.ring = None;
        let event = AsyncEvent::QueuePairFatal(self.qpn);
        self.enter_error(hca, ctx, Reason::CorruptRing(why), Some(event));
    }

    /// Enters RESET: discards everything without completions.
    pub(crate) fn reset(&mut self, hca: &mut HcaState) {
        self.requester.wqes.clear();
        self.requester.wqe_index = 0;
        self.requester.start_at(Default::default());
        self.update_window(hca, false);
        if let Some(ring) = &mut self.requester.ring {
            ring.reset();
        }
        self.responder.start_at(Default::default());
        self.requester.rate_control = None;
        self.responder.last_cnp_at = None;
        if let Some(buffer) = self.responder.receive_wqe.take() {
            self.responder.spare_receive_wqes.push(buffer);
        }
        if let Some(ring) = &mut self.responder.ring {
            ring.request_doorbell(false);
            ring.reset();
        }
    }
}
