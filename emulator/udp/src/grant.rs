//! Grants: permission to put bytes into a peer's receive buffer.
//!
//! A full receive buffer drops datagrams silently, and all senders share it. The receiver's [`GrantIssuer`] therefore
//! grants shares of the buffer, in the unit in which the kernel charges it ([`charge`]). Each sender's [`GrantBalance`]
//! accounts for them. The outstanding grants of all senders never exceed the budget. Both are state machines without
//! I/O: time is an argument in nanoseconds, messages are values, and any message may be lost.
//!
//! Half of the budget is for senders that have used their grants before. A sender that neither uses nor returns what
//! others wait for loses it: see [`REVOKE_AFTER`].

mod balance;
mod terms;

use crate::PeerPort;
pub use balance::GrantBalance;
use softhca_wire::link_control::{Grant, GrantRequest};
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
pub use terms::{MAX_FRAME_CHARGE, OutOfBounds, charge, grant_budget};
use terms::{MILLISECOND, RECLAIM_INTERVAL, REQUEST_AHEAD};

/// Time after a REQUEST from which an empty socket proves that everything that the REQUEST counts has arrived or is
/// lost. A datagram may wait in another processor's backlog while the REQUEST overtakes it.
const SETTLE_DELAY: u64 = 5 * MILLISECOND;
/// How often a sender is asked in vain before its grant is revoked. By then the lease of a sender that was stopped has
/// ended ([`GRANT_LEASE`]), and a heartbeat reports the revocation before it may send again. Requests count instead
/// of time, because this process may have been stopped itself.
const REVOKE_AFTER: u32 = (GRANT_LEASE / RECLAIM_INTERVAL) as u32 + 20;
/// How long a sender comes after all others when its grant was revoked.
const REVOCATION_PENALTY: u64 = 10_000 * MILLISECOND;
/// How long grants are valid after a heartbeat that the peer answered: the peers of a port that was stopped may have
/// declared it dead.
pub(crate) const GRANT_LEASE: u64 = 500 * MILLISECOND;
/// A sender that has used this much since it came, or since its grant was revoked, is no newcomer.
const NEWCOMER_CHARGE: u64 = 4 * MAX_FRAME_CHARGE;
/// The highest total of a REQUEST: no port sends this much, and sums of totals do not overflow.
const MAX_TOTAL: u64 = 1 << 62;

/// The issuer's state of one sender.
#[derive(Debug, Default)]
struct SenderGrants {
    granted: u64,
    /// Returned by the sender, or revoked.
    returned: u64,
    /// Read from the socket, or known to be lost.
    drained: u64,
    needed: u64,
    wanted: u64,
    /// The charge that the sender last reported as consumed.
    consumed: u64,
    /// An earlier such charge, and the time of the report. It is settled when the socket is empty.
    claimed: u64,
    claimed_at: u64,
    /// Read from the socket since the sender came or its grant was revoked.
    used: u64,
    /// Until when the sender comes after all others.
    penalized_until: u64,
    /// The highest `consumed + returned` seen, which orders REQUESTs.
    last_position: u64,
    is_waiting: bool,
    grant_due: bool,
    /// When it was last asked to return unused grants, and how often since it last used one.
    reclaimed_at: u64,
    vain_reclaims: u32,
}

impl SenderGrants {
    /// The charge that the sender may still put, or has put, into the buffer.
    fn outstanding(&self) -> u64 {
        self.granted - self.returned - self.drained
    }

    /// The part of it that the sender has not put into the buffer, as far as it has reported.
    fn unused(&self) -> u64 {
        (self.granted - self.returned).saturating_sub(self.consumed.max(self.drained))
    }

    fn wants_more(&self) -> bool {
        self.wanted.max(self.needed) > self.granted
    }

    fn is_newcomer(&self) -> bool {
        self.used < NEWCOMER_CHARGE
    }
}

/// The receiver's side: divides one receive buffer among all senders.
#[derive(Debug)]
pub struct GrantIssuer {
    budget: u64,
    /// Grants of the last port at this address may be valid until then.
    settled_at: Option<u64>,
    senders: BTreeMap<PeerPort, SenderGrants>,
    /// Senders that need a grant for their next frame, in the order of their REQUESTs.
    waiting: VecDeque<PeerPort>,
    /// The sum over all senders.
    outstanding: u64,
    /// The charge that removed senders may still have in the socket, and the time of their removal, oldest first.
    retired: VecDeque<(PeerPort, u64, u64)>,
    /// Granted, read from the socket, and waiting to enter the host network.
    buffered: BTreeMap<PeerPort, u64>,
    /// When an empty socket can settle the next claim.
    next_settle_at: Option<u64>,
    /// When to ask senders again to return unused grants.
    next_reclaim_at: Option<u64>,
    /// When the socket was last empty.
    emptied_at: u64,
    revocations: u64,
    share: u64,
    is_oversubscribed: bool,
    changed: bool,
}

impl GrantIssuer {
    /// An issuer of `budget` bytes of charge, for a port that starts at `now`; see [`grant_budget`].
    pub fn new(budget: u64, now: u64) -> GrantIssuer {
        GrantIssuer {
            budget,
            settled_at: Some(now + GRANT_LEASE),
            senders: BTreeMap::new(),
            waiting: VecDeque::new(),
            outstanding: 0,
            retired: VecDeque::new(),
            buffered: BTreeMap::new(),
            next_settle_at: None,
            next_reclaim_at: None,
            emptied_at: now,
            revocations: 0,
            share: budget,
            is_oversubscribed: false,
            changed: false,
        }
    }

    /// The bytes to divide.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// How many grants were revoked because their senders did not return them.
    pub fn revocations(&self) -> u64 {
        self.revocations
    }

    /// The bytes to divide now. A port that just started leaves three quarters to the senders that still use grants of
    /// the last port at its address. Both together stay within half of the receive buffer.
    fn limit(&self) -> u64 {
        match self.settled_at {
            Some(_) => (self.budget / 4).max(MAX_FRAME_CHARGE),
            None => self.budget,
        }
    }

    /// The charge that removed senders may still have in the socket.
    fn retired(&self) -> u64 {
        self.retired.iter().map(|(_, amount, _)| amount).sum()
    }

    /// The bytes that senders hold, that the socket holds, or that are buffered behind it.
    pub fn outstanding(&self) -> u64 {
        self.outstanding + self.retired() + self.buffered.values().sum::<u64>()
    }

    /// The bytes that can be granted now.
    fn available(&self) -> u64 {
        self.limit().saturating_sub(self.outstanding())
    }

    /// The part of the available bytes that newcomers can get: senders that have used their grants keep half.
    fn available_to_newcomers(&self) -> u64 {
        let newcomers = self.senders.values().filter(|sender| sender.is_newcomer());
        let held = newcomers.clone().map(SenderGrants::outstanding).sum::<u64>() + self.retired();
        let pool = match newcomers.count() == self.senders.len() {
            true => self.limit(),
            false => (self.limit() / 2).max(MAX_FRAME_CHARGE),
        };
        pool.saturating_sub(held).min(self.available())
    }

    /// The most that one newcomer holds.
    fn newcomer_share(&self) -> u64 {
        self.share.min((self.budget / 16).max(2 * MAX_FRAME_CHARGE))
    }

    /// The charge that a sender has returned, or lost by revocation.
    pub fn returned(&self, sender: PeerPort) -> u64 {
        self.senders.get(&sender).map_or(0, |sender| sender.returned)
    }

    /// Keeps this much of what was received in use: it makes no room for new grants.
    pub fn add_buffered(&mut self, from: PeerPort, granted: u64) {
        if granted > 0 {
            *self.buffered.entry(from).or_default() += granted;
        }
    }

    /// Releases what was received from the processes of a host, except for at most `kept` bytes.
    pub fn limit_buffered(&mut self, host: IpAddr, kept: u64) {
        let ports = PeerPort::all_of(host);
        let mut excess =
            self.buffered.range(ports.clone()).map(|(_, bytes)| bytes).sum::<u64>().saturating_sub(kept);
        self.changed |= excess > 0;
        for (_, bytes) in self.buffered.range_mut(ports) {
            let released = excess.min(*bytes);
            *bytes -= released;
            excess -= released;
        }
        self.buffered.retain(|_, bytes| *bytes > 0);
    }

    /// Processes a REQUEST. Impossible totals change nothing.
    pub fn on_request(
        &mut self,
        from: PeerPort,
        request: &GrantRequest,
        now: u64,
    ) -> Result<(), OutOfBounds> {
        let reached = request.consumed.saturating_add(request.returned);
        if reached > MAX_TOTAL
            || request.needed > reached + MAX_FRAME_CHARGE
            || request.wanted > reached + REQUEST_AHEAD
        {
            return Err(OutOfBounds);
        }
        let sender = self.senders.entry(from).or_insert_with(|| {
            // Consumed before the first grant: an earlier incarnation of this port granted it, or the sender took
            // this port for a foreign one.
            SenderGrants { granted: request.consumed, drained: request.consumed, ..SenderGrants::default() }
        });
        if reached < sender.last_position {
            return Ok(());
        }
        sender.last_position = reached;
        let returned = request.returned.min(sender.granted - sender.drained).saturating_sub(sender.returned);
        sender.returned += returned;
        self.outstanding -= returned;
        let claim = request.consumed.min(sender.granted - sender.returned);
        sender.consumed = claim;
        if claim > sender.drained && sender.claimed <= sender.drained {
            (sender.claimed, sender.claimed_at) = (claim, now);
            self.next_settle_at.get_or_insert(now + SETTLE_DELAY);
        }
        (sender.needed, sender.wanted) = (request.needed, request.wanted);
        if sender.needed > sender.granted && !sender.is_waiting {
            sender.is_waiting = true;
            self.waiting.push_back(from);
        }
        // A sender that must wait gets its GRANT later. One that already has a grant may have missed it.
        sender.grant_due |= returned > 0 || sender.needed > reached && !sender.is_waiting;
        self.changed = true;
        Ok(())
    }

    /// Counts a chunk that was read from the socket. Returns how much of it was granted.
    pub fn record_received(&mut self, from: PeerPort, mut charge: u64) -> u64 {
        let mut granted = 0;
        // Frames that the socket held when the sender was removed come first.
        for (_, retired, _) in self.retired.iter_mut().filter(|(sender, ..)| *sender == from) {
            let old = charge.min(*retired);
            *retired -= old;
            charge -= old;
            granted += old;
            self.changed = true;
        }
        if let Some(sender) = self.senders.get_mut(&from) {
            let drained = charge.min(sender.outstanding());
            sender.drained += drained;
            sender.used += drained;
            if drained > 0 {
                sender.vain_reclaims = 0;
            }
            self.outstanding -= drained;
            granted += drained;
            self.changed = true;
        }
        granted
    }

    /// Removes a sender that restarted or is dead. Its share becomes available when the socket has been empty.
    pub fn remove_sender(&mut self, from: PeerPort, now: u64) {
        if let Some(sender) = self.senders.remove(&from) {
            self.waiting.retain(|waiting| *waiting != from);
            self.outstanding -= sender.outstanding();
            if sender.outstanding() > 0 {
                self.retired.push_back((from, sender.outstanding(), now));
            }
            self.changed = true;
        }
    }

    /// The socket is empty.
    pub fn on_socket_empty(&mut self, now: u64) {
        self.emptied_at = now;
        while self.retired.front().is_some_and(|(.., at)| now >= at + SETTLE_DELAY) {
            self.retired.pop_front();
            self.changed = true;
        }
        self.changed |= self.settled_at.take_if(|at| now >= *at).is_some();
        if self.next_settle_at.is_none_or(|at| now < at) {
            return;
        }
        self.next_settle_at = None;
        for sender in self.senders.values_mut().filter(|sender| sender.claimed > sender.drained) {
            let at = sender.claimed_at + SETTLE_DELAY;
            if now >= at {
                let lost = (sender.claimed - sender.drained).min(sender.outstanding());
                sender.drained += lost;
                self.outstanding -= lost;
                self.changed = true;
            } else {
                self.next_settle_at = Some(self.next_settle_at.map_or(at, |other| other.min(at)));
            }
        }
    }

    /// When to read the socket again even if nothing arrives, and to report whether it is empty.
    #[inline]
    pub fn next_timeout(&self) -> Option<u64> {
        let is_idle = self.senders.is_empty() && self.retired.is_empty();
        if is_idle && self.next_settle_at.is_none() && self.next_reclaim_at.is_none() {
            return None;
        }
        let retired = self.retired.front().map(|(.., at)| at + SETTLE_DELAY);
        let settled = self.settled_at.filter(|_| !self.senders.is_empty());
        [retired, settled, self.next_settle_at, self.next_reclaim_at].into_iter().flatten().min()
    }

    /// Whether there may be a GRANT to send.
    #[inline]
    pub fn may_transmit(&self) -> bool {
        self.changed || self.next_reclaim_at.is_some() || !self.senders.is_empty()
    }

    /// The next GRANT to send.
    pub fn transmit(&mut self, now: u64) -> Option<(PeerPort, Grant)> {
        if self.changed || self.next_reclaim_at.is_some_and(|at| now >= at) {
            self.changed = false;
            self.distribute(now);
        } else if self.senders.values().all(|sender| !sender.grant_due) {
            return None;
        }
        let (address, sender) = self.senders.iter_mut().find(|(_, sender)| sender.grant_due)?;
        sender.grant_due = false;
        let keep = match self.waiting.is_empty() {
            false if self.is_oversubscribed || !sender.wants_more() => 0,
            _ => self.share,
        };
        let SenderGrants { granted, returned, .. } = *sender;
        Some((*address, Grant { granted, returned, max_unused: keep }))
    }

    /// The charge reserved for new senders. Senders that can send their next frame do not get it.
    fn reserve(&self) -> u64 {
        (self.limit() / 8).max(MAX_FRAME_CHARGE)
    }

    /// Grants what is available, first to senders that cannot send at all, in the order of their REQUESTs. Senders that
    /// want more then get up to an equal share. If a sender still waits, asks the others to return what they do not
    /// use.
    fn distribute(&mut self, now: u64) {
        let wanting = self.senders.values().filter(|sender| sender.wants_more()).count().max(1) as u64;
        self.is_oversubscribed = wanting * MAX_FRAME_CHARGE > self.limit();
        self.share = (self.limit() / wanting).max(MAX_FRAME_CHARGE);
        self.serve_waiting(|sender| now >= sender.penalized_until);
        self.serve_waiting(|_| true);
        if self.waiting.is_empty() {
            self.next_reclaim_at = None;
            self.senders.values_mut().for_each(|sender| sender.vain_reclaims = 0);
            self.top_up();
        } else {
            self.reclaim_unused(now);
        }
        assert!(self.outstanding() <= self.budget, "the outstanding grants exceed the budget");
    }

    /// Grants their next frame to the waiting senders that `selected` selects, until one of them finds too little.
    /// Newcomers that find too little do not delay the others.
    fn serve_waiting(&mut self, selected: impl Fn(&SenderGrants) -> bool) {
        let reserve = self.reserve();
        let mut is_exhausted = [false; 2];
        for address in std::mem::take(&mut self.waiting) {
            let sender = &self.senders[&address];
            let is_newcomer = sender.is_newcomer();
            if !selected(sender) || is_exhausted[0] || is_exhausted[usize::from(is_newcomer)] {
                self.waiting.push_back(address);
                continue;
            }
            let (available, share) = match is_newcomer {
                true => (self.available_to_newcomers(), self.newcomer_share()),
                false => (self.available(), self.share),
            };
            let need = sender.needed.saturating_sub(sender.granted).min(MAX_FRAME_CHARGE);
            if need > available {
                is_exhausted[usize::from(is_newcomer)] = true;
                self.waiting.push_back(address);
                continue;
            }
            let buffered = self.buffered.get(&address).copied().unwrap_or(0);
            let room =
                share.saturating_sub(sender.outstanding() + buffered).min(available.saturating_sub(reserve));
            let amount = room.min(sender.wanted.saturating_sub(sender.granted)).max(need);
            let sender = self.senders.get_mut(&address).expect("a waiting sender is known");
            sender.granted += amount;
            self.outstanding += amount;
            sender.grant_due = true;
            sender.is_waiting = false;
        }
    }

    /// Raises every sender that wants more to the share.
    fn top_up(&mut self) {
        let newcomer_share = self.newcomer_share();
        let mut available = self.available().saturating_sub(self.reserve());
        let mut available_to_newcomers = self.available_to_newcomers().saturating_sub(self.reserve());
        for (address, sender) in self.senders.iter_mut().filter(|(_, sender)| sender.wants_more()) {
            let is_newcomer = sender.is_newcomer();
            let buffered = self.buffered.get(address).copied().unwrap_or(0);
            let share = if is_newcomer { newcomer_share } else { self.share };
            let room = share.saturating_sub(sender.outstanding() + buffered);
            let most = if is_newcomer { available.min(available_to_newcomers) } else { available };
            let amount = room.min(sender.wanted.saturating_sub(sender.granted)).min(most);
            // Smaller amounts are not worth a message.
            if amount >= (share / 4).max(MAX_FRAME_CHARGE) {
                sender.granted += amount;
                self.outstanding += amount;
                available -= amount;
                available_to_newcomers -= amount.min(available_to_newcomers);
                sender.grant_due = true;
            }
        }
    }

    /// Asks senders that hold more than they may keep to return it, each at most once per interval. Revokes it if they
    /// do not, and if the socket does not hold it. A sender that has reported its frames holds none of what the socket
    /// has not received yet.
    fn reclaim_unused(&mut self, now: u64) {
        self.next_reclaim_at = Some(now + RECLAIM_INTERVAL);
        for sender in self.senders.values_mut() {
            let keep = if self.is_oversubscribed || !sender.wants_more() { 0 } else { self.share };
            if sender.unused() <= keep {
                sender.vain_reclaims = 0;
            } else if now >= sender.reclaimed_at + RECLAIM_INTERVAL {
                if sender.vain_reclaims >= REVOKE_AFTER && self.emptied_at >= sender.reclaimed_at {
                    let excess = sender.outstanding() - keep;
                    sender.returned += excess;
                    self.outstanding -= excess;
                    self.revocations += 1;
                    self.changed = true;
                    (sender.used, sender.vain_reclaims) = (0, 0);
                    sender.penalized_until = now + REVOCATION_PENALTY;
                }
                sender.vain_reclaims += 1;
                sender.reclaimed_at = now;
                sender.grant_due = true;
            }
        }
    }
}

#[cfg(test)]
mod tests;
