//! The connection manager of a card (IBA volume 1, chapter 12), with the addressing of the RDMA CM.
//!
//! It speaks through QP1, which every port has: messages come from [`Hca::receive`](crate::Hca::receive), leave
//! through [`Hca::transmit`](crate::Hca::transmit), and its deadlines stand in the card's timers. It changes no
//! queue pair: applications do, with the attributes that it tells them. What applications hear waits in
//! channels until they take it.

mod address;
mod call;
mod channel;
mod connect;
mod datagram;
mod identifier;
mod lifetime;
mod outbox;
mod ports;
mod receive;
mod release;

use crate::card::Card;
use crate::{ClientId, CmChannelId, CmId, Context, Event, Instant};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use core::fmt;
use core::net::IpAddr;
use core::time::Duration;
use identifier::{Identifier, Sent, Unanswered};
use outbox::Outbox;
use ports::Ports;
use softhca_queue::cm::{self as words, CmState, Detail, EventKind};
use softhca_wire::cm::{CommunicationId, Message};
use softhca_wire::{Gid, Qpn};

/// Identifiers of a card.
const MOST_IDENTIFIERS: usize = 65_536;
/// Identifiers of one application.
const MOST_OF_CLIENT: usize = 32_768;
/// Channels of one application.
const MOST_CHANNELS: usize = 4_096;
/// Connections of gone identifiers that are remembered; the oldest are forgotten first.
const MOST_GHOSTS: usize = 65_536;
/// The exponent of the time that an acknowledgement may take, if the application does not say.
const ACK_TIMEOUT: u8 = 19;
/// How long a card may take to acknowledge, as an exponent.
const TARGET_ACK_DELAY: u8 = 15;
/// The exponent of the longest time that an MRA is granted.
const MOST_PATIENCE: u8 = 24;

const ETIMEDOUT: i32 = 110;
const EHOSTUNREACH: i32 = 113;

/// A kind of message, for events: one of [`Message`]'s names.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CmKind(&'static str);

impl CmKind {
    pub(crate) fn of(message: &Message) -> CmKind {
        CmKind(message.name())
    }

    /// The name that the specification gives it.
    pub const fn name(self) -> &'static str {
        self.0
    }
}

impl fmt::Debug for CmKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// Why a message of the connection manager was not acted on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the sentences of `Display` say what each means")]
pub enum CmIgnored {
    NoSuchConnection,
    OutOfPlace(CmState),
    BacklogFull { limit: u32 },
    TooManyIdentifiers,
    Duplicate,
    NotOurs,
    OutboxFull,
}

impl fmt::Display for CmIgnored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CmIgnored::NoSuchConnection => f.write_str("there is no such connection"),
            CmIgnored::OutOfPlace(state) => write!(f, "the connection is in state {state}"),
            CmIgnored::BacklogFull { limit } => {
                write!(f, "{limit} requests wait already: the backlog of the listener is full")
            }
            CmIgnored::TooManyIdentifiers => f.write_str("the card has no identifier left"),
            CmIgnored::Duplicate => f.write_str("a duplicate"),
            CmIgnored::NotOurs => f.write_str("it comes from another host than the connection's"),
            CmIgnored::OutboxFull => f.write_str("too many messages wait to be sent"),
        }
    }
}

/// Why a connection was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CmFailure {
    /// No answer came, in every try.
    TimedOut,
    /// The peer's port is gone.
    LinkDead,
}

struct Channel {
    client: ClientId,
    events: VecDeque<words::Event>,
    users: usize,
}

/// A connection whose identifier is gone, until no message about it can be on its way.
struct Ghost {
    peer: IpAddr,
    remote: CommunicationId,
}

/// The connection manager.
pub(crate) struct Manager {
    seed: u64,
    channels: BTreeMap<CmChannelId, Channel>,
    identifiers: BTreeMap<CmId, Identifier>,
    next_channel: u32,
    next_identifier: u32,
    ports: Ports,
    /// Identifiers by the name that they have on the wire.
    by_name: BTreeMap<CommunicationId, CmId>,
    /// Identifiers by what the peer calls the connection.
    by_peer: BTreeMap<(IpAddr, CommunicationId), CmId>,
    /// Identifiers by the queue pair at the other side.
    by_peer_queue_pair: BTreeMap<(IpAddr, Qpn), CmId>,
    ghosts: BTreeMap<CommunicationId, Ghost>,
    ghost_deadlines: BTreeSet<(Instant, CommunicationId)>,
    deadlines: BTreeSet<(Instant, CmId)>,
    /// The earliest entry of the card's timers that is for the connection manager.
    timer_at: Option<Instant>,
    pub outbox: Outbox,
}

impl Manager {
    /// The ports at which somebody takes requests.
    pub fn listening_ports(&self) -> impl Iterator<Item = u16> {
        self.ports.listening()
    }

    pub fn new(seed: u64) -> Manager {
        Manager {
            seed: seed ^ 0x636d_5f69_6473_2121,
            channels: BTreeMap::new(),
            identifiers: BTreeMap::new(),
            next_channel: 1,
            next_identifier: 1,
            ports: Ports::default(),
            by_name: BTreeMap::new(),
            by_peer: BTreeMap::new(),
            by_peer_queue_pair: BTreeMap::new(),
            ghosts: BTreeMap::new(),
            ghost_deadlines: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            timer_at: None,
            outbox: Outbox::default(),
        }
    }

    /// The next number that the seed decides.
    fn draw(&mut self) -> u64 {
        let mut z = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.seed = z;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A name for a connection that no other has, and none had lately.
    fn draw_name(&mut self) -> CommunicationId {
        loop {
            let name = CommunicationId(self.draw() as u32);
            if name.0 != 0 && !self.by_name.contains_key(&name) && !self.ghosts.contains_key(&name) {
                return name;
            }
        }
    }

    /// How many identifiers and channels there are, and how many ended connections are remembered.
    pub fn census(&self) -> [usize; 3] {
        [self.identifiers.len(), self.channels.len(), self.ghosts.len()]
    }

    /// Puts an event into the channel of its identifier.
    fn raise(&mut self, ctx: &mut Context<'_>, event: words::Event) {
        let Some(identifier) = self.identifiers.get(&event.id) else { return };
        let (client, number) = (identifier.client, identifier.channel);
        let Some(channel) = self.channels.get_mut(&number) else { return };
        let (id, kind, status) = (event.id, event.kind, event.status);
        channel.events.push_back(event);
        ctx.tell(Event::CmRaised { client, channel: number, id, kind, status });
    }

    fn raise_plain(&mut self, ctx: &mut Context<'_>, id: CmId, kind: EventKind, status: i32) {
        let private_data = alloc::vec::Vec::new();
        self.raise(
            ctx,
            words::Event { id, listener: None, kind, status, private_data, detail: Detail::None },
        );
    }

    /// Changes an identifier's state.
    fn enter(&mut self, ctx: &mut Context<'_>, id: CmId, to: CmState) {
        let Some(identifier) = self.identifiers.get_mut(&id) else { return };
        let from = core::mem::replace(&mut identifier.state, to);
        if from != to {
            ctx.tell(Event::CmStateChanged { id, from, to });
        }
    }

    /// Sets the deadline of an identifier, or takes it away.
    fn arm(&mut self, card: &mut Card, id: CmId, at: Option<Instant>) {
        let Some(identifier) = self.identifiers.get_mut(&id) else { return };
        if let Some(old) = identifier.deadline.take() {
            self.deadlines.remove(&(old, id));
        }
        identifier.deadline = at;
        if let Some(at) = at {
            self.deadlines.insert((at, id));
        }
        self.schedule(card);
    }

    /// Makes sure that the card's timers wake the connection manager for its earliest deadline.
    fn schedule(&mut self, card: &mut Card) {
        let earliest =
            [self.deadlines.first().map(|(at, _)| *at), self.ghost_deadlines.first().map(|(at, _)| *at)];
        let Some(wanted) = earliest.into_iter().flatten().min() else { return };
        if self.timer_at.is_none_or(|at| wanted < at) {
            self.timer_at = Some(wanted);
            card.timers.push(wanted, Qpn::GSI);
        }
    }

    /// Does what was due, if the timer at `at` is the one that counts.
    pub fn expire(&mut self, card: &mut Card, ctx: &mut Context<'_>, at: Instant) {
        if self.timer_at != Some(at) {
            return;
        }
        self.timer_at = None;
        while let Some((at, id)) = self.deadlines.first().copied().filter(|(at, _)| *at <= ctx.now) {
            self.deadlines.remove(&(at, id));
            if let Some(identifier) = self.identifiers.get_mut(&id) {
                identifier.deadline = None;
                self.overdue(card, ctx, id);
            }
        }
        while let Some((at, name)) = self.ghost_deadlines.first().copied().filter(|(at, _)| *at <= ctx.now) {
            self.ghost_deadlines.remove(&(at, name));
            self.ghosts.remove(&name);
        }
        self.schedule(card);
    }

    /// The deadline of an identifier passed: its message goes out again, or its wait is over.
    fn overdue(&mut self, card: &mut Card, ctx: &mut Context<'_>, id: CmId) {
        let Some(identifier) = self.identifiers.get_mut(&id) else { return };
        if identifier.state == CmState::TimeWait {
            self.enter(ctx, id, CmState::Closed);
            self.forget_connection(id);
            return self.raise_plain(ctx, id, EventKind::TimewaitExit, 0);
        }
        let peer = identifier.peer_address();
        let Some(unanswered) = &mut identifier.unanswered else { return };
        // A port that does not answer now is no reason to give up: its time stands still.
        let stalled = card.stalled.contains(&peer);
        if unanswered.retries_left == 0 && !stalled {
            return self.give_up(card, ctx, id, CmFailure::TimedOut);
        }
        if !stalled {
            unanswered.retries_left -= 1;
            let Sent { envelope, datagram } = *unanswered.message;
            self.outbox.push(card, ctx, Some(id), envelope, datagram, true);
        }
        let at = ctx.now.plus(card.settings.cm.answer());
        self.arm(card, id, Some(at));
    }

    /// No answer will come any more.
    fn give_up(&mut self, card: &mut Card, ctx: &mut Context<'_>, id: CmId, failure: CmFailure) {
        let Some(identifier) = self.identifiers.get_mut(&id) else { return };
        let state = identifier.state;
        identifier.unanswered = None;
        self.arm(card, id, None);
        ctx.tell(Event::CmGaveUp { id, failure });
        let status = match failure {
            CmFailure::TimedOut => -ETIMEDOUT,
            CmFailure::LinkDead => -EHOSTUNREACH,
        };
        match state {
            CmState::DisconnectSent => {
                self.enter_time_wait(card, ctx, id);
                self.raise_plain(ctx, id, EventKind::Disconnected, status);
            }
            CmState::RequestSent | CmState::ReplySent | CmState::ServiceRequestSent => {
                if state != CmState::ServiceRequestSent && failure == CmFailure::TimedOut {
                    self.send_reject(card, ctx, id, softhca_wire::cm::RejectReason::TIMEOUT, &[]);
                }
                self.enter(ctx, id, CmState::Closed);
                self.forget_connection(id);
                self.raise_plain(ctx, id, EventKind::Unreachable, status);
            }
            _ => {}
        }
    }

    /// The port at `peer` is gone: nothing that waits for it will be answered.
    pub fn fail_link(&mut self, card: &mut Card, ctx: &mut Context<'_>, peer: IpAddr) {
        let waiting = |(_, identifier): &(&CmId, &Identifier)| {
            identifier.unanswered.is_some() && identifier.peer_address() == peer
        };
        let affected: alloc::vec::Vec<CmId> =
            self.identifiers.iter().filter(waiting).map(|(id, _)| *id).collect();
        self.outbox.forget(peer);
        for id in affected {
            self.give_up(card, ctx, id, CmFailure::LinkDead);
        }
    }

    /// The port at `peer` answers again: what waits for it starts anew.
    pub fn resume(&mut self, card: &mut Card, ctx: &mut Context<'_>, peer: IpAddr) {
        let waiting = |(_, identifier): &(&CmId, &Identifier)| {
            identifier.unanswered.is_some() && identifier.peer_address() == peer
        };
        let affected: alloc::vec::Vec<CmId> =
            self.identifiers.iter().filter(waiting).map(|(id, _)| *id).collect();
        let at = ctx.now.plus(card.settings.cm.answer());
        for id in affected {
            self.arm(card, id, Some(at));
        }
    }

    /// Keeps a connection's queue pair and names apart from new ones for as long as old packets may live.
    fn enter_time_wait(&mut self, card: &mut Card, ctx: &mut Context<'_>, id: CmId) {
        let Some(identifier) = self.identifiers.get_mut(&id) else { return };
        identifier.unanswered = None;
        let wait = time_wait(identifier.ack_timeout);
        self.enter(ctx, id, CmState::TimeWait);
        self.arm(card, id, Some(ctx.now.plus(wait)));
    }

    /// Takes an identifier's connection out of the tables of names.
    fn forget_connection(&mut self, id: CmId) {
        let Some(identifier) = self.identifiers.get(&id) else { return };
        let peer = identifier.peer_address();
        if self.by_name.get(&identifier.name) == Some(&id) {
            self.by_name.remove(&identifier.name);
        }
        if self.by_peer.get(&(peer, identifier.remote_name)) == Some(&id) {
            self.by_peer.remove(&(peer, identifier.remote_name));
        }
        if self.by_peer_queue_pair.get(&(peer, identifier.peer_queue_pair)) == Some(&id) {
            self.by_peer_queue_pair.remove(&(peer, identifier.peer_queue_pair));
        }
    }

    /// Remembers a connection whose identifier goes.
    fn haunt(&mut self, card: &mut Card, id: CmId, until: Instant) {
        let Some(identifier) = self.identifiers.get(&id) else { return };
        if self.ghosts.len() >= MOST_GHOSTS
            && let Some(oldest) = self.ghost_deadlines.pop_first()
        {
            self.ghosts.remove(&oldest.1);
        }
        let (peer, remote, name) = (identifier.peer_address(), identifier.remote_name, identifier.name);
        self.ghosts.insert(name, Ghost { peer, remote });
        self.ghost_deadlines.insert((until, name));
        self.schedule(card);
    }

    /// Sends a message of an identifier that wants an answer, until one comes.
    fn send_until_answered(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        id: CmId,
        message: impl Into<Message>,
        transaction: u64,
    ) {
        let Some(identifier) = self.identifiers.get_mut(&id) else { return };
        let envelope = identifier.envelope();
        let datagram = softhca_wire::cm::Datagram::new(transaction, message);
        let message = alloc::boxed::Box::new(Sent { envelope, datagram });
        let times = card.settings.cm;
        identifier.unanswered = Some(Unanswered { message, retries_left: times.retries });
        self.outbox.push(card, ctx, Some(id), envelope, datagram, false);
        self.arm(card, id, Some(ctx.now.plus(times.answer())));
    }

    /// Sends a message of an identifier once.
    fn send(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        id: CmId,
        message: impl Into<Message>,
        transaction: u64,
    ) {
        let Some(identifier) = self.identifiers.get(&id) else { return };
        let datagram = softhca_wire::cm::Datagram::new(transaction, message);
        self.outbox.push(card, ctx, Some(id), identifier.envelope(), datagram, false);
    }

    /// An answer came: nothing is to be sent again.
    fn answered(&mut self, card: &mut Card, id: CmId) {
        if let Some(identifier) = self.identifiers.get_mut(&id) {
            identifier.unanswered = None;
        }
        self.arm(card, id, None);
    }
}

/// How long a connection is remembered after its end (IBA 12.9.8.4).
fn time_wait(ack_timeout: u8) -> Duration {
    Duration::from_nanos(4096 << (ack_timeout & 0x1f).min(24))
}

/// The GID of an address, and its index in the table, if the card has it.
fn own_gid(card: &Card, address: IpAddr) -> Option<(Gid, u8)> {
    let gid = Gid::from(address);
    card.gids.iter().position(|own| *own == gid).map(|index| (gid, index as u8))
}
