//! Transmission of a queue pair: alternates between requests and responses and fills packet batches.

use super::QueuePair;
use super::planned_packet::PlannedPacket;
use crate::core::addressing::priority;
use crate::core::hca_state::HcaState;
use crate::{
    Context, DropReason, Event, PacketBatch, PacketSummary, PayloadMode, ResponseOrder, TransmitGate,
};
use core::net::IpAddr;
use softhca_wire::{ICRC_LEN, Qpn, QpnSlot, TransportHeader};

impl QueuePair {
    /// Fills `buffer` with packets of one size. Schedules the queue pair again if it has more.
    pub(crate) fn fill_batch(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        gate: &mut dyn TransmitGate,
        buffer: &mut [u8],
        max_packets: usize,
    ) -> Option<PacketBatch> {
        let mut batch = PacketBatch {
            addressing: self.addressing,
            segment_size: 0,
            packets: 0,
            bytes: 0,
            is_unacknowledged: false,
            qpn: self.qpn,
            service_level: 0,
            elided_payload: 0,
        };
        let elides = hca.settings.payload_mode == PayloadMode::Elided;
        let mut max_packets = max_packets;
        let mut replied = false;
        let mut to = Qpn::default();
        while let Some(plan) = self.plan_next(hca, ctx) {
            let largest = TransportHeader::MAX_LEN + plan.payload_length as usize + 3 + ICRC_LEN;
            if batch.packets == 0 {
                (batch.addressing, batch.service_level) = (plan.addressing, plan.service_level);
                if hca.egress.paused_priorities != 0 && self.wait_if_priority_paused(hca, &plan) {
                    return None;
                }
                batch.is_unacknowledged =
                    !self.kind.is_reliable() || plan.is_response && plan.payload_length > 0;
                to = plan.header.bth.destination_qp;
                let allowed = gate.allowed_packets(&plan.addressing, to, largest, batch.is_unacknowledged);
                max_packets = max_packets.min(allowed);
                if max_packets == 0 {
                    self.block(hca, plan.addressing.destination);
                    return None;
                }
            }
            // An application may wait for a single response, but not for its ACK.
            let goes_alone = batch.packets == 1
                && plan.is_response
                && !replied
                && hca.egress.queue.is_empty()
                && self.sends_response_first(hca);
            if batch.packets == max_packets || batch.bytes + largest > buffer.len() || goes_alone {
                self.schedule_transmit(hca);
                break;
            }
            let at = batch.bytes + plan.header.emit(&mut buffer[batch.bytes..]);
            let (mut payload, mut pad) = (plan.payload_length as usize, usize::from(plan.header.bth.pad));
            if elides {
                // Packets without payload have no distinct sizes: each one is a batch.
                max_packets = 1;
                batch.elided_payload = payload + pad;
                (payload, pad) = (0, 0);
            }
            let end = at + payload + pad + ICRC_LEN;
            let size = end - batch.bytes;
            // All packets of a connected queue pair have the same destination. A batch goes to one process.
            let elsewhere = match self.kind.is_datagram() {
                true => {
                    let slot = |qpn| QpnSlot::of(qpn, QpnSlot::BITS);
                    plan.addressing != batch.addressing || slot(plan.header.bth.destination_qp) != slot(to)
                }
                false => plan.addressing.traffic_class != batch.addressing.traffic_class,
            };
            if batch.packets > 0 && (size > batch.segment_size || elsewhere) {
                self.schedule_transmit(hca);
                break;
            }
            if !self.fill_payload(hca, ctx, &plan, &mut buffer[at..at + payload]) {
                continue;
            }
            buffer[at + payload..end].fill(0);
            if plan.is_response {
                replied = true;
                self.on_response_sent(hca, ctx, &plan);
            } else {
                self.on_request_sent(hca, ctx, &plan);
            }
            if batch.packets == 0 {
                batch.segment_size = size;
            }
            batch.packets += 1;
            batch.bytes = end;
            if size < batch.segment_size || batch.packets == max_packets {
                self.schedule_if_pending(hca, ctx);
                break;
            }
        }
        // The side that found no room in this batch goes first in the next. An ACK is short and usually fits behind
        // several requests, which saves the driver a send.
        self.responses_last = replied || self.responder.pending_responses.is_empty();
        (batch.packets > 0).then_some(batch)
    }

    /// Whether a response precedes its ACK. A response to this HCA itself would not arrive sooner.
    fn sends_response_first(&self, hca: &HcaState) -> bool {
        hca.settings.response_order == ResponseOrder::ResponseFirst
            && self.addressing.destination != self.addressing.source
    }

    /// Schedules the queue pair if it has more to send: now, or when its rate allows it.
    fn schedule_if_pending(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>) {
        if !self.responder.pending_responses.is_empty() {
            self.schedule_transmit(hca);
        } else if self.may_send_now(hca, ctx) {
            self.schedule_requester(hca);
        }
    }

    /// Whether PFC pauses the priority of a packet. If so, the queue pair waits for its resumption.
    fn wait_if_priority_paused(&mut self, hca: &mut HcaState, plan: &PlannedPacket) -> bool {
        let priority = priority(&plan.addressing, plan.service_level);
        let is_paused = hca.egress.paused_priorities >> priority & 1 == 1;
        if is_paused && !self.is_paused {
            self.is_paused = true;
            hca.egress.paused_qps[usize::from(priority)].push(self.qpn);
        }
        is_paused
    }

    /// Waits until the transmit gate of `destination` opens. Responses that wait then precede requests posted meanwhile.
    fn block(&mut self, hca: &mut HcaState, destination: IpAddr) {
        self.responses_last &= self.responder.pending_responses.is_empty();
        if !self.is_blocked {
            self.is_blocked = true;
            hca.egress.blocked_qps.entry(destination).or_default().push(self.qpn);
        }
    }

    /// The next packet: responses and requests alternate, so that neither starves.
    fn plan_next(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>) -> Option<PlannedPacket> {
        if self.responses_last {
            self.plan_request(hca, ctx).or_else(|| self.plan_response(hca, ctx))
        } else {
            self.plan_response(hca, ctx).or_else(|| self.plan_request(hca, ctx))
        }
    }

    /// Fills in the payload. Returns false if that fails and the packet is not sent.
    #[inline]
    pub(crate) fn fill_payload(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        plan: &PlannedPacket,
        into: &mut [u8],
    ) -> bool {
        if into.is_empty() {
            return true;
        }
        if plan.is_response {
            match self.fill_response_payload(hca, ctx, plan, into) {
                Ok(()) => true,
                Err(why) => {
                    self.fail_response(hca, ctx, plan, why);
                    false
                }
            }
        } else {
            match self.fill_request_payload(hca, ctx, plan, into) {
                Ok(()) => true,
                Err(failure) => {
                    self.fail_current_wqe(hca, ctx, failure);
                    false
                }
            }
        }
    }

    pub(crate) fn emit_sent(
        &self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        plan: &PlannedPacket,
        wqe: Option<u64>,
        again: bool,
    ) {
        hca.counters.sent_pkts += 1;
        hca.counters.sent_bytes += u64::from(plan.payload_length);
        let packet =
            PacketSummary::new(&plan.header, plan.payload_length as usize, plan.addressing.destination);
        ctx.emit(Event::PacketSent { qp: self.qpn, packet, wr_id: wqe, retransmission: again });
    }

    pub(crate) fn emit_dropped(
        &self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        packet: PacketSummary,
        reason: DropReason,
    ) {
        hca.counters.rx_dropped += 1;
        ctx.emit(Event::PacketDropped { qp: self.qpn, packet: Some(packet), reason });
    }
}
