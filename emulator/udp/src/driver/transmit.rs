//! The sending half: permission, ports, seals, and what the kernel does not take at once.

use super::{Driver, IcrcCheck, MAX_RUNS_PER_POLL, PendingRun, emit_hca_event, frame_event, is_peer_error};
use crate::entropy::FlowSockets;
use crate::host_network::HostPort;
use crate::pauses::PeerPauses;
use crate::{HostSockets, LinkControl, SendError, charge};
use softhca_engine::{Context, Event, Instant, Memory, PacketBatch, TransmitGate};
use softhca_fabric::{Frame, Stage};
use softhca_wire::{AddressHeaders, Icrc, ROCE_PORT};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};

/// Asks the links before anything is sent.
struct LinkGate<'a> {
    sockets: &'a HostSockets,
    links: &'a mut LinkControl,
    blocked_on_grant: &'a mut BTreeMap<IpAddr, u64>,
    peer_pauses: &'a PeerPauses,
    blocked_on_pause: &'a mut BTreeSet<IpAddr>,
    host_port: Option<&'a HostPort>,
    /// Priorities that the card knows to be paused.
    known_paused: u8,
    blocked_on_link: &'a mut BTreeSet<IpAddr>,
    now: u64,
}

impl TransmitGate for LinkGate<'_> {
    fn allowed_packets(&mut self, envelope: &AddressHeaders, size: usize) -> usize {
        let destination = envelope.destination;
        if destination.is_multicast() {
            return usize::MAX;
        }
        if let Some(plug) = self.host_port.filter(|plug| plug.routes_to(destination)) {
            if plug.can_send(self.known_paused) {
                return 1;
            }
            self.blocked_on_link.insert(destination);
            return 0;
        }
        // A service level does not travel: to a peer, the priority of a packet is that of its DSCP.
        if self.peer_pauses.mask(destination) >> (envelope.traffic_class >> 5) & 1 == 1 {
            self.blocked_on_pause.insert(destination);
            return 0;
        }
        if self.links.is_internal(destination) {
            return usize::MAX;
        }
        let price = charge(size, 1);
        if !self.links.may_send(destination, price, self.now) {
            block_on_grant(self.blocked_on_grant, destination, price);
            return 0;
        }
        let allowance = self.links.allowance(destination, self.now);
        self.sockets.for_destination(destination).roce.max_segments_within(destination, size, allowance)
    }
}

/// Takes note that `destination` is to be tried again when `price` is granted.
fn block_on_grant(waiting: &mut BTreeMap<IpAddr, u64>, destination: IpAddr, price: u64) {
    waiting.entry(destination).and_modify(|least| *least = price.min(*least)).or_insert(price);
}

impl<M: Memory> Driver<M> {
    /// Sends what the card has, as far as it may. Says whether anything moved.
    pub(super) fn transmit(&mut self, now: Instant) -> io::Result<bool> {
        if !self.send_pending_run(now)? {
            return Ok(false);
        }
        if self.fault_injector.take_if(|faults| faults.is_idle()).is_some() {
            self.links.announce_in_order();
        }
        if self.fault_injector.is_some() {
            return self.transmit_with_faults(now);
        }
        let mut moved = false;
        for _ in 0..MAX_RUNS_PER_POLL {
            let Driver {
                hca,
                memory,
                links,
                blocked_on_grant: waiting,
                peer_pauses: pauses,
                blocked_on_pause: at_pause,
                host_port: plug,
                blocked_on_link: at_line,
                ..
            } = self;
            let Driver { sink, transmit_buffer: buffer, sockets, .. } = self;
            let mut events = |now, event: &Event| emit_hca_event(&mut **sink, now, event);
            let mut ctx = Context { now, memory, events: &mut events };
            let (plug, paused, now_ns) = (plug.as_ref(), hca.paused_priorities(), now.nanos());
            let mut gate = LinkGate {
                sockets,
                links,
                blocked_on_grant: waiting,
                peer_pauses: pauses,
                blocked_on_pause: at_pause,
                host_port: plug,
                known_paused: paused,
                blocked_on_link: at_line,
                now: now_ns,
            };
            let most = crate::MAX_RUN_SEGMENTS;
            let Some(mut run) = hca.transmit(&mut ctx, &mut gate, buffer, most) else { break };
            moved = true;
            if self.send_to_host_network(now, &run) {
                continue;
            }
            self.assign_source_port(&mut run.addressing);
            self.write_icrcs(now, &run, 0);
            if self.links.is_internal(run.addressing.destination) {
                // Nothing could happen to it since.
                self.receive_loopback(now, &run, IcrcCheck::Ignore);
                continue;
            }
            self.pending_run = Some(PendingRun { run, sent_bytes: 0 });
            if !self.send_pending_run(now)? {
                break;
            }
        }
        Ok(moved)
    }

    /// The source port that a run will have: 4791, or with entropy that of its flow.
    fn assign_source_port(&mut self, envelope: &mut AddressHeaders) {
        envelope.source_port = match &mut self.flow_sockets {
            Some(sockets) => sockets.source_port_for(envelope.source, envelope.source_port),
            None => ROCE_PORT,
        };
    }

    /// Seals the packets of a run in the buffer, as the kernel will number them. One that it never sees is numbered as
    /// runs that stay together are.
    fn write_icrcs(&mut self, now: Instant, run: &PacketBatch, from: usize) {
        let mut envelope = run.addressing;
        let is_own = self.links.is_internal(envelope.destination);
        let socket = egress_socket(&mut self.sockets, &mut self.flow_sockets, &envelope);
        for (index, packet) in self.transmit_buffer[from..run.bytes].chunks_mut(run.segment_size).enumerate()
        {
            envelope.identification = if is_own { index as u16 } else { socket.identification(index) };
            Icrc::write(&envelope, packet);
            if from == 0 {
                self.sink.on_event(now, &frame_event(Stage::Admitted, &envelope, packet));
            }
        }
    }

    /// Hands the run in the buffer to the kernel. False if it did not take all of it.
    fn send_pending_run(&mut self, now: Instant) -> io::Result<bool> {
        while let Some(PendingRun { run, sent_bytes: done }) = &mut self.pending_run {
            let run = *run;
            let destination = run.addressing.destination;
            let socket = egress_socket(&mut self.sockets, &mut self.flow_sockets, &run.addressing);
            let mut bytes = &self.transmit_buffer[*done..run.bytes];
            if !destination.is_multicast() {
                // A run that waited, or that the path does not cut, may have lost its permission.
                let allowance = self.links.allowance(destination, now.nanos());
                let allowed = socket.max_segments_within(destination, run.segment_size, allowance);
                if allowed == 0 {
                    self.links.may_send(destination, charge(run.segment_size, 1), now.nanos());
                    return Ok(false);
                }
                bytes = &bytes[..bytes.len().min(allowed * run.segment_size)];
            }
            let to = SocketAddr::new(destination, ROCE_PORT);
            match socket.send_run_to(to, run.addressing.traffic_class, run.segment_size, bytes) {
                Ok(count) => {
                    if !destination.is_multicast() {
                        let price = socket.run_charge(destination, run.segment_size, count);
                        self.links.record_sent(destination, price, now.nanos());
                    }
                    *done = (*done + count * run.segment_size).min(run.bytes);
                    if *done == run.bytes {
                        self.pending_run = None;
                    }
                }
                Err(SendError::WouldBlock | SendError::NoBuffers) => return Ok(false),
                Err(SendError::SegmentationUnsupported) => {
                    let from = *done;
                    self.write_icrcs(now, &run, from);
                }
                // A packet that the path cannot carry is lost, as on any network; the peer will miss it.
                Err(SendError::TooLarge) => self.pending_run = None,
                Err(SendError::Other(error)) if is_peer_error(&error) => self.pending_run = None,
                Err(SendError::Other(error)) => return Err(error),
            }
        }
        Ok(true)
    }

    /// The same one packet at a time, through the rules of the cable.
    fn transmit_with_faults(&mut self, now: Instant) -> io::Result<bool> {
        let mut moved = false;
        for _ in 0..crate::MAX_RUN_SEGMENTS {
            let Driver {
                hca,
                memory,
                links,
                blocked_on_grant: waiting,
                peer_pauses: pauses,
                blocked_on_pause: at_pause,
                host_port: plug,
                blocked_on_link: at_line,
                ..
            } = self;
            let Driver { sink, transmit_buffer: buffer, sockets, .. } = self;
            let mut events = |now, event: &Event| emit_hca_event(&mut **sink, now, event);
            let mut ctx = Context { now, memory, events: &mut events };
            let (plug, paused, now_ns) = (plug.as_ref(), hca.paused_priorities(), now.nanos());
            let mut gate = LinkGate {
                sockets,
                links,
                blocked_on_grant: waiting,
                peer_pauses: pauses,
                blocked_on_pause: at_pause,
                host_port: plug,
                known_paused: paused,
                blocked_on_link: at_line,
                now: now_ns,
            };
            let Some(mut run) = hca.transmit(&mut ctx, &mut gate, buffer, 1) else { break };
            moved = true;
            self.assign_source_port(&mut run.addressing);
            self.write_icrcs(now, &run, 0);
            let frame = Frame {
                service_level: run.service_level,
                ..Frame::new(run.addressing, self.transmit_buffer[..run.bytes].to_vec())
            };
            let Driver { fault_injector: faults, sink, .. } = self;
            if let Some(faults) = faults {
                faults.admit(now, frame, &mut **sink);
            }
        }
        loop {
            let Driver { fault_injector: faults, sink, .. } = self;
            let Some(faults) = faults else { break };
            faults.expire(now, &mut **sink);
            let Some(frame) = faults.pop_due(now.nanos()) else { break };
            let (destination, length) = (frame.addressing.destination, frame.bytes.len());
            if let Some(plug) = self.host_port.as_ref().filter(|plug| plug.routes_to(destination)) {
                plug.send(frame);
                moved = true;
                continue;
            }
            let price = charge(length, 1);
            let is_own = self.links.is_internal(destination);
            let is_exempt = is_own || destination.is_multicast();
            let allowed = is_exempt || self.links.may_send(destination, price, now.nanos());
            if !allowed {
                block_on_grant(&mut self.blocked_on_grant, destination, price);
                faults.requeue(now.nanos(), frame);
                break;
            }
            moved = true;
            self.transmit_buffer[..length].copy_from_slice(&frame.bytes);
            let run = PacketBatch {
                addressing: frame.addressing,
                segment_size: length,
                packets: 1,
                bytes: length,
                qpn: softhca_wire::Qpn::default(),
                service_level: frame.service_level,
                elided_payload: 0,
            };
            if is_own {
                self.receive_loopback(now, &run, self.icrc_check);
                continue;
            }
            self.pending_run = Some(PendingRun { run, sent_bytes: 0 });
            if !self.send_pending_run(now)? {
                break;
            }
        }
        Ok(moved)
    }

    /// Hands a packet in the buffer to the backbone, if that leads to its destination.
    fn send_to_host_network(&mut self, now: Instant, run: &PacketBatch) -> bool {
        let Some(plug) = self.host_port.as_ref().filter(|plug| plug.routes_to(run.addressing.destination))
        else {
            return false;
        };
        let mut bytes = self.transmit_buffer[..run.bytes].to_vec();
        Icrc::write(&run.addressing, &mut bytes);
        self.sink.on_event(now, &frame_event(Stage::Admitted, &run.addressing, &bytes));
        plug.send(Frame { service_level: run.service_level, ..Frame::new(run.addressing, bytes) });
        true
    }
}

/// The socket that a run leaves from.
fn egress_socket<'a>(
    sockets: &'a mut HostSockets,
    flows: &'a mut Option<FlowSockets>,
    envelope: &AddressHeaders,
) -> &'a mut crate::RoceSocket {
    let own = flows.as_mut().and_then(|flows| flows.socket(envelope.source, envelope.source_port));
    own.unwrap_or_else(|| &mut sockets.for_destination_mut(envelope.destination).roce)
}
