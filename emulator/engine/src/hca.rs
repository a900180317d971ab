//! The card: packets in and out, timers, doorbells.

use crate::ahead::ReadAhead;
use crate::card::Card;
use crate::cm::Manager;
use crate::congestion::priority;
use crate::queue_pair::QueuePair;
use crate::table::Table;
use crate::{
    Answers, AsyncEvent, ClientId, Counters, DropReason, Event, Instant, Limits, Memory, Packet, PayloadMode,
    PortState, QpKind, Reason, Settings, State, Subscriber,
};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::net::IpAddr;
use softhca_queue::DoorbellConsumer;
use softhca_wire::{
    Bth, Ecn, Envelope, Gid, Header, ICRC_LEN, Malformed, Opcode, PartitionKey, Qpn, Transport,
};

/// What a call to the card is given: the time, the memory behind regions, and who hears events.
pub struct Context<'a> {
    /// The time.
    pub now: Instant,
    /// The memory behind regions.
    pub memory: &'a mut dyn Memory,
    /// Hears what happens.
    pub events: &'a mut dyn Subscriber,
}

impl Context<'_> {
    #[inline]
    pub(crate) fn tell(&mut self, event: Event) {
        self.events.event(self.now, &event);
    }
}

/// Says whether the driver may send to a destination now. A queue pair that may not is parked until
/// [`Hca::unpark`].
pub trait Gate {
    /// How many packets of up to `size` bytes, IP headers excluded, may go in this envelope now; zero parks.
    fn packets(&mut self, envelope: &Envelope, size: usize) -> usize;
}

/// Lets everything through.
impl Gate for () {
    fn packets(&mut self, _: &Envelope, _: usize) -> usize {
        usize::MAX
    }
}

/// Packets of one destination and one size (the last may be shorter), one behind the other in the lent
/// buffer. Each ends with four bytes of room for its ICRC, which whoever knows the IP identification seals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where they go, and how they are marked.
    pub envelope: Envelope,
    /// Bytes of each packet.
    pub segment: usize,
    /// How many packets.
    pub count: usize,
    /// Bytes of all packets.
    pub bytes: usize,
    /// The queue pair that sends them.
    pub queue_pair: Qpn,
    /// The service level of its path: their priority where their DSCP is zero.
    pub service_level: u8,
    /// Bytes of payload and pad of each packet that are not in the buffer, if payloads are elided.
    pub elided: usize,
}

/// A packet that may be sent next.
pub(crate) struct Plan {
    pub header: Header,
    pub payload: u32,
    pub envelope: Envelope,
    pub service_level: u8,
    /// Where in its message the payload begins.
    pub offset: u64,
    pub reply: bool,
}

/// The card.
pub struct Hca {
    pub(crate) queue_pairs: Table<QueuePair>,
    pub(crate) card: Card,
    pub(crate) clients: BTreeMap<ClientId, DoorbellConsumer>,
    pub(crate) next_client: u32,
    pub(crate) limits: Limits,
    pub(crate) cm: Manager,
    heard: Vec<Qpn>,
}

impl Hca {
    /// A card with these settings and GIDs; GID 0 is the address of its port.
    pub fn new(settings: Settings, gids: Vec<Gid>) -> Hca {
        let limits = Limits::CARD;
        Hca {
            queue_pairs: Table::new(limits.queue_pairs, 2),
            card: Card::new(settings, gids, &limits),
            clients: BTreeMap::new(),
            next_client: 0,
            limits,
            cm: Manager::new(settings.seed),
            heard: Vec::new(),
        }
    }

    /// What the card counted so far.
    pub fn counters(&self) -> &Counters {
        &self.card.counters
    }

    /// The settings of the device.
    pub fn settings(&self) -> &Settings {
        &self.card.settings
    }

    /// The GID table.
    pub fn gids(&self) -> &[Gid] {
        &self.card.gids
    }

    /// Takes a packet, from the BTH to the pad bytes, whose ICRC was found right.
    pub fn receive(&mut self, ctx: &mut Context<'_>, envelope: &Envelope, bytes: &[u8]) {
        match Transport::parse(bytes) {
            Ok(transport) => self.take(ctx, envelope, &transport),
            Err(why) => self.note_malformed(ctx, why),
        }
    }

    /// Takes the headers of a packet whose payload, of `elided` bytes with its pad, was left out.
    pub fn receive_elided(
        &mut self,
        ctx: &mut Context<'_>,
        envelope: &Envelope,
        bytes: &[u8],
        elided: usize,
    ) {
        static ZEROES: [u8; 4096] = [0; 4096];
        match Header::parse(bytes) {
            Ok((header, _)) => {
                let payload = elided.saturating_sub(header.bth.pad.into()).min(ZEROES.len());
                let transport = Transport { header, payload: &ZEROES[..payload], padding: &[] };
                self.take(ctx, envelope, &transport);
            }
            Err(why) => self.note_malformed(ctx, why),
        }
    }

    fn note_malformed(&mut self, ctx: &mut Context<'_>, why: Malformed) {
        self.card.counters.rx_malformed += 1;
        let reason = DropReason::Malformed(why);
        ctx.tell(Event::PacketDropped { qp: Qpn::default(), packet: None, reason });
    }

    fn take(&mut self, ctx: &mut Context<'_>, envelope: &Envelope, transport: &Transport<'_>) {
        let packet = Packet::of(&transport.header, transport.payload.len(), envelope.source);
        if self.card.port == PortState::Down {
            self.card.counters.rx_dropped += 1;
            let (qp, reason) = (packet.destination, DropReason::PortDown);
            return ctx.tell(Event::PacketDropped { qp, packet: Some(packet), reason });
        }
        if packet.destination == Qpn::MULTICAST {
            self.receive_multicast(ctx, envelope, transport, packet);
        } else if packet.destination == Qpn::GSI {
            self.cm.receive(&mut self.card, ctx, envelope, transport, packet);
        } else {
            self.receive_for(ctx, envelope, transport, packet, packet.destination);
        }
        self.settle(ctx);
    }

    /// Whether a packet with this header would show its receiver that one before it is missing. Datagrams have
    /// no order.
    pub fn skips(&self, bth: &Bth) -> bool {
        let Some(qp) = self.queue_pairs.get(bth.destination.value()) else { return false };
        if bth.opcode.service() != qp.kind.service() {
            return false;
        }
        match (qp.kind, bth.opcode.operation().is_request()) {
            (QpKind::Rc | QpKind::XrcTarget, true) => {
                qp.state.receives() && !qp.inbound.refused && bth.psn.distance(qp.inbound.expected) > 0
            }
            (QpKind::Uc, true) => qp.state.receives() && bth.psn.distance(qp.inbound.expected) > 0,
            (QpKind::Rc | QpKind::XrcInitiator, false) => {
                qp.state.takes_responses() && qp.outbound.leaves_unanswered(bth.psn)
            }
            _ => false,
        }
    }

    /// Counts packets that the host itself had put out of order, and that its driver put in order again.
    pub fn note_host_reordered(&mut self, packets: u64) {
        self.card.counters.host_reordered += packets;
    }

    /// A packet came whose ICRC was wrong.
    pub fn note_bad_icrc(&mut self, ctx: &mut Context<'_>) {
        self.card.counters.rx_icrc_encapsulated += 1;
        let reason = DropReason::BadIcrc;
        ctx.tell(Event::PacketDropped { qp: Qpn::default(), packet: None, reason });
    }

    fn receive_multicast(
        &mut self,
        ctx: &mut Context<'_>,
        envelope: &Envelope,
        transport: &Transport<'_>,
        packet: Packet,
    ) {
        let group = Gid::from(envelope.destination);
        let sender = transport.header.deth.map(|deth| deth.source);
        let from_here = self.card.gids.contains(&Gid::from(envelope.source));
        let mut delivered = false;
        let mut index = 0;
        while let Some(number) = self.card.groups.get(&group).and_then(|members| members.get(index).copied())
        {
            index += 1;
            // The sender itself does not get its own datagram back (IBA 10.5.2.2).
            if from_here && Some(number) == sender {
                continue;
            }
            delivered = true;
            self.receive_for(ctx, envelope, transport, packet, number);
        }
        if !delivered {
            self.card.counters.rx_dropped += 1;
            let reason = DropReason::NotAMember;
            ctx.tell(Event::PacketDropped { qp: packet.destination, packet: Some(packet), reason });
        }
    }

    fn receive_for(
        &mut self,
        ctx: &mut Context<'_>,
        envelope: &Envelope,
        transport: &Transport<'_>,
        packet: Packet,
        number: Qpn,
    ) {
        let card = &mut self.card;
        let Some(qp) = self.queue_pairs.get_mut(number.value()) else {
            card.counters.rx_dropped += 1;
            let reason = DropReason::NoQueuePair;
            return ctx.tell(Event::PacketDropped { qp: number, packet: Some(packet), reason });
        };
        let opcode = packet.opcode;
        let is_request = opcode.operation().is_request();
        let reason = if opcode == Opcode::CNP {
            None
        } else if opcode.service() != qp.kind.service() {
            Some(DropReason::WrongService { expected: qp.kind.service().name() })
        } else if !PartitionKey::DEFAULT.matches(transport.header.bth.partition) {
            Some(DropReason::WrongPartition)
        } else if is_request && !qp.state.receives() {
            Some(DropReason::StateDoesNotReceive(qp.state))
        } else if !qp.kind.is_datagram()
            && (envelope.source != qp.envelope.destination || envelope.destination != qp.envelope.source)
        {
            Some(DropReason::WrongAddress)
        } else {
            None
        };
        if let Some(reason) = reason {
            return qp.tell_dropped(card, ctx, packet, reason);
        }
        card.counters.rcvd_pkts += 1;
        card.counters.rcvd_bytes += u64::from(packet.payload);
        ctx.tell(Event::PacketReceived { qp: number, packet });
        if envelope.ecn() == Ecn::CongestionExperienced && opcode != Opcode::CNP {
            qp.note_mark(card, ctx, &packet);
        }
        match qp.kind {
            _ if opcode == Opcode::CNP => qp.on_notification(card, ctx),
            QpKind::Ud | QpKind::Gsi => qp.on_datagram(card, ctx, transport, envelope, packet),
            QpKind::Uc => qp.on_unreliable(card, ctx, transport, packet),
            QpKind::Rc | QpKind::XrcInitiator | QpKind::XrcTarget if !is_request => {
                qp.on_response(card, ctx, transport, packet);
            }
            QpKind::Rc | QpKind::XrcTarget => qp.on_request(card, ctx, transport, packet),
            QpKind::XrcInitiator => {
                qp.tell_dropped(card, ctx, packet, DropReason::WrongService { expected: "XRC initiator" });
            }
        }
    }

    /// Builds the next packets in `buffer`: at most `most`, of one queue pair. `None` if there is nothing
    /// that may be sent now.
    pub fn transmit(
        &mut self,
        ctx: &mut Context<'_>,
        gate: &mut dyn Gate,
        buffer: &mut [u8],
        most: usize,
    ) -> Option<Run> {
        if !self.card.owing.is_empty()
            && let Some(run) = self.transmit_notification(ctx, gate, buffer)
        {
            return Some(run);
        }
        while let Some(number) = self.card.ready.pop_front() {
            let run = if number == Qpn::GSI {
                self.cm.outbox.fill_run(&mut self.card, ctx, gate, buffer, most)
            } else {
                let Some(qp) = self.queue_pairs.get_mut(number.value()) else { continue };
                qp.is_ready = false;
                qp.fill_run(&mut self.card, ctx, gate, buffer, most)
            };
            self.settle(ctx);
            if run.is_some() {
                return run;
            }
        }
        None
    }

    /// Whether a call of [`Hca::transmit`] may have something to send.
    pub fn is_ready(&self) -> bool {
        !self.card.ready.is_empty() || !self.card.owing.is_empty()
    }

    /// The driver may send to `destination` again. Who waited for that gets the whole time for its answers.
    pub fn unpark(&mut self, ctx: &mut Context<'_>, destination: IpAddr) {
        for number in self.card.parked.remove(&destination).unwrap_or_default() {
            if number == Qpn::GSI {
                self.cm.outbox.unpark(&mut self.card, destination);
            }
            if let Some(qp) = self.queue_pairs.get_mut(number.value()) {
                qp.is_parked = false;
                qp.restart_ack_timer(&mut self.card, ctx);
                qp.wake(&mut self.card);
            }
        }
        self.release_notifications();
    }

    /// The port at `destination` does not answer: timers towards it stand still.
    pub fn stall(&mut self, destination: IpAddr) {
        self.card.stalled.insert(destination);
    }

    /// The port at `destination` answers again: timers towards it start anew.
    pub fn resume(&mut self, ctx: &mut Context<'_>, destination: IpAddr) {
        if !self.card.stalled.remove(&destination) {
            return;
        }
        for number in self.queue_pairs.numbers(|qp| qp.envelope.destination == destination) {
            if let Some(qp) = self.queue_pairs.get_mut(number) {
                qp.restart_timers(&mut self.card, ctx);
            }
        }
        self.cm.resume(&mut self.card, ctx, destination);
    }

    /// When [`Hca::expire`] is to be called next.
    pub fn next_timeout(&self) -> Option<Instant> {
        match (self.card.timers.next(), self.card.pacers.next()) {
            (Some(timer), Some(pacer)) => Some(timer.min(pacer)),
            (timer, pacer) => timer.or(pacer),
        }
    }

    /// Does what was due by `ctx.now`.
    pub fn expire(&mut self, ctx: &mut Context<'_>) {
        while let Some((at, number)) = self.card.pacers.pop(ctx.now) {
            let Some(qp) = self.queue_pairs.get_mut(number.value()) else { continue };
            if qp.paced_at == Some(at) {
                qp.paced_at = None;
                qp.wake(&mut self.card);
            }
        }
        while let Some((at, number)) = self.card.timers.pop(ctx.now) {
            if number == Qpn::GSI {
                self.cm.expire(&mut self.card, ctx, at);
                continue;
            }
            let Some(qp) = self.queue_pairs.get_mut(number.value()) else { continue };
            if qp.timer_at == Some(at) {
                qp.timer_at = None;
                qp.expire(&mut self.card, ctx);
            }
        }
        self.settle(ctx);
    }

    /// Hears the doorbells of every client: new work is taken up, or flushed.
    pub fn ring(&mut self, ctx: &mut Context<'_>) {
        let mut heard = core::mem::take(&mut self.heard);
        for (client, doorbell) in &mut self.clients {
            doorbell.drain(&mut heard);
            for number in heard.drain(..) {
                let Some(qp) = self.queue_pairs.get_mut(number.value()) else { continue };
                if qp.client != *client {
                    continue;
                }
                if let Some(ring) = &qp.outbound.ring {
                    ring.hear();
                }
                match qp.state {
                    State::Error => {
                        qp.flush_sends(&mut self.card, ctx);
                        qp.flush_receives(&mut self.card, ctx);
                    }
                    State::SendQueueError => qp.flush_sends(&mut self.card, ctx),
                    _ => qp.wake(&mut self.card),
                }
            }
        }
        self.heard = heard;
        self.settle(ctx);
    }

    /// Stops the queue pairs of completion queues that overflowed.
    pub(crate) fn settle(&mut self, ctx: &mut Context<'_>) {
        while let Some(cq) = self.card.overflowed.pop() {
            let card = &self.card;
            let users = self
                .queue_pairs
                .numbers(|qp| qp.send_cq == Some(cq) || qp.receive_completion_queue(card) == Some(cq));
            for number in users {
                let Some(qp) = self.queue_pairs.get_mut(number) else { continue };
                if matches!(qp.state, State::Reset | State::Init | State::Error) {
                    continue;
                }
                let event = AsyncEvent::QueuePairFatal(qp.number);
                qp.enter_error(&mut self.card, ctx, Reason::CompletionQueueOverflow, Some(event));
            }
        }
    }

    /// The state of the port.
    pub fn port(&self) -> PortState {
        self.card.port
    }

    /// The link of the port went down, or came up: whoever uses the card is told, and what arrives while it is down
    /// is dropped. What is sent is the driver's to hold back or lose.
    pub fn set_port(&mut self, ctx: &mut Context<'_>, state: PortState) {
        if core::mem::replace(&mut self.card.port, state) != state {
            let event = match state {
                PortState::Down => AsyncEvent::PortDown,
                PortState::Active => AsyncEvent::PortActive,
            };
            self.raise(ctx, event);
        }
    }

    /// Raises an asynchronous event that is nobody's in particular: of the port, or of the device.
    pub fn raise(&mut self, ctx: &mut Context<'_>, event: AsyncEvent) {
        ctx.tell(Event::Raised { client: None, event });
    }

    /// The peer at `destination` is gone: its connections fail.
    pub fn fail_link(&mut self, ctx: &mut Context<'_>, destination: IpAddr) {
        let affected = self.queue_pairs.numbers(|qp| {
            qp.kind.is_reliable() && qp.envelope.destination == destination && qp.outbound.is_outstanding()
        });
        for number in affected {
            if let Some(qp) = self.queue_pairs.get_mut(number) {
                qp.fail(&mut self.card, ctx, softhca_queue::Status::RetryExceeded, Reason::LinkDead);
            }
        }
        self.cm.fail_link(&mut self.card, ctx, destination);
        self.settle(ctx);
    }
}

impl QueuePair {
    /// Fills `buffer` with packets of one size, and says whether the queue pair has more.
    fn fill_run(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        gate: &mut dyn Gate,
        buffer: &mut [u8],
        most: usize,
    ) -> Option<Run> {
        let mut run = Run {
            envelope: self.envelope,
            segment: 0,
            count: 0,
            bytes: 0,
            queue_pair: self.number,
            service_level: 0,
            elided: 0,
        };
        let elides = card.settings.payload == PayloadMode::Elided;
        let mut most = most;
        let mut replied = false;
        let is_far = ctx.memory.is_far();
        let mut ahead = ReadAhead::default();
        if is_far {
            self.take_ahead(card, ctx, most);
        }
        while let Some(plan) = self.plan(card, ctx) {
            let largest = Header::MAX_LEN + plan.payload as usize + 3 + ICRC_LEN;
            if run.count == 0 {
                (run.envelope, run.service_level) = (plan.envelope, plan.service_level);
                if card.paused != 0 && self.is_paused(card, &plan) {
                    return None;
                }
                most = most.min(gate.packets(&plan.envelope, largest));
                if most == 0 {
                    self.park(card, plan.envelope.destination);
                    return None;
                }
            }
            // Somebody waits for a lone answer, nobody for its acknowledgement.
            let goes_alone =
                run.count == 1 && plan.reply && !replied && card.ready.is_empty() && self.answers_ahead(card);
            if run.count == most || run.bytes + largest > buffer.len() || goes_alone {
                self.wake(card);
                break;
            }
            let at = run.bytes + plan.header.emit(&mut buffer[run.bytes..]);
            let (mut payload, mut pad) = (plan.payload as usize, usize::from(plan.header.bth.pad));
            if elides {
                // Packets without their payload cannot be told apart by their size: they go one by one.
                most = 1;
                run.elided = payload + pad;
                (payload, pad) = (0, 0);
            }
            let end = at + payload + pad + ICRC_LEN;
            let size = end - run.bytes;
            // The packets of a connected queue pair all go the same way.
            let elsewhere = match self.kind.is_datagram() {
                true => plan.envelope != run.envelope,
                false => plan.envelope.traffic_class != run.envelope.traffic_class,
            };
            if run.count > 0 && (size > run.segment || elsewhere) {
                self.wake(card);
                break;
            }
            let mut is_there = is_far && ahead.holds(&plan, at, payload);
            if is_far && !is_there {
                let read = self.read_ahead(card, ctx, &plan, (at, size), &mut buffer[at..], most - run.count);
                ahead = read.unwrap_or_default();
                is_there = ahead.holds(&plan, at, payload);
            }
            if !is_there && !self.fill(card, ctx, &plan, &mut buffer[at..at + payload]) {
                continue;
            }
            buffer[at + payload..end].fill(0);
            if plan.reply {
                replied = true;
                self.note_reply_sent(card, ctx, &plan);
            } else {
                self.note_request_sent(card, ctx, &plan);
            }
            if run.count == 0 {
                run.segment = size;
            }
            run.count += 1;
            run.bytes = end;
            if size < run.segment || run.count == most {
                self.wake_for_more(card, ctx);
                break;
            }
        }
        // Whoever found no room in this run is the first in the next. An acknowledgement, being short, mostly
        // finds room behind several requests, which saves the driver a send.
        self.replies_last = replied || self.inbound.owed.is_empty();
        (run.count > 0).then_some(run)
    }

    /// Whether an answer goes before its acknowledgement. To this card itself it would not get there sooner.
    fn answers_ahead(&self, card: &Card) -> bool {
        card.settings.answers == Answers::Ahead && self.envelope.destination != self.envelope.source
    }

    /// Wakes the queue pair if it has more to send: now, or when its rate lets it.
    fn wake_for_more(&mut self, card: &mut Card, ctx: &mut Context<'_>) {
        if !self.inbound.owed.is_empty() {
            self.wake(card);
        } else if self.may_go(card, ctx) {
            self.wake_requester(card);
        }
    }

    /// Whether the priority of a packet is stopped. If so, the queue pair waits until it goes on.
    fn is_paused(&mut self, card: &mut Card, plan: &Plan) -> bool {
        let priority = priority(&plan.envelope, plan.service_level);
        let is_paused = card.paused >> priority & 1 == 1;
        if is_paused && !self.is_halted {
            self.is_halted = true;
            card.halted[usize::from(priority)].push(self.number);
        }
        is_paused
    }

    /// Waits until the driver may send to `destination`.
    fn park(&mut self, card: &mut Card, destination: IpAddr) {
        if !self.is_parked {
            self.is_parked = true;
            card.parked.entry(destination).or_default().push(self.number);
        }
    }

    /// The next packet: replies and requests take turns, so that neither starves the other.
    fn plan(&mut self, card: &mut Card, ctx: &mut Context<'_>) -> Option<Plan> {
        if self.replies_last {
            self.plan_request(card, ctx).or_else(|| self.plan_reply(card, ctx))
        } else {
            self.plan_reply(card, ctx).or_else(|| self.plan_request(card, ctx))
        }
    }

    /// Fills in the payload; false if that was not possible and the packet is not sent.
    #[inline]
    fn fill(&mut self, card: &mut Card, ctx: &mut Context<'_>, plan: &Plan, into: &mut [u8]) -> bool {
        if into.is_empty() {
            return true;
        }
        if plan.reply {
            match self.fill_reply(card, ctx, plan, into) {
                Ok(()) => true,
                Err(why) => {
                    self.fail_reply(card, ctx, plan, why);
                    false
                }
            }
        } else {
            match self.fill_request(card, ctx, plan, into) {
                Ok(()) => true,
                Err(failure) => {
                    self.fail_local(card, ctx, failure);
                    false
                }
            }
        }
    }

    pub(crate) fn tell_sent(
        &self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        plan: &Plan,
        work: Option<u64>,
        again: bool,
    ) {
        card.counters.sent_pkts += 1;
        card.counters.sent_bytes += u64::from(plan.payload);
        let packet = Packet::of(&plan.header, plan.payload as usize, plan.envelope.destination);
        ctx.tell(Event::PacketSent { qp: self.number, packet, work, again });
    }

    pub(crate) fn tell_dropped(
        &self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        packet: Packet,
        reason: DropReason,
    ) {
        card.counters.rx_dropped += 1;
        ctx.tell(Event::PacketDropped { qp: self.number, packet: Some(packet), reason });
    }
}
