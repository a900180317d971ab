//! Congestion control of a queue pair: CNPs for marked packets, and a paced send rate after a CNP.

use super::QueuePair;
use super::planned_packet::PlannedPacket;
use crate::core::control_packets::{Body, ControlPacket};
use crate::core::hca_state::HcaState;
use crate::transport::ib::rate_control::{RateControl, RateSample};
use crate::{Context, Event, Instant, PacketSummary, QpState, RateCause};
use softhca_wire::{AddressHeaders, Bth, Ecn, ICRC_LEN, Opcode, Operation, Psn, TransportHeader};

/// The reserved bytes after the BTH of a CNP.
const CNP_RESERVED_LEN: usize = 16;
/// The BECN bit in the reserved byte of the BTH.
const BECN: u8 = 0x40;

impl QueuePair {
    /// Counts the ECN mark of a packet, and queues a CNP unless the last one was too recent.
    pub(crate) fn on_ecn_mark(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>, packet: &PacketSummary) {
        hca.counters.np_ecn_marked_roce_packets += 1;
        let answered = self.kind.is_datagram() || packet.opcode.operation() == Operation::Acknowledge;
        let Some(notification) = hca.settings.congestion.notification_point.filter(|_| !answered) else {
            return;
        };
        let due =
            self.responder.last_cnp_at.is_none_or(|at| ctx.now >= at.plus(notification.min_cnp_interval));
        if due {
            self.responder.last_cnp_at = Some(ctx.now);
            let traffic_class = notification.traffic_class;
            let addressing = AddressHeaders { traffic_class, ..self.addressing };
            let bth = Bth::new(Opcode::CNP, self.attributes.dest_qpn, Psn::new(0));
            let header = TransportHeader::new(Bth { reserved_byte: BECN, ..bth });
            let queue_pair = self.qpn;
            let (service_level, body, again) = (0, Body::Reserved(CNP_RESERVED_LEN), false);
            hca.egress.control_packets.push(
                ctx,
                ControlPacket {
                    qpn: queue_pair,
                    addressing,
                    service_level,
                    header,
                    body,
                    retransmission: again,
                },
            );
        }
        ctx.emit(Event::EcnMarkReceived { qp: self.qpn, psn: packet.psn, cnp_queued: due });
    }

    /// The peer reports congestion on the path: reduces the rate.
    pub(crate) fn on_cnp(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>) {
        hca.counters.rp_cnp_handled += 1;
        let Some(settings) = &hca.settings.congestion.rate_control else { return };
        let rate_control = self.requester.rate_control.get_or_insert_with(|| settings.start(ctx.now));
        let cause = rate_control.on_cnp(ctx.now);
        self.emit_rate_change(ctx, cause);
    }

    /// Passes a signal to the rate control, if there is one.
    #[inline]
    pub(crate) fn update_rate(
        &mut self,
        ctx: &mut Context<'_>,
        signal: impl FnOnce(&mut dyn RateControl, Instant) -> Option<RateCause>,
    ) {
        if let Some(rate_control) = &mut self.requester.rate_control {
            let cause = signal(&mut **rate_control, ctx.now);
            self.emit_rate_change(ctx, cause);
        }
    }

    /// Emits the present rate, if `cause` says that it has changed.
    pub(crate) fn emit_rate_change(&self, ctx: &mut Context<'_>, cause: Option<RateCause>) {
        if let (Some(rate_control), Some(cause)) = (&self.requester.rate_control, cause) {
            let RateSample { bits_per_second, target, alpha_millionths } = rate_control.sample();
            ctx.emit(Event::RateChanged { qp: self.qpn, bits_per_second, target, alpha_millionths, cause });
        }
    }

    /// Whether the rate allows a packet with payload now. If not, a timer schedules the queue pair.
    #[inline]
    pub(crate) fn may_send_now(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>) -> bool {
        self.requester.rate_control.is_none() || self.check_pacing(hca, ctx)
    }

    fn check_pacing(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>) -> bool {
        self.update_rate(ctx, |rate_control, now| rate_control.advance(now));
        let Some(rate_control) = &self.requester.rate_control else { return true };
        let at = rate_control.next_send_at();
        if at <= ctx.now {
            return true;
        }
        if self.pacing_timer_at != Some(at) {
            self.pacing_timer_at = Some(at);
            hca.pacing_timers.push(at, self.qpn);
        }
        false
    }

    /// Whether the next packet of a message in progress waits for the pacing timer, so that an earlier attempt is
    /// pointless.
    #[inline]
    pub(crate) fn is_pacing(&self, ctx: &Context<'_>) -> bool {
        let Some(rate_control) = &self.requester.rate_control else { return false };
        self.pacing_timer_at == Some(rate_control.next_send_at())
            && rate_control.is_waiting(ctx.now)
            && self.state == QpState::ReadyToSend
            && self.responder.pending_responses.is_empty()
            && self.requester.wqes.get(self.requester.wqe_index).is_some_and(|wqe| {
                wqe.outcome.is_none()
                    && !wqe.is_read_or_atomic()
                    && wqe.first_psn.is_before(self.requester.next_psn)
            })
    }

    /// Accounts for a sent packet, which delays the next one.
    #[inline]
    pub(crate) fn record_paced_send(&mut self, ctx: &mut Context<'_>, plan: &PlannedPacket) {
        if plan.payload_length > 0 && self.requester.rate_control.is_some() {
            /// Ethernet header, frame check sequence, preamble and inter-frame gap.
            const ETHERNET: usize = 38;
            let header = plan.header.bth.opcode.header_length() + ICRC_LEN;
            let bytes = plan.addressing.header_length() + header + plan.payload_length as usize + ETHERNET;
            self.update_rate(ctx, |rate_control, now| rate_control.on_packet_sent(now, bytes as u64));
        }
    }
}

/// Marks a packet with payload as ECN-capable if its sender reacts to CNPs.
pub(crate) fn set_ecn_capable(hca: &HcaState, addressing: &mut AddressHeaders) {
    if hca.settings.congestion.rate_control.is_some() && addressing.ecn() == Ecn::NotEct {
        addressing.traffic_class |= Ecn::Ect0 as u8;
    }
}
