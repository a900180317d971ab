//! The straight path: RC messages of one packet while nothing else is in progress, as TCP has header prediction.
//!
//! It acts as requester, responder and completer do, in their order and with their events. It decides before it changes
//! anything: every packet that is not the common case is left to them.

use super::QueuePair;
use super::responder_state::PendingResponse;
use super::transmit::Admission;
use crate::core::hca_state::HcaState;
use crate::{Context, EndToEndCredits, Event, Hca, PacketSummary, PayloadMode, Placement, PortState};
use crate::{PdId, QpState, QpType, RequestError, Settings};
use softhca_types::{
    AccessFlags, Completion, CompletionFlags, CompletionOpcode, CompletionStatus, Operation, ReceivedRoute,
    SendFlags, Sge,
};
use softhca_wire::{
    AddressHeaders, Aeth, Bth, Ecn, ICRC_LEN, ImmOrInvalidate, Immediate, Opcode, PartitionKey, Psn, Qpn,
    Reth, Syndrome,
};

impl Settings {
    /// Whether a device with these settings has a straight path.
    pub(crate) fn allow_straight_path(&self) -> bool {
        self.straight_path
            && self.payload_mode == PayloadMode::Carried
            && self.placement == Placement::InOrder
            && self.end_to_end_credits == EndToEndCredits::Off
            && self.congestion.rate_control.is_none()
    }
}

impl HcaState {
    /// Whether queue pairs may take the straight path now.
    #[inline]
    pub(super) fn has_straight_path(&self) -> bool {
        self.allows_straight_path
            && self.faults.is_none()
            && self.peers.windows.is_empty()
            && self.health.port_state == PortState::Active
    }
}

/// Where the straight path builds packets: a batch for the driver, or a run for a process of the host.
pub(super) trait PacketSpace {
    /// Whether a packet of this size joins. If not, the queue pair is scheduled or blocked.
    fn admit(&mut self, qp: &mut QueuePair, hca: &mut HcaState, packet: Extent) -> Admission;
    /// The bytes of the packet that was admitted.
    fn bytes(&mut self, size: usize) -> &mut [u8];
    /// Adds the packet in these bytes. Returns whether no other follows it.
    fn add(&mut self, size: usize, is_response: bool) -> bool;
}

/// The size of a packet.
#[derive(Clone, Copy)]
pub(super) struct Extent {
    /// Bytes from the BTH to the ICRC.
    pub size: usize,
    pub payload: usize,
    pub is_response: bool,
}

impl QueuePair {
    /// The one place that decides whether the straight path applies to a queue pair.
    #[inline]
    pub(super) fn takes_straight_path(&self, hca: &HcaState) -> bool {
        self.state == QpState::ReadyToSend && self.kind == QpType::Rc && hca.has_straight_path()
    }

    /// Adds messages of one packet and ACKs. `None` leaves the next packet to the general path.
    #[inline]
    pub(super) fn fill_straight(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        space: &mut impl PacketSpace,
    ) -> Option<Admission> {
        loop {
            let is_request = match self.responses_last || self.responder.pending_responses.is_empty() {
                true => self.has_straight_request(hca, ctx)?,
                false => false,
            };
            let (size, end) = if is_request {
                self.add_straight_request(hca, ctx, space)?
            } else if self.responder.pending_responses.is_empty() {
                return Some(Admission::Waits);
            } else {
                self.add_straight_ack(hca, ctx, space)?
            };
            if end != Admission::Joins {
                return Some(end);
            }
            if space.add(size, !is_request) {
                self.schedule_if_pending(hca, ctx);
                return Some(Admission::Waits);
            }
        }
    }

    /// Whether a request waits; `None` if the general path must send it.
    #[inline]
    fn has_straight_request(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>) -> Option<bool> {
        let requester = &self.requester;
        // Nothing is retransmitted, no READ or atomic is outstanding, no RNR wait is in effect.
        if requester.next_psn != requester.next_new_psn
            || requester.outstanding_rd_atomic > 0
            || requester.rnr_wait_until.is_some()
        {
            return None;
        }
        if requester.wqe_index == requester.wqes.len() {
            let is_empty = requester.ring.as_ref().is_none_or(|ring| matches!(ring.has_pending(), Ok(false)));
            if is_empty || !self.fetch_wqe(hca, ctx) {
                return (self.state == QpState::ReadyToSend).then_some(false);
            }
        }
        let requester = &self.requester;
        let wqe = requester.wqes.get(requester.wqe_index)?;
        let is_straight = wqe.outcome.is_none()
            && wqe.packets == 1
            && wqe.first_psn == requester.next_psn
            && (wqe.is_inline() || wqe.sges.len() <= 1)
            && match wqe.operation.0 {
                Operation::Write { .. } => true,
                Operation::Send(_) => wqe.operation.0.imm_or_invalidate().0 != ImmOrInvalidate::Invalidate,
                _ => false,
            }
            && requester.next_psn.since(requester.unacked_psn) < super::requester::MAX_OUTSTANDING_PSNS
            && self.state == QpState::ReadyToSend;
        is_straight.then_some(true)
    }

    /// Adds the next request to the batch, if it joins.
    #[inline]
    fn add_straight_request(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        space: &mut impl PacketSpace,
    ) -> Option<(usize, Admission)> {
        let wqe = &self.requester.wqes[self.requester.wqe_index];
        let payload = wqe.length as usize;
        let source = match wqe.sges.first().filter(|_| !wqe.is_inline() && payload > 0) {
            Some(sge) => {
                let checked = hca.objects.protection.check_local_access(
                    self.pd?,
                    sge,
                    0,
                    sge.length,
                    AccessFlags::empty(),
                );
                Some(checked.ok()?)
            }
            None => None,
        };
        let (kind, word) = wqe.operation.0.imm_or_invalidate();
        let has_immediate = kind == ImmOrInvalidate::Immediate;
        let remote = match wqe.operation.0 {
            Operation::Write { remote, .. } => Some(remote),
            _ => None,
        };
        let opcode = match (remote.is_some(), has_immediate) {
            (false, false) => Opcode::RC_SEND_ONLY,
            (false, true) => Opcode::RC_SEND_ONLY_IMM,
            (true, false) => Opcode::RC_WRITE_ONLY,
            (true, true) => Opcode::RC_WRITE_ONLY_IMM,
        };
        let psn = self.requester.next_psn;
        let mut bth = Bth::new(opcode, self.attributes.dest_qpn, psn);
        bth.ack_request = true;
        bth.pad = (payload.wrapping_neg() & 3) as u8;
        // Only a message that consumes a receive can solicit an event (IBA 9.2.3).
        bth.solicited_event = (remote.is_none() || has_immediate) && wqe.flags.contains(SendFlags::SOLICITED);
        let wr_id = wqe.wr_id;
        let header = opcode.header_length();
        let size = header + payload + usize::from(bth.pad) + ICRC_LEN;
        let admission = space.admit(self, hca, Extent { size, payload, is_response: false });
        if admission != Admission::Joins {
            return Some((size, admission));
        }
        let packet = space.bytes(size);
        bth.emit(packet);
        let mut at = Bth::LEN;
        if let Some(remote) = remote {
            let (virtual_address, dma_length) = (remote.address, payload as u32);
            Reth { virtual_address, rkey: remote.rkey, dma_length }.emit(&mut packet[at..]);
            at += Reth::LEN;
        }
        if has_immediate {
            Immediate(word).emit(&mut packet[at..]);
        }
        match source {
            Some(located) => {
                let into = &mut packet[header..header + payload];
                // The general path fails the request.
                ctx.memory.read(located.memory, located.offset, into).ok()?;
            }
            None => {
                let wqe = &self.requester.wqes[self.requester.wqe_index];
                packet[header..header + payload].copy_from_slice(&wqe.inline_data[..payload]);
            }
        }
        packet[header + payload..].fill(0);
        let requester = &mut self.requester;
        requester.wqe_index += 1;
        requester.next_psn = psn.plus(1);
        requester.next_new_psn = requester.next_psn;
        requester.packets_since_ack_request = 0;
        self.count_straight_sent(hca, ctx, &bth, payload, Some(wr_id));
        if self.requester.ack_deadline.is_none() {
            self.restart_ack_timer(hca, ctx);
        }
        Some((size, admission))
    }

    /// Adds the oldest response to the batch, if it is an ACK or a NAK and joins.
    #[inline]
    fn add_straight_ack(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        space: &mut impl PacketSpace,
    ) -> Option<(usize, Admission)> {
        let &PendingResponse::Ack { psn, syndrome, msn } = self.responder.pending_responses.front()? else {
            return None;
        };
        const SIZE: usize = Bth::LEN + Aeth::LEN + ICRC_LEN;
        let bth = Bth::new(Opcode::RC_ACKNOWLEDGE, self.attributes.dest_qpn, psn);
        let admission = space.admit(self, hca, Extent { size: SIZE, payload: 0, is_response: true });
        if admission == Admission::Joins {
            let packet = space.bytes(SIZE);
            bth.emit(packet);
            Aeth { syndrome, msn }.emit(&mut packet[Bth::LEN..]);
            packet[SIZE - ICRC_LEN..].fill(0);
            self.responder.pending_responses.pop_front();
            hca.counters.sent_pkts += 1;
            if hca.is_observed {
                let packet = PacketSummary {
                    syndrome: Some(syndrome),
                    ..summary(&bth, 0, &self.addressing.destination)
                };
                ctx.emit(Event::PacketSent { qp: self.qpn, packet, wr_id: None, retransmission: false });
            }
        }
        Some((SIZE, admission))
    }

    #[inline]
    fn count_straight_sent(
        &self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        bth: &Bth,
        payload: usize,
        wr_id: Option<u64>,
    ) {
        hca.counters.sent_pkts += 1;
        hca.counters.sent_bytes += payload as u64;
        if hca.is_observed {
            let packet = summary(bth, payload, &self.addressing.destination);
            ctx.emit(Event::PacketSent { qp: self.qpn, packet, wr_id, retransmission: false });
        }
    }

    /// Counts a packet that the straight path takes.
    #[inline]
    fn count_straight_received(
        &self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        bth: &Bth,
        payload: usize,
        syndrome: Option<Syndrome>,
    ) {
        hca.counters.rcvd_pkts += 1;
        hca.counters.rcvd_bytes += payload as u64;
        if hca.is_observed {
            let packet = PacketSummary { syndrome, ..summary(bth, payload, &self.addressing.destination) };
            ctx.emit(Event::PacketReceived { qp: self.qpn, packet });
        }
    }

    /// Handles an ACK without READs, atomics or retransmissions in progress.
    #[inline]
    fn receive_straight_ack(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        bth: &Bth,
        body: &[u8],
    ) -> bool {
        let requester = &self.requester;
        let Ok(Aeth { syndrome: syndrome @ Syndrome::Ack(_), .. }) = Aeth::parse(body) else { return false };
        if body.len() != Aeth::LEN
            || bth.pad != 0
            || requester.outstanding_rd_atomic > 0
            || requester.next_psn != requester.next_new_psn
            || requester.rnr_wait_until.is_some()
            || !requester.is_outstanding_psn(bth.psn)
        {
            return false;
        }
        self.count_straight_received(hca, ctx, bth, 0, Some(syndrome));
        self.requester.unacked_psn = bth.psn.plus(1);
        self.on_progress(hca, ctx);
        self.retire_wqes(hca, ctx);
        true
    }

    /// Handles a SEND of one packet with the expected PSN.
    #[inline]
    fn receive_straight_send(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        bth: &Bth,
        payload: &[u8],
    ) -> bool {
        let Some(pd) = self.pd else { return false };
        let Some(recv_cq) = self.recv_cq else { return false };
        if self.srq.is_some() || self.responder.receive_wqe.is_some() {
            return false;
        }
        let Some(ring) = &mut self.responder.ring else { return false };
        let mut wqe = self.responder.spare_receive_wqes.pop().unwrap_or_default();
        let Ok(Some(wr_id)) = ring.dequeue(&mut wqe.sges) else {
            // The general path sends an RNR NAK.
            self.responder.spare_receive_wqes.push(wqe);
            return false;
        };
        wqe.wr_id = wr_id;
        self.count_straight_received(hca, ctx, bth, payload.len(), None);
        let placed = match wqe.sges[..] {
            [sge] => {
                wqe.capacity = sge.length.into();
                self.place_in(hca, ctx, pd, bth.psn, &sge, payload)
            }
            _ => {
                wqe.capacity = wqe.sges.iter().map(|sge| u64::from(sge.length)).sum();
                false
            }
        };
        if !placed {
            self.responder.receive_wqe = Some(wqe);
            match self.place_payload(hca, ctx, bth.psn, 0, payload) {
                Ok(_) => wqe = self.responder.receive_wqe.take().expect("it was put there"),
                Err(error) => {
                    self.reject_request(hca, ctx, bth.psn, error);
                    return true;
                }
            }
        }
        self.responder.increment_msn();
        self.record_ack(hca, bth.psn);
        let mut flags = CompletionFlags::empty();
        flags.set(CompletionFlags::SOLICITED, bth.solicited_event);
        flags.set(CompletionFlags::GRH, hca.settings.profile.grh_flag_on_connections);
        let completion = Completion {
            wr_id,
            status: CompletionStatus::Success,
            opcode: CompletionOpcode::Receive,
            flags,
            byte_len: payload.len() as u32,
            imm_data: 0,
            qpn: self.qpn,
            src_qp: Qpn::default(),
            service_level: 0,
            route: ReceivedRoute::default(),
            vendor_error: 0,
            timestamp: 0,
        };
        hca.post_success(ctx, recv_cq, completion);
        self.responder.spare_receive_wqes.push(wqe);
        self.accept_straight(hca, bth);
        true
    }

    /// Places a payload in one SGE. Returns false, without an effect that matters, if that is an error.
    #[inline]
    fn place_in(
        &self,
        hca: &HcaState,
        ctx: &mut Context<'_>,
        pd: PdId,
        psn: Psn,
        sge: &Sge,
        payload: &[u8],
    ) -> bool {
        let (length, qp) = (payload.len() as u32, self.qpn);
        if length == 0 || length > sge.length {
            return length == 0;
        }
        let required = AccessFlags::LOCAL_WRITE;
        let Ok(at) = hca.objects.protection.check_local_access(pd, sge, 0, length, required) else {
            return false;
        };
        if ctx.memory.write(at.memory, at.offset, payload).is_err() {
            return false;
        }
        if hca.is_observed {
            let (key, address) = (at.key, sge.address);
            ctx.emit(Event::MemoryWritten { qp, key, address, length, psn });
        }
        true
    }

    /// Handles a WRITE of one packet with the expected PSN.
    #[inline]
    fn receive_straight_write(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        bth: &Bth,
        reth: Reth,
        payload: &[u8],
    ) -> bool {
        let required = AccessFlags::REMOTE_WRITE;
        if payload.is_empty()
            || reth.dma_length as usize != payload.len()
            || !self.attributes.access_flags.contains(required)
        {
            return false;
        }
        let Some(pd) = self.pd else { return false };
        let Reth { virtual_address: address, rkey, dma_length: length } = reth;
        let checked =
            hca.objects.protection.check_remote_access(pd, self.qpn, rkey, address, length, required);
        let Ok(target) = checked else { return false };
        self.count_straight_received(hca, ctx, bth, payload.len(), None);
        hca.counters.rx_write_requests += 1;
        if let Err(fault) = ctx.memory.write(target.memory, target.offset, payload) {
            let error = RequestError::Access(target.to_access_error(fault));
            self.reject_request(hca, ctx, bth.psn, error);
            return true;
        }
        if hca.is_observed {
            let (qp, psn, key) = (self.qpn, bth.psn, target.key);
            ctx.emit(Event::MemoryWritten { qp, key, address, length, psn });
        }
        self.responder.increment_msn();
        self.record_ack(hca, bth.psn);
        self.accept_straight(hca, bth);
        true
    }

    /// A request of one packet is complete.
    #[inline]
    fn accept_straight(&mut self, hca: &mut HcaState, bth: &Bth) {
        self.responder.nak_sent = false;
        self.responder.expected_psn = bth.psn.plus(1);
        if bth.ack_request {
            self.queue_ack(hca, bth.psn);
        }
        if !self.responder.pending_responses.is_empty() {
            self.schedule_transmit(hca);
        }
    }
}

fn summary(bth: &Bth, payload: usize, peer: &core::net::IpAddr) -> PacketSummary {
    PacketSummary {
        opcode: bth.opcode,
        psn: bth.psn,
        dest_qp: bth.destination_qp,
        payload_length: payload as u32,
        syndrome: None,
        peer: *peer,
    }
}

impl Hca {
    /// Receives a packet on the straight path. Returns false, without an effect, if the general path must take it.
    #[inline]
    pub(super) fn receive_straight(
        &mut self,
        ctx: &mut Context<'_>,
        addressing: &AddressHeaders,
        bytes: &[u8],
    ) -> bool {
        let Ok(bth) = Bth::parse(bytes) else { return false };
        let Some(qp) = self.queue_pairs.get_mut(bth.destination_qp.value()) else { return false };
        let is_straight = addressing.source == qp.addressing.destination
            && addressing.destination == qp.addressing.source
            && addressing.ecn() != Ecn::CongestionExperienced
            && qp.takes_straight_path(&self.state)
            && qp.receive_straight(&mut self.state, ctx, &bth, &bytes[Bth::LEN..]);
        if is_straight {
            self.handle_cq_overflows(ctx);
        }
        is_straight
    }
}

impl QueuePair {
    /// Receives a packet on the straight path, as far as it is one of its packets.
    #[inline]
    pub(super) fn receive_straight(
        &mut self,
        state: &mut HcaState,
        ctx: &mut Context<'_>,
        bth: &Bth,
        body: &[u8],
    ) -> bool {
        if !PartitionKey::DEFAULT.matches(bth.pkey) {
            return false;
        }
        let (reth, body) = match bth.opcode {
            Opcode::RC_ACKNOWLEDGE => return self.receive_straight_ack(state, ctx, bth, body),
            Opcode::RC_SEND_ONLY => (None, body),
            Opcode::RC_WRITE_ONLY => match Reth::parse(body) {
                Ok(reth) => (Some(reth), &body[Reth::LEN..]),
                Err(_) => return false,
            },
            _ => return false,
        };
        let mtu = self.attributes.path_mtu.bytes() as usize;
        let Some(length) = body.len().checked_sub(bth.pad.into()) else { return false };
        if body.len() % 4 != 0
            || length > mtu
            || bth.psn != self.responder.expected_psn
            || self.responder.in_progress_message.is_some()
        {
            return false;
        }
        match reth {
            None => self.receive_straight_send(state, ctx, bth, &body[..length]),
            Some(reth) => self.receive_straight_write(state, ctx, bth, reth, &body[..length]),
        }
    }
}
