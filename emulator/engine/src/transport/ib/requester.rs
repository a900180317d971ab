//! The requester: fetches WQEs from the send queue and builds their packets.

use super::QueuePair;
use super::pacing::set_ecn_capable;
use super::planned_packet::PlannedPacket;
use super::requester_state::{RequesterState, SendWqe, WqeOperation};
use crate::core::hca_state::HcaState;
use crate::{AsyncEvent, Context, DeviceLimits, EndToEndCredits, Event, QpState, QpType, Reason};
use softhca_queue::SendConsumer;
use softhca_types::{
    CallSite, CompletionStatus, CorruptRing, Operation, Payload, RemoteAddress, SendFlags,
    SendImmOrInvalidate,
};
use softhca_wire as wire;
use softhca_wire::{
    AtomicEth, Bth, Deth, Ieth, ImmOrInvalidate, Immediate, Mtu, Opcode, Position, Psn, Qpn, Reth,
    TransportHeader, XrcEth,
};

/// The maximum number of outstanding PSNs: beyond half the PSN space, old and new PSNs are ambiguous.
pub(super) const MAX_OUTSTANDING_PSNS: u32 = Psn::SPACE / 2 - 1;

/// What the requester learns of a request when it copies it out of the ring.
pub(super) struct CopiedWqe {
    size: u64,
    outcome: Option<(CompletionStatus, Reason)>,
    pub call_site: u16,
}

impl SendWqe {
    /// As [`SendWqe::copy_from`], for the most frequent requests.
    #[inline]
    fn copy_simple_from(&mut self, ring: &mut SendConsumer) -> Option<CopiedWqe> {
        let request = ring.dequeue_simple(&mut self.sges, &mut self.inline_data)?;
        self.has_parts = false;
        (self.wr_id, self.flags, self.length) = (request.wr_id, request.flags, request.length);
        self.operation = WqeOperation(match request.remote {
            None => Operation::Send(SendImmOrInvalidate::None),
            Some(remote) => Operation::Write { remote, imm_data: None },
        });
        Some(CopiedWqe { size: request.length.into(), outcome: None, call_site: request.call_site })
    }

    /// Copies the next request out of the ring, without PSNs.
    pub(super) fn copy_from(&mut self, ring: &mut SendConsumer) -> Result<Option<CopiedWqe>, CorruptRing> {
        self.has_parts = false;
        let copied = match ring.dequeue(&mut self.sges, &mut self.inline_data)? {
            None => return Ok(None),
            Some(Err(_)) => {
                (self.wr_id, self.operation) = (0, WqeOperation::default());
                self.flags = SendFlags::empty();
                let outcome = Some((CompletionStatus::LocalQpOperationError, Reason::InvalidWqe));
                CopiedWqe { size: 0, outcome, call_site: 0 }
            }
            Some(Ok(request)) => {
                let size = match request.payload {
                    Payload::Inline(bytes) => bytes.len() as u64,
                    Payload::Gather(sges) => sges.iter().map(|e| u64::from(e.length)).sum(),
                };
                self.wr_id = request.wr_id;
                self.operation = WqeOperation(request.operation);
                self.flags = request.flags;
                self.datagram = request.ud;
                self.srqn = request.remote_srqn;
                CopiedWqe { size, outcome: None, call_site: request.call_site }
            }
        };
        self.length = match self.operation.0.packet_operation() {
            None => 0,
            Some(operation) if operation.is_atomic() => 8,
            Some(_) => copied.size.min(u64::from(u32::MAX)) as u32,
        };
        Ok(Some(copied))
    }

    pub(super) fn fetched(&self, qp: Qpn, call_site: Option<CallSite>) -> Event {
        Event::WqeFetched {
            qp,
            wr_id: self.wr_id,
            operation: self.operation.0.completion_opcode(),
            bytes: self.length,
            first_psn: self.first_psn,
            packets: self.packets,
            first_sge: self.sges.first().copied().filter(|_| !self.is_inline()),
            call_site,
        }
    }
}

/// The attributes of a queue pair that limit a request.
struct WqeLimits {
    kind: QpType,
    path_mtu: Mtu,
    max_rd_atomic: u8,
}

impl WqeLimits {
    /// Checks a request on its own.
    fn check(&self, wqe: &SendWqe, size: u64) -> Option<(CompletionStatus, Reason)> {
        if !wqe.operation.0.is_supported_by(self.kind) {
            return Some((CompletionStatus::LocalQpOperationError, Reason::Unsupported));
        }
        let limit = match self.kind.is_datagram() {
            true => u64::from(self.path_mtu.bytes()),
            false => u64::from(DeviceLimits::HCA.max_msg_sz),
        };
        if size > limit {
            return Some((
                CompletionStatus::LocalLengthError,
                Reason::MessageTooLong { length: size, limit },
            ));
        }
        if wqe.is_read_or_atomic() {
            if self.max_rd_atomic == 0 {
                return Some((CompletionStatus::LocalQpOperationError, Reason::RdAtomicDisabled));
            }
            if wqe.is_inline() {
                return Some((CompletionStatus::LocalQpOperationError, Reason::Unsupported));
            }
            let is_atomic = !matches!(wqe.operation.0, Operation::Read { .. });
            if is_atomic && size < 8 {
                return Some((
                    CompletionStatus::LocalLengthError,
                    Reason::MessageTooLong { length: 8, limit: size },
                ));
            }
        }
        None
    }
}

impl QueuePair {
    /// The next request packet, if the queue pair may send one now.
    pub(crate) fn plan_request(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
    ) -> Option<PlannedPacket> {
        loop {
            if !self.state.accepts_responses() || self.requester.rnr_wait_until.is_some() {
                return None;
            }
            if self.requester.wqe_index == self.requester.wqes.len() {
                if self.state == QpState::SendQueueDrained || !self.fetch_wqe(hca, ctx) {
                    self.raise_drained(ctx);
                    return None;
                }
                // The fetched WQE may have failed the queue pair already.
                continue;
            }
            let wqe = &self.requester.wqes[self.requester.wqe_index];
            match wqe.outcome {
                Some((CompletionStatus::Success, _)) => {
                    self.requester.wqe_index += 1;
                    continue;
                }
                Some(_) => return None,
                None => {}
            }
            let started = self.requester.is_started(wqe);
            if !started && self.state == QpState::SendQueueDrained {
                self.raise_drained(ctx);
                return None;
            }
            if !started && wqe.flags.contains(SendFlags::FENCE) && self.requester.outstanding_rd_atomic > 0 {
                return None;
            }
            if wqe.is_local_operation() {
                self.execute_local_operation(hca, ctx);
                continue;
            }
            if self.requester.next_psn == wqe.first_psn
                && let Some(failure) = self.check_wqe_access(hca, wqe)
            {
                self.fail_current_wqe(hca, ctx, failure);
                return None;
            }
            let wqe = &self.requester.wqes[self.requester.wqe_index];
            let is_read = matches!(wqe.operation.0, Operation::Read { .. });
            let needed = if is_read { wqe.end_psn().since(self.requester.next_psn) } else { 1 };
            let outstanding = self.requester.next_psn.since(self.requester.unacked_psn);
            if self.kind.is_reliable() && outstanding > 0 && outstanding + needed > MAX_OUTSTANDING_PSNS {
                return None;
            }
            // The next part of a READ is asked for when the last one is answered.
            let is_part_outstanding = wqe.has_parts && self.requester.unacked_psn != self.requester.next_psn;
            if is_part_outstanding || self.waits_for_window(hca, needed) {
                return None;
            }
            let wqe = &self.requester.wqes[self.requester.wqe_index];
            // Beyond the LSN the requester sends one packet, after all earlier ones are acknowledged (IBA 9.7.7.2.5).
            let asks = [self.requester.next_psn, self.requester.unacked_psn] == [wqe.first_psn; 2];
            if self.uses_credits(hca) && self.requester.exceeds_lsn(wqe) && !asks {
                return None;
            }
            if wqe.is_read_or_atomic()
                && self.requester.outstanding_rd_atomic >= u32::from(self.attributes.max_rd_atomic)
            {
                return None;
            }
            let carries = !wqe.is_read_or_atomic();
            if carries && !self.may_send_now(hca, ctx) {
                return None;
            }
            return Some(self.plan_request_packet(hca, &self.requester.wqes[self.requester.wqe_index]));
        }
    }

    /// Whether end-to-end credits limit the requester.
    fn uses_credits(&self, hca: &HcaState) -> bool {
        hca.settings.end_to_end_credits == EndToEndCredits::On && self.kind.is_reliable()
    }

    /// Copies the next request out of the ring and assigns its PSNs.
    pub(super) fn fetch_wqe(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>) -> bool {
        let RequesterState { ring: Some(ring), wqes, next_wqe_psn, ssn, .. } = &mut self.requester else {
            return false;
        };
        if matches!(ring.has_pending(), Ok(false)) {
            return false;
        }
        let wqe = wqes.spare();
        let simple = if self.kind == QpType::Rc { wqe.copy_simple_from(ring) } else { None };
        let is_simple = simple.is_some();
        let CopiedWqe { size, outcome, call_site } = match simple {
            Some(copied) => copied,
            None => match wqe.copy_from(ring) {
                Ok(None) => return false,
                Err(why) => {
                    self.on_corrupt_ring(hca, ctx, why);
                    return false;
                }
                Ok(Some(copied)) => copied,
            },
        };
        let path_mtu = self.attributes.path_mtu;
        wqe.first_psn = *next_wqe_psn;
        if is_simple && wqe.length <= path_mtu.bytes() {
            (wqe.outcome, wqe.packets) = (None, 1);
        } else {
            let max_rd_atomic = self.attributes.max_rd_atomic;
            let limits = WqeLimits { kind: self.kind, path_mtu, max_rd_atomic };
            wqe.outcome = outcome.or_else(|| limits.check(wqe, size));
            let packet_operation = wqe.operation.0.packet_operation();
            let is_atomic = packet_operation.is_some_and(wire::Operation::is_atomic);
            wqe.packets = match (wqe.outcome, packet_operation) {
                (Some(_), _) | (_, None) => 0,
                _ if is_atomic => 1,
                _ => path_mtu.packets(wqe.length),
            };
            if self.kind.is_datagram() && wqe.packets > 1 {
                wqe.packets = 1;
            }
        }
        if wqe.packets > 0 {
            *ssn = (*ssn + 1) & 0xff_ffff;
            wqe.ssn = *ssn;
        }
        *next_wqe_psn = wqe.end_psn();
        if hca.is_observed {
            let call_site = hca.objects.call_sites.get(&(self.client, call_site)).copied();
            ctx.emit(wqe.fetched(self.qpn, call_site));
        }
        let failed = wqe.outcome.is_some();
        wqes.push_spare();
        if failed {
            self.retire_wqes(hca, ctx);
        }
        true
    }

    /// Checks a request when its first packet is about to be sent.
    fn check_wqe_access(&self, hca: &HcaState, wqe: &SendWqe) -> Option<(CompletionStatus, Reason)> {
        if self.kind.is_datagram() {
            let handle = wqe.datagram.ah;
            let known = hca
                .objects
                .address_handles
                .get(handle)
                .is_some_and(|found| found.client == self.client && Some(found.pd) == self.pd);
            if !known {
                return Some((CompletionStatus::LocalQpOperationError, Reason::BadAddressHandle { handle }));
            }
        }
        // The response to a READ or an atomic is placed, and checked, when it arrives.
        if wqe.is_inline() || wqe.is_read_or_atomic() {
            return None;
        }
        let pd = self.pd?;
        let error = hca.check_gather_list(pd, &wqe.sges).err()?;
        Some((CompletionStatus::LocalProtectionError, Reason::LocalAccess(error)))
    }

    /// Fails the current WQE with a local error. The completion follows after all earlier ones.
    pub(crate) fn fail_current_wqe(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        failure: (CompletionStatus, Reason),
    ) {
        let cursor = self.requester.wqe_index;
        if let Some(wqe) = self.requester.wqes.get_mut(cursor) {
            wqe.outcome = Some(failure);
            self.requester.next_wqe_psn = self.requester.next_psn;
        }
        self.retire_wqes(hca, ctx);
    }

    /// Executes the local operation at the current WQE.
    fn execute_local_operation(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>) {
        let (number, pd) = (self.qpn, self.pd);
        let wqe = &mut self.requester.wqes[self.requester.wqe_index];
        let done = match (wqe.operation.0, pd) {
            (Operation::BindMemoryWindow(bind), Some(pd)) => {
                self.has_bound_windows = true;
                hca.objects.protection.bind_memory_window(pd, number, &bind).map(|_| ())
            }
            (Operation::LocalInvalidate { rkey: key }, Some(pd)) => {
                hca.objects.protection.invalidate(pd, number, key)
            }
            _ => Ok(()),
        };
        wqe.outcome = Some(match done {
            Ok(()) => (CompletionStatus::Success, Reason::None),
            Err(error) => (CompletionStatus::MwBindError, Reason::MemoryWindowBind(error)),
        });
        if done.is_ok() {
            self.requester.wqe_index += 1;
        }
        self.retire_wqes(hca, ctx);
    }

    fn raise_drained(&mut self, ctx: &mut Context<'_>) {
        if self.state != QpState::SendQueueDrained
            || self.requester.is_drained
            || self.requester.has_outstanding()
        {
            return;
        }
        self.requester.is_drained = true;
        if self.attributes.sqd_async_notify {
            let event = AsyncEvent::SendQueueDrained(self.qpn);
            ctx.emit(Event::AsyncEventRaised { client: Some(self.client), event });
        }
    }

    /// The packet of `wqe` with the next PSN.
    fn plan_request_packet(&self, hca: &HcaState, wqe: &SendWqe) -> PlannedPacket {
        let psn = self.requester.next_psn;
        let index = psn.since(wqe.first_psn);
        let mtu = self.attributes.path_mtu.bytes();
        let offset = u64::from(index) * u64::from(mtu);
        let rest = wqe.length - offset.min(u64::from(wqe.length)) as u32;
        let position = Position::of(index, wqe.packets);
        let service = self.kind.service();
        let operation = wqe.operation.0.packet_operation().expect("local operations have no packets");
        // A READ or an atomic is one request packet, whatever the number of its responses.
        let (position, payload) = match operation.is_read_or_atomic() {
            true => (Position::Only, 0),
            false => (position, rest.min(mtu)),
        };
        let (kind, word) = match position.ends_message() {
            true => wqe.operation.0.imm_or_invalidate(),
            false => (ImmOrInvalidate::None, 0),
        };
        let opcode =
            Opcode::new(service, operation, position, kind).expect("fetch_wqe has checked the operation");
        let mut header = TransportHeader::new(Bth::new(opcode, self.attributes.dest_qpn, psn));
        match kind {
            ImmOrInvalidate::None => {}
            ImmOrInvalidate::Immediate => header.immediate = Some(Immediate(word)),
            ImmOrInvalidate::Invalidate => header.ieth = Some(Ieth(word)),
        }
        let reth = |RemoteAddress { address, rkey }, offset: u64, dma_length| {
            Some(Reth { virtual_address: address.wrapping_add(offset), rkey, dma_length })
        };
        let atomic = |RemoteAddress { address: virtual_address, rkey }, swap_or_add, compare| {
            Some(AtomicEth { virtual_address, rkey, swap_or_add, compare })
        };
        match wqe.operation.0 {
            Operation::Write { remote, .. } if position.starts_message() => {
                header.reth = reth(remote, 0, wqe.length);
            }
            Operation::Read { remote } => {
                // A peer answers a duplicate that lies within the original request.
                let new_psn = self.requester.next_new_psn;
                let asked = if psn.is_before(new_psn) { new_psn.since(psn) } else { u32::MAX };
                let admitted = self.window_room(hca).min(asked).saturating_mul(mtu);
                header.reth = reth(remote, offset, rest.min(admitted));
            }
            Operation::CompareSwap { remote, compare, swap } => header.atomic = atomic(remote, swap, compare),
            Operation::FetchAdd { remote, add } => header.atomic = atomic(remote, add, 0),
            _ => {}
        }
        let ends = position.ends_message();
        // Only a message that consumes a receive can solicit an event (IBA 9.2.3).
        let takes_receive = wqe.operation.0.takes_receive();
        header.bth.solicited_event = ends && takes_receive && wqe.flags.contains(SendFlags::SOLICITED);
        header.bth.pad = (payload.wrapping_neg() & 3) as u8;
        let limited = self.uses_credits(hca) && self.requester.exceeds_lsn(wqe);
        header.bth.ack_request = self.kind.is_reliable()
            && (ends
                || limited
                || self.needs_ack_for_window(hca)
                || self.requester.packets_since_ack_request + 1 >= hca.settings.ack_request_interval);
        if self.kind == QpType::XrcInitiator {
            header.xrceth = Some(XrcEth(wqe.srqn));
        }
        let mut addressing = self.addressing;
        let mut service_level = self.attributes.address_vector.service_level;
        if self.kind.is_datagram() {
            let vector = hca.objects.address_handles.get(wqe.datagram.ah).map(|found| found.vector);
            let vector = vector.unwrap_or_default();
            service_level = vector.service_level;
            let key = wqe.datagram.remote_qkey;
            let queue_key = if key.is_controlled() { self.attributes.qkey } else { key };
            header.deth = Some(Deth { qkey: queue_key, source_qp: self.qpn });
            header.bth.destination_qp = wqe.datagram.remote_qpn;
            header.bth.ack_request = self.kind == QpType::Gsi;
            let remote = wqe.datagram.remote_qpn;
            addressing = crate::core::addressing::address_headers(hca, &vector, self.qpn, remote);
        }
        if payload > 0 {
            set_ecn_capable(hca, &mut addressing);
        }
        PlannedPacket {
            header,
            payload_length: payload,
            addressing,
            service_level,
            offset,
            is_response: false,
        }
    }

    /// Reads the payload of the planned packet into `into`.
    #[inline]
    pub(crate) fn fill_request_payload(
        &self,
        hca: &HcaState,
        ctx: &Context<'_>,
        plan: &PlannedPacket,
        into: &mut [u8],
    ) -> Result<(), (CompletionStatus, Reason)> {
        let wqe = &self.requester.wqes[self.requester.wqe_index];
        if wqe.is_inline() {
            let at = plan.offset as usize;
            into.copy_from_slice(&wqe.inline_data[at..at + into.len()]);
            return Ok(());
        }
        let Some(pd) = self.pd else { return Ok(()) };
        hca.gather(ctx, pd, &wqe.sges, plan.offset, into)
            .map_err(|error| (CompletionStatus::LocalProtectionError, Reason::LocalAccess(error)))
    }

    /// Advances the requester after the planned packet was sent.
    pub(crate) fn on_request_sent(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        plan: &PlannedPacket,
    ) {
        let wqe = &mut self.requester.wqes[self.requester.wqe_index];
        let psn = self.requester.next_psn;
        let again = psn.is_before(self.requester.next_new_psn);
        let next = match (wqe.operation.0, plan.header.reth) {
            (Operation::Read { .. }, Some(reth)) => {
                psn.plus(self.attributes.path_mtu.packets(reth.dma_length))
            }
            _ => psn.plus(1),
        };
        let id = wqe.wr_id;
        self.requester.outstanding_rd_atomic += u32::from(wqe.is_read_or_atomic());
        match next == wqe.end_psn() {
            true => self.requester.wqe_index += 1,
            false => wqe.has_parts = matches!(wqe.operation.0, Operation::Read { .. }),
        }
        self.requester.next_psn = next;
        if self.requester.next_new_psn.is_before(next) {
            self.requester.next_new_psn = next;
        }
        hca.counters.retransmitted_pkts += u64::from(again);
        self.requester.packets_since_ack_request = match plan.header.bth.ack_request {
            true => 0,
            false => self.requester.packets_since_ack_request + 1,
        };
        self.update_window(hca, false);
        self.record_paced_send(ctx, plan);
        self.emit_sent(hca, ctx, plan, Some(id), again);
        if self.kind.is_reliable() {
            if self.requester.ack_deadline.is_none() {
                self.restart_ack_timer(hca, ctx);
            }
        } else {
            self.requester.unacked_psn = next;
            self.retire_wqes(hca, ctx);
        }
    }
}
