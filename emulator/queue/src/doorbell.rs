//! The doorbell ring: the queue pairs of a client that have new WQEs.
//!
//! Any number of threads ring, one HCA reads. A queue pair whose doorbell is pending is not added again, so a ring
//! with one slot per queue pair never overflows.

use crate::SharedWords;
use crate::sync::{AtomicU64, Ordering, fence};
use softhca_wire::Qpn;

const PRODUCER_INDEX: usize = 0;
const SLOTS: usize = 8;

/// The application's side of a doorbell ring.
#[derive(Clone)]
pub struct DoorbellProducer {
    words: SharedWords,
    slots: u64,
}

/// The HCA's side of a doorbell ring.
pub struct DoorbellConsumer {
    words: SharedWords,
    slots: u64,
    /// The slot of the next doorbell.
    next: usize,
}

/// Set while the HCA sleeps, or is about to: producers of doorbells must wake it.
///
/// The HCA sets the flag and polls the doorbells once more before it sleeps. A producer rings and reads the flag. Both
/// have a full fence in between, so that the producer sees the flag or the HCA sees the doorbell.
#[derive(Clone)]
pub struct SleepFlag {
    words: SharedWords,
}

impl SleepFlag {
    /// The size in words.
    pub const WORDS: usize = 1;

    /// The flag in the first of `words`. Producers in other processes map it read-only.
    ///
    /// # Panics
    /// If there is no word.
    pub fn new(words: SharedWords) -> SleepFlag {
        assert!(words.len() >= Self::WORDS, "a sleep flag has a word");
        SleepFlag { words }
    }

    /// Sets the flag. Poll the doorbells afterwards.
    #[inline]
    pub fn set(&self) {
        self.words[0].store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Clears the flag: the HCA polls.
    #[inline]
    pub fn clear(&self) {
        self.words[0].store(0, Ordering::Release);
    }

    /// Whether the HCA must be woken, after a doorbell.
    #[inline]
    pub fn is_set(&self) -> bool {
        self.words[0].load(Ordering::Acquire) != 0
    }
}

/// Creates a doorbell ring for up to `slots` queue pairs on the heap of this process.
pub fn doorbell_ring(slots: u32) -> (DoorbellProducer, DoorbellConsumer) {
    let words = SharedWords::heap(DoorbellProducer::words(slots));
    (DoorbellProducer::new(words.clone(), slots), DoorbellConsumer::new(words, slots))
}

impl DoorbellProducer {
    /// The size in words of a doorbell ring for `slots` queue pairs.
    pub const fn words(slots: u32) -> usize {
        SLOTS + slots as usize
    }

    /// The application's side of the ring in `words`.
    pub fn new(words: SharedWords, slots: u32) -> DoorbellProducer {
        assert!(words.len() >= Self::words(slots), "a doorbell ring for {slots} queue pairs");
        DoorbellProducer { words, slots: u64::from(slots) }
    }

    /// Rings for `qpn`, unless `rung`, a flag of that queue pair, is set: its last doorbell is still pending.
    ///
    /// Read the [`SleepFlag`] of the HCA afterwards, and wake it if the flag is set.
    #[inline]
    pub fn ring(&self, qpn: Qpn, rung: &AtomicU64) {
        if rung.swap(1, Ordering::AcqRel) == 0 {
            let index = self.words[PRODUCER_INDEX].fetch_add(1, Ordering::Relaxed);
            let slot = &self.words[SLOTS + (index % self.slots) as usize];
            slot.store(u64::from(qpn.value()) + 1, Ordering::Release);
            // Pairs with `SleepFlag::set`. If the flag was set before, the producer that set it wakes the HCA.
            fence(Ordering::SeqCst);
        }
    }
}

impl DoorbellConsumer {
    /// The HCA's side of the ring in `words`.
    pub fn new(words: SharedWords, slots: u32) -> DoorbellConsumer {
        assert!(words.len() >= DoorbellProducer::words(slots), "a doorbell ring for {slots} queue pairs");
        DoorbellConsumer { words, slots: u64::from(slots), next: 0 }
    }

    /// Whether a doorbell is pending.
    #[inline]
    pub fn is_rung(&self) -> bool {
        self.slot().load(Ordering::Acquire) != 0
    }

    #[inline]
    fn slot(&self) -> &AtomicU64 {
        &self.words[SLOTS + self.next]
    }

    /// Removes the next queue pair from the ring. The number is not validated: the client wrote it.
    #[inline]
    pub fn pop(&mut self) -> Option<Qpn> {
        if !self.is_rung() {
            return None;
        }
        // A hostile client may have cleared the slot in between.
        let number = self.slot().swap(0, Ordering::AcqRel).checked_sub(1)?;
        // A division takes longer than the rest.
        self.next = if self.next + 1 == self.slots as usize { 0 } else { self.next + 1 };
        Some(Qpn::new(number as u32))
    }

    /// Removes all pending queue pairs, at most one round of the ring.
    #[inline]
    pub fn drain(&mut self) -> impl Iterator<Item = Qpn> {
        (0..self.slots).map_while(|_| self.pop())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_pair_is_added_once_until_it_is_removed() {
        let (producer, mut consumer) = doorbell_ring(2);
        let (a, b) = (AtomicU64::new(0), AtomicU64::new(0));
        producer.ring(Qpn::new(0), &a);
        producer.ring(Qpn::new(0), &a);
        producer.ring(Qpn::new(9), &b);
        assert!(consumer.drain().eq([Qpn::new(0), Qpn::new(9)]));
        a.store(0, Ordering::SeqCst);
        producer.ring(Qpn::new(0), &a);
        assert_eq!(consumer.pop(), Some(Qpn::new(0)));
        assert_eq!(consumer.pop(), None);
    }
}
