//! Transmission of a queue pair: alternates between requests and responses and fills packet batches.

use super::QueuePair;
use super::planned_packet::PlannedPacket;
use super::straight::{Extent, PacketSpace};
use crate::core::addressing::priority;
use crate::core::hca_state::HcaState;
use crate::{
    Context, DropReason, Event, PacketBatch, PacketSummary, PayloadMode, ResponseOrder, TransmitGate,
};
use core::net::IpAddr;
use softhca_wire::{AddressHeaders, ICRC_LEN, Qpn, QpnSlot, TransportHeader};

/// A batch while it is filled.
pub(super) struct BatchBuilder {
    pub batch: PacketBatch,
    max_packets: usize,
    /// The batch has a response.
    replied: bool,
    /// The destination of the first packet.
    to: Qpn,
}

/// The properties of a packet that decide whether it joins a batch.
pub(super) struct PacketShape<'a> {
    pub addressing: &'a AddressHeaders,
    pub service_level: u8,
    pub destination: Qpn,
    /// Bytes from the BTH to the ICRC, without elided payload.
    pub size: usize,
    pub payload: usize,
    pub is_response: bool,
}

/// Whether a packet joins a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Admission {
    Joins,
    /// It goes into the next batch.
    Waits,
    /// The queue pair waits until it may send.
    Blocked,
}

impl BatchBuilder {
    /// Adds a packet of this size. Returns whether the batch ends with it.
    #[inline]
    pub fn add(&mut self, size: usize) -> bool {
        if self.batch.packets == 0 {
            self.batch.segment_size = size;
        }
        self.batch.packets += 1;
        self.batch.bytes += size;
        size < self.batch.segment_size || self.batch.packets == self.max_packets
    }

    /// The batch has a response.
    pub fn set_replied(&mut self) {
        self.replied = true;
    }
}

/// A batch that the driver sends out of the port.
struct BatchSpace<'a> {
    gate: &'a mut dyn TransmitGate,
    buffer: &'a mut [u8],
    builder: &'a mut BatchBuilder,
}

impl PacketSpace for BatchSpace<'_> {
    #[inline]
    fn admit(&mut self, qp: &mut QueuePair, hca: &mut HcaState, packet: Extent) -> Admission {
        let addressing = qp.addressing;
        let shape = PacketShape {
            addressing: &addressing,
            service_level: qp.attributes.address_vector.service_level,
            destination: qp.attributes.dest_qpn,
            size: packet.size,
            payload: packet.payload,
            is_response: packet.is_response,
        };
        qp.admit(hca, self.gate, self.buffer.len(), self.builder, &shape)
    }

    #[inline]
    fn bytes(&mut self, size: usize) -> &mut [u8] {
        &mut self.buffer[self.builder.batch.bytes..][..size]
    }

    #[inline]
    fn add(&mut self, size: usize, is_response: bool) -> bool {
        self.builder.replied |= is_response;
        self.builder.add(size)
    }
}

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
        let batch = PacketBatch {
            addressing: self.addressing,
            segment_size: 0,
            packets: 0,
            bytes: 0,
            is_unacknowledged: false,
            qpn: self.qpn,
            service_level: 0,
            elided_payload: 0,
        };
        let mut builder = BatchBuilder { batch, max_packets, replied: false, to: Qpn::default() };
        let mut end = None;
        if self.takes_straight_path(hca) {
            let mut space = BatchSpace { gate: &mut *gate, buffer: &mut *buffer, builder: &mut builder };
            end = self.fill_straight(hca, ctx, &mut space);
        }
        let end = match end {
            Some(end) => end,
            None => self.fill_general(hca, ctx, gate, buffer, &mut builder),
        };
        if end == Admission::Blocked {
            return None;
        }
        // The side that found no room in this batch goes first in the next. An ACK is short and usually fits behind
        // several requests, which saves the driver a send.
        self.responses_last = builder.replied || self.responder.pending_responses.is_empty();
        (builder.batch.packets > 0).then_some(builder.batch)
    }

    fn fill_general(
        &mut self,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        gate: &mut dyn TransmitGate,
        buffer: &mut [u8],
        builder: &mut BatchBuilder,
    ) -> Admission {
        let elides = hca.settings.payload_mode == PayloadMode::Elided;
        while let Some(plan) = self.plan_next(hca, ctx) {
            let (mut payload, mut pad) = (plan.payload_length as usize, usize::from(plan.header.bth.pad));
            let elided = payload + pad;
            if elides {
                (payload, pad) = (0, 0);
            }
            let length = plan.header.bth.opcode.header_length();
            let shape = PacketShape {
                addressing: &plan.addressing,
                service_level: plan.service_level,
                destination: plan.header.bth.destination_qp,
                size: length + payload + pad + ICRC_LEN,
                payload: plan.payload_length as usize,
                is_response: plan.is_response,
            };
            match self.admit(hca, gate, buffer.len(), builder, &shape) {
                Admission::Joins => {}
                end => return end,
            }
            if elides {
                // Packets without payload have no distinct sizes: each one is a batch.
                builder.max_packets = 1;
                builder.batch.elided_payload = elided;
            }
            let at = builder.batch.bytes;
            plan.header.emit(&mut buffer[at..]);
            if !self.fill_payload(hca, ctx, &plan, &mut buffer[at + length..][..payload]) {
                continue;
            }
            let size = shape.size;
            buffer[at + length + payload..at + size].fill(0);
            if plan.is_response {
                builder.set_replied();
                self.on_response_sent(hca, ctx, &plan);
            } else {
                self.on_request_sent(hca, ctx, &plan);
            }
            if builder.add(size) {
                self.schedule_if_pending(hca, ctx);
                break;
            }
        }
        Admission::Waits
    }

    /// Whether the next packet joins a batch.
    #[inline]
    pub(super) fn admit(
        &mut self,
        hca: &mut HcaState,
        gate: &mut dyn TransmitGate,
        room: usize,
        builder: &mut BatchBuilder,
        packet: &PacketShape<'_>,
    ) -> Admission {
        let largest = TransportHeader::MAX_LEN + packet.payload + 3 + ICRC_LEN;
        let batch = &mut builder.batch;
        if batch.packets == 0 {
            (batch.addressing, batch.service_level) = (*packet.addressing, packet.service_level);
            if hca.egress.paused_priorities != 0
                && self.wait_if_priority_paused(hca, packet.addressing, packet.service_level)
            {
                return Admission::Blocked;
            }
            batch.is_unacknowledged = !self.kind.is_reliable() || packet.is_response && packet.payload > 0;
            builder.to = packet.destination;
            let allowed =
                gate.allowed_packets(packet.addressing, builder.to, largest, batch.is_unacknowledged);
            builder.max_packets = builder.max_packets.min(allowed);
            if builder.max_packets == 0 {
                self.block(hca, packet.addressing.destination);
                return Admission::Blocked;
            }
        }
        let batch = &builder.batch;
        // An application may wait for a single response, but not for its ACK.
        let goes_alone = batch.packets == 1
            && packet.is_response
            && !builder.replied
            && hca.egress.queue.is_empty()
            && self.sends_response_first(hca);
        let is_full = batch.packets == builder.max_packets || batch.bytes + largest > room || goes_alone;
        // All packets of a connected queue pair have the same destination. A batch goes to one process.
        let is_elsewhere = || match self.kind.is_datagram() {
            true => {
                let slot = |qpn| QpnSlot::of(qpn, QpnSlot::BITS);
                *packet.addressing != batch.addressing || slot(packet.destination) != slot(builder.to)
            }
            false => packet.addressing.traffic_class != batch.addressing.traffic_class,
        };
        if is_full || batch.packets > 0 && (packet.size > batch.segment_size || is_elsewhere()) {
            self.schedule_transmit(hca);
            return Admission::Waits;
        }
        Admission::Joins
    }

    /// Whether a response precedes its ACK. A response to this HCA itself would not arrive sooner.
    fn sends_response_first(&self, hca: &HcaState) -> bool {
        hca.settings.response_order == ResponseOrder::ResponseFirst
            && self.addressing.destination != self.addressing.source
    }

    /// Schedules the queue pair if it has more to send: now, or when its rate allows it.
    pub(super) fn schedule_if_pending(&mut self, hca: &mut HcaState, ctx: &mut Context<'_>) {
        if !self.responder.pending_responses.is_empty() {
            self.schedule_transmit(hca);
        } else if self.may_send_now(hca, ctx) {
            self.schedule_requester(hca);
        }
    }

    /// Whether PFC pauses the priority of a packet. If so, the queue pair waits for its resumption.
    fn wait_if_priority_paused(
        &mut self,
        hca: &mut HcaState,
        addressing: &AddressHeaders,
        service_level: u8,
    ) -> bool {
        let priority = priority(addressing, service_level);
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
        if hca.is_observed {
            let packet =
                PacketSummary::new(&plan.header, plan.payload_length as usize, plan.addressing.destination);
            ctx.emit(Event::PacketSent { qp: self.qpn, packet, wr_id: wqe, retransmission: again });
        }
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
