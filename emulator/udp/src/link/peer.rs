//! What a port knows of one peer.

use super::{
    FOREIGN_WINDOW_PERIOD, GRANT_LEASE, HEARTBEAT_INTERVAL, MILLISECOND, MIN_HELLO_INTERVAL, PeerState,
};
use crate::grant::GrantBalance;
use softhca_wire::link_control::{Body, ExchangeKind, FrameOrder, Heartbeat, Incarnation, Message, Pause};

/// How many messages a silent peer gets without a pause between them. Those that it does not read stay in its
/// socket, together with those of all its other peers.
const MAX_UNANSWERED_BURST: u32 = 2;
/// The longest pause between later ones. They fill a socket that nobody reads, so that many peers ask seldom.
const MAX_PROBE_INTERVAL: u64 = 2000 * MILLISECOND;
/// What may be on the way to a port of another make.
const FOREIGN_WINDOW: u64 = 64 * 1024;

#[derive(Debug)]
pub(super) struct PeerLink {
    pub state: PeerState,
    /// Our life on this link: a higher number each time that we forget the peer.
    pub local_incarnation: Incarnation,
    /// The peer's, while we are on speaking terms.
    pub remote_incarnation: Option<Incarnation>,
    /// It has spoken link control at some time.
    pub supports_link_control: bool,
    /// The order of its frames, as it says.
    pub remote_order: FrameOrder,
    pub grant_balance: GrantBalance,
    pub pending_hello: Option<ExchangeKind>,
    pub next_hello_at: u64,
    pub hello_interval: u64,
    /// An unanswered heartbeat is out.
    pub awaiting_heartbeat_reply: bool,
    pub heartbeat_due: bool,
    pub next_heartbeat_at: u64,
    pub pending_heartbeat_reply: Option<u64>,
    /// Questions that it got since we heard of it, and when it got the last.
    pub unanswered_probes: u32,
    pub last_probe_at: u64,
    /// How long it has not answered, while we were awake.
    pub silent_for: u64,
    /// When the last heartbeat that it answered was sent.
    pub lease_renewed_at: Option<u64>,
    pub last_used_at: u64,
    pub pending_pause: Option<Pause>,
    /// Sent to a foreign peer since `turn_at`.
    pub foreign_window_used: u64,
    pub foreign_window_opened_at: u64,
}

impl PeerLink {
    pub fn new(ours: Incarnation, now: u64) -> PeerLink {
        PeerLink {
            state: PeerState::Dead,
            local_incarnation: ours,
            remote_incarnation: None,
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
            last_used_at: now,
            pending_pause: None,
            foreign_window_used: 0,
            foreign_window_opened_at: now,
        }
    }

    pub fn is_established(&self) -> bool {
        matches!(self.state, PeerState::Alive | PeerState::Stalled)
    }

    /// Begins to say HELLO, though not more often than its pauses allow: nobody may be there.
    pub fn start_probing(&mut self, now: u64) {
        self.state = PeerState::Probing;
        self.silent_for = 0;
        self.next_hello_at = self.next_hello_at.max(now);
    }

    pub fn has_lease(&self, now: u64) -> bool {
        self.lease_renewed_at.is_some_and(|at| now < at + GRANT_LEASE)
    }

    /// Forgets everything that was agreed with the peer.
    pub fn reset(&mut self, now: u64) {
        self.remote_incarnation = None;
        self.remote_order = FrameOrder::InOrder;
        self.grant_balance.restart(now);
        self.lease_renewed_at = None;
        self.pending_pause = None;
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

    /// When it may be asked the next question: at once, or after ever longer pauses while it is silent.
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
                let question =
                    (self.heartbeat_due || self.grant_balance.has_request()).then(|| self.next_probe_at());
                [question, self.grant_balance.next_timeout(), Some(self.next_heartbeat_at)]
                    .into_iter()
                    .flatten()
                    .min()
            }
            PeerState::Foreign if self.foreign_window_used > 0 => {
                Some(self.foreign_window_opened_at + FOREIGN_WINDOW_PERIOD)
            }
            _ => None,
        }
    }

    pub fn message(&self, order: FrameOrder, body: Body) -> Message {
        Message {
            sender: self.local_incarnation,
            receiver: self.remote_incarnation,
            frame_order: order,
            body,
        }
    }

    /// The next thing to say.
    pub fn next_message(&mut self, now: u64) -> Option<Body> {
        if let Some(exchange) = self.pending_hello.take() {
            return Some(Body::Hello(exchange));
        }
        if !self.is_established() {
            return None;
        }
        if let Some(stamp) = self.pending_heartbeat_reply.take() {
            return Some(Body::Heartbeat(Heartbeat { exchange: ExchangeKind::Reply, stamp }));
        }
        if let Some(pause) = self.pending_pause.take() {
            return Some(Body::Pause(pause));
        }
        if now < self.next_probe_at() {
            return None;
        }
        if std::mem::take(&mut self.heartbeat_due) {
            self.awaiting_heartbeat_reply = true;
            self.record_probe(now);
            return Some(Body::Heartbeat(Heartbeat { exchange: ExchangeKind::Query, stamp: now }));
        }
        let request = self.grant_balance.transmit(now)?;
        self.record_probe(now);
        Some(Body::Request(request))
    }
}
