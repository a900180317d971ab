//! Congestion control at the card: the notification point answers marks, the reaction point limits rates.
//!
//! What each side does is DCQCN's, as published by Zhu et al. at SIGCOMM 2015; numbers are integers, so that
//! a run gives the same rates on every machine.

use crate::control_packets::ControlPacket;
use crate::dcqcn::Dcqcn;
use crate::hca_state::HcaState;
use crate::queue_pair::QueuePair;
use crate::transmit::PlannedPacket;
use crate::{Context, Event, Hca, PacketSummary, QpState};
use core::time::Duration;
use softhca_wire::{AddressHeaders, Bth, Ecn, ICRC_LEN, Opcode, Operation, Psn, Qpn, TransportHeader};

/// The congestion settings of a device. Both halves are off unless asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct CongestionSettings {
    /// Answers marked packets with notifications; `None` counts them only.
    pub notification_point: Option<NotificationPoint>,
    /// Limits rates when notifications come; `None` counts them only.
    pub rate_control: Option<DcqcnParameters>,
}

impl CongestionSettings {
    /// Both halves with the paper's parameters.
    pub const DCQCN: CongestionSettings = CongestionSettings {
        notification_point: Some(NotificationPoint::PAPER),
        rate_control: Some(DcqcnParameters::PAPER),
    };
}

/// The notification point: what a receiver of marked packets does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotificationPoint {
    /// The least time between two notifications of one queue pair.
    pub min_cnp_interval: Duration,
    /// The traffic class of notifications: DSCP in the upper six bits.
    pub traffic_class: u8,
}

impl NotificationPoint {
    /// The interval of the paper, 50 µs; DSCP 48, which is priority 6.
    pub const PAPER: NotificationPoint =
        NotificationPoint { min_cnp_interval: Duration::from_micros(50), traffic_class: 48 << 2 };
}

impl Default for NotificationPoint {
    fn default() -> NotificationPoint {
        NotificationPoint::PAPER
    }
}

/// The reaction point: how a sender changes the rate of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DcqcnParameters {
    /// The rate of the port, at which every queue pair starts. A world sets it from the cable.
    pub line_rate: u64,
    /// The least rate, in bits per second.
    pub min_rate: u64,
    /// One part in so many of the distance is made up when `alpha` changes: 1/g.
    pub gain_divisor: u32,
    /// How long without a notification until `alpha` falls.
    pub alpha_interval: Duration,
    /// How long until the rate rises, again and again.
    pub rate_increase_interval: Duration,
    /// After how many bytes the rate rises, again and again.
    pub byte_counter: u64,
    /// Rises of each kind before the target itself rises: F.
    pub fast_recovery_steps: u32,
    /// By how much the target rises in additive increase, in bits per second: R_AI.
    pub additive_increase: u64,
    /// By how much more with each step in hyper increase, in bits per second: R_HAI.
    pub hyper_increase: u64,
    /// How far a sender that was late may catch up. Nothing in virtual time, where nobody is late.
    pub slack: Duration,
}

impl DcqcnParameters {
    /// The parameters of the paper at 100 Gb/s. It gives none for hyper increase: ten times the additive one
    /// is the ratio that cards ship with.
    pub const PAPER: DcqcnParameters = DcqcnParameters {
        line_rate: 100_000_000_000,
        min_rate: 10_000_000,
        gain_divisor: 256,
        alpha_interval: Duration::from_micros(55),
        rate_increase_interval: Duration::from_micros(55),
        byte_counter: 10_000_000,
        fast_recovery_steps: 5,
        additive_increase: 40_000_000,
        hyper_increase: 400_000_000,
        slack: Duration::ZERO,
    };
}

impl Default for DcqcnParameters {
    fn default() -> DcqcnParameters {
        DcqcnParameters::PAPER
    }
}

/// Why the rate of a queue pair changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum RateCause {
    CnpReceived,
    RateTimer,
    ByteCounter,
    Requested,
}

/// Bytes of a notification behind the BTH, all reserved.
const CNP_RESERVED_LEN: usize = 16;
/// The bit of the BTH's reserved byte that says "backward congestion".
const BECN: u8 = 0x40;

/// The priority of a packet: the upper three bits of its DSCP or, if it has none, its service level.
pub(crate) const fn priority(envelope: &AddressHeaders, service_level: u8) -> u8 {
    match envelope.traffic_class >> 2 {
        0 => service_level & 7,
        dscp => dscp >> 3,
    }
}

impl QueuePair {
    /// Takes note of the congestion mark of a packet, and owes a notification if one is due.
    pub(crate) fn on_ecn_mark(&mut self, card: &mut HcaState, ctx: &mut Context<'_>, packet: &PacketSummary) {
        card.counters.np_ecn_marked_roce_packets += 1;
        let answered = self.kind.is_datagram() || packet.opcode.operation() == Operation::Acknowledge;
        let Some(notification) = card.settings.congestion.notification_point.filter(|_| !answered) else {
            return;
        };
        let due = self.last_cnp_at.is_none_or(|at| ctx.now >= at.plus(notification.min_cnp_interval));
        if due {
            self.last_cnp_at = Some(ctx.now);
            let traffic_class = notification.traffic_class;
            let envelope = AddressHeaders { traffic_class, ..self.addressing };
            let bth = Bth::new(Opcode::CNP, self.attributes.dest_qpn, Psn::new(0));
            let header = TransportHeader::new(Bth { reserved_byte: BECN, ..bth });
            let queue_pair = self.qpn;
            let (service_level, body, again) = (0, CNP_RESERVED_LEN, false);
            card.queue_control_packet(
                ctx,
                ControlPacket {
                    qpn: queue_pair,
                    addressing: envelope,
                    service_level,
                    header,
                    body_length: body,
                    retransmission: again,
                },
            );
        }
        ctx.emit(Event::EcnMarkReceived { qp: self.qpn, psn: packet.psn, cnp_queued: due });
    }

    /// The peer was told of congestion on the way to it: sends slower.
    pub(crate) fn on_cnp(&mut self, card: &mut HcaState, ctx: &mut Context<'_>) {
        card.counters.rp_cnp_handled += 1;
        let Some(settings) = &card.settings.congestion.rate_control else { return };
        let limiter = self.rate_control.get_or_insert_with(|| Dcqcn::new(settings, ctx.now).into());
        limiter.on_cnp(settings, ctx.now);
        let event = limiter.rate_changed_event(self.qpn, RateCause::CnpReceived);
        ctx.emit(event);
    }

    /// Whether the rate lets a packet with payload go now. If not, a timer wakes the queue pair.
    #[inline]
    pub(crate) fn may_send_now(&mut self, card: &mut HcaState, ctx: &mut Context<'_>) -> bool {
        if self.rate_control.is_none() {
            return true;
        }
        self.check_pacing(card, ctx)
    }

    fn check_pacing(&mut self, card: &mut HcaState, ctx: &mut Context<'_>) -> bool {
        let Some(settings) = &card.settings.congestion.rate_control else { return true };
        let Some(limiter) = &mut self.rate_control else { return true };
        if limiter.apply_elapsed_time(settings, ctx.now) {
            let event = limiter.rate_changed_event(self.qpn, RateCause::RateTimer);
            ctx.emit(event);
        }
        let at = limiter.next_send_at();
        if at <= ctx.now {
            return true;
        }
        if self.pacing_timer_at != Some(at) {
            self.pacing_timer_at = Some(at);
            card.pacing_timers.push(at, self.qpn);
        }
        false
    }

    /// Whether the next packet of a message under way waits for its turn: a timer wakes the queue pair, and to try
    /// before changes nothing.
    #[inline]
    pub(crate) fn is_pacing(&self, ctx: &Context<'_>) -> bool {
        let Some(limiter) = &self.rate_control else { return false };
        self.pacing_timer_at == Some(limiter.next_send_at())
            && limiter.is_waiting(ctx.now)
            && self.state == QpState::ReadyToSend
            && self.responder.pending_responses.is_empty()
            && self.requester.wqes.get(self.requester.wqe_index).is_some_and(|work| {
                work.outcome.is_none()
                    && !work.is_read_or_atomic()
                    && work.first_psn.is_before(self.requester.next_psn)
            })
    }

    /// A packet left: the next one waits its time.
    #[inline]
    pub(crate) fn record_paced_send(&mut self, card: &HcaState, ctx: &mut Context<'_>, plan: &PlannedPacket) {
        if plan.payload_length > 0
            && let Some(limiter) = &mut self.rate_control
            && let Some(settings) = &card.settings.congestion.rate_control
        {
            /// Ethernet header, check sequence, preamble and gap.
            const ETHERNET: usize = 38;
            let header = plan.header.bth.opcode.header_length() + ICRC_LEN;
            let bytes = plan.addressing.header_length() + header + plan.payload_length as usize + ETHERNET;
            if limiter.on_packet_sent(settings, ctx.now, bytes as u64) {
                let event = limiter.rate_changed_event(self.qpn, RateCause::ByteCounter);
                ctx.emit(event);
            }
        }
    }
}

/// Says of a packet with payload that its sender reacts to marks.
pub(crate) fn set_ecn_capable(card: &HcaState, envelope: &mut AddressHeaders) {
    if card.settings.congestion.rate_control.is_some() && envelope.ecn() == Ecn::NotEct {
        envelope.traffic_class |= Ecn::Ect0 as u8;
    }
}

impl Hca {
    /// The priorities in this mask stop, all others go on: what a pause frame of the port asks for.
    pub fn set_paused_priorities(&mut self, priorities: u8) {
        let resumed = self.state.paused_priorities & !priorities;
        self.state.paused_priorities = priorities;
        if resumed == 0 {
            return;
        }
        for priority in (0..8).filter(|priority| resumed >> priority & 1 == 1) {
            for number in core::mem::take(&mut self.state.paused_qps[priority]) {
                if let Some(qp) = self.queue_pairs.get_mut(number.value()) {
                    qp.is_paused = false;
                    qp.schedule_transmit(&mut self.state);
                }
            }
        }
        self.unblock_control_packets();
    }

    /// Counts pause frames that reached the port.
    pub fn count_pause_frames(&mut self, frames: u64) {
        self.state.counters.rx_pause_frames += frames;
    }

    /// The priorities that are stopped.
    pub fn paused_priorities(&self) -> u8 {
        self.state.paused_priorities
    }

    /// Tells the rate of the port.
    pub fn set_line_rate(&mut self, bits_per_second: u64) {
        if let Some(control) = &mut self.state.settings.congestion.rate_control {
            control.line_rate = bits_per_second;
        }
    }

    /// Limits a queue pair to a rate, from which congestion control goes on. False if it is off, or if there
    /// is no such queue pair.
    pub fn set_rate(&mut self, ctx: &mut Context<'_>, queue_pair: Qpn, bits_per_second: u64) -> bool {
        let Some(qp) = self.queue_pairs.get_mut(queue_pair.value()) else { return false };
        let Some(settings) = &self.state.settings.congestion.rate_control else { return false };
        let limiter = qp.rate_control.get_or_insert_with(|| Dcqcn::new(settings, ctx.now).into());
        limiter.set_rate(settings, ctx.now, bits_per_second);
        ctx.emit(limiter.rate_changed_event(queue_pair, RateCause::Requested));
        true
    }

    /// The rate that congestion control lets a queue pair send at; `None` if nothing limits it.
    pub fn rate(&self, queue_pair: Qpn) -> Option<u64> {
        let settings = self.state.settings.congestion.rate_control.as_ref()?;
        let limiter = self.queue_pairs.get(queue_pair.value())?.rate_control.as_ref()?;
        limiter.is_active(settings).then(|| limiter.rate())
    }
}
