//! The receiving half: batches of the sockets, frames of the backbone, in the order of their PSNs.

use super::{Driver, Events, IcrcCheck, Passage, Witness};
use crate::backbone::Plug;
use crate::hold::{FlowKey, Held, HoldBack};
use crate::{Chunk, Links, PeerState};
use softhca_engine::{Context, Hca, Instant, Memory, Run};
use softhca_fabric::{Frame, Origin, OutsideNews};
use softhca_wire::link::Pause;
use softhca_wire::{Bth, Envelope, Icrc};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU64;

/// Hands frames to the card in the order of their PSNs.
struct Taker<'a, 'c> {
    hca: &'a mut Hca,
    held: &'a mut HoldBack,
    ctx: Context<'c>,
    now: u64,
}

/// The identifications of the datagrams of a chunk, each found when it is first asked for; none if an ICRC is wrong.
struct Identified<'a, 'b> {
    chunk: Chunk<'b>,
    address: IpAddr,
    check: IcrcCheck,
    limit: u32,
    found: &'a mut Vec<Option<u16>>,
}

impl<'b> Identified<'_, 'b> {
    /// The envelope of a datagram, and the packet in it if its ICRC is right.
    fn packet(&mut self, index: usize, bytes: &'b [u8]) -> (Envelope, Option<&'b [u8]>) {
        let mut envelope = Envelope::between(self.chunk.source.ip(), self.address);
        envelope.source_port = self.chunk.source.port();
        envelope.traffic_class = self.chunk.traffic_class;
        if index == self.found.len() {
            // The most likely: that of a run that was kept together.
            envelope.identification = index as u16;
            self.found.push(match self.check {
                IcrcCheck::Ignore => Some(index as u16),
                _ => Icrc::identify(&envelope, bytes, self.limit),
            });
        }
        let identification = self.found[index];
        envelope.identification = identification.unwrap_or(0);
        let transport = Icrc::split(bytes).ok().filter(|_| identification.is_some());
        (envelope, transport.map(|(transport, _)| transport))
    }
}

impl Taker<'_, '_> {
    fn take_in_order(mut self, envelope: &Envelope, transport: &[u8]) {
        let Ok(bth) = Bth::parse(transport) else {
            return self.hca.receive(&mut self.ctx, envelope, transport);
        };
        let is_early = self.hca.skips(&bth);
        if !is_early && self.held.is_empty() {
            return self.hca.receive(&mut self.ctx, envelope, transport);
        }
        let key = FlowKey::of(envelope.source, &bth);
        if !is_early && !self.held.holds(key) {
            return self.hca.receive(&mut self.ctx, envelope, transport);
        }
        let frame = Held { bth, envelope: *envelope, transport: transport.to_vec(), is_early };
        self.held.hold(key, frame, self.now);
        self.release(key);
    }

    fn release(mut self, key: FlowKey) {
        while let Some((frame, in_order)) = self.held.next(key, self.now, |bth| self.hca.skips(bth)) {
            self.hca.note_host_reordered(in_order.into());
            self.hca.receive(&mut self.ctx, &frame.envelope, &frame.transport);
        }
    }
}

impl<M: Memory> Driver<M> {
    /// Takes one batch; more if a frame came before its turn, until those before it came or nothing is left.
    pub(super) fn receive(&mut self, now: Instant) -> io::Result<bool> {
        let mut moved = self.receive_batches(now)?;
        while !self.held.is_empty() {
            if let Some(plug) = &self.plug {
                self.held.postpone(self.now().nanos(), |peer| plug.carries(peer));
            }
            if let Some(key) = self.held.overdue(self.now().nanos()) {
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
        let Driver { hca, memory, links, witness, batch, sockets, memberships, .. } = self;
        let Driver { icrc, held, plug, identified, .. } = self;
        let ports = sockets.ports().map(|port| (port.address(), &port.roce));
        for (address, socket) in ports.chain(memberships.sockets()) {
            socket.receive(batch)?;
            let granted = !address.is_multicast();
            received |= !batch.is_empty();
            drained &= !batch.is_full() || !granted;
            let plug = plug.as_ref();
            for chunk in batch.chunks() {
                take(now, chunk, address, hca, memory, links, held, plug, &mut **witness, *icrc, identified);
            }
        }
        if drained {
            self.links.socket_empty(now.nanos());
        }
        Ok(received)
    }

    /// Takes the run in the buffer, which this card sent to itself.
    pub(super) fn receive_own(&mut self, now: Instant, run: &Run, check: IcrcCheck) {
        let Driver { hca, memory, links, held, plug, witness, identified, buffer, .. } = self;
        let Envelope { source, source_port, destination, traffic_class, .. } = run.envelope;
        let source = SocketAddr::new(source, source_port);
        let chunk = Chunk { source, traffic_class, segment_size: run.segment, bytes: &buffer[..run.bytes] };
        let plug = plug.as_ref();
        take(now, chunk, destination, hca, memory, links, held, plug, &mut **witness, check, identified);
    }

    /// Hands frames of a flow to the card whose turn has come, or that waited for too long.
    fn release(&mut self, now: Instant, key: FlowKey) {
        let mut events = Events(&mut *self.witness);
        let wall_ns = self.started.elapsed().as_nanos() as u64;
        let ctx = Context { now, memory: &mut self.memory, events: &mut events };
        Taker { hca: &mut self.hca, held: &mut self.held, ctx, now: wall_ns }.release(key);
    }

    /// Takes what the backbone has for this host. Says whether that is anything.
    pub(super) fn heed_backbone(&mut self, now: Instant) -> bool {
        let Some(glance) = self.plug.as_ref().map(Plug::look) else { return false };
        let before = core::mem::replace(&mut self.backbone_pause_frames, glance.pause_frames);
        self.hca.note_pause_frames(glance.pause_frames - before);
        self.hca.pause(glance.paused);
        for OutsideNews { peer, waiting, pause } in &glance.news {
            self.links.let_go(*peer, *waiting);
            if let Some(pause) = pause {
                let rate = self.plug.as_ref().and_then(Plug::line_rate).map_or(0, NonZeroU64::get);
                self.pause_peer(*peer, Pause::of(pause, rate));
            }
        }
        let Driver { hca, memory, links, held, witness, at_line, .. } = self;
        if glance.is_free {
            let mut events = Events(&mut **witness);
            let mut ctx = Context { now, memory, events: &mut events };
            core::mem::take(at_line).into_iter().for_each(|destination| hca.unpark(&mut ctx, destination));
        }
        for (frame, origin) in &glance.frames {
            witness.frame(now, Passage::Received, &frame.envelope, &frame.bytes);
            let mut events = Events(&mut **witness);
            let mut ctx = Context { now, memory, events: &mut events };
            match Icrc::split(&frame.bytes) {
                // What came from outside was checked when it came; its host may have mixed it up.
                Ok((transport, _)) if *origin == Origin::Outside => {
                    if links.keeps_order(frame.envelope.source) {
                        let taker = Taker { hca, held, ctx, now: now.nanos() };
                        taker.take_in_order(&frame.envelope, transport);
                    } else {
                        hca.receive(&mut ctx, &frame.envelope, transport);
                    }
                }
                Ok((transport, icrc)) if Icrc::compute(&frame.envelope, transport) == icrc => {
                    hca.receive(&mut ctx, &frame.envelope, transport);
                }
                Ok(_) => hca.note_bad_icrc(&mut ctx),
                Err(_) => hca.receive(&mut ctx, &frame.envelope, &frame.bytes),
            }
        }
        !glance.frames.is_empty()
    }
}

/// Takes a chunk that came to `address`, which may be a multicast group: that is exempt from grants.
fn take<M: Memory>(
    now: Instant,
    chunk: Chunk<'_>,
    address: IpAddr,
    hca: &mut Hca,
    memory: &mut M,
    links: &mut Links,
    held: &mut HoldBack,
    plug: Option<&Plug>,
    witness: &mut dyn Witness,
    check: IcrcCheck,
    found: &mut Vec<Option<u16>>,
) {
    let peer = chunk.source.ip();
    let mut granted = 0;
    if !address.is_multicast() {
        granted = links.received(peer, chunk.charge(), now.nanos());
    }
    // What a port like ours sends passes the switch of this host, if there is one; others could not be paused.
    let plug = plug.filter(|_| !address.is_multicast() && links.answers(peer));
    let limit = match (check, links.state(peer)) {
        (IcrcCheck::Auto, Some(PeerState::Foreign) | None) if !links.keeps(peer) => 65_536,
        _ => crate::MAX_RUN_SEGMENTS as u32,
    };
    let keeps_order = links.keeps_order(peer);
    found.clear();
    let mut identified = Identified { chunk, address, check, limit, found };
    // Packets, from the present one on, whose payload is in its place already.
    let (mut placed, segments) = (0, chunk.segments());
    for (index, datagram) in chunk.datagrams().enumerate() {
        let (envelope, transport) = identified.packet(index, datagram.bytes);
        if let (Some(plug), Some(_)) = (plug, transport) {
            let frame = Frame::new(envelope, datagram.bytes.to_vec());
            if plug.enter(frame, links.granter().budget()).is_ok() {
                // Until it is in the network it takes room that was granted.
                links.hold(peer, std::mem::take(&mut granted));
                continue;
            }
        }
        witness.frame(now, Passage::Received, &envelope, datagram.bytes);
        let mut events = Events(witness);
        let mut ctx = Context { now, memory, events: &mut events };
        if placed == 0 && plug.is_none() && ctx.memory.is_far() && index + 1 < segments && held.is_empty() {
            let following = (index..).zip(chunk.from(index).datagrams());
            let mut packets =
                following.map_while(|(index, datagram)| identified.packet(index, datagram.bytes).1);
            placed = hca.place_ahead(&mut ctx, &envelope, &mut packets);
        }
        match transport {
            Some(transport) if placed > 0 => {
                placed -= 1;
                hca.receive_placed(&mut ctx, &envelope, transport);
            }
            Some(transport) if keeps_order => {
                let taker = Taker { hca, held, ctx, now: now.nanos() };
                taker.take_in_order(&envelope, transport);
            }
            Some(transport) => hca.receive(&mut ctx, &envelope, transport),
            None if Icrc::split(datagram.bytes).is_ok() => hca.note_bad_icrc(&mut ctx),
            None => hca.receive(&mut ctx, &envelope, datagram.bytes),
        }
    }
}
