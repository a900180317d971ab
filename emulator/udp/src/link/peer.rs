//! What a port knows of one peer.

use super::{BEAT, FOREIGN_TURN, GREET, LEASE, MILLISECOND, PeerState};
use crate::grant::Holder;
use softhca_wire::link::{Body, Exchange, Heartbeat, Incarnation, Message, Order, Pause};

/// How many messages a silent peer gets without a pause between them. Those that it does not read stay in its
/// socket, together with those of all its other peers.
const UNHEARD: u32 = 2;
/// The longest pause between later ones. They fill a socket that nobody reads, so that many peers ask seldom.
const LONGEST_PAUSE: u64 = 2000 * MILLISECOND;
/// What may be on the way to a port of another make.
const FOREIGN_WINDOW: u64 = 64 * 1024;

#[derive(Debug)]
pub(super) struct Peer {
    pub state: PeerState,
    /// Our life on this link: a higher number each time that we forget the peer.
    pub ours: Incarnation,
    /// The peer's, while we are on speaking terms.
    pub theirs: Option<Incarnation>,
    /// It has spoken link control at some time.
    pub speaks: bool,
    /// The order of its frames, as it says.
    pub order: Order,
    pub holder: Holder,
    pub hello_due: Option<Exchange>,
    pub hello_at: u64,
    pub hello_pause: u64,
    /// An unanswered heartbeat is out.
    pub listening: bool,
    pub beat_due: bool,
    pub beat_at: u64,
    pub beat_answer: Option<u64>,
    /// Questions that it got since we heard of it, and when it got the last.
    pub unheard: u32,
    pub asked_at: u64,
    /// How long it has not answered, while we were awake.
    pub silence: u64,
    /// When the last heartbeat that it answered was sent.
    pub leased_at: Option<u64>,
    pub active_at: u64,
    pub pause_due: Option<Pause>,
    /// Sent to a foreign peer since `turn_at`.
    pub turn_used: u64,
    pub turn_at: u64,
}

impl Peer {
    pub fn new(ours: Incarnation, now: u64) -> Peer {
        Peer {
            state: PeerState::Dead,
            ours,
            theirs: None,
            speaks: false,
            order: Order::Kept,
            holder: Holder::new(now),
            hello_due: None,
            hello_at: now,
            hello_pause: GREET,
            listening: false,
            beat_due: false,
            beat_at: now,
            beat_answer: None,
            unheard: 0,
            asked_at: now,
            silence: 0,
            leased_at: None,
            active_at: now,
            pause_due: None,
            turn_used: 0,
            turn_at: now,
        }
    }

    pub fn answers(&self) -> bool {
        matches!(self.state, PeerState::Alive | PeerState::Stalled)
    }

    /// Begins to say HELLO, though not more often than its pauses allow: nobody may be there.
    pub fn greet(&mut self, now: u64) {
        self.state = PeerState::Greeting;
        self.silence = 0;
        self.hello_at = self.hello_at.max(now);
    }

    pub fn leased(&self, now: u64) -> bool {
        self.leased_at.is_some_and(|at| now < at + LEASE)
    }

    /// Forgets everything that was agreed with the peer.
    pub fn forget(&mut self, now: u64) {
        self.theirs = None;
        self.order = Order::Kept;
        self.holder.restart(now);
        self.leased_at = None;
        self.pause_due = None;
        self.listening = false;
        (self.beat_due, self.beat_answer) = (false, None);
    }

    pub fn allowance(&self, now: u64) -> u64 {
        match self.state {
            PeerState::Alive | PeerState::Stalled if self.leased(now) => self.holder.allowance(),
            PeerState::Foreign if now >= self.turn_at + FOREIGN_TURN => FOREIGN_WINDOW,
            PeerState::Foreign => FOREIGN_WINDOW.saturating_sub(self.turn_used),
            _ => 0,
        }
    }

    /// When it may be asked the next question: at once, or after ever longer pauses while it is silent.
    pub fn ask_at(&self) -> u64 {
        match self.unheard.checked_sub(UNHEARD) {
            None => 0,
            Some(more) => self.asked_at + (BEAT << more.min(8)).min(LONGEST_PAUSE),
        }
    }

    pub fn asked(&mut self, now: u64) {
        self.unheard += 1;
        self.asked_at = now;
    }

    pub fn next_timeout(&self) -> Option<u64> {
        match self.state {
            PeerState::Greeting => Some(self.hello_at),
            PeerState::Alive | PeerState::Stalled => {
                let question = (self.beat_due || self.holder.asks()).then(|| self.ask_at());
                [question, self.holder.next_timeout(), Some(self.beat_at)].into_iter().flatten().min()
            }
            PeerState::Foreign if self.turn_used > 0 => Some(self.turn_at + FOREIGN_TURN),
            _ => None,
        }
    }

    pub fn message(&self, order: Order, body: Body) -> Message {
        Message { sender: self.ours, receiver: self.theirs, order, body }
    }

    /// The next thing to say.
    pub fn next_body(&mut self, now: u64) -> Option<Body> {
        if let Some(exchange) = self.hello_due.take() {
            return Some(Body::Hello(exchange));
        }
        if !self.answers() {
            return None;
        }
        if let Some(stamp) = self.beat_answer.take() {
            return Some(Body::Heartbeat(Heartbeat { exchange: Exchange::Answer, stamp }));
        }
        if let Some(pause) = self.pause_due.take() {
            return Some(Body::Pause(pause));
        }
        if now < self.ask_at() {
            return None;
        }
        if std::mem::take(&mut self.beat_due) {
            self.listening = true;
            self.asked(now);
            return Some(Body::Heartbeat(Heartbeat { exchange: Exchange::Ask, stamp: now }));
        }
        let request = self.holder.transmit(now)?;
        self.asked(now);
        Some(Body::Request(request))
    }
}
