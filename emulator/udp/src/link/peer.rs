//! The link to one peer.

use crate::grant::{GRANT_LEASE, GrantBalance};
use softhca_wire::link_control::{
    Body, ExchangeKind, FrameOrder, Heartbeat, Hello, Incarnation, Message, Pause, Slots, Token, Vacancy,
};
use std::num::NonZeroU64;

pub(super) const MILLISECOND: u64 = 1_000_000;
/// The interval of heartbeats on a link in use.
pub(super) const HEARTBEAT_INTERVAL: u64 = 100 * MILLISECOND;
/// How long after its last use a link is idle.
pub(super) const IDLE_AFTER: u64 = 2000 * MILLISECOND;
/// The first interval between two HELLOs.
pub(super) const MIN_HELLO_INTERVAL: u64 = MILLISECOND;
/// How long until what a foreign port does not acknowledge counts as received: datagrams, READ responses.
pub(super) const FOREIGN_WINDOW_PERIOD: u64 = MILLISECOND;
/// How many probes a silent peer gets without an interval. Unread ones stay in its socket, together with those of all
/// its other peers.
const MAX_UNANSWERED_BURST: u32 = 2;
/// The longest interval between further probes. They fill a socket that is not read, so many peers must probe rarely.
const MAX_PROBE_INTERVAL: u64 = 2000 * MILLISECOND;
/// The most data in flight to a foreign port that the port does not acknowledge.
const FOREIGN_WINDOW: u64 = 64 * 1024;

/// The state of a peer port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerState {
    /// No contact yet, or none since it was dead. HELLO is being sent.
    Probing,
    /// It replies.
    Alive,
    /// It does not reply now. Timers towards it stop.
    Stalled,
    /// It has not replied for too long, or its port is closed. Queue pairs connected to it fail.
    Dead,
    /// It has no link control: rxe, a hardware HCA, or no port at all. Delivery is not guaranteed.
    Foreign,
}

#[derive(Debug)]
pub(super) struct PeerLink {
    pub state: PeerState,
    /// This port's incarnation on the link, increased each time the link is reset.
    pub local_incarnation: Incarnation,
    /// The peer's incarnation while the link is established.
    pub remote_incarnation: Option<Incarnation>,
    /// The token that the peer gave this port.
    pub remote_token: Option<Token>,
    /// How many high bits of the QPNs of its host are the slot.
    pub slot_bits: u8,
    /// The peer's whole budget of grants.
    pub remote_budget: u64,
    /// The peer's machine, if it accepts packets without an ICRC from ports on the same one.
    pub remote_machine: Option<NonZeroU64>,
    /// This port has sent to it, or wants to.
    pub is_used: bool,
    /// It has sent a link control message before.
    pub supports_link_control: bool,
    /// The order in which the peer says it sends frames.
    pub remote_order: FrameOrder,
    pub grant_balance: GrantBalance,
    pub pending_hello: Option<ExchangeKind>,
    pub next_hello_at: u64,
    pub hello_interval: u64,
    /// A heartbeat is unanswered.
    pub awaiting_heartbeat_reply: bool,
    pub heartbeat_due: bool,
    pub next_heartbeat_at: u64,
    pub pending_heartbeat_reply: Option<u64>,
    /// Probes since the peer was last active, and the time of the last.
    pub unanswered_probes: u32,
    pub last_probe_at: u64,
    /// How long it has not replied while this process was running.
    pub silent_for: u64,
    /// When the last answered heartbeat was sent.
    pub lease_renewed_at: Option<u64>,
    /// Replies to earlier heartbeats do not renew the lease: the peer did not know the order of frames yet. At its
    /// maximum until the next heartbeat leaves.
    pub min_reply_stamp: u64,
    pub last_used_at: u64,
    pub pending_pause: Option<Pause>,
    pub pending_vacancy: Option<Vacancy>,
    /// Sent to a foreign peer since `foreign_window_opened_at`.
    pub foreign_window_used: u64,
    pub foreign_window_opened_at: u64,
}

impl PeerLink {
    pub fn new(ours: Incarnation, now: u64) -> PeerLink {
        PeerLink {
            state: PeerState::Dead,
            local_incarnation: ours,
            remote_incarnation: None,
            remote_token: None,
            slot_bits: 0,
            remote_budget: 0,
            remote_machine: None,
            is_used: false,
            supports_link_control: false,
            remote_order: FrameOrder::InOrder,
            grant_balance: GrantBalance::new(now),
            pending_hello: None,
            next_hello_at: now,
            hello_interval: MIN_HELLO_INTERVAL,
            awaiting_heartbeat_reply: false,
            heartbeat_due: false,
            next_heartbeat_at: now,
            pending_heartbeat_reply: None,
            unanswered_probes: 0,
            last_probe_at: now,
            silent_for: 0,
            lease_renewed_at: None,
            min_reply_stamp: 0,
            last_used_at: now,
            pending_pause: None,
            pending_vacancy: None,
            foreign_window_used: 0,
            foreign_window_opened_at: now,
        }
    }

    pub fn is_established(&self) -> bool {
        matches!(self.state, PeerState::Alive | PeerState::Stalled)
    }

    /// Starts to send HELLO, at most once per interval: the port may not exist.
    pub fn start_probing(&mut self, now: u64) {
        self.state = PeerState::Probing;
        self.silent_for = 0;
        self.next_hello_at = self.next_hello_at.max(now);
    }

    pub fn has_lease(&self, now: u64) -> bool {
        self.lease_renewed_at.is_some_and(|at| now < at + GRANT_LEASE)
    }

    /// Discards everything agreed with the peer.
    pub fn reset(&mut self, now: u64) {
        (self.remote_incarnation, self.remote_token) = (None, None);
        self.remote_order = FrameOrder::InOrder;
        self.grant_balance.restart(now);
        (self.lease_renewed_at, self.min_reply_stamp) = (None, 0);
        (self.pending_pause, self.pending_vacancy) = (None, None);
        self.awaiting_heartbeat_reply = false;
        (self.heartbeat_due, self.pending_heartbeat_reply) = (false, None);
    }

    pub fn allowance(&self, now: u64) -> u64 {
        match self.state {
            PeerState::Alive | PeerState::Stalled if self.has_lease(now) => self.grant_balance.allowance(),
            PeerState::Foreign if now >= self.foreign_window_opened_at + FOREIGN_WINDOW_PERIOD => {
                FOREIGN_WINDOW
            }
            PeerState::Foreign => FOREIGN_WINDOW.saturating_sub(self.foreign_window_used),
            _ => 0,
        }
    }

    /// When the next probe may be sent: at once, or after growing intervals while the peer is silent.
    pub fn next_probe_at(&self) -> u64 {
        match self.unanswered_probes.checked_sub(MAX_UNANSWERED_BURST) {
            None => 0,
            Some(more) => self.last_probe_at + (HEARTBEAT_INTERVAL << more.min(8)).min(MAX_PROBE_INTERVAL),
        }
    }

    pub fn record_probe(&mut self, now: u64) {
        self.unanswered_probes += 1;
        self.last_probe_at = now;
    }

    pub fn next_timeout(&self) -> Option<u64> {
        match self.state {
            PeerState::Probing => Some(self.next_hello_at),
            PeerState::Alive | PeerState::Stalled => {
                let probe =
                    (self.heartbeat_due || self.grant_balance.has_request()).then(|| self.next_probe_at());
                [probe, self.grant_balance.next_timeout(), Some(self.next_heartbeat_at)]
                    .into_iter()
                    .flatten()
                    .min()
            }
            PeerState::Foreign => {
                let pacing = self.foreign_window_opened_at + FOREIGN_WINDOW_PERIOD;
                let is_idle = self.next_hello_at >= self.last_used_at + IDLE_AFTER;
                let hello = (!is_idle).then_some(self.next_hello_at);
                [(self.foreign_window_used > 0).then_some(pacing), hello].into_iter().flatten().min()
            }
            PeerState::Dead => None,
        }
    }

    pub fn message(&self, slots: Slots, order: FrameOrder, body: Body) -> Message {
        Message {
            sender: self.local_incarnation,
            receiver: self.remote_incarnation,
            token: self.remote_token,
            slots,
            frame_order: order,
            body,
        }
    }

    /// The next message to send, without what only the port knows.
    pub fn next_message(&mut self, now: u64) -> Option<Body> {
        if let Some(exchange) = self.pending_hello.take() {
            return Some(Body::Hello(Hello { exchange, token: Token::new(0), budget: 0, machine: None }));
        }
        if !self.is_established() {
            return None;
        }
        if let Some(stamp) = self.pending_heartbeat_reply.take() {
            return Some(Body::Heartbeat(Heartbeat { exchange: ExchangeKind::Reply, stamp, returned: 0 }));
        }
        if let Some(pause) = self.pending_pause.take() {
            return Some(Body::Pause(pause));
        }
        if let Some(vacancy) = self.pending_vacancy.take() {
            return Some(Body::Vacancy(vacancy));
        }
        if now < self.next_probe_at() {
            return None;
        }
        if std::mem::take(&mut self.heartbeat_due) {
            self.awaiting_heartbeat_reply = true;
            self.min_reply_stamp = self.min_reply_stamp.min(now);
            self.record_probe(now);
            let exchange = ExchangeKind::Query;
            return Some(Body::Heartbeat(Heartbeat { exchange, stamp: now, returned: 0 }));
        }
        let request = self.grant_balance.transmit(now)?;
        self.record_probe(now);
        Some(Body::Request(request))
    }
}
