//! A heap of deadlines for all queue pairs.
//!
//! Only the earliest entry of a queue pair is valid. When a deadline moves away its entry stays and expires early,
//! which is cheaper than an update of the heap with each packet.

use crate::Instant;
use alloc::collections::BinaryHeap;
use core::cmp::Reverse;
use softhca_wire::Qpn;

#[derive(Default)]
pub(crate) struct Timers {
    /// The first deadline of the heap, cached because every packet reads it.
    next: Option<Instant>,
    heap: BinaryHeap<Reverse<(Instant, Qpn)>>,
}

impl Timers {
    pub fn push(&mut self, at: Instant, queue_pair: Qpn) {
        self.heap.push(Reverse((at, queue_pair)));
        self.next = Some(self.next.map_or(at, |next| next.min(at)));
    }

    #[inline]
    pub fn next(&self) -> Option<Instant> {
        self.next
    }

    pub fn pop(&mut self, now: Instant) -> Option<(Instant, Qpn)> {
        if self.next? > now {
            return None;
        }
        let Reverse(entry) = self.heap.pop()?;
        self.next = self.heap.peek().map(|Reverse((at, _))| *at);
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(nanoseconds: u64) -> Instant {
        Instant::from_nanos(nanoseconds)
    }

    #[test]
    fn entries_expire_in_order_and_not_before_their_time() {
        let mut timers = Timers::default();
        assert_eq!((timers.next(), timers.pop(at(100))), (None, None));
        for (time, qpn) in [(30, 3), (10, 1), (20, 2)] {
            timers.push(at(time), Qpn::new(qpn));
        }
        assert_eq!(timers.next(), Some(at(10)));
        assert_eq!(timers.pop(at(9)), None);
        assert_eq!(timers.pop(at(25)), Some((at(10), Qpn::new(1))));
        assert_eq!(timers.pop(at(25)), Some((at(20), Qpn::new(2))));
        assert_eq!(timers.pop(at(25)), None);
        assert_eq!(timers.next(), Some(at(30)));
    }

    #[test]
    fn an_earlier_entry_of_the_same_queue_pair_comes_first() {
        let mut timers = Timers::default();
        timers.push(at(30), Qpn::new(1));
        timers.push(at(10), Qpn::new(1));
        assert_eq!(timers.pop(at(10)), Some((at(10), Qpn::new(1))));
        assert_eq!(timers.next(), Some(at(30)));
    }
}
