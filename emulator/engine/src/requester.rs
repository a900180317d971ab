//! The requester: takes work from the send queue and turns it into packets.

use crate::card::Card;
use crate::congestion::mark_capable;
use crate::outbound::{Work, WorkOperation};
use crate::queue_pair::QueuePair;
use crate::run::Plan;
use crate::{AsyncEvent, Context, EndToEndCredits, Event, Limits, QpKind, Reason, State};
use softhca_queue::{Access, Operation, Payload, RemoteAddress, SendFlags, SendTrailer, Status};
use softhca_wire as wire;
use softhca_wire::{
    AtomicEth, Bth, Deth, Header, Ieth, Immediate, Opcode, Position, Psn, Reth, Trailer, XrcEth,
};

/// The most PSNs that may be outstanding: beyond half the number space old and new cannot be told apart.
const WINDOW: u32 = Psn::SPACE / 2 - 1;

/// Whether the service of a queue pair has the operation.
fn offers(kind: QpKind, operation: &Operation) -> bool {
    match operation {
        Operation::Send(SendTrailer::Invalidate(_)) => kind.is_reliable(),
        Operation::Send(_) => true,
        Operation::Write { .. } => !kind.is_datagram(),
        Operation::Read { .. } | Operation::CompareSwap { .. } | Operation::FetchAdd { .. } => {
            kind.is_reliable()
        }
        Operation::BindWindow(_) | Operation::LocalInvalidate { .. } => !kind.is_datagram(),
    }
}

impl QueuePair {
    /// The next request packet, if one may be sent now.
    pub(crate) fn plan_request(&mut self, card: &mut Card, ctx: &mut Context<'_>) -> Option<Plan> {
        loop {
            if !self.state.takes_responses() || self.outbound.rnr_until.is_some() {
                return None;
            }
            if self.outbound.cursor == self.outbound.works.len() {
                if self.state == State::SendQueueDrained || !self.take(card, ctx) {
                    self.note_drained(ctx);
                    return None;
                }
                // What was taken may have failed at once, and the queue pair with it.
                continue;
            }
            let work = &self.outbound.works[self.outbound.cursor];
            match work.outcome {
                Some((Status::Success, _)) => {
                    self.outbound.cursor += 1;
                    continue;
                }
                Some(_) => return None,
                None => {}
            }
            let started = self.outbound.is_started(work);
            if !started && self.state == State::SendQueueDrained {
                self.note_drained(ctx);
                return None;
            }
            if !started && work.flags.contains(SendFlags::FENCE) && self.outbound.reads > 0 {
                return None;
            }
            if work.is_local() {
                self.execute_local(card, ctx);
                continue;
            }
            if self.outbound.next == work.first
                && let Some(failure) = self.check_work(card, work)
            {
                self.fail_local(card, ctx, failure);
                return None;
            }
            let work = &self.outbound.works[self.outbound.cursor];
            let is_read = matches!(work.operation.0, Operation::Read { .. });
            let needed = if is_read { work.end().since(self.outbound.next) } else { 1 };
            let outstanding = self.outbound.next.since(self.outbound.unacked);
            if self.kind.is_reliable() && outstanding > 0 && outstanding + needed > WINDOW {
                return None;
            }
            // Beyond the peer's receives one packet asks, once everything before is answered (IBA 9.7.7.2.5).
            let asks = [self.outbound.next, self.outbound.unacked] == [work.first; 2];
            if self.uses_credits(card) && self.outbound.is_limited(work) && !asks {
                return None;
            }
            if work.is_read_or_atomic() && self.outbound.reads >= u32::from(self.attributes.max_reads_out) {
                return None;
            }
            let carries = !work.is_read_or_atomic();
            if carries && !self.may_go(card, ctx) {
                return None;
            }
            return Some(self.plan_work(card, &self.outbound.works[self.outbound.cursor]));
        }
    }

    /// Whether the peer's receives limit what is sent.
    fn uses_credits(&self, card: &Card) -> bool {
        card.settings.credits == EndToEndCredits::On && self.kind.is_reliable()
    }

    /// Takes requests of one packet before their turn, so that about `packets` of them are at hand.
    pub(crate) fn take_ahead(&mut self, card: &mut Card, ctx: &mut Context<'_>, packets: usize) {
        let is_short = |qp: &QueuePair| qp.outbound.works.back().is_none_or(|work| work.packets == 1);
        while self.state == State::ReadyToSend
            && self.outbound.works.len() - self.outbound.cursor < packets
            && is_short(self)
            && self.take(card, ctx)
        {}
    }

    /// Copies the next request out of the ring and gives it its PSNs.
    fn take(&mut self, card: &mut Card, ctx: &mut Context<'_>) -> bool {
        let Some(ring) = &mut self.outbound.ring else { return false };
        if matches!(ring.is_waiting(), Ok(false)) {
            return false;
        }
        let mut work = self.outbound.spare.pop().unwrap_or_default();
        let taken = ring.take(&mut work.entries, &mut work.inline);
        let (size, outcome) = match taken {
            Ok(None) => {
                self.outbound.spare.push(work);
                return false;
            }
            Err(why) => {
                self.outbound.spare.push(work);
                self.break_ring(card, ctx, why);
                return false;
            }
            Ok(Some(Err(_))) => {
                (work.id, work.operation) = (0, WorkOperation::default());
                work.flags = SendFlags::empty();
                (0, Some((Status::LocalQueuePairOperation, Reason::BrokenRequest)))
            }
            Ok(Some(Ok(request))) => {
                let size = match request.payload {
                    Payload::Inline(bytes) => bytes.len() as u64,
                    Payload::Gather(entries) => entries.iter().map(|e| u64::from(e.length)).sum(),
                };
                work.id = request.id;
                work.operation = WorkOperation(request.operation);
                work.flags = request.flags;
                work.datagram = request.datagram;
                work.shared_receive_queue = request.shared_receive_queue;
                (size, None)
            }
        };
        work.outcome = outcome.or_else(|| self.check_request(&work, size));
        work.length = if work.is_local() { 0 } else { size.min(u64::from(u32::MAX)) as u32 };
        if matches!(work.operation.0, Operation::CompareSwap { .. } | Operation::FetchAdd { .. }) {
            work.length = 8;
        }
        work.first = self.outbound.assigned;
        work.packets = match (work.outcome, work.operation.0) {
            (Some(_), _) | (_, Operation::BindWindow(_) | Operation::LocalInvalidate { .. }) => 0,
            (_, Operation::CompareSwap { .. } | Operation::FetchAdd { .. }) => 1,
            _ => self.attributes.mtu.packets(work.length),
        };
        if self.kind.is_datagram() && work.packets > 1 {
            work.packets = 1;
        }
        if work.packets > 0 {
            self.outbound.sequence = (self.outbound.sequence + 1) & 0xff_ffff;
            work.sequence = self.outbound.sequence;
        }
        self.outbound.assigned = work.end();
        ctx.tell(Event::WorkStarted {
            qp: self.number,
            id: work.id,
            operation: work.completion_operation(),
            bytes: work.length,
            first: work.first,
            packets: work.packets,
            buffer: work.entries.first().copied().filter(|_| !work.is_inline()),
        });
        let failed = work.outcome.is_some();
        self.outbound.works.push_back(work);
        if failed {
            self.retire(card, ctx);
        }
        true
    }

    /// What is wrong with a request by itself.
    fn check_request(&self, work: &Work, size: u64) -> Option<(Status, Reason)> {
        if !offers(self.kind, &work.operation.0) {
            return Some((Status::LocalQueuePairOperation, Reason::Unsupported));
        }
        let limit = match self.kind.is_datagram() {
            true => u64::from(self.attributes.mtu.bytes()),
            false => u64::from(Limits::CARD.message),
        };
        if size > limit {
            return Some((Status::LocalLength, Reason::MessageTooLong { length: size, limit }));
        }
        if work.is_read_or_atomic() {
            if self.attributes.max_reads_out == 0 {
                return Some((Status::LocalQueuePairOperation, Reason::NoReadsAllowed));
            }
            if work.is_inline() {
                return Some((Status::LocalQueuePairOperation, Reason::Unsupported));
            }
            let is_atomic = !matches!(work.operation.0, Operation::Read { .. });
            if is_atomic && size < 8 {
                return Some((Status::LocalLength, Reason::MessageTooLong { length: 8, limit: size }));
            }
        }
        None
    }

    /// What is wrong with a request at the moment when its first packet is to be sent.
    fn check_work(&self, card: &Card, work: &Work) -> Option<(Status, Reason)> {
        if self.kind.is_datagram() {
            let handle = work.datagram.address_handle;
            let known = card
                .address_handles
                .get(handle)
                .is_some_and(|found| found.client == self.client && Some(found.domain) == self.domain);
            if !known {
                return Some((Status::LocalQueuePairOperation, Reason::BadAddressHandle { handle }));
            }
        }
        if work.is_inline() {
            return None;
        }
        let needs = if work.is_read_or_atomic() { Access::LOCAL_WRITE } else { Access::empty() };
        let domain = self.domain?;
        let denied = card.check_entries(domain, &work.entries, needs).err()?;
        Some((Status::LocalProtection, Reason::LocalMemory(denied)))
    }

    /// Ends the request at the cursor with a local error, which is reported when its turn has come.
    pub(crate) fn fail_local(&mut self, card: &mut Card, ctx: &mut Context<'_>, failure: (Status, Reason)) {
        let cursor = self.outbound.cursor;
        if let Some(work) = self.outbound.works.get_mut(cursor) {
            work.outcome = Some(failure);
            self.outbound.assigned = self.outbound.next;
        }
        self.retire(card, ctx);
    }

    /// Does the local operation at the cursor.
    fn execute_local(&mut self, card: &mut Card, ctx: &mut Context<'_>) {
        let (number, domain) = (self.number, self.domain);
        let work = &mut self.outbound.works[self.outbound.cursor];
        let done = match (work.operation.0, domain) {
            (Operation::BindWindow(bind), Some(domain)) => {
                card.protection.bind(domain, number, &bind).map(|_| ())
            }
            (Operation::LocalInvalidate { key }, Some(domain)) => {
                card.protection.invalidate(domain, number, key)
            }
            _ => Ok(()),
        };
        work.outcome = Some(match done {
            Ok(()) => (Status::Success, Reason::None),
            Err(denied) => (Status::WindowBind, Reason::WindowBind(denied)),
        });
        if done.is_ok() {
            self.outbound.cursor += 1;
        }
        self.retire(card, ctx);
    }

    fn note_drained(&mut self, ctx: &mut Context<'_>) {
        if self.state != State::SendQueueDrained || self.outbound.drained || self.outbound.is_outstanding() {
            return;
        }
        self.outbound.drained = true;
        if self.attributes.notify_drained {
            let event = AsyncEvent::SendQueueDrained(self.number);
            ctx.tell(Event::Raised { client: Some(self.client), event });
        }
    }

    /// The packet of `work` with the next PSN.
    fn plan_work(&self, card: &Card, work: &Work) -> Plan {
        let psn = self.outbound.next;
        let index = psn.since(work.first);
        let mtu = self.attributes.mtu.bytes();
        let offset = u64::from(index) * u64::from(mtu);
        let rest = work.length - offset.min(u64::from(work.length)) as u32;
        let position = Position::of(index, work.packets);
        let service = self.kind.service();
        let reth = |remote: RemoteAddress, address: u64, length| {
            Some(Reth { address: remote.address.wrapping_add(address), key: remote.key, length })
        };
        let opcode = |operation, position, trailer| {
            Opcode::new(service, operation, position, trailer).expect("the service offers the operation")
        };
        let bth = |opcode| Bth::new(opcode, self.attributes.destination, psn);
        let trailer_of = |given| if position.ends() { given } else { Trailer::None };
        let (mut header, payload) = match work.operation.0 {
            Operation::Send(trailer) => {
                let kind = match trailer {
                    SendTrailer::None => Trailer::None,
                    SendTrailer::Immediate(_) => Trailer::Immediate,
                    SendTrailer::Invalidate(_) => Trailer::Invalidate,
                };
                let mut header = Header::new(bth(opcode(wire::Operation::Send, position, trailer_of(kind))));
                if position.ends() {
                    match trailer {
                        SendTrailer::None => {}
                        SendTrailer::Immediate(value) => header.immediate = Some(Immediate(value)),
                        SendTrailer::Invalidate(key) => header.ieth = Some(Ieth(key.0)),
                    }
                }
                (header, rest.min(mtu))
            }
            Operation::Write { remote, immediate } => {
                let kind = if immediate.is_some() { Trailer::Immediate } else { Trailer::None };
                let mut header = Header::new(bth(opcode(wire::Operation::Write, position, trailer_of(kind))));
                if position.starts() {
                    header.reth = reth(remote, 0, work.length);
                }
                if position.ends() {
                    header.immediate = immediate.map(Immediate);
                }
                (header, rest.min(mtu))
            }
            Operation::Read { remote } => {
                let mut header =
                    Header::new(bth(opcode(wire::Operation::ReadRequest, Position::Only, Trailer::None)));
                header.reth = reth(remote, offset, rest);
                (header, 0)
            }
            Operation::CompareSwap { remote, compare, swap } => {
                let mut header =
                    Header::new(bth(opcode(wire::Operation::CompareSwap, Position::Only, Trailer::None)));
                let RemoteAddress { address, key } = remote;
                header.atomic = Some(AtomicEth { address, key, swap_or_add: swap, compare });
                (header, 0)
            }
            Operation::FetchAdd { remote, add } => {
                let mut header =
                    Header::new(bth(opcode(wire::Operation::FetchAdd, Position::Only, Trailer::None)));
                let RemoteAddress { address, key } = remote;
                header.atomic = Some(AtomicEth { address, key, swap_or_add: add, compare: 0 });
                (header, 0)
            }
            Operation::BindWindow(_) | Operation::LocalInvalidate { .. } => {
                unreachable!("local operations have no packets")
            }
        };
        let ends = position.ends() || work.is_read_or_atomic();
        // Only what takes a receive can ask for an event there (IBA 9.2.3).
        let takes_receive = match work.operation.0 {
            Operation::Send(_) => true,
            Operation::Write { immediate, .. } => immediate.is_some(),
            _ => false,
        };
        header.bth.solicited = ends && takes_receive && work.flags.contains(SendFlags::SOLICITED);
        header.bth.pad = (payload.wrapping_neg() & 3) as u8;
        let limited = self.uses_credits(card) && self.outbound.is_limited(work);
        header.bth.ack_request = self.kind.is_reliable()
            && (ends || limited || self.outbound.unrequested + 1 >= card.settings.ack_request_every);
        if self.kind == QpKind::XrcInitiator {
            header.xrceth = Some(XrcEth(work.shared_receive_queue));
        }
        let mut envelope = self.envelope;
        let mut service_level = self.attributes.path.service_level;
        if self.kind.is_datagram() {
            let vector = card.address_handles.get(work.datagram.address_handle).map(|found| found.vector);
            let vector = vector.unwrap_or_default();
            service_level = vector.service_level;
            let key = work.datagram.queue_key;
            let queue_key = if key.is_controlled() { self.attributes.queue_key } else { key };
            header.deth = Some(Deth { queue_key, source: self.number });
            header.bth.destination = work.datagram.queue_pair;
            header.bth.ack_request = self.kind == QpKind::Gsi;
            envelope = crate::address::envelope(
                &vector,
                card.gid(vector.source_index),
                self.number,
                work.datagram.queue_pair,
            );
        }
        if payload > 0 {
            mark_capable(card, &mut envelope);
        }
        Plan { header, payload, envelope, service_level, offset, reply: false }
    }

    /// Reads the payload of the planned packet into `into`.
    #[inline]
    pub(crate) fn fill_request(
        &self,
        card: &Card,
        ctx: &Context<'_>,
        plan: &Plan,
        into: &mut [u8],
    ) -> Result<(), (Status, Reason)> {
        let work = &self.outbound.works[self.outbound.cursor];
        if work.is_inline() {
            let at = plan.offset as usize;
            into.copy_from_slice(&work.inline[at..at + into.len()]);
            return Ok(());
        }
        let Some(domain) = self.domain else { return Ok(()) };
        card.gather(ctx, domain, &work.entries, plan.offset, into)
            .map_err(|denied| (Status::LocalProtection, Reason::LocalMemory(denied)))
    }

    /// The planned packet left.
    pub(crate) fn note_request_sent(&mut self, card: &mut Card, ctx: &mut Context<'_>, plan: &Plan) {
        let work = &self.outbound.works[self.outbound.cursor];
        let psn = self.outbound.next;
        let again = psn.is_before(self.outbound.fresh);
        let is_read = matches!(work.operation.0, Operation::Read { .. });
        let next = if is_read { work.end() } else { psn.plus(1) };
        let id = work.id;
        if next == work.end() {
            self.outbound.reads += u32::from(work.is_read_or_atomic());
            self.outbound.cursor += 1;
        }
        self.outbound.next = next;
        if self.outbound.fresh.is_before(next) {
            self.outbound.fresh = next;
        }
        card.counters.retransmitted_pkts += u64::from(again);
        self.outbound.unrequested = match plan.header.bth.ack_request {
            true => 0,
            false => self.outbound.unrequested + 1,
        };
        self.note_pace(card, ctx, plan);
        self.tell_sent(card, ctx, plan, Some(id), again);
        if self.kind.is_reliable() {
            if self.outbound.ack_deadline.is_none() {
                self.restart_ack_timer(card, ctx);
            }
        } else {
            self.outbound.unacked = next;
            self.retire(card, ctx);
        }
    }
}
