//! The links of one port: who the peers are, whether they live, and what may be sent to them.
//!
//! A state machine without I/O. The driver hands in what arrives ([`Links::handle`], [`Links::received`],
//! [`Links::unreachable`]) and the time, sends what [`Links::transmit`] gives, asks [`Links::may_send`] before
//! every run, and hears of changes from [`Links::poll_event`]. Nothing on the receiving side ever waits for
//! permission to send.

mod peer;

use crate::grant::GrantIssuer;
use peer::PeerLink;
use softhca_wire::link_control::{Body, ExchangeKind, FrameOrder, Heartbeat, Incarnation, Message, Pause};
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

const MILLISECOND: u64 = 1_000_000;
/// The most peers of one port; beyond it, dead ones are forgotten and new ones refused.
const MAX_PEERS: usize = 1024;
/// How long between two heartbeats of a link in use, and of a quiet one.
const HEARTBEAT_INTERVAL: u64 = 100 * MILLISECOND;
const IDLE_HEARTBEAT_INTERVAL: u64 = 1000 * MILLISECOND;
/// How long after its last use a link is quiet.
const IDLE_AFTER: u64 = 2000 * MILLISECOND;
/// How long a peer may be silent before its link is stalled.
const STALLED_AFTER: u64 = 250 * MILLISECOND;
/// How long without any answer until a port that never said HELLO is taken for another make. Most of another
/// make are known at once, because nobody listens on their link port; and a port like ours may be slow to
/// answer on a network that still looks for its address.
const FOREIGN_AFTER: u64 = 3000 * MILLISECOND;
/// Grants are good for this long after a heartbeat that was answered, and then again after the next: a port
/// that was stopped may have been given up by its peers.
const GRANT_LEASE: u64 = 500 * MILLISECOND;
/// The first and the longest pause between two HELLOs.
const MIN_HELLO_INTERVAL: u64 = MILLISECOND;
const MAX_HELLO_INTERVAL: u64 = 100 * MILLISECOND;
/// The most silence that counts between two calls of `expire`: a port that was stopped itself must not blame
/// its peers.
const MAX_CLOCK_STEP: u64 = 200 * MILLISECOND;
/// How long until what is on the way to a port of another make counts as arrived.
const FOREIGN_WINDOW_PERIOD: u64 = MILLISECOND;
/// With this many events waiting for the driver, more pauses are ignored.
const MAX_EVENTS: usize = 4096;

/// What is known about a peer port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerState {
    /// Nothing yet, or nothing since it was dead; HELLO is on its way.
    Probing,
    /// It answers.
    Alive,
    /// It does not answer now. Timers towards it stand still.
    Stalled,
    /// It has not answered for too long, or nobody is there. Its queue pairs fail.
    Dead,
    /// Nobody speaks link control there: rxe, a real card, or nobody at all. Nothing is promised.
    Foreign,
}

/// What changed on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkChange {
    /// The state of the peer is another one.
    StateChanged(PeerState),
    /// The peer came back with no memory of anything before; it is alive.
    Restarted,
    /// The peer sent a priority flow control frame.
    PauseReceived(Pause),
}

impl LinkChange {
    /// The name in events.
    pub const fn name(self) -> &'static str {
        match self {
            LinkChange::StateChanged(PeerState::Probing) => "probing",
            LinkChange::StateChanged(PeerState::Alive) => "alive",
            LinkChange::StateChanged(PeerState::Stalled) => "stalled",
            LinkChange::StateChanged(PeerState::Dead) => "dead",
            LinkChange::StateChanged(PeerState::Foreign) => "foreign",
            LinkChange::Restarted => "restarted",
            LinkChange::PauseReceived(_) => "pause-received",
        }
    }
}

/// A change, and on which link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkEvent {
    /// The peer's address.
    pub peer: IpAddr,
    /// What changed.
    pub change: LinkChange,
}

/// Which of a peer's ports an ICMP message speaks of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnreachablePort {
    /// 4791.
    Roce,
    /// 4792.
    Link,
}

/// All links of one port.
#[derive(Debug)]
pub struct LinkControl {
    incarnation: Incarnation,
    dead_after: u64,
    peers: BTreeMap<IpAddr, PeerLink>,
    grant_issuer: GrantIssuer,
    /// Addresses of this port that no link leads to, because what goes there stays in the card.
    internal_addresses: Vec<IpAddr>,
    /// The order of our frames.
    transmit_order: FrameOrder,
    events: VecDeque<LinkEvent>,
    expired_at: u64,
    /// Somebody may have something to say.
    has_pending_messages: bool,
}

impl LinkControl {
    /// How long a peer may be silent before it is dead, unless told otherwise: ten seconds.
    pub const DEAD_AFTER: u64 = 10_000 * MILLISECOND;

    /// The links of a port that begins to live at `now`, whose receive buffer has this [`budget`](crate::budget).
    /// A later life needs a higher incarnation: nanoseconds of the wall clock will do.
    pub fn new(incarnation: Incarnation, budget: u64, now: u64) -> LinkControl {
        LinkControl {
            incarnation,
            dead_after: Self::DEAD_AFTER,
            peers: BTreeMap::new(),
            grant_issuer: GrantIssuer::new(budget),
            internal_addresses: Vec::new(),
            transmit_order: FrameOrder::InOrder,
            events: VecDeque::new(),
            expired_at: now,
            has_pending_messages: false,
        }
    }

    /// Sets how long a peer may be silent before it is dead; at least a second, so that no grant outlives it.
    pub fn set_dead_after(&mut self, nanoseconds: u64) {
        self.dead_after = nanoseconds.max(2 * GRANT_LEASE);
    }

    /// Keeps what goes to these addresses, the port's own, in the card: nobody is greeted there, and nothing is granted.
    pub fn set_internal_addresses(&mut self, own: impl IntoIterator<Item = IpAddr>) {
        self.internal_addresses.extend(own);
    }

    /// Whether what goes to an address stays in the card.
    pub fn is_internal(&self, address: IpAddr) -> bool {
        self.internal_addresses.contains(&address)
    }

    /// Our frames leave in another order than that of their PSNs from now on, because a rule wants it. No frame
    /// leaves to a peer before it knows.
    pub fn announce_reordering(&mut self) {
        self.transmit_order = FrameOrder::Reordered;
        self.has_pending_messages = true;
        for peer in self.peers.values_mut().filter(|peer| peer.is_established()) {
            peer.lease_renewed_at = None;
            (peer.heartbeat_due, peer.unanswered_probes) = (true, 0);
        }
    }

    /// Our frames leave in the order of their PSNs again. Until a peer hears of it, it only helps us less.
    pub fn announce_in_order(&mut self) {
        self.transmit_order = FrameOrder::InOrder;
    }

    /// Whether frames of `peer` that come in another order than that of their PSNs were mixed up on the way.
    pub fn transmits_in_order(&self, peer: IpAddr) -> bool {
        self.peers
            .get(&peer)
            .is_some_and(|peer| peer.is_established() && peer.remote_order == FrameOrder::InOrder)
    }

    /// What the port has granted to others.
    pub fn grant_issuer(&self) -> &GrantIssuer {
        &self.grant_issuer
    }

    /// What is known about `peer`, if anything ever was.
    pub fn state(&self, peer: IpAddr) -> Option<PeerState> {
        self.peers.get(&peer).map(|peer| peer.state)
    }

    /// The peer, new if need be; `None` if there are too many, or if no link leads there.
    fn peer_or_insert(&mut self, address: IpAddr, now: u64) -> Option<&mut PeerLink> {
        if self.is_internal(address) {
            return None;
        }
        if self.peers.len() >= MAX_PEERS && !self.peers.contains_key(&address) {
            let (dead, _) = self.peers.iter().find(|(_, peer)| peer.state == PeerState::Dead)?;
            let dead = *dead;
            let forgotten = self.peers.remove(&dead).expect("the peer was just found");
            // Whoever takes its place, or itself, must not meet an earlier life of ours.
            self.incarnation = self.incarnation.max(forgotten.local_incarnation.next());
        }
        self.has_pending_messages = true;
        let ours = self.incarnation;
        Some(self.peers.entry(address).or_insert_with(|| PeerLink::new(ours, now)))
    }

    fn emit(&mut self, peer: IpAddr, change: LinkChange) {
        self.events.push_back(LinkEvent { peer, change });
    }

    /// Keeps an eye on `peer`: somebody waits for it. Also begins to greet a peer that is unknown or dead.
    pub fn watch(&mut self, peer: IpAddr, now: u64) {
        if let Some(peer) = self.peer_or_insert(peer, now) {
            peer.last_used_at = now;
            match peer.state {
                PeerState::Dead => peer.start_probing(now),
                PeerState::Alive | PeerState::Stalled => {
                    // A renewed interest must not wait for a quiet link's next heartbeat.
                    peer.next_heartbeat_at = peer.next_heartbeat_at.min(now + HEARTBEAT_INTERVAL);
                    if !peer.has_lease(now) && !peer.awaiting_heartbeat_reply {
                        peer.next_heartbeat_at = now;
                    }
                }
                PeerState::Probing | PeerState::Foreign => {}
            }
            if peer.next_timeout().is_some_and(|at| at <= now) {
                self.expire(now);
            }
        }
    }

    /// How much charge may be sent to `peer` now, to cut runs by.
    pub fn allowance(&self, peer: IpAddr, now: u64) -> u64 {
        self.peers.get(&peer).map_or(0, |peer| peer.allowance(now))
    }

    /// Whether a frame or run of this charge may be sent to `peer` now. If not, everything is done to get
    /// permission for a frame; ask again when a message has been handled or a timeout has passed.
    pub fn may_send(&mut self, peer: IpAddr, charge: u64, now: u64) -> bool {
        if self.allowance(peer, now) >= charge {
            return true;
        }
        self.watch(peer, now);
        if let Some(peer) = self.peers.get_mut(&peer)
            && peer.state != PeerState::Foreign
        {
            peer.grant_balance.may_send(charge);
        }
        false
    }

    /// Counts what the socket has taken.
    ///
    /// # Panics
    /// If that was not allowed.
    pub fn record_sent(&mut self, peer: IpAddr, charge: u64, now: u64) {
        let peer = self.peers.get_mut(&peer).expect("nothing is sent to an unknown peer");
        peer.last_used_at = now;
        if peer.state == PeerState::Foreign {
            if peer.foreign_window_used == 0 || now >= peer.foreign_window_opened_at + FOREIGN_WINDOW_PERIOD {
                (peer.foreign_window_used, peer.foreign_window_opened_at) = (0, now);
            }
            peer.foreign_window_used += charge;
            peer.grant_balance.record_ungranted(charge);
        } else {
            peer.grant_balance.record_sent(charge, now);
            self.has_pending_messages = true;
        }
    }

    /// Sends a priority flow control frame, once; together with one that was not sent yet. One to the port itself is there
    /// at once.
    pub fn send_pause(&mut self, peer: IpAddr, send_pause: Pause, now: u64) {
        if self.is_internal(peer) {
            self.emit(peer, LinkChange::PauseReceived(send_pause));
        } else if let Some(peer) = self.peer_or_insert(peer, now) {
            peer.pending_pause.get_or_insert_default().merge(&send_pause);
        }
    }

    /// Whether link control is spoken with `peer` now.
    pub fn is_established(&self, peer: IpAddr) -> bool {
        self.peers.get(&peer).is_some_and(PeerLink::is_established)
    }

    /// So much of what was granted to `peer`, and received from it, is kept: it does not make room for more.
    pub fn add_buffered(&mut self, peer: IpAddr, granted: u64) {
        self.grant_issuer.add_buffered(peer, granted);
    }

    /// At most so much of what was received from `peer` is still kept.
    pub fn limit_buffered(&mut self, peer: IpAddr, kept: u64) {
        self.grant_issuer.limit_buffered(peer, kept);
    }

    /// Counts a chunk that was taken out of the RoCE socket. Returns how much of it had been granted.
    pub fn record_received(&mut self, peer: IpAddr, charge: u64, now: u64) -> u64 {
        let granted = self.grant_issuer.record_received(peer, charge);
        match self.peers.get_mut(&peer) {
            Some(known) if known.state != PeerState::Dead => {
                known.last_used_at = now;
                known.foreign_window_used = 0;
                if known.is_established() {
                    self.on_peer_activity(peer);
                }
            }
            // It may take us for another make; tell it better.
            _ => self.watch(peer, now),
        }
        granted
    }

    /// Learns that the RoCE socket had nothing more.
    pub fn on_socket_empty(&mut self, now: u64) {
        self.grant_issuer.on_socket_empty(now);
    }

    /// A sign of life from a peer that answers.
    fn on_peer_activity(&mut self, address: IpAddr) {
        if let Some(peer) = self.peers.get_mut(&address) {
            peer.silent_for = 0;
            peer.unanswered_probes = 0;
            if peer.state == PeerState::Stalled {
                peer.state = PeerState::Alive;
                self.emit(address, LinkChange::StateChanged(PeerState::Alive));
            }
        }
    }

    /// Takes in a link control message.
    pub fn on_message(&mut self, from: IpAddr, message: &Message, now: u64) {
        let Some(peer) = self.peer_or_insert(from, now) else { return };
        let for_us = message.receiver == Some(peer.local_incarnation);
        if let Body::Hello(exchange) = message.body {
            let old = peer.remote_incarnation.is_some_and(|known| message.sender < known);
            // An answer to an earlier life of this port says nothing to this one.
            if !old && (exchange == ExchangeKind::Query || for_us) {
                self.on_hello(from, message.sender, exchange, now);
                if let Some(peer) = self.peers.get_mut(&from) {
                    peer.remote_order = message.frame_order;
                }
            }
            return;
        }
        if !for_us || !peer.is_established() || peer.remote_incarnation != Some(message.sender) {
            // One of us does not know the other's present life.
            peer.pending_hello = Some(ExchangeKind::Query);
            return;
        }
        peer.remote_order = message.frame_order;
        match message.body {
            Body::Hello(_) => {}
            Body::Request(request) => self.grant_issuer.on_request(from, &request, now),
            Body::Grant(grant) => peer.grant_balance.on_grant(&grant, now),
            Body::Heartbeat(Heartbeat { exchange: ExchangeKind::Query, stamp }) => {
                peer.pending_heartbeat_reply = Some(stamp)
            }
            Body::Heartbeat(Heartbeat { exchange: ExchangeKind::Reply, stamp }) => {
                peer.awaiting_heartbeat_reply = false;
                peer.lease_renewed_at = peer.lease_renewed_at.max(Some(stamp.min(now)));
            }
            Body::Pause(_) if self.events.len() >= MAX_EVENTS => {}
            Body::Pause(pause) => self.emit(from, LinkChange::PauseReceived(pause)),
        }
        self.on_peer_activity(from);
    }

    /// A HELLO from the present or a new life of a peer. A new life knows nothing of what was agreed.
    fn on_hello(&mut self, from: IpAddr, sender: Incarnation, exchange: ExchangeKind, now: u64) {
        let peer = self.peers.get_mut(&from).expect("the peer was just found");
        let restarted = peer.remote_incarnation.is_some_and(|known| known != sender);
        if restarted {
            peer.reset(now);
            self.grant_issuer.remove_sender(from, now);
        }
        if exchange == ExchangeKind::Query {
            peer.pending_hello = Some(ExchangeKind::Reply);
        }
        let changed = !matches!(peer.state, PeerState::Alive);
        peer.state = PeerState::Alive;
        peer.remote_incarnation = Some(sender);
        peer.supports_link_control = true;
        peer.hello_interval = MIN_HELLO_INTERVAL;
        peer.silent_for = 0;
        peer.unanswered_probes = 0;
        peer.last_used_at = now;
        peer.heartbeat_due = true;
        peer.next_heartbeat_at = now + HEARTBEAT_INTERVAL;
        if restarted {
            self.emit(from, LinkChange::Restarted);
        } else if changed {
            self.emit(from, LinkChange::StateChanged(PeerState::Alive));
        }
    }

    /// Learns from an ICMP message that nobody listens there. Take these from the error queues before the
    /// messages that came after them.
    pub fn on_unreachable(&mut self, peer: IpAddr, port: UnreachablePort, now: u64) {
        let Some(known) = self.peers.get(&peer) else { return };
        let state = match (port, known.state) {
            (_, PeerState::Dead) | (UnreachablePort::Link, PeerState::Foreign) => return,
            // Another make may live there now; if nobody does, datagrams are lost as on any network, and the RoCE port
            // will say so.
            (UnreachablePort::Link, PeerState::Probing) => PeerState::Foreign,
            _ => PeerState::Dead,
        };
        self.close(peer, state, now);
    }

    /// Ends all understanding with a peer.
    fn close(&mut self, address: IpAddr, state: PeerState, now: u64) {
        if let Some(peer) = self.peers.get_mut(&address) {
            peer.reset(now);
            peer.local_incarnation = peer.local_incarnation.next();
            peer.state = state;
            peer.foreign_window_used = 0;
            self.grant_issuer.remove_sender(address, now);
            self.emit(address, LinkChange::StateChanged(state));
        }
    }

    /// Does what is due at `now`. Hand in what has arrived first, so that nobody is blamed for our own sleep.
    pub fn expire(&mut self, now: u64) {
        let step = now.saturating_sub(self.expired_at).min(MAX_CLOCK_STEP);
        self.expired_at = now;
        self.has_pending_messages = true;
        let dead_after = self.dead_after;
        let mut fallen = Vec::new();
        for (address, peer) in &mut self.peers {
            match peer.state {
                PeerState::Probing => {
                    peer.silent_for += step;
                    if now >= peer.next_hello_at {
                        peer.pending_hello = Some(ExchangeKind::Query);
                        peer.next_hello_at = now + peer.hello_interval;
                        peer.hello_interval = (peer.hello_interval * 2).min(MAX_HELLO_INTERVAL);
                    }
                    if !peer.supports_link_control && peer.silent_for >= FOREIGN_AFTER {
                        fallen.push((*address, PeerState::Foreign));
                    } else if peer.silent_for >= dead_after {
                        fallen.push((*address, PeerState::Dead));
                    }
                }
                PeerState::Alive | PeerState::Stalled => {
                    if peer.awaiting_heartbeat_reply {
                        peer.silent_for += step;
                    }
                    if now >= peer.next_heartbeat_at {
                        let quiet = now >= peer.last_used_at + IDLE_AFTER && !peer.awaiting_heartbeat_reply;
                        peer.heartbeat_due = true;
                        peer.next_heartbeat_at =
                            now + if quiet { IDLE_HEARTBEAT_INTERVAL } else { HEARTBEAT_INTERVAL };
                    }
                    peer.grant_balance.expire(now);
                    if peer.silent_for >= dead_after {
                        fallen.push((*address, PeerState::Dead));
                    } else if peer.silent_for >= STALLED_AFTER && peer.state == PeerState::Alive {
                        fallen.push((*address, PeerState::Stalled));
                    }
                }
                PeerState::Foreign => {
                    if now >= peer.foreign_window_opened_at + FOREIGN_WINDOW_PERIOD {
                        peer.foreign_window_used = 0;
                    }
                    // Somebody else may live there now.
                    if now >= peer.next_hello_at && now < peer.last_used_at + IDLE_AFTER {
                        peer.pending_hello = Some(ExchangeKind::Query);
                        peer.next_hello_at = now + IDLE_HEARTBEAT_INTERVAL;
                    }
                }
                PeerState::Dead => {}
            }
        }
        for (address, state) in fallen {
            if state == PeerState::Stalled {
                self.peers.get_mut(&address).expect("the peer was just found").state = state;
                self.emit(address, LinkChange::StateChanged(state));
            } else {
                self.close(address, state, now);
            }
        }
    }

    /// When to call [`Links::expire`]; also read the RoCE socket then, and say if it was empty.
    pub fn next_timeout(&self) -> Option<u64> {
        self.peers.values().filter_map(PeerLink::next_timeout).chain(self.grant_issuer.next_timeout()).min()
    }

    /// The next message to send. Call until there is none, after every turn.
    pub fn transmit(&mut self, now: u64) -> Option<(IpAddr, Message)> {
        if let Some((address, grant)) = self.grant_issuer.transmit(now)
            && let Some(peer) = self.peers.get(&address)
        {
            let body = Body::Grant(grant);
            return Some((address, peer.message(self.transmit_order, body)));
        }
        if !self.has_pending_messages {
            return None;
        }
        let order = self.transmit_order;
        for (address, peer) in &mut self.peers {
            if let Some(body) = peer.next_message(now) {
                return Some((*address, peer.message(order, body)));
            }
        }
        self.has_pending_messages = false;
        None
    }

    /// What changed, oldest first.
    pub fn poll_event(&mut self) -> Option<LinkEvent> {
        self.events.pop_front()
    }
}
