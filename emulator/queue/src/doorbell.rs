//! Doorbells: which queue pairs of a client have something new.
//!
//! Any number of threads ring, one card listens. A queue pair that already rang is not added again until
//! the card has heard it, so a ring with a slot per queue pair never fills.

use crate::SharedWords;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};
use softhca_wire::Qpn;

const PRODUCER_INDEX: usize = 0;
const SLOTS: usize = 8;

/// The application's end.
#[derive(Clone)]
pub struct DoorbellProducer {
    words: SharedWords,
    slots: u64,
}

/// The card's end.
pub struct DoorbellConsumer {
    words: SharedWords,
    slots: u64,
    next: u64,
}

/// A doorbell ring on the heap of this process, for up to `slots` queue pairs.
pub fn doorbell_ring(slots: u32) -> (DoorbellProducer, DoorbellConsumer) {
    let words = SharedWords::heap(DoorbellProducer::words(slots));
    (DoorbellProducer::new(words.clone(), slots), DoorbellConsumer::new(words, slots))
}

impl DoorbellProducer {
    /// Words that a doorbell ring for `slots` queue pairs takes.
    pub const fn words(slots: u32) -> usize {
        SLOTS + slots as usize
    }

    /// The application's end of the ring in `words`.
    pub fn new(words: SharedWords, slots: u32) -> DoorbellProducer {
        assert!(words.len() >= Self::words(slots), "a doorbell ring for {slots} queue pairs");
        DoorbellProducer { words, slots: u64::from(slots) }
    }

    /// Rings for `queue_pair`, unless `rung`, a flag of that queue pair's, says that the card has not heard
    /// the last time yet. Whoever looks afterwards whether the card sleeps, as the card says before it looks here a last
    /// time, sees it sleep or is heard: all four accesses are in one order.
    #[inline]
    pub fn ring(&self, queue_pair: Qpn, rung: &AtomicU64) {
        if rung.swap(1, Ordering::SeqCst) == 0 {
            let index = self.words[PRODUCER_INDEX].fetch_add(1, Ordering::Relaxed);
            let slot = &self.words[SLOTS + (index % self.slots) as usize];
            slot.store(u64::from(queue_pair.value()) + 1, Ordering::SeqCst);
        }
    }
}

impl DoorbellConsumer {
    /// The card's end of the ring in `words`.
    pub fn new(words: SharedWords, slots: u32) -> DoorbellConsumer {
        assert!(words.len() >= DoorbellProducer::words(slots), "a doorbell ring for {slots} queue pairs");
        DoorbellConsumer { words, slots: u64::from(slots), next: 0 }
    }

    /// Whether somebody rang.
    #[inline]
    pub fn is_rung(&self) -> bool {
        self.slot().load(Ordering::SeqCst) != 0
    }

    #[inline]
    fn slot(&self) -> &AtomicU64 {
        &self.words[SLOTS + (self.next % self.slots) as usize]
    }

    /// The next queue pair that rang. The number is whatever the client wrote: look it up with care.
    #[inline]
    pub fn pop(&mut self) -> Option<Qpn> {
        if !self.is_rung() {
            return None;
        }
        // A client that takes its ring back in between leaves nothing.
        let number = self.slot().swap(0, Ordering::AcqRel).checked_sub(1)?;
        self.next += 1;
        Some(Qpn::new(number as u32))
    }

    /// Everything that rang, at most once around the ring.
    pub fn drain(&mut self, into: &mut Vec<Qpn>) {
        for _ in 0..self.slots {
            match self.pop() {
                Some(queue_pair) => into.push(queue_pair),
                None => break,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_pair_rings_once_until_it_is_heard() {
        let (producer, mut consumer) = doorbell_ring(2);
        let (a, b) = (AtomicU64::new(0), AtomicU64::new(0));
        producer.ring(Qpn::new(0), &a);
        producer.ring(Qpn::new(0), &a);
        producer.ring(Qpn::new(9), &b);
        let mut heard = Vec::new();
        consumer.drain(&mut heard);
        assert_eq!(heard, [Qpn::new(0), Qpn::new(9)]);
        a.store(0, Ordering::SeqCst);
        producer.ring(Qpn::new(0), &a);
        assert_eq!(consumer.pop(), Some(Qpn::new(0)));
        assert_eq!(consumer.pop(), None);
    }
}
