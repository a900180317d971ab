//! The completer: takes responses, ends work requests, recovers from loss or gives up.

use super::QueuePair;
use super::requester_state::SendWqe;
use crate::hca_state::HcaState;
use crate::{Context, DropReason, Event, PacketSummary, QpType, Reason, RetransmitCause};
use softhca_queue::{Completion, CompletionFlags, CompletionStatus, SendFlags};
use softhca_wire::{Aeth, Credits, NakCode, Operation, Psn, Qpn, RnrTimer, Syndrome, TransportPacket};

/// `rnr_retry` of seven means: for ever.
const RNR_RETRY_INFINITE: u8 = 7;

/// A response that skipped one.
struct ResponseGap {
    expected: Psn,
}

impl QueuePair {
    /// Takes a response of the peer.
    pub(crate) fn on_response(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        transport: &TransportPacket<'_>,
        packet: PacketSummary,
    ) {
        let psn = packet.psn;
        let reason = if !self.state.accepts_responses() {
            Some(DropReason::InvalidQpState(self.state))
        } else if self.kind == QpType::XrcTarget || !self.requester.has_outstanding() {
            Some(DropReason::NoOutstandingRequest)
        } else if !self.requester.is_outstanding_psn(psn) && !self.peer_restarts_message(card, packet) {
            Some(DropReason::StaleResponse { oldest: self.requester.unacked_psn })
        } else {
            None
        };
        if let Some(reason) = reason {
            return self.emit_dropped(card, ctx, packet, reason);
        }
        let syndrome = transport.header.aeth.map_or(Syndrome::ACK, |aeth| aeth.syndrome);
        if let Some(Aeth { syndrome: Syndrome::Ack(code), msn }) = transport.header.aeth {
            self.requester.lsn = Credits::decode(code).map(|count| (msn + count) & 0xff_ffff);
        }
        match (packet.opcode.operation(), syndrome) {
            (_, Syndrome::RnrNak(timer)) => self.on_rnr_nak(card, ctx, packet, timer),
            (_, Syndrome::Nak(NakCode::PsnSequenceError)) => self.on_sequence_nak(card, ctx, packet),
            (_, Syndrome::Nak(code)) => self.on_nak(card, ctx, packet, code),
            (Operation::ReadResponse, Syndrome::Ack(_)) => {
                self.on_read_response(card, ctx, transport, packet)
            }
            (Operation::AtomicAcknowledge, Syndrome::Ack(_)) => {
                let original = transport.header.atomic_ack.map_or(0, |ack| ack.0);
                self.on_atomic_response(card, ctx, packet, original);
            }
            (_, Syndrome::Ack(_)) => {
                self.ack_and_retire(card, ctx, psn.plus(1), packet);
            }
        }
    }

    /// Whether a peer in `go-back-0` forgot its part of a message that it had acknowledged in part.
    fn peer_restarts_message(&self, card: &HcaState, packet: PacketSummary) -> bool {
        card.settings.recovery.policy().peer_may_restart_message()
            && packet.syndrome == Some(Syndrome::Nak(NakCode::PsnSequenceError))
            && self
                .requester
                .wqes
                .front()
                .is_some_and(|work| work.packets > 0 && work.first_psn == packet.psn)
    }

    /// Takes note that everything before `psn` was done, because `packet` says so. False if that was a gap, or
    /// if a request that comes to its end by it stops the queue pair.
    fn ack_and_retire(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        psn: Psn,
        packet: PacketSummary,
    ) -> bool {
        match self.ack_before(card, ctx, psn) {
            Ok(()) => {
                self.retire_wqes(card, ctx);
                self.state.accepts_responses()
            }
            Err(gap) => {
                self.on_implied_nak(card, ctx, gap, packet);
                false
            }
        }
    }

    /// Everything before `psn` was acknowledged, unless a read or atomic among it is still unanswered.
    fn ack_before(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        psn: Psn,
    ) -> Result<(), ResponseGap> {
        let unacked = self.requester.unacked_psn;
        if !unacked.is_before(psn) {
            return Ok(());
        }
        let unanswered = self
            .requester
            .wqes
            .iter()
            .take_while(|work| work.packets == 0 || work.first_psn.is_before(psn))
            .find(|work| work.is_read_or_atomic() && work.packets > 0)
            .map(|work| work.first_psn);
        let reach = match unanswered {
            Some(first) if unacked.is_before(first) => first,
            Some(_) => unacked,
            None => psn,
        };
        if reach != unacked {
            self.requester.unacked_psn = reach;
            self.on_progress(card, ctx);
        }
        match unanswered {
            Some(_) => Err(ResponseGap { expected: reach }),
            None => Ok(()),
        }
    }

    /// The peer answered something new: counts of tries and the ack timer start again.
    fn on_progress(&mut self, card: &mut HcaState, ctx: &mut Context<'_>) {
        self.update_rate(ctx, |rate_control, now| rate_control.on_ack(now));
        self.requester.implied_nak_handled = false;
        self.requester.retries_left = self.attributes.retry_count;
        self.requester.rnr_retries_left = self.attributes.rnr_retry;
        // What was sent before the acknowledged PSN need not be sent again.
        if self.requester.next_psn.is_before(self.requester.unacked_psn) {
            self.requester.next_psn = self.requester.unacked_psn;
            let works = &self.requester.wqes;
            let cursor =
                works.iter().position(|work| self.requester.next_psn.is_within(work.first_psn, work.packets));
            self.requester.wqe_index = cursor.unwrap_or(works.len());
        }
        self.restart_ack_timer(card, ctx);
    }

    /// How long the peer may be silent before something is done about it; none for ever.
    pub(crate) fn ack_timeout(&self, card: &HcaState) -> Option<core::time::Duration> {
        let timeout = self.attributes.ack_timeout()?;
        let (policy, min) = (card.settings.recovery.policy(), card.settings.min_ack_timeout);
        Some(policy.ack_timeout(timeout, min, self.attributes.retry_count))
    }

    /// Starts the ack timer if something is outstanding, else stops it.
    pub(crate) fn restart_ack_timer(&mut self, card: &mut HcaState, ctx: &Context<'_>) {
        self.requester.ack_deadline = None;
        if !self.requester.has_outstanding() || self.requester.rnr_wait_until.is_some() {
            return;
        }
        let Some(timeout) = self.ack_timeout(card) else { return };
        self.requester.ack_deadline = Some(ctx.now.plus(timeout));
        self.arm_timer(card);
    }

    /// Reports finished work requests, oldest first.
    pub(crate) fn retire_wqes(&mut self, card: &mut HcaState, ctx: &mut Context<'_>) {
        while let Some(work) = self.requester.wqes.front() {
            let (status, reason) = match work.outcome {
                Some(outcome) => outcome,
                None if work.packets > 0
                    && self.requester.wqe_index > 0
                    && self.requester.unacked_psn.since(work.first_psn) >= work.packets =>
                {
                    (CompletionStatus::Success, Reason::None)
                }
                None => break,
            };
            if !status.is_success() {
                return self.fail_oldest_wqe(card, ctx, status, reason);
            }
            let work = self.requester.pop_wqe().expect("it is at the front");
            self.complete_send(card, ctx, &work, status, reason);
            self.requester.spare_wqes.push(work);
        }
        if !self.is_pacing(ctx) {
            self.schedule_requester(card);
        }
    }

    /// Reports how a work request ended; success only if somebody wants to know.
    pub(crate) fn complete_send(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        work: &SendWqe,
        status: CompletionStatus,
        reason: Reason,
    ) {
        let signalled = self.sq_sig_all || work.flags.contains(SendFlags::SIGNALED);
        let Some(cq) = self.send_cq.filter(|_| signalled || !status.is_success()) else {
            return ctx.emit(Event::UnsignaledCompleted { qp: self.qpn, wr_id: work.wr_id });
        };
        let completion = Completion {
            wr_id: work.wr_id,
            status,
            opcode: work.completion_operation(),
            flags: CompletionFlags::empty(),
            byte_len: work.length,
            imm_data: 0,
            qpn: self.qpn,
            src_qp: Qpn::default(),
            service_level: 0,
            vendor_error: 0,
            timestamp: 0,
        };
        card.post_completion(ctx, cq, completion, reason);
    }

    fn on_rnr_nak(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        packet: PacketSummary,
        timer: RnrTimer,
    ) {
        card.counters.rcvd_rnr_err += 1;
        let psn = packet.psn;
        if self.requester.rnr_wait_until.is_some() {
            return self.emit_dropped(card, ctx, packet, DropReason::InRnrWait);
        }
        if !self.ack_and_retire(card, ctx, psn, packet) {
            return;
        }
        match self.requester.rnr_retries_left {
            0 => {
                card.counters.rnr_nak_retry_err += 1;
                return self.fail_oldest_wqe(
                    card,
                    ctx,
                    CompletionStatus::RnrRetryExceededError,
                    Reason::RnrRetryExceeded { psn },
                );
            }
            RNR_RETRY_INFINITE => {}
            _ => self.requester.rnr_retries_left -= 1,
        }
        let until = ctx.now.plus(core::time::Duration::from_nanos(timer.nanoseconds()));
        self.requester.rewind_to(psn);
        self.requester.rnr_wait_until = Some(until);
        self.requester.ack_deadline = None;
        self.arm_timer(card);
        let retries_left = self.requester.rnr_retries_left;
        ctx.emit(Event::RnrWaitStarted { qp: self.qpn, psn, until, retries_left });
    }

    fn on_sequence_nak(&mut self, card: &mut HcaState, ctx: &mut Context<'_>, packet: PacketSummary) {
        card.counters.packet_seq_err += 1;
        let psn = packet.psn;
        if self.requester.rnr_wait_until.is_some() {
            return self.emit_dropped(card, ctx, packet, DropReason::InRnrWait);
        }
        if self.ack_and_retire(card, ctx, psn, packet) {
            self.recover(card, ctx, psn, RetransmitCause::SequenceNak, Reason::SequenceNak { psn });
        }
    }

    fn on_implied_nak(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        gap: ResponseGap,
        packet: PacketSummary,
    ) {
        card.counters.implied_nak_seq_err += 1;
        self.retire_wqes(card, ctx);
        let (expected, got) = (gap.expected, packet.psn);
        if self.requester.implied_nak_handled {
            return self.emit_dropped(card, ctx, packet, DropReason::AlreadyRetransmitting { expected });
        }
        self.requester.implied_nak_handled = true;
        self.recover(
            card,
            ctx,
            expected,
            RetransmitCause::ResponseGap,
            Reason::ResponseGap { expected, got },
        );
    }

    /// The packet `psn` is lost: retransmits, or fails the queue pair.
    fn recover(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        psn: Psn,
        cause: RetransmitCause,
        reason: Reason,
    ) {
        if !self.state.accepts_responses() {
            return;
        }
        let message = self.requester.find_wqe(psn).map_or(psn, |index| self.requester.wqes[index].first_psn);
        let from_psn = card.settings.recovery.policy().retransmit_from(psn, message);
        let Some(from_psn) = from_psn.filter(|_| self.requester.retries_left > 0) else {
            card.counters.retry_exceeded_err += 1;
            return self.fail_oldest_wqe(card, ctx, CompletionStatus::RetryExceededError, reason);
        };
        self.requester.retries_left -= 1;
        self.requester.rewind_to(from_psn);
        self.restart_ack_timer(card, ctx);
        let retries_left = self.requester.retries_left;
        ctx.emit(Event::Retransmitted { qp: self.qpn, from_psn, cause, retries_left });
        self.schedule_transmit(card);
    }

    fn on_nak(&mut self, card: &mut HcaState, ctx: &mut Context<'_>, packet: PacketSummary, code: NakCode) {
        let psn = packet.psn;
        let (status, counter) = match code {
            NakCode::InvalidRequest => {
                (CompletionStatus::RemoteInvalidRequestError, &mut card.counters.req_remote_invalid_request)
            }
            NakCode::RemoteAccessError => {
                (CompletionStatus::RemoteAccessError, &mut card.counters.req_remote_access_errors)
            }
            _ => (CompletionStatus::RemoteOperationError, &mut card.counters.req_remote_op_errors),
        };
        *counter += 1;
        if self.ack_and_retire(card, ctx, psn, packet) {
            self.fail_oldest_wqe(card, ctx, status, Reason::Nak { code, psn });
        }
    }

    fn on_read_response(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        transport: &TransportPacket<'_>,
        packet: PacketSummary,
    ) {
        let psn = packet.psn;
        let Some((first, packets, length)) = self.find_rd_atomic_wqe(psn, Operation::ReadRequest) else {
            return self.fail_oldest_wqe(
                card,
                ctx,
                CompletionStatus::BadResponseError,
                Reason::BadResponse { psn },
            );
        };
        if !self.ack_and_retire(card, ctx, first, packet) {
            return;
        }
        let expected = self.requester.unacked_psn;
        if psn != expected {
            return self.on_implied_nak(card, ctx, ResponseGap { expected }, packet);
        }
        let index = psn.since(first);
        let mtu = self.attributes.path_mtu.bytes();
        let offset = u64::from(index) * u64::from(mtu);
        let wanted = (u64::from(length) - offset).min(u64::from(mtu)) as usize;
        let is_last = index + 1 == packets;
        if transport.payload.len() != wanted || packet.opcode.position().ends_message() != is_last {
            return self.fail_oldest_wqe(
                card,
                ctx,
                CompletionStatus::BadResponseError,
                Reason::BadResponse { psn },
            );
        }
        self.place_response(card, ctx, psn, offset, transport.payload, is_last);
    }

    fn on_atomic_response(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        packet: PacketSummary,
        original: u64,
    ) {
        let psn = packet.psn;
        let Some((first, ..)) = self.find_rd_atomic_wqe(psn, Operation::FetchAdd) else {
            return self.fail_oldest_wqe(
                card,
                ctx,
                CompletionStatus::BadResponseError,
                Reason::BadResponse { psn },
            );
        };
        if self.ack_and_retire(card, ctx, first, packet) {
            self.place_response(card, ctx, psn, 0, &original.to_ne_bytes(), true);
        }
    }

    /// First PSN, packets and length of the work at `psn`, if it wants this kind of answer.
    fn find_rd_atomic_wqe(&self, psn: Psn, kind: Operation) -> Option<(Psn, u32, u32)> {
        let work = &self.requester.wqes[self.requester.find_wqe(psn)?];
        let wants = match work.operation.0 {
            softhca_queue::Operation::Read { .. } => kind == Operation::ReadRequest,
            softhca_queue::Operation::CompareSwap { .. } | softhca_queue::Operation::FetchAdd { .. } => {
                kind.is_atomic()
            }
            _ => false,
        };
        wants.then_some((work.first_psn, work.packets, work.length))
    }

    /// Stores a part of the answer to the oldest work, and ends the work with the last part.
    fn place_response(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        psn: Psn,
        offset: u64,
        data: &[u8],
        is_last: bool,
    ) {
        let work = self.requester.wqes.front().expect("everything before the answered work was retired");
        if let Some(domain) = self.pd
            && let Err(denied) = card.scatter(ctx, (self.qpn, psn), domain, &work.sges, offset, data)
        {
            return self.fail_oldest_wqe(
                card,
                ctx,
                CompletionStatus::LocalProtectionError,
                Reason::LocalAccess(denied),
            );
        }
        self.requester.unacked_psn = psn.plus(1);
        if is_last {
            self.requester.outstanding_rd_atomic = self.requester.outstanding_rd_atomic.saturating_sub(1);
        }
        self.on_progress(card, ctx);
        self.retire_wqes(card, ctx);
    }

    /// The peer's port answers again: what waited for it gets its whole time once more.
    pub(crate) fn restart_timers(&mut self, card: &mut HcaState, ctx: &Context<'_>) {
        self.requester.rnr_wait_until = self.requester.rnr_wait_until.map(|until| until.max(ctx.now));
        self.restart_ack_timer(card, ctx);
        self.arm_timer(card);
    }

    /// A deadline may have passed.
    pub(crate) fn expire(&mut self, card: &mut HcaState, ctx: &mut Context<'_>) {
        if card.stalled_peers.contains(&self.addressing.destination) {
            return;
        }
        if self.requester.rnr_wait_until.is_some_and(|until| until <= ctx.now) {
            self.requester.rnr_wait_until = None;
            let (to, retries_left) = (self.requester.next_psn, self.requester.rnr_retries_left);
            let cause = RetransmitCause::ReceiverNotReady;
            ctx.emit(Event::Retransmitted { qp: self.qpn, from_psn: to, cause, retries_left });
            self.restart_ack_timer(card, ctx);
            self.schedule_transmit(card);
        }
        let is_late = self.requester.ack_deadline.is_some_and(|deadline| deadline <= ctx.now);
        if is_late && self.is_blocked {
            // The peer may lack just what may not be sent yet.
            self.restart_ack_timer(card, ctx);
        } else if is_late {
            let psn = self.requester.unacked_psn;
            card.counters.local_ack_timeout_err += 1;
            self.requester.ack_deadline = None;
            self.requester.implied_nak_handled = false;
            self.update_rate(ctx, |rate_control, now| rate_control.on_timeout(now));
            ctx.emit(Event::AckTimedOut { qp: self.qpn, oldest_psn: psn });
            self.recover(card, ctx, psn, RetransmitCause::Timeout, Reason::AckTimeout { psn });
        }
        self.arm_timer(card);
    }
}
