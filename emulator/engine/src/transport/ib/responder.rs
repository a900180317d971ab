//! The responder: validates a request in specification order, executes it and queues the response.

use super::QueuePair;
use super::responder_state::{InProgressMessage, PEER_WINDOW, PendingResponse, ReceivedFrom};
use crate::core::hca_state::HcaState;
use crate::{
    AccessError, AckPolicy, AsyncEvent, AtomicOperation, Context, DeviceLimits, DropReason, Event,
    PacketSummary, PdId,
};
use crate::{QpState, Reason, RequestError, SrqId, WriteCheck, WriteCount, WriteOrigin, WriterRole};
use softhca_types::{AccessFlags, Completion, CompletionFlags, CompletionOpcode, CompletionStatus};
use softhca_wire::{
    AtomicEth, ImmOrInvalidate, Operation, Position, Psn, RemoteKey, Reth, Syndrome, TransportHeader,
    TransportPacket, XrcEth,
};

/// The number of pending responses at which the responder stops to answer duplicates.
pub(crate) const MAX_PENDING_RESPONSES: usize = 512;

impl QueuePair {
    /// Handles a request of a reliable connection.
    pub(crate) fn on_request(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        transport: &TransportPacket<'_>,
        packet: PacketSummary,
    ) {
        self.raise_communication_established(ctx);
        let header = &transport.header;
        let psn = packet.psn;
        match psn.distance(self.responder.expected_psn) {
            0 => {}
            ahead if ahead > PEER_WINDOW => {
                let expected = self.responder.expected_psn;
                return self.emit_dropped(hca, ctx, packet, DropReason::BeyondWindow { expected });
            }
            ahead if ahead > 0 => {
                hca.counters.out_of_sequence += 1;
                if self.responder.nak_sent {
                    let expected = self.responder.expected_psn;
                    return self.emit_dropped(hca, ctx, packet, DropReason::NakOutstanding { expected });
                }
                let missing = self.responder.expected_psn;
                return self.reject_request(
                    hca,
                    ctx,
                    psn,
                    RequestError::PsnOutOfSequence { expected: missing, got: psn },
                );
            }
            _ => return self.on_duplicate_request(hca, ctx, transport, packet),
        }
        match self.execute_request(hca, ctx, transport) {
            Ok(packets) => {
                self.responder.nak_sent = false;
                self.responder.expected_psn = psn.plus(packets);
                if header.bth.ack_request && !packet.opcode.operation().is_read_or_atomic() {
                    self.queue_ack(hca, psn);
                }
                if !self.responder.pending_responses.is_empty() {
                    self.schedule_transmit(hca);
                }
            }
            Err(error) => self.reject_request(hca, ctx, psn, error),
        }
    }

    pub(crate) fn raise_communication_established(&mut self, ctx: &mut Context<'_>) {
        if self.state == QpState::ReadyToReceive && !self.responder.communication_established {
            self.responder.communication_established = true;
            let event = AsyncEvent::CommunicationEstablished(self.qpn);
            ctx.emit(Event::AsyncEventRaised { client: Some(self.client), event });
        }
    }

    /// Validates and executes the request with the expected PSN. Returns the number of PSNs that it consumes.
    fn execute_request(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        transport: &TransportPacket<'_>,
    ) -> Result<u32, RequestError> {
        let header = &transport.header;
        let opcode = header.bth.opcode;
        let (operation, position) = (opcode.operation(), opcode.position());
        self.check_opcode_sequence(operation, position)
            .then_some(())
            .ok_or(RequestError::OpcodeOutOfSequence { opcode })?;
        match operation {
            Operation::Send => {
                self.check_payload_length(position, transport.payload.len())?;
                self.execute_send(hca, ctx, transport)?;
                Ok(1)
            }
            Operation::Write => {
                let is_counted = hca.settings.profile.write_count == WriteCount::OnArrival
                    || self.attributes.access_flags.contains(AccessFlags::REMOTE_WRITE);
                hca.counters.rx_write_requests += u64::from(is_counted && position.starts_message());
                self.check_payload_length(position, transport.payload.len())?;
                self.execute_write(hca, ctx, transport)?;
                Ok(1)
            }
            Operation::ReadRequest => self.execute_read(hca, header),
            Operation::CompareSwap | Operation::FetchAdd => {
                self.execute_atomic(hca, ctx, header)?;
                Ok(1)
            }
            _ => Err(RequestError::UnsupportedOpcode { opcode }),
        }
    }

    /// Whether the opcode sequence allows this packet (IBA 9.7.4.1.5).
    pub(crate) fn check_opcode_sequence(&self, operation: Operation, position: Position) -> bool {
        match self.responder.in_progress_message {
            Some(message) => message.operation == operation && !position.starts_message(),
            None => position.starts_message(),
        }
    }

    /// Checks the payload length for the packet's position (IBA 9.7.4.1.6).
    pub(crate) fn check_payload_length(&self, position: Position, length: usize) -> Result<(), RequestError> {
        let (mtu, length) = (self.attributes.path_mtu.bytes(), length as u32);
        let fits = match position {
            Position::First | Position::Middle => length == mtu,
            Position::Last => (1..=mtu).contains(&length),
            Position::Only => length <= mtu,
        };
        if fits { Ok(()) } else { Err(RequestError::PayloadLength { length, mtu }) }
    }

    /// Fetches a receive WQE unless one is in use.
    pub(crate) fn ensure_receive_wqe(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        xrceth: Option<XrcEth>,
    ) -> Result<(), RequestError> {
        if self.responder.receive_wqe.is_some() {
            return Ok(());
        }
        let mut buffer = self.responder.spare_receive_wqes.pop().unwrap_or_default();
        let shared = match xrceth {
            Some(xrceth) => Some(self.find_xrc_srq(hca, xrceth)?.0),
            None => self.srq,
        };
        self.srq = shared;
        let popped = match shared {
            Some(srq) => hca.pop_srq_wqe(ctx, srq, &mut buffer.sges),
            None => match &mut self.responder.ring {
                Some(ring) => ring.dequeue(&mut buffer.sges),
                None => Ok(None),
            },
        };
        match popped {
            Ok(Some(wr_id)) => {
                buffer.wr_id = wr_id;
                buffer.capacity = buffer.sges.iter().map(|sge| u64::from(sge.length)).sum();
                self.responder.receive_wqe = Some(buffer);
                Ok(())
            }
            Ok(None) => {
                self.responder.spare_receive_wqes.push(buffer);
                hca.counters.out_of_buffer += 1;
                Err(RequestError::ReceiverNotReady)
            }
            Err(why) => {
                self.responder.spare_receive_wqes.push(buffer);
                ctx.emit(Event::ClientFaulted { client: self.client, qp: self.qpn, corrupt_ring: why });
                Err(RequestError::CorruptRing(why))
            }
        }
    }

    /// The shared receive queue of an XRC request and its protection domain, if this queue pair may use it.
    fn find_xrc_srq(&self, hca: &HcaState, XrcEth(number): XrcEth) -> Result<(SrqId, PdId), RequestError> {
        let number = number & 0xff_ffff;
        let found = hca
            .objects
            .shared_receive_queues
            .get(number)
            .filter(|queue| queue.xrc.is_some_and(|(_, pd)| Some(pd) == self.xrcd));
        let found = found.map(|queue| (SrqId(number), queue.pd));
        found.ok_or(RequestError::NoSuchSrq { srqn: number })
    }

    /// The protection domain for rkey checks. An XRC target has none; it uses the domain of the shared receive queue
    /// that the request names.
    pub(crate) fn remote_access_pd(
        &self,
        hca: &HcaState,
        header: &TransportHeader,
    ) -> Result<PdId, RequestError> {
        match (header.xrceth, self.pd) {
            (Some(xrceth), _) => self.find_xrc_srq(hca, xrceth).map(|(_, pd)| pd),
            (None, Some(pd)) => Ok(pd),
            (None, None) => Err(RequestError::OpcodeOutOfSequence { opcode: header.bth.opcode }),
        }
    }

    /// The protection domain of the receive buffers.
    pub(crate) fn receive_pd(&self, hca: &HcaState) -> Option<PdId> {
        match (self.kind, self.srq) {
            (_, Some(number)) => hca.objects.shared_receive_queues.get(number.0).map(|queue| queue.pd),
            _ => self.pd,
        }
    }

    /// Copies a part of a SEND into the receive WQE.
    pub(crate) fn place_payload(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        psn: Psn,
        placed: u64,
        payload: &[u8],
    ) -> Result<u64, RequestError> {
        let pd = self.receive_pd(hca);
        let buffer = self.responder.receive_wqe.as_ref().expect("ensure_receive_wqe has succeeded");
        let message = placed + payload.len() as u64;
        if message > buffer.capacity {
            return Err(RequestError::ReceiveTooSmall { message, capacity: buffer.capacity });
        }
        if let Some(pd) = pd {
            hca.scatter(ctx, (self.qpn, WriterRole::Responder, psn), pd, &buffer.sges, placed, payload)
                .map_err(RequestError::ReceiveAccess)?;
        }
        Ok(message)
    }

    pub(crate) fn execute_send(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        transport: &TransportPacket<'_>,
    ) -> Result<(), RequestError> {
        let header = &transport.header;
        let (psn, position) = (header.bth.psn, header.bth.opcode.position());
        self.ensure_receive_wqe(hca, ctx, header.xrceth)?;
        let message = self.responder.in_progress_message.unwrap_or(InProgressMessage {
            operation: Operation::Send,
            first_psn: psn,
            bytes_received: 0,
            reth: None,
        });
        let placed = self.place_payload(hca, ctx, psn, message.bytes_received, transport.payload)?;
        if !position.ends_message() {
            self.responder.in_progress_message =
                Some(InProgressMessage { bytes_received: placed, ..message });
            return Ok(());
        }
        if header.bth.opcode.imm_or_invalidate() == ImmOrInvalidate::Invalidate
            && let Some(ieth) = header.ieth
        {
            let pd = self.remote_access_pd(hca, header)?;
            hca.objects
                .protection
                .invalidate(pd, self.qpn, RemoteKey(ieth.0))
                .map_err(RequestError::InvalidateFailed)?;
        }
        self.responder.in_progress_message = None;
        self.responder.increment_msn();
        self.record_ack(hca, psn);
        self.complete_receive(
            hca,
            ctx,
            header,
            CompletionOpcode::Receive,
            placed,
            ReceivedFrom::default(),
            CompletionFlags::empty(),
        );
        Ok(())
    }

    /// Completes the receive WQE successfully. `flags` describes headers before the data.
    pub(crate) fn complete_receive(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        header: &TransportHeader,
        operation: CompletionOpcode,
        bytes: u64,
        source: ReceivedFrom,
        mut flags: CompletionFlags,
    ) {
        flags.set(CompletionFlags::SOLICITED, header.bth.solicited_event);
        flags.set(CompletionFlags::IMMEDIATE, header.immediate.is_some());
        flags.set(CompletionFlags::INVALIDATED, header.ieth.is_some());
        let immediate = header.immediate.map(|i| i.0).or(header.ieth.map(|i| i.0)).unwrap_or(0);
        self.finish_receive(hca, ctx, operation, bytes, (source, flags, immediate));
    }

    #[inline]
    pub(super) fn finish_receive(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        opcode: CompletionOpcode,
        bytes: u64,
        (source, mut flags, imm_data): (ReceivedFrom, CompletionFlags, u32),
    ) {
        if hca.settings.profile.grh_flag_on_connections {
            flags |= CompletionFlags::GRH;
        }
        let buffer = self.responder.receive_wqe.take().expect("ensure_receive_wqe has succeeded");
        let completion = Completion {
            wr_id: buffer.wr_id,
            status: CompletionStatus::Success,
            opcode,
            flags,
            byte_len: bytes as u32,
            imm_data,
            qpn: self.qpn,
            src_qp: source.qpn,
            service_level: source.service_level,
            route: source.route,
            vendor_error: 0,
            timestamp: 0,
        };
        if let Some(cq) = self.effective_recv_cq(hca) {
            hca.post_completion(ctx, cq, completion, Reason::None);
        }
        self.responder.spare_receive_wqes.push(buffer);
    }

    /// Translates the remote address of a one-sided request, if the queue pair and the rkey allow the access.
    pub(crate) fn check_remote_access(
        &self,
        hca: &HcaState,
        header: &TransportHeader,
        Reth { virtual_address: address, rkey: key, dma_length: length }: Reth,
        required: AccessFlags,
    ) -> Result<crate::core::protection::TranslatedAddress, RequestError> {
        if !self.attributes.access_flags.contains(required) {
            let error = AccessError::QueuePairAccess { granted: self.attributes.access_flags, required };
            return Err(RequestError::Access(error));
        }
        let pd = self.remote_access_pd(hca, header)?;
        hca.objects
            .protection
            .check_remote_access(pd, self.qpn, key, address, length, required)
            .map_err(RequestError::Access)
    }

    pub(crate) fn execute_write(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        transport: &TransportPacket<'_>,
    ) -> Result<(), RequestError> {
        let header = &transport.header;
        let position = header.bth.opcode.position();
        let message = self.responder.in_progress_message.unwrap_or(InProgressMessage {
            operation: Operation::Write,
            first_psn: header.bth.psn,
            bytes_received: 0,
            reth: header.reth,
        });
        let Some(remote) = message.reth else {
            return Err(RequestError::OpcodeOutOfSequence { opcode: header.bth.opcode });
        };
        let placed = message.bytes_received + transport.payload.len() as u64;
        let stated = u64::from(remote.dma_length);
        let adds_up = if position.ends_message() { placed == stated } else { placed < stated };
        if remote.dma_length > DeviceLimits::HCA.max_msg_sz || !adds_up {
            return Err(RequestError::MessageLength { got: placed, dma_length: remote.dma_length });
        }
        if header.immediate.is_some() {
            self.ensure_receive_wqe(hca, ctx, header.xrceth)?;
        }
        let access_error = |error| match error {
            RequestError::Access(error) if header.immediate.is_some() => {
                RequestError::WriteWithImmAccess(error)
            }
            other => other,
        };
        // Every packet checks its access: the region may disappear in between.
        let (checked, skipped) = match hca.settings.profile.write_check {
            WriteCheck::Message => (remote, message.bytes_received),
            WriteCheck::Packet => {
                let virtual_address = remote.virtual_address.wrapping_add(message.bytes_received);
                let packet = Reth { virtual_address, dma_length: transport.payload.len() as u32, ..remote };
                (packet, 0)
            }
        };
        let target = match checked.dma_length {
            0 => None,
            _ => {
                let checked = self.check_remote_access(hca, header, checked, AccessFlags::REMOTE_WRITE);
                Some(checked.map_err(access_error)?)
            }
        };
        if let Some(target) = target {
            let offset = target.offset + skipped;
            let origin = WriteOrigin {
                qp: self.qpn,
                role: WriterRole::Responder,
                first_psn: message.first_psn,
                now_ns: ctx.now.nanos(),
            };
            ctx.memory
                .place(target.memory, offset, transport.payload, &origin)
                .map_err(|fault| access_error(RequestError::Access(target.to_access_error(fault))))?;
            if hca.is_observed {
                ctx.emit(Event::MemoryWritten {
                    qp: self.qpn,
                    key: target.key,
                    address: remote.virtual_address.wrapping_add(message.bytes_received),
                    length: transport.payload.len() as u32,
                    psn: header.bth.psn,
                });
            }
        }
        if !position.ends_message() {
            self.responder.in_progress_message =
                Some(InProgressMessage { bytes_received: placed, ..message });
            return Ok(());
        }
        self.responder.in_progress_message = None;
        self.responder.increment_msn();
        self.record_ack(hca, header.bth.psn);
        if header.immediate.is_some() {
            let operation = CompletionOpcode::ReceiveWriteWithImm;
            self.complete_receive(
                hca,
                ctx,
                header,
                operation,
                placed,
                ReceivedFrom::default(),
                CompletionFlags::empty(),
            );
        }
        Ok(())
    }

    fn check_rd_atomic_limit(&self) -> Result<(), RequestError> {
        let limit = self.attributes.max_dest_rd_atomic;
        if self.responder.pending_rd_atomic() >= usize::from(limit) {
            return Err(RequestError::TooManyRdAtomic { limit });
        }
        Ok(())
    }

    fn execute_read(&mut self, hca: &mut HcaState, header: &TransportHeader) -> Result<u32, RequestError> {
        hca.counters.rx_read_requests += 1;
        let remote = header.reth.expect("a READ request has a RETH");
        self.check_rd_atomic_limit()?;
        if remote.dma_length > DeviceLimits::HCA.max_msg_sz {
            return Err(RequestError::MessageLength { got: 0, dma_length: remote.dma_length });
        }
        if remote.dma_length > 0 {
            self.check_remote_access(hca, header, remote, AccessFlags::REMOTE_READ)?;
        }
        let pd = self.remote_access_pd(hca, header)?;
        let packets = self.attributes.path_mtu.packets(remote.dma_length);
        self.responder.increment_msn();
        let (first, msn) = (header.bth.psn, self.responder.msn);
        let (next, again) = (first, false);
        self.responder.pending_responses.push_back(PendingResponse::ReadResponse {
            first,
            next,
            packets,
            reth: remote,
            pd,
            msn,
            is_duplicate: again,
        });
        Ok(packets)
    }

    fn execute_atomic(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        header: &TransportHeader,
    ) -> Result<(), RequestError> {
        hca.counters.rx_atomic_requests += 1;
        let AtomicEth { virtual_address: address, rkey: key, swap_or_add, compare } =
            header.atomic.expect("an atomic request has an AtomicETH");
        self.check_rd_atomic_limit()?;
        if address % 8 != 0 {
            return Err(RequestError::MisalignedAtomic { address });
        }
        let target = self.check_remote_access(
            hca,
            header,
            Reth { virtual_address: address, rkey: key, dma_length: 8 },
            AccessFlags::REMOTE_ATOMIC,
        )?;
        let operation = match header.bth.opcode.operation() {
            Operation::CompareSwap => AtomicOperation::CompareSwap { compare, swap: swap_or_add },
            _ => AtomicOperation::FetchAdd { add: swap_or_add },
        };
        let (qp, psn) = (self.qpn, header.bth.psn);
        let role = WriterRole::Responder;
        // The update of an atomic is visible only after all earlier data of the queue pair (IBA 9.5).
        ctx.memory.order(qp, role);
        let origin = WriteOrigin { qp, role, first_psn: psn, now_ns: ctx.now.nanos() };
        let original = ctx
            .memory
            .place_atomic(target.memory, target.offset, operation, &origin)
            .map_err(|fault| RequestError::Access(target.to_access_error(fault)))?;
        ctx.emit(Event::MemoryWritten { qp, key: target.key, address, length: 8, psn });
        self.responder.increment_msn();
        let msn = self.responder.msn;
        self.responder.pending_responses.push_back(PendingResponse::AtomicResponse {
            psn,
            original,
            msn,
            is_duplicate: false,
        });
        if self.responder.atomic_results.len() >= usize::from(self.attributes.max_dest_rd_atomic.max(1)) {
            self.responder.atomic_results.pop_front();
        }
        self.responder.atomic_results.push_back((psn, original));
        Ok(())
    }

    /// Queues an ACK. It replaces an ACK that is already pending if the settings allow coalescing.
    pub(crate) fn queue_ack(&mut self, hca: &HcaState, psn: Psn) {
        let is_full = self.responder.pending_responses.len() >= MAX_PENDING_RESPONSES;
        if !((hca.settings.ack_policy == AckPolicy::Coalesce || is_full) && self.responder.coalesce_ack(psn))
        {
            self.responder.queue_ack(psn, Syndrome::ACK);
        }
    }
}
