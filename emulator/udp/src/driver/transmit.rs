//! Transmit: packets from the HCA, through fault rules if there are any, to the sockets, to the host network or back to
//! the HCA. Keeps what the kernel does not accept at once.

use super::engine::{Engine, frame_event};
use super::link::{Egress, Port, PortGate, is_peer_error};
use super::receive::{Arrival, PacketReceiver, receive_from_memory};
use super::{Clock, IcrcCheck, MAX_BATCHES_PER_POLL};
use crate::fault_injector::FaultInjector;
use crate::process_rings::RingSend;
use crate::{Chunk, MAX_BATCH_BYTES, MAX_BATCH_SEGMENTS, PeerPort, SendError, charge};
use softhca_control::HandedOverPacket;
use softhca_engine::{Instant, PacketBatch};
use softhca_fabric::{Frame, Stage};
use softhca_wire::{AddressHeaders, Bth, ICRC_LEN, Icrc, Operation, Qpn, ROCE_PORT};
use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

/// A batch of up to so many bytes is built in a moment.
const SMALL_BATCH: usize = 4096;

pub(super) struct Transmitter {
    buffer: Vec<u8>,
    /// The batch in the buffer, complete but for the bytes that the kernel has accepted.
    pending: Option<PendingBatch>,
    pub fault_injector: Option<FaultInjector>,
    /// The start of the driver's clock.
    started: Clock,
}

struct PendingBatch {
    batch: PacketBatch,
    peer: PeerPort,
    sent_bytes: usize,
}

impl Transmitter {
    pub fn new(started: Clock) -> Transmitter {
        // Allocators map this many zeroed bytes, and do not write them.
        let mut buffer = vec![0; 4 * MAX_BATCH_BYTES];
        buffer.truncate(MAX_BATCH_BYTES);
        Transmitter { buffer, pending: None, fault_injector: None, started }
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
        mut now: Instant,
        engine: &mut Engine,
        port: &mut Port,
        receiver: &mut PacketReceiver,
    ) -> io::Result<bool> {
        if !self.send_pending(now, port)? {
            return Ok(false);
        }
        if let Some(faults) = &self.fault_injector {
            if !faults.is_idle() {
                return self.poll_with_faults(now, engine, port, receiver);
            }
            self.fault_injector = None;
            port.links.announce_in_order();
        }
        if !engine.hca.has_pending_transmit() {
            return Ok(false);
        }
        let mut moved = false;
        if !engine.is_observed
            && let Some(mut wire) = port.host_wire(now.nanos())
        {
            moved = engine.call(now, |hca, ctx| hca.transmit_in_host(ctx, &mut wire, &mut self.buffer));
        }
        for _ in 0..MAX_BATCHES_PER_POLL {
            if !engine.hca.has_pending_transmit() {
                break;
            }
            let Some((mut batch, egress)) = self.next_batch(now, engine, port, MAX_BATCH_SEGMENTS) else {
                break;
            };
            moved = true;
            port.assign_source_port(egress, &mut batch.addressing);
            // Packets that only this machine sees need no ICRC: nothing changes them on the way.
            if egress == Egress::Subnet {
                // The subnet has an ICRC of its own.
            } else if port.needs_no_icrc(egress) && !engine.is_observed {
                self.clear_icrcs(&batch);
            } else {
                self.write_icrcs(now, &batch, egress, port, engine);
            }
            now = self.time_of_send(now, egress, batch.bytes);
            if !self.send(now, egress, &batch, engine, port, receiver)? {
                break;
            }
        }
        Ok(moved)
    }

    /// Lets the HCA build its next batch in the buffer. Returns it with its way out of the port.
    #[inline(always)]
    fn next_batch(
        &mut self,
        now: Instant,
        engine: &mut Engine,
        port: &mut Port,
        max_packets: usize,
    ) -> Option<(PacketBatch, Egress)> {
        let paused_priorities = engine.hca.paused_priorities();
        let mut gate = PortGate { port, paused_priorities, now: now.nanos(), last: None };
        let batch =
            engine.call(now, |hca, ctx| hca.transmit(ctx, &mut gate, &mut self.buffer, max_packets))?;
        let egress = match gate.last {
            // The receiver of a MAD is not that of its queue pair number.
            Some((qpn, egress)) if qpn.value() > Qpn::GSI.value() => egress,
            _ => port.egress(batch.addressing.destination, &self.buffer),
        };
        Some((batch, egress))
    }

    /// The time at which packets leave in a poll that began at `now`. Where the HCA receives them, they start timers, which
    /// must not run since the time before a large copy.
    #[inline]
    fn time_of_send(&self, now: Instant, egress: Egress, bytes: usize) -> Instant {
        let has_taken_long = bytes > SMALL_BATCH && matches!(egress, Egress::Internal(_));
        if has_taken_long { self.started.now() } else { now }
    }

    /// Sends the packets in the buffer. Returns whether the port takes more.
    fn send(
        &mut self,
        now: Instant,
        egress: Egress,
        batch: &PacketBatch,
        engine: &mut Engine,
        port: &mut Port,
        receiver: &mut PacketReceiver,
    ) -> io::Result<bool> {
        let bytes = &self.buffer[..batch.bytes];
        let AddressHeaders { source, source_port, destination, traffic_class, .. } = batch.addressing;
        match egress {
            Egress::Subnet => {
                if let Some(subnet) = &mut port.subnet {
                    subnet.send(&engine.hca, batch, bytes);
                }
            }
            Egress::Network => {
                let frame = Frame::new(batch.addressing, bytes.to_vec());
                if let Some(network) = &port.network {
                    network.send(Frame { service_level: batch.service_level, ..frame });
                }
            }
            Egress::HandOver => {
                let source = SocketAddr::new(source, ROCE_PORT);
                receiver.misdelivered.extend(bytes.chunks(batch.segment_size).map(|packet| {
                    HandedOverPacket { slot: 0, source, destination, traffic_class, bytes: packet.to_vec() }
                }));
            }
            // No process but this one has the queue pair, and no rule changes the packets.
            Egress::Internal(_) if self.fault_injector.is_none() && !is_for_mad_agent(bytes) => {
                receive_from_memory(now, &batch.addressing, batch.segment_size, bytes, engine);
            }
            Egress::Internal(peer) => {
                let source = SocketAddr::new(source, source_port);
                let chunk = Chunk { source, traffic_class, segment_size: batch.segment_size, bytes };
                // Only rules change what stays in this process.
                let check = match self.fault_injector {
                    Some(_) => receiver.icrc_check,
                    None => IcrcCheck::Ignore,
                };
                let arrival = Arrival { chunk, peer, destination, check };
                receiver.receive_chunk(now, arrival, engine, &mut port.links, port.network.as_ref());
            }
            Egress::Rings(peer) => {
                if port.send_in_rings(peer.slot, &batch.addressing, batch.segment_size, bytes, now.nanos())
                    == RingSend::NoProcess
                {
                    self.drop_batch(now, batch, engine);
                }
            }
            Egress::Socket(peer) => {
                self.pending = Some(PendingBatch { batch: *batch, peer, sent_bytes: 0 });
                return self.send_pending(now, port);
            }
        }
        Ok(true)
    }

    /// Leaves the ICRC out of the packets in the buffer.
    fn clear_icrcs(&mut self, batch: &PacketBatch) {
        for packet in self.buffer[..batch.bytes].chunks_mut(batch.segment_size) {
            if let Some(icrc) = packet.last_chunk_mut::<ICRC_LEN>() {
                *icrc = [0; ICRC_LEN];
            }
        }
    }

    /// Writes the ICRC of each packet in the buffer, with the IPv4 identification that it will have.
    fn write_icrcs(
        &mut self,
        now: Instant,
        batch: &PacketBatch,
        egress: Egress,
        port: &mut Port,
        engine: &mut Engine,
    ) {
        let mut addressing = batch.addressing;
        let socket = match egress {
            Egress::Socket(peer) => Some(port.egress_socket(&addressing, peer)),
            _ => None,
        };
        for (index, packet) in self.buffer[..batch.bytes].chunks_mut(batch.segment_size).enumerate() {
            addressing.identification = match (&socket, egress) {
                // The kernel chooses the identification.
                (Some(socket), _) => socket.identification(index),
                (None, Egress::Network) => addressing.identification,
                // As in one GSO send.
                (None, _) => index as u16,
            };
            Icrc::write(&addressing, packet);
            if engine.is_observed {
                engine.sink.on_event(now, &frame_event(Stage::Admitted, &addressing, packet));
            }
        }
    }

    /// Writes the ICRCs of a batch again, from byte `from` on: the kernel will use other identifications.
    fn rewrite_icrcs(&mut self, batch: &PacketBatch, peer: PeerPort, from: usize, port: &mut Port) {
        let mut addressing = batch.addressing;
        let socket = port.egress_socket(&addressing, peer);
        for (index, packet) in self.buffer[from..batch.bytes].chunks_mut(batch.segment_size).enumerate() {
            addressing.identification = socket.identification(index);
            Icrc::write(&addressing, packet);
        }
    }

    /// Hands the pending batch to the kernel. Returns whether nothing of it is left.
    fn send_pending(&mut self, now: Instant, port: &mut Port) -> io::Result<bool> {
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
                    self.rewrite_icrcs(&batch, peer, from, port);
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
        mut now: Instant,
        engine: &mut Engine,
        port: &mut Port,
        receiver: &mut PacketReceiver,
    ) -> io::Result<bool> {
        let mut moved = false;
        for _ in 0..MAX_BATCH_SEGMENTS {
            let Some((mut batch, egress)) = self.next_batch(now, engine, port, 1) else { break };
            moved = true;
            port.assign_source_port(egress, &mut batch.addressing);
            self.write_icrcs(now, &batch, egress, port, engine);
            let frame = Frame {
                service_level: batch.service_level,
                ..Frame::new(batch.addressing, self.buffer[..batch.bytes].to_vec())
            };
            let bth = Bth::parse(&frame.bytes);
            if let Some(faults) = &mut self.fault_injector
                && !faults.admit(now, frame, &mut *engine.sink)
                && bth.is_ok_and(|bth| bth.opcode.operation() == Operation::Acknowledge)
            {
                // An ACK that a rule drops stays lost when the process ends.
                engine.hca.clear_recorded_ack(batch.qpn);
            }
        }
        while let Some(faults) = &mut self.fault_injector {
            faults.expire(now, &mut *engine.sink);
            let Some(frame) = faults.first_due(now.nanos()) else { break };
            let length = frame.bytes.len();
            let egress = port.egress(frame.addressing.destination, &frame.bytes);
            if !port.admits(egress, length, now.nanos()) {
                break;
            }
            let Some(frame) = faults.pop_first() else { break };
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
            now = self.time_of_send(now, egress, batch.bytes);
            if !self.send(now, egress, &batch, engine, port, receiver)? {
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
}

/// Whether packets are for queue pair 1, behind which several processes may be.
fn is_for_mad_agent(packets: &[u8]) -> bool {
    Bth::parse(packets).is_ok_and(|bth| bth.destination_qp == Qpn::GSI)
}
