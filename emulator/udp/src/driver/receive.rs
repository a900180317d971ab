//! The receiving half: batches of the sockets, frames of the backbone, in the order of their PSNs.

use super::{Driver, IcrcCheck, emit_hca_event, frame_event};
use crate::host_network::HostPort;
use crate::reorder::{EarlyFrame, FlowKey, ReorderBuffer};
use crate::{Chunk, LinkControl, PeerState};
use softhca_engine::{Context, Event, Hca, Instant, Memory, PacketBatch};
use softhca_fabric::{EventSink, ExternalPortUpdate, Frame, Origin, Stage};
use softhca_wire::link_control::Pause;
use softhca_wire::{AddressHeaders, Bth, Icrc};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU64;

/// Hands frames to the card in the order of their PSNs.
struct InOrderReceiver<'a, 'c> {
    hca: &'a mut Hca,
    reorder_buffer: &'a mut ReorderBuffer,
    ctx: Context<'c>,
    now: u64,
}

/// The identifications of the datagrams of a chunk, each found when it is first asked for; none if an ICRC is wrong.
struct IcrcVerifier<'a, 'b> {
    chunk: Chunk<'b>,
    address: IpAddr,
    check: IcrcCheck,
    identification_limit: u32,
    identifications: &'a mut Vec<Option<u16>>,
}

impl<'b> IcrcVerifier<'_, 'b> {
    /// The envelope of a datagram, and the packet in it if its ICRC is right.
    fn verify(&mut self, index: usize, bytes: &'b [u8]) -> (AddressHeaders, Option<&'b [u8]>) {
        let mut envelope = AddressHeaders::between(self.chunk.source.ip(), self.address);
        envelope.source_port = self.chunk.source.port();
        envelope.traffic_class = self.chunk.traffic_class;
        if index == self.identifications.len() {
            // The most likely: that of a run that was kept together.
            envelope.identification = index as u16;
            self.identifications.push(match self.check {
                IcrcCheck::Ignore => Some(index as u16),
                _ => Icrc::recover_identification(&envelope, bytes, self.identification_limit),
            });
        }
        let identification = self.identifications[index];
        envelope.identification = identification.unwrap_or(0);
        let transport = Icrc::split(bytes).ok().filter(|_| identification.is_some());
        (envelope, transport.map(|(transport, _)| transport))
    }
}

impl InOrderReceiver<'_, '_> {
    fn receive(mut self, envelope: &AddressHeaders, transport: &[u8]) {
        let Ok(bth) = Bth::parse(transport) else {
            return self.hca.receive(&mut self.ctx, envelope, transport);
        };
        let is_early = self.hca.is_out_of_sequence(&bth);
        if !is_early && self.reorder_buffer.is_empty() {
            return self.hca.receive(&mut self.ctx, envelope, transport);
        }
        let key = FlowKey::of(envelope.source, &bth);
        if !is_early && !self.reorder_buffer.contains(key) {
            return self.hca.receive(&mut self.ctx, envelope, transport);
        }
        let frame = EarlyFrame { bth, envelope: *envelope, transport: transport.to_vec(), is_early };
        self.reorder_buffer.insert(key, frame, self.now);
        self.release(key);
    }

    fn release(mut self, key: FlowKey) {
        while let Some((frame, in_order)) =
            self.reorder_buffer.pop_ready(key, self.now, |bth| self.hca.is_out_of_sequence(bth))
        {
            self.hca.count_reordered(in_order.into());
            self.hca.receive(&mut self.ctx, &frame.envelope, &frame.transport);
        }
    }
}

impl<M: Memory> Driver<M> {
    /// Takes one batch; more if a frame came before its turn, until those before it came or nothing is left.
    pub(super) fn receive(&mut self, now: Instant) -> io::Result<bool> {
        let mut moved = self.receive_batches(now)?;
        while !self.reorder_buffer.is_empty() {
            if let Some(plug) = &self.host_port {
                self.reorder_buffer
                    .restart_timeout(self.now().nanos(), |peer| plug.has_external_in_flight(peer));
            }
            if let Some(key) = self.reorder_buffer.expired_flow(self.now().nanos()) {
                self.release(now, key);
            } else if self.receive_batches(now)? {
                moved = true;
            } else {
                break;
            }
        }
        Ok(moved)
    }

    /// Takes one batch of each socket.
    fn receive_batches(&mut self, now: Instant) -> io::Result<bool> {
        let (mut received, mut drained) = (false, true);
        let Driver { hca, memory, links, sink, batch, sockets, multicast: memberships, .. } = self;
        let Driver {
            icrc_check: icrc,
            reorder_buffer: held,
            host_port: plug,
            identifications: identified,
            ..
        } = self;
        let ports = sockets.by_address().map(|port| (port.address(), &port.roce));
        for (address, socket) in ports.chain(memberships.sockets()) {
            socket.receive(batch)?;
            let granted = !address.is_multicast();
            received |= !batch.is_empty();
            drained &= !batch.is_full() || !granted;
            let plug = plug.as_ref();
            for chunk in batch.chunks() {
                receive_chunk(
                    now,
                    chunk,
                    address,
                    hca,
                    memory,
                    links,
                    held,
                    plug,
                    &mut **sink,
                    *icrc,
                    identified,
                );
            }
        }
        if drained {
            self.links.on_socket_empty(now.nanos());
        }
        Ok(received)
    }

    /// Takes the run in the buffer, which this card sent to itself.
    pub(super) fn receive_loopback(&mut self, now: Instant, run: &PacketBatch, check: IcrcCheck) {
        let Driver {
            hca,
            memory,
            links,
            reorder_buffer: held,
            host_port: plug,
            sink,
            identifications: identified,
            transmit_buffer: buffer,
            ..
        } = self;
        let AddressHeaders { source, source_port, destination, traffic_class, .. } = run.addressing;
        let source = SocketAddr::new(source, source_port);
        let chunk =
            Chunk { source, traffic_class, segment_size: run.segment_size, bytes: &buffer[..run.bytes] };
        let plug = plug.as_ref();
        receive_chunk(
            now,
            chunk,
            destination,
            hca,
            memory,
            links,
            held,
            plug,
            &mut **sink,
            check,
            identified,
        );
    }

    /// Hands frames of a flow to the card whose turn has come, or that waited for too long.
    fn release(&mut self, now: Instant, key: FlowKey) {
        let mut events = |now, event: &Event| emit_hca_event(&mut *self.sink, now, event);
        let wall_ns = self.started.elapsed().as_nanos() as u64;
        let ctx = Context { now, memory: &mut self.memory, events: &mut events };
        InOrderReceiver { hca: &mut self.hca, reorder_buffer: &mut self.reorder_buffer, ctx, now: wall_ns }
            .release(key);
    }

    /// Takes what the backbone has for this host. Says whether that is anything.
    pub(super) fn poll_host_network(&mut self, now: Instant) -> bool {
        let Some(glance) = self.host_port.as_ref().map(HostPort::poll) else { return false };
        let before = core::mem::replace(&mut self.network_pause_frames, glance.pause_frames);
        self.hca.count_pause_frames(glance.pause_frames - before);
        self.hca.set_paused_priorities(glance.paused);
        for ExternalPortUpdate { peer, queued_bytes: waiting, pause } in &glance.external_updates {
            self.links.limit_buffered(*peer, *waiting);
            if let Some(pause) = pause {
                let rate = self.host_port.as_ref().and_then(HostPort::line_rate).map_or(0, NonZeroU64::get);
                self.pause_peer(*peer, Pause::from_pfc(pause, rate));
            }
        }
        let Driver { hca, memory, links, reorder_buffer: held, sink, blocked_on_link: at_line, .. } = self;
        if glance.is_link_idle {
            let mut events = |now, event: &Event| emit_hca_event(&mut **sink, now, event);
            let mut ctx = Context { now, memory, events: &mut events };
            core::mem::take(at_line).into_iter().for_each(|destination| hca.unblock(&mut ctx, destination));
        }
        for (frame, origin) in &glance.frames {
            sink.on_event(now, &frame_event(Stage::Delivered, &frame.addressing, &frame.bytes));
            let mut events = |now, event: &Event| emit_hca_event(&mut **sink, now, event);
            let mut ctx = Context { now, memory, events: &mut events };
            match Icrc::split(&frame.bytes) {
                // What came from outside was checked when it came; its host may have mixed it up.
                Ok((transport, _)) if *origin == Origin::External => {
                    if links.transmits_in_order(frame.addressing.source) {
                        let taker = InOrderReceiver { hca, reorder_buffer: held, ctx, now: now.nanos() };
                        taker.receive(&frame.addressing, transport);
                    } else {
                        hca.receive(&mut ctx, &frame.addressing, transport);
                    }
                }
                Ok((transport, icrc)) if Icrc::compute(&frame.addressing, transport) == icrc => {
                    hca.receive(&mut ctx, &frame.addressing, transport);
                }
                Ok(_) => hca.drop_bad_icrc(&mut ctx),
                Err(_) => hca.receive(&mut ctx, &frame.addressing, &frame.bytes),
            }
        }
        !glance.frames.is_empty()
    }
}

/// Takes a chunk that came to `address`, which may be a multicast group: that is exempt from grants.
fn receive_chunk<M: Memory>(
    now: Instant,
    chunk: Chunk<'_>,
    address: IpAddr,
    hca: &mut Hca,
    memory: &mut M,
    links: &mut LinkControl,
    held: &mut ReorderBuffer,
    plug: Option<&HostPort>,
    sink: &mut dyn EventSink,
    check: IcrcCheck,
    found: &mut Vec<Option<u16>>,
) {
    let peer = chunk.source.ip();
    let mut granted = 0;
    if !address.is_multicast() {
        granted = links.record_received(peer, chunk.charge(), now.nanos());
    }
    // What a port like ours sends passes the switch of this host, if there is one; others could not be paused.
    let plug = plug.filter(|_| !address.is_multicast() && links.is_established(peer));
    let limit = match (check, links.state(peer)) {
        (IcrcCheck::Auto, Some(PeerState::Foreign) | None) if !links.is_internal(peer) => 65_536,
        _ => crate::MAX_RUN_SEGMENTS as u32,
    };
    let keeps_order = links.transmits_in_order(peer);
    found.clear();
    let mut identified =
        IcrcVerifier { chunk, address, check, identification_limit: limit, identifications: found };
    // Packets, from the present one on, whose payload is in its place already.
    let (mut placed, segments) = (0, chunk.segments());
    for (index, datagram) in chunk.datagrams().enumerate() {
        let (envelope, transport) = identified.verify(index, datagram.bytes);
        if let (Some(plug), Some(_)) = (plug, transport) {
            let frame = Frame::new(envelope, datagram.bytes.to_vec());
            if plug.inject_external(frame, links.grant_issuer().budget()).is_ok() {
                // Until it is in the network it takes room that was granted.
                links.add_buffered(peer, std::mem::take(&mut granted));
                continue;
            }
        }
        sink.on_event(now, &frame_event(Stage::Delivered, &envelope, datagram.bytes));
        let mut events = |now, event: &Event| emit_hca_event(sink, now, event);
        let mut ctx = Context { now, memory, events: &mut events };
        if placed == 0
            && plug.is_none()
            && ctx.memory.prefers_batches()
            && index + 1 < segments
            && held.is_empty()
        {
            let following = (index..).zip(chunk.skip_to(index).datagrams());
            let mut packets =
                following.map_while(|(index, datagram)| identified.verify(index, datagram.bytes).1);
            placed = hca.place_batch(&mut ctx, &envelope, &mut packets);
        }
        match transport {
            Some(transport) if placed > 0 => {
                placed -= 1;
                hca.receive_placed(&mut ctx, &envelope, transport);
            }
            Some(transport) if keeps_order => {
                let taker = InOrderReceiver { hca, reorder_buffer: held, ctx, now: now.nanos() };
                taker.receive(&envelope, transport);
            }
            Some(transport) => hca.receive(&mut ctx, &envelope, transport),
            None if Icrc::split(datagram.bytes).is_ok() => hca.drop_bad_icrc(&mut ctx),
            None => hca.receive(&mut ctx, &envelope, datagram.bytes),
        }
    }
}
