//! Packets out: the order in which control packets, MADs and queue pairs send.

use super::Hca;
use crate::core::addressing::priority;
use crate::core::control_packets::{Body, ControlPacket};
use crate::core::transport::Transport;
use crate::core::{Context, DropReason, Event, PacketBatch, PacketSummary, TransmitGate};
use softhca_wire::{Opcode, Qpn};

impl<T: Transport> Hca<T> {
    /// Builds the next packets of one queue pair in `buffer`, at most `max_packets`. `None` if nothing can be sent
    /// now.
    #[inline]
    pub fn transmit(
        &mut self,
        ctx: &mut Context<'_>,
        gate: &mut dyn TransmitGate,
        buffer: &mut [u8],
        max_packets: usize,
    ) -> Option<PacketBatch> {
        if !self.has_pending_transmit() {
            return None;
        }
        let mut batch = self.next_batch(ctx, gate, buffer, max_packets);
        // An injected PORT_ERR: what the port sends is lost.
        while self.state.health.port_fault
            && let Some(PacketBatch { qpn: qp, .. }) = batch
        {
            ctx.emit(Event::PacketDropped { qp, packet: None, reason: DropReason::PortDown });
            batch = self.next_batch(ctx, gate, buffer, max_packets);
        }
        batch
    }

    fn next_batch(
        &mut self,
        ctx: &mut Context<'_>,
        gate: &mut dyn TransmitGate,
        buffer: &mut [u8],
        max_packets: usize,
    ) -> Option<PacketBatch> {
        if self.state.egress.control_packets.has_ready()
            && let Some(batch) = self.transmit_control_packet(ctx, gate, buffer)
        {
            return Some(batch);
        }
        while let Some(qpn) = self.state.egress.queue.pop_front() {
            let batch = if qpn == Qpn::GSI {
                T::fill_management_batch(self, ctx, gate, buffer, max_packets)
            } else {
                let Some(qp) = self.queue_pairs.get_mut(qpn.value()) else { continue };
                qp.is_scheduled = false;
                T::fill_batch(qp, &mut self.state, ctx, gate, buffer, max_packets)
            };
            self.handle_cq_overflows(ctx);
            if batch.is_some() {
                return batch;
            }
        }
        None
    }

    /// Pauses the priorities in this mask and resumes all others, as a PFC pause frame demands.
    pub fn set_paused_priorities(&mut self, priorities: u8) {
        let resumed = self.state.egress.paused_priorities & !priorities;
        self.state.egress.paused_priorities = priorities;
        if resumed == 0 {
            return;
        }
        for priority in (0..8).filter(|priority| resumed >> priority & 1 == 1) {
            for qpn in core::mem::take(&mut self.state.egress.paused_qps[priority]) {
                if let Some(qp) = self.queue_pairs.get_mut(qpn.value()) {
                    qp.is_paused = false;
                    qp.schedule_transmit(&mut self.state);
                }
            }
        }
        self.state.egress.control_packets.unblock();
    }

    /// Counts received pause frames.
    pub fn count_pause_frames(&mut self, frames: u64) {
        self.state.counters.rx_pause_frames += frames;
    }

    /// The mask of paused priorities.
    pub fn paused_priorities(&self) -> u8 {
        self.state.egress.paused_priorities
    }

    /// Whether [`Hca::transmit`] may have packets to send.
    #[inline]
    pub fn has_pending_transmit(&self) -> bool {
        !self.state.egress.queue.is_empty() || self.state.egress.control_packets.has_ready()
    }

    /// Builds the next control packet that the port may send.
    fn transmit_control_packet(
        &mut self,
        ctx: &mut Context<'_>,
        gate: &mut dyn TransmitGate,
        buffer: &mut [u8],
    ) -> Option<PacketBatch> {
        while let Some(packet) = self.state.egress.control_packets.pop() {
            let (bytes, addressing, service_level) = (packet.len(), packet.addressing, packet.service_level);
            let paused = self.state.egress.paused_priorities >> priority(&addressing, service_level) & 1 == 1;
            if paused
                || gate.allowed_packets(&addressing, packet.header.bth.destination_qp, bytes, false) == 0
            {
                self.state.egress.control_packets.block(packet);
                continue;
            }
            let ControlPacket { qpn, header, body, retransmission, .. } = packet;
            let at = header.emit(buffer);
            buffer[at..bytes].fill(0);
            let mut elided_payload = 0;
            match body {
                Body::Payload(payload) => buffer[at..at + payload.len()].copy_from_slice(&payload),
                Body::ElidedPayload(length) => elided_payload = length,
                Body::Reserved(_) => {
                    self.state.counters.np_cnp_sent += u64::from(header.bth.opcode == Opcode::CNP);
                    self.state.counters.sent_pkts += 1;
                    let packet = PacketSummary::new(&header, 0, addressing.destination);
                    ctx.emit(Event::PacketSent { qp: qpn, packet, wr_id: None, retransmission });
                }
            }
            return Some(PacketBatch {
                addressing,
                segment_size: bytes,
                packets: 1,
                bytes,
                is_unacknowledged: false,
                qpn,
                service_level,
                elided_payload,
            });
        }
        None
    }
}
