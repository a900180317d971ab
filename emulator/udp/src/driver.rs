//! The real-time driver: one engine, its sockets, its links, one bounded turn at a time.
//!
//! Whoever calls [`Driver::turn`] drives; there is no thread here and no lock. A turn hears doorbells and timers,
//! sends what may be sent, and takes what has arrived. Nothing is sent without a grant of its receiver, and
//! receiving never waits for one. What the host sends to itself may stay here: then a run is received as soon as it is
//! sealed, out of the buffer that it was built in, and nothing waits between the two halves.

mod receiving;
mod sending;

use crate::backbone::{Backbone, Plug};
use crate::entropy::FlowSockets;
use crate::faults::Faults;
use crate::hold::HoldBack;
use crate::multicast::Memberships;
use crate::pauses::PeerPauses;
use crate::system::Bells;
use crate::{
    Batch, Cause, Entropy, HostSockets, LinkChange, LinkEvent, Links, Loopback, PeerState, ReceiveMemory,
    SendError, UnreachablePort, budget,
};
use softhca_engine::{Context, Event, Hca, Instant, Memory, PortState, Run, Settings};
use softhca_fabric::{FabricEvent, Fault, Flow, LinkState, Rule, Tally};
use softhca_wire::link::{Incarnation, Message, Pause};
use softhca_wire::{Envelope, Gid, MacAddress, Pfc};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How many runs one turn may send, so that receiving gets its share: what a card sends to itself is received while it is
/// still in the processor's cache.
const RUNS_PER_TURN: usize = 4;
/// How long link control may go unread, and its timers unheard, while a caller drives.
const LINK_PAUSE: u64 = 20_000;
/// How often the error queues are asked while nothing says that they have something.
const ERROR_PAUSE: u64 = 100_000_000;
/// How far a queue pair whose rate is limited may catch up: about as late as a thread wakes up.
const PACING_SLACK: Duration = Duration::from_micros(100);

/// Which way a frame passed a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passage {
    /// Handed to the card's cable, before any fault.
    Sent,
    /// Taken from the network.
    Received,
}

/// Sees everything that a driver does. Every method does nothing unless it is written.
pub trait Witness: Send {
    /// The card told an event.
    fn card(&mut self, now: Instant, event: &Event) {
        let _ = (now, event);
    }

    /// What arrived together has been taken, or a control verb is done. What the card told until now may be passed on:
    /// whoever is woken then finds all of it.
    fn settled(&mut self) {}

    /// A packet, from the BTH to the ICRC, passed the port.
    fn frame(&mut self, now: Instant, passage: Passage, envelope: &Envelope, packet: &[u8]) {
        let _ = (now, passage, envelope, packet);
    }

    /// A rule did something to a frame.
    fn fault(&mut self, now: Instant, fault: &Fault) {
        let _ = (now, fault);
    }

    /// A link to another port changed.
    fn link(&mut self, now: Instant, event: &LinkEvent) {
        let _ = (now, event);
    }

    /// A peer's pause changed what may be sent to it. A driver has one host and one cable, whose numbers are zero.
    fn fabric(&mut self, now: Instant, event: &FabricEvent) {
        let _ = (now, event);
    }

    /// A priority pause frame passed the port, over a link.
    fn pause(&mut self, now: Instant, passage: Passage, pause: &Pfc) {
        let _ = (now, passage, pause);
    }
}

impl Witness for () {}

/// How the invariant CRC of arriving packets is checked.
///
/// A socket does not tell the IPv4 identification that the CRC covers. Ports like ours use 0 to 63, which
/// costs six of its thirty-two bits; a port of another make may use any, which costs sixteen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IcrcCheck {
    /// Identifications 0 to 63 only.
    Strict,
    /// Strict towards ports that speak link control, any identification towards others.
    #[default]
    Auto,
    /// Not at all.
    Ignore,
}

/// What is set once per driver.
#[derive(Clone, Copy, Debug, Default)]
pub struct DriverOptions {
    /// The settings of the card.
    pub settings: Settings,
    /// How the invariant CRC is checked.
    pub icrc: IcrcCheck,
    /// Which source port packets have.
    pub entropy: Entropy,
    /// Where goes what the host sends to itself.
    pub loopback: Loopback,
}

/// A run that the kernel did not take yet: sealed, and waiting in the buffer.
struct Unsent {
    run: Run,
    /// Bytes of it that are gone already.
    done: usize,
}

/// One host in real time.
pub struct Driver<M> {
    hca: Hca,
    memory: M,
    sockets: HostSockets,
    memberships: Memberships,
    /// Opened as flows need them, if they may.
    flow_sockets: Option<FlowSockets>,
    /// What wakes the driver's thread besides the two sockets of the first address.
    bells: Option<Arc<Bells>>,
    links: Links,
    witness: Box<dyn Witness>,
    started: std::time::Instant,
    icrc: IcrcCheck,
    batch: Batch,
    link_batch: Batch,
    /// The identifications of the chunk at hand.
    identified: Vec<Option<u16>>,
    buffer: Box<[u8]>,
    unsent: Option<Unsent>,
    /// Destinations that wait for a grant, and the least that lets somebody send there.
    waiting: BTreeMap<IpAddr, u64>,
    faults: Option<Faults>,
    held: HoldBack,
    pauses: PeerPauses,
    /// Destinations that wait for a pause to end.
    at_pause: BTreeSet<IpAddr>,
    plug: Option<Plug>,
    /// The pause frames that the backbone brought so far.
    backbone_pause_frames: u64,
    /// Destinations that wait for the line to the backbone.
    at_line: BTreeSet<IpAddr>,
    link_read_at: u64,
    errors_read_at: u64,
    turned_at: Instant,
    /// Something was sent between turns: the next one asks for the grants that it needs.
    owes_turn: bool,
}

struct Events<'a>(&'a mut dyn Witness);

impl softhca_engine::Subscriber for Events<'_> {
    #[inline]
    fn event(&mut self, now: Instant, event: &Event) {
        self.0.card(now, event);
    }
}

impl<M: Memory> Driver<M> {
    /// Drives a new card on these sockets.
    pub fn new(
        sockets: HostSockets,
        options: DriverOptions,
        memory: M,
        witness: Box<dyn Witness>,
    ) -> Driver<M> {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::from_secs(1));
        let incarnation = Incarnation::new(wall.as_nanos() as u64);
        // Whatever was granted fits into either socket, if there are two.
        let buffer = sockets.ports().map(|port| port.roce.receive_buffer()).min().unwrap_or(0);
        let budget = budget(buffer);
        let mut settings = options.settings;
        settings.mtu = settings.mtu.min(sockets.active_mtu());
        if let Some(control) = &mut settings.congestion.control {
            control.slack = control.slack.max(PACING_SLACK);
        }
        let mut links = Links::new(incarnation, budget, 0);
        if options.loopback == Loopback::Card {
            links.keep(sockets.ports().map(HostSockets::address));
        }
        Driver {
            hca: Hca::new(settings, sockets.gids()),
            memory,
            links,
            sockets,
            memberships: Memberships::default(),
            flow_sockets: (options.entropy == Entropy::On).then(FlowSockets::default),
            bells: None,
            witness,
            started: std::time::Instant::now(),
            icrc: options.icrc,
            batch: Batch::new(),
            link_batch: Batch::new(),
            identified: Vec::new(),
            buffer: vec![0; crate::MAX_RUN_BYTES].into_boxed_slice(),
            unsent: None,
            waiting: BTreeMap::new(),
            faults: None,
            held: HoldBack::default(),
            pauses: PeerPauses::default(),
            at_pause: BTreeSet::new(),
            plug: None,
            backbone_pause_frames: 0,
            at_line: BTreeSet::new(),
            link_read_at: 0,
            errors_read_at: 0,
            turned_at: Instant::from_nanos(0),
            owes_turn: false,
        }
    }

    /// The host's address.
    pub fn address(&self) -> IpAddr {
        self.sockets.address()
    }

    /// When the card's time began.
    pub(crate) fn started(&self) -> std::time::Instant {
        self.started
    }

    /// The card's time.
    pub fn now(&self) -> Instant {
        Instant::from_nanos(self.started.elapsed().as_nanos() as u64)
    }

    /// When the last turn began, in the card's time.
    pub fn turned_at(&self) -> Instant {
        self.turned_at
    }

    /// The card.
    pub fn card(&self) -> &Hca {
        &self.hca
    }

    /// The links to other ports.
    pub fn links(&self) -> &Links {
        &self.links
    }

    /// The host's sockets.
    pub fn sockets(&self) -> &HostSockets {
        &self.sockets
    }

    /// How full the receive buffers are and what they dropped: first that of RoCE, then that of link control.
    pub fn receive_memory(&self) -> io::Result<[ReceiveMemory; 2]> {
        Ok([self.sockets.roce.receive_memory()?, self.sockets.link.receive_memory()?])
    }

    /// The memory behind regions.
    pub fn memory(&mut self) -> &mut M {
        &mut self.memory
    }

    /// Calls `act` with the card: a control verb. What was received before it is acknowledged before it, if that may be sent;
    /// what it has the card say leaves at once.
    pub fn control<R>(&mut self, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R {
        let now = self.now();
        self.send_between_turns(now);
        let mut events = Events(&mut *self.witness);
        let result = act(&mut self.hca, &mut Context { now, memory: &mut self.memory, events: &mut events });
        if !self.memberships.are(self.hca.multicast_groups().map(Gid::ip)) {
            let wanted = self.hca.multicast_groups().map(Gid::ip).collect();
            self.memberships.follow(&wanted, &self.sockets, self.bells.as_deref());
        }
        self.send_between_turns(now);
        self.witness.settled();
        result
    }

    /// Sends what is ready, and asks for the grants that it needs.
    fn send_between_turns(&mut self, now: Instant) {
        let mut has_sent = false;
        for _ in 0..RUNS_PER_TURN {
            // A socket that fails does so again in the next turn, which tells.
            if !self.hca.is_ready() || !self.send(now).unwrap_or(false) {
                break;
            }
            has_sent = true;
        }
        if has_sent {
            self.owes_turn |= self.send_link_messages(now).is_err();
        }
    }

    /// Why the network does not bring what is sent to a group with members here, if so.
    pub fn multicast_failure(&self, group: Gid) -> Option<io::Error> {
        let failure = self.memberships.failure(group.ip())?;
        Some(io::Error::new(failure.kind(), failure.to_string()))
    }

    /// Lets `bells` ring when something arrives that is not at [`Driver::descriptors`].
    pub(crate) fn ring_with(&mut self, bells: Arc<Bells>) -> io::Result<()> {
        for port in self.sockets.ports().skip(1) {
            bells.add(port.roce.as_fd())?;
            bells.add(port.link.as_fd())?;
        }
        self.memberships.listen(&bells)?;
        self.bells = Some(bells);
        Ok(())
    }

    /// Puts a fault rule on the cable before the socket. Frames go one by one from now on.
    pub fn add_rule(&mut self, seed: u64, rule: Rule) {
        let faults = self.faults.get_or_insert_with(|| Faults::new(seed));
        faults.add_rule(rule);
        if faults.cable.reorders() {
            self.links.change_order();
        }
    }

    /// Lets rules know a queue pair by its role.
    pub fn add_flow(&mut self, seed: u64, flow: Flow) {
        self.faults.get_or_insert_with(|| Faults::new(seed)).flows.insert(flow);
    }

    /// The rules on the cable, and how often each fired.
    pub fn rules(&self) -> impl Iterator<Item = (&Rule, Tally)> {
        self.faults.iter().flat_map(|faults| faults.cable.rules())
    }

    /// Takes all rules and flows away. What they hold back still goes its way, one frame at a time.
    pub fn clear_rules(&mut self) {
        if let Some(faults) = &mut self.faults {
            faults.clear();
        }
    }

    /// Takes the port down, or brings it up: what the card sends or gets meanwhile is lost, and its users are told.
    pub fn set_port(&mut self, state: PortState) {
        let link = match state {
            PortState::Down => LinkState::Down,
            PortState::Active => LinkState::Up,
        };
        self.faults.get_or_insert_with(|| Faults::new(0)).set_link(link);
        self.control(|hca, ctx| hca.set_port(ctx, state));
    }

    /// Puts a network between this host and the others that are plugged in: frames to them pass its switches and
    /// no socket. What comes from other machines that speak link control passes the switch of this host. False if the
    /// network has no place for this host. Datagrams for groups stay on sockets.
    pub fn plug_in(&mut self, backbone: Arc<Backbone>) -> bool {
        let rate = backbone.line_rate();
        self.plug = Plug::new(backbone, self.address());
        if let (Some(_), Some(rate)) = (&self.plug, rate) {
            self.hca.set_line_rate(rate.get());
        }
        self.plug.is_some()
    }

    /// Sends a priority flow control frame to a peer: its port stops these priorities towards this host, or lets them go
    /// on. It goes over the link once, and may be lost.
    pub fn pause_peer(&mut self, peer: IpAddr, pause: Pause) {
        let now = self.now();
        self.witness.pause(now, Passage::Sent, &pause.frame(MacAddress::of(self.sockets.address())));
        self.links.pause(peer, pause, now.nanos());
        self.heed_links(now);
    }

    /// The priorities that a peer paused: nothing of them goes to it now.
    pub fn paused_by(&self, peer: IpAddr) -> u8 {
        self.pauses.mask(peer)
    }

    /// Lets queue pairs try again that waited for a pause of these peers to end.
    fn end_pauses(&mut self, now: Instant, peers: Vec<IpAddr>) {
        let Driver { hca, memory, witness, at_pause, .. } = self;
        for peer in peers.into_iter().filter(|peer| at_pause.remove(peer)) {
            let mut events = Events(&mut **witness);
            hca.unpark(&mut Context { now, memory, events: &mut events }, peer);
        }
    }

    /// The descriptors that become readable when something arrives for the first address.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.sockets.roce.as_fd(), self.sockets.link.as_fd()]
    }

    /// Whether there is something that may be sent now.
    pub fn has_more(&self) -> bool {
        self.hca.is_ready() || self.unsent.is_some()
    }

    /// How long until [`Driver::turn`] has something to do although nothing arrives.
    pub fn next_timeout(&self) -> Option<Duration> {
        let now = self.now().nanos();
        if self.hca.is_ready() || self.owes_turn {
            return Some(Duration::ZERO);
        }
        if self.unsent.as_ref().is_some_and(|unsent| self.is_granted(&unsent.run, now)) {
            // The send buffer is full; on loopback it empties within microseconds.
            return Some(Duration::from_micros(20));
        }
        let waits = |peer| self.waiting.contains_key(&peer);
        let faults = self.faults.as_ref().and_then(|faults| faults.next_timeout(waits));
        let card = self.hca.next_timeout().map(Instant::nanos);
        let held = self.held.next_timeout();
        let pauses = self.pauses.next_timeout();
        let plug = self.plug.as_ref();
        let arrival = plug.and_then(Plug::next_in).map(|wait| now + wait);
        let line = plug.filter(|_| !self.at_line.is_empty()).map(|plug| now + plug.free_in());
        let due = [card, self.links.next_timeout(), faults, held, pauses, arrival, line];
        let next = due.into_iter().flatten().min()?;
        Some(Duration::from_nanos(next.saturating_sub(now)))
    }

    /// Whether some of a run may be sent.
    fn is_granted(&self, run: &Run, now: u64) -> bool {
        let destination = run.envelope.destination;
        let allowance = self.links.allowance(destination, now);
        destination.is_multicast()
            || self.sockets.towards(destination).roce.run_within(destination, run.segment, allowance) > 0
    }

    /// One bounded turn: a few runs are sent, or received by the card itself, and at most one batch is received. Says
    /// whether anything moved.
    ///
    /// What a turn receives is acknowledged by the next one: if it makes the application answer, the
    /// acknowledgement leaves in one send with the answer, or behind it, as [`Settings::answers`] says.
    pub fn turn(&mut self) -> io::Result<bool> {
        let now = self.now();
        self.turned_at = now;
        self.owes_turn = false;
        if self.pauses.next_timeout().is_some_and(|at| at <= now.nanos()) {
            let Driver { pauses, witness, .. } = self;
            let resumed = pauses.expire(now.nanos(), |event| witness.fabric(now, &event));
            self.end_pauses(now, resumed);
        }
        let carried = self.heed_backbone(now);
        let mut events = Events(&mut *self.witness);
        let mut ctx = Context { now, memory: &mut self.memory, events: &mut events };
        self.hca.ring(&mut ctx);
        if self.hca.next_timeout().is_some_and(|at| at <= now) {
            self.hca.expire(&mut ctx);
        }
        let sent = self.send(now)?;
        let received = self.receive(now)?;
        self.witness.settled();
        self.control_links(now)?;
        // What was received earns its senders new grants, what was sent may need some.
        self.send_link_messages(now)?;
        self.witness.settled();
        Ok(sent || received || carried)
    }

    /// Reads link control now and then, at once if somebody waits for a grant.
    fn control_links(&mut self, now: Instant) -> io::Result<()> {
        let now_ns = now.nanos();
        if now_ns >= self.errors_read_at + ERROR_PAUSE {
            self.errors_read_at = now_ns;
            self.read_errors(now)?;
        }
        if now_ns < self.link_read_at + LINK_PAUSE && self.waiting.is_empty() {
            return Ok(());
        }
        self.link_read_at = now_ns;
        for port in self.sockets.ports() {
            loop {
                port.link.receive(&mut self.link_batch)?;
                for datagram in self.link_batch.datagrams() {
                    if let Ok(message) = Message::parse(datagram.bytes) {
                        self.links.handle(datagram.source.ip(), &message, now_ns);
                    }
                }
                if !self.link_batch.is_full() {
                    break;
                }
            }
        }
        if self.links.next_timeout().is_some_and(|at| at <= now_ns) {
            self.links.expire(now_ns);
        }
        self.heed_links(now);
        Ok(())
    }

    /// Reads what the network said about earlier datagrams.
    fn read_errors(&mut self, now: Instant) -> io::Result<()> {
        let Driver { sockets, flow_sockets, links, .. } = self;
        let both = sockets
            .ports()
            .flat_map(|port| [(UnreachablePort::Roce, &port.roce), (UnreachablePort::Link, &port.link)]);
        let flows = flow_sockets.iter().flat_map(FlowSockets::iter);
        let flows = flows.map(|socket| (UnreachablePort::Roce, socket));
        for (port, socket) in both.chain(flows) {
            for _ in 0..64 {
                let Some(error) = socket.take_error()? else { break };
                if let (Some(peer), Cause::PortUnreachable) = (error.peer, error.cause) {
                    links.unreachable(peer.ip(), port, now.nanos());
                }
            }
        }
        Ok(())
    }

    /// The network has something to say: reads it at the next turn.
    pub fn note_socket_error(&mut self) {
        self.errors_read_at = 0;
    }

    /// Acts on what changed on the links.
    fn heed_links(&mut self, now: Instant) {
        let mut resumed = Vec::new();
        let Driver { hca, memory, links, witness, waiting, unsent, held, pauses, plug, .. } = self;
        while let Some(event) = links.poll_event() {
            witness.link(now, &event);
            let mut events = Events(&mut **witness);
            let mut ctx = Context { now, memory, events: &mut events };
            match event.change {
                LinkChange::Became(PeerState::Stalled) => hca.stall(event.peer),
                LinkChange::Became(PeerState::Dead) => {
                    held.forget(event.peer);
                    unsent.take_if(|unsent| unsent.run.envelope.destination == event.peer);
                    if pauses.forget(event.peer) {
                        resumed.push(event.peer);
                    }
                    if let Some(plug) = plug {
                        plug.forget(event.peer);
                    }
                    hca.resume(&mut ctx, event.peer);
                    hca.fail_link(&mut ctx, event.peer);
                    // What has no connection to lose asks again.
                    if waiting.remove(&event.peer).is_some() {
                        hca.unpark(&mut ctx, event.peer);
                    }
                }
                LinkChange::Restarted => {
                    hca.forget_last_words(event.peer);
                    hca.resume(&mut ctx, event.peer);
                }
                LinkChange::Became(_) => hca.resume(&mut ctx, event.peer),
                LinkChange::Paused(pause) => {
                    hca.note_pause_frames(1);
                    witness.pause(now, Passage::Received, &pause.frame(MacAddress::of(event.peer)));
                    let tell = |event| witness.fabric(now, &event);
                    if pauses.apply(event.peer, &pause, now.nanos(), tell) {
                        resumed.push(event.peer);
                    }
                }
            }
        }
        // Whoever waits keeps asking: a grant that could not be used at once, because the peer had not answered a
        // heartbeat lately, was given back.
        waiting.retain(|peer, price| {
            let granted = links.may_send(*peer, *price, now.nanos());
            if granted {
                let mut events = Events(&mut **witness);
                let mut ctx = Context { now, memory, events: &mut events };
                hca.unpark(&mut ctx, *peer);
            }
            !granted
        });
        self.end_pauses(now, resumed);
    }

    fn send_link_messages(&mut self, now: Instant) -> io::Result<()> {
        while let Some((peer, message)) = self.links.transmit(now.nanos()) {
            let bytes = message.emit();
            match self.sockets.towards_mut(peer).link.send_run(peer, 0, bytes.len(), &bytes) {
                // Every message is sent again until its purpose is reached: a lost one costs time only.
                Ok(_) | Err(SendError::WouldBlock | SendError::NoBuffers | SendError::TooLarge) => {}
                Err(SendError::SegmentationRefused) => {}
                Err(SendError::Other(error)) if is_of_one_peer(&error) => {}
                Err(SendError::Other(error)) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Whether an error speaks of one destination only: others may still be reached.
fn is_of_one_peer(error: &io::Error) -> bool {
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
