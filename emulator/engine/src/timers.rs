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
