//! The requester: takes work from the send queue and turns it into packets.

use super::QueuePair;
use super::pacing::set_ecn_capable;
use super::planned_packet::PlannedPacket;
use super::requester_state::{SendWqe, WqeOperation};
use crate::hca_state::HcaState;
use crate::{AsyncEvent, Context, DeviceLimits, EndToEndCredits, Event, QpState, QpType, Reason};
use softhca_queue::{
    AccessFlags, CompletionStatus, Operation, Payload, RemoteAddress, SendFlags, SendImmOrInvalidate,
};
use softhca_wire as wire;
use softhca_wire::{
    AtomicEth, Bth, Deth, Ieth, ImmOrInvalidate, Immediate, Opcode, Position, Psn, Reth, TransportHeader,
    XrcEth,
};

/// The most PSNs that may be outstanding: beyond half the number space old and new cannot be told apart.
const MAX_OUTSTANDING_PSNS: u32 = Psn::SPACE / 2 - 1;

/// Whether the service of a queue pair has the operation.
fn supports(kind: QpType, operation: &Operation) -> bool {
    match operation {
        Operation::Send(SendImmOrInvalidate::Invalidate(_)) => kind.is_reliable(),
        Operation::Send(_) => true,
        Operation::Write { .. } => !kind.is_datagram(),
        Operation::Read { .. } | Operation::CompareSwap { .. } | Operation::FetchAdd { .. } => {
            kind.is_reliable()
        }
        Operation::BindMemoryWindow(_) | Operation::LocalInvalidate { .. } => !kind.is_datagram(),
    }
}

impl QueuePair {
    /// The next request packet, if one may be sent now.
    pub(crate) fn plan_request(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
    ) -> Option<PlannedPacket> {
        loop {
            if !self.state.accepts_responses() || self.requester.rnr_wait_until.is_some() {
                return None;
            }
            if self.requester.wqe_index == self.requester.wqes.len() {
                if self.state == QpState::SendQueueDrained || !self.fetch_wqe(card, ctx) {
                    self.raise_drained(ctx);
                    return None;
                }
                // What was taken may have failed at once, and the queue pair with it.
                continue;
            }
            let work = &self.requester.wqes[self.requester.wqe_index];
            match work.outcome {
                Some((CompletionStatus::Success, _)) => {
                    self.requester.wqe_index += 1;
                    continue;
                }
                Some(_) => return None,
                None => {}
            }
            let started = self.requester.is_started(work);
            if !started && self.state == QpState::SendQueueDrained {
                self.raise_drained(ctx);
                return None;
            }
            if !started && work.flags.contains(SendFlags::FENCE) && self.requester.outstanding_rd_atomic > 0 {
                return None;
            }
            if work.is_local_operation() {
                self.execute_local_operation(card, ctx);
                continue;
            }
            if self.requester.next_psn == work.first_psn
                && let Some(failure) = self.check_wqe_access(card, work)
            {
                self.fail_current_wqe(card, ctx, failure);
                return None;
            }
            let work = &self.requester.wqes[self.requester.wqe_index];
            let is_read = matches!(work.operation.0, Operation::Read { .. });
            let needed = if is_read { work.end_psn().since(self.requester.next_psn) } else { 1 };
            let outstanding = self.requester.next_psn.since(self.requester.unacked_psn);
            if self.kind.is_reliable() && outstanding > 0 && outstanding + needed > MAX_OUTSTANDING_PSNS {
                return None;
            }
            // Beyond the peer's receives one packet asks, once everything before is answered (IBA 9.7.7.2.5).
            let asks = [self.requester.next_psn, self.requester.unacked_psn] == [work.first_psn; 2];
            if self.uses_credits(card) && self.requester.exceeds_lsn(work) && !asks {
                return None;
            }
            if work.is_read_or_atomic()
                && self.requester.outstanding_rd_atomic >= u32::from(self.attributes.max_rd_atomic)
            {
                return None;
            }
            let carries = !work.is_read_or_atomic();
            if carries && !self.may_send_now(card, ctx) {
                return None;
            }
            return Some(self.plan_request_packet(card, &self.requester.wqes[self.requester.wqe_index]));
        }
    }

    /// Whether the peer's receives limit what is sent.
    fn uses_credits(&self, card: &HcaState) -> bool {
        card.settings.end_to_end_credits == EndToEndCredits::On && self.kind.is_reliable()
    }

    /// Takes requests of one packet before their turn, so that about `packets` of them are at hand.
    pub(crate) fn prefetch_wqes(&mut self, card: &mut HcaState, ctx: &mut Context<'_>, packets: usize) {
        let is_short = |qp: &QueuePair| qp.requester.wqes.back().is_none_or(|work| work.packets == 1);
        while self.state == QpState::ReadyToSend
            && self.requester.wqes.len() - self.requester.wqe_index < packets
            && is_short(self)
            && self.fetch_wqe(card, ctx)
        {}
    }

    /// Copies the next request out of the ring and gives it its PSNs.
    fn fetch_wqe(&mut self, card: &mut HcaState, ctx: &mut Context<'_>) -> bool {
        let Some(ring) = &mut self.requester.ring else { return false };
        if matches!(ring.has_pending(), Ok(false)) {
            return false;
        }
        let mut work = self.requester.spare_wqes.pop().unwrap_or_default();
        let taken = ring.dequeue(&mut work.sges, &mut work.inline_data);
        let (size, outcome) = match taken {
            Ok(None) => {
                self.requester.spare_wqes.push(work);
                return false;
            }
            Err(why) => {
                self.requester.spare_wqes.push(work);
                self.on_corrupt_ring(card, ctx, why);
                return false;
            }
            Ok(Some(Err(_))) => {
                (work.wr_id, work.operation) = (0, WqeOperation::default());
                work.flags = SendFlags::empty();
                (0, Some((CompletionStatus::LocalQpOperationError, Reason::InvalidWqe)))
            }
            Ok(Some(Ok(request))) => {
                let size = match request.payload {
                    Payload::Inline(bytes) => bytes.len() as u64,
                    Payload::Gather(entries) => entries.iter().map(|e| u64::from(e.length)).sum(),
                };
                work.wr_id = request.wr_id;
                work.operation = WqeOperation(request.operation);
                work.flags = request.flags;
                work.datagram = request.ud;
                work.srqn = request.remote_srqn;
                (size, None)
            }
        };
        work.outcome = outcome.or_else(|| self.check_wqe(&work, size));
        work.length = if work.is_local_operation() { 0 } else { size.min(u64::from(u32::MAX)) as u32 };
        if matches!(work.operation.0, Operation::CompareSwap { .. } | Operation::FetchAdd { .. }) {
            work.length = 8;
        }
        work.first_psn = self.requester.next_wqe_psn;
        work.packets = match (work.outcome, work.operation.0) {
            (Some(_), _) | (_, Operation::BindMemoryWindow(_) | Operation::LocalInvalidate { .. }) => 0,
            (_, Operation::CompareSwap { .. } | Operation::FetchAdd { .. }) => 1,
            _ => self.attributes.path_mtu.packets(work.length),
        };
        if self.kind.is_datagram() && work.packets > 1 {
            work.packets = 1;
        }
        if work.packets > 0 {
            self.requester.ssn = (self.requester.ssn + 1) & 0xff_ffff;
            work.ssn = self.requester.ssn;
        }
        self.requester.next_wqe_psn = work.end_psn();
        ctx.emit(Event::WqeFetched {
            qp: self.qpn,
            wr_id: work.wr_id,
            operation: work.completion_operation(),
            bytes: work.length,
            first_psn: work.first_psn,
            packets: work.packets,
            first_sge: work.sges.first().copied().filter(|_| !work.is_inline()),
        });
        let failed = work.outcome.is_some();
        self.requester.wqes.push_back(work);
        if failed {
            self.retire_wqes(card, ctx);
        }
        true
    }

    /// What is wrong with a request by itself.
    fn check_wqe(&self, work: &SendWqe, size: u64) -> Option<(CompletionStatus, Reason)> {
        if !supports(self.kind, &work.operation.0) {
            return Some((CompletionStatus::LocalQpOperationError, Reason::Unsupported));
        }
        let limit = match self.kind.is_datagram() {
            true => u64::from(self.attributes.path_mtu.bytes()),
            false => u64::from(DeviceLimits::HCA.max_msg_sz),
        };
        if size > limit {
            return Some((
                CompletionStatus::LocalLengthError,
                Reason::MessageTooLong { length: size, limit },
            ));
        }
        if work.is_read_or_atomic() {
            if self.attributes.max_rd_atomic == 0 {
                return Some((CompletionStatus::LocalQpOperationError, Reason::RdAtomicDisabled));
            }
            if work.is_inline() {
                return Some((CompletionStatus::LocalQpOperationError, Reason::Unsupported));
            }
            let is_atomic = !matches!(work.operation.0, Operation::Read { .. });
            if is_atomic && size < 8 {
                return Some((
                    CompletionStatus::LocalLengthError,
                    Reason::MessageTooLong { length: 8, limit: size },
                ));
            }
        }
        None
    }

    /// What is wrong with a request at the moment when its first packet is to be sent.
    fn check_wqe_access(&self, card: &HcaState, work: &SendWqe) -> Option<(CompletionStatus, Reason)> {
        if self.kind.is_datagram() {
            let handle = work.datagram.ah;
            let known = card
                .address_handles
                .get(handle)
                .is_some_and(|found| found.client == self.client && Some(found.pd) == self.pd);
            if !known {
                return Some((CompletionStatus::LocalQpOperationError, Reason::BadAddressHandle { handle }));
            }
        }
        if work.is_inline() {
            return None;
        }
        let needs = if work.is_read_or_atomic() { AccessFlags::LOCAL_WRITE } else { AccessFlags::empty() };
        let domain = self.pd?;
        let denied = card.check_sges(domain, &work.sges, needs).err()?;
        Some((CompletionStatus::LocalProtectionError, Reason::LocalAccess(denied)))
    }

    /// Ends the request at the cursor with a local error, which is reported when its turn has come.
    pub(crate) fn fail_current_wqe(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        failure: (CompletionStatus, Reason),
    ) {
        let cursor = self.requester.wqe_index;
        if let Some(work) = self.requester.wqes.get_mut(cursor) {
            work.outcome = Some(failure);
            self.requester.next_wqe_psn = self.requester.next_psn;
        }
        self.retire_wqes(card, ctx);
    }

    /// Does the local operation at the cursor.
    fn execute_local_operation(&mut self, card: &mut HcaState, ctx: &mut Context<'_>) {
        let (number, domain) = (self.qpn, self.pd);
        let work = &mut self.requester.wqes[self.requester.wqe_index];
        let done = match (work.operation.0, domain) {
            (Operation::BindMemoryWindow(bind), Some(domain)) => {
                card.protection.bind_memory_window(domain, number, &bind).map(|_| ())
            }
            (Operation::LocalInvalidate { rkey: key }, Some(domain)) => {
                card.protection.invalidate(domain, number, key)
            }
            _ => Ok(()),
        };
        work.outcome = Some(match done {
            Ok(()) => (CompletionStatus::Success, Reason::None),
            Err(denied) => (CompletionStatus::MwBindError, Reason::MemoryWindowBind(denied)),
        });
        if done.is_ok() {
            self.requester.wqe_index += 1;
        }
        self.retire_wqes(card, ctx);
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

    /// The packet of `work` with the next PSN.
    fn plan_request_packet(&self, card: &HcaState, work: &SendWqe) -> PlannedPacket {
        let psn = self.requester.next_psn;
        let index = psn.since(work.first_psn);
        let mtu = self.attributes.path_mtu.bytes();
        let offset = u64::from(index) * u64::from(mtu);
        let rest = work.length - offset.min(u64::from(work.length)) as u32;
        let position = Position::of(index, work.packets);
        let service = self.kind.service();
        let reth = |remote: RemoteAddress, address: u64, length| {
            Some(Reth {
                virtual_address: remote.address.wrapping_add(address),
                rkey: remote.rkey,
                dma_length: length,
            })
        };
        let opcode = |operation, position, trailer| {
            Opcode::new(service, operation, position, trailer).expect("the service offers the operation")
        };
        let bth = |opcode| Bth::new(opcode, self.attributes.dest_qpn, psn);
        let trailer_of = |given| if position.ends_message() { given } else { ImmOrInvalidate::None };
        let (mut header, payload) = match work.operation.0 {
            Operation::Send(trailer) => {
                let kind = match trailer {
                    SendImmOrInvalidate::None => ImmOrInvalidate::None,
                    SendImmOrInvalidate::Immediate(_) => ImmOrInvalidate::Immediate,
                    SendImmOrInvalidate::Invalidate(_) => ImmOrInvalidate::Invalidate,
                };
                let mut header =
                    TransportHeader::new(bth(opcode(wire::Operation::Send, position, trailer_of(kind))));
                if position.ends_message() {
                    match trailer {
                        SendImmOrInvalidate::None => {}
                        SendImmOrInvalidate::Immediate(value) => header.immediate = Some(Immediate(value)),
                        SendImmOrInvalidate::Invalidate(key) => header.ieth = Some(Ieth(key.0)),
                    }
                }
                (header, rest.min(mtu))
            }
            Operation::Write { remote, imm_data: immediate } => {
                let kind =
                    if immediate.is_some() { ImmOrInvalidate::Immediate } else { ImmOrInvalidate::None };
                let mut header =
                    TransportHeader::new(bth(opcode(wire::Operation::Write, position, trailer_of(kind))));
                if position.starts_message() {
                    header.reth = reth(remote, 0, work.length);
                }
                if position.ends_message() {
                    header.immediate = immediate.map(Immediate);
                }
                (header, rest.min(mtu))
            }
            Operation::Read { remote } => {
                let mut header = TransportHeader::new(bth(opcode(
                    wire::Operation::ReadRequest,
                    Position::Only,
                    ImmOrInvalidate::None,
                )));
                header.reth = reth(remote, offset, rest);
                (header, 0)
            }
            Operation::CompareSwap { remote, compare, swap } => {
                let mut header = TransportHeader::new(bth(opcode(
                    wire::Operation::CompareSwap,
                    Position::Only,
                    ImmOrInvalidate::None,
                )));
                let RemoteAddress { address, rkey: key } = remote;
                header.atomic =
                    Some(AtomicEth { virtual_address: address, rkey: key, swap_or_add: swap, compare });
                (header, 0)
            }
            Operation::FetchAdd { remote, add } => {
                let mut header = TransportHeader::new(bth(opcode(
                    wire::Operation::FetchAdd,
                    Position::Only,
                    ImmOrInvalidate::None,
                )));
                let RemoteAddress { address, rkey: key } = remote;
                header.atomic =
                    Some(AtomicEth { virtual_address: address, rkey: key, swap_or_add: add, compare: 0 });
                (header, 0)
            }
            Operation::BindMemoryWindow(_) | Operation::LocalInvalidate { .. } => {
                unreachable!("local operations have no packets")
            }
        };
        let ends = position.ends_message() || work.is_read_or_atomic();
        // Only what takes a receive can ask for an event there (IBA 9.2.3).
        let takes_receive = match work.operation.0 {
            Operation::Send(_) => true,
            Operation::Write { imm_data: immediate, .. } => immediate.is_some(),
            _ => false,
        };
        header.bth.solicited_event = ends && takes_receive && work.flags.contains(SendFlags::SOLICITED);
        header.bth.pad = (payload.wrapping_neg() & 3) as u8;
        let limited = self.uses_credits(card) && self.requester.exceeds_lsn(work);
        header.bth.ack_request = self.kind.is_reliable()
            && (ends
                || limited
                || self.requester.packets_since_ack_request + 1 >= card.settings.ack_request_interval);
        if self.kind == QpType::XrcInitiator {
            header.xrceth = Some(XrcEth(work.srqn));
        }
        let mut envelope = self.addressing;
        let mut service_level = self.attributes.address_vector.service_level;
        if self.kind.is_datagram() {
            let vector = card.address_handles.get(work.datagram.ah).map(|found| found.vector);
            let vector = vector.unwrap_or_default();
            service_level = vector.service_level;
            let key = work.datagram.remote_qkey;
            let queue_key = if key.is_controlled() { self.attributes.qkey } else { key };
            header.deth = Some(Deth { qkey: queue_key, source_qp: self.qpn });
            header.bth.destination_qp = work.datagram.remote_qpn;
            header.bth.ack_request = self.kind == QpType::Gsi;
            envelope = crate::addressing::address_headers(
                &vector,
                card.gid(vector.sgid_index),
                self.qpn,
                work.datagram.remote_qpn,
            );
        }
        if payload > 0 {
            set_ecn_capable(card, &mut envelope);
        }
        PlannedPacket {
            header,
            payload_length: payload,
            addressing: envelope,
            service_level,
            offset,
            is_response: false,
        }
    }

    /// Reads the payload of the planned packet into `into`.
    #[inline]
    pub(crate) fn fill_request_payload(
        &self,
        card: &HcaState,
        ctx: &Context<'_>,
        plan: &PlannedPacket,
        into: &mut [u8],
    ) -> Result<(), (CompletionStatus, Reason)> {
        let work = &self.requester.wqes[self.requester.wqe_index];
        if work.is_inline() {
            let at = plan.offset as usize;
            into.copy_from_slice(&work.inline_data[at..at + into.len()]);
            return Ok(());
        }
        let Some(domain) = self.pd else { return Ok(()) };
        card.gather(ctx, domain, &work.sges, plan.offset, into)
            .map_err(|denied| (CompletionStatus::LocalProtectionError, Reason::LocalAccess(denied)))
    }

    /// The planned packet left.
    pub(crate) fn on_request_sent(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        plan: &PlannedPacket,
    ) {
        let work = &self.requester.wqes[self.requester.wqe_index];
        let psn = self.requester.next_psn;
        let again = psn.is_before(self.requester.next_new_psn);
        let is_read = matches!(work.operation.0, Operation::Read { .. });
        let next = if is_read { work.end_psn() } else { psn.plus(1) };
        let id = work.wr_id;
        if next == work.end_psn() {
            self.requester.outstanding_rd_atomic += u32::from(work.is_read_or_atomic());
            self.requester.wqe_index += 1;
        }
        self.requester.next_psn = next;
        if self.requester.next_new_psn.is_before(next) {
            self.requester.next_new_psn = next;
        }
        card.counters.retransmitted_pkts += u64::from(again);
        self.requester.packets_since_ack_request = match plan.header.bth.ack_request {
            true => 0,
            false => self.requester.packets_since_ack_request + 1,
        };
        self.record_paced_send(ctx, plan);
        self.emit_sent(card, ctx, plan, Some(id), again);
        if self.kind.is_reliable() {
            if self.requester.ack_deadline.is_none() {
                self.restart_ack_timer(card, ctx);
            }
        } else {
            self.requester.unacked_psn = next;
            self.retire_wqes(card, ctx);
        }
    }
}
