//! Congestion control at the card: the notification point answers marks, the reaction point limits rates.
//!
//! What each side does is DCQCN's, as published by Zhu et al. at SIGCOMM 2015; numbers are integers, so that
//! a run gives the same rates on every machine.

use crate::card::Card;
use crate::limiter::Limiter;
use crate::owing::Owing;
use crate::queue_pair::QueuePair;
use crate::run::Plan;
use crate::{Context, Event, Hca, Packet, State};
use core::time::Duration;
use softhca_wire::{Bth, Ecn, Envelope, Header, ICRC_LEN, Opcode, Operation, Psn, Qpn};

/// The congestion settings of a device. Both halves are off unless asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Congestion {
    /// Answers marked packets with notifications; `None` counts them only.
    pub notification: Option<Notification>,
    /// Limits rates when notifications come; `None` counts them only.
    pub control: Option<Dcqcn>,
}

impl Congestion {
    /// Both halves with the paper's parameters.
    pub const DCQCN: Congestion =
        Congestion { notification: Some(Notification::PAPER), control: Some(Dcqcn::PAPER) };
}

/// The notification point: what a receiver of marked packets does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notification {
    /// The least time between two notifications of one queue pair.
    pub interval: Duration,
    /// The traffic class of notifications: DSCP in the upper six bits.
    pub traffic_class: u8,
}

impl Notification {
    /// The interval of the paper, 50 µs; DSCP 48, which is priority 6.
    pub const PAPER: Notification =
        Notification { interval: Duration::from_micros(50), traffic_class: 48 << 2 };
}

impl Default for Notification {
    fn default() -> Notification {
        Notification::PAPER
    }
}

/// The reaction point: how a sender changes the rate of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dcqcn {
    /// The rate of the port, at which every queue pair starts. A world sets it from the cable.
    pub line_rate: u64,
    /// The least rate, in bits per second.
    pub least_rate: u64,
    /// One part in so many of the distance is made up when `alpha` changes: 1/g.
    pub gain_divisor: u32,
    /// How long without a notification until `alpha` falls.
    pub alpha_interval: Duration,
    /// How long until the rate rises, again and again.
    pub rate_interval: Duration,
    /// After how many bytes the rate rises, again and again.
    pub byte_counter: u64,
    /// Rises of each kind before the target itself rises: F.
    pub fast_recovery: u32,
    /// By how much the target rises in additive increase, in bits per second: R_AI.
    pub additive_increase: u64,
    /// By how much more with each step in hyper increase, in bits per second: R_HAI.
    pub hyper_increase: u64,
    /// How far a sender that was late may catch up. Nothing in virtual time, where nobody is late.
    pub slack: Duration,
}

impl Dcqcn {
    /// The parameters of the paper at 100 Gb/s. It gives none for hyper increase: ten times the additive one
    /// is the ratio that cards ship with.
    pub const PAPER: Dcqcn = Dcqcn {
        line_rate: 100_000_000_000,
        least_rate: 10_000_000,
        gain_divisor: 256,
        alpha_interval: Duration::from_micros(55),
        rate_interval: Duration::from_micros(55),
        byte_counter: 10_000_000,
        fast_recovery: 5,
        additive_increase: 40_000_000,
        hyper_increase: 400_000_000,
        slack: Duration::ZERO,
    };
}

impl Default for Dcqcn {
    fn default() -> Dcqcn {
        Dcqcn::PAPER
    }
}

/// Why the rate of a queue pair changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum RateCause {
    Notified,
    TimePassed,
    BytesSent,
    Asked,
}

/// Bytes of a notification behind the BTH, all reserved.
const CNP_BODY: usize = 16;
/// The bit of the BTH's reserved byte that says "backward congestion".
const BECN: u8 = 0x40;

/// The priority of a packet: the upper three bits of its DSCP or, if it has none, its service level.
pub(crate) const fn priority(envelope: &Envelope, service_level: u8) -> u8 {
    match envelope.traffic_class >> 2 {
        0 => service_level & 7,
        dscp => dscp >> 3,
    }
}

impl QueuePair {
    /// Takes note of the congestion mark of a packet, and owes a notification if one is due.
    pub(crate) fn note_mark(&mut self, card: &mut Card, ctx: &mut Context<'_>, packet: &Packet) {
        card.counters.np_ecn_marked_roce_packets += 1;
        let answered = self.kind.is_datagram() || packet.opcode.operation() == Operation::Acknowledge;
        let Some(notification) = card.settings.congestion.notification.filter(|_| !answered) else { return };
        let due = self.notified_at.is_none_or(|at| ctx.now >= at.plus(notification.interval));
        if due {
            self.notified_at = Some(ctx.now);
            let traffic_class = notification.traffic_class;
            let envelope = Envelope { traffic_class, ..self.envelope };
            let bth = Bth::new(Opcode::CNP, self.attributes.destination, Psn::new(0));
            let header = Header::new(Bth { reserved: BECN, ..bth });
            let queue_pair = self.number;
            let (service_level, body, again) = (0, CNP_BODY, false);
            card.owe(ctx, Owing { queue_pair, envelope, service_level, header, body, again });
        }
        ctx.tell(Event::CongestionSeen { qp: self.number, psn: packet.psn, notified: due });
    }

    /// The peer was told of congestion on the way to it: sends slower.
    pub(crate) fn on_notification(&mut self, card: &mut Card, ctx: &mut Context<'_>) {
        card.counters.rp_cnp_handled += 1;
        let Some(settings) = &card.settings.congestion.control else { return };
        let limiter = self.limiter.get_or_insert_with(|| Limiter::new(settings, ctx.now).into());
        limiter.notified(settings, ctx.now);
        let event = limiter.event(self.number, RateCause::Notified);
        ctx.tell(event);
    }

    /// Whether the rate lets a packet with payload go now. If not, a timer wakes the queue pair.
    #[inline]
    pub(crate) fn may_go(&mut self, card: &mut Card, ctx: &mut Context<'_>) -> bool {
        if self.limiter.is_none() {
            return true;
        }
        self.wait_for_turn(card, ctx)
    }

    fn wait_for_turn(&mut self, card: &mut Card, ctx: &mut Context<'_>) -> bool {
        let Some(settings) = &card.settings.congestion.control else { return true };
        let Some(limiter) = &mut self.limiter else { return true };
        if limiter.catch_up(settings, ctx.now) {
            let event = limiter.event(self.number, RateCause::TimePassed);
            ctx.tell(event);
        }
        let at = limiter.next_at();
        if at <= ctx.now {
            return true;
        }
        if self.paced_at != Some(at) {
            self.paced_at = Some(at);
            card.pacers.push(at, self.number);
        }
        false
    }

    /// Whether the next packet of a message under way waits for its turn: a timer wakes the queue pair, and to try
    /// before changes nothing.
    #[inline]
    pub(crate) fn waits_for_turn(&self, ctx: &Context<'_>) -> bool {
        let Some(limiter) = &self.limiter else { return false };
        self.paced_at == Some(limiter.next_at())
            && limiter.is_quiet(ctx.now)
            && self.state == State::ReadyToSend
            && self.inbound.owed.is_empty()
            && self.outbound.works.get(self.outbound.cursor).is_some_and(|work| {
                work.outcome.is_none()
                    && !work.is_read_or_atomic()
                    && work.first.is_before(self.outbound.next)
            })
    }

    /// A packet left: the next one waits its time.
    #[inline]
    pub(crate) fn note_pace(&mut self, card: &Card, ctx: &mut Context<'_>, plan: &Plan) {
        if plan.payload > 0
            && let Some(limiter) = &mut self.limiter
            && let Some(settings) = &card.settings.congestion.control
        {
            /// Ethernet header, check sequence, preamble and gap.
            const ETHERNET: usize = 38;
            let header = plan.header.bth.opcode.header_length() + ICRC_LEN;
            let bytes = plan.envelope.overhead() + header + plan.payload as usize + ETHERNET;
            if limiter.sent(settings, ctx.now, bytes as u64) {
                let event = limiter.event(self.number, RateCause::BytesSent);
                ctx.tell(event);
            }
        }
    }
}

/// Says of a packet with payload that its sender reacts to marks.
pub(crate) fn mark_capable(card: &Card, envelope: &mut Envelope) {
    if card.settings.congestion.control.is_some() && envelope.ecn() == Ecn::NotCapable {
        envelope.traffic_class |= Ecn::Capable0 as u8;
    }
}

impl Hca {
    /// The priorities in this mask stop, all others go on: what a pause frame of the port asks for.
    pub fn pause(&mut self, priorities: u8) {
        let resumed = self.card.paused & !priorities;
        self.card.paused = priorities;
        if resumed == 0 {
            return;
        }
        for priority in (0..8).filter(|priority| resumed >> priority & 1 == 1) {
            for number in core::mem::take(&mut self.card.halted[priority]) {
                if let Some(qp) = self.queue_pairs.get_mut(number.value()) {
                    qp.is_halted = false;
                    qp.wake(&mut self.card);
                }
            }
        }
        self.release_owing();
    }

    /// Counts pause frames that reached the port.
    pub fn note_pause_frames(&mut self, frames: u64) {
        self.card.counters.rx_pause_frames += frames;
    }

    /// The priorities that are stopped.
    pub fn paused(&self) -> u8 {
        self.card.paused
    }

    /// Tells the rate of the port.
    pub fn set_line_rate(&mut self, bits_per_second: u64) {
        if let Some(control) = &mut self.card.settings.congestion.control {
            control.line_rate = bits_per_second;
        }
    }

    /// Limits a queue pair to a rate, from which congestion control goes on. False if it is off, or if there
    /// is no such queue pair.
    pub fn set_rate(&mut self, ctx: &mut Context<'_>, queue_pair: Qpn, bits_per_second: u64) -> bool {
        let Some(qp) = self.queue_pairs.get_mut(queue_pair.value()) else { return false };
        let Some(settings) = &self.card.settings.congestion.control else { return false };
        let limiter = qp.limiter.get_or_insert_with(|| Limiter::new(settings, ctx.now).into());
        limiter.set(settings, ctx.now, bits_per_second);
        ctx.tell(limiter.event(queue_pair, RateCause::Asked));
        true
    }

    /// The rate that congestion control lets a queue pair send at; `None` if nothing limits it.
    pub fn rate(&self, queue_pair: Qpn) -> Option<u64> {
        let settings = self.card.settings.congestion.control.as_ref()?;
        let limiter = self.queue_pairs.get(queue_pair.value())?.limiter.as_ref()?;
        limiter.is_active(settings).then(|| limiter.rate())
    }
}
