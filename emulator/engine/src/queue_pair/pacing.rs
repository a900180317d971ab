//! Congestion control of a queue pair: CNPs for marked packets, and a paced send rate after a CNP.

use super::QueuePair;
use super::planned_packet::PlannedPacket;
use crate::control_packets::ControlPacket;
use crate::hca_state::HcaState;
use crate::rate_control::Dcqcn;
use crate::{Context, Event, PacketSummary, QpState, RateCause};
use softhca_wire::{AddressHeaders, Bth, Ecn, ICRC_LEN, Opcode, Operation, Psn, TransportHeader};

/// Bytes of a notification behind the BTH, all reserved.
const CNP_RESERVED_LEN: usize = 16;
/// The bit of the BTH's reserved byte that says "backward congestion".
const BECN: u8 = 0x40;

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
            card.control_packets.push(
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
