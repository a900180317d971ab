//! A driver in a slot of a host that several processes share: rings to the others, packets that are handed over, last
//! ACKs of a process that ended.

use super::receive::{Arrival, receive_from_memory};
use super::{Driver, HandOver, IcrcCheck};
use crate::process_rings::ProcessRings;
use crate::{Chunk, MAX_BATCH_BYTES, OpenRings, OpenSendSocket, PeerPort, RingPair};
use softhca_control::HandedOverPacket;
use softhca_engine::{Instant, Peer};
use softhca_fabric::HostProcesses;
use softhca_queue::{AckRecords, CmRecords, PacketChunk, RecordedAck, RecordedConnection};
use softhca_wire::cm::PacketTarget;
use softhca_wire::{AddressHeaders, QpnSlot, ROCE_PORT};
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

/// The most polls that receive the last packets of another process: more than a full ring of ACKs takes.
const MAX_LAST_POLLS: usize = 4096;
/// While rings carry packets, sockets are read at this interval: every read is a system call.
const SOCKET_INTERVAL: Duration = Duration::from_micros(5);
/// Interval while sockets carry no packets.
const IDLE_SOCKET_INTERVAL: Duration = Duration::from_micros(50);
/// For how long after a packet rings and sockets count as carrying packets.
const RINGS_ACTIVE: Duration = Duration::from_micros(100);
const SOCKETS_ACTIVE: Duration = Duration::from_millis(1);

impl Driver {
    /// Records the last ACK of each queue pair and the connections, for the case that the process ends.
    pub fn set_records(&mut self, acks: AckRecords, connections: CmRecords) {
        let processes = HostProcesses::with_records(acks, connections);
        self.removal_flag = processes.removal_flag();
        self.engine.hca.set_processes(Box::new(processes));
    }

    /// Opens sockets that send to processes which share an address by `open`, in the network namespace of the host.
    pub fn set_send_socket_source(&mut self, open: OpenSendSocket) {
        self.port.send_sockets.open = Some(open);
    }

    /// Lets rings carry the packets to other processes of the host.
    pub fn set_ring_source(&mut self, open: OpenRings) {
        self.port.rings = Some(ProcessRings::new(self.port.links.slot().number, open));
    }

    /// Hands packets that arrive for another slot over by `hand_over`.
    pub fn set_hand_over(&mut self, hand_over: HandOver) {
        self.receiver.packets.hands_over = true;
        self.hand_over = Some(hand_over);
    }

    /// Hands the packets over that arrived for other slots. Drops those that no process takes: no queue pair has their QPN.
    pub(super) fn hand_over_misdelivered(&mut self) {
        while !self.receiver.packets.misdelivered.is_empty()
            && let Some(hand_over) = &mut self.hand_over
        {
            let packets = &mut self.receiver.packets.misdelivered;
            let count = packets.len().min(HandedOverPacket::MAX_IN_MESSAGE);
            let rest = hand_over(packets.drain(..count).collect());
            self.receive_packets(&rest, false);
        }
    }

    /// Receives packets that arrived at another slot. Slot 0 knows the listeners and hands their requests over to them.
    pub fn receive_handed_over(&mut self, packets: &[HandedOverPacket]) {
        self.receive_packets(packets, self.port.links.slot().number == 0);
        self.hand_over_misdelivered();
    }

    fn receive_packets(&mut self, packets: &[HandedOverPacket], hands_over: bool) {
        let now = self.now();
        let Driver { engine, port, receiver, .. } = self;
        let hands_over = std::mem::replace(&mut receiver.packets.hands_over, hands_over);
        for HandedOverPacket { source, destination, traffic_class, bytes, .. } in packets {
            let chunk =
                Chunk { source: *source, traffic_class: *traffic_class, segment_size: bytes.len(), bytes };
            // A process of this host that has had slot 0 hand its packet over has no link.
            let has_link = source.port() != ROCE_PORT || !port.links.has_other_slot_0(source.ip());
            let peer = match has_link {
                true => port.links.sender(source.ip(), source.port()),
                false => PeerPort { address: source.ip(), slot: port.links.slot().number },
            };
            let arrival = Arrival { chunk, peer, destination: *destination, check: IcrcCheck::Ignore };
            receiver.packets.receive_chunk(now, arrival, engine, &mut port.links, port.network.as_ref());
        }
        receiver.packets.hands_over = hands_over;
        self.transmit_between_polls(now);
        self.engine.sink.flush();
    }

    /// Sends the last ACKs of a process that has ended, and then ends its connections. Other processes of the host get
    /// them at once in the rings that it had, other hosts as they grant it. The rings are closed then.
    pub fn send_recorded(
        &mut self,
        acks: impl Iterator<Item = RecordedAck>,
        connections: &[RecordedConnection],
        rings: impl Iterator<Item = (u16, RingPair)>,
    ) -> io::Result<()> {
        self.set_ring_source(Box::new(|_| Err(io::ErrorKind::NotFound.into())));
        for (slot, rings) in rings {
            self.add_rings(slot, rings)?;
        }
        let acks = self.control(|hca, ctx| acks.map(|ack| hca.queue_recorded_ack(ctx, &ack)).count());
        self.control(|hca, ctx| {
            connections.iter().for_each(|connection| hca.end_recorded_connection(ctx, connection));
        });
        // Bounded: a process that does not read its ring keeps its ACK waiting.
        for _ in 0..acks + connections.len() {
            if !self.engine.hca.has_pending_transmit() {
                break;
            }
            self.control(|_, _| ());
        }
        self.port.rings = None;
        Ok(())
    }

    /// Adds rings that the process in a slot of this host asked for.
    pub fn add_rings(&mut self, slot: u16, rings: RingPair) -> io::Result<()> {
        let Some(own) = &mut self.port.rings else { return Ok(()) };
        match (own.add(slot, rings)?, &self.port.wake_set) {
            (Some(descriptor), Some(wake_set)) => wake_set.add(descriptor),
            _ => Ok(()),
        }
    }

    /// The process in a slot of this host is gone.
    pub fn remove_rings(&mut self, slot: u16) {
        let now = self.now();
        // The last packets of the process may have the ACK of its last message.
        let has_packets =
            |driver: &Driver| driver.port.rings.as_ref().is_some_and(|rings| rings.has_packets_from(slot));
        for _ in 0..MAX_LAST_POLLS {
            if !has_packets(self) {
                break;
            }
            self.receive_from_rings(now);
        }
        if let Some(rings) = &mut self.port.rings {
            rings.remove(slot);
            rings.lost.push(slot);
        }
        self.fail_lost_processes(now);
    }

    /// Informs other processes of the host whether a packet must wake this one.
    pub(crate) fn set_asleep(&mut self, is_asleep: bool) {
        if let Some(rings) = &mut self.port.rings {
            rings.set_asleep(is_asleep);
        }
        if is_asleep {
            self.publish_counters(self.polled_at);
        }
    }

    /// Fails the connections to processes of this host that are gone.
    fn fail_lost_processes(&mut self, now: Instant) {
        let Driver { engine, port, .. } = self;
        let Some(rings) = &mut port.rings else { return };
        for slot in rings.lost.drain(..) {
            for sockets in port.sockets.by_address() {
                let address = sockets.address();
                let peer = Peer { address, slot: QpnSlot { number: slot, ..port.links.slot() } };
                engine.call(now, |hca, ctx| {
                    hca.resume(ctx, peer);
                    hca.on_process_gone(ctx, peer);
                    hca.unblock(ctx, address);
                });
            }
        }
    }

    /// Suspends the timers towards processes of this host that do not run, such as one in a debugger, until they do.
    fn check_ring_readers(&mut self, now: Instant) {
        let Driver { engine, port, .. } = self;
        let Some(rings) = &mut port.rings else { return };
        for (slot, is_stalled) in rings.check_readers(now.nanos()) {
            for sockets in port.sockets.by_address() {
                let slot = QpnSlot { number: slot, ..port.links.slot() };
                let peer = Peer { address: sockets.address(), slot };
                match is_stalled {
                    true => engine.hca.stall(peer),
                    false => engine.call(now, |hca, ctx| hca.resume(ctx, peer)),
                }
            }
        }
    }

    /// Whether another process of the host has sent packets.
    pub(crate) fn has_packets_in_rings(&self) -> bool {
        self.port.rings.as_ref().is_some_and(ProcessRings::has_packets)
    }

    /// Whether there are rings to other processes of the host.
    pub(crate) fn has_rings(&self) -> bool {
        self.port.rings.as_ref().is_some_and(|rings| !rings.is_empty())
    }

    /// Whether the sockets have carried no packets for a while, and the host has no network in this process.
    pub(crate) fn are_sockets_quiet(&self) -> bool {
        self.port.network.is_none() && self.now().since(self.sockets_received_at) >= SOCKETS_ACTIVE
    }

    /// Whether the sockets are to be read in a poll that begins `now`.
    pub(super) fn are_sockets_due(&self, now: Instant) -> bool {
        let are_rings_active = self
            .port
            .rings
            .as_ref()
            .and_then(|rings| rings.received_at)
            .is_some_and(|at| now.since(at) < RINGS_ACTIVE);
        let interval = match now.since(self.sockets_received_at) < SOCKETS_ACTIVE {
            true => SOCKET_INTERVAL,
            false => IDLE_SOCKET_INTERVAL,
        };
        !are_rings_active || now.since(self.sockets_polled_at) >= interval
    }

    /// Unblocks queue pairs that wait for room in rings, and fails connections to processes that are gone.
    pub(super) fn prepare_rings(&mut self, now: Instant) {
        let Driver { engine, port, .. } = self;
        let Some(rings) = &mut port.rings else { return };
        if rings.unblocked() {
            for sockets in port.sockets.by_address() {
                engine.call(now, |hca, ctx| hca.unblock(ctx, sockets.address()));
            }
        }
        let is_check_due = rings.next_timeout().is_some_and(|at| at <= now.nanos());
        if !rings.lost.is_empty() {
            self.fail_lost_processes(now);
        }
        if is_check_due {
            self.check_ring_readers(now);
        }
    }

    /// Receives what other processes of the host have sent. Returns the number of packets, or two if there are more.
    pub(super) fn receive_from_rings(&mut self, now: Instant) -> usize {
        let Driver { engine, port, receiver, .. } = self;
        let Some(rings) = &mut port.rings else { return 0 };
        if !rings.has_packets() {
            return 0;
        }
        let (links, sockets, network) = (&mut port.links, &port.sockets, port.network.as_ref());
        let received = rings.receive(&mut receiver.batch.bytes[..MAX_BATCH_BYTES], |slot, chunk, bytes| {
            let Some(sockets) = sockets.by_address().nth(chunk.address.into()) else {
                // No process of this library sends that. It counts as malformed.
                let own = sockets.address();
                return engine
                    .call(now, |hca, ctx| hca.receive(ctx, &AddressHeaders::between(own, own), &[]));
            };
            let address = sockets.address();
            let PacketChunk { segment_size, traffic_class, .. } = chunk;
            let mut bytes = bytes;
            if !engine.is_observed {
                let received = engine.call(now, |hca, ctx| {
                    hca.receive_in_host(ctx, address, traffic_class, segment_size, bytes)
                });
                bytes = &bytes[received..];
                if bytes.is_empty() {
                    return;
                }
            }
            if let PacketTarget::Process(qpn) = PacketTarget::of(bytes)
                && links.own_port(address, qpn).is_some()
            {
                let addressing =
                    AddressHeaders { traffic_class, ..AddressHeaders::between(address, address) };
                return receive_from_memory(now, &addressing, segment_size, bytes, engine);
            }
            let source = SocketAddr::new(address, ROCE_PORT);
            let chunk = Chunk { source, traffic_class, segment_size, bytes };
            let peer = PeerPort { address, slot };
            let arrival = Arrival { chunk, peer, destination: address, check: IcrcCheck::Ignore };
            receiver.packets.receive_chunk(now, arrival, engine, links, network);
        });
        if received > 0 {
            rings.received_at = Some(now);
        }
        received
    }
}
