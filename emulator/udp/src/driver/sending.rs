//! The sending half: permission, ports, seals, and what the kernel does not take at once.

use super::{Driver, Events, IcrcCheck, Passage, RUNS_PER_TURN, Unsent, is_of_one_peer};
use crate::backbone::Plug;
use crate::entropy::FlowSockets;
use crate::pauses::PeerPauses;
use crate::{HostSockets, Links, SendError, charge};
use softhca_engine::{Context, Gate, Instant, Memory, Run};
use softhca_fabric::Frame;
use softhca_wire::{Envelope, Icrc, ROCE_PORT};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};

/// Asks the links before anything is sent.
struct Permission<'a> {
    sockets: &'a HostSockets,
    links: &'a mut Links,
    waiting: &'a mut BTreeMap<IpAddr, u64>,
    pauses: &'a PeerPauses,
    at_pause: &'a mut BTreeSet<IpAddr>,
    plug: Option<&'a Plug>,
    /// Priorities that the card knows to be paused.
    paused: u8,
    at_line: &'a mut BTreeSet<IpAddr>,
    now: u64,
}

impl Gate for Permission<'_> {
    fn packets(&mut self, envelope: &Envelope, size: usize) -> usize {
        let destination = envelope.destination;
        if destination.is_multicast() {
            return usize::MAX;
        }
        if let Some(plug) = self.plug.filter(|plug| plug.leads_to(destination)) {
            if plug.is_free(self.paused) {
                return 1;
            }
            self.at_line.insert(destination);
            return 0;
        }
        // A service level does not travel: to a peer, the priority of a packet is that of its DSCP.
        if self.pauses.mask(destination) >> (envelope.traffic_class >> 5) & 1 == 1 {
            self.at_pause.insert(destination);
            return 0;
        }
        if self.links.keeps(destination) {
            return usize::MAX;
        }
        let price = charge(size, 1);
        if !self.links.may_send(destination, price, self.now) {
            wait_for(self.waiting, destination, price);
            return 0;
        }
        let allowance = self.links.allowance(destination, self.now);
        self.sockets.towards(destination).roce.run_within(destination, size, allowance)
    }
}

/// Takes note that `destination` is to be tried again when `price` is granted.
fn wait_for(waiting: &mut BTreeMap<IpAddr, u64>, destination: IpAddr, price: u64) {
    waiting.entry(destination).and_modify(|least| *least = price.min(*least)).or_insert(price);
}

impl<M: Memory> Driver<M> {
    /// Sends what the card has, as far as it may. Says whether anything moved.
    pub(super) fn send(&mut self, now: Instant) -> io::Result<bool> {
        if !self.send_unsent(now)? {
            return Ok(false);
        }
        if self.faults.take_if(|faults| faults.is_done()).is_some() {
            self.links.restore_order();
        }
        if self.faults.is_some() {
            return self.send_through_faults(now);
        }
        let mut moved = false;
        for _ in 0..RUNS_PER_TURN {
            let Driver { hca, memory, links, waiting, pauses, at_pause, plug, at_line, .. } = self;
            let Driver { witness, buffer, sockets, .. } = self;
            let mut events = Events(&mut **witness);
            let mut ctx = Context { now, memory, events: &mut events };
            let (plug, paused, now_ns) = (plug.as_ref(), hca.paused(), now.nanos());
            let mut gate =
                Permission { sockets, links, waiting, pauses, at_pause, plug, paused, at_line, now: now_ns };
            let most = crate::MAX_RUN_SEGMENTS;
            let Some(mut run) = hca.transmit(&mut ctx, &mut gate, buffer, most) else { break };
            moved = true;
            if self.send_to_backbone(now, &run) {
                continue;
            }
            self.choose_port(&mut run.envelope);
            self.seal(now, &run, 0);
            if self.links.keeps(run.envelope.destination) {
                // Nothing could happen to it since.
                self.receive_own(now, &run, IcrcCheck::Ignore);
                continue;
            }
            self.unsent = Some(Unsent { run, done: 0 });
            if !self.send_unsent(now)? {
                break;
            }
        }
        Ok(moved)
    }

    /// The source port that a run will have: 4791, or with entropy that of its flow.
    fn choose_port(&mut self, envelope: &mut Envelope) {
        envelope.source_port = match &mut self.flow_sockets {
            Some(sockets) => sockets.port_for(envelope.source, envelope.source_port),
            None => ROCE_PORT,
        };
    }

    /// Seals the packets of a run in the buffer, as the kernel will number them. One that it never sees is numbered as
    /// runs that stay together are.
    fn seal(&mut self, now: Instant, run: &Run, from: usize) {
        let mut envelope = run.envelope;
        let is_own = self.links.keeps(envelope.destination);
        let socket = outlet(&mut self.sockets, &mut self.flow_sockets, &envelope);
        for (index, packet) in self.buffer[from..run.bytes].chunks_mut(run.segment).enumerate() {
            envelope.identification = if is_own { index as u16 } else { socket.identification(index) };
            Icrc::seal(&envelope, packet);
            if from == 0 {
                self.witness.frame(now, Passage::Sent, &envelope, packet);
            }
        }
    }

    /// Hands the run in the buffer to the kernel. False if it did not take all of it.
    fn send_unsent(&mut self, now: Instant) -> io::Result<bool> {
        while let Some(Unsent { run, done }) = &mut self.unsent {
            let run = *run;
            let destination = run.envelope.destination;
            let socket = outlet(&mut self.sockets, &mut self.flow_sockets, &run.envelope);
            let mut bytes = &self.buffer[*done..run.bytes];
            if !destination.is_multicast() {
                // A run that waited, or that the path does not cut, may have lost its permission.
                let allowance = self.links.allowance(destination, now.nanos());
                let allowed = socket.run_within(destination, run.segment, allowance);
                if allowed == 0 {
                    self.links.may_send(destination, charge(run.segment, 1), now.nanos());
                    return Ok(false);
                }
                bytes = &bytes[..bytes.len().min(allowed * run.segment)];
            }
            let to = SocketAddr::new(destination, ROCE_PORT);
            match socket.send_run_to(to, run.envelope.traffic_class, run.segment, bytes) {
                Ok(count) => {
                    if !destination.is_multicast() {
                        let price = socket.run_charge(destination, run.segment, count);
                        self.links.sent(destination, price, now.nanos());
                    }
                    *done = (*done + count * run.segment).min(run.bytes);
                    if *done == run.bytes {
                        self.unsent = None;
                    }
                }
                Err(SendError::WouldBlock | SendError::NoBuffers) => return Ok(false),
                Err(SendError::SegmentationRefused) => {
                    let from = *done;
                    self.seal(now, &run, from);
                }
                // A packet that the path cannot carry is lost, as on any network; the peer will miss it.
                Err(SendError::TooLarge) => self.unsent = None,
                Err(SendError::Other(error)) if is_of_one_peer(&error) => self.unsent = None,
                Err(SendError::Other(error)) => return Err(error),
            }
        }
        Ok(true)
    }

    /// The same one packet at a time, through the rules of the cable.
    fn send_through_faults(&mut self, now: Instant) -> io::Result<bool> {
        let mut moved = false;
        for _ in 0..crate::MAX_RUN_SEGMENTS {
            let Driver { hca, memory, links, waiting, pauses, at_pause, plug, at_line, .. } = self;
            let Driver { witness, buffer, sockets, .. } = self;
            let mut events = Events(&mut **witness);
            let mut ctx = Context { now, memory, events: &mut events };
            let (plug, paused, now_ns) = (plug.as_ref(), hca.paused(), now.nanos());
            let mut gate =
                Permission { sockets, links, waiting, pauses, at_pause, plug, paused, at_line, now: now_ns };
            let Some(mut run) = hca.transmit(&mut ctx, &mut gate, buffer, 1) else { break };
            moved = true;
            self.choose_port(&mut run.envelope);
            self.seal(now, &run, 0);
            let frame = Frame {
                service_level: run.service_level,
                ..Frame::new(run.envelope, self.buffer[..run.bytes].to_vec())
            };
            let Driver { faults, witness, .. } = self;
            if let Some(faults) = faults {
                faults.admit(now, frame, &mut **witness);
            }
        }
        loop {
            let Driver { faults, witness, .. } = self;
            let Some(faults) = faults else { break };
            faults.expire(now, &mut **witness);
            let Some(frame) = faults.due(now.nanos()) else { break };
            let (destination, length) = (frame.envelope.destination, frame.bytes.len());
            if let Some(plug) = self.plug.as_ref().filter(|plug| plug.leads_to(destination)) {
                plug.send(frame);
                moved = true;
                continue;
            }
            let price = charge(length, 1);
            let is_own = self.links.keeps(destination);
            let is_exempt = is_own || destination.is_multicast();
            let allowed = is_exempt || self.links.may_send(destination, price, now.nanos());
            if !allowed {
                wait_for(&mut self.waiting, destination, price);
                faults.put_back(now.nanos(), frame);
                break;
            }
            moved = true;
            self.buffer[..length].copy_from_slice(&frame.bytes);
            let run = Run {
                envelope: frame.envelope,
                segment: length,
                count: 1,
                bytes: length,
                queue_pair: softhca_wire::Qpn::default(),
                service_level: frame.service_level,
                elided: 0,
            };
            if is_own {
                self.receive_own(now, &run, self.icrc);
                continue;
            }
            self.unsent = Some(Unsent { run, done: 0 });
            if !self.send_unsent(now)? {
                break;
            }
        }
        Ok(moved)
    }

    /// Hands a packet in the buffer to the backbone, if that leads to its destination.
    fn send_to_backbone(&mut self, now: Instant, run: &Run) -> bool {
        let Some(plug) = self.plug.as_ref().filter(|plug| plug.leads_to(run.envelope.destination)) else {
            return false;
        };
        let mut bytes = self.buffer[..run.bytes].to_vec();
        Icrc::seal(&run.envelope, &mut bytes);
        self.witness.frame(now, Passage::Sent, &run.envelope, &bytes);
        plug.send(Frame { service_level: run.service_level, ..Frame::new(run.envelope, bytes) });
        true
    }
}

/// The socket that a run leaves from.
fn outlet<'a>(
    sockets: &'a mut HostSockets,
    flows: &'a mut Option<FlowSockets>,
    envelope: &Envelope,
) -> &'a mut crate::RoceSocket {
    let own = flows.as_mut().and_then(|flows| flows.socket(envelope.source, envelope.source_port));
    own.unwrap_or_else(|| &mut sockets.towards_mut(envelope.destination).roce)
}
