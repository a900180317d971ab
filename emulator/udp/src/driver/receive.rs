//! Receive: packets from the sockets, from the host network and from the HCA itself, in PSN order.

use super::engine::{Engine, frame_event};
use super::link::Port;
use super::{Driver, IcrcCheck};
use crate::host_network::HostPort;
use crate::multicast::MulticastGroups;
use crate::reorder::{EarlyFrame, FlowKey, ReorderBuffer};
use crate::subnet_port::{Arrived, MAX_PACKETS_PER_POLL};
use crate::{Chunk, LinkControl, MAX_BATCH_SEGMENTS, PeerPort, ReceiveBatch};
use softhca_control::HandedOverPacket;
use softhca_engine::{Context, Hca, Instant, MadOwner};
use softhca_fabric::{ExternalPortUpdate, Frame, Origin, Stage};
use softhca_wire::cm::PacketTarget;
use softhca_wire::link_control::Pause;
use softhca_wire::{AddressHeaders, Bth, ICRC_LEN, Icrc, LocalRoute, Malformed, QpnSlot};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU64;

/// Reads the sockets of the host and of its multicast groups.
pub(super) struct Receiver {
    pub batch: ReceiveBatch,
    pub multicast: MulticastGroups,
    pub packets: PacketReceiver,
}

/// Verifies packets and hands them to the HCA.
pub(super) struct PacketReceiver {
    pub icrc_check: IcrcCheck,
    /// The identifications of the current chunk, kept to reuse their memory.
    identifications: Vec<Option<u16>>,
    reorder_buffer: ReorderBuffer,
    /// Packets for other slots are handed over.
    pub hands_over: bool,
    /// Packets for other slots that arrived since the last call.
    pub misdelivered: Vec<HandedOverPacket>,
}

/// A chunk that arrived at an address of the host or at a multicast group.
#[derive(Clone, Copy)]
pub(super) struct Arrival<'a> {
    pub chunk: Chunk<'a>,
    pub peer: PeerPort,
    pub destination: IpAddr,
    pub check: IcrcCheck,
}

/// Verifies the ICRC of each datagram of a chunk when it is first asked for. A datagram with a bad ICRC has no
/// identification.
struct IcrcVerifier<'a, 'b> {
    arrival: Arrival<'b>,
    identification_limit: u32,
    /// The peer may leave the ICRC out.
    is_offloaded: bool,
    identifications: &'a mut Vec<Option<u16>>,
}

impl<'b> IcrcVerifier<'_, 'b> {
    /// The addressing of a datagram, and its transport packet if the ICRC is correct.
    fn verify(&mut self, index: usize, bytes: &'b [u8]) -> (AddressHeaders, Option<&'b [u8]>) {
        let Arrival { chunk, destination, check, .. } = self.arrival;
        let mut addressing = AddressHeaders::between(chunk.source.ip(), destination);
        addressing.source_port = chunk.source.port();
        addressing.traffic_class = chunk.traffic_class;
        if index == self.identifications.len() {
            // The most likely one: the kernel numbers the segments of a GSO send from zero.
            addressing.identification = index as u16;
            self.identifications.push(match check {
                IcrcCheck::Ignore => Some(index as u16),
                _ if self.leaves_icrc_out(bytes) => Some(index as u16),
                _ => Icrc::recover_identification(&addressing, bytes, self.identification_limit),
            });
        }
        let identification = self.identifications[index];
        addressing.identification = identification.unwrap_or(0);
        let transport = Icrc::split(bytes).ok().filter(|_| identification.is_some());
        (addressing, transport.map(|(transport, _)| transport))
    }
}

impl IcrcVerifier<'_, '_> {
    /// Whether a datagram has no ICRC because its sender is on this machine.
    #[inline]
    fn leaves_icrc_out(&self, bytes: &[u8]) -> bool {
        self.is_offloaded && bytes.last_chunk() == Some(&[0; ICRC_LEN])
    }
}

impl Receiver {
    pub fn new(icrc_check: IcrcCheck) -> Receiver {
        let packets = PacketReceiver {
            icrc_check,
            identifications: Vec::new(),
            reorder_buffer: ReorderBuffer::default(),
            hands_over: false,
            misdelivered: Vec::new(),
        };
        Receiver { batch: ReceiveBatch::new(), multicast: MulticastGroups::default(), packets }
    }

    pub fn next_timeout(&self) -> Option<u64> {
        self.packets.reorder_buffer.next_timeout()
    }

    /// Drops the early frames of a dead peer.
    pub fn remove_peer(&mut self, is_peer: impl Fn(SocketAddr) -> bool) {
        self.packets.reorder_buffer.remove_peer(is_peer);
    }

    /// Receives one batch. After an early frame it receives more, until the missing frames arrive or the sockets are
    /// empty. Returns whether any packet moved.
    pub fn poll(
        &mut self,
        now: Instant,
        clock: impl Fn() -> Instant,
        engine: &mut Engine,
        port: &mut Port,
    ) -> io::Result<bool> {
        let mut moved = self.receive_batches(now, engine, port)?;
        while !self.packets.reorder_buffer.is_empty() {
            let reorder_buffer = &mut self.packets.reorder_buffer;
            if let Some(network) = &port.network {
                reorder_buffer.restart_timeout(clock().nanos(), |peer| network.has_external_in_flight(peer));
            }
            if let Some(key) = reorder_buffer.expired_flow(clock().nanos()) {
                engine.call(now, |hca, ctx| release(reorder_buffer, key, clock().nanos(), hca, ctx));
            } else if self.receive_batches(now, engine, port)? {
                moved = true;
            } else {
                break;
            }
        }
        Ok(moved)
    }

    /// Receives one batch from each socket.
    fn receive_batches(&mut self, now: Instant, engine: &mut Engine, port: &mut Port) -> io::Result<bool> {
        let (mut received, mut is_drained) = (false, true);
        let Receiver { batch, multicast, packets } = self;
        let Port { sockets, links, network, .. } = port;
        let check = packets.icrc_check;
        let unicast = sockets.by_address().map(|sockets| (sockets.address(), &sockets.roce));
        for (destination, socket) in unicast.chain(multicast.sockets()) {
            socket.receive(batch)?;
            received |= !batch.is_empty();
            is_drained &= !batch.is_full() || destination.is_multicast();
            for chunk in batch.chunks() {
                let peer = links.sender(chunk.source.ip(), chunk.source.port());
                let arrival = Arrival { chunk, peer, destination, check };
                packets.receive_chunk(now, arrival, engine, links, network.as_ref());
            }
        }
        if is_drained {
            links.on_socket_empty(now.nanos());
        }
        Ok(received)
    }
}

impl PacketReceiver {
    /// Receives a chunk. Multicast is exempt from grants.
    pub fn receive_chunk(
        &mut self,
        now: Instant,
        arrival: Arrival<'_>,
        engine: &mut Engine,
        links: &mut LinkControl,
        network: Option<&HostPort>,
    ) {
        let Arrival { chunk, peer, destination, check } = arrival;
        let is_unicast = !destination.is_multicast();
        let mut granted =
            if is_unicast { links.record_received(peer, chunk.charge(), now.nanos()) } else { 0 };
        // Only packets of native peers pass the switch of this host: a foreign peer cannot be paused.
        let network = network.filter(|_| is_unicast && links.is_established(peer));
        let identification_limit = match check {
            IcrcCheck::Auto if !links.is_local(peer) && !links.is_native(peer) => 65_536,
            _ => MAX_BATCH_SEGMENTS as u32,
        };
        let in_order = links.transmits_in_order(peer);
        let PacketReceiver { identifications, reorder_buffer, misdelivered, .. } = self;
        let (slot, hands_over) = (links.slot(), self.hands_over && is_unicast);
        let is_observed = engine.is_observed;
        identifications.clear();
        let is_offloaded = check == IcrcCheck::Auto && links.offloads_icrc(peer);
        // Whoever else sees a packet sees it with its ICRC.
        let completes_icrc = is_offloaded && (is_observed || hands_over || network.is_some());
        let mut completed = Vec::new();
        let mut verifier = IcrcVerifier { arrival, identification_limit, is_offloaded, identifications };
        for (index, datagram) in chunk.datagrams().enumerate() {
            let (addressing, transport) = verifier.verify(index, datagram.bytes);
            let mut packet = datagram.bytes;
            if completes_icrc && transport.is_some() && verifier.leaves_icrc_out(packet) {
                completed.clear();
                completed.extend_from_slice(packet);
                Icrc::write(&addressing, &mut completed);
                packet = &completed;
            }
            if hands_over
                && let Some(transport) = transport
                && let to = target_slot(slot, &engine.hca, &addressing, transport)
                && to != slot.number
            {
                if datagram.bytes.len() > HandedOverPacket::MAX_BYTES {
                    engine.call(now, |hca, ctx| hca.drop_oversized(ctx, datagram.bytes.len()));
                    continue;
                }
                let Chunk { source, traffic_class, .. } = chunk;
                let bytes = packet.to_vec();
                misdelivered.push(HandedOverPacket { slot: to, source, destination, traffic_class, bytes });
                continue;
            }
            if let (Some(network), Some(_)) = (network, transport) {
                let frame = Frame::new(addressing, packet.to_vec());
                if network.inject_external(frame, links.grant_issuer().budget()).is_ok() {
                    // The packet occupies granted buffer space until it has entered the network.
                    links.add_buffered(peer, std::mem::take(&mut granted));
                    continue;
                }
            }
            if is_observed {
                engine.sink.on_event(now, &frame_event(Stage::Delivered, &addressing, packet));
            }
            engine.call(now, |hca, ctx| match transport {
                Some(transport) if in_order => {
                    receive_in_order(reorder_buffer, &addressing, transport, hca, ctx);
                }
                Some(transport) => hca.receive(ctx, &addressing, transport),
                None if Icrc::split(datagram.bytes).is_ok() => hca.drop_bad_icrc(ctx),
                None => hca.receive(ctx, &addressing, datagram.bytes),
            });
        }
    }
}

/// Receives packets for queue pairs of this HCA from memory: its own, or those of another process of the host. Nothing has
/// changed them on the way.
pub(super) fn receive_from_memory(
    now: Instant,
    addressing: &AddressHeaders,
    segment_size: usize,
    bytes: &[u8],
    engine: &mut Engine,
) {
    let AddressHeaders { source, destination, source_port, traffic_class, .. } = *addressing;
    let mut addressing = AddressHeaders::between(source, destination);
    (addressing.source_port, addressing.traffic_class) = (source_port, traffic_class);
    for (index, packet) in bytes.chunks(segment_size).enumerate() {
        addressing.identification = index as u16;
        if engine.is_observed {
            engine.sink.on_event(now, &frame_event(Stage::Delivered, &addressing, packet));
        }
        let transport = Icrc::split(packet).map_or(packet, |(transport, _)| transport);
        engine.call(now, |hca, ctx| hca.receive(ctx, &addressing, transport));
    }
}

/// The slot of the process that a packet is for, which has arrived at slot `own`.
#[inline]
fn target_slot(own: QpnSlot, hca: &Hca, addressing: &AddressHeaders, transport: &[u8]) -> u16 {
    let target = PacketTarget::of(transport);
    let slot = QpnSlot::of(target.qpn(), own.bits).number;
    match target {
        PacketTarget::Listener(_) if own.number != 0 && hca.listens_to(transport) => own.number,
        // Slot 0 knows all listeners.
        PacketTarget::Listener(_) if own.number != 0 => 0,
        PacketTarget::Process(_) if own.number != 0 || slot != 0 => slot,
        _ => match hca.mad_owner(addressing, transport) {
            MadOwner::Own => 0,
            MadOwner::Slot(slot) => slot,
            MadOwner::Requested => HandedOverPacket::UNKNOWN_SLOT,
        },
    }
}

/// Hands a packet to the HCA in PSN order: early packets wait in the reorder buffer.
fn receive_in_order(
    reorder_buffer: &mut ReorderBuffer,
    addressing: &AddressHeaders,
    transport: &[u8],
    hca: &mut Hca,
    ctx: &mut Context<'_>,
) {
    let Ok(bth) = Bth::parse(transport) else { return hca.receive(ctx, addressing, transport) };
    let is_early = hca.is_out_of_sequence(&bth);
    if !is_early && reorder_buffer.is_empty() {
        return hca.receive(ctx, addressing, transport);
    }
    let key = FlowKey::of(addressing.source, &bth);
    if !is_early && !reorder_buffer.contains(key) {
        return hca.receive(ctx, addressing, transport);
    }
    let now = ctx.now.nanos();
    let frame = EarlyFrame { bth, addressing: *addressing, transport: transport.to_vec(), is_early };
    reorder_buffer.insert(key, frame, now);
    release(reorder_buffer, key, now, hca, ctx);
}

/// Hands the frames of a flow to the HCA that are next in PSN order or have waited too long.
fn release(reorder_buffer: &mut ReorderBuffer, key: FlowKey, now: u64, hca: &mut Hca, ctx: &mut Context<'_>) {
    while let Some((frame, was_reordered)) =
        reorder_buffer.pop_ready(key, now, |bth| hca.is_out_of_sequence(bth))
    {
        hca.count_reordered(was_reordered.into());
        hca.receive(ctx, &frame.addressing, &frame.transport);
    }
}

impl Driver {
    /// Handles what has happened at the port of an InfiniBand subnet. Returns whether a packet arrived.
    pub(super) fn poll_subnet(&mut self, now: Instant) -> bool {
        let Driver { engine, port, .. } = self;
        let Some(subnet) = &mut port.subnet else { return false };
        if !subnet.link.take_ready() && !subnet.has_more {
            return false;
        }
        if let Some(attributes) = subnet.link.changed_port() {
            engine.call(now, |hca, ctx| hca.set_infiniband_port(ctx, attributes));
        }
        for destination in subnet.take_blocked() {
            engine.call(now, |hca, ctx| hca.unblock(ctx, destination));
        }
        let packets = subnet.link.receive(MAX_PACKETS_PER_POLL);
        subnet.has_more = packets.len() == MAX_PACKETS_PER_POLL;
        let has_received = !packets.is_empty();
        for mut bytes in packets {
            let accepted = subnet.accept(&engine.hca, &mut bytes);
            engine.call(now, |hca, ctx| match accepted {
                Ok(Arrived { addressing, transport }) => hca.receive(ctx, &addressing, &bytes[transport]),
                Err(Malformed::Checksum { .. }) => hca.drop_bad_icrc(ctx),
                Err(_) => hca.receive(ctx, &AddressHeaders::routed(LocalRoute::NONE, None), &[]),
            });
        }
        has_received
    }

    /// Receives what the host network has for this host. Returns whether it had a frame.
    pub(super) fn poll_host_network(&mut self, now: Instant) -> bool {
        let Some(network) = &mut self.port.network else { return false };
        let (poll, rate) = (network.poll(), network.line_rate().map_or(0, NonZeroU64::get));
        self.engine.hca.count_pause_frames(poll.new_pause_frames);
        self.engine.hca.set_paused_priorities(poll.paused_priorities);
        for ExternalPortUpdate { peer, queued_bytes, pause } in &poll.external_updates {
            self.port.links.limit_buffered(*peer, *queued_bytes);
            if let Some(pause) = pause {
                self.pause_peer(*peer, Pause::from_pfc(pause, rate));
            }
        }
        let Driver { engine, port, receiver, .. } = self;
        for destination in poll.unblocked {
            engine.call(now, |hca, ctx| hca.unblock(ctx, destination));
        }
        for (frame, origin) in &poll.frames {
            engine.sink.on_event(now, &frame_event(Stage::Delivered, &frame.addressing, &frame.bytes));
            let in_order = port.links.transmits_in_order(frame.addressing.source.into());
            let reorder_buffer = &mut receiver.packets.reorder_buffer;
            engine.call(now, |hca, ctx| match Icrc::split(&frame.bytes) {
                // The ICRC of an external packet was verified on arrival; its machine may have reordered it.
                Ok((transport, _)) if *origin == Origin::External && in_order => {
                    receive_in_order(reorder_buffer, &frame.addressing, transport, hca, ctx);
                }
                Ok((transport, icrc))
                    if *origin == Origin::External || Icrc::compute(&frame.addressing, transport) == icrc =>
                {
                    hca.receive(ctx, &frame.addressing, transport);
                }
                Ok(_) => hca.drop_bad_icrc(ctx),
                Err(_) => hca.receive(ctx, &frame.addressing, &frame.bytes),
            });
        }
        !poll.frames.is_empty()
    }
}
