//! How a queue pair stops: the request to blame completes first, then everything else is flushed in order.

use crate::card::Card;
use crate::inbound::Buffer;
use crate::queue_pair::QueuePair;
use crate::{AsyncEvent, Context, Event, QpKind, Reason, State};
use softhca_queue::{Completion, CompletionFlags, CompletionOperation, Impossible, Status};
use softhca_wire::Qpn;

impl QueuePair {
    /// The oldest send work request failed: reports it, and stops the queue pair.
    ///
    /// A reliable connection goes to ERR. An unreliable service stops only its send queue (IBA 10.3.1.6).
    pub(crate) fn fail(&mut self, card: &mut Card, ctx: &mut Context<'_>, status: Status, reason: Reason) {
        if let Some(work) = self.outbound.pop() {
            self.complete_work(card, ctx, &work, status, reason);
            self.outbound.spare.push(work);
        }
        if self.kind.is_reliable() {
            self.enter_error(card, ctx, reason, None);
        } else {
            self.change_state(ctx, State::SendQueueError, reason);
            self.flush_sends(card, ctx);
        }
    }

    /// Goes to ERR and flushes both queues.
    pub(crate) fn enter_error(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        reason: Reason,
        event: Option<AsyncEvent>,
    ) {
        let was_error = self.state == State::Error;
        self.change_state(ctx, State::Error, reason);
        self.outbound.ack_deadline = None;
        self.outbound.rnr_until = None;
        if let Some(event) = event.filter(|_| !was_error) {
            ctx.tell(Event::Raised { client: Some(self.client), event });
        }
        self.flush_sends(card, ctx);
        if let Some(ring) = &self.inbound.ring {
            ring.want_doorbell(true);
        }
        self.flush_receives(card, ctx);
        if self.shared_receive_queue.is_some() && self.kind != QpKind::XrcTarget && !was_error {
            let event = AsyncEvent::LastWorkRequestReached(self.number);
            ctx.tell(Event::Raised { client: Some(self.client), event });
        }
    }

    /// Flushes whatever the send queue holds, and whatever is posted from now on when the doorbell rings.
    pub(crate) fn flush_sends(&mut self, card: &mut Card, ctx: &mut Context<'_>) {
        while let Some(work) = self.outbound.pop() {
            self.complete_work(card, ctx, &work, Status::Flushed, Reason::FlushedAfterError);
            self.outbound.spare.push(work);
        }
        let start = self.outbound.fresh;
        self.outbound.start(start);
        self.outbound.cursor = 0;
        loop {
            let Some(ring) = &mut self.outbound.ring else { return };
            let mut work = self.outbound.spare.pop().unwrap_or_default();
            match ring.take(&mut work.entries, &mut work.inline) {
                Ok(Some(request)) => {
                    ring.retire();
                    let (id, operation) = match request {
                        Ok(request) => (request.id, request.operation),
                        Err(_) => (0, crate::outbound::WorkOperation::default().0),
                    };
                    (work.id, work.operation) = (id, crate::outbound::WorkOperation(operation));
                    work.length = 0;
                    self.complete_work(card, ctx, &work, Status::Flushed, Reason::FlushedAfterError);
                    self.outbound.spare.push(work);
                }
                Ok(None) => return self.outbound.spare.push(work),
                Err(why) => {
                    let event = Event::ClientFaulted { client: self.client, qp: self.number, why };
                    self.outbound.ring = None;
                    return ctx.tell(event);
                }
            }
        }
    }

    /// Flushes the receive that is in use and everything that waits. A shared queue's receives stay there.
    pub(crate) fn flush_receives(&mut self, card: &mut Card, ctx: &mut Context<'_>) {
        self.inbound.open = None;
        if let Some(buffer) = self.inbound.buffer.take() {
            self.complete_receive(card, ctx, buffer, Status::Flushed, Reason::FlushedAfterError);
        }
        if self.shared_receive_queue.is_some() {
            return;
        }
        loop {
            let Some(ring) = &mut self.inbound.ring else { return };
            let mut buffer = self.inbound.spare.pop().unwrap_or_default();
            match ring.take(&mut buffer.scatter) {
                Ok(Some(id)) => {
                    buffer.id = id;
                    self.complete_receive(card, ctx, buffer, Status::Flushed, Reason::FlushedAfterError);
                }
                Ok(None) => return self.inbound.spare.push(buffer),
                Err(why) => {
                    let event = Event::ClientFaulted { client: self.client, qp: self.number, why };
                    self.inbound.ring = None;
                    return ctx.tell(event);
                }
            }
        }
    }

    /// Reports a receive that did not succeed.
    pub(crate) fn complete_receive(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        buffer: Buffer,
        status: Status,
        reason: Reason,
    ) {
        if let Some(cq) = self.receive_completion_queue(card) {
            let completion = Completion {
                id: buffer.id,
                status,
                operation: CompletionOperation::Receive,
                flags: CompletionFlags::empty(),
                bytes: 0,
                immediate: 0,
                queue_pair: self.number,
                source: Qpn::default(),
                service_level: 0,
                vendor_error: 0,
                timestamp: 0,
            };
            card.complete(ctx, cq, completion, reason);
        }
        self.inbound.spare.push(buffer);
    }

    /// A client's ring has an impossible index: its queue pair stops, nobody else notices.
    pub(crate) fn break_ring(&mut self, card: &mut Card, ctx: &mut Context<'_>, why: Impossible) {
        ctx.tell(Event::ClientFaulted { client: self.client, qp: self.number, why });
        self.outbound.ring = None;
        self.inbound.ring = None;
        let event = AsyncEvent::QueuePairFatal(self.number);
        self.enter_error(card, ctx, Reason::BrokenRing(why), Some(event));
    }

    /// Goes to RESET: everything is forgotten, nothing is reported.
    pub(crate) fn reset(&mut self) {
        while let Some(work) = self.outbound.works.pop_front() {
            self.outbound.spare.push(work);
        }
        self.outbound.cursor = 0;
        self.outbound.start(Default::default());
        if let Some(ring) = &mut self.outbound.ring {
            ring.reset();
        }
        self.inbound.start(Default::default());
        self.limiter = None;
        self.notified_at = None;
        if let Some(buffer) = self.inbound.buffer.take() {
            self.inbound.spare.push(buffer);
        }
        if let Some(ring) = &mut self.inbound.ring {
            ring.want_doorbell(false);
            ring.reset();
        }
    }
}
