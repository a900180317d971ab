//! Transmit: packets from the HCA, through fault rules if there are any, to the sockets, to the host network or back to
//! the HCA. Keeps what the kernel does not accept at once.

use super::engine::{Engine, frame_event};
use super::link::{Port, PortGate, is_peer_error};
use super::receive::{Arrival, PacketReceiver};
use super::{IcrcCheck, MAX_BATCHES_PER_POLL};
use crate::fault_injector::FaultInjector;
use crate::process_rings::RingSend;
use crate::{Chunk, MAX_BATCH_BYTES, MAX_BATCH_SEGMENTS, PeerPort, SendError, charge};
use softhca_control::HandedOverPacket;
use softhca_engine::{Instant, PacketBatch};
use softhca_fabric::{EventSink, Frame, Stage};
use softhca_wire::cm::PacketTarget;
use softhca_wire::{AddressHeaders, ICRC_LEN, Icrc, Qpn, ROCE_PORT};
use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

pub(super) struct Transmitter {
    buffer: Vec<u8>,
    /// The batch in the buffer, complete but for the bytes that the kernel has accepted.
    pending: Option<PendingBatch>,
    pub fault_injector: Option<FaultInjector>,
}

struct PendingBatch {
    batch: PacketBatch,
    peer: PeerPort,
    sent_bytes: usize,
}

impl Transmitter {
    pub fn new() -> Transmitter {
        // Allocators map this many zeroed bytes, and do not write them.
        let mut buffer = vec![0; 4 * MAX_BATCH_BYTES];
        buffer.truncate(MAX_BATCH_BYTES);
        Transmitter { buffer, pending: None, fault_injector: None }
    }

    /// The batch that waits for the kernel, if any, and its destination.
    pub fn pending(&self) -> Option<(&PacketBatch, PeerPort)> {
        self.pending.as_ref().map(|pending| (&pending.batch, pending.peer))
    }

    /// Drops the pending batch if its destination is a dead peer.
    pub fn remove_peer(&mut self, peer: PeerPort) {
        self.pending.take_if(|pending| pending.peer == peer);
    }

    /// Sends a few batches, as far as the port admits them. Returns whether any packet moved.
    pub fn poll(
        &mut self,
        now: Instant,
        engine: &mut Engine,
        port: &mut Port,
        receiver: &mut PacketReceiver,
    ) -> io::Result<bool> {
        if !self.send_pending(now, port, &mut *engine.sink)? {
            return Ok(false);
        }
        if self.fault_injector.take_if(|faults| faults.is_idle()).is_some() {
            port.links.announce_in_order();
        }
        if self.fault_injector.is_some() {
            return self.poll_with_faults(now, engine, port, receiver);
        }
        let mut moved = false;
        for _ in 0..MAX_BATCHES_PER_POLL {
            let Some(mut batch) = self.next_batch(now, engine, port, MAX_BATCH_SEGMENTS) else { break };
            moved = true;
            if self.send_to_host_network(now, &batch, port, &mut *engine.sink) {
                continue;
            }
            if self.hand_over(now, &batch, port, receiver, &mut *engine.sink) {
                continue;
            }
            let peer = self.assign_source_port(&mut batch.addressing, port);
            if port.stays_in_memory(peer) && !engine.sink.is_enabled() {
                self.clear_icrcs(&batch);
            } else {
                self.write_icrcs(now, &batch, peer, 0, port, &mut *engine.sink);
            }
            if port.links.is_internal(peer) {
                // Nothing can have changed the packets since.
                let arrival = self.loopback_arrival(&batch, peer, IcrcCheck::Ignore);
                receiver.receive_chunk(now, arrival, engine, &mut port.links, port.network.as_ref());
                continue;
            }
            if let Some(result) = port.send_in_rings(peer, &batch, &self.buffer[..batch.bytes]) {
                if result == RingSend::NoProcess {
                    self.drop_batch(now, &batch, engine);
                }
                continue;
            }
            self.pending = Some(PendingBatch { batch, peer, sent_bytes: 0 });
            if !self.send_pending(now, port, &mut *engine.sink)? {
                break;
            }
        }
        Ok(moved)
    }

    /// Lets the HCA build its next batch in the buffer.
    fn next_batch(
        &mut self,
        now: Instant,
        engine: &mut Engine,
        port: &mut Port,
        max_packets: usize,
    ) -> Option<PacketBatch> {
        engine.call(now, |hca, ctx| {
            let paused_priorities = hca.paused_priorities();
            let mut gate = PortGate { port, paused_priorities, now: now.nanos() };
            hca.transmit(ctx, &mut gate, &mut self.buffer, max_packets)
        })
    }

    /// The batch in the buffer as a chunk that arrives at this host.
    fn loopback_arrival(&self, batch: &PacketBatch, peer: PeerPort, check: IcrcCheck) -> Arrival<'_> {
        let AddressHeaders { source, source_port, destination, traffic_class, .. } = batch.addressing;
        let source = SocketAddr::new(source, source_port);
        let (segment_size, bytes) = (batch.segment_size, &self.buffer[..batch.bytes]);
        Arrival { chunk: Chunk { source, traffic_class, segment_size, bytes }, peer, destination, check }
    }

    /// Leaves the ICRC out of packets that only this host sees: their receivers do not check it.
    fn clear_icrcs(&mut self, batch: &PacketBatch) {
        for packet in self.buffer[..batch.bytes].chunks_mut(batch.segment_size) {
            if let Some(icrc) = packet.last_chunk_mut::<ICRC_LEN>() {
                *icrc = [0; ICRC_LEN];
            }
        }
    }

    /// Writes the ICRC of each packet from byte `from` on, with the IPv4 identification that the kernel will use.
    /// Internal packets get the identifications of one GSO send.
    fn write_icrcs(
        &mut self,
        now: Instant,
        batch: &PacketBatch,
        peer: PeerPort,
        from: usize,
        port: &mut Port,
        sink: &mut dyn EventSink,
    ) {
        let mut addressing = batch.addressing;
        let is_observed = from == 0 && sink.is_enabled();
        let is_internal = port.links.is_local(peer);
        let socket = port.egress_socket(&addressing, peer);
        for (index, packet) in self.buffer[from..batch.bytes].chunks_mut(batch.segment_size).enumerate() {
            addressing.identification = if is_internal { index as u16 } else { socket.identification(index) };
            Icrc::write(&addressing, packet);
            if is_observed {
                sink.on_event(now, &frame_event(Stage::Admitted, &addressing, packet));
            }
        }
    }

    /// Hands the pending batch to the kernel. Returns whether nothing of it is left.
    fn send_pending(&mut self, now: Instant, port: &mut Port, sink: &mut dyn EventSink) -> io::Result<bool> {
        while let Some(PendingBatch { batch, peer, sent_bytes }) = &mut self.pending {
            let peer = *peer;
            let PacketBatch { addressing, segment_size, is_unacknowledged, .. } = *batch;
            let destination = addressing.destination;
            let mut bytes = &self.buffer[*sent_bytes..batch.bytes];
            // The grant may be gone by now, or too small for a path without segmentation offload.
            let allowance = port.allowance(peer, is_unacknowledged, now.nanos());
            if allowance < u64::MAX {
                let socket = port.egress_socket(&addressing, peer);
                let allowed = socket.max_segments_within(destination, segment_size, allowance);
                if allowed == 0 {
                    port.links.may_send(peer, charge(segment_size, 1), now.nanos());
                    return Ok(false);
                }
                bytes = &bytes[..bytes.len().min(allowed * segment_size)];
            }
            let socket = port.egress_socket(&addressing, peer);
            let to = match destination {
                IpAddr::V4(_) => SocketAddr::new(destination, ROCE_PORT),
                // The kernel takes the label in network byte order.
                IpAddr::V6(ip) => SocketAddrV6::new(ip, ROCE_PORT, addressing.flow_label.to_be(), 0).into(),
            };
            match socket.send_batch_to(to, addressing.traffic_class, segment_size, bytes) {
                Ok(count) => {
                    let charge = socket.batch_charge(destination, segment_size, count);
                    port.record_sent(peer, charge, is_unacknowledged, now.nanos());
                    *sent_bytes = (*sent_bytes + count * segment_size).min(batch.bytes);
                    if *sent_bytes == batch.bytes {
                        self.pending = None;
                    }
                }
                Err(SendError::WouldBlock | SendError::NoBuffers) => return Ok(false),
                Err(SendError::SegmentationUnsupported) => {
                    let (batch, from) = (*batch, *sent_bytes);
                    self.write_icrcs(now, &batch, peer, from, port, sink);
                }
                // A packet that exceeds the path MTU is lost, as on any network; the peer detects the gap.
                Err(SendError::TooLarge) => self.pending = None,
                Err(SendError::Other(error)) if is_peer_error(&error) => self.pending = None,
                Err(SendError::Other(error)) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Sends packets one at a time through the fault rules.
    fn poll_with_faults(
        &mut self,
        now: Instant,
        engine: &mut Engine,
        port: &mut Port,
        receiver: &mut PacketReceiver,
    ) -> io::Result<bool> {
        let mut moved = false;
        for _ in 0..MAX_BATCH_SEGMENTS {
            let Some(mut batch) = self.next_batch(now, engine, port, 1) else { break };
            moved = true;
            let peer = self.assign_source_port(&mut batch.addressing, port);
            self.write_icrcs(now, &batch, peer, 0, port, &mut *engine.sink);
            let frame = Frame {
                service_level: batch.service_level,
                ..Frame::new(batch.addressing, self.buffer[..batch.bytes].to_vec())
            };
            if let Some(faults) = &mut self.fault_injector {
                faults.admit(now, frame, &mut *engine.sink);
            }
        }
        while let Some(faults) = &mut self.fault_injector {
            faults.expire(now, &mut *engine.sink);
            let Some(frame) = faults.pop_due(now.nanos()) else { break };
            let (destination, length) = (frame.addressing.destination, frame.bytes.len());
            if let Some(network) = port.network_to(destination) {
                network.send(frame);
                moved = true;
                continue;
            }
            let peer = port.destination_port(destination, &frame.bytes);
            let is_internal = port.links.is_internal(peer);
            let in_rings = port.room_in_rings(peer, length, now.nanos());
            if in_rings == Some(0) {
                faults.requeue(now.nanos(), frame);
                break;
            }
            let is_exempt = is_internal || destination.is_multicast() || in_rings.is_some();
            if !is_exempt && !port.request_grant(peer, charge(length, 1), false, now.nanos()) {
                faults.requeue(now.nanos(), frame);
                break;
            }
            moved = true;
            self.buffer[..length].copy_from_slice(&frame.bytes);
            let batch = PacketBatch {
                addressing: frame.addressing,
                segment_size: length,
                packets: 1,
                bytes: length,
                is_unacknowledged: false,
                qpn: Qpn::default(),
                service_level: frame.service_level,
                elided_payload: 0,
            };
            if is_internal {
                let arrival = self.loopback_arrival(&batch, peer, receiver.icrc_check);
                receiver.receive_chunk(now, arrival, engine, &mut port.links, port.network.as_ref());
                continue;
            }
            if let Some(result) = port.send_in_rings(peer, &batch, &self.buffer[..batch.bytes]) {
                if result == RingSend::NoProcess {
                    self.drop_batch(now, &batch, engine);
                }
                continue;
            }
            self.pending = Some(PendingBatch { batch, peer, sent_bytes: 0 });
            if !self.send_pending(now, port, &mut *engine.sink)? {
                break;
            }
        }
        Ok(moved)
    }

    /// Drops the packets in the buffer: no process of this host has their slot. Their HCA would drop them because no
    /// queue pair has their QPN, and so does this one.
    fn drop_batch(&self, now: Instant, batch: &PacketBatch, engine: &mut Engine) {
        for packet in self.buffer[..batch.bytes].chunks(batch.segment_size) {
            if let Ok((transport, _)) = Icrc::split(packet) {
                engine.call(now, |hca, ctx| hca.receive(ctx, &batch.addressing, transport));
            }
        }
    }

    /// Finds the destination of the packets in the buffer, and sets the port that they leave from.
    fn assign_source_port(&self, addressing: &mut AddressHeaders, port: &mut Port) -> PeerPort {
        let peer = port.destination_port(addressing.destination, &self.buffer);
        addressing.source_port = port.source_port(peer, addressing.source, addressing.source_port);
        peer
    }

    /// Puts the packets in the buffer among those for other slots, if slot 0 of the own host finds their receiver.
    fn hand_over(
        &mut self,
        now: Instant,
        batch: &PacketBatch,
        port: &Port,
        receiver: &mut PacketReceiver,
        sink: &mut dyn EventSink,
    ) -> bool {
        let destination = batch.addressing.destination;
        if !port.is_handed_over(destination, PacketTarget::of(&self.buffer).qpn()) {
            return false;
        }
        let mut addressing = AddressHeaders { source_port: ROCE_PORT, ..batch.addressing };
        for (index, packet) in self.buffer[..batch.bytes].chunks_mut(batch.segment_size).enumerate() {
            addressing.identification = index as u16;
            Icrc::write(&addressing, packet);
            if sink.is_enabled() {
                sink.on_event(now, &frame_event(Stage::Admitted, &addressing, packet));
            }
            receiver.misdelivered.push(HandedOverPacket {
                slot: 0,
                source: SocketAddr::new(addressing.source, ROCE_PORT),
                destination,
                traffic_class: addressing.traffic_class,
                bytes: packet.to_vec(),
            });
        }
        true
    }

    /// Hands the packet in the buffer to the host network, if that leads to its destination.
    fn send_to_host_network(
        &mut self,
        now: Instant,
        batch: &PacketBatch,
        port: &Port,
        sink: &mut dyn EventSink,
    ) -> bool {
        let Some(network) = port.network_to(batch.addressing.destination) else { return false };
        let mut bytes = self.buffer[..batch.bytes].to_vec();
        Icrc::write(&batch.addressing, &mut bytes);
        sink.on_event(now, &frame_event(Stage::Admitted, &batch.addressing, &bytes));
        network.send(Frame { service_level: batch.service_level, ..Frame::new(batch.addressing, bytes) });
        true
    }
}
