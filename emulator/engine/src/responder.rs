//! The responder: checks a request in the specification's order, executes it, owes a reply.

use crate::card::Card;
use crate::inbound::{Open, Owed};
use crate::queue_pair::QueuePair;
use crate::{AsyncEvent, Atomic, Context, CqId, Denied, DropReason, Event, Limits, Packet, PdId, QpKind};
use crate::{Reason, Refusal, SrqId, State};
use softhca_queue::{Access, Completion, CompletionFlags, CompletionOperation, Status};
use softhca_wire::{
    AtomicEth, Header, Operation, Position, Psn, Qpn, RemoteKey, Reth, Syndrome, Trailer, Transport, XrcEth,
};

/// How many replies may wait before duplicates are no longer answered.
pub(crate) const MAX_OWED: usize = 512;

impl QueuePair {
    /// Takes a request of the peer of a reliable connection.
    pub(crate) fn on_request(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        transport: &Transport<'_>,
        packet: Packet,
    ) {
        self.note_established(ctx);
        let header = &transport.header;
        let psn = packet.psn;
        match psn.distance(self.inbound.expected) {
            0 => {}
            ahead if ahead > 0 => {
                card.counters.out_of_sequence += 1;
                if self.inbound.refused {
                    let expected = self.inbound.expected;
                    return self.tell_dropped(card, ctx, packet, DropReason::RefusalOutstanding { expected });
                }
                let missing = self.inbound.expected;
                return self.refuse(card, ctx, psn, Refusal::Gap { missing, got: psn });
            }
            _ => return self.on_duplicate(card, ctx, transport, packet),
        }
        match self.accept(card, ctx, transport) {
            Ok(packets) => {
                self.inbound.refused = false;
                self.inbound.expected = psn.plus(packets);
                let answers_itself = matches!(
                    packet.opcode.operation(),
                    Operation::ReadRequest | Operation::CompareSwap | Operation::FetchAdd
                );
                if header.bth.ack_request && !answers_itself {
                    self.owe_acknowledge(card, psn, Syndrome::ACK);
                }
                if !self.inbound.owed.is_empty() {
                    self.wake(card);
                }
            }
            Err(refusal) => self.refuse(card, ctx, psn, refusal),
        }
    }

    pub(crate) fn note_established(&mut self, ctx: &mut Context<'_>) {
        if self.state == State::ReadyToReceive && !self.inbound.established {
            self.inbound.established = true;
            let event = AsyncEvent::CommunicationEstablished(self.number);
            ctx.tell(Event::Raised { client: Some(self.client), event });
        }
    }

    /// Checks and executes the request with the expected PSN; returns how many PSNs it takes.
    fn accept(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        transport: &Transport<'_>,
    ) -> Result<u32, Refusal> {
        let header = &transport.header;
        let opcode = header.bth.opcode;
        let (operation, position) = (opcode.operation(), opcode.position());
        self.check_place(operation, position).then_some(()).ok_or(Refusal::OpcodeOutOfPlace { opcode })?;
        match operation {
            Operation::Send => {
                self.check_payload(position, transport.payload.len())?;
                self.accept_send(card, ctx, transport)?;
                Ok(1)
            }
            Operation::Write => {
                card.counters.rx_write_requests += u64::from(position.starts());
                self.check_payload(position, transport.payload.len())?;
                self.accept_write(card, ctx, transport)?;
                Ok(1)
            }
            Operation::ReadRequest => self.accept_read(card, header),
            Operation::CompareSwap | Operation::FetchAdd => {
                self.accept_atomic(card, ctx, header)?;
                Ok(1)
            }
            _ => Err(Refusal::Unsupported { opcode }),
        }
    }

    /// Whether a packet of this operation and position may come now (IBA 9.7.4.1.5).
    pub(crate) fn check_place(&self, operation: Operation, position: Position) -> bool {
        match self.inbound.open {
            Some(open) => open.operation == operation && !position.starts(),
            None => position.starts(),
        }
    }

    /// Whether a payload has the size that its place asks for (IBA 9.7.4.1.6).
    pub(crate) fn check_payload(&self, position: Position, length: usize) -> Result<(), Refusal> {
        let (mtu, length) = (self.attributes.mtu.bytes(), length as u32);
        let fits = match position {
            Position::First | Position::Middle => length == mtu,
            Position::Last => (1..=mtu).contains(&length),
            Position::Only => length <= mtu,
        };
        if fits { Ok(()) } else { Err(Refusal::PayloadLength { length, mtu }) }
    }

    /// Makes sure that a receive is at hand.
    pub(crate) fn ensure_buffer(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        header: &Header,
    ) -> Result<(), Refusal> {
        if self.inbound.buffer.is_some() {
            return Ok(());
        }
        let mut buffer = self.inbound.spare.pop().unwrap_or_default();
        let shared = match header.xrceth {
            Some(xrceth) => Some(self.extended_queue(card, xrceth)?.0),
            None => self.shared_receive_queue,
        };
        self.shared_receive_queue = shared;
        let taken = match shared {
            Some(number) => card.take_shared(ctx, number, &mut buffer),
            None => match &mut self.inbound.ring {
                Some(ring) => {
                    ring.take(&mut buffer.scatter).map(|id| id.inspect(|id| buffer.id = *id).is_some())
                }
                None => Ok(false),
            },
        };
        match taken {
            Ok(true) => {
                buffer.room = buffer.scatter.iter().map(|entry| u64::from(entry.length)).sum();
                self.inbound.buffer = Some(buffer);
                Ok(())
            }
            Ok(false) => {
                self.inbound.spare.push(buffer);
                card.counters.out_of_buffer += 1;
                Err(Refusal::NotReady)
            }
            Err(why) => {
                self.inbound.spare.push(buffer);
                ctx.tell(Event::ClientFaulted { client: self.client, qp: self.number, why });
                Err(Refusal::BrokenRing(why))
            }
        }
    }

    /// The shared receive queue that an XRC request names and its protection domain, if this queue pair may
    /// use it.
    fn extended_queue(&self, card: &Card, XrcEth(number): XrcEth) -> Result<(SrqId, PdId), Refusal> {
        let number = number & 0xff_ffff;
        let found = card
            .shared_receive_queues
            .get(number)
            .filter(|queue| queue.extended.is_some_and(|(_, domain)| Some(domain) == self.xrc_domain));
        let found = found.map(|queue| (SrqId(number), queue.domain));
        found.ok_or(Refusal::NoSharedReceiveQueue { number })
    }

    /// The protection domain that a peer's keys are checked against: an XRC target has none of its own, the
    /// queue that a request names has.
    pub(crate) fn access_domain(&self, card: &Card, header: &Header) -> Result<PdId, Refusal> {
        match (header.xrceth, self.domain) {
            (Some(xrceth), _) => self.extended_queue(card, xrceth).map(|(_, domain)| domain),
            (None, Some(domain)) => Ok(domain),
            (None, None) => Err(Refusal::OpcodeOutOfPlace { opcode: header.bth.opcode }),
        }
    }

    /// Where receives of this queue pair complete: at XRC, where the shared queue says.
    pub(crate) fn receive_completion_queue(&self, card: &Card) -> Option<CqId> {
        match (self.kind, self.shared_receive_queue) {
            (QpKind::XrcTarget, Some(number)) => {
                card.shared_receive_queues.get(number.0)?.extended.map(|(cq, _)| cq)
            }
            _ => self.receive_cq,
        }
    }

    /// The protection domain that incoming data is checked against.
    pub(crate) fn receive_domain(&self, card: &Card) -> Option<PdId> {
        match (self.kind, self.shared_receive_queue) {
            (_, Some(number)) => card.shared_receive_queues.get(number.0).map(|queue| queue.domain),
            _ => self.domain,
        }
    }

    /// Copies a part of a SEND into the receive at hand.
    pub(crate) fn place(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        psn: Psn,
        placed: u64,
        payload: &[u8],
    ) -> Result<u64, Refusal> {
        let domain = self.receive_domain(card);
        let buffer = self.inbound.buffer.as_ref().expect("a receive was made sure of");
        let message = placed + payload.len() as u64;
        if message > buffer.room {
            return Err(Refusal::ReceiveTooSmall { message, room: buffer.room });
        }
        if let Some(domain) = domain {
            card.scatter(ctx, (self.number, psn), domain, &buffer.scatter, placed, payload)
                .map_err(Refusal::ReceiveDenied)?;
        }
        Ok(message)
    }

    pub(crate) fn accept_send(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        transport: &Transport<'_>,
    ) -> Result<(), Refusal> {
        let header = &transport.header;
        let (psn, position) = (header.bth.psn, header.bth.opcode.position());
        self.ensure_buffer(card, ctx, header)?;
        let open = self.inbound.open.unwrap_or(Open {
            operation: Operation::Send,
            first: psn,
            placed: 0,
            remote: None,
        });
        let placed = self.place(card, ctx, psn, open.placed, transport.payload)?;
        if !position.ends() {
            self.inbound.open = Some(Open { placed, ..open });
            return Ok(());
        }
        if header.bth.opcode.trailer() == Trailer::Invalidate
            && let Some(ieth) = header.ieth
        {
            let domain = self.access_domain(card, header)?;
            card.protection
                .invalidate(domain, self.number, RemoteKey(ieth.0))
                .map_err(Refusal::InvalidateFailed)?;
        }
        self.inbound.open = None;
        self.inbound.complete_message();
        self.deliver(
            card,
            ctx,
            header,
            CompletionOperation::Receive,
            placed,
            Qpn::default(),
            CompletionFlags::empty(),
        );
        Ok(())
    }

    /// Reports the receive at hand as a success. `flags` says what stands before the data.
    pub(crate) fn deliver(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        header: &Header,
        operation: CompletionOperation,
        bytes: u64,
        source: Qpn,
        mut flags: CompletionFlags,
    ) {
        let buffer = self.inbound.buffer.take().expect("a receive was made sure of");
        flags.set(CompletionFlags::SOLICITED, header.bth.solicited);
        flags.set(CompletionFlags::IMMEDIATE, header.immediate.is_some());
        flags.set(CompletionFlags::INVALIDATED, header.ieth.is_some());
        let immediate = header.immediate.map(|i| i.0).or(header.ieth.map(|i| i.0)).unwrap_or(0);
        let completion = Completion {
            id: buffer.id,
            status: Status::Success,
            operation,
            flags,
            bytes: bytes as u32,
            immediate,
            queue_pair: self.number,
            source,
            service_level: 0,
            vendor_error: 0,
            timestamp: 0,
        };
        if let Some(cq) = self.receive_completion_queue(card) {
            card.complete(ctx, cq, completion, Reason::None);
        }
        self.inbound.spare.push(buffer);
    }

    /// Finds the bytes that a one-sided request names, if the queue pair and the key allow it.
    pub(crate) fn locate(
        &self,
        card: &Card,
        header: &Header,
        Reth { address, key, length }: Reth,
        needs: Access,
    ) -> Result<crate::protection::Located, Refusal> {
        if !self.attributes.access.contains(needs) {
            let denied = Denied::Right { key: key.0, has: self.attributes.access, needs };
            return Err(Refusal::Access(denied));
        }
        let domain = self.access_domain(card, header)?;
        card.protection.remote(domain, self.number, key, address, length, needs).map_err(Refusal::Access)
    }

    pub(crate) fn accept_write(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        transport: &Transport<'_>,
    ) -> Result<(), Refusal> {
        let header = &transport.header;
        let position = header.bth.opcode.position();
        let open = self.inbound.open.unwrap_or(Open {
            operation: Operation::Write,
            first: header.bth.psn,
            placed: 0,
            remote: header.reth,
        });
        let Some(remote) = open.remote else {
            return Err(Refusal::OpcodeOutOfPlace { opcode: header.bth.opcode });
        };
        let placed = open.placed + transport.payload.len() as u64;
        let stated = u64::from(remote.length);
        let adds_up = if position.ends() { placed == stated } else { placed < stated };
        if remote.length > Limits::CARD.message || !adds_up {
            return Err(Refusal::MessageLength { got: placed, stated: remote.length });
        }
        // The rights of the whole message are checked with each packet: a region may go in between.
        let target = match remote.length {
            0 => None,
            _ => Some(self.locate(card, header, remote, Access::REMOTE_WRITE)?),
        };
        if header.immediate.is_some() {
            self.ensure_buffer(card, ctx, header)?;
        }
        if let Some(target) = target {
            let offset = target.offset + open.placed;
            if !card.is_placed {
                ctx.memory
                    .write(target.memory, offset, transport.payload)
                    .map_err(|fault| Refusal::Access(target.unreachable(fault)))?;
            }
            ctx.tell(Event::MemoryWritten {
                qp: self.number,
                key: target.key,
                address: remote.address.wrapping_add(open.placed),
                length: transport.payload.len() as u32,
                psn: header.bth.psn,
            });
        }
        if !position.ends() {
            self.inbound.open = Some(Open { placed, ..open });
            return Ok(());
        }
        self.inbound.open = None;
        self.inbound.complete_message();
        if header.immediate.is_some() {
            let operation = CompletionOperation::ReceiveWriteImmediate;
            self.deliver(card, ctx, header, operation, placed, Qpn::default(), CompletionFlags::empty());
        }
        Ok(())
    }

    fn check_reads(&self) -> Result<(), Refusal> {
        let limit = self.attributes.max_reads_in;
        if self.inbound.reads() >= usize::from(limit) {
            return Err(Refusal::TooManyReads { limit });
        }
        Ok(())
    }

    fn accept_read(&mut self, card: &mut Card, header: &Header) -> Result<u32, Refusal> {
        card.counters.rx_read_requests += 1;
        let remote = header.reth.expect("a READ request has a RETH");
        self.check_reads()?;
        if remote.length > Limits::CARD.message {
            return Err(Refusal::MessageLength { got: 0, stated: remote.length });
        }
        if remote.length > 0 {
            self.locate(card, header, remote, Access::REMOTE_READ)?;
        }
        let domain = self.access_domain(card, header)?;
        let packets = self.attributes.mtu.packets(remote.length);
        self.inbound.complete_message();
        let (first, msn) = (header.bth.psn, self.inbound.msn);
        let (next, again) = (first, false);
        self.inbound.owed.push_back(Owed::Read { first, next, packets, remote, domain, msn, again });
        Ok(packets)
    }

    fn accept_atomic(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        header: &Header,
    ) -> Result<(), Refusal> {
        card.counters.rx_atomic_requests += 1;
        let AtomicEth { address, key, swap_or_add, compare } =
            header.atomic.expect("an atomic request has an AtomicETH");
        self.check_reads()?;
        if address % 8 != 0 {
            return Err(Refusal::Misaligned { address });
        }
        let target = self.locate(card, header, Reth { address, key, length: 8 }, Access::REMOTE_ATOMIC)?;
        let operation = match header.bth.opcode.operation() {
            Operation::CompareSwap => Atomic::CompareSwap { compare, swap: swap_or_add },
            _ => Atomic::FetchAdd { add: swap_or_add },
        };
        let original = ctx
            .memory
            .atomic(target.memory, target.offset, operation)
            .map_err(|fault| Refusal::Access(target.unreachable(fault)))?;
        let (qp, psn) = (self.number, header.bth.psn);
        ctx.tell(Event::MemoryWritten { qp, key: target.key, address, length: 8, psn });
        self.inbound.complete_message();
        let msn = self.inbound.msn;
        self.inbound.owed.push_back(Owed::Atomic { psn, original, msn, again: false });
        if self.inbound.atomics.len() >= usize::from(self.attributes.max_reads_in.max(1)) {
            self.inbound.atomics.pop_front();
        }
        self.inbound.atomics.push_back((psn, original));
        Ok(())
    }

    /// Owes an acknowledgement, together with one that waits already if the settings say so.
    pub(crate) fn owe_acknowledge(&mut self, card: &Card, psn: Psn, syndrome: Syndrome) {
        let coalesce = card.settings.acks == crate::Acks::Coalesce || self.inbound.owed.len() >= MAX_OWED;
        if coalesce
            && let Some(Owed::Acknowledge { psn: last, syndrome: Syndrome::Ack(_), msn }) =
                self.inbound.owed.back_mut()
        {
            (*last, *msn) = (psn, self.inbound.msn);
            return;
        }
        self.owe(psn, syndrome);
    }

    /// Owes an acknowledgement of its own.
    pub(crate) fn owe(&mut self, psn: Psn, syndrome: Syndrome) {
        let msn = self.inbound.msn;
        self.inbound.owed.push_back(Owed::Acknowledge { psn, syndrome, msn });
    }
}
