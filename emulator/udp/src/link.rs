//! The links of one port: its peers, their state, and how much may be sent to them.
//!
//! A state machine without I/O. The driver passes in the time and what arrives ([`LinkControl::on_message`],
//! [`LinkControl::record_received`], [`LinkControl::on_unreachable`]). It sends the messages of
//! [`LinkControl::transmit`], asks [`LinkControl::may_send`] before every batch, and reads changes from
//! [`LinkControl::poll_event`]. The receive path never waits for a grant.
//!
//! No message changes state unless it carries the [`Token`] that this port gave its sender. The token is a keyed hash
//! of the sender's address and slot, so that a HELLO of a stranger is answered without remembering the stranger.

mod messages;
mod peer;
mod secret;

use crate::PeerPort;
use crate::grant::{GRANT_LEASE, GrantIssuer};
pub use peer::PeerState;
use peer::{
    FOREIGN_WINDOW_PERIOD, HEARTBEAT_INTERVAL, IDLE_AFTER, MILLISECOND, MIN_HELLO_INTERVAL, PeerLink,
};
pub use secret::LinkSecret;
use softhca_engine::{LinkReject, Peer};
use softhca_wire::link_control::{
    Body, ExchangeKind, FrameOrder, Heartbeat, Hello, Incarnation, Message, Pause, Slots, Token, Vacancy,
};
use softhca_wire::{Qpn, QpnSlot, ROCE_PORT};
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::num::NonZeroU64;

/// The most peers of one port. Beyond it, new peers replace dead ones or are refused.
const MAX_PEERS: usize = 1024;
/// The interval of heartbeats on an idle link.
const IDLE_HEARTBEAT_INTERVAL: u64 = 1000 * MILLISECOND;
/// How long a peer may be silent before it is stalled.
const STALLED_AFTER: u64 = 250 * MILLISECOND;
/// How long a port that never sent HELLO may be silent before it is foreign. Most foreign ports are detected at once,
/// because their link control port is closed. A native port may reply late on a network that still resolves its
/// address.
const FOREIGN_AFTER: u64 = 3000 * MILLISECOND;
/// The interval of HELLOs to a foreign port. Linux sends one ICMP error per second to a host, which other processes need
/// to detect the same port.
const FOREIGN_HELLO_INTERVAL: u64 = 5000 * MILLISECOND;
/// The longest interval between two HELLOs to a port that may be native.
const MAX_HELLO_INTERVAL: u64 = 100 * MILLISECOND;
/// The most silence that counts between two calls of `expire`: a port that was stopped itself does not count that
/// time against its peers.
const MAX_CLOCK_STEP: u64 = 200 * MILLISECOND;
/// With this many events waiting for the driver, further pauses are ignored.
const MAX_EVENTS: usize = 4096;
/// The most answers to strangers that wait to be sent.
const MAX_ANSWERS: usize = 256;
/// The most answers to strangers per period: forged messages must not make this port a source of traffic.
const MAX_ANSWERS_PER_PERIOD: u32 = 256;
const ANSWER_PERIOD: u64 = 10 * MILLISECOND;
/// The lowest rate of a link that a peer may pause: no pause lasts longer than 65535 quanta at this rate, 3.4 s.
const MIN_PAUSE_RATE: u64 = 10_000_000;

/// A change of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkChange {
    /// The peer has a new state.
    StateChanged(PeerState),
    /// The peer restarted without its earlier state; it is alive.
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

/// A change of one link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkEvent {
    /// The peer.
    pub peer: PeerPort,
    /// The change.
    pub change: LinkChange,
}

/// The port of a peer that an ICMP message reports as unreachable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnreachablePort {
    /// RoCE, 4791.
    Roce,
    /// Link control, 4792.
    Link,
}

/// All links of one port.
#[derive(Debug)]
pub struct LinkControl {
    incarnation: Incarnation,
    secret: LinkSecret,
    /// The QPNs of this port.
    slot: QpnSlot,
    dead_after: u64,
    peers: BTreeMap<PeerPort, PeerLink>,
    /// The senders that share their address, by the port that they send from.
    senders: BTreeMap<(IpAddr, u16), PeerPort>,
    grant_issuer: GrantIssuer,
    /// The addresses of this port.
    own_addresses: Vec<IpAddr>,
    /// Traffic to them needs no link.
    keeps_local: bool,
    /// This machine, if packets between its ports need no ICRC.
    machine: Option<NonZeroU64>,
    /// Every peer is a foreign one.
    is_disabled: bool,
    /// The order in which this port sends frames.
    transmit_order: FrameOrder,
    events: VecDeque<LinkEvent>,
    expired_at: u64,
    /// A peer may have a message to send.
    has_pending_messages: bool,
    /// HELLOs to ports that are not known yet.
    answers: VecDeque<(PeerPort, Message)>,
    answer_period_began_at: u64,
    answers_in_period: u32,
}

impl LinkControl {
    /// The default time that a peer may be silent before it is dead: ten seconds. A process that shares its address with
    /// others may be silent for longer, as long as slot 0 of the address is not.
    pub const DEAD_AFTER: u64 = 10_000 * MILLISECOND;

    /// The links of a port that starts at `now` and can grant [`budget`](crate::grant_budget) bytes. A later start
    /// needs a higher incarnation, such as the wall clock in nanoseconds, and another secret.
    pub fn new(incarnation: Incarnation, secret: LinkSecret, budget: u64, now: u64) -> LinkControl {
        LinkControl {
            incarnation,
            secret,
            slot: QpnSlot::ALL,
            dead_after: Self::DEAD_AFTER,
            peers: BTreeMap::new(),
            senders: BTreeMap::new(),
            grant_issuer: GrantIssuer::new(budget, now),
            own_addresses: Vec::new(),
            keeps_local: false,
            machine: None,
            is_disabled: false,
            transmit_order: FrameOrder::InOrder,
            events: VecDeque::new(),
            expired_at: now,
            has_pending_messages: false,
            answers: VecDeque::new(),
            answer_period_began_at: now,
            answers_in_period: 0,
        }
    }

    /// Makes this the port of one process of a host.
    pub fn set_slot(&mut self, slot: QpnSlot) {
        self.slot = slot;
    }

    /// The QPNs of this port.
    pub fn slot(&self) -> QpnSlot {
        self.slot
    }

    /// How many high bits of the QPNs at an address are the slot, as slot 0 of the host has announced. Until then
    /// every QPN there counts as one of slot 0.
    pub fn slot_bits(&self, address: IpAddr) -> u8 {
        if self.slot.bits > 0 && self.own_addresses.contains(&address) {
            return self.slot.bits;
        }
        self.peers.get(&address.into()).map_or(0, |peer| peer.slot_bits)
    }

    /// The port of the process with this queue pair.
    pub fn port_of(&self, address: IpAddr, qpn: Qpn) -> PeerPort {
        PeerPort { address, slot: QpnSlot::of(qpn, self.slot_bits(address)).number }
    }

    /// This port, if it has the queue pair and keeps its traffic. Packets to queue pair 1 may be for another process.
    #[inline]
    pub fn own_port(&self, address: IpAddr, qpn: Qpn) -> Option<PeerPort> {
        let slot = self.slot.number;
        let is_own = self.keeps_local
            && qpn.value() > Qpn::GSI.value()
            && QpnSlot::of(qpn, self.slot.bits).number == slot
            && self.own_addresses.contains(&address);
        is_own.then_some(PeerPort { address, slot })
    }

    /// The port that sends from this address and UDP port.
    pub fn sender(&self, address: IpAddr, source_port: u16) -> PeerPort {
        match source_port {
            ROCE_PORT => address.into(),
            _ => self.senders.get(&(address, source_port)).copied().unwrap_or(address.into()),
        }
    }

    /// The queue pairs of a port.
    pub fn queue_pairs_of(&self, port: PeerPort) -> Peer {
        let bits = match port.slot {
            0 => self.slot_bits(port.address),
            // Slot 0 may be unknown.
            _ => self.peers.get(&port).map_or(0, |peer| peer.slot_bits),
        };
        Peer { address: port.address, slot: QpnSlot { number: port.slot, bits } }
    }

    /// Treats every peer as a foreign one, and sends and accepts no messages.
    pub fn disable(&mut self) {
        self.is_disabled = true;
    }

    /// Sets how long a peer may be silent before it is dead; at least a second, so that no grant outlives it.
    pub fn set_dead_after(&mut self, nanoseconds: u64) {
        self.dead_after = nanoseconds.max(2 * GRANT_LEASE);
    }

    /// The addresses of this port. With `keeps_local`, traffic to them stays off the sockets: to this port inside the
    /// HCA, and to other processes, except the daemon, in rings. Neither has a link or needs grants.
    pub fn set_own_addresses(&mut self, addresses: impl IntoIterator<Item = IpAddr>, keeps_local: bool) {
        self.own_addresses.extend(addresses);
        self.keeps_local = keeps_local;
    }

    /// Packets without an ICRC are accepted from ports on this machine, and sent to those that accept them.
    pub fn set_machine(&mut self, machine: Option<NonZeroU64>) {
        self.machine = machine;
    }

    /// Whether packets to and from a port need no ICRC: both are on one machine, and both have said that they accept them.
    pub fn offloads_icrc(&self, peer: PeerPort) -> bool {
        self.machine.is_some()
            && self.peers.get(&peer).is_some_and(|peer| peer.remote_machine == self.machine)
    }

    /// Whether traffic to a port stays inside the HCA.
    pub fn is_internal(&self, port: PeerPort) -> bool {
        port.slot == self.slot.number && self.is_local(port)
    }

    /// Whether a port has no link to this one: it is in this HCA, or rings lead to it.
    pub fn is_local(&self, port: PeerPort) -> bool {
        let is_reached = port.slot == self.slot.number || port.slot != 0 && self.slot.number != 0;
        self.keeps_local && is_reached && self.own_addresses.contains(&port.address)
    }

    /// Whether the host's traffic to itself stays in memory.
    pub fn keeps_local(&self) -> bool {
        self.keeps_local
    }

    /// Whether another process has slot 0 of this address, and hands packets over.
    pub fn has_other_slot_0(&self, address: IpAddr) -> bool {
        self.keeps_local && self.slot.number != 0 && self.own_addresses.contains(&address)
    }

    /// From now on a fault rule sends frames out of PSN order. No frame leaves before its peer has been informed.
    pub fn announce_reordering(&mut self) {
        self.transmit_order = FrameOrder::Reordered;
        self.has_pending_messages = true;
        for peer in self.peers.values_mut().filter(|peer| peer.is_established()) {
            (peer.lease_renewed_at, peer.min_reply_stamp) = (None, u64::MAX);
            (peer.heartbeat_due, peer.unanswered_probes) = (true, 0);
        }
    }

    /// Frames leave in PSN order again. A peer that does not know yet only refrains from reordering.
    pub fn announce_in_order(&mut self) {
        self.transmit_order = FrameOrder::InOrder;
    }

    /// Whether `peer` sends in PSN order, so that frames in another order were reordered on the way.
    pub fn transmits_in_order(&self, peer: PeerPort) -> bool {
        self.peers
            .get(&peer)
            .is_some_and(|peer| peer.is_established() && peer.remote_order == FrameOrder::InOrder)
    }

    /// The grants that this port has issued.
    pub fn grant_issuer(&self) -> &GrantIssuer {
        &self.grant_issuer
    }

    /// The state of `peer`, if it is known.
    pub fn state(&self, peer: PeerPort) -> Option<PeerState> {
        self.peers.get(&peer).map(|peer| peer.state)
    }

    /// Whether `peer` has proved that it has link control. An unknown peer may be foreign.
    pub fn is_native(&self, peer: PeerPort) -> bool {
        self.peers
            .get(&peer)
            .is_some_and(|peer| peer.supports_link_control && peer.state != PeerState::Foreign)
    }

    /// Whether HELLO is being sent to a peer that may be foreign.
    pub fn is_asking(&self) -> bool {
        let mut peers = self.peers.values();
        peers.any(|peer| peer.state == PeerState::Probing && !peer.supports_link_control)
    }

    /// The peer, inserted if it is new; `None` if there are too many, or if the address is internal.
    fn peer_or_insert(&mut self, peer: PeerPort, now: u64) -> Option<&mut PeerLink> {
        if self.is_local(peer) {
            return None;
        }
        if self.peers.len() >= MAX_PEERS && !self.peers.contains_key(&peer) {
            // A dead peer, or the one of those that this port never sent to that was silent for longest.
            let evictable =
                self.peers.iter().filter(|(_, peer)| peer.state == PeerState::Dead || !peer.is_used);
            let oldest = evictable.min_by_key(|(_, peer)| (peer.state != PeerState::Dead, peer.last_used_at));
            let removed = *oldest?.0;
            self.grant_issuer.remove_sender(removed, now);
            let link = self.peers.remove(&removed).expect("the peer was just found");
            self.senders.retain(|_, sender| *sender != removed);
            // Neither this peer nor its successor may see an earlier incarnation of this port again.
            self.incarnation = self.incarnation.max(link.local_incarnation.next());
        }
        self.has_pending_messages = true;
        let ours = self.incarnation;
        Some(self.peers.entry(peer).or_insert_with(|| PeerLink::new(ours, now)))
    }

    fn emit(&mut self, peer: PeerPort, change: LinkChange) {
        self.events.push_back(LinkEvent { peer, change });
    }

    /// Monitors `peer`, because traffic waits for it. Starts to probe a peer that is unknown or dead.
    pub fn watch(&mut self, peer: PeerPort, now: u64) {
        let is_disabled = self.is_disabled;
        if let Some(link) = self.peer_or_insert(peer, now) {
            link.last_used_at = now;
            if is_disabled && link.state == PeerState::Dead {
                link.state = PeerState::Foreign;
                return self.emit(peer, LinkChange::StateChanged(PeerState::Foreign));
            }
            let peer = link;
            match peer.state {
                PeerState::Dead => peer.start_probing(now),
                PeerState::Alive | PeerState::Stalled => {
                    // New traffic must not wait for the next heartbeat of an idle link.
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

    /// The charge that may be sent to `peer` now, to limit batches by.
    pub fn allowance(&self, peer: PeerPort, now: u64) -> u64 {
        self.peers.get(&peer).map_or(0, |peer| peer.allowance(now))
    }

    /// Whether a frame or batch of this charge may be sent to `peer` now. If not, requests a grant for one frame; ask
    /// again after a message or a timeout.
    pub fn may_send(&mut self, peer: PeerPort, charge: u64, now: u64) -> bool {
        if self.allowance(peer, now) >= charge {
            return true;
        }
        self.watch(peer, now);
        if let Some(peer) = self.peers.get_mut(&peer) {
            peer.is_used = true;
            if peer.state != PeerState::Foreign {
                peer.grant_balance.may_send(charge);
            }
        }
        false
    }

    /// Counts what the socket has accepted.
    ///
    /// # Panics
    /// If the allowance does not cover it.
    pub fn record_sent(&mut self, peer: PeerPort, charge: u64, now: u64) {
        let peer = self.peers.get_mut(&peer).expect("the peer is known");
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

    /// Counts what was sent to a foreign peer that acknowledges it: the HCA limits that.
    pub fn record_clocked(&mut self, peer: PeerPort, charge: u64, now: u64) {
        if let Some(peer) = self.peers.get_mut(&peer) {
            (peer.last_used_at, peer.is_used) = (now, true);
            peer.grant_balance.record_ungranted(charge);
        }
    }

    /// Sends a priority flow control frame once to every process of a host, merged with one that is still pending. A frame
    /// to the port itself takes effect at once.
    pub fn send_pause(&mut self, host: IpAddr, pause: Pause, now: u64) {
        if self.is_internal(host.into()) {
            return self.emit(host.into(), LinkChange::PauseReceived(pause));
        }
        let mut ports = self.peers.range(PeerPort::all_of(host));
        if !ports.any(|(_, peer)| peer.is_established()) {
            let _ = self.peer_or_insert(host.into(), now);
        }
        for (port, peer) in self.peers.range_mut(PeerPort::all_of(host)) {
            if peer.is_established() || port.slot == 0 {
                peer.pending_pause.get_or_insert_default().merge(&pause);
                self.has_pending_messages = true;
            }
        }
    }

    /// Whether link control with `peer` is established.
    pub fn is_established(&self, peer: PeerPort) -> bool {
        self.peers.get(&peer).is_some_and(PeerLink::is_established)
    }

    /// Keeps this much of what was granted to and received from `peer` in use: it makes no room for new grants.
    pub fn add_buffered(&mut self, peer: PeerPort, granted: u64) {
        self.grant_issuer.add_buffered(peer, granted);
    }

    /// Releases what was received from the processes of a host, except for at most `kept` bytes.
    pub fn limit_buffered(&mut self, host: IpAddr, kept: u64) {
        self.grant_issuer.limit_buffered(host, kept);
    }

    /// Counts a chunk that was read from the RoCE socket. Returns how much of it was granted.
    pub fn record_received(&mut self, peer: PeerPort, charge: u64, now: u64) -> u64 {
        let granted = self.grant_issuer.record_received(peer, charge);
        match self.peers.get_mut(&peer) {
            Some(known) if known.state != PeerState::Dead => {
                known.last_used_at = now;
                known.foreign_window_used = 0;
                if known.is_established() {
                    self.on_peer_activity(peer);
                }
            }
            // It may take this port for a foreign one: send HELLO.
            _ => self.watch(peer, now),
        }
        granted
    }

    /// The RoCE socket is empty.
    pub fn on_socket_empty(&mut self, now: u64) {
        self.grant_issuer.on_socket_empty(now);
    }

    /// An established peer sent something.
    fn on_peer_activity(&mut self, address: PeerPort) {
        if let Some(peer) = self.peers.get_mut(&address) {
            peer.silent_for = 0;
            peer.unanswered_probes = 0;
            if peer.state == PeerState::Stalled {
                peer.state = PeerState::Alive;
                self.emit(address, LinkChange::StateChanged(PeerState::Alive));
            }
        }
    }

    /// Processes an ICMP port unreachable message. Read the error queues before the messages that arrived after them.
    pub fn on_unreachable(&mut self, peer: PeerPort, port: UnreachablePort, now: u64) {
        let Some(known) = self.peers.get(&peer) else { return };
        let state = match (port, known.state) {
            (_, PeerState::Dead) | (UnreachablePort::Link, PeerState::Foreign) => return,
            // The port may be foreign. If it does not exist, datagrams are lost as on any network, and the RoCE port
            // will report it.
            (UnreachablePort::Link, PeerState::Probing) => PeerState::Foreign,
            _ => PeerState::Dead,
        };
        self.close(peer, state, now);
    }

    /// Discards the state of a link.
    fn close(&mut self, address: PeerPort, state: PeerState, now: u64) {
        if let Some(peer) = self.peers.get_mut(&address) {
            peer.reset(now);
            peer.local_incarnation = peer.local_incarnation.next();
            peer.state = state;
            peer.foreign_window_used = 0;
            self.grant_issuer.remove_sender(address, now);
            self.emit(address, LinkChange::StateChanged(state));
        }
    }

    /// Processes the timers that are due at `now`. Pass in what has arrived first, so that no peer is blamed for a
    /// delay of this process.
    pub fn expire(&mut self, now: u64) {
        let step = now.saturating_sub(self.expired_at).min(MAX_CLOCK_STEP);
        self.expired_at = now;
        self.has_pending_messages = true;
        let dead_after = self.dead_after;
        let mut lost_peers = Vec::new();
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
                        lost_peers.push((*address, PeerState::Foreign));
                    } else if peer.silent_for >= dead_after {
                        lost_peers.push((*address, PeerState::Dead));
                    }
                }
                PeerState::Alive | PeerState::Stalled => {
                    if peer.awaiting_heartbeat_reply {
                        peer.silent_for += step;
                    }
                    if now >= peer.next_heartbeat_at {
                        let is_idle = now >= peer.last_used_at + IDLE_AFTER && !peer.awaiting_heartbeat_reply;
                        peer.heartbeat_due = true;
                        peer.next_heartbeat_at =
                            now + if is_idle { IDLE_HEARTBEAT_INTERVAL } else { HEARTBEAT_INTERVAL };
                    }
                    peer.grant_balance.expire(now);
                    if peer.silent_for >= dead_after {
                        lost_peers.push((*address, PeerState::Dead));
                    } else if peer.silent_for >= STALLED_AFTER && peer.state == PeerState::Alive {
                        lost_peers.push((*address, PeerState::Stalled));
                    }
                }
                PeerState::Foreign => {
                    if now >= peer.foreign_window_opened_at + FOREIGN_WINDOW_PERIOD {
                        peer.foreign_window_used = 0;
                    }
                    // Another port may be there now.
                    if now >= peer.next_hello_at {
                        let is_used = now < peer.last_used_at + IDLE_AFTER;
                        peer.pending_hello = is_used.then_some(ExchangeKind::Query);
                        peer.next_hello_at = now + FOREIGN_HELLO_INTERVAL;
                    }
                }
                PeerState::Dead => {}
            }
        }
        // A process that does not run, in a debugger for instance, is not dead while its host answers: slot 0 reports its end.
        lost_peers.retain(|(peer, state)| {
            let host = self.peers.get(&peer.address.into());
            let is_stopped = peer.slot != 0
                && self.peers[peer].state == PeerState::Stalled
                && host.is_some_and(PeerLink::is_established);
            *state != PeerState::Dead || !is_stopped
        });
        for (address, state) in lost_peers {
            if state == PeerState::Stalled {
                self.peers.get_mut(&address).expect("the peer was just found").state = state;
                self.emit(address, LinkChange::StateChanged(state));
            } else {
                self.close(address, state, now);
            }
        }
    }

    /// When to call [`LinkControl::expire`], and to read the RoCE socket and report whether it is empty.
    #[inline]
    pub fn next_timeout(&self) -> Option<u64> {
        if self.peers.is_empty() { self.grant_issuer.next_timeout() } else { self.first_timeout() }
    }

    fn first_timeout(&self) -> Option<u64> {
        self.peers.values().filter_map(PeerLink::next_timeout).chain(self.grant_issuer.next_timeout()).min()
    }

    /// The next message to send. Call it after every poll until it returns `None`.
    #[inline]
    pub fn transmit(&mut self, now: u64) -> Option<(PeerPort, Message)> {
        let may_transmit =
            self.has_pending_messages || !self.answers.is_empty() || self.grant_issuer.may_transmit();
        if may_transmit { self.next_message(now) } else { None }
    }

    fn next_message(&mut self, now: u64) -> Option<(PeerPort, Message)> {
        if let Some((address, grant)) = self.grant_issuer.transmit(now)
            && let Some(peer) = self.peers.get(&address)
        {
            let slots = self.slots(address);
            return Some((address, peer.message(slots, self.transmit_order, Body::Grant(grant))));
        }
        if let Some(answer) = self.answers.pop_front() {
            return Some(answer);
        }
        if !self.has_pending_messages || self.is_disabled {
            return None;
        }
        let LinkControl { peers, secret, grant_issuer, transmit_order, slot, machine, .. } = self;
        for (address, peer) in peers {
            if let Some(mut body) = peer.next_message(now) {
                match &mut body {
                    Body::Hello(hello) => {
                        (hello.token, hello.budget) = (secret.token(*address), grant_issuer.budget());
                        hello.machine = *machine;
                    }
                    Body::Heartbeat(heartbeat) => heartbeat.returned = grant_issuer.returned(*address),
                    _ => {}
                }
                return Some((*address, peer.message(slots(*slot, *address), *transmit_order, body)));
            }
        }
        self.has_pending_messages = false;
        None
    }

    fn slots(&self, peer: PeerPort) -> Slots {
        slots(self.slot, peer)
    }

    /// Whether there are unread changes.
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// The oldest unread change.
    pub fn poll_event(&mut self) -> Option<LinkEvent> {
        self.events.pop_front()
    }
}

/// The slots of a link to `peer`. The driver sets the port that it sends from.
fn slots(own: QpnSlot, peer: PeerPort) -> Slots {
    Slots { source: own.number, destination: peer.slot, bits: own.bits, source_port: ROCE_PORT }
}

#[cfg(test)]
mod tests;
