//! How a queue pair stops: the request to blame completes first, then everything else is flushed in order.

use super::QueuePair;
use super::responder_state::ReceiveWqe;
use crate::hca_state::HcaState;
use crate::{AsyncEvent, Context, Event, QpState, QpType, Reason};
use softhca_queue::{Completion, CompletionFlags, CompletionOpcode, CompletionStatus, CorruptRing};
use softhca_wire::Qpn;

impl QueuePair {
    /// The oldest send work request failed: reports it, and stops the queue pair.
    ///
    /// A reliable connection goes to ERR. An unreliable service stops only its send queue (IBA 10.3.1.6).
    pub(crate) fn fail_oldest_wqe(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        status: CompletionStatus,
        reason: Reason,
    ) {
        if let Some(work) = self.requester.pop_wqe() {
            self.complete_send(card, ctx, &work, status, reason);
            self.requester.spare_wqes.push(work);
        }
        if self.kind.is_reliable() {
            self.enter_error(card, ctx, reason, None);
        } else {
            self.change_state(ctx, QpState::SendQueueError, reason);
            self.flush_send_queue(card, ctx);
        }
    }

    /// Goes to ERR and flushes both queues.
    pub(crate) fn enter_error(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        reason: Reason,
        event: Option<AsyncEvent>,
    ) {
        let was_error = self.state == QpState::Error;
        self.change_state(ctx, QpState::Error, reason);
        self.requester.ack_deadline = None;
        self.requester.rnr_wait_until = None;
        if let Some(event) = event.filter(|_| !was_error) {
            ctx.emit(Event::AsyncEventRaised { client: Some(self.client), event });
        }
        self.flush_send_queue(card, ctx);
        if let Some(ring) = &self.responder.ring {
            ring.request_doorbell(true);
        }
        self.flush_receive_queue(card, ctx);
        if self.srq.is_some() && self.kind != QpType::XrcTarget && !was_error {
            let event = AsyncEvent::LastWorkRequestReached(self.qpn);
            ctx.emit(Event::AsyncEventRaised { client: Some(self.client), event });
        }
    }

    /// Flushes whatever the send queue holds, and whatever is posted from now on when the doorbell rings.
    pub(crate) fn flush_send_queue(&mut self, card: &mut HcaState, ctx: &mut Context<'_>) {
        while let Some(work) = self.requester.pop_wqe() {
            self.complete_send(card, ctx, &work, CompletionStatus::WrFlushError, Reason::Flushed);
            self.requester.spare_wqes.push(work);
        }
        let start = self.requester.next_new_psn;
        self.requester.start_at(start);
        self.requester.wqe_index = 0;
        loop {
            let Some(ring) = &mut self.requester.ring else { return };
            let mut work = self.requester.spare_wqes.pop().unwrap_or_default();
            match ring.dequeue(&mut work.sges, &mut work.inline_data) {
                Ok(Some(request)) => {
                    ring.retire();
                    let (id, operation) = match request {
                        Ok(request) => (request.wr_id, request.operation),
                        Err(_) => (0, super::requester_state::WqeOperation::default().0),
                    };
                    (work.wr_id, work.operation) = (id, super::requester_state::WqeOperation(operation));
                    work.length = 0;
                    self.complete_send(card, ctx, &work, CompletionStatus::WrFlushError, Reason::Flushed);
                    self.requester.spare_wqes.push(work);
                }
                Ok(None) => return self.requester.spare_wqes.push(work),
                Err(why) => {
                    let event = Event::ClientFaulted { client: self.client, qp: self.qpn, why };
                    self.requester.ring = None;
                    return ctx.emit(event);
                }
            }
        }
    }

    /// Flushes the receive that is in use and everything that waits. A shared queue's receives stay there.
    pub(crate) fn flush_receive_queue(&mut self, card: &mut HcaState, ctx: &mut Context<'_>) {
        self.responder.in_progress_message = None;
        if let Some(buffer) = self.responder.receive_wqe.take() {
            self.complete_receive_with_error(
                card,
                ctx,
                buffer,
                CompletionStatus::WrFlushError,
                Reason::Flushed,
            );
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
                    self.complete_receive_with_error(
                        card,
                        ctx,
                        buffer,
                        CompletionStatus::WrFlushError,
                        Reason::Flushed,
                    );
                }
                Ok(None) => return self.responder.spare_receive_wqes.push(buffer),
                Err(why) => {
                    let event = Event::ClientFaulted { client: self.client, qp: self.qpn, why };
                    self.responder.ring = None;
                    return ctx.emit(event);
                }
            }
        }
    }

    /// Reports a receive that did not succeed.
    pub(crate) fn complete_receive_with_error(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        buffer: ReceiveWqe,
        status: CompletionStatus,
        reason: Reason,
    ) {
        if let Some(cq) = self.effective_recv_cq(card) {
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
                vendor_error: 0,
                timestamp: 0,
            };
            card.post_completion(ctx, cq, completion, reason);
        }
        self.responder.spare_receive_wqes.push(buffer);
    }

    /// A client's ring has an impossible index: its queue pair stops, nobody else notices.
    pub(crate) fn on_corrupt_ring(&mut self, card: &mut HcaState, ctx: &mut Context<'_>, why: CorruptRing) {
        ctx.emit(Event::ClientFaulted { client: self.client, qp: self.qpn, why });
        self.requester.ring = None;
        self.responder.ring = None;
        let event = AsyncEvent::QueuePairFatal(self.qpn);
        self.enter_error(card, ctx, Reason::CorruptRing(why), Some(event));
    }

    /// Goes to RESET: everything is forgotten, nothing is reported.
    pub(crate) fn reset(&mut self) {
        while let Some(work) = self.requester.wqes.pop_front() {
            self.requester.spare_wqes.push(work);
        }
        self.requester.wqe_index = 0;
        self.requester.start_at(Default::default());
        if let Some(ring) = &mut self.requester.ring {
            ring.reset();
        }
        self.responder.start_at(Default::default());
        self.rate_control = None;
        self.last_cnp_at = None;
        if let Some(buffer) = self.responder.receive_wqe.take() {
            self.responder.spare_receive_wqes.push(buffer);
        }
        if let Some(ring) = &mut self.responder.ring {
            ring.request_doorbell(false);
            ring.reset();
        }
    }
}
