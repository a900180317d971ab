//! The card: packets in and out, timers, doorbells.

use crate::card::Card;
use crate::cm::Manager;
use crate::queue_pair::QueuePair;
use crate::table::Table;
use crate::{
    AsyncEvent, ClientId, Counters, DropReason, Event, Gate, Instant, Limits, Memory, Packet, PortState,
    QpKind, Reason, Run, Settings, State, Subscriber,
};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::net::IpAddr;
use softhca_queue::DoorbellConsumer;
use softhca_wire::{Bth, Ecn, Envelope, Gid, Header, Malformed, Opcode, PartitionKey, Qpn, Transport};

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

/// The card.
#[repr(C)]
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
            && let Some(run) = self.transmit_owing(ctx, gate, buffer)
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
        self.release_owing();
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
    #[inline]
    pub(crate) fn settle(&mut self, ctx: &mut Context<'_>) {
        if !self.card.overflowed.is_empty() {
            self.stop_overflowed(ctx);
        }
    }

    fn stop_overflowed(&mut self, ctx: &mut Context<'_>) {
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
        self.forget_last_words(destination);
        self.settle(ctx);
    }
}
