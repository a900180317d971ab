//! The completer: takes responses, ends work requests, recovers from loss or gives up.

use crate::card::Card;
use crate::outbound::Work;
use crate::queue_pair::QueuePair;
use crate::{BackCause, Context, DropReason, Event, Packet, QpKind, Reason, Recovery};
use softhca_queue::{Completion, CompletionFlags, SendFlags, Status};
use softhca_wire::{Aeth, Credits, NakCode, Operation, Psn, Qpn, RnrTimer, Syndrome, Transport};

/// `rnr_retry` of seven means: for ever.
const FOR_EVER: u8 = 7;

/// A response that skipped one.
struct Gap {
    expected: Psn,
}

impl QueuePair {
    /// Takes a response of the peer.
    pub(crate) fn on_response(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        transport: &Transport<'_>,
        packet: Packet,
    ) {
        let psn = packet.psn;
        let reason = if !self.state.takes_responses() {
            Some(DropReason::StateDoesNotReceive(self.state))
        } else if self.kind == QpKind::XrcTarget || !self.outbound.is_outstanding() {
            Some(DropReason::NothingOutstanding)
        } else if !self.outbound.is_sent(psn) && !self.restarts_message(card, packet) {
            Some(DropReason::StaleResponse { oldest: self.outbound.unacked })
        } else {
            None
        };
        if let Some(reason) = reason {
            return self.tell_dropped(card, ctx, packet, reason);
        }
        let syndrome = transport.header.aeth.map_or(Syndrome::ACK, |aeth| aeth.syndrome);
        if let Some(Aeth { syndrome: Syndrome::Ack(code), msn }) = transport.header.aeth {
            self.outbound.limit = Credits::decode(code).map(|count| (msn + count) & 0xff_ffff);
        }
        match (packet.opcode.operation(), syndrome) {
            (_, Syndrome::RnrNak(timer)) => self.on_rnr_nak(card, ctx, packet, timer),
            (_, Syndrome::Nak(NakCode::SequenceError)) => self.on_sequence_nak(card, ctx, packet),
            (_, Syndrome::Nak(code)) => self.on_nak(card, ctx, packet, code),
            (Operation::ReadResponse, Syndrome::Ack(_)) => {
                self.on_read_response(card, ctx, transport, packet)
            }
            (Operation::AtomicAcknowledge, Syndrome::Ack(_)) => {
                let original = transport.header.atomic_ack.map_or(0, |ack| ack.0);
                self.on_atomic_response(card, ctx, packet, original);
            }
            (_, Syndrome::Ack(_)) => {
                self.advance_to(card, ctx, psn.plus(1), packet);
            }
        }
    }

    /// Whether a peer in `go-back-0` forgot its part of a message that it had acknowledged in part.
    fn restarts_message(&self, card: &Card, packet: Packet) -> bool {
        card.settings.recovery == Recovery::GoBack0
            && packet.syndrome == Some(Syndrome::Nak(NakCode::SequenceError))
            && self.outbound.works.front().is_some_and(|work| work.packets > 0 && work.first == packet.psn)
    }

    /// Takes note that everything before `psn` was done, because `packet` says so. False if that was a gap, or
    /// if a request that comes to its end by it stops the queue pair.
    fn advance_to(&mut self, card: &mut Card, ctx: &mut Context<'_>, psn: Psn, packet: Packet) -> bool {
        match self.acknowledge_before(card, ctx, psn) {
            Ok(()) => {
                self.retire(card, ctx);
                self.state.takes_responses()
            }
            Err(gap) => {
                self.on_gap(card, ctx, gap, packet);
                false
            }
        }
    }

    /// Everything before `psn` was acknowledged, unless a read or atomic among it is still unanswered.
    fn acknowledge_before(&mut self, card: &mut Card, ctx: &mut Context<'_>, psn: Psn) -> Result<(), Gap> {
        let unacked = self.outbound.unacked;
        if !unacked.is_before(psn) {
            return Ok(());
        }
        let unanswered = self
            .outbound
            .works
            .iter()
            .take_while(|work| work.packets == 0 || work.first.is_before(psn))
            .find(|work| work.is_read_or_atomic() && work.packets > 0)
            .map(|work| work.first);
        let reach = match unanswered {
            Some(first) if unacked.is_before(first) => first,
            Some(_) => unacked,
            None => psn,
        };
        if reach != unacked {
            self.outbound.unacked = reach;
            self.note_progress(card, ctx);
        }
        match unanswered {
            Some(_) => Err(Gap { expected: reach }),
            None => Ok(()),
        }
    }

    /// The peer answered something new: counts of tries and the ack timer start again.
    fn note_progress(&mut self, card: &mut Card, ctx: &mut Context<'_>) {
        self.outbound.gap_answered = false;
        self.outbound.retries = self.attributes.retry_count;
        self.outbound.rnr_retries = self.attributes.rnr_retry;
        // What was sent before the acknowledged PSN need not be sent again.
        if self.outbound.next.is_before(self.outbound.unacked) {
            self.outbound.next = self.outbound.unacked;
            let works = &self.outbound.works;
            let cursor = works.iter().position(|work| self.outbound.next.is_within(work.first, work.packets));
            self.outbound.cursor = cursor.unwrap_or(works.len());
        }
        self.restart_ack_timer(card, ctx);
    }

    /// How long the peer may be silent before something is done about it; none for ever.
    pub(crate) fn patience(&self, card: &Card) -> Option<core::time::Duration> {
        let timeout = self.attributes.ack_timeout()?;
        Some(match card.settings.recovery {
            // Nothing is sent again, so the peer has the time of all the tries.
            Recovery::Fatal => {
                timeout.max(card.settings.least_ack_timeout) * (u32::from(self.attributes.retry_count) + 1)
            }
            _ => timeout,
        })
    }

    /// Starts the ack timer if something is outstanding, else stops it.
    pub(crate) fn restart_ack_timer(&mut self, card: &mut Card, ctx: &Context<'_>) {
        self.outbound.ack_deadline = None;
        if !self.outbound.is_outstanding() || self.outbound.rnr_until.is_some() {
            return;
        }
        let Some(timeout) = self.patience(card) else { return };
        self.outbound.ack_deadline = Some(ctx.now.plus(timeout));
        self.schedule(card);
    }

    /// Reports finished work requests, oldest first.
    pub(crate) fn retire(&mut self, card: &mut Card, ctx: &mut Context<'_>) {
        while let Some(work) = self.outbound.works.front() {
            let (status, reason) = match work.outcome {
                Some(outcome) => outcome,
                None if work.packets > 0
                    && self.outbound.cursor > 0
                    && self.outbound.unacked.since(work.first) >= work.packets =>
                {
                    (Status::Success, Reason::None)
                }
                None => break,
            };
            if !status.is_success() {
                return self.fail(card, ctx, status, reason);
            }
            let work = self.outbound.pop().expect("it is at the front");
            self.complete_work(card, ctx, &work, status, reason);
            self.outbound.spare.push(work);
        }
        if !self.waits_for_turn(ctx) {
            self.wake_requester(card);
        }
    }

    /// Reports how a work request ended; success only if somebody wants to know.
    pub(crate) fn complete_work(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        work: &Work,
        status: Status,
        reason: Reason,
    ) {
        let signalled = self.signal_all || work.flags.contains(SendFlags::SIGNALED);
        let Some(cq) = self.send_cq.filter(|_| signalled || !status.is_success()) else {
            return ctx.tell(Event::Retired { qp: self.number, id: work.id });
        };
        let completion = Completion {
            id: work.id,
            status,
            operation: work.completion_operation(),
            flags: CompletionFlags::empty(),
            bytes: work.length,
            immediate: 0,
            queue_pair: self.number,
            source: Qpn::default(),
            service_level: 0,
            vendor_error: 0,
            timestamp: 0,
        };
        card.complete(ctx, cq, completion, reason);
    }

    fn on_rnr_nak(&mut self, card: &mut Card, ctx: &mut Context<'_>, packet: Packet, timer: RnrTimer) {
        card.counters.rcvd_rnr_err += 1;
        let psn = packet.psn;
        if self.outbound.rnr_until.is_some() {
            return self.tell_dropped(card, ctx, packet, DropReason::InRnrWait);
        }
        if !self.advance_to(card, ctx, psn, packet) {
            return;
        }
        match self.outbound.rnr_retries {
            0 => {
                card.counters.rnr_nak_retry_err += 1;
                return self.fail(card, ctx, Status::RnrRetryExceeded, Reason::RnrExhausted { psn });
            }
            FOR_EVER => {}
            _ => self.outbound.rnr_retries -= 1,
        }
        let until = ctx.now.plus(core::time::Duration::from_nanos(timer.nanoseconds()));
        self.outbound.rewind(psn);
        self.outbound.rnr_until = Some(until);
        self.outbound.ack_deadline = None;
        self.schedule(card);
        let retries_left = self.outbound.rnr_retries;
        ctx.tell(Event::RnrWaitStarted { qp: self.number, psn, until, retries_left });
    }

    fn on_sequence_nak(&mut self, card: &mut Card, ctx: &mut Context<'_>, packet: Packet) {
        card.counters.packet_seq_err += 1;
        let psn = packet.psn;
        if self.outbound.rnr_until.is_some() {
            return self.tell_dropped(card, ctx, packet, DropReason::InRnrWait);
        }
        if self.advance_to(card, ctx, psn, packet) {
            self.recover(card, ctx, psn, BackCause::SequenceNak, Reason::SequenceNak { psn });
        }
    }

    fn on_gap(&mut self, card: &mut Card, ctx: &mut Context<'_>, gap: Gap, packet: Packet) {
        card.counters.implied_nak_seq_err += 1;
        self.retire(card, ctx);
        let (expected, got) = (gap.expected, packet.psn);
        if self.outbound.gap_answered {
            return self.tell_dropped(card, ctx, packet, DropReason::AskedAgain { expected });
        }
        self.outbound.gap_answered = true;
        self.recover(card, ctx, expected, BackCause::ResponseGap, Reason::ResponseGap { expected, got });
    }

    /// Something was lost at `psn`: sends again, or gives up.
    fn recover(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        psn: Psn,
        cause: BackCause,
        reason: Reason,
    ) {
        if !self.state.takes_responses() {
            return;
        }
        if card.settings.recovery == Recovery::Fatal || self.outbound.retries == 0 {
            card.counters.retry_exceeded_err += 1;
            return self.fail(card, ctx, Status::RetryExceeded, reason);
        }
        self.outbound.retries -= 1;
        let to = match card.settings.recovery {
            Recovery::GoBack0 => {
                let index = self.outbound.find(psn);
                index.map_or(psn, |index| self.outbound.works[index].first)
            }
            _ => psn,
        };
        self.outbound.rewind(to);
        self.restart_ack_timer(card, ctx);
        let retries_left = self.outbound.retries;
        ctx.tell(Event::WentBack { qp: self.number, to, cause, retries_left });
        self.wake(card);
    }

    fn on_nak(&mut self, card: &mut Card, ctx: &mut Context<'_>, packet: Packet, code: NakCode) {
        let psn = packet.psn;
        let (status, counter) = match code {
            NakCode::InvalidRequest => {
                (Status::RemoteInvalidRequest, &mut card.counters.req_remote_invalid_request)
            }
            NakCode::RemoteAccess => (Status::RemoteAccess, &mut card.counters.req_remote_access_errors),
            _ => (Status::RemoteOperation, &mut card.counters.req_remote_op_errors),
        };
        *counter += 1;
        if self.advance_to(card, ctx, psn, packet) {
            self.fail(card, ctx, status, Reason::Nak { code, psn });
        }
    }

    fn on_read_response(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        transport: &Transport<'_>,
        packet: Packet,
    ) {
        let psn = packet.psn;
        let Some((first, packets, length)) = self.answered_work(psn, Operation::ReadRequest) else {
            return self.fail(card, ctx, Status::BadResponse, Reason::BadResponse { psn });
        };
        if !self.advance_to(card, ctx, first, packet) {
            return;
        }
        let expected = self.outbound.unacked;
        if psn != expected {
            return self.on_gap(card, ctx, Gap { expected }, packet);
        }
        let index = psn.since(first);
        let mtu = self.attributes.mtu.bytes();
        let offset = u64::from(index) * u64::from(mtu);
        let wanted = (u64::from(length) - offset).min(u64::from(mtu)) as usize;
        let is_last = index + 1 == packets;
        if transport.payload.len() != wanted || packet.opcode.position().ends() != is_last {
            return self.fail(card, ctx, Status::BadResponse, Reason::BadResponse { psn });
        }
        self.place_response(card, ctx, psn, offset, transport.payload, is_last);
    }

    fn on_atomic_response(&mut self, card: &mut Card, ctx: &mut Context<'_>, packet: Packet, original: u64) {
        let psn = packet.psn;
        let Some((first, ..)) = self.answered_work(psn, Operation::FetchAdd) else {
            return self.fail(card, ctx, Status::BadResponse, Reason::BadResponse { psn });
        };
        if self.advance_to(card, ctx, first, packet) {
            self.place_response(card, ctx, psn, 0, &original.to_ne_bytes(), true);
        }
    }

    /// First PSN, packets and length of the work at `psn`, if it wants this kind of answer.
    fn answered_work(&self, psn: Psn, kind: Operation) -> Option<(Psn, u32, u32)> {
        let work = &self.outbound.works[self.outbound.find(psn)?];
        let wants = match work.operation.0 {
            softhca_queue::Operation::Read { .. } => kind == Operation::ReadRequest,
            softhca_queue::Operation::CompareSwap { .. } | softhca_queue::Operation::FetchAdd { .. } => {
                kind.is_atomic()
            }
            _ => false,
        };
        wants.then_some((work.first, work.packets, work.length))
    }

    /// Stores a part of the answer to the oldest work, and ends the work with the last part.
    fn place_response(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        psn: Psn,
        offset: u64,
        data: &[u8],
        is_last: bool,
    ) {
        let work = self.outbound.works.front().expect("everything before the answered work was retired");
        if let Some(domain) = self.domain
            && let Err(denied) = card.scatter(ctx, (self.number, psn), domain, &work.entries, offset, data)
        {
            return self.fail(card, ctx, Status::LocalProtection, Reason::LocalMemory(denied));
        }
        self.outbound.unacked = psn.plus(1);
        if is_last {
            self.outbound.reads = self.outbound.reads.saturating_sub(1);
        }
        self.note_progress(card, ctx);
        self.retire(card, ctx);
    }

    /// The peer's port answers again: what waited for it gets its whole time once more.
    pub(crate) fn restart_timers(&mut self, card: &mut Card, ctx: &Context<'_>) {
        self.outbound.rnr_until = self.outbound.rnr_until.map(|until| until.max(ctx.now));
        self.restart_ack_timer(card, ctx);
        self.schedule(card);
    }

    /// A deadline may have passed.
    pub(crate) fn expire(&mut self, card: &mut Card, ctx: &mut Context<'_>) {
        if card.stalled.contains(&self.envelope.destination) {
            return;
        }
        if self.outbound.rnr_until.is_some_and(|until| until <= ctx.now) {
            self.outbound.rnr_until = None;
            let (to, retries_left) = (self.outbound.next, self.outbound.rnr_retries);
            let cause = BackCause::ReceiverNotReady;
            ctx.tell(Event::WentBack { qp: self.number, to, cause, retries_left });
            self.restart_ack_timer(card, ctx);
            self.wake(card);
        }
        let is_late = self.outbound.ack_deadline.is_some_and(|deadline| deadline <= ctx.now);
        if is_late && self.is_parked {
            // The peer may lack just what may not be sent yet.
            self.restart_ack_timer(card, ctx);
        } else if is_late {
            let psn = self.outbound.unacked;
            card.counters.local_ack_timeout_err += 1;
            self.outbound.ack_deadline = None;
            self.outbound.gap_answered = false;
            ctx.tell(Event::AckTimedOut { qp: self.number, oldest: psn });
            self.recover(card, ctx, psn, BackCause::Timeout, Reason::TimedOut { psn });
        }
        self.schedule(card);
    }
}
