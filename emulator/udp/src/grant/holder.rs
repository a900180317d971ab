//! What a sender has been granted by one receiver.

use super::{LARGEST_CHARGE, MILLISECOND, PRESS};
use softhca_wire::link::{Grant, Request};

/// How long a sender waits for an answer, at first and at most.
const PATIENCE: u64 = MILLISECOND;
const MOST_PATIENCE: u64 = 64 * MILLISECOND;
/// How long grants that were urgently asked for may lie unused.
const HOLD: u64 = 50 * MILLISECOND;
/// How long an idle sender keeps its share.
const IDLE: u64 = 1000 * MILLISECOND;
/// How far ahead a busy sender asks. More than any buffer, so that receivers keep granting by themselves.
const APPETITE: u64 = 1 << 28;

/// The sending side: what one peer has granted.
#[derive(Debug)]
pub struct Holder {
    granted: u64,
    consumed: u64,
    returned: u64,
    /// How much of `returned` the receiver knows.
    returned_known: u64,
    wanted: u64,
    keep: u64,
    /// The charge of the frame that waits, or zero.
    need: u64,
    /// Since when there is enough for it.
    satisfied_at: Option<u64>,
    used_at: u64,
    /// When the receiver was told all this.
    told_at: Option<u64>,
    ask: bool,
    ask_again_at: Option<u64>,
    patience: u64,
}

impl Holder {
    /// A holder of nothing.
    pub fn new(now: u64) -> Holder {
        Holder {
            granted: 0,
            consumed: 0,
            returned: 0,
            returned_known: 0,
            wanted: 0,
            keep: u64::MAX,
            need: 0,
            satisfied_at: None,
            used_at: now,
            told_at: None,
            ask: false,
            ask_again_at: None,
            patience: PATIENCE,
        }
    }

    /// Forgets everything but what waits and what was sent: the peer knows nothing of us any more, and the last of
    /// what we sent may be in its present life's way.
    pub fn restart(&mut self, now: u64) {
        let Holder { need, consumed, .. } = *self;
        *self = Holder { need, consumed, granted: consumed, ask: need > 0, ..Holder::new(now) };
    }

    /// How much charge may be sent now.
    pub fn allowance(&self) -> u64 {
        self.granted - self.spent()
    }

    fn spent(&self) -> u64 {
        self.consumed + self.returned
    }

    /// Whether a frame or a run of this charge may be sent now. If not, asks for more; only up to
    /// [`LARGEST_CHARGE`] is sure to come, so cut longer runs to the [`Holder::allowance`].
    pub fn may_send(&mut self, charge: u64) -> bool {
        if charge <= self.allowance() {
            return true;
        }
        let need = charge.min(LARGEST_CHARGE);
        if need > self.allowance() {
            if self.need <= self.allowance() {
                self.patience = PATIENCE;
                self.ask = true;
                self.need = need;
            }
            // What is enough for the least of those that wait is used.
            self.need = need.min(self.need);
            self.satisfied_at = None;
        }
        false
    }

    /// Counts what the socket has taken.
    ///
    /// # Panics
    /// If that was not allowed.
    pub fn sent(&mut self, charge: u64, now: u64) {
        assert!(charge <= self.allowance(), "nothing is sent without a grant");
        self.consumed += charge;
        self.used_at = now;
        self.need = 0;
        self.satisfied_at = None;
        if self.wanted < self.spent() + APPETITE / 2 {
            self.ask = true;
        }
    }

    /// Counts what was sent without a grant, to a peer that did not know of grants yet.
    pub fn strayed(&mut self, charge: u64) {
        self.consumed += charge;
        self.granted += charge;
    }

    /// Takes in what the receiver says.
    pub fn granted(&mut self, grant: &Grant, now: u64) {
        if grant.granted < self.granted {
            return;
        }
        let known = grant.returned.min(self.returned).max(self.returned_known);
        // Others wait for what the receiver thinks is here; it may have missed what was sent, and that it was.
        let is_press = grant.granted == self.granted && known == self.returned_known;
        if is_press && self.told_at.is_none_or(|at| now >= at + PRESS) {
            self.ask = true;
        }
        self.granted = grant.granted;
        self.keep = grant.keep;
        self.returned_known = known;
        if self.need > 0 && self.need <= self.allowance() && self.satisfied_at.is_none() {
            self.satisfied_at = Some(now);
            self.used_at = now;
        }
        if !self.needs_answer() {
            self.ask_again_at = None;
            self.patience = PATIENCE;
        }
        self.give_back(self.keep);
    }

    /// Returns what is held beyond `keep`, but for the frame that waits. If it is not enough for that it goes back too: the
    /// rests of many that wait for more could be all that there is. But one after the other: with a return on its way, the
    /// receiver may just have given what was missing.
    fn give_back(&mut self, keep: u64) {
        let is_rest = self.need > self.allowance() && self.returned_known == self.returned;
        let frame = if is_rest { 0 } else { self.need };
        let excess = self.allowance().saturating_sub(keep.max(frame));
        if excess > 0 {
            self.returned += excess;
            self.ask = true;
        }
    }

    /// Whether there is a REQUEST to send.
    pub fn asks(&self) -> bool {
        self.ask
    }

    /// Whether a REQUEST has to be repeated until it is answered.
    fn needs_answer(&self) -> bool {
        self.need > self.allowance() || self.returned_known < self.returned
    }

    fn idle_at(&self) -> Option<u64> {
        let something = self.wanted > self.granted || self.allowance() > LARGEST_CHARGE;
        (self.need == 0 && something).then_some(self.used_at + IDLE)
    }

    /// Does what is due at `now`.
    pub fn expire(&mut self, now: u64) {
        if self.satisfied_at.is_some_and(|at| now >= at + HOLD) {
            self.need = 0;
            self.satisfied_at = None;
            self.give_back(self.keep);
        }
        if self.idle_at().is_some_and(|at| now >= at) {
            self.give_back(LARGEST_CHARGE);
            self.wanted = 0;
            self.ask = true;
        }
        if self.ask_again_at.is_some_and(|at| now >= at) {
            self.ask_again_at = None;
            self.ask = true;
        }
    }

    /// When [`Holder::expire`] has something to do.
    pub fn next_timeout(&self) -> Option<u64> {
        let hold = self.satisfied_at.map(|at| at + HOLD);
        [hold, self.idle_at(), self.ask_again_at].into_iter().flatten().min()
    }

    /// The REQUEST to send, if there is one.
    pub fn transmit(&mut self, now: u64) -> Option<Request> {
        if !std::mem::take(&mut self.ask) {
            return None;
        }
        if self.need > 0 || now < self.used_at + IDLE {
            self.wanted = self.spent() + APPETITE;
        }
        self.told_at = Some(now);
        if self.needs_answer() {
            self.ask_again_at = Some(now + self.patience);
            self.patience = (self.patience * 2).min(MOST_PATIENCE);
        }
        Some(Request {
            consumed: self.consumed,
            returned: self.returned,
            needed: self.spent() + self.need,
            wanted: self.wanted,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_little_for_a_frame_goes_back_to_those_who_wait() {
        let mut holder = Holder::new(0);
        assert!(!holder.may_send(5000));
        holder.granted(&Grant { granted: 1000, returned: 0, keep: 8000 }, 0);
        assert_eq!(holder.allowance(), 1000, "nobody is kept from sending by it");
        holder.granted(&Grant { granted: 1000, returned: 0, keep: 0 }, 0);
        assert_eq!(holder.allowance(), 0);
        let request = holder.transmit(0).expect("a request that says so");
        assert_eq!((request.returned, request.needed), (1000, 6000));
        // The rest was given before that was heard: it is not sent back to and fro.
        holder.granted(&Grant { granted: 5000, returned: 0, keep: 0 }, 0);
        assert_eq!(holder.allowance(), 4000);
        holder.granted(&Grant { granted: 6000, returned: 1000, keep: 0 }, 0);
        assert!(holder.may_send(5000), "what is enough for a frame is kept for it");
    }

    #[test]
    fn who_is_pressed_says_again_what_it_has_sent() {
        let mut holder = Holder::new(0);
        assert!(!holder.may_send(5000));
        assert!(holder.transmit(0).is_some());
        holder.granted(&Grant { granted: 5000, returned: 0, keep: 0 }, 0);
        holder.sent(5000, 0);
        // The frame is lost, so that the receiver goes on asking for what it granted.
        let press = Grant { granted: 5000, returned: 0, keep: 0 };
        holder.granted(&press, PRESS - 1);
        assert!(!holder.asks(), "an answer is not answered");
        holder.granted(&press, PRESS);
        assert_eq!(holder.transmit(PRESS).expect("an answer").consumed, 5000);
    }

    #[test]
    fn what_is_enough_for_the_least_that_waits_is_used() {
        let mut holder = Holder::new(0);
        assert!(!holder.may_send(1000));
        assert!(!holder.may_send(5000));
        holder.granted(&Grant { granted: 1000, returned: 0, keep: 0 }, 0);
        assert!(holder.may_send(1000));
    }
}
