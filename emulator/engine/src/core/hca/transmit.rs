//! Packets out: the order in which control packets, MADs and queue pairs send.

use super::Hca;
use crate::cm::ConnectionManager;
use crate::core::addressing::priority;
use crate::core::control_packets::{Body, ControlPacket};
use crate::{Context, DropReason, Event, PacketBatch, PacketSummary, Peer, QpType, TransmitGate};
use core::net::IpAddr;
use softhca_queue::{AckPath, RecordedAck};
use softhca_wire::{
    AddressHeaders, Aeth, Bth, Gid, ImmOrInvalidate, Opcode, Operation, Position, Qpn, Syndrome,
    TransportHeader,
};

impl Hca {
    /// Builds the next packets of one queue pair in `buffer`, at most `max_packets`. `None` if nothing can be sent
    /// now.
    pub fn transmit(
        &mut self,
        ctx: &mut Context<'_>,
        gate: &mut dyn TransmitGate,
        buffer: &mut [u8],
        max_packets: usize,
    ) -> Option<PacketBatch> {
        loop {
            let batch = self.next_batch(ctx, gate, buffer, max_packets)?;
            if !self.state.port_fault {
                return Some(batch);
            }
            // An injected PORT_ERR: what the port sends is lost.
            ctx.emit(Event::PacketDropped { qp: batch.qpn, packet: None, reason: DropReason::PortDown });
        }
    }

    fn next_batch(
        &mut self,
        ctx: &mut Context<'_>,
        gate: &mut dyn TransmitGate,
        buffer: &mut [u8],
        max_packets: usize,
    ) -> Option<PacketBatch> {
        if self.state.control_packets.has_ready()
            && let Some(batch) = self.transmit_control_packet(ctx, gate, buffer)
        {
            return Some(batch);
        }
        while let Some(qpn) = self.state.transmit_queue.pop_front() {
            let batch = if qpn == Qpn::GSI {
                let ConnectionManager { mad_queue, known_listeners, .. } = &mut self.cm;
                mad_queue.fill_batch(&mut self.state, ctx, gate, known_listeners, buffer, max_packets)
            } else {
                let Some(qp) = self.queue_pairs.get_mut(qpn.value()) else { continue };
                qp.is_scheduled = false;
                qp.fill_batch(&mut self.state, ctx, gate, buffer, max_packets)
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
        let resumed = self.state.paused_priorities & !priorities;
        self.state.paused_priorities = priorities;
        if resumed == 0 {
            return;
        }
        for priority in (0..8).filter(|priority| resumed >> priority & 1 == 1) {
            for qpn in core::mem::take(&mut self.state.paused_qps[priority]) {
                if let Some(qp) = self.queue_pairs.get_mut(qpn.value()) {
                    qp.is_paused = false;
                    qp.schedule_transmit(&mut self.state);
                }
            }
        }
        self.state.control_packets.unblock();
    }

    /// Counts received pause frames.
    pub fn count_pause_frames(&mut self, frames: u64) {
        self.state.counters.rx_pause_frames += frames;
    }

    /// The mask of paused priorities.
    pub fn paused_priorities(&self) -> u8 {
        self.state.paused_priorities
    }

    /// Whether [`Hca::transmit`] may have packets to send.
    pub fn has_pending_transmit(&self) -> bool {
        !self.state.transmit_queue.is_empty() || self.state.control_packets.has_ready()
    }

    /// The transmit gate of `destination` is open again. The ACK timers of the blocked queue pairs restart.
    pub fn unblock(&mut self, ctx: &mut Context<'_>, destination: IpAddr) {
        for qpn in self.state.blocked_qps.remove(&destination).unwrap_or_default() {
            if qpn == Qpn::GSI {
                self.cm.mad_queue.unblock(&mut self.state, destination);
            }
            if let Some(qp) = self.queue_pairs.get_mut(qpn.value()) {
                qp.is_blocked = false;
                qp.restart_ack_timer(&mut self.state, ctx);
                qp.schedule_transmit(&mut self.state);
            }
        }
        self.state.control_packets.unblock();
    }

    /// Whether ACKs, CNPs or MADs that no queue pair would send again are still waiting for transmission.
    pub fn has_orphaned_acks(&self) -> bool {
        !self.state.control_packets.is_empty() || !self.cm.mad_queue.is_empty()
    }

    /// Queues the last ACK of a queue pair whose process has ended. Its peer may have had it.
    pub fn queue_recorded_ack(&mut self, ctx: &mut Context<'_>, ack: &RecordedAck) {
        let RecordedAck { path, psn, msn } = *ack;
        let AckPath { qpn, source, destination, service_level, .. } = path;
        if !self.state.gids.contains(&Gid::from(source)) || source.is_ipv4() != destination.is_ipv4() {
            return;
        }
        let service = if path.is_xrc { QpType::XrcTarget } else { QpType::Rc }.service();
        let opcode = Opcode::new(service, Operation::Acknowledge, Position::Only, ImmOrInvalidate::None);
        let opcode = opcode.expect("a reliable service has all response opcodes");
        let mut header = TransportHeader::new(Bth::new(opcode, path.dest_qpn, psn));
        header.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn });
        let addressing = AddressHeaders {
            traffic_class: path.traffic_class,
            flow_label: path.flow_label,
            ..AddressHeaders::between(source, destination)
        };
        let (body, retransmission) = (Body::Reserved(0), false);
        let packet = ControlPacket { qpn, addressing, service_level, header, body, retransmission };
        self.state.control_packets.push(ctx, packet);
    }

    /// Discards the control packets to a peer that is dead or has restarted.
    pub fn discard_orphaned_acks(&mut self, peer: impl Into<Peer>) {
        let peer = peer.into();
        self.state
            .control_packets
            .discard(|packet| peer.contains(packet.addressing.destination, packet.header.bth.destination_qp));
    }

    /// Builds the next control packet that the port may send.
    fn transmit_control_packet(
        &mut self,
        ctx: &mut Context<'_>,
        gate: &mut dyn TransmitGate,
        buffer: &mut [u8],
    ) -> Option<PacketBatch> {
        while let Some(packet) = self.state.control_packets.pop() {
            let (bytes, addressing, service_level) = (packet.len(), packet.addressing, packet.service_level);
            let paused = self.state.paused_priorities >> priority(&addressing, service_level) & 1 == 1;
            if paused
                || gate.allowed_packets(&addressing, packet.header.bth.destination_qp, bytes, false) == 0
            {
                self.state.control_packets.block(packet);
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
