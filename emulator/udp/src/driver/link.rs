//! The port: its sockets, its links to peer ports, and the destinations that may not be sent to now.

use super::Driver;
use super::engine::pause_event;
use crate::entropy::FlowSockets;
use crate::host_network::HostPort;
use crate::pauses::PeerPauses;
use crate::{
    HostSockets, LinkChange, LinkControl, NetworkErrorCause, PeerState, ReceiveBatch, RoceSocket, SendError,
    UnreachablePort, charge,
};
use softhca_engine::{Instant, Memory, TransmitGate};
use softhca_fabric::{NetworkEvent, Stage};
use softhca_wire::link_control::{Message, Pause};
use softhca_wire::{AddressHeaders, MacAddress};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;

/// The longest time between two reads of the link sockets while a caller polls.
const LINK_POLL_INTERVAL: u64 = 20_000;
/// How often the error queues are read while no descriptor reports an error.
const ERROR_QUEUE_POLL_INTERVAL: u64 = 100_000_000;
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
    /// Destinations that wait for a grant, with the smallest charge that lets a queue pair send.
    blocked_on_grant: BTreeMap<IpAddr, u64>,
    /// Destinations that wait for a pause to end.
    blocked_on_pause: BTreeSet<IpAddr>,
    link_batch: ReceiveBatch,
    links_polled_at: u64,
    error_queues_polled_at: u64,
}

impl Port {
    pub fn new(sockets: HostSockets, flow_sockets: Option<FlowSockets>, links: LinkControl) -> Port {
        Port {
            sockets,
            flow_sockets,
            links,
            pauses: PeerPauses::default(),
            network: None,
            blocked_on_grant: BTreeMap::new(),
            blocked_on_pause: BTreeSet::new(),
            link_batch: ReceiveBatch::new(),
            links_polled_at: 0,
            error_queues_polled_at: 0,
        }
    }

    /// The port in the host network, if that network leads to `destination`.
    pub fn network_to(&self, destination: IpAddr) -> Option<&HostPort> {
        self.network.as_ref().filter(|network| network.routes_to(destination))
    }

    /// The socket that packets with this addressing leave from.
    pub fn egress_socket(&mut self, addressing: &AddressHeaders) -> &mut RoceSocket {
        let AddressHeaders { source, source_port, destination, .. } = *addressing;
        let flow_socket = self.flow_sockets.as_mut().and_then(|sockets| sockets.socket(source, source_port));
        flow_socket.unwrap_or_else(|| &mut self.sockets.for_destination_mut(destination).roce)
    }

    /// Whether a packet of this charge may be sent to `destination`. If not, the destination is unblocked when the
    /// peer grants the charge.
    pub fn request_grant(&mut self, destination: IpAddr, charge: u64, now: u64) -> bool {
        let is_granted = self.links.may_send(destination, charge, now);
        if !is_granted {
            let least = self.blocked_on_grant.entry(destination).or_insert(charge);
            *least = charge.min(*least);
        }
        is_granted
    }

    pub fn is_blocked_on_grant(&self, destination: IpAddr) -> bool {
        self.blocked_on_grant.contains_key(&destination)
    }

    /// Whether the grants of `destination` cover at least one segment of `segment_size`.
    pub fn is_granted(&self, destination: IpAddr, segment_size: usize, now: u64) -> bool {
        let allowance = self.links.allowance(destination, now);
        let socket = &self.sockets.for_destination(destination).roce;
        destination.is_multicast() || socket.max_segments_within(destination, segment_size, allowance) > 0
    }

    /// Reads the error queues at the next poll.
    pub fn on_socket_error(&mut self) {
        self.error_queues_polled_at = 0;
    }

    /// Reads link control if it is due, and at once if a destination waits for a grant. Returns whether it did.
    fn poll(&mut self, now: u64) -> io::Result<bool> {
        if now >= self.error_queues_polled_at + ERROR_QUEUE_POLL_INTERVAL {
            self.error_queues_polled_at = now;
            self.poll_error_queues(now)?;
        }
        if now < self.links_polled_at + LINK_POLL_INTERVAL && self.blocked_on_grant.is_empty() {
            return Ok(false);
        }
        self.links_polled_at = now;
        for sockets in self.sockets.by_address() {
            loop {
                sockets.link.receive(&mut self.link_batch)?;
                for datagram in self.link_batch.datagrams() {
                    if let Ok(message) = Message::parse(datagram.bytes) {
                        self.links.on_message(datagram.source.ip(), &message, now);
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
            [(UnreachablePort::Roce, &sockets.roce), (UnreachablePort::Link, &sockets.link)]
        });
        let flow_sockets = self.flow_sockets.iter().flat_map(FlowSockets::iter);
        for (port, socket) in sockets.chain(flow_sockets.map(|socket| (UnreachablePort::Roce, socket))) {
            for _ in 0..MAX_ERRORS_PER_POLL {
                let Some(error) = socket.poll_error()? else { break };
                if let (Some(peer), NetworkErrorCause::PortUnreachable) = (error.peer, error.cause) {
                    self.links.on_unreachable(peer.ip(), port, now);
                }
            }
        }
        Ok(())
    }

    /// Sends every link control message that is due.
    pub fn transmit_link_messages(&mut self, now: u64) -> io::Result<()> {
        while let Some((peer, message)) = self.links.transmit(now) {
            let bytes = message.emit();
            match self.sockets.for_destination_mut(peer).link.send_batch(peer, 0, bytes.len(), &bytes) {
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
}

impl TransmitGate for PortGate<'_> {
    fn allowed_packets(&mut self, addressing: &AddressHeaders, size: usize) -> usize {
        let PortGate { port, paused_priorities, now } = self;
        let destination = addressing.destination;
        if destination.is_multicast() {
            return usize::MAX;
        }
        if let Some(network) = port.network.as_mut().filter(|network| network.routes_to(destination)) {
            return network.can_send(destination, *paused_priorities).into();
        }
        // A packet does not carry its service level: a peer derives the priority from the DSCP.
        if port.pauses.mask(destination) >> (addressing.traffic_class >> 5) & 1 == 1 {
            port.blocked_on_pause.insert(destination);
            return 0;
        }
        if port.links.is_internal(destination) {
            return usize::MAX;
        }
        if !port.request_grant(destination, charge(size, 1), *now) {
            return 0;
        }
        let allowance = port.links.allowance(destination, *now);
        port.sockets.for_destination(destination).roce.max_segments_within(destination, size, allowance)
    }
}

impl<M: Memory> Driver<M> {
    pub(super) fn poll_links(&mut self, now: Instant) -> io::Result<()> {
        if self.port.poll(now.nanos())? {
            self.process_link_events(now);
        }
        Ok(())
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
    fn unblock_paused(&mut self, now: Instant, peers: Vec<IpAddr>) {
        for peer in peers.into_iter().filter(|peer| self.port.blocked_on_pause.remove(peer)) {
            self.engine.call(now, |hca, ctx| hca.unblock(ctx, peer));
        }
    }

    /// Applies link events to the HCA and to what is queued for or from the peer.
    pub(super) fn process_link_events(&mut self, now: Instant) {
        let mut resumed = Vec::new();
        let Driver { engine, port, transmitter, receiver, .. } = self;
        while let Some(event) = port.links.poll_event() {
            let peer = event.peer;
            let change = event.change.name();
            engine.sink.on_event(now, &NetworkEvent::PeerLinkChanged { peer, change });
            match event.change {
                LinkChange::StateChanged(PeerState::Stalled) => engine.hca.stall(peer),
                LinkChange::StateChanged(PeerState::Dead) => {
                    receiver.remove_peer(peer);
                    transmitter.remove_peer(peer);
                    if port.pauses.remove_peer(peer) {
                        resumed.push(peer);
                    }
                    if let Some(network) = &port.network {
                        network.discard_external(peer);
                    }
                    // Unconnected queue pairs cannot fail: they request a grant again.
                    let was_blocked = port.blocked_on_grant.remove(&peer).is_some();
                    engine.call(now, |hca, ctx| {
                        hca.resume(ctx, peer);
                        hca.fail_peer(ctx, peer);
                        if was_blocked {
                            hca.unblock(ctx, peer);
                        }
                    });
                }
                LinkChange::Restarted => {
                    engine.hca.discard_orphaned_acks(peer);
                    engine.call(now, |hca, ctx| hca.resume(ctx, peer));
                }
                LinkChange::StateChanged(_) => engine.call(now, |hca, ctx| hca.resume(ctx, peer)),
                LinkChange::PauseReceived(pause) => {
                    engine.hca.count_pause_frames(1);
                    let frame = pause.to_pfc(MacAddress::from_ip(peer));
                    engine.sink.on_event(now, &pause_event(Stage::Delivered, &frame));
                    let emit = |event| engine.sink.on_event(now, &NetworkEvent::Fabric(event));
                    if port.pauses.apply(peer, &pause, now.nanos(), emit) {
                        resumed.push(peer);
                    }
                }
            }
        }
        // A blocked destination repeats its request: link control returns a grant that cannot be used at once because
        // the peer has not answered a heartbeat lately.
        let Port { links, blocked_on_grant, .. } = port;
        blocked_on_grant.retain(|peer, charge| {
            let is_granted = links.may_send(*peer, *charge, now.nanos());
            if is_granted {
                engine.call(now, |hca, ctx| hca.unblock(ctx, *peer));
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
