//! The real-time driver: one engine, its sockets, its links, one bounded turn at a time.
//!
//! Whoever calls [`Driver::turn`] drives; there is no thread here and no lock. A turn takes what has arrived,
//! hears doorbells and timers, and sends what may be sent. Nothing is sent without a grant of its receiver,
//! and receiving never waits for one.

use crate::faults::Faults;
use crate::hold::{FlowKey, Held, HoldBack};
use crate::{
    Batch, Cause, HostSockets, LinkChange, LinkEvent, Links, PeerState, ReceiveMemory, RoceSocket, SendError,
    UnreachablePort, budget, charge,
};
use softhca_engine::{Context, Event, Gate, Hca, Instant, Memory, Run, Settings};
use softhca_fabric::{Fault, Flow, Frame, Rule, Tally};
use softhca_wire::link::{Incarnation, Message};
use softhca_wire::{Bth, Envelope, Gid, Icrc, ROCE_PORT};
use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How many packets' worth of sending one turn may do, so that receiving gets its share.
const RUNS_PER_TURN: usize = 8;
/// How long link control may go unread, and its timers unheard, while a caller drives.
const LINK_PAUSE: u64 = 20_000;
/// How often the error queues are asked while nothing says that they have something.
const ERROR_PAUSE: u64 = 100_000_000;

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
    links: Links,
    witness: Box<dyn Witness>,
    started: std::time::Instant,
    icrc: IcrcCheck,
    batch: Batch,
    link_batch: Batch,
    buffer: Box<[u8]>,
    unsent: Option<Unsent>,
    /// Destinations that wait for a grant, and the least that lets somebody send there.
    waiting: BTreeMap<IpAddr, u64>,
    faults: Option<Faults>,
    held: HoldBack,
    link_read_at: u64,
    errors_read_at: u64,
    turned_at: Instant,
}

/// Asks the links before anything is sent.
struct Permission<'a> {
    socket: &'a RoceSocket,
    links: &'a mut Links,
    waiting: &'a mut BTreeMap<IpAddr, u64>,
    now: u64,
}

impl Gate for Permission<'_> {
    fn packets(&mut self, destination: IpAddr, size: usize) -> usize {
        if destination.is_multicast() {
            return usize::MAX;
        }
        let price = charge(size, 1);
        if !self.links.may_send(destination, price, self.now) {
            wait_for(self.waiting, destination, price);
            return 0;
        }
        self.socket.run_within(destination, size, self.links.allowance(destination, self.now))
    }
}

/// Takes note that `destination` is to be tried again when `price` is granted.
fn wait_for(waiting: &mut BTreeMap<IpAddr, u64>, destination: IpAddr, price: u64) {
    waiting.entry(destination).and_modify(|least| *least = price.min(*least)).or_insert(price);
}

/// Hands frames to the card in the order of their PSNs.
struct Taker<'a, 'c> {
    hca: &'a mut Hca,
    held: &'a mut HoldBack,
    ctx: Context<'c>,
    now: u64,
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
        let budget = budget(sockets.roce.receive_buffer());
        Driver {
            hca: Hca::new(options.settings, vec![Gid::from(sockets.address())]),
            memory,
            links: Links::new(incarnation, budget, 0),
            sockets,
            witness,
            started: std::time::Instant::now(),
            icrc: options.icrc,
            batch: Batch::new(),
            link_batch: Batch::new(),
            buffer: vec![0; crate::MAX_RUN_BYTES].into_boxed_slice(),
            unsent: None,
            waiting: BTreeMap::new(),
            faults: None,
            held: HoldBack::default(),
            link_read_at: 0,
            errors_read_at: 0,
            turned_at: Instant::from_nanos(0),
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

    /// Calls `act` with the card: a control verb.
    pub fn control<R>(&mut self, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R {
        let now = self.now();
        let mut events = Events(&mut *self.witness);
        act(&mut self.hca, &mut Context { now, memory: &mut self.memory, events: &mut events })
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

    /// The descriptors that become readable when something arrives.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.sockets.roce.as_fd(), self.sockets.link.as_fd()]
    }

    /// How long until [`Driver::turn`] has something to do although nothing arrives.
    pub fn next_timeout(&self) -> Option<Duration> {
        let now = self.now().nanos();
        if self.hca.is_ready() {
            return Some(Duration::ZERO);
        }
        if self.unsent.as_ref().is_some_and(|unsent| self.is_granted(&unsent.run, now)) {
            // The send buffer is full; on loopback it empties within microseconds.
            return Some(Duration::from_micros(20));
        }
        let faults = self.faults.as_ref().and_then(Faults::next_timeout);
        let card = self.hca.next_timeout().map(Instant::nanos);
        let held = self.held.next_timeout();
        let next = [card, self.links.next_timeout(), faults, held].into_iter().flatten().min()?;
        Some(Duration::from_nanos(next.saturating_sub(now)))
    }

    /// Whether some of a run may be sent.
    fn is_granted(&self, run: &Run, now: u64) -> bool {
        let destination = run.envelope.destination;
        let allowance = self.links.allowance(destination, now);
        destination.is_multicast() || self.sockets.roce.run_within(destination, run.segment, allowance) > 0
    }

    /// One bounded turn: a few runs are sent, and at most one batch is received. Says whether anything moved.
    ///
    /// What a turn receives is acknowledged by the next one: if it makes the application answer, the
    /// acknowledgement leaves in one send with the answer.
    pub fn turn(&mut self) -> io::Result<bool> {
        let now = self.now();
        self.turned_at = now;
        let mut events = Events(&mut *self.witness);
        let mut ctx = Context { now, memory: &mut self.memory, events: &mut events };
        self.hca.ring(&mut ctx);
        if self.hca.next_timeout().is_some_and(|at| at <= now) {
            self.hca.expire(&mut ctx);
        }
        let sent = self.send(now)?;
        let received = self.receive(now)?;
        self.control_links(now)?;
        // What was received earns its senders new grants, what was sent may need some.
        self.send_link_messages(now)?;
        Ok(sent || received)
    }

    /// Takes one batch; more if a frame came before its turn, until those before it came or nothing is left.
    fn receive(&mut self, now: Instant) -> io::Result<bool> {
        let mut moved = self.receive_batch(now)?;
        while !self.held.is_empty() {
            if let Some(key) = self.held.overdue(self.now().nanos()) {
                self.release(now, key);
            } else if self.receive_batch(now)? {
                moved = true;
            } else {
                break;
            }
        }
        Ok(moved)
    }

    fn receive_batch(&mut self, now: Instant) -> io::Result<bool> {
        self.sockets.roce.receive(&mut self.batch)?;
        if self.batch.is_empty() {
            self.links.socket_empty(now.nanos());
            return Ok(false);
        }
        let Driver { hca, memory, links, witness, batch, sockets, icrc, held, .. } = self;
        let address = sockets.address();
        for chunk in batch.chunks() {
            let peer = chunk.source.ip();
            links.received(peer, chunk.charge(), now.nanos());
            let limit = match (*icrc, links.state(peer)) {
                (IcrcCheck::Auto, Some(PeerState::Foreign) | None) => 65_536,
                _ => crate::MAX_RUN_SEGMENTS as u32,
            };
            let keeps_order = links.keeps_order(peer);
            for datagram in chunk.datagrams() {
                let mut envelope = Envelope::between(peer, address);
                envelope.source_port = datagram.source.port();
                envelope.traffic_class = datagram.traffic_class;
                let identification = match *icrc {
                    IcrcCheck::Ignore => Some(0),
                    _ => Icrc::identify(&envelope, datagram.bytes, limit),
                };
                envelope.identification = identification.unwrap_or(0);
                witness.frame(now, Passage::Received, &envelope, datagram.bytes);
                let mut events = Events(&mut **witness);
                let mut ctx = Context { now, memory, events: &mut events };
                match (Icrc::split(datagram.bytes), identification) {
                    (Ok((transport, _)), Some(_)) if keeps_order => {
                        let taker = Taker { hca, held, ctx, now: now.nanos() };
                        taker.take_in_order(&envelope, transport);
                    }
                    (Ok((transport, _)), Some(_)) => hca.receive(&mut ctx, &envelope, transport),
                    (Ok(_), None) => hca.note_bad_icrc(&mut ctx),
                    (Err(_), _) => hca.receive(&mut ctx, &envelope, datagram.bytes),
                }
            }
        }
        if !self.batch.is_full() {
            self.links.socket_empty(now.nanos());
        }
        Ok(true)
    }

    /// Hands frames of a flow to the card whose turn has come, or that waited for too long.
    fn release(&mut self, now: Instant, key: FlowKey) {
        let mut events = Events(&mut *self.witness);
        let wall_ns = self.started.elapsed().as_nanos() as u64;
        let ctx = Context { now, memory: &mut self.memory, events: &mut events };
        Taker { hca: &mut self.hca, held: &mut self.held, ctx, now: wall_ns }.release(key);
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
        loop {
            self.sockets.link.receive(&mut self.link_batch)?;
            for datagram in self.link_batch.datagrams() {
                if let Ok(message) = Message::parse(datagram.bytes) {
                    self.links.handle(datagram.source.ip(), &message, now_ns);
                }
            }
            if !self.link_batch.is_full() {
                break;
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
        for port in [UnreachablePort::Roce, UnreachablePort::Link] {
            let socket = match port {
                UnreachablePort::Roce => &self.sockets.roce,
                UnreachablePort::Link => &self.sockets.link,
            };
            for _ in 0..64 {
                let Some(error) = socket.take_error()? else { break };
                if let (Some(peer), Cause::PortUnreachable) = (error.peer, error.cause) {
                    self.links.unreachable(peer.ip(), port, now.nanos());
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
        let Driver { hca, memory, links, witness, waiting, unsent, held, .. } = self;
        while let Some(event) = links.poll_event() {
            witness.link(now, &event);
            let mut events = Events(&mut **witness);
            let mut ctx = Context { now, memory, events: &mut events };
            match event.change {
                LinkChange::Became(PeerState::Stalled) => hca.stall(event.peer),
                LinkChange::Became(PeerState::Dead) => {
                    held.forget(event.peer);
                    unsent.take_if(|unsent| unsent.run.envelope.destination == event.peer);
                    hca.resume(&mut ctx, event.peer);
                    hca.fail_link(&mut ctx, event.peer);
                }
                LinkChange::Became(_) | LinkChange::Restarted => hca.resume(&mut ctx, event.peer),
                LinkChange::Paused(_) => {}
            }
        }
        waiting.retain(|peer, price| {
            let granted = links.allowance(*peer, now.nanos()) >= *price;
            if granted {
                let mut events = Events(&mut **witness);
                let mut ctx = Context { now, memory, events: &mut events };
                hca.unpark(&mut ctx, *peer);
            }
            !granted
        });
    }

    fn send_link_messages(&mut self, now: Instant) -> io::Result<()> {
        while let Some((peer, message)) = self.links.transmit(now.nanos()) {
            let bytes = message.emit();
            match self.sockets.link.send_run(peer, 0, bytes.len(), &bytes) {
                // Every message is sent again until its purpose is reached: a lost one costs time only.
                Ok(_) | Err(SendError::WouldBlock | SendError::NoBuffers | SendError::TooLarge) => {}
                Err(SendError::SegmentationRefused) => {}
                Err(SendError::Other(error)) if is_of_one_peer(&error) => {}
                Err(SendError::Other(error)) => return Err(error),
            }
        }
        Ok(())
    }

    fn send(&mut self, now: Instant) -> io::Result<bool> {
        if !self.send_unsent(now)? {
            return Ok(false);
        }
        if self.faults.is_some() {
            return self.send_through_faults(now);
        }
        let mut moved = false;
        for _ in 0..RUNS_PER_TURN {
            let Driver { hca, memory, links, waiting, witness, buffer, sockets, .. } = self;
            let mut events = Events(&mut **witness);
            let mut ctx = Context { now, memory, events: &mut events };
            let mut gate = Permission { socket: &sockets.roce, links, waiting, now: now.nanos() };
            let most = crate::MAX_RUN_SEGMENTS;
            let Some(run) = hca.transmit(&mut ctx, &mut gate, buffer, most) else { break };
            moved = true;
            self.seal(now, &run, 0);
            self.unsent = Some(Unsent { run, done: 0 });
            if !self.send_unsent(now)? {
                break;
            }
        }
        Ok(moved)
    }

    /// Seals the packets of a run in the buffer, as the kernel will number them.
    fn seal(&mut self, now: Instant, run: &Run, from: usize) {
        let mut envelope = run.envelope;
        envelope.source_port = ROCE_PORT;
        for (index, packet) in self.buffer[from..run.bytes].chunks_mut(run.segment).enumerate() {
            envelope.identification = self.sockets.roce.identification(index);
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
            let mut bytes = &self.buffer[*done..run.bytes];
            if !destination.is_multicast() {
                // A run that waited, or that the path does not cut, may have lost its permission.
                let allowance = self.links.allowance(destination, now.nanos());
                let allowed = self.sockets.roce.run_within(destination, run.segment, allowance);
                if allowed == 0 {
                    self.links.may_send(destination, charge(run.segment, 1), now.nanos());
                    return Ok(false);
                }
                bytes = &bytes[..bytes.len().min(allowed * run.segment)];
            }
            match self.sockets.roce.send_run(destination, run.envelope.traffic_class, run.segment, bytes) {
                Ok(count) => {
                    if !destination.is_multicast() {
                        let price = self.sockets.roce.run_charge(destination, run.segment, count);
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
            let Driver { hca, memory, links, waiting, witness, buffer, sockets, .. } = self;
            let mut events = Events(&mut **witness);
            let mut ctx = Context { now, memory, events: &mut events };
            let mut gate = Permission { socket: &sockets.roce, links, waiting, now: now.nanos() };
            let Some(run) = hca.transmit(&mut ctx, &mut gate, buffer, 1) else { break };
            moved = true;
            self.seal(now, &run, 0);
            let mut envelope = run.envelope;
            (envelope.source_port, envelope.identification) = (ROCE_PORT, 0);
            let frame = Frame { envelope, bytes: self.buffer[..run.bytes].to_vec() };
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
            let price = charge(length, 1);
            let allowed = destination.is_multicast() || self.links.may_send(destination, price, now.nanos());
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
            };
            self.unsent = Some(Unsent { run, done: 0 });
            if !self.send_unsent(now)? {
                break;
            }
        }
        Ok(moved)
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
