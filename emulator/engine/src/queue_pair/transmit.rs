//! Packets out: what is sent next, and the runs that a driver sends at once.

use super::QueuePair;
use super::batch_copy::ReadAhead;
use super::planned_packet::PlannedPacket;
use crate::addressing::priority;
use crate::hca_state::HcaState;
use crate::{
    Context, DropReason, Event, PacketBatch, PacketSummary, PayloadMode, ResponseOrder, TransmitGate,
};
use core::net::IpAddr;
use softhca_wire::{ICRC_LEN, TransportHeader};

impl QueuePair {
    /// Fills `buffer` with packets of one size, and says whether the queue pair has more.
    pub(crate) fn fill_batch(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        gate: &mut dyn TransmitGate,
        buffer: &mut [u8],
        most: usize,
    ) -> Option<PacketBatch> {
        let mut run = PacketBatch {
            addressing: self.addressing,
            segment_size: 0,
            packets: 0,
            bytes: 0,
            qpn: self.qpn,
            service_level: 0,
            elided_payload: 0,
        };
        let elides = card.settings.payload_mode == PayloadMode::Elided;
        let mut most = most;
        let mut replied = false;
        let is_far = ctx.memory.prefers_batches();
        let mut ahead = ReadAhead::default();
        if is_far {
            self.prefetch_wqes(card, ctx, most);
        }
        while let Some(plan) = self.plan_next(card, ctx) {
            let largest = TransportHeader::MAX_LEN + plan.payload_length as usize + 3 + ICRC_LEN;
            if run.packets == 0 {
                (run.addressing, run.service_level) = (plan.addressing, plan.service_level);
                if card.paused_priorities != 0 && self.wait_if_priority_paused(card, &plan) {
                    return None;
                }
                most = most.min(gate.allowed_packets(&plan.addressing, largest));
                if most == 0 {
                    self.block(card, plan.addressing.destination);
                    return None;
                }
            }
            // Somebody waits for a lone answer, nobody for its acknowledgement.
            let goes_alone = run.packets == 1
                && plan.is_response
                && !replied
                && card.transmit_queue.is_empty()
                && self.sends_response_first(card);
            if run.packets == most || run.bytes + largest > buffer.len() || goes_alone {
                self.schedule_transmit(card);
                break;
            }
            let at = run.bytes + plan.header.emit(&mut buffer[run.bytes..]);
            let (mut payload, mut pad) = (plan.payload_length as usize, usize::from(plan.header.bth.pad));
            if elides {
                // Packets without their payload cannot be told apart by their size: they go one by one.
                most = 1;
                run.elided_payload = payload + pad;
                (payload, pad) = (0, 0);
            }
            let end = at + payload + pad + ICRC_LEN;
            let size = end - run.bytes;
            // The packets of a connected queue pair all go the same way.
            let elsewhere = match self.kind.is_datagram() {
                true => plan.addressing != run.addressing,
                false => plan.addressing.traffic_class != run.addressing.traffic_class,
            };
            if run.packets > 0 && (size > run.segment_size || elsewhere) {
                self.schedule_transmit(card);
                break;
            }
            let mut is_there = is_far && ahead.holds(&plan, at, payload);
            if is_far && !is_there {
                let read =
                    self.read_ahead(card, ctx, &plan, (at, size), &mut buffer[at..], most - run.packets);
                ahead = read.unwrap_or_default();
                is_there = ahead.holds(&plan, at, payload);
            }
            if !is_there && !self.fill_payload(card, ctx, &plan, &mut buffer[at..at + payload]) {
                continue;
            }
            buffer[at + payload..end].fill(0);
            if plan.is_response {
                replied = true;
                self.on_response_sent(card, ctx, &plan);
            } else {
                self.on_request_sent(card, ctx, &plan);
            }
            if run.packets == 0 {
                run.segment_size = size;
            }
            run.packets += 1;
            run.bytes = end;
            if size < run.segment_size || run.packets == most {
                self.schedule_if_pending(card, ctx);
                break;
            }
        }
        // Whoever found no room in this run is the first in the next. An acknowledgement, being short, mostly
        // finds room behind several requests, which saves the driver a send.
        self.responses_last = replied || self.responder.pending_responses.is_empty();
        (run.packets > 0).then_some(run)
    }

    /// Whether an answer goes before its acknowledgement. To this card itself it would not get there sooner.
    fn sends_response_first(&self, card: &HcaState) -> bool {
        card.settings.response_order == ResponseOrder::ResponseFirst
            && self.addressing.destination != self.addressing.source
    }

    /// Wakes the queue pair if it has more to send: now, or when its rate lets it.
    fn schedule_if_pending(&mut self, card: &mut HcaState, ctx: &mut Context<'_>) {
        if !self.responder.pending_responses.is_empty() {
            self.schedule_transmit(card);
        } else if self.may_send_now(card, ctx) {
            self.schedule_requester(card);
        }
    }

    /// Whether the priority of a packet is stopped. If so, the queue pair waits until it goes on.
    fn wait_if_priority_paused(&mut self, card: &mut HcaState, plan: &PlannedPacket) -> bool {
        let priority = priority(&plan.addressing, plan.service_level);
        let is_paused = card.paused_priorities >> priority & 1 == 1;
        if is_paused && !self.is_paused {
            self.is_paused = true;
            card.paused_qps[usize::from(priority)].push(self.qpn);
        }
        is_paused
    }

    /// Waits until the driver may send to `destination`.
    fn block(&mut self, card: &mut HcaState, destination: IpAddr) {
        if !self.is_blocked {
            self.is_blocked = true;
            card.blocked_qps.entry(destination).or_default().push(self.qpn);
        }
    }

    /// The next packet: replies and requests take turns, so that neither starves the other.
    fn plan_next(&mut self, card: &mut HcaState, ctx: &mut Context<'_>) -> Option<PlannedPacket> {
        if self.responses_last {
            self.plan_request(card, ctx).or_else(|| self.plan_response(card, ctx))
        } else {
            self.plan_response(card, ctx).or_else(|| self.plan_request(card, ctx))
        }
    }

    /// Fills in the payload; false if that was not possible and the packet is not sent.
    #[inline]
    fn fill_payload(
        &mut self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        plan: &PlannedPacket,
        into: &mut [u8],
    ) -> bool {
        if into.is_empty() {
            return true;
        }
        if plan.is_response {
            match self.fill_response_payload(card, ctx, plan, into) {
                Ok(()) => true,
                Err(why) => {
                    self.fail_response(card, ctx, plan, why);
                    false
                }
            }
        } else {
            match self.fill_request_payload(card, ctx, plan, into) {
                Ok(()) => true,
                Err(failure) => {
                    self.fail_current_wqe(card, ctx, failure);
                    false
                }
            }
        }
    }

    pub(crate) fn emit_sent(
        &self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        plan: &PlannedPacket,
        work: Option<u64>,
        again: bool,
    ) {
        card.counters.sent_pkts += 1;
        card.counters.sent_bytes += u64::from(plan.payload_length);
        let packet =
            PacketSummary::new(&plan.header, plan.payload_length as usize, plan.addressing.destination);
        ctx.emit(Event::PacketSent { qp: self.qpn, packet, wr_id: work, retransmission: again });
    }

    pub(crate) fn emit_dropped(
        &self,
        card: &mut HcaState,
        ctx: &mut Context<'_>,
        packet: PacketSummary,
        reason: DropReason,
    ) {
        card.counters.rx_dropped += 1;
        ctx.emit(Event::PacketDropped { qp: self.qpn, packet: Some(packet), reason });
    }
}
