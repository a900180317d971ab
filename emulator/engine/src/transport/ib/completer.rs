//! The completer: handles responses, completes work requests, and recovers from loss or fails the queue pair.

use super::QueuePair;
use super::requester_state::CompletedWqe;
use crate::core::hca_state::HcaState;
use crate::{
    AdaptiveRetransmission, Context, DropReason, Event, PacketSummary, QpType, Reason, Recovery,
    RetransmitCause, WriterRole,
};
use core::time::Duration;
use softhca_types::{Completion, CompletionFlags, CompletionStatus, ReceivedRoute};
use softhca_wire::{Aeth, Credits, NakCode, Operation, Psn, Qpn, RnrTimer, Syndrome, TransportPacket};

/// The value of `rnr_retry` that retries forever.
const RNR_RETRY_INFINITE: u8 = 7;
/// How long requests to a process that has ended wait before they fail.
const PEER_GONE_TIMEOUT: Duration = Duration::from_millis(500);
/// A host that runs notices an expired timer within this time.
const MAX_TIMER_DELAY: Duration = Duration::from_millis(20);

/// A response arrived before one that is still missing.
struct ResponseGap {
    expected: Psn,
}

impl QueuePair {
    /// Handles a response of the peer.
    pub(crate) fn on_response(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        transport: &TransportPacket<'_>,
        packet: PacketSummary,
    ) {
        let psn = packet.psn;
        let reason = if !self.state.accepts_responses() {
            Some(DropReason::InvalidQpState(self.state))
        } else if self.kind == QpType::XrcTarget || !self.requester.has_outstanding() {
            Some(DropReason::NoOutstandingRequest)
        } else if !self.requester.is_outstanding_psn(psn) && !self.peer_restarts_message(hca, packet) {
            Some(DropReason::StaleResponse { oldest: self.requester.unacked_psn })
        } else {
            None
        };
        if let Some(reason) = reason {
            return self.emit_dropped(hca, ctx, packet, reason);
        }
        let syndrome = transport.header.aeth.map_or(Syndrome::ACK, |aeth| aeth.syndrome);
        if let Some(Aeth { syndrome: Syndrome::Ack(code), msn }) = transport.header.aeth {
            self.requester.lsn = Credits::decode(code).map(|count| (msn + count) & 0xff_ffff);
        }
        match (packet.opcode.operation(), syndrome) {
            (_, Syndrome::RnrNak(timer)) => self.on_rnr_nak(hca, ctx, packet, timer),
            (_, Syndrome::Nak(NakCode::PsnSequenceError)) => self.on_sequence_nak(hca, ctx, packet),
            (_, Syndrome::Nak(code)) => self.on_nak(hca, ctx, packet, code),
            (Operation::ReadResponse, Syndrome::Ack(_)) => self.on_read_response(hca, ctx, transport, packet),
            (Operation::AtomicAcknowledge, Syndrome::Ack(_)) => {
                let original = transport.header.atomic_ack.map_or(0, |ack| ack.0);
                self.on_atomic_response(hca, ctx, packet, original);
            }
            (_, Syndrome::Ack(_)) => {
                self.ack_and_retire(hca, ctx, psn.plus(1), packet);
            }
        }
    }

    /// Whether the peer discarded its part of a message that it had acknowledged in part.
    fn peer_restarts_message(&self, hca: &HcaState, packet: PacketSummary) -> bool {
        self.recovery(hca).policy().peer_may_restart_message()
            && packet.syndrome == Some(Syndrome::Nak(NakCode::PsnSequenceError))
            && self.requester.wqes.front().is_some_and(|wqe| wqe.packets > 0 && wqe.first_psn == packet.psn)
    }

    /// Acknowledges everything before `psn`, as `packet` implies. Returns false if responses are missing, or if a
    /// completed request stopped the queue pair.
    fn ack_and_retire(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        psn: Psn,
        packet: PacketSummary,
    ) -> bool {
        match self.ack_before(hca, ctx, psn) {
            Ok(()) => {
                self.retire_wqes(hca, ctx);
                self.state.accepts_responses()
            }
            Err(gap) => {
                self.on_implied_nak(hca, ctx, gap, packet);
                false
            }
        }
    }

    /// Acknowledges everything before `psn`, up to the first READ or atomic without a response.
    fn ack_before(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>, psn: Psn) -> Result<(), ResponseGap> {
        let unacked = self.requester.unacked_psn;
        if !unacked.is_before(psn) {
            return Ok(());
        }
        let unanswered = self
            .requester
            .wqes
            .iter()
            .take_while(|wqe| wqe.packets == 0 || wqe.first_psn.is_before(psn))
            .find(|wqe| wqe.is_read_or_atomic() && wqe.packets > 0)
            .map(|wqe| wqe.first_psn);
        let reach = match unanswered {
            Some(first) if unacked.is_before(first) => first,
            Some(_) => unacked,
            None => psn,
        };
        if reach != unacked {
            self.requester.unacked_psn = reach;
            self.on_progress(hca, ctx);
        }
        match unanswered {
            Some(_) => Err(ResponseGap { expected: reach }),
            None => Ok(()),
        }
    }

    /// The peer made progress: restarts the retry counters and the ACK timer.
    #[inline]
    pub(super) fn on_progress(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>) {
        self.update_rate(ctx, |rate_control, now| rate_control.on_ack(now));
        self.requester.implied_nak_handled = false;
        self.requester.retries_left = self.attributes.retry_count;
        self.requester.rnr_retries_left = self.attributes.rnr_retry;
        self.requester.is_tail_probed = false;
        self.requester.adaptive_retransmissions = 0;
        // Packets before the acknowledged PSN need no retransmission.
        if self.requester.next_psn.is_before(self.requester.unacked_psn) {
            self.requester.next_psn = self.requester.unacked_psn;
            let wqes = &self.requester.wqes;
            let cursor =
                wqes.iter().position(|wqe| self.requester.next_psn.is_within(wqe.first_psn, wqe.packets));
            self.requester.wqe_index = cursor.unwrap_or(wqes.len());
        }
        self.update_window(hca, true);
        self.restart_ack_timer(hca, ctx);
    }

    /// The time without a response after which the requester assumes a loss; `None` waits forever.
    pub(crate) fn ack_timeout(&self, hca: &HcaState) -> Option<Duration> {
        let retry = &hca.settings.profile.retry;
        let timeout = retry.timeout(self.attributes.timeout)?;
        let (policy, min) = (self.recovery(hca).policy(), hca.settings.min_ack_timeout);
        Some(
            policy.ack_timeout(timeout, min, &|timeout| {
                retry.detection_time(timeout, self.attributes.retry_count)
            }),
        )
    }

    /// The card's adaptive retransmissions, while the requester has some left.
    fn adaptive_retransmission(&self, hca: &HcaState) -> Option<AdaptiveRetransmission> {
        let adaptive = hca.settings.profile.retry.adaptive?;
        let is_left = self.requester.adaptive_retransmissions < adaptive.retransmissions;
        let retransmits = self.attributes.retry_count > 0 && self.recovery(hca) != Recovery::Fatal;
        (is_left && retransmits).then_some(adaptive)
    }

    /// Retransmits before the first ACK timeout, as some cards do.
    fn retransmit_adaptively(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        adaptive: AdaptiveRetransmission,
    ) {
        hca.counters.roce_adp_retrans += 1;
        self.requester.adaptive_retransmissions += 1;
        if self.requester.adaptive_retransmissions == adaptive.retransmissions {
            self.requester.retries_left =
                self.requester.retries_left.saturating_sub(AdaptiveRetransmission::RETRIES);
        }
        let lost = self.requester.unacked_psn;
        let message =
            self.requester.find_wqe(lost).map_or(lost, |index| self.requester.wqes[index].first_psn);
        let from_psn = self.recovery(hca).policy().retransmit_from(lost, message).unwrap_or(lost);
        self.retransmit(hca, ctx, from_psn, RetransmitCause::Adaptive);
    }

    /// Starts the ACK timer if packets are outstanding, else stops it.
    pub(crate) fn restart_ack_timer(&mut self, hca: &mut HcaState, ctx: &Context<'_>) {
        self.requester.ack_deadline = None;
        if !self.requester.has_outstanding() || self.requester.rnr_wait_until.is_some() {
            return;
        }
        let timeout =
            if self.requester.peer_gone { Some(PEER_GONE_TIMEOUT) } else { self.requester.ack_timeout };
        let Some(timeout) = timeout else { return };
        let adaptive = self.adaptive_retransmission(hca).filter(|_| !self.requester.peer_gone);
        let timeout = match adaptive {
            Some(adaptive) => adaptive.interval(timeout, self.requester.adaptive_retransmissions),
            None => timeout,
        };
        let probe = self.tail_probe_after(hca, timeout);
        self.requester.is_tail_probe_due = probe.is_some();
        self.requester.ack_deadline = Some(ctx.now.plus(probe.unwrap_or(timeout)));
        self.arm_timer(hca);
    }

    /// Completes finished work requests, oldest first.
    #[inline]
    pub(crate) fn retire_wqes(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>) {
        while let Some(wqe) = self.requester.wqes.front() {
            match wqe.outcome {
                Some((status, reason)) if !status.is_success() => {
                    return self.fail_oldest_wqe(hca, ctx, status, reason);
                }
                Some(_) => {}
                None if wqe.packets > 0
                    && self.requester.wqe_index > 0
                    && self.requester.unacked_psn.since(wqe.first_psn) >= wqe.packets => {}
                None => break,
            }
            let wqe = self.requester.pop_wqe().expect("front() has returned it");
            match self.send_cq.filter(|_| self.sq_sig_all || wqe.is_signaled) {
                Some(cq) => {
                    let completion = self.send_completion(&wqe, CompletionStatus::Success);
                    hca.post_success(ctx, cq, completion);
                }
                None => self.complete_send(hca, ctx, wqe, CompletionStatus::Success, Reason::None),
            }
        }
        if !self.is_pacing(ctx) {
            self.schedule_requester(hca);
        }
    }

    /// Reports the end of a work request. A success is reported only if it is signaled.
    pub(crate) fn complete_send(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        wqe: CompletedWqe,
        status: CompletionStatus,
        reason: Reason,
    ) {
        let signalled = self.sq_sig_all || wqe.is_signaled;
        let Some(cq) = self.send_cq.filter(|_| signalled || !status.is_success()) else {
            if hca.is_observed {
                ctx.emit(Event::UnsignaledCompleted { qp: self.qpn, wr_id: wqe.wr_id });
            }
            return;
        };
        hca.post_completion(ctx, cq, self.send_completion(&wqe, status), reason);
    }

    #[inline]
    fn send_completion(&self, wqe: &CompletedWqe, status: CompletionStatus) -> Completion {
        Completion {
            wr_id: wqe.wr_id,
            status,
            opcode: wqe.opcode,
            flags: CompletionFlags::empty(),
            byte_len: wqe.length,
            imm_data: 0,
            qpn: self.qpn,
            src_qp: Qpn::default(),
            service_level: 0,
            route: ReceivedRoute::default(),
            vendor_error: 0,
            timestamp: 0,
        }
    }

    fn on_rnr_nak(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        packet: PacketSummary,
        timer: RnrTimer,
    ) {
        hca.counters.rcvd_rnr_err += 1;
        let psn = packet.psn;
        if self.requester.rnr_wait_until.is_some() {
            return self.emit_dropped(hca, ctx, packet, DropReason::InRnrWait);
        }
        if !self.ack_and_retire(hca, ctx, psn, packet) {
            return;
        }
        match self.requester.rnr_retries_left {
            0 => {
                hca.counters.rnr_nak_retry_err += 1;
                return self.fail_oldest_wqe(
                    hca,
                    ctx,
                    CompletionStatus::RnrRetryExceededError,
                    Reason::RnrRetryExceeded { psn },
                );
            }
            RNR_RETRY_INFINITE => {}
            _ => self.requester.rnr_retries_left -= 1,
        }
        let until = ctx.now.plus(Duration::from_nanos(timer.nanoseconds()));
        self.requester.rewind_to(psn);
        self.update_window(hca, false);
        self.requester.rnr_wait_until = Some(until);
        self.requester.ack_deadline = None;
        self.arm_timer(hca);
        let retries_left = Some(self.requester.rnr_retries_left);
        ctx.emit(Event::RnrWaitStarted { qp: self.qpn, psn, until, retries_left });
    }

    fn on_sequence_nak(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>, packet: PacketSummary) {
        hca.counters.packet_seq_err += 1;
        let psn = packet.psn;
        if self.requester.rnr_wait_until.is_some() {
            return self.emit_dropped(hca, ctx, packet, DropReason::InRnrWait);
        }
        // If the packet is really lost, the ACK timeout detects it.
        if self.requester.rnr_retried_psn.take_if(|retried| *retried == psn).is_some() {
            return self.emit_dropped(hca, ctx, packet, DropReason::AfterRnrRetry);
        }
        if self.ack_and_retire(hca, ctx, psn, packet) {
            self.recover(hca, ctx, psn, RetransmitCause::SequenceNak, Reason::SequenceNak { psn });
        }
    }

    fn on_implied_nak(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        gap: ResponseGap,
        packet: PacketSummary,
    ) {
        hca.counters.implied_nak_seq_err += 1;
        self.retire_wqes(hca, ctx);
        let (expected, got) = (gap.expected, packet.psn);
        if self.requester.implied_nak_handled {
            return self.emit_dropped(hca, ctx, packet, DropReason::AlreadyRetransmitting { expected });
        }
        self.requester.implied_nak_handled = true;
        self.recover(hca, ctx, expected, RetransmitCause::ResponseGap, Reason::ResponseGap { expected, got });
    }

    /// The packet `psn` is lost: retransmits, or fails the queue pair.
    fn recover(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        psn: Psn,
        cause: RetransmitCause,
        reason: Reason,
    ) {
        if !self.state.accepts_responses() {
            return;
        }
        let message = self.requester.find_wqe(psn).map_or(psn, |index| self.requester.wqes[index].first_psn);
        let from_psn = self.recovery(hca).policy().retransmit_from(psn, message);
        let Some(from_psn) = from_psn.filter(|_| self.requester.retries_left > 0) else {
            hca.counters.retry_exceeded_err += 1;
            return self.fail_oldest_wqe(hca, ctx, CompletionStatus::RetryExceededError, reason);
        };
        self.requester.retries_left -= 1;
        self.retransmit(hca, ctx, from_psn, cause);
    }

    /// Sends again from `from_psn` on.
    fn retransmit(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        from_psn: Psn,
        cause: RetransmitCause,
    ) {
        self.requester.rewind_to(from_psn);
        self.shrink_window(hca);
        self.update_window(hca, false);
        self.restart_ack_timer(hca, ctx);
        let retries_left = Some(self.requester.retries_left);
        ctx.emit(Event::Retransmitted { qp: self.qpn, from_psn, cause, retries_left });
        self.schedule_transmit(hca);
    }

    fn on_nak(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>, packet: PacketSummary, code: NakCode) {
        let psn = packet.psn;
        let (status, counter) = match code {
            NakCode::InvalidRequest => {
                (CompletionStatus::RemoteInvalidRequestError, &mut hca.counters.req_remote_invalid_request)
            }
            NakCode::RemoteAccessError => {
                (CompletionStatus::RemoteAccessError, &mut hca.counters.req_remote_access_errors)
            }
            _ => (CompletionStatus::RemoteOperationError, &mut hca.counters.req_remote_op_errors),
        };
        *counter += 1;
        if self.ack_and_retire(hca, ctx, psn, packet) {
            self.fail_oldest_wqe(hca, ctx, status, Reason::Nak { code, psn });
        }
    }

    fn on_read_response(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        transport: &TransportPacket<'_>,
        packet: PacketSummary,
    ) {
        let psn = packet.psn;
        let Some((first, packets, length, has_parts)) =
            self.find_rd_atomic_wqe(psn, |it| it == Operation::ReadRequest)
        else {
            return self.fail_oldest_wqe(
                hca,
                ctx,
                CompletionStatus::BadResponseError,
                Reason::BadResponse { psn },
            );
        };
        if !self.ack_and_retire(hca, ctx, first, packet) {
            return;
        }
        let expected = self.requester.unacked_psn;
        if psn != expected {
            return self.on_implied_nak(hca, ctx, ResponseGap { expected }, packet);
        }
        let index = psn.since(first);
        let mtu = self.attributes.path_mtu.bytes();
        let offset = u64::from(index) * u64::from(mtu);
        let wanted = (u64::from(length) - offset).min(u64::from(mtu)) as usize;
        let is_last = index + 1 == packets;
        let ends = packet.opcode.position().ends_message();
        if transport.payload.len() != wanted || (ends != is_last && !(ends && has_parts)) {
            return self.fail_oldest_wqe(
                hca,
                ctx,
                CompletionStatus::BadResponseError,
                Reason::BadResponse { psn },
            );
        }
        self.place_response(hca, ctx, psn, offset, transport.payload, ends);
    }

    fn on_atomic_response(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        packet: PacketSummary,
        original: u64,
    ) {
        let psn = packet.psn;
        let Some((first, ..)) = self.find_rd_atomic_wqe(psn, Operation::is_atomic) else {
            return self.fail_oldest_wqe(
                hca,
                ctx,
                CompletionStatus::BadResponseError,
                Reason::BadResponse { psn },
            );
        };
        if self.ack_and_retire(hca, ctx, first, packet) {
            self.place_response(hca, ctx, psn, 0, &original.to_ne_bytes(), true);
        }
    }

    /// The first PSN, packet count and length of the WQE at `psn`, and whether it has parts, if it expects this kind of
    /// response.
    fn find_rd_atomic_wqe(
        &self,
        psn: Psn,
        wanted: impl Fn(Operation) -> bool,
    ) -> Option<(Psn, u32, u32, bool)> {
        let wqe = &self.requester.wqes[self.requester.find_wqe(psn)?];
        let is_wanted = wqe.operation.0.packet_operation().is_some_and(wanted);
        is_wanted.then_some((wqe.first_psn, wqe.packets, wqe.length, wqe.has_parts))
    }

    /// Stores a part of the response to the oldest WQE. `ends` says that it is the last one to its request.
    fn place_response(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        psn: Psn,
        offset: u64,
        data: &[u8],
        ends: bool,
    ) {
        let wqe = self.requester.wqes.front().expect("all earlier WQEs are retired");
        if let Some(pd) = self.pd
            && let Err(error) =
                hca.scatter(ctx, (self.qpn, WriterRole::Requester, psn), pd, &wqe.sges, offset, data)
        {
            return self.fail_oldest_wqe(
                hca,
                ctx,
                CompletionStatus::LocalProtectionError,
                Reason::LocalAccess(error),
            );
        }
        self.requester.unacked_psn = psn.plus(1);
        if ends {
            self.requester.outstanding_rd_atomic = self.requester.outstanding_rd_atomic.saturating_sub(1);
        }
        self.on_progress(hca, ctx);
        self.retire_wqes(hca, ctx);
    }

    /// The peer's port responds again: the timers of its connections restart.
    pub(crate) fn restart_timers(&mut self, hca: &mut HcaState, ctx: &Context<'_>) {
        self.requester.rnr_wait_until = self.requester.rnr_wait_until.map(|until| until.max(ctx.now));
        self.restart_ack_timer(hca, ctx);
        self.arm_timer(hca);
    }

    /// Whether the host did not run when the ACK timer expired. A minimum timeout means that time is real.
    fn is_ack_timer_overdue(&self, hca: &HcaState, ctx: &Context<'_>) -> bool {
        let is_real_time = hca.settings.min_ack_timeout > Duration::ZERO;
        let deadline = self.requester.ack_deadline.map(|deadline| deadline.plus(MAX_TIMER_DELAY));
        is_real_time && deadline.is_some_and(|deadline| deadline < ctx.now)
    }

    /// Handles expired deadlines.
    pub(crate) fn expire(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>) {
        if hca.peers.stalled.iter().any(|peer| self.is_connected_to(*peer)) {
            return;
        }
        if self.requester.rnr_wait_until.is_some_and(|until| until <= ctx.now) {
            self.requester.rnr_wait_until = None;
            let (to, retries_left) = (self.requester.next_psn, Some(self.requester.rnr_retries_left));
            self.requester.rnr_retried_psn = Some(to);
            let cause = RetransmitCause::ReceiverNotReady;
            ctx.emit(Event::Retransmitted { qp: self.qpn, from_psn: to, cause, retries_left });
            self.restart_ack_timer(hca, ctx);
            self.schedule_transmit(hca);
        }
        let is_late = self.requester.ack_deadline.is_some_and(|deadline| deadline <= ctx.now);
        if is_late && self.requester.peer_gone {
            let status = CompletionStatus::RetryExceededError;
            self.fail_oldest_wqe(hca, ctx, status, Reason::PeerUnreachable);
        } else if is_late
            && (self.is_blocked || self.waits_unacknowledged(hca) || self.is_ack_timer_overdue(hca, ctx))
        {
            // The blocked packets may be the ones that the peer is missing, or the first that requests an ACK. If the
            // deadline is overdue, the ACK may be in a socket that this process had no time to read.
            self.restart_ack_timer(hca, ctx);
        } else if is_late && self.requester.is_tail_probe_due {
            self.requester.is_tail_probed = true;
            let psn = self.requester.unacked_psn;
            self.retransmit(hca, ctx, psn, RetransmitCause::TailProbe);
        } else if is_late && let Some(adaptive) = self.adaptive_retransmission(hca) {
            self.retransmit_adaptively(hca, ctx, adaptive);
        } else if is_late {
            let psn = self.requester.unacked_psn;
            hca.counters.local_ack_timeout_err += 1;
            self.requester.ack_deadline = None;
            self.requester.implied_nak_handled = false;
            self.update_rate(ctx, |rate_control, now| rate_control.on_timeout(now));
            ctx.emit(Event::AckTimedOut { qp: self.qpn, oldest_psn: psn });
            self.recover(hca, ctx, psn, RetransmitCause::Timeout, Reason::AckTimeout { psn });
        }
        self.arm_timer(hca);
    }
}
