//! Receive queues, shared ones included.
//!
//! A slot is the request's id, its number of entries, and scatter entries of two words each.

use crate::ring::{Ring, high, load, low, pair, store};
use crate::{CorruptRing, InvalidWorkRequest, QueueFull, RingLayout, Sge, SharedWords};
use core::sync::atomic::{Ordering, fence};
use softhca_wire::LocalKey;

const HEADER: usize = 2;

/// A receive work request, as an application posts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveWorkRequest<'a> {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// Where incoming data goes.
    pub sg_list: &'a [Sge],
}

/// The application's end.
pub struct ReceiveProducer {
    ring: Ring,
    max_sge: usize,
    produced: u64,
}

/// The card's end.
pub struct ReceiveConsumer {
    ring: Ring,
    max_sge: usize,
    dequeued: u64,
}

/// A receive queue on the heap of this process.
pub fn receive_ring(slots: u32, entries: usize) -> (ReceiveProducer, ReceiveConsumer) {
    let words = SharedWords::heap(ReceiveProducer::layout(slots, entries).words());
    (ReceiveProducer::new(words.clone(), slots, entries), ReceiveConsumer::new(words, slots, entries))
}

impl ReceiveProducer {
    /// The ring's shape for these limits.
    pub const fn layout(slots: u32, entries: usize) -> RingLayout {
        RingLayout { slots, stride: (HEADER + entries * 2) as u32 }
    }

    /// The application's end of the ring in `words`.
    pub fn new(words: SharedWords, slots: u32, entries: usize) -> ReceiveProducer {
        ReceiveProducer {
            ring: Ring::new(words, Self::layout(slots, entries)),
            max_sge: entries,
            produced: 0,
        }
    }

    /// How many requests may wait.
    pub fn slots(&self) -> u32 {
        self.ring.slots()
    }

    /// Places a request that the card will see after [`ReceiveProducer::publish`].
    pub fn enqueue(&mut self, receive: &ReceiveWorkRequest<'_>) -> Result<(), InvalidWorkRequest> {
        let slots = self.ring.slots();
        let used = self.produced.wrapping_sub(self.ring.consumer_index().load(Ordering::Acquire));
        if used >= u64::from(slots) {
            return Err(QueueFull { slots }.into());
        }
        if receive.sg_list.len() > self.max_sge {
            let (entries, limit) = (receive.sg_list.len(), self.max_sge);
            return Err(InvalidWorkRequest::TooManySges { sges: entries, limit });
        }
        let slot = self.ring.slot(self.produced);
        store(&slot[0], receive.wr_id);
        store(&slot[1], receive.sg_list.len() as u64);
        for (words, entry) in slot[HEADER..].chunks_exact(2).zip(receive.sg_list) {
            store(&words[0], entry.address);
            store(&words[1], pair(entry.length, entry.lkey.0));
        }
        self.produced += 1;
        Ok(())
    }

    /// Shows the card everything that was placed. True means that the card wants a doorbell, because it
    /// would otherwise not look: the queue pair is in the error state and flushes.
    #[inline]
    #[must_use = "true asks for a doorbell"]
    pub fn publish(&mut self) -> bool {
        self.ring.producer_index().store(self.produced, Ordering::Release);
        fence(Ordering::SeqCst);
        self.ring.control().load(Ordering::Relaxed) != 0
    }

    /// Forgets everything that was placed and not published.
    pub fn discard_unpublished(&mut self) {
        self.produced = self.ring.producer_index().load(Ordering::Relaxed);
    }
}

impl ReceiveConsumer {
    /// The card's end of the ring in `words`.
    pub fn new(words: SharedWords, slots: u32, entries: usize) -> ReceiveConsumer {
        ReceiveConsumer {
            ring: Ring::new(words, ReceiveProducer::layout(slots, entries)),
            max_sge: entries,
            dequeued: 0,
        }
    }

    /// The card's end of a ring whose card is gone: goes on where that one stopped.
    pub fn resume(words: SharedWords, slots: u32, entries: usize) -> ReceiveConsumer {
        let mut consumer = ReceiveConsumer::new(words, slots, entries);
        consumer.dequeued = consumer.ring.consumer_index().load(Ordering::Acquire);
        consumer
    }

    /// How many requests may wait.
    pub fn slots(&self) -> u32 {
        self.ring.slots()
    }

    /// The most scatter entries of one request.
    pub fn max_sge(&self) -> usize {
        self.max_sge
    }

    /// How many requests wait.
    #[inline]
    pub fn pending(&self) -> Result<u32, CorruptRing> {
        Ok((self.ring.checked_producer_index(self.dequeued, self.dequeued)? - self.dequeued) as u32)
    }

    /// Takes the next request: its scatter entries go to `scatter`, which is cleared first, and its id is
    /// returned. The application gets the slot back at once.
    #[inline]
    pub fn dequeue(&mut self, scatter: &mut alloc::vec::Vec<Sge>) -> Result<Option<u64>, CorruptRing> {
        if self.pending()? == 0 {
            return Ok(None);
        }
        let id = self.read(self.dequeued, scatter);
        self.dequeued += 1;
        self.ring.consumer_index().store(self.dequeued, Ordering::Release);
        Ok(Some(id))
    }

    /// Looks at the scatter entries of the request that has `before` others before it. False if there is none. The
    /// application may still change them.
    #[inline]
    pub fn peek(&self, before: u32, scatter: &mut alloc::vec::Vec<Sge>) -> bool {
        let is_there = self.pending().is_ok_and(|waiting| before < waiting);
        if is_there {
            self.read(self.dequeued + u64::from(before), scatter);
        }
        is_there
    }

    /// Copies the scatter entries of a slot and returns its id.
    #[inline]
    fn read(&self, index: u64, scatter: &mut alloc::vec::Vec<Sge>) -> u64 {
        let slot = self.ring.slot(index);
        let count = (load(&slot[1]) as usize).min(self.max_sge);
        scatter.clear();
        scatter.extend(slot[HEADER..].chunks_exact(2).take(count).map(|words| {
            let second = load(&words[1]);
            Sge { address: load(&words[0]), length: low(second), lkey: LocalKey(high(second)) }
        }));
        load(&slot[0])
    }

    /// Asks that every post ring the doorbell, or no longer. Look at the ring once more afterwards.
    pub fn request_doorbell(&self, wanted: bool) {
        self.ring.control().store(u64::from(wanted), Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Forgets every waiting request: the queue pair was reset.
    pub fn reset(&mut self) {
        self.dequeued = self.ring.producer_index().load(Ordering::Acquire);
        self.ring.consumer_index().store(self.dequeued, Ordering::Release);
    }
}
