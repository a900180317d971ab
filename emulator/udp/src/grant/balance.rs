//! The grants that a sender holds from one receiver.

use super::terms::{MAX_FRAME_CHARGE, MILLISECOND, OutOfBounds, RECLAIM_INTERVAL, REQUEST_AHEAD};
use softhca_wire::link_control::{Grant, GrantRequest};

/// How long a sender waits for a GRANT before it repeats a REQUEST, at first and at most.
const MIN_REQUEST_TIMEOUT: u64 = MILLISECOND;
const MAX_REQUEST_TIMEOUT: u64 = 64 * MILLISECOND;
/// How long a grant for a pending frame may stay unused.
const UNUSED_GRANT_TIMEOUT: u64 = 50 * MILLISECOND;
/// How long an idle sender keeps its share.
const IDLE_TIMEOUT: u64 = 1000 * MILLISECOND;

/// The sender's side: what one peer has granted.
#[derive(Debug)]
pub struct GrantBalance {
    granted: u64,
    consumed: u64,
    returned: u64,
    /// How much of `returned` the receiver has acknowledged.
    returned_known: u64,
    wanted: u64,
    /// The highest total that was ever requested: no grant exceeds it.
    requested: u64,
    max_unused: u64,
    /// The charge of the pending frame, or zero.
    pending_charge: u64,
    /// Since when the allowance covers it.
    satisfied_at: Option<u64>,
    last_used_at: u64,
    /// When the last REQUEST was sent.
    last_request_at: Option<u64>,
    request_due: bool,
    retry_at: Option<u64>,
    request_timeout: u64,
}

impl GrantBalance {
    /// A balance of zero.
    pub fn new(now: u64) -> GrantBalance {
        GrantBalance {
            granted: 0,
            consumed: 0,
            returned: 0,
            returned_known: 0,
            wanted: 0,
            requested: 0,
            max_unused: u64::MAX,
            pending_charge: 0,
            satisfied_at: None,
            last_used_at: now,
            last_request_at: None,
            request_due: false,
            retry_at: None,
            request_timeout: MIN_REQUEST_TIMEOUT,
        }
    }

    /// Forgets everything but the pending frame and the consumed charge. The peer has no state of this port, and the
    /// last datagrams may reach its new incarnation.
    pub fn restart(&mut self, now: u64) {
        let GrantBalance { pending_charge: need, consumed, .. } = *self;
        *self = GrantBalance {
            pending_charge: need,
            consumed,
            granted: consumed,
            request_due: need > 0,
            ..GrantBalance::new(now)
        };
    }

    /// The charge that may be sent now.
    pub fn allowance(&self) -> u64 {
        self.granted.saturating_sub(self.spent())
    }

    fn spent(&self) -> u64 {
        self.consumed + self.returned
    }

    /// Whether a frame or batch of this charge may be sent now. If not, requests more. Only [`MAX_FRAME_CHARGE`] is
    /// certain to be granted: cut longer batches to the [`GrantBalance::allowance`].
    pub fn may_send(&mut self, charge: u64) -> bool {
        if charge <= self.allowance() {
            return true;
        }
        let need = charge.min(MAX_FRAME_CHARGE);
        if need > self.allowance() {
            if self.pending_charge <= self.allowance() {
                self.request_timeout = MIN_REQUEST_TIMEOUT;
                self.request_due = true;
                self.pending_charge = need;
            }
            // A grant that covers the smallest pending frame is used.
            self.pending_charge = need.min(self.pending_charge);
            self.satisfied_at = None;
        }
        false
    }

    /// Counts what the socket has accepted.
    ///
    /// # Panics
    /// If the allowance does not cover it.
    pub fn record_sent(&mut self, charge: u64, now: u64) {
        assert!(charge <= self.allowance(), "the allowance covers the charge");
        self.consumed += charge;
        self.last_used_at = now;
        self.pending_charge = 0;
        self.satisfied_at = None;
        if self.wanted < self.spent() + REQUEST_AHEAD / 2 {
            self.request_due = true;
        }
    }

    /// Counts what was sent without a grant, while the peer was taken for a foreign one.
    pub fn record_ungranted(&mut self, charge: u64) {
        self.consumed += charge;
        self.granted += charge;
    }

    /// Processes a GRANT of a port that can grant `budget` bytes in all. Impossible totals change nothing.
    pub fn on_grant(&mut self, grant: &Grant, budget: u64, now: u64) -> Result<(), OutOfBounds> {
        // The receiver may charge its buffer up to twice what this port counts.
        let most = self.spent().saturating_add(budget.max(MAX_FRAME_CHARGE).saturating_mul(2));
        if grant.granted > most.min(self.requested.max(self.granted)) || grant.returned > grant.granted {
            return Err(OutOfBounds);
        }
        self.on_revocation(grant.returned);
        if grant.granted < self.granted {
            return Ok(());
        }
        let known = grant.returned.min(self.returned).max(self.returned_known);
        // Other senders wait for what the receiver believes is unused here; it may have missed both the frames and
        // the REQUEST that counted them. A port that waits repeats its REQUEST anyway: the GRANT is the reply to it.
        let is_reclaim = grant.granted == self.granted && known == self.returned_known && !self.needs_reply();
        if is_reclaim && self.last_request_at.is_none_or(|at| now >= at + RECLAIM_INTERVAL) {
            self.request_due = true;
        }
        self.granted = grant.granted;
        self.max_unused = grant.max_unused;
        self.returned_known = known;
        if self.pending_charge > 0 && self.pending_charge <= self.allowance() && self.satisfied_at.is_none() {
            self.satisfied_at = Some(now);
            self.last_used_at = now;
        }
        self.end_wait();
        self.return_unused(self.max_unused);
        Ok(())
    }

    /// Repeats no REQUEST if the receiver has replied.
    fn end_wait(&mut self) {
        if !self.needs_reply() {
            self.retry_at = None;
            self.request_timeout = MIN_REQUEST_TIMEOUT;
        }
    }

    /// Processes the receiver's total in the reply to a heartbeat, which also acknowledges what was returned.
    pub fn on_heartbeat_reply(&mut self, returned: u64) {
        self.on_revocation(returned);
        self.returned_known = self.returned_known.max(returned.min(self.returned));
        self.end_wait();
    }

    /// Processes the receiver's total of returned grants. A higher total than this port's own revokes the difference.
    pub fn on_revocation(&mut self, returned: u64) {
        if returned > self.returned && returned <= self.granted {
            (self.returned, self.returned_known) = (returned, returned);
            self.request_due |= self.pending_charge > self.allowance();
        }
    }

    /// Returns what is held beyond `keep`, except for the pending frame. A grant too small for that frame is returned
    /// too: the unused grants of many senders could exhaust the budget. One return is outstanding at a time, because
    /// the receiver may have granted the missing part meanwhile.
    fn return_unused(&mut self, keep: u64) {
        let is_insufficient = self.pending_charge > self.allowance() && self.returned_known == self.returned;
        let frame = if is_insufficient { 0 } else { self.pending_charge };
        let excess = self.allowance().saturating_sub(keep.max(frame));
        if excess > 0 {
            self.returned += excess;
            self.request_due = true;
        }
    }

    /// Whether a REQUEST is due.
    pub fn has_request(&self) -> bool {
        self.request_due
    }

    /// Whether a REQUEST is repeated until the receiver replies.
    fn needs_reply(&self) -> bool {
        self.pending_charge > self.allowance() || self.returned_known < self.returned
    }

    fn idle_at(&self) -> Option<u64> {
        let has_share = self.wanted > self.granted || self.allowance() > MAX_FRAME_CHARGE;
        (self.pending_charge == 0 && has_share).then_some(self.last_used_at + IDLE_TIMEOUT)
    }

    /// Processes the timers that are due at `now`.
    pub fn expire(&mut self, now: u64) {
        if self.satisfied_at.is_some_and(|at| now >= at + UNUSED_GRANT_TIMEOUT) {
            self.pending_charge = 0;
            self.satisfied_at = None;
            self.return_unused(self.max_unused);
        }
        if self.idle_at().is_some_and(|at| now >= at) {
            self.return_unused(MAX_FRAME_CHARGE);
            self.wanted = 0;
            self.request_due = true;
        }
        if self.retry_at.is_some_and(|at| now >= at) {
            self.retry_at = None;
            self.request_due = true;
        }
    }

    /// When [`GrantBalance::expire`] has work.
    pub fn next_timeout(&self) -> Option<u64> {
        let hold = self.satisfied_at.map(|at| at + UNUSED_GRANT_TIMEOUT);
        [hold, self.idle_at(), self.retry_at].into_iter().flatten().min()
    }

    /// The REQUEST to send, if one is due.
    pub fn transmit(&mut self, now: u64) -> Option<GrantRequest> {
        if !std::mem::take(&mut self.request_due) {
            return None;
        }
        if self.pending_charge > 0 || now < self.last_used_at + IDLE_TIMEOUT {
            self.wanted = self.spent() + REQUEST_AHEAD;
        }
        let needed = self.spent() + self.pending_charge;
        self.requested = self.requested.max(self.wanted).max(needed);
        self.last_request_at = Some(now);
        if self.needs_reply() {
            self.retry_at = Some(now + self.request_timeout);
            self.request_timeout = (self.request_timeout * 2).min(MAX_REQUEST_TIMEOUT);
        }
        Some(GrantRequest { consumed: self.consumed, returned: self.returned, needed, wanted: self.wanted })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: u64 = 100_000;

    fn grant(balance: &mut GrantBalance, granted: u64, returned: u64, max_unused: u64, now: u64) {
        balance.on_grant(&Grant { granted, returned, max_unused }, BUDGET, now).unwrap();
    }

    /// A balance that has requested a frame of this charge.
    fn waiting_for(charge: u64) -> GrantBalance {
        let mut balance = GrantBalance::new(0);
        assert!(!balance.may_send(charge));
        assert!(balance.transmit(0).is_some());
        balance
    }

    #[test]
    fn grant_beyond_the_request_or_the_buffer_changes_nothing() {
        let mut balance = waiting_for(5000);
        for bad in [
            Grant { granted: u64::MAX, returned: 0, max_unused: 0 },
            Grant { granted: 2 * BUDGET + 1, returned: 0, max_unused: 0 },
            Grant { granted: 5000, returned: 5001, max_unused: 0 },
        ] {
            assert_eq!(balance.on_grant(&bad, BUDGET, 0), Err(OutOfBounds), "{bad:?}");
        }
        assert_eq!(balance.allowance(), 0);
        grant(&mut balance, 5000, 0, 0, 0);
        assert!(balance.may_send(5000), "an honest grant is not old");
        let mut silent = GrantBalance::new(0);
        let unasked = Grant { granted: 1, returned: 0, max_unused: 0 };
        assert_eq!(silent.on_grant(&unasked, BUDGET, 0), Err(OutOfBounds));
    }

    #[test]
    fn revoked_grant_is_not_used() {
        let mut balance = waiting_for(5000);
        grant(&mut balance, 5000, 0, 0, 0);
        balance.on_revocation(5000);
        assert_eq!(balance.allowance(), 0);
        let request = balance.transmit(0).expect("a request for the pending frame");
        assert_eq!((request.returned, request.needed), (5000, 10_000));
        // Consumed before the revocation arrived: the balance is overdrawn, and the next grant covers it.
        grant(&mut balance, 10_000, 5000, 0, 0);
        balance.record_sent(5000, 0);
        balance.on_revocation(6000);
        assert_eq!(balance.allowance(), 0);
        assert!(!balance.may_send(100));
        assert_eq!(balance.transmit(0).expect("a request").needed, 11_100);
    }

    #[test]
    fn grant_too_small_for_a_frame_is_returned() {
        let mut balance = waiting_for(5000);
        grant(&mut balance, 1000, 0, 8000, 0);
        assert_eq!(balance.allowance(), 1000, "no other sender needs it");
        grant(&mut balance, 1000, 0, 0, 0);
        assert_eq!(balance.allowance(), 0);
        let request = balance.transmit(0).expect("a request with the return");
        assert_eq!((request.returned, request.needed), (1000, 6000));
        // The receiver granted the missing part before it saw the return: the sender does not return it again.
        grant(&mut balance, 5000, 0, 0, 0);
        assert_eq!(balance.allowance(), 4000);
        grant(&mut balance, 6000, 1000, 0, 0);
        assert!(balance.may_send(5000), "a grant that covers the frame is kept");
    }

    #[test]
    fn reclaimed_sender_repeats_what_it_has_consumed() {
        let mut balance = waiting_for(5000);
        grant(&mut balance, 5000, 0, 0, 0);
        balance.record_sent(5000, 0);
        // The frame is lost, so the receiver keeps asking for what it granted.
        grant(&mut balance, 5000, 0, 0, RECLAIM_INTERVAL - 1);
        assert!(!balance.has_request(), "a recent request is not repeated");
        grant(&mut balance, 5000, 0, 0, RECLAIM_INTERVAL);
        assert_eq!(balance.transmit(RECLAIM_INTERVAL).expect("a request").consumed, 5000);
    }

    #[test]
    fn grant_that_covers_the_smallest_pending_frame_is_used() {
        let mut balance = waiting_for(1000);
        assert!(!balance.may_send(5000));
        grant(&mut balance, 1000, 0, 0, 0);
        assert!(balance.may_send(1000));
    }

    #[test]
    fn reply_to_a_heartbeat_acknowledges_what_was_returned() {
        let mut balance = waiting_for(5000);
        grant(&mut balance, 1000, 0, 0, 0);
        assert_eq!(balance.transmit(0).expect("a request with the return").returned, 1000);
        grant(&mut balance, 5000, 0, 0, 0);
        assert_eq!(balance.allowance(), 4000, "one return is outstanding at a time");
        balance.on_heartbeat_reply(1000);
        grant(&mut balance, 5000, 0, 0, 0);
        assert_eq!(balance.allowance(), 0, "the next one is returned too");
    }

    #[test]
    fn port_that_waits_takes_no_reply_for_an_attempt_to_reclaim() {
        let mut balance = waiting_for(5000);
        let later = 20 * RECLAIM_INTERVAL;
        grant(&mut balance, 0, 0, 0, later);
        assert!(!balance.has_request(), "its REQUEST is repeated anyway");
        balance.expire(later);
        assert!(balance.transmit(later).is_some());
        grant(&mut balance, 5000, 0, 0, later);
        assert!(!balance.has_request());
        grant(&mut balance, 5000, 0, 0, 2 * later);
        assert!(balance.has_request(), "the receiver may have missed what was sent");
    }
}
