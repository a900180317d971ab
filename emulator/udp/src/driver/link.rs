//! The port: its sockets, its links to peer ports, and the destinations that may not be sent to now.

use super::Driver;
use super::engine::pause_event;
use crate::entropy::FlowSockets;
use crate::host_network::HostPort;
use crate::pauses::PeerPauses;
use crate::process_rings::{ProcessRings, RingSend};
use crate::slots::SendSockets;
use crate::subnet_port::SubnetPort;
use crate::system::WakeSet;
use crate::{
    HostSockets, LinkChange, LinkControl, NetworkErrorCause, PeerPort, PeerState, ReceiveBatch, RoceSocket,
    SendError, UnreachablePort, charge,
};
use softhca_engine::{HostWire, Instant, LinkReject, PacketBatch, TransmitGate};
use softhca_fabric::{Frame, NetworkEvent, Stage};
use softhca_queue::PacketChunk;
use softhca_wire::cm::PacketTarget;
use softhca_wire::link_control::{Body, ExchangeKind, Hello, LINK_PORT, Message, Pause};
use softhca_wire::{AddressHeaders, MacAddress, Malformed, Qpn, ROCE_PORT};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// The longest time between two reads of the link sockets while a caller polls.
const LINK_POLL_INTERVAL: u64 = 20_000;
/// How often the error queues are read while no descriptor reports an error.
const ERROR_QUEUE_POLL_INTERVAL: u64 = 100_000_000;
/// How often they are read while a peer that may be foreign is asked for link control.
const ASKING_INTERVAL: u64 = 500_000;
/// How often rejected link control messages are logged, per reason.
const REJECT_LOG_INTERVAL: u64 = 100_000_000;
/// The most batches of link control that one poll reads: a flood of them must not stop the driver.
const MAX_LINK_BATCHES_PER_POLL: usize = 64;
/// The most entries of one error queue that one poll reads.
const MAX_ERRORS_PER_POLL: usize = 64;

pub(super) struct Port {
    pub sockets: HostSockets,
    /// Opened as flows need them; `None` without source port entropy.
    pub flow_sockets: Option<FlowSockets>,
    pub links: LinkControl,
    pub pauses: PeerPauses,
    /// The port in a host network, if one is attached.
    pub network: Option<HostPort>,
    /// The port of an InfiniBand subnet, if it is one. It carries all packets.
    pub subnet: Option<SubnetPort>,
    /// Sockets to the processes of hosts that share an address.
    pub send_sockets: SendSockets,
    /// Rings to other processes of the host.
    pub rings: Option<ProcessRings>,
    /// Wakes the driver's thread for every descriptor that is not in [`Driver::descriptors`].
    pub wake_set: Option<Arc<WakeSet>>,
    /// Destinations that wait for a grant, with the smallest charge that lets a queue pair send.
    blocked_on_grant: BTreeMap<PeerPort, u64>,
    /// Destinations that wait for a pause to end.
    blocked_on_pause: BTreeSet<PeerPort>,
    link_batch: ReceiveBatch,
    rejects: RejectLog,
    links_polled_at: u64,
    error_queues_polled_at: u64,
}

/// The way of packets out of the port.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Egress {
    /// The InfiniBand subnet.
    Subnet,
    /// The switches of the host network.
    Network,
    /// The process with slot 0 of the own host, which finds their receiver.
    HandOver,
    /// The HCA receives them from the buffer in which it built them.
    Internal(PeerPort),
    /// Shared memory, to another process of the host.
    Rings(PeerPort),
    /// A socket.
    Socket(PeerPort),
}

impl Port {
    pub fn new(sockets: HostSockets, flow_sockets: Option<FlowSockets>, links: LinkControl) -> Port {
        Port {
            sockets,
            flow_sockets,
            links,
            pauses: PeerPauses::default(),
            network: None,
            subnet: None,
            send_sockets: SendSockets::default(),
            rings: None,
            wake_set: None,
            blocked_on_grant: BTreeMap::new(),
            blocked_on_pause: BTreeSet::new(),
            link_batch: ReceiveBatch::new(),
            rejects: RejectLog::default(),
            links_polled_at: 0,
            error_queues_polled_at: 0,
        }
    }

    /// The way of packets like this one to `destination`.
    pub fn egress(&self, destination: IpAddr, packet: &[u8]) -> Egress {
        self.egress_to(destination, PacketTarget::of(packet).qpn())
    }

    /// The way of packets to `destination`. `target` is the number that leads to their receiver.
    #[inline]
    fn egress_to(&self, destination: IpAddr, target: Qpn) -> Egress {
        if self.subnet.is_some() {
            return Egress::Subnet;
        }
        if let (Some(own), None) = (self.links.own_port(destination, target), &self.network) {
            return Egress::Internal(own);
        }
        if self.network.as_ref().is_some_and(|network| network.routes_to(destination)) {
            return Egress::Network;
        }
        if self.is_handed_over(destination, target) {
            return Egress::HandOver;
        }
        let peer = self.links.port_of(destination, target);
        if self.links.is_internal(peer) {
            return Egress::Internal(peer);
        }
        if self.rings.is_some() && self.links.is_local(peer) {
            Egress::Rings(peer)
        } else {
            Egress::Socket(peer)
        }
    }

    /// Whether nothing changes the packets on their way, and their receiver knows that.
    pub fn needs_no_icrc(&self, egress: Egress) -> bool {
        match egress {
            Egress::Internal(_) | Egress::Rings(_) => true,
            Egress::Socket(peer) => self.links.offloads_icrc(peer),
            // A subnet has an ICRC of its own.
            Egress::Network | Egress::HandOver | Egress::Subnet => false,
        }
    }

    /// Whether the port admits one packet of `size` bytes now. If not, it is unblocked when it does.
    pub fn admits(&mut self, egress: Egress, size: usize, now: u64) -> bool {
        match egress {
            Egress::Subnet | Egress::Network | Egress::HandOver | Egress::Internal(_) => true,
            Egress::Rings(peer) => self.room_in_rings(peer, size, now) > 0,
            Egress::Socket(peer) => {
                peer.address.is_multicast() || self.request_grant(peer, charge(size, 1), false, now)
            }
        }
    }

    /// How many packets of `size` bytes the rings to a port have room for.
    fn room_in_rings(&mut self, peer: PeerPort, size: usize, now: u64) -> usize {
        let Some(rings) = &mut self.rings else { return 0 };
        // A process that is gone has no rings: packets to it are dropped when they are sent.
        if let (Ok(Some(descriptor)), Some(wake_set)) = (rings.connect(peer.slot, now), &self.wake_set) {
            let _ = wake_set.add(descriptor);
        }
        rings.allowed(peer.slot, size)
    }

    /// Sends packets to another process of the host.
    pub fn send_in_rings(
        &mut self,
        slot: u16,
        addressing: &AddressHeaders,
        segment_size: usize,
        bytes: &[u8],
        now: u64,
    ) -> RingSend {
        let Some(rings) = &mut self.rings else { return RingSend::NoProcess };
        let is_second = self.sockets.address() != addressing.destination;
        let traffic_class = addressing.traffic_class;
        let chunk =
            PacketChunk { length: bytes.len(), segment_size, traffic_class, address: is_second.into() };
        rings.send(slot, chunk, bytes, now)
    }

    /// The memory that carries the host's packets to itself, unless a network or a pause comes between.
    #[inline]
    pub fn host_wire(&mut self, now: u64) -> Option<PortWire<'_>> {
        let is_free = self.network.is_none() && self.links.keeps_local() && self.pauses.is_empty();
        is_free.then_some(PortWire { port: self, now })
    }

    /// Whether the process with slot 0 gives a packet to its receiver without a link. Such a packet is a MAD to the own
    /// host that names no process. `target` is the number that leads to its receiver.
    fn is_handed_over(&self, destination: IpAddr, target: Qpn) -> bool {
        target.value() <= Qpn::GSI.value() && self.rings.is_some() && self.links.has_other_slot_0(destination)
    }

    /// Whether packets to a port leave from a socket for its slot: one of the hosts has several processes.
    fn uses_send_socket(&self, peer: PeerPort) -> bool {
        let bits = self.links.slot().bits | self.links.slot_bits(peer.address);
        bits > 0 && !peer.address.is_multicast()
    }

    /// The source port of packets to a port: that of their socket, or that of the flow with entropy, else 4791.
    fn source_port(&mut self, peer: PeerPort, source: IpAddr, flow_port: u16) -> u16 {
        if self.uses_send_socket(peer) {
            let socket = self.send_sockets.socket(source, peer.slot);
            return socket.map_or(ROCE_PORT, |socket| socket.local_address().port());
        }
        self.flow_source_port(source, flow_port)
    }

    fn flow_source_port(&mut self, source: IpAddr, flow_port: u16) -> u16 {
        match &mut self.flow_sockets {
            Some(sockets) => sockets.source_port_for(source, flow_port),
            None => ROCE_PORT,
        }
    }

    /// Sets the source port of packets that leave this way.
    pub fn assign_source_port(&mut self, egress: Egress, addressing: &mut AddressHeaders) {
        let AddressHeaders { source, source_port, .. } = *addressing;
        addressing.source_port = match egress {
            Egress::Subnet | Egress::Network => source_port,
            Egress::HandOver => ROCE_PORT,
            Egress::Internal(_) | Egress::Rings(_) => self.flow_source_port(source, source_port),
            Egress::Socket(peer) => self.source_port(peer, source, source_port),
        };
    }

    /// The socket that packets with this addressing leave from.
    pub fn egress_socket(&mut self, addressing: &AddressHeaders, peer: PeerPort) -> &mut RoceSocket {
        let AddressHeaders { source, source_port, destination, .. } = *addressing;
        let socket = match self.uses_send_socket(peer) {
            true => self.send_sockets.socket(source, peer.slot),
            false => self.flow_sockets.as_mut().and_then(|sockets| sockets.socket(source, source_port)),
        };
        socket.unwrap_or_else(|| &mut self.sockets.for_destination_mut(destination).roce)
    }

    /// Whether the window of a foreign peer, which the HCA keeps, limits what is sent to it.
    fn is_clocked_by_acks(&self, peer: PeerPort, is_unacknowledged: bool) -> bool {
        !is_unacknowledged && self.links.state(peer) == Some(PeerState::Foreign)
    }

    /// The charge that may be sent to a port now.
    pub fn allowance(&self, peer: PeerPort, is_unacknowledged: bool, now: u64) -> u64 {
        match peer.address.is_multicast() || self.is_clocked_by_acks(peer, is_unacknowledged) {
            true => u64::MAX,
            false => self.links.allowance(peer, now),
        }
    }

    /// Counts what the socket has accepted.
    pub fn record_sent(&mut self, peer: PeerPort, charge: u64, is_unacknowledged: bool, now: u64) {
        if self.is_clocked_by_acks(peer, is_unacknowledged) {
            self.links.record_clocked(peer, charge, now);
        } else if !peer.address.is_multicast() {
            self.links.record_sent(peer, charge, now);
        }
    }

    /// Whether a packet of this charge may be sent to a port. If not, the port is unblocked when it grants the charge.
    pub fn request_grant(&mut self, peer: PeerPort, charge: u64, is_unacknowledged: bool, now: u64) -> bool {
        if self.is_clocked_by_acks(peer, is_unacknowledged) {
            return true;
        }
        let is_granted = self.links.may_send(peer, charge, now);
        if !is_granted {
            let least = self.blocked_on_grant.entry(peer).or_insert(charge);
            *least = charge.min(*least);
        }
        is_granted
    }

    pub fn is_blocked_on_grant(&self, frame: &Frame) -> bool {
        let Egress::Socket(peer) = self.egress(frame.addressing.destination, &frame.bytes) else {
            return false;
        };
        self.blocked_on_grant.contains_key(&peer)
    }

    /// Whether the grants of its destination cover at least one segment of the batch.
    pub fn is_granted(&self, batch: &PacketBatch, peer: PeerPort, now: u64) -> bool {
        let allowance = self.allowance(peer, batch.is_unacknowledged, now);
        let socket = &self.sockets.for_destination(peer.address).roce;
        socket.max_segments_within(peer.address, batch.segment_size, allowance) > 0
    }

    /// Reads the error queues at the next poll.
    pub fn on_socket_error(&mut self) {
        self.error_queues_polled_at = 0;
    }

    /// Reads link control if it is due, and at once if a destination waits for a grant. Returns whether it did, or whether
    /// the error queues changed a link.
    fn poll(&mut self, now: u64) -> io::Result<bool> {
        let unpolled_for = now.saturating_sub(self.error_queues_polled_at);
        if unpolled_for >= ERROR_QUEUE_POLL_INTERVAL
            || unpolled_for >= ASKING_INTERVAL && self.links.is_asking()
        {
            self.error_queues_polled_at = now;
            self.poll_error_queues(now)?;
        }
        if now < self.links_polled_at + LINK_POLL_INTERVAL && self.blocked_on_grant.is_empty() {
            return Ok(self.links.has_events());
        }
        self.links_polled_at = now;
        for sockets in self.sockets.by_address() {
            for _ in 0..MAX_LINK_BATCHES_PER_POLL {
                sockets.link.receive(&mut self.link_batch)?;
                for datagram in self.link_batch.datagrams() {
                    let peer = datagram.source.ip();
                    let is_link_port = datagram.source.port() == LINK_PORT;
                    let result = match Message::parse(datagram.bytes) {
                        // A process of several that share the port asks from a port of its own.
                        Ok(message) if is_link_port || is_question(&message) => {
                            self.links.on_message(peer, &message, now)
                        }
                        _ if !is_link_port => Err(LinkReject::NoSuchPort),
                        Err(Malformed::Version { version, .. }) => Err(LinkReject::Version(version)),
                        _ => Err(LinkReject::Malformed),
                    };
                    if let Err(reason) = result {
                        self.rejects.add(peer, reason);
                    }
                }
                if !self.link_batch.is_full() {
                    break;
                }
            }
        }
        if self.links.next_timeout().is_some_and(|at| at <= now) {
            self.links.expire(now);
        }
        Ok(true)
    }

    fn poll_error_queues(&mut self, now: u64) -> io::Result<()> {
        let sockets = self.sockets.by_address().flat_map(|sockets| {
            [(UnreachablePort::Roce, 0, &sockets.roce), (UnreachablePort::Link, 0, &sockets.link)]
        });
        let flow_sockets =
            self.flow_sockets.iter().flat_map(FlowSockets::iter).map(|socket| (Some(0), socket));
        let senders = flow_sockets.chain(self.send_sockets.iter());
        let senders = senders.map(|(slot, socket)| match slot {
            Some(slot) => (UnreachablePort::Roce, slot, socket),
            None => (UnreachablePort::Link, 0, socket),
        });
        for (port, slot, socket) in sockets.chain(senders) {
            for _ in 0..MAX_ERRORS_PER_POLL {
                let Some(error) = socket.poll_error()? else { break };
                if let (Some(peer), NetworkErrorCause::PortUnreachable) = (error.peer, error.cause) {
                    // No process of the host has the port any more; the others are tried as they are used.
                    self.links.on_unreachable(PeerPort { address: peer.ip(), slot }, port, now);
                }
            }
        }
        Ok(())
    }

    /// Sends every link control message that is due.
    pub fn transmit_link_messages(&mut self, now: u64) -> io::Result<()> {
        while let Some((peer, mut message)) = self.links.transmit(now) {
            let source = self.sockets.for_destination(peer.address).address();
            message.slots.source_port = self.source_port(peer, source, ROCE_PORT);
            // Nothing but the own error queue tells a process of several that share the port that a peer is foreign.
            let asks = self.links.slot().bits > 0 && is_question(&message) && !self.links.is_native(peer);
            let asking = asks.then(|| self.send_sockets.asking_socket(source)).flatten();
            let (peer, bytes) = (peer.address, message.emit());
            let socket = match asking {
                Some(socket) => socket,
                None => &mut self.sockets.for_destination_mut(peer).link,
            };
            match socket.send_batch_to(SocketAddr::new(peer, LINK_PORT), 0, bytes.len(), &bytes) {
                // Link control repeats every message until it has its effect: a lost one only costs time.
                Ok(_) | Err(SendError::WouldBlock | SendError::NoBuffers | SendError::TooLarge) => {}
                Err(SendError::SegmentationUnsupported) => {}
                Err(SendError::Other(error)) if is_peer_error(&error) => {}
                Err(SendError::Other(error)) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Whether a message asks a port for its token. The answer goes to the link control port of the sender in any case.
fn is_question(message: &Message) -> bool {
    matches!(message.body, Body::Hello(Hello { exchange: ExchangeKind::Query, .. }))
}

/// Rejected link control messages, by reason. A log that shows every forged message would be an attack of its own.
#[derive(Default)]
struct RejectLog {
    reasons: BTreeMap<LinkReject, RejectedMessages>,
    /// Rejected since the last poll.
    new: Vec<LinkReject>,
}

struct RejectedMessages {
    /// The source address of the last one.
    peer: IpAddr,
    /// Since the last event.
    messages: u64,
    logged_at: Option<u64>,
}

impl RejectLog {
    fn add(&mut self, peer: IpAddr, reason: LinkReject) {
        self.new.push(reason);
        let entry = self.reasons.entry(reason);
        let rejected = entry.or_insert(RejectedMessages { peer, messages: 0, logged_at: None });
        rejected.peer = peer;
        rejected.messages += 1;
    }

    /// The log entries that are due now: the last source, the reason and the number of messages.
    fn due(&mut self, now: u64) -> impl Iterator<Item = (IpAddr, LinkReject, u64)> {
        self.reasons.iter_mut().filter_map(move |(reason, rejected)| {
            let is_due = rejected.logged_at.is_none_or(|at| now >= at + REJECT_LOG_INTERVAL);
            (rejected.messages > 0 && is_due).then(|| {
                rejected.logged_at = Some(now);
                (rejected.peer, *reason, std::mem::take(&mut rejected.messages))
            })
        })
    }
}

/// Whether an error concerns one destination only: others may still be reachable.
pub(super) fn is_peer_error(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NetworkUnreachable
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::PermissionDenied
            | io::ErrorKind::AddrNotAvailable
            | io::ErrorKind::InvalidInput
    )
}

/// Admits packets to a port: host network, pauses, grants.
pub(super) struct PortGate<'a> {
    pub port: &'a mut Port,
    /// The priorities that the HCA knows to be paused.
    pub paused_priorities: u8,
    pub now: u64,
    /// The last packets that were asked for: their queue pair and the way to it.
    pub last: Option<(Qpn, Egress)>,
}

impl TransmitGate for PortGate<'_> {
    fn allowed_packets(
        &mut self,
        addressing: &AddressHeaders,
        destination_qp: Qpn,
        size: usize,
        is_unacknowledged: bool,
    ) -> usize {
        let PortGate { port, paused_priorities, now, last } = self;
        let destination = addressing.destination;
        *last = None;
        if let Some(subnet) = &mut port.subnet {
            return if subnet.can_send(destination) { usize::MAX } else { 0 };
        }
        if destination.is_multicast() {
            return usize::MAX;
        }
        let egress = port.egress_to(destination, destination_qp);
        *last = Some((destination_qp, egress));
        if let (Egress::Network, Some(network)) = (egress, &mut port.network) {
            return network.can_send(destination, *paused_priorities).into();
        }
        // A packet does not carry its service level: a peer derives the priority from the DSCP.
        let peer = match egress {
            Egress::Internal(peer) | Egress::Rings(peer) | Egress::Socket(peer) => peer,
            Egress::Subnet | Egress::Network | Egress::HandOver => {
                port.links.port_of(destination, destination_qp)
            }
        };
        if port.pauses.mask(peer) >> (addressing.traffic_class >> 5) & 1 == 1 {
            port.blocked_on_pause.insert(peer);
            return 0;
        }
        match egress {
            Egress::Subnet | Egress::Network | Egress::HandOver | Egress::Internal(_) => usize::MAX,
            Egress::Rings(peer) => port.room_in_rings(peer, size, *now),
            Egress::Socket(peer) => {
                if !port.request_grant(peer, charge(size, 1), is_unacknowledged, *now) {
                    return 0;
                }
                let allowance = port.allowance(peer, is_unacknowledged, *now);
                port.sockets.for_destination(destination).roce.max_segments_within(
                    destination,
                    size,
                    allowance,
                )
            }
        }
    }

    fn slot_bits(&self, address: IpAddr) -> u8 {
        self.port.links.slot_bits(address)
    }
}

/// The rings to other processes of the host.
pub(super) struct PortWire<'a> {
    port: &'a mut Port,
    now: u64,
}

impl HostWire for PortWire<'_> {
    fn room(&mut self, slot: u16) -> usize {
        self.port.rings.as_mut().map_or(0, |rings| rings.room(slot))
    }

    fn send(&mut self, slot: u16, path: &AddressHeaders, segment_size: usize, packets: &[u8]) {
        self.port.send_in_rings(slot, path, segment_size, packets, self.now);
    }
}

impl Driver {
    pub(super) fn poll_links(&mut self, now: Instant) -> io::Result<()> {
        if self.port.poll(now.nanos())? {
            self.report_rejects(now);
            self.process_link_events(now);
        }
        Ok(())
    }

    /// Counts rejected link control messages, and logs them from time to time.
    fn report_rejects(&mut self, now: Instant) {
        let Driver { engine, port, .. } = self;
        engine.hca.set_revoked_grants(port.links.grant_issuer().revocations());
        for reason in port.rejects.new.drain(..) {
            engine.hca.count_link_reject(reason);
        }
        for (peer, reason, messages) in port.rejects.due(now.nanos()) {
            engine.call(now, |hca, ctx| hca.log_link_rejects(ctx, peer, reason, messages));
        }
    }

    /// Ends the pauses whose time is over.
    pub(super) fn expire_pauses(&mut self, now: Instant) {
        let Driver { engine, port, .. } = self;
        if port.pauses.next_timeout().is_some_and(|at| at <= now.nanos()) {
            let emit = |event| engine.sink.on_event(now, &NetworkEvent::Fabric(event));
            let resumed = port.pauses.expire(now.nanos(), emit);
            self.unblock_paused(now, resumed);
        }
    }

    /// Unblocks queue pairs that wait for a pause of these peers to end.
    fn unblock_paused(&mut self, now: Instant, peers: Vec<PeerPort>) {
        for peer in peers.into_iter().filter(|peer| self.port.blocked_on_pause.remove(peer)) {
            self.engine.call(now, |hca, ctx| hca.unblock(ctx, peer.address));
        }
    }

    /// Applies link events to the HCA and to what is queued for or from the peer.
    pub(super) fn process_link_events(&mut self, now: Instant) {
        let mut resumed = Vec::new();
        let Driver { engine, port, transmitter, receiver, .. } = self;
        while let Some(event) = port.links.poll_event() {
            let (address, peer) = (event.peer.address, port.links.queue_pairs_of(event.peer));
            let change = event.change.name();
            engine.sink.on_event(now, &NetworkEvent::PeerLinkChanged { peer: address, change });
            if let LinkChange::StateChanged(state) = event.change {
                engine.call(now, |hca, ctx| hca.set_foreign(ctx, address, state == PeerState::Foreign));
            }
            match event.change {
                LinkChange::StateChanged(PeerState::Stalled) => engine.hca.stall(peer),
                // The queue pairs of another process in the slot have other numbers.
                LinkChange::Restarted if event.peer.slot != 0 => {
                    engine.call(now, |hca, ctx| {
                        hca.resume(ctx, peer);
                        hca.on_process_gone(ctx, peer);
                    });
                    if port.pauses.remove_peer(event.peer) {
                        resumed.push(event.peer);
                    }
                }
                LinkChange::StateChanged(PeerState::Dead) => {
                    receiver
                        .remove_peer(|source| port.links.sender(source.ip(), source.port()) == event.peer);
                    transmitter.remove_peer(event.peer);
                    if port.pauses.remove_peer(event.peer) {
                        resumed.push(event.peer);
                    }
                    if let Some(network) = &port.network {
                        network.discard_external(address);
                    }
                    // Unconnected queue pairs cannot fail: they request a grant again.
                    let was_blocked = port.blocked_on_grant.remove(&event.peer).is_some();
                    engine.call(now, |hca, ctx| {
                        hca.resume(ctx, peer);
                        hca.fail_peer(ctx, peer);
                        if was_blocked {
                            hca.unblock(ctx, address);
                        }
                    });
                }
                LinkChange::Restarted => {
                    if port.pauses.remove_peer(event.peer) {
                        resumed.push(event.peer);
                    }
                    engine.hca.discard_orphaned_acks(peer);
                    engine.call(now, |hca, ctx| hca.resume(ctx, peer));
                }
                LinkChange::StateChanged(_) => {
                    engine.call(now, |hca, ctx| hca.resume(ctx, peer));
                    // A packet that waited for slot 0 may be for another slot.
                    if peer.slot.bits > 0
                        && event.peer.slot == 0
                        && port.blocked_on_grant.remove(&event.peer).is_some()
                    {
                        engine.call(now, |hca, ctx| hca.unblock(ctx, address));
                    }
                }
                LinkChange::PauseReceived(pause) => {
                    engine.hca.count_pause_frames(1);
                    let frame = pause.to_pfc(MacAddress::from_ip(address));
                    engine.sink.on_event(now, &pause_event(Stage::Delivered, &frame));
                    let emit = |event| engine.sink.on_event(now, &NetworkEvent::Fabric(event));
                    if port.pauses.apply(event.peer, &pause, now.nanos(), emit) {
                        resumed.push(event.peer);
                    }
                }
            }
        }
        // A blocked destination repeats its request. Link control returns a grant that cannot be used at once because
        // the peer has not answered a heartbeat lately.
        let Port { links, blocked_on_grant, .. } = port;
        blocked_on_grant.retain(|peer, charge| {
            let is_granted = links.may_send(*peer, *charge, now.nanos());
            if is_granted {
                engine.call(now, |hca, ctx| hca.unblock(ctx, peer.address));
            }
            !is_granted
        });
        self.unblock_paused(now, resumed);
    }

    /// Sends a priority flow control frame to a peer, whose port then stops or resumes these priorities towards this
    /// host. The frame is sent once and may be lost.
    pub fn pause_peer(&mut self, peer: IpAddr, pause: Pause) {
        let now = self.now();
        let frame = pause.to_pfc(MacAddress::from_ip(self.address()));
        self.engine.sink.on_event(now, &pause_event(Stage::Admitted, &frame));
        self.port.links.send_pause(peer, pause, now.nanos());
        self.process_link_events(now);
    }
}
