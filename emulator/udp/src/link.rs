//! The links of one port: who the peers are, whether they live, and what may be sent to them.
//!
//! A state machine without I/O. The driver hands in what arrives ([`Links::handle`], [`Links::received`],
//! [`Links::unreachable`]) and the time, sends what [`Links::transmit`] gives, asks [`Links::may_send`] before
//! every run, and hears of changes from [`Links::poll_event`]. Nothing on the receiving side ever waits for
//! permission to send.

mod peer;

use crate::grant::Granter;
use peer::Peer;
use softhca_wire::link::{Body, Exchange, Heartbeat, Incarnation, Message, Order, Pause};
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

const MILLISECOND: u64 = 1_000_000;
/// The most peers of one port; beyond it, dead ones are forgotten and new ones refused.
const MAX_PEERS: usize = 1024;
/// How long between two heartbeats of a link in use, and of a quiet one.
const BEAT: u64 = 100 * MILLISECOND;
const QUIET_BEAT: u64 = 1000 * MILLISECOND;
/// How long after its last use a link is quiet.
const QUIET_AFTER: u64 = 2000 * MILLISECOND;
/// How long a peer may be silent before its link is stalled.
const STALLED_AFTER: u64 = 250 * MILLISECOND;
/// How long without any answer until a port that never said HELLO is taken for another make. Most of another
/// make are known at once, because nobody listens on their link port; and a port like ours may be slow to
/// answer on a network that still looks for its address.
const FOREIGN_AFTER: u64 = 3000 * MILLISECOND;
/// Grants are good for this long after a heartbeat that was answered, and then again after the next: a port
/// that was stopped may have been given up by its peers.
const LEASE: u64 = 500 * MILLISECOND;
/// The first and the longest pause between two HELLOs.
const GREET: u64 = MILLISECOND;
const MOST_GREET: u64 = 100 * MILLISECOND;
/// The most silence that counts between two calls of `expire`: a port that was stopped itself must not blame
/// its peers.
const LONGEST_STEP: u64 = 200 * MILLISECOND;
/// How long until what is on the way to a port of another make counts as arrived.
const FOREIGN_TURN: u64 = MILLISECOND;
/// With this many events waiting for the driver, more pauses are ignored.
const MAX_EVENTS: usize = 4096;

/// What is known about a peer port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerState {
    /// Nothing yet, or nothing since it was dead; HELLO is on its way.
    Greeting,
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
    Became(PeerState),
    /// The peer came back with no memory of anything before; it is alive.
    Restarted,
    /// The peer sent a priority flow control frame.
    Paused(Pause),
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
pub struct Links {
    incarnation: Incarnation,
    dead_after: u64,
    peers: BTreeMap<IpAddr, Peer>,
    granter: Granter,
    /// Addresses of this port that no link leads to, because what goes there stays in the card.
    own: Vec<IpAddr>,
    /// The order of our frames.
    order: Order,
    events: VecDeque<LinkEvent>,
    expired_at: u64,
    /// Somebody may have something to say.
    due: bool,
}

impl Links {
    /// How long a peer may be silent before it is dead, unless told otherwise: ten seconds.
    pub const DEAD_AFTER: u64 = 10_000 * MILLISECOND;

    /// The links of a port that begins to live at `now`, whose receive buffer has this [`budget`](crate::budget).
    /// A later life needs a higher incarnation: nanoseconds of the wall clock will do.
    pub fn new(incarnation: Incarnation, budget: u64, now: u64) -> Links {
        Links {
            incarnation,
            dead_after: Self::DEAD_AFTER,
            peers: BTreeMap::new(),
            granter: Granter::new(budget),
            own: Vec::new(),
            order: Order::Kept,
            events: VecDeque::new(),
            expired_at: now,
            due: false,
        }
    }

    /// Sets how long a peer may be silent before it is dead; at least a second, so that no grant outlives it.
    pub fn set_dead_after(&mut self, nanoseconds: u64) {
        self.dead_after = nanoseconds.max(2 * LEASE);
    }

    /// Keeps what goes to these addresses, the port's own, in the card: nobody is greeted there, and nothing is granted.
    pub fn keep(&mut self, own: impl IntoIterator<Item = IpAddr>) {
        self.own.extend(own);
    }

    /// Whether what goes to an address stays in the card.
    pub fn keeps(&self, address: IpAddr) -> bool {
        self.own.contains(&address)
    }

    /// Our frames leave in another order than that of their PSNs from now on, because a rule wants it. No frame
    /// leaves to a peer before it knows.
    pub fn change_order(&mut self) {
        self.order = Order::Changed;
        self.due = true;
        for peer in self.peers.values_mut().filter(|peer| peer.answers()) {
            peer.leased_at = None;
            (peer.beat_due, peer.unheard) = (true, 0);
        }
    }

    /// Our frames leave in the order of their PSNs again. Until a peer hears of it, it only helps us less.
    pub fn restore_order(&mut self) {
        self.order = Order::Kept;
    }

    /// Whether frames of `peer` that come in another order than that of their PSNs were mixed up on the way.
    pub fn keeps_order(&self, peer: IpAddr) -> bool {
        self.peers.get(&peer).is_some_and(|peer| peer.answers() && peer.order == Order::Kept)
    }

    /// What the port has granted to others.
    pub fn granter(&self) -> &Granter {
        &self.granter
    }

    /// What is known about `peer`, if anything ever was.
    pub fn state(&self, peer: IpAddr) -> Option<PeerState> {
        self.peers.get(&peer).map(|peer| peer.state)
    }

    /// The peer, new if need be; `None` if there are too many, or if no link leads there.
    fn peer(&mut self, address: IpAddr, now: u64) -> Option<&mut Peer> {
        if self.keeps(address) {
            return None;
        }
        if self.peers.len() >= MAX_PEERS && !self.peers.contains_key(&address) {
            let (dead, _) = self.peers.iter().find(|(_, peer)| peer.state == PeerState::Dead)?;
            let dead = *dead;
            let forgotten = self.peers.remove(&dead).expect("the peer was just found");
            // Whoever takes its place, or itself, must not meet an earlier life of ours.
            self.incarnation = self.incarnation.max(forgotten.ours.next());
        }
        self.due = true;
        let ours = self.incarnation;
        Some(self.peers.entry(address).or_insert_with(|| Peer::new(ours, now)))
    }

    fn tell(&mut self, peer: IpAddr, change: LinkChange) {
        self.events.push_back(LinkEvent { peer, change });
    }

    /// Keeps an eye on `peer`: somebody waits for it. Also begins to greet a peer that is unknown or dead.
    pub fn watch(&mut self, peer: IpAddr, now: u64) {
        if let Some(peer) = self.peer(peer, now) {
            peer.active_at = now;
            match peer.state {
                PeerState::Dead => peer.greet(now),
                PeerState::Alive | PeerState::Stalled => {
                    // A renewed interest must not wait for a quiet link's next heartbeat.
                    peer.beat_at = peer.beat_at.min(now + BEAT);
                    if !peer.leased(now) && !peer.listening {
                        peer.beat_at = now;
                    }
                }
                PeerState::Greeting | PeerState::Foreign => {}
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
            peer.holder.may_send(charge);
        }
        false
    }

    /// Counts what the socket has taken.
    ///
    /// # Panics
    /// If that was not allowed.
    pub fn sent(&mut self, peer: IpAddr, charge: u64, now: u64) {
        let peer = self.peers.get_mut(&peer).expect("nothing is sent to an unknown peer");
        peer.active_at = now;
        if peer.state == PeerState::Foreign {
            if peer.turn_used == 0 || now >= peer.turn_at + FOREIGN_TURN {
                (peer.turn_used, peer.turn_at) = (0, now);
            }
            peer.turn_used += charge;
            peer.holder.strayed(charge);
        } else {
            peer.holder.sent(charge, now);
            self.due = true;
        }
    }

    /// Sends a priority flow control frame, once; together with one that was not sent yet. One to the port itself is there
    /// at once.
    pub fn pause(&mut self, peer: IpAddr, pause: Pause, now: u64) {
        if self.keeps(peer) {
            self.tell(peer, LinkChange::Paused(pause));
        } else if let Some(peer) = self.peer(peer, now) {
            peer.pause_due.get_or_insert_default().add(&pause);
        }
    }

    /// Whether link control is spoken with `peer` now.
    pub fn answers(&self, peer: IpAddr) -> bool {
        self.peers.get(&peer).is_some_and(Peer::answers)
    }

    /// So much of what was granted to `peer`, and received from it, is kept: it does not make room for more.
    pub fn hold(&mut self, peer: IpAddr, granted: u64) {
        self.granter.hold(peer, granted);
    }

    /// At most so much of what was received from `peer` is still kept.
    pub fn let_go(&mut self, peer: IpAddr, kept: u64) {
        self.granter.let_go(peer, kept);
    }

    /// Counts a chunk that was taken out of the RoCE socket. Returns how much of it had been granted.
    pub fn received(&mut self, peer: IpAddr, charge: u64, now: u64) -> u64 {
        let granted = self.granter.received(peer, charge);
        match self.peers.get_mut(&peer) {
            Some(known) if known.state != PeerState::Dead => {
                known.active_at = now;
                known.turn_used = 0;
                if known.answers() {
                    self.heard(peer);
                }
            }
            // It may take us for another make; tell it better.
            _ => self.watch(peer, now),
        }
        granted
    }

    /// Learns that the RoCE socket had nothing more.
    pub fn socket_empty(&mut self, now: u64) {
        self.granter.socket_empty(now);
    }

    /// A sign of life from a peer that answers.
    fn heard(&mut self, address: IpAddr) {
        if let Some(peer) = self.peers.get_mut(&address) {
            peer.silence = 0;
            peer.unheard = 0;
            if peer.state == PeerState::Stalled {
                peer.state = PeerState::Alive;
                self.tell(address, LinkChange::Became(PeerState::Alive));
            }
        }
    }

    /// Takes in a link control message.
    pub fn handle(&mut self, from: IpAddr, message: &Message, now: u64) {
        let Some(peer) = self.peer(from, now) else { return };
        let for_us = message.receiver == Some(peer.ours);
        if let Body::Hello(exchange) = message.body {
            let old = peer.theirs.is_some_and(|known| message.sender < known);
            // An answer to an earlier life of this port says nothing to this one.
            if !old && (exchange == Exchange::Ask || for_us) {
                self.hello(from, message.sender, exchange, now);
                if let Some(peer) = self.peers.get_mut(&from) {
                    peer.order = message.order;
                }
            }
            return;
        }
        if !for_us || !peer.answers() || peer.theirs != Some(message.sender) {
            // One of us does not know the other's present life.
            peer.hello_due = Some(Exchange::Ask);
            return;
        }
        peer.order = message.order;
        match message.body {
            Body::Hello(_) => {}
            Body::Request(request) => self.granter.request(from, &request, now),
            Body::Grant(grant) => peer.holder.granted(&grant, now),
            Body::Heartbeat(Heartbeat { exchange: Exchange::Ask, stamp }) => peer.beat_answer = Some(stamp),
            Body::Heartbeat(Heartbeat { exchange: Exchange::Answer, stamp }) => {
                peer.listening = false;
                peer.leased_at = peer.leased_at.max(Some(stamp.min(now)));
            }
            Body::Pause(_) if self.events.len() >= MAX_EVENTS => {}
            Body::Pause(pause) => self.tell(from, LinkChange::Paused(pause)),
        }
        self.heard(from);
    }

    /// A HELLO from the present or a new life of a peer. A new life knows nothing of what was agreed.
    fn hello(&mut self, from: IpAddr, sender: Incarnation, exchange: Exchange, now: u64) {
        let peer = self.peers.get_mut(&from).expect("the peer was just found");
        let restarted = peer.theirs.is_some_and(|known| known != sender);
        if restarted {
            peer.forget(now);
            self.granter.retire(from, now);
        }
        if exchange == Exchange::Ask {
            peer.hello_due = Some(Exchange::Answer);
        }
        let changed = !matches!(peer.state, PeerState::Alive);
        peer.state = PeerState::Alive;
        peer.theirs = Some(sender);
        peer.speaks = true;
        peer.hello_pause = GREET;
        peer.silence = 0;
        peer.unheard = 0;
        peer.active_at = now;
        peer.beat_due = true;
        peer.beat_at = now + BEAT;
        if restarted {
            self.tell(from, LinkChange::Restarted);
        } else if changed {
            self.tell(from, LinkChange::Became(PeerState::Alive));
        }
    }

    /// Learns from an ICMP message that nobody listens there. Take these from the error queues before the
    /// messages that came after them.
    pub fn unreachable(&mut self, peer: IpAddr, port: UnreachablePort, now: u64) {
        let Some(known) = self.peers.get(&peer) else { return };
        let state = match (port, known.state) {
            (_, PeerState::Dead) | (UnreachablePort::Link, PeerState::Foreign) => return,
            // Another make may live there now; if nobody does, datagrams are lost as on any network, and the RoCE port
            // will say so.
            (UnreachablePort::Link, PeerState::Greeting) => PeerState::Foreign,
            _ => PeerState::Dead,
        };
        self.become_silent(peer, state, now);
    }

    /// Ends all understanding with a peer.
    fn become_silent(&mut self, address: IpAddr, state: PeerState, now: u64) {
        if let Some(peer) = self.peers.get_mut(&address) {
            peer.forget(now);
            peer.ours = peer.ours.next();
            peer.state = state;
            peer.turn_used = 0;
            self.granter.retire(address, now);
            self.tell(address, LinkChange::Became(state));
        }
    }

    /// Does what is due at `now`. Hand in what has arrived first, so that nobody is blamed for our own sleep.
    pub fn expire(&mut self, now: u64) {
        let step = now.saturating_sub(self.expired_at).min(LONGEST_STEP);
        self.expired_at = now;
        self.due = true;
        let dead_after = self.dead_after;
        let mut fallen = Vec::new();
        for (address, peer) in &mut self.peers {
            match peer.state {
                PeerState::Greeting => {
                    peer.silence += step;
                    if now >= peer.hello_at {
                        peer.hello_due = Some(Exchange::Ask);
                        peer.hello_at = now + peer.hello_pause;
                        peer.hello_pause = (peer.hello_pause * 2).min(MOST_GREET);
                    }
                    if !peer.speaks && peer.silence >= FOREIGN_AFTER {
                        fallen.push((*address, PeerState::Foreign));
                    } else if peer.silence >= dead_after {
                        fallen.push((*address, PeerState::Dead));
                    }
                }
                PeerState::Alive | PeerState::Stalled => {
                    if peer.listening {
                        peer.silence += step;
                    }
                    if now >= peer.beat_at {
                        let quiet = now >= peer.active_at + QUIET_AFTER && !peer.listening;
                        peer.beat_due = true;
                        peer.beat_at = now + if quiet { QUIET_BEAT } else { BEAT };
                    }
                    peer.holder.expire(now);
                    if peer.silence >= dead_after {
                        fallen.push((*address, PeerState::Dead));
                    } else if peer.silence >= STALLED_AFTER && peer.state == PeerState::Alive {
                        fallen.push((*address, PeerState::Stalled));
                    }
                }
                PeerState::Foreign => {
                    if now >= peer.turn_at + FOREIGN_TURN {
                        peer.turn_used = 0;
                    }
                    // Somebody else may live there now.
                    if now >= peer.hello_at && now < peer.active_at + QUIET_AFTER {
                        peer.hello_due = Some(Exchange::Ask);
                        peer.hello_at = now + QUIET_BEAT;
                    }
                }
                PeerState::Dead => {}
            }
        }
        for (address, state) in fallen {
            if state == PeerState::Stalled {
                self.peers.get_mut(&address).expect("the peer was just found").state = state;
                self.tell(address, LinkChange::Became(state));
            } else {
                self.become_silent(address, state, now);
            }
        }
    }

    /// When to call [`Links::expire`]; also read the RoCE socket then, and say if it was empty.
    pub fn next_timeout(&self) -> Option<u64> {
        self.peers.values().filter_map(Peer::next_timeout).chain(self.granter.next_timeout()).min()
    }

    /// The next message to send. Call until there is none, after every turn.
    pub fn transmit(&mut self, now: u64) -> Option<(IpAddr, Message)> {
        if let Some((address, grant)) = self.granter.transmit(now)
            && let Some(peer) = self.peers.get(&address)
        {
            let body = Body::Grant(grant);
            return Some((address, peer.message(self.order, body)));
        }
        if !self.due {
            return None;
        }
        let order = self.order;
        for (address, peer) in &mut self.peers {
            if let Some(body) = peer.next_body(now) {
                return Some((*address, peer.message(order, body)));
            }
        }
        self.due = false;
        None
    }

    /// What changed, oldest first.
    pub fn poll_event(&mut self) -> Option<LinkEvent> {
        self.events.pop_front()
    }
}
