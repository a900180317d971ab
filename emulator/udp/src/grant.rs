//! Grants: permission to put bytes into somebody's receive buffer.
//!
//! A full receive buffer drops in silence, and all senders share it. So the receiver's [`Granter`] hands out
//! shares of the buffer, in the kernel's own measure ([`charge`]), and each sender's [`Holder`] spends what it
//! was given. What is outstanding over all senders never exceeds the budget. State machines without I/O:
//! time comes in as nanoseconds, messages go in and out as values, any of them may be lost.

use softhca_wire::link::{Grant, Request};
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

const MILLISECOND: u64 = 1_000_000;
/// How long after a REQUEST an empty socket proves that all it speaks of has arrived or is lost: a datagram
/// may wait in another processor's backlog while the REQUEST overtakes it.
const SETTLE: u64 = 5 * MILLISECOND;
/// How often senders are told that others wait.
const PRESS: u64 = 5 * MILLISECOND;
/// How long a sender waits for an answer, at first and at most.
const PATIENCE: u64 = MILLISECOND;
const MOST_PATIENCE: u64 = 64 * MILLISECOND;
/// How long grants that were urgently asked for may lie unused.
const HOLD: u64 = 50 * MILLISECOND;
/// How long an idle sender keeps its share.
const IDLE: u64 = 1000 * MILLISECOND;
/// How far ahead a busy sender asks. More than any buffer, so that receivers keep granting by themselves.
const APPETITE: u64 = 1 << 28;

/// The most that the kernel charges a receive buffer for `segments` datagrams of `len` bytes sent as one run.
///
/// Measured on loopback with SO_MEMINFO (Linux 6.18). A datagram of its own costs its allocation, a power of
/// two that holds it, 379 bytes of headers and bookkeeping (20 more over IPv6), and a descriptor of 256; a
/// run is charged its bytes and one small allocation of 832 in all. Both are rounded up here for other builds.
pub const fn charge(len: usize, segments: usize) -> u64 {
    if segments <= 1 {
        let allocation = (len as u64 + 448).next_power_of_two();
        256 + if allocation < 768 { 768 } else { allocation }
    } else {
        1024 + len as u64 * segments as u64
    }
}

/// What the largest RoCE frame is charged. A sender that asks gets at least this much, in its turn.
pub const LARGEST_CHARGE: u64 = charge(4096 + 128, 1);

/// How much of a receive buffer can be granted: up to a quarter stays charged after it was read, and Linux 6.18 charges
/// what it puts into the socket twice for a while, until it has woken the reader. A processor can be taken from a virtual
/// machine in the middle of that while another goes on; so all that is granted may be there twice.
pub const fn budget(receive_buffer: usize) -> u64 {
    let safe = receive_buffer as u64 / 4 * 3 / 2;
    if safe < LARGEST_CHARGE { LARGEST_CHARGE } else { safe }
}

/// A receiver's view of one sender.
#[derive(Debug, Default)]
struct Sender {
    granted: u64,
    returned: u64,
    /// Taken out of the socket, or known to be lost.
    drained: u64,
    needed: u64,
    wanted: u64,
    /// What the sender says it has consumed, and when it said so; settled when the socket is empty.
    claimed: u64,
    claimed_at: u64,
    /// So much may be in the socket that was sent before the first grant, if the socket was not empty since.
    strays: u64,
    since: u64,
    /// The furthest `consumed + returned` seen, which dates a REQUEST.
    reached: u64,
    waits: bool,
    announce: bool,
    pressed_at: u64,
}

impl Sender {
    /// What it may still put, or has put, into the buffer.
    fn outstanding(&self) -> u64 {
        self.granted - self.returned - self.drained
    }

    fn wants(&self) -> bool {
        self.wanted.max(self.needed) > self.granted
    }
}

/// The receiving side: divides one receive buffer among all who send to it.
#[derive(Debug)]
pub struct Granter {
    budget: u64,
    senders: BTreeMap<IpAddr, Sender>,
    /// Who needs a grant for the very next frame, in the order of asking.
    waiting: VecDeque<IpAddr>,
    /// The sums over all senders, the strays of forgotten ones included.
    outstanding: u64,
    strays: u64,
    /// What forgotten senders may still have in the socket, and when the last was forgotten.
    retired: BTreeMap<IpAddr, u64>,
    retired_strays: u64,
    retired_at: u64,
    /// What was granted, was taken out of the socket, and still waits to enter the network of this process.
    held: BTreeMap<IpAddr, u64>,
    /// The next claim that an empty socket may settle.
    settle_at: Option<u64>,
    /// When to tell senders again that others wait.
    press_at: Option<u64>,
    share: u64,
    crowded: bool,
    changed: bool,
}

impl Granter {
    /// A granter of `budget` bytes of charge; see [`budget`].
    pub fn new(budget: u64) -> Granter {
        Granter {
            budget,
            senders: BTreeMap::new(),
            waiting: VecDeque::new(),
            outstanding: 0,
            strays: 0,
            retired: BTreeMap::new(),
            retired_strays: 0,
            retired_at: 0,
            held: BTreeMap::new(),
            settle_at: None,
            press_at: None,
            share: budget,
            crowded: false,
            changed: false,
        }
    }

    /// How much there is to divide.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// How much of it is in senders' hands, in the socket, or held behind it.
    pub fn outstanding(&self) -> u64 {
        self.outstanding + self.retired.values().sum::<u64>() + self.held.values().sum::<u64>()
    }

    /// How much may be granted now.
    fn free(&self) -> u64 {
        self.budget.saturating_sub(self.outstanding() + self.strays)
    }

    /// So much of what was received is kept: it does not make room for more.
    pub fn hold(&mut self, from: IpAddr, granted: u64) {
        if granted > 0 {
            *self.held.entry(from).or_default() += granted;
        }
    }

    /// At most so much of what was received from a sender is still kept.
    pub fn let_go(&mut self, from: IpAddr, kept: u64) {
        if let Some(held) = self.held.get_mut(&from) {
            self.changed |= kept < *held;
            *held = kept.min(*held);
            if *held == 0 {
                self.held.remove(&from);
            }
        }
    }

    /// Takes in what a sender says.
    pub fn request(&mut self, from: IpAddr, request: &Request, now: u64) {
        let sender = self.senders.entry(from).or_insert_with(|| {
            // Consumed before anything was granted: an earlier life of this port had granted it, or the sender took
            // us for a port of another make. The last of it may have come to this socket.
            let consumed = request.consumed;
            let strays = consumed.min(self.budget);
            self.strays += strays;
            Sender { granted: consumed, drained: consumed, strays, since: now, ..Sender::default() }
        });
        let reached = request.consumed.saturating_add(request.returned);
        if reached < sender.reached {
            return;
        }
        sender.reached = reached;
        let back = request.returned.min(sender.granted - sender.drained).saturating_sub(sender.returned);
        sender.returned += back;
        self.outstanding -= back;
        let claim = request.consumed.min(sender.granted - sender.returned);
        if claim > sender.drained && sender.claimed <= sender.drained {
            (sender.claimed, sender.claimed_at) = (claim, now);
            self.settle_at.get_or_insert(now + SETTLE);
        }
        if sender.strays > 0 {
            self.settle_at.get_or_insert(now + SETTLE);
        }
        (sender.needed, sender.wanted) = (request.needed, request.wanted);
        if sender.needed > sender.granted && !sender.waits {
            sender.waits = true;
            self.waiting.push_back(from);
        }
        sender.announce = true;
        self.changed = true;
    }

    /// Counts a chunk that was taken out of the socket. Returns how much of it had been granted.
    pub fn received(&mut self, from: IpAddr, mut charge: u64) -> u64 {
        let mut granted = 0;
        // What was there when the sender was forgotten comes first.
        if let Some(retired) = self.retired.get_mut(&from) {
            let old = charge.min(*retired);
            *retired -= old;
            charge -= old;
            granted += old;
            self.changed = true;
        }
        if let Some(sender) = self.senders.get_mut(&from) {
            let stray = charge.min(sender.strays);
            sender.strays -= stray;
            self.strays -= stray;
            let drained = (charge - stray).min(sender.outstanding());
            sender.drained += drained;
            self.outstanding -= drained;
            granted += drained;
            self.changed = true;
        }
        granted
    }

    /// Forgets a sender: it restarted, or it is dead. What it had is granted to others when the socket
    /// has been seen empty.
    pub fn retire(&mut self, from: IpAddr, now: u64) {
        if let Some(sender) = self.senders.remove(&from) {
            self.waiting.retain(|waiting| *waiting != from);
            self.outstanding -= sender.outstanding();
            self.retired_strays += sender.strays;
            *self.retired.entry(from).or_default() += sender.outstanding();
            self.retired_at = now;
            self.changed = true;
        }
    }

    /// Learns that nothing is left in the socket.
    pub fn socket_empty(&mut self, now: u64) {
        if !self.retired.is_empty() && now >= self.retired_at + SETTLE {
            self.retired.clear();
            self.strays -= std::mem::take(&mut self.retired_strays);
            self.changed = true;
        }
        if self.settle_at.is_none_or(|at| now < at) {
            return;
        }
        self.settle_at = None;
        for sender in self.senders.values_mut() {
            if now >= sender.since + SETTLE {
                self.changed |= sender.strays > 0;
                self.strays -= std::mem::take(&mut sender.strays);
            }
            let claimed = sender.claimed > sender.drained;
            if claimed && now >= sender.claimed_at + SETTLE {
                let lost = (sender.claimed - sender.drained).min(sender.outstanding());
                sender.drained += lost;
                self.outstanding -= lost;
                self.changed = true;
            } else if claimed || sender.strays > 0 {
                let at = SETTLE + if claimed { sender.claimed_at } else { sender.since };
                self.settle_at = Some(self.settle_at.map_or(at, |other| other.min(at)));
            }
        }
    }

    /// When to look again, even if nothing arrives: then read the socket, and say if it was empty.
    pub fn next_timeout(&self) -> Option<u64> {
        let retired = (!self.retired.is_empty()).then(|| self.retired_at + SETTLE);
        [retired, self.settle_at, self.press_at].into_iter().flatten().min()
    }

    /// The next GRANT to send, if there is one.
    pub fn transmit(&mut self, now: u64) -> Option<(IpAddr, Grant)> {
        if self.changed || self.press_at.is_some_and(|at| now >= at) {
            self.changed = false;
            self.distribute(now);
        } else if self.senders.values().all(|sender| !sender.announce) {
            return None;
        }
        let (address, sender) = self.senders.iter_mut().find(|(_, sender)| sender.announce)?;
        sender.announce = false;
        let keep = match self.waiting.is_empty() {
            false if self.crowded || !sender.wants() => 0,
            _ => self.share,
        };
        let Sender { granted, returned, .. } = *sender;
        Some((*address, Grant { granted, returned, keep }))
    }

    /// What newcomers need to begin is kept back from all who have enough for their next frame.
    fn reserve(&self) -> u64 {
        (self.budget / 8).max(LARGEST_CHARGE)
    }

    /// Gives what is free: first to those who cannot send at all, in the order of asking, then up to an equal
    /// share to those who want more. If somebody still waits, asks the others for what they do not use.
    fn distribute(&mut self, now: u64) {
        let wanting = self.senders.values().filter(|sender| sender.wants()).count().max(1) as u64;
        self.crowded = wanting * LARGEST_CHARGE > self.budget;
        self.share = (self.budget / wanting).max(LARGEST_CHARGE);
        let reserve = self.reserve();
        while let Some(address) = self.waiting.front() {
            let free = self.free();
            let sender = self.senders.get_mut(address).expect("who waits is known");
            let need = sender.needed.saturating_sub(sender.granted).min(LARGEST_CHARGE);
            if need > free {
                break;
            }
            let held = self.held.get(address).copied().unwrap_or(0);
            let room =
                self.share.saturating_sub(sender.outstanding() + held).min(free.saturating_sub(reserve));
            let amount = room.min(sender.wanted.saturating_sub(sender.granted)).max(need);
            sender.granted += amount;
            self.outstanding += amount;
            sender.announce = true;
            sender.waits = false;
            self.waiting.pop_front();
        }
        if self.waiting.is_empty() {
            self.press_at = None;
            self.top_up();
        } else {
            self.press(now);
        }
        assert!(self.outstanding() <= self.budget, "more is granted than there is");
    }

    /// Brings everybody who wants more up to the share.
    fn top_up(&mut self) {
        let worth_a_message = (self.share / 4).max(LARGEST_CHARGE);
        let mut free = self.free().saturating_sub(self.reserve());
        for (address, sender) in self.senders.iter_mut().filter(|(_, sender)| sender.wants()) {
            let held = self.held.get(address).copied().unwrap_or(0);
            let room = self.share.saturating_sub(sender.outstanding() + held);
            let amount = room.min(sender.wanted.saturating_sub(sender.granted)).min(free);
            if amount >= worth_a_message {
                sender.granted += amount;
                self.outstanding += amount;
                free -= amount;
                sender.announce = true;
            }
        }
    }

    /// Tells those who hold more than they may keep, each not too often.
    fn press(&mut self, now: u64) {
        self.press_at = Some(now + PRESS);
        for sender in self.senders.values_mut() {
            let keep = if self.crowded || !sender.wants() { 0 } else { self.share };
            if sender.outstanding() > keep && now >= sender.pressed_at + PRESS {
                sender.pressed_at = now;
                sender.announce = true;
            }
        }
    }
}

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
    use std::net::Ipv4Addr;

    const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

    /// What a sender that wants all that it can get is granted in all.
    fn granted(granter: &mut Granter, consumed: u64, now: u64) -> u64 {
        let request = Request { consumed, returned: 0, needed: consumed + 1, wanted: u64::MAX };
        granter.request(PEER, &request, now);
        granter.transmit(now).expect("an answer").1.granted
    }

    #[test]
    fn what_is_held_behind_the_socket_makes_no_room_for_more() {
        const BUDGET: u64 = 100_000;
        let mut granter = Granter::new(BUDGET);
        let first = granted(&mut granter, 0, 0);
        assert_eq!(granter.received(PEER, first), first);
        granter.hold(PEER, first);
        assert_eq!(granter.outstanding(), first);
        // The socket is empty, and yet there is no more room than before.
        granter.socket_empty(0);
        let second = granted(&mut granter, first, 0);
        assert!(second <= BUDGET, "{second} in all, while {first} are held");
        granter.let_go(PEER, 0);
        assert!(granted(&mut granter, first, 0) > BUDGET);
        let stranger = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 3));
        assert_eq!(granter.received(stranger, BUDGET), 0, "what nobody granted is held against nobody");
    }

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
    fn the_first_leaves_room_for_the_next() {
        const BUDGET: u64 = 1 << 20;
        let mut granter = Granter::new(BUDGET);
        let first = granted(&mut granter, 0, 0);
        assert_eq!(first, BUDGET - BUDGET / 8);
        // Its place is taken again only when the socket was empty for a while; whoever comes meanwhile does not starve.
        granter.retire(PEER, 0);
        let request = Request { consumed: 0, returned: 0, needed: 1, wanted: u64::MAX };
        granter.request(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 3)), &request, 0);
        assert!(granter.transmit(0).is_some_and(|(_, grant)| grant.granted > 0));
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
