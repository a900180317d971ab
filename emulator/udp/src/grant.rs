//! Grants: permission to put bytes into a peer's receive buffer.
//!
//! A full receive buffer drops datagrams silently, and all senders share it. The receiver's [`GrantIssuer`] therefore
//! grants shares of the buffer, in the unit in which the kernel charges it ([`charge`]), and each sender's
//! [`GrantBalance`] accounts for them. The outstanding grants of all senders never exceed the budget. Both are state
//! machines without I/O: time is an argument in nanoseconds, messages are values, and any message may be lost.

mod balance;

pub use balance::GrantBalance;
use softhca_wire::link_control::{Grant, GrantRequest};
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

const MILLISECOND: u64 = 1_000_000;
/// How long after a REQUEST an empty socket proves that everything the REQUEST counts has arrived or is lost: a
/// datagram may wait in another processor's backlog while the REQUEST overtakes it.
const SETTLE_DELAY: u64 = 5 * MILLISECOND;
/// How often senders are asked to return unused grants while others wait.
const RECLAIM_INTERVAL: u64 = 5 * MILLISECOND;

/// The most that the kernel charges a receive buffer for `segments` datagrams of `len` bytes sent as one batch.
///
/// Measured on loopback with SO_MEMINFO (Linux 6.18). A single datagram costs its allocation (the power of two that
/// holds the datagram and 379 bytes of headers and bookkeeping, 20 more over IPv6) and a descriptor of 256 bytes. A
/// batch costs its bytes and one allocation of 832 bytes. Both are rounded up here for other kernel builds.
pub const fn charge(len: usize, segments: usize) -> u64 {
    if segments <= 1 {
        let allocation = (len as u64 + 448).next_power_of_two();
        256 + if allocation < 768 { 768 } else { allocation }
    } else {
        1024 + len as u64 * segments as u64
    }
}

/// The charge of the largest RoCE frame. Every sender that requests a grant gets at least this much in time.
pub const MAX_FRAME_CHARGE: u64 = charge(4096 + 128, 1);

/// How much of a receive buffer can be granted. Up to a quarter stays charged after it is read. Linux 6.18 also
/// charges a datagram twice until it has woken the reader; a hypervisor can preempt a processor during that time
/// while another continues, so all granted bytes may be charged twice.
pub const fn grant_budget(receive_buffer: usize) -> u64 {
    let safe = receive_buffer as u64 / 4 * 3 / 2;
    if safe < MAX_FRAME_CHARGE { MAX_FRAME_CHARGE } else { safe }
}

/// The issuer's state of one sender.
#[derive(Debug, Default)]
struct SenderGrants {
    granted: u64,
    returned: u64,
    /// Read from the socket, or known to be lost.
    drained: u64,
    needed: u64,
    wanted: u64,
    /// What the sender reports as consumed, and when it did; settled when the socket is empty.
    claimed: u64,
    claimed_at: u64,
    /// The most that the socket may hold from before the first grant, unless the socket has been empty since.
    ungranted: u64,
    ungranted_since: u64,
    /// The highest `consumed + returned` seen, which orders REQUESTs.
    last_position: u64,
    is_waiting: bool,
    grant_due: bool,
    reclaimed_at: u64,
}

impl SenderGrants {
    /// What the sender may still put, or has put, into the buffer.
    fn outstanding(&self) -> u64 {
        self.granted - self.returned - self.drained
    }

    fn wants_more(&self) -> bool {
        self.wanted.max(self.needed) > self.granted
    }
}

/// The receiver's side: divides one receive buffer among all senders.
#[derive(Debug)]
pub struct GrantIssuer {
    budget: u64,
    senders: BTreeMap<IpAddr, SenderGrants>,
    /// Senders that need a grant for their next frame, in the order of their REQUESTs.
    waiting: VecDeque<IpAddr>,
    /// The sums over all senders, including the ungranted bytes of removed ones.
    outstanding: u64,
    ungranted: u64,
    /// What removed senders may still have in the socket, and when the last was removed.
    retired: BTreeMap<IpAddr, u64>,
    retired_ungranted: u64,
    retired_at: u64,
    /// Granted, read from the socket, and waiting to enter the host network.
    buffered: BTreeMap<IpAddr, u64>,
    /// When an empty socket can settle the next claim.
    next_settle_at: Option<u64>,
    /// When to ask senders again to return unused grants.
    next_reclaim_at: Option<u64>,
    share: u64,
    is_oversubscribed: bool,
    changed: bool,
}

impl GrantIssuer {
    /// An issuer of `budget` bytes of charge; see [`grant_budget`].
    pub fn new(budget: u64) -> GrantIssuer {
        GrantIssuer {
            budget,
            senders: BTreeMap::new(),
            waiting: VecDeque::new(),
            outstanding: 0,
            ungranted: 0,
            retired: BTreeMap::new(),
            retired_ungranted: 0,
            retired_at: 0,
            buffered: BTreeMap::new(),
            next_settle_at: None,
            next_reclaim_at: None,
            share: budget,
            is_oversubscribed: false,
            changed: false,
        }
    }

    /// The bytes to divide.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// The bytes that senders hold, that the socket holds, or that are buffered behind it.
    pub fn outstanding(&self) -> u64 {
        self.outstanding + self.retired.values().sum::<u64>() + self.buffered.values().sum::<u64>()
    }

    /// The bytes that can be granted now.
    fn available(&self) -> u64 {
        self.budget.saturating_sub(self.outstanding() + self.ungranted)
    }

    /// Keeps this much of what was received in use: it makes no room for new grants.
    pub fn add_buffered(&mut self, from: IpAddr, granted: u64) {
        if granted > 0 {
            *self.buffered.entry(from).or_default() += granted;
        }
    }

    /// Releases what was received from a sender, except for at most `kept` bytes.
    pub fn limit_buffered(&mut self, from: IpAddr, kept: u64) {
        if let Some(buffered) = self.buffered.get_mut(&from) {
            self.changed |= kept < *buffered;
            *buffered = kept.min(*buffered);
            if *buffered == 0 {
                self.buffered.remove(&from);
            }
        }
    }

    /// Processes a REQUEST.
    pub fn on_request(&mut self, from: IpAddr, request: &GrantRequest, now: u64) {
        let sender = self.senders.entry(from).or_insert_with(|| {
            // Consumed before the first grant: an earlier incarnation of this port granted it, or the sender took
            // this port for a foreign one. The last of it may be in this socket.
            let consumed = request.consumed;
            let ungranted = consumed.min(self.budget);
            self.ungranted += ungranted;
            SenderGrants {
                granted: consumed,
                drained: consumed,
                ungranted,
                ungranted_since: now,
                ..SenderGrants::default()
            }
        });
        let reached = request.consumed.saturating_add(request.returned);
        if reached < sender.last_position {
            return;
        }
        sender.last_position = reached;
        let returned = request.returned.min(sender.granted - sender.drained).saturating_sub(sender.returned);
        sender.returned += returned;
        self.outstanding -= returned;
        let claim = request.consumed.min(sender.granted - sender.returned);
        if claim > sender.drained && sender.claimed <= sender.drained {
            (sender.claimed, sender.claimed_at) = (claim, now);
            self.next_settle_at.get_or_insert(now + SETTLE_DELAY);
        }
        if sender.ungranted > 0 {
            self.next_settle_at.get_or_insert(now + SETTLE_DELAY);
        }
        (sender.needed, sender.wanted) = (request.needed, request.wanted);
        if sender.needed > sender.granted && !sender.is_waiting {
            sender.is_waiting = true;
            self.waiting.push_back(from);
        }
        sender.grant_due = true;
        self.changed = true;
    }

    /// Counts a chunk that was read from the socket. Returns how much of it was granted.
    pub fn record_received(&mut self, from: IpAddr, mut charge: u64) -> u64 {
        let mut granted = 0;
        // What the socket held when the sender was removed comes first.
        if let Some(retired) = self.retired.get_mut(&from) {
            let old = charge.min(*retired);
            *retired -= old;
            charge -= old;
            granted += old;
            self.changed = true;
        }
        if let Some(sender) = self.senders.get_mut(&from) {
            let ungranted = charge.min(sender.ungranted);
            sender.ungranted -= ungranted;
            self.ungranted -= ungranted;
            let drained = (charge - ungranted).min(sender.outstanding());
            sender.drained += drained;
            self.outstanding -= drained;
            granted += drained;
            self.changed = true;
        }
        granted
    }

    /// Removes a sender that restarted or is dead. Its share becomes available when the socket has been empty.
    pub fn remove_sender(&mut self, from: IpAddr, now: u64) {
        if let Some(sender) = self.senders.remove(&from) {
            self.waiting.retain(|waiting| *waiting != from);
            self.outstanding -= sender.outstanding();
            self.retired_ungranted += sender.ungranted;
            *self.retired.entry(from).or_default() += sender.outstanding();
            self.retired_at = now;
            self.changed = true;
        }
    }

    /// The socket is empty.
    pub fn on_socket_empty(&mut self, now: u64) {
        if !self.retired.is_empty() && now >= self.retired_at + SETTLE_DELAY {
            self.retired.clear();
            self.ungranted -= std::mem::take(&mut self.retired_ungranted);
            self.changed = true;
        }
        if self.next_settle_at.is_none_or(|at| now < at) {
            return;
        }
        self.next_settle_at = None;
        for sender in self.senders.values_mut() {
            if now >= sender.ungranted_since + SETTLE_DELAY {
                self.changed |= sender.ungranted > 0;
                self.ungranted -= std::mem::take(&mut sender.ungranted);
            }
            let claimed = sender.claimed > sender.drained;
            if claimed && now >= sender.claimed_at + SETTLE_DELAY {
                let lost = (sender.claimed - sender.drained).min(sender.outstanding());
                sender.drained += lost;
                self.outstanding -= lost;
                self.changed = true;
            } else if claimed || sender.ungranted > 0 {
                let at = SETTLE_DELAY + if claimed { sender.claimed_at } else { sender.ungranted_since };
                self.next_settle_at = Some(self.next_settle_at.map_or(at, |other| other.min(at)));
            }
        }
    }

    /// When to read the socket again even if nothing arrives, and to report whether it is empty.
    pub fn next_timeout(&self) -> Option<u64> {
        let retired = (!self.retired.is_empty()).then(|| self.retired_at + SETTLE_DELAY);
        [retired, self.next_settle_at, self.next_reclaim_at].into_iter().flatten().min()
    }

    /// The next GRANT to send.
    pub fn transmit(&mut self, now: u64) -> Option<(IpAddr, Grant)> {
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

    /// What is reserved for new senders: senders that can send their next frame do not get it.
    fn reserve(&self) -> u64 {
        (self.budget / 8).max(MAX_FRAME_CHARGE)
    }

    /// Grants what is available: first to senders that cannot send at all, in the order of their REQUESTs, then up to
    /// an equal share to senders that want more. If a sender still waits, asks the others to return what they do not
    /// use.
    fn distribute(&mut self, now: u64) {
        let wanting = self.senders.values().filter(|sender| sender.wants_more()).count().max(1) as u64;
        self.is_oversubscribed = wanting * MAX_FRAME_CHARGE > self.budget;
        self.share = (self.budget / wanting).max(MAX_FRAME_CHARGE);
        let reserve = self.reserve();
        while let Some(address) = self.waiting.front() {
            let available = self.available();
            let sender = self.senders.get_mut(address).expect("a waiting sender is known");
            let need = sender.needed.saturating_sub(sender.granted).min(MAX_FRAME_CHARGE);
            if need > available {
                break;
            }
            let buffered = self.buffered.get(address).copied().unwrap_or(0);
            let room = self
                .share
                .saturating_sub(sender.outstanding() + buffered)
                .min(available.saturating_sub(reserve));
            let amount = room.min(sender.wanted.saturating_sub(sender.granted)).max(need);
            sender.granted += amount;
            self.outstanding += amount;
            sender.grant_due = true;
            sender.is_waiting = false;
            self.waiting.pop_front();
        }
        if self.waiting.is_empty() {
            self.next_reclaim_at = None;
            self.top_up();
        } else {
            self.reclaim_unused(now);
        }
        assert!(self.outstanding() <= self.budget, "the outstanding grants exceed the budget");
    }

    /// Raises every sender that wants more to the share.
    fn top_up(&mut self) {
        let worth_a_message = (self.share / 4).max(MAX_FRAME_CHARGE);
        let mut available = self.available().saturating_sub(self.reserve());
        for (address, sender) in self.senders.iter_mut().filter(|(_, sender)| sender.wants_more()) {
            let buffered = self.buffered.get(address).copied().unwrap_or(0);
            let room = self.share.saturating_sub(sender.outstanding() + buffered);
            let amount = room.min(sender.wanted.saturating_sub(sender.granted)).min(available);
            if amount >= worth_a_message {
                sender.granted += amount;
                self.outstanding += amount;
                available -= amount;
                sender.grant_due = true;
            }
        }
    }

    /// Asks senders that hold more than they may keep to return it, each at most once per interval.
    fn reclaim_unused(&mut self, now: u64) {
        self.next_reclaim_at = Some(now + RECLAIM_INTERVAL);
        for sender in self.senders.values_mut() {
            let keep = if self.is_oversubscribed || !sender.wants_more() { 0 } else { self.share };
            if sender.outstanding() > keep && now >= sender.reclaimed_at + RECLAIM_INTERVAL {
                sender.reclaimed_at = now;
                sender.grant_due = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

    /// The total grant of a sender that wants as much as possible.
    fn granted(issuer: &mut GrantIssuer, consumed: u64, now: u64) -> u64 {
        let request = GrantRequest { consumed, returned: 0, needed: consumed + 1, wanted: u64::MAX };
        issuer.on_request(PEER, &request, now);
        issuer.transmit(now).expect("a grant").1.granted
    }

    #[test]
    fn buffered_bytes_make_no_room_for_new_grants() {
        const BUDGET: u64 = 100_000;
        let mut issuer = GrantIssuer::new(BUDGET);
        let first = granted(&mut issuer, 0, 0);
        assert_eq!(issuer.record_received(PEER, first), first);
        issuer.add_buffered(PEER, first);
        assert_eq!(issuer.outstanding(), first);
        // The socket is empty, but no more room is available than before.
        issuer.on_socket_empty(0);
        let second = granted(&mut issuer, first, 0);
        assert!(second <= BUDGET, "{second} in all, while {first} are buffered");
        issuer.limit_buffered(PEER, 0);
        assert!(granted(&mut issuer, first, 0) > BUDGET);
        let stranger = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 3));
        assert_eq!(issuer.record_received(stranger, BUDGET), 0, "bytes without a grant are not counted");
    }

    #[test]
    fn first_sender_leaves_room_for_the_next() {
        const BUDGET: u64 = 1 << 20;
        let mut issuer = GrantIssuer::new(BUDGET);
        let first = granted(&mut issuer, 0, 0);
        assert_eq!(first, BUDGET - BUDGET / 8);
        // The share becomes available only after the socket has been empty for a while; a new sender does not starve
        // until then.
        issuer.remove_sender(PEER, 0);
        let request = GrantRequest { consumed: 0, returned: 0, needed: 1, wanted: u64::MAX };
        issuer.on_request(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 3)), &request, 0);
        assert!(issuer.transmit(0).is_some_and(|(_, grant)| grant.granted > 0));
    }
}
