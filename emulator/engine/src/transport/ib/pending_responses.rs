//! Pending responses: builds ACKs, NAKs, READ responses and atomic responses in the order of the requests.

use super::QueuePair;
use super::pacing::set_ecn_capable;
use super::planned_packet::PlannedPacket;
use super::responder_state::{PendingResponse, ReadInProgress};
use crate::core::control_packets::{Body, ControlPacket};
use crate::core::hca_state::HcaState;
use crate::{
    Context, DropReason, EndToEndCredits, Event, PayloadMode, Placement, QpState, QpType, RequestError,
    WriterRole,
};
use alloc::vec;
use core::time::Duration;
use softhca_queue::AckPath;
use softhca_types::AccessFlags;
use softhca_wire::{
    AddressHeaders, Aeth, AtomicAckEth, Bth, Credits, ImmOrInvalidate, Opcode, Operation, Position, Psn,
    Syndrome, TransportHeader,
};

/// The time for which a READ reads memory, unless the placement is in order.
const READ_TIME: Duration = Duration::from_micros(1);

impl QueuePair {
    /// The next response packet, if the rate allows it.
    pub(crate) fn plan_response(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
    ) -> Option<PlannedPacket> {
        let carries =
            matches!(self.responder.pending_responses.front()?, PendingResponse::ReadResponse { .. });
        if carries && !(self.may_send_now(hca, ctx) && self.has_read_memory(hca, ctx)) {
            return None;
        }
        let response = self.responder.pending_responses.front()?;
        let service = self.kind.service();
        let header = |operation, position, psn| {
            let opcode = Opcode::new(service, operation, position, ImmOrInvalidate::None);
            let opcode = opcode.expect("a reliable service has all response opcodes");
            TransportHeader::new(Bth::new(opcode, self.attributes.dest_qpn, psn))
        };
        let (header, payload, offset) = match *response {
            PendingResponse::Ack { psn, syndrome, msn } => {
                let mut header = header(Operation::Acknowledge, Position::Only, psn);
                header.aeth = Some(Aeth { syndrome, msn });
                (header, 0, 0)
            }
            PendingResponse::AtomicResponse { psn, original, msn, .. } => {
                let mut header = header(Operation::AtomicAcknowledge, Position::Only, psn);
                header.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn });
                header.atomic_ack = Some(AtomicAckEth(original));
                (header, 0, 0)
            }
            PendingResponse::ReadResponse { first, next, packets, reth: remote, msn, .. } => {
                let index = next.since(first);
                let position = Position::of(index, packets);
                let mtu = self.attributes.path_mtu.bytes();
                let offset = u64::from(index) * u64::from(mtu);
                let payload = (u64::from(remote.dma_length) - offset).min(u64::from(mtu)) as u32;
                let mut header = header(Operation::ReadResponse, position, next);
                header.bth.pad = (payload.wrapping_neg() & 3) as u8;
                if position != Position::Middle {
                    header.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn });
                }
                (header, payload, offset)
            }
        };
        let mut header = header;
        if let Some(Aeth { syndrome: Syndrome::Ack(code), .. }) = &mut header.aeth {
            *code = self.advertised_credits(hca);
        }
        let mut addressing = self.addressing;
        if payload > 0 {
            set_ecn_capable(hca, &mut addressing);
        }
        let service_level = self.attributes.address_vector.service_level;
        Some(PlannedPacket {
            header,
            payload_length: payload,
            addressing,
            service_level,
            offset,
            is_response: true,
        })
    }

    /// Whether the READ at the front has read memory, which takes time unless the placement is in order. READs of a queue
    /// pair read one after the other. If not, a timer schedules the queue pair.
    fn has_read_memory(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>) -> bool {
        if hca.settings.placement == Placement::InOrder {
            return true;
        }
        let qpn = self.qpn;
        let read = *self.responder.read_in_progress.get_or_insert_with(|| {
            // A READ sees the data of earlier requests of its queue pair.
            ctx.memory.order(qpn, WriterRole::Responder);
            let since = ctx.memory.start_read(ctx.now);
            ReadInProgress { since, ready_at: ctx.now.plus(READ_TIME) }
        });
        if read.ready_at <= ctx.now {
            return true;
        }
        if self.pacing_timer_at != Some(read.ready_at) {
            self.pacing_timer_at = Some(read.ready_at);
            hca.pacing_timers.push(read.ready_at, self.qpn);
        }
        false
    }

    /// The credits to advertise: the number of posted receives. Receives of a shared receive queue do not count.
    fn advertised_credits(&self, hca: &HcaState) -> u8 {
        match (hca.settings.end_to_end_credits, &self.responder.ring) {
            (EndToEndCredits::On, Some(ring)) => ring.pending().map_or(Credits::UNUSED, Credits::encode),
            _ => Credits::UNUSED,
        }
    }

    /// Reads the payload of the planned response into `into`.
    #[inline]
    pub(crate) fn fill_response_payload(
        &self,
        hca: &HcaState,
        ctx: &Context<'_>,
        plan: &PlannedPacket,
        into: &mut [u8],
    ) -> Result<(), RequestError> {
        let Some(PendingResponse::ReadResponse { reth: remote, pd, .. }) =
            self.responder.pending_responses.front()
        else {
            return Ok(());
        };
        let address = remote.virtual_address.wrapping_add(plan.offset);
        let length = into.len() as u32;
        let target = hca
            .objects
            .protection
            .check_remote_access(*pd, self.qpn, remote.rkey, address, length, AccessFlags::REMOTE_READ)
            .map_err(RequestError::ReadAccess)?;
        let since = self.responder.read_in_progress.map_or(0, |read| read.since);
        ctx.memory
            .sample(target.memory, target.offset, into, since)
            .map_err(|fault| RequestError::ReadAccess(target.to_access_error(fault)))
    }

    /// Advances the queue after the planned response was sent.
    pub(crate) fn on_response_sent(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        plan: &PlannedPacket,
    ) {
        let again = match self.responder.pending_responses.front_mut() {
            Some(PendingResponse::ReadResponse { first, next, packets, is_duplicate: again, .. }) => {
                *next = next.plus(1);
                let again = *again;
                if next.since(*first) == *packets {
                    self.responder.read_in_progress = None;
                    self.responder.pending_responses.pop_front();
                }
                again
            }
            Some(PendingResponse::AtomicResponse { is_duplicate: again, .. }) => {
                let again = *again;
                self.responder.pending_responses.pop_front();
                again
            }
            _ => {
                self.responder.pending_responses.pop_front();
                false
            }
        };
        self.record_paced_send(ctx, plan);
        self.emit_sent(hca, ctx, plan, None, again);
    }

    /// Rejects the READ whose response cannot be built: the region or its memory no longer exists.
    pub(crate) fn fail_response(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        plan: &PlannedPacket,
        why: RequestError,
    ) {
        self.responder.pending_responses.clear();
        self.responder.read_in_progress = None;
        self.reject_request(hca, ctx, plan.header.bth.psn, why);
    }

    /// Hands the queued ACKs to the HCA. The application has already seen the data and may destroy the queue pair
    /// before the port can send. Responses from the first READ on are discarded.
    pub(crate) fn detach_acks(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>) {
        while let Some(PendingResponse::Ack { .. } | PendingResponse::AtomicResponse { .. }) =
            self.responder.pending_responses.front()
            && let Some(plan) = self.plan_response(hca, ctx)
        {
            let retransmission = matches!(
                self.responder.pending_responses.pop_front(),
                Some(PendingResponse::AtomicResponse { is_duplicate: true, .. })
            );
            let (qpn, body) = (self.qpn, Body::Reserved(0));
            let PlannedPacket { header, addressing, service_level, .. } = plan;
            let packet = ControlPacket { qpn, addressing, service_level, header, body, retransmission };
            hca.egress.control_packets.push(ctx, packet);
        }
        self.responder.pending_responses.clear();
        self.responder.read_in_progress = None;
    }

    /// A connection begins: from now on its ACKs are recorded.
    pub(crate) fn connect_ack_records(&self, hca: &HcaState) {
        if self.kind.is_reliable() {
            let AddressHeaders { source, destination, traffic_class, flow_label, .. } = self.addressing;
            hca.processes.record_path(&AckPath {
                qpn: self.qpn,
                dest_qpn: self.attributes.dest_qpn,
                is_xrc: self.kind.service() != QpType::Rc.service(),
                source,
                destination,
                traffic_class,
                service_level: self.attributes.address_vector.service_level,
                flow_label,
            });
        }
    }

    /// Records that everything up to `psn` is acknowledged, before the application can see it. An ACK behind the response
    /// to a READ or an atomic cannot be sent without it.
    #[inline]
    pub(crate) fn record_ack(&self, hca: &HcaState, psn: Psn) {
        let is_ack = |response: &PendingResponse| matches!(response, PendingResponse::Ack { .. });
        let responses = &self.responder.pending_responses;
        if self.kind.is_reliable() && (responses.is_empty() || responses.iter().all(is_ack)) {
            hca.processes.record_ack(self.qpn, psn, self.responder.msn);
        }
    }

    /// The connection ends. If its last ACK waits for the port, the record stays until another connection has the QPN.
    pub(crate) fn release_ack_record(&self, hca: &HcaState) {
        if self.responder.pending_responses.is_empty() {
            hca.processes.clear_ack(self.qpn);
        }
    }

    /// Hands what was posted on an unreliable service to the HCA, because the queue pair is about to be destroyed and
    /// its memory may follow. No peer would ask for these packets again.
    pub(crate) fn detach_requests(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>) {
        if self.kind.is_reliable() || self.state != QpState::ReadyToSend {
            return;
        }
        // A rate that outlives its queue pair would need a timer of its own.
        self.requester.rate_control = None;
        while let Some(plan) = self.plan_request(hca, ctx) {
            if !hca.egress.control_packets.has_room() {
                let reason = DropReason::QpDestroyed;
                return ctx.emit(Event::PacketDropped { qp: self.qpn, packet: None, reason });
            }
            let length = plan.payload_length as usize + usize::from(plan.header.bth.pad);
            let body = if hca.settings.payload_mode == PayloadMode::Elided {
                Body::ElidedPayload(length)
            } else {
                let mut bytes = vec![0; length];
                if !self.fill_payload(hca, ctx, &plan, &mut bytes[..plan.payload_length as usize]) {
                    continue;
                }
                Body::Payload(bytes)
            };
            self.on_request_sent(hca, ctx, &plan);
            let (qpn, retransmission) = (self.qpn, false);
            let PlannedPacket { header, addressing, service_level, .. } = plan;
            let packet = ControlPacket { qpn, addressing, service_level, header, body, retransmission };
            hca.egress.control_packets.push(ctx, packet);
        }
    }

    /// A new connection starts: its peer must not receive the orphaned ACKs of an earlier one.
    pub(crate) fn discard_orphaned_acks(&self, hca: &mut HcaState) {
        let (port, peer) = (self.addressing.destination, self.attributes.dest_qpn);
        hca.egress.control_packets.discard(|packet| {
            packet.addressing.destination == port && packet.header.bth.destination_qp == peer
        });
    }
}
