//! Receive queues, shared ones included.
//!
//! A slot is the request's id, its number of entries, and scatter entries of two words each.

use crate::ring::{Ring, high, load, low, pair, store};
use crate::{BadRequest, Full, Impossible, Sge, Shape, Words};
use core::sync::atomic::{Ordering, fence};
use softhca_wire::LocalKey;

const HEADER: usize = 2;

/// A receive work request, as an application posts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receive<'a> {
    /// Comes back in the completion.
    pub id: u64,
    /// Where incoming data goes.
    pub scatter: &'a [Sge],
}

/// The application's end.
pub struct ReceiveProducer {
    ring: Ring,
    entries: usize,
    produced: u64,
}

/// The card's end.
pub struct ReceiveConsumer {
    ring: Ring,
    entries: usize,
    taken: u64,
}

/// A receive queue on the heap of this process.
pub fn receive_ring(slots: u32, entries: usize) -> (ReceiveProducer, ReceiveConsumer) {
    let words = Words::heap(ReceiveProducer::shape(slots, entries).words());
    (ReceiveProducer::new(words.clone(), slots, entries), ReceiveConsumer::new(words, slots, entries))
}

impl ReceiveProducer {
    /// The ring's shape for these limits.
    pub const fn shape(slots: u32, entries: usize) -> Shape {
        Shape { slots, stride: (HEADER + entries * 2) as u32 }
    }

    /// The application's end of the ring in `words`.
    pub fn new(words: Words, slots: u32, entries: usize) -> ReceiveProducer {
        ReceiveProducer { ring: Ring::new(words, Self::shape(slots, entries)), entries, produced: 0 }
    }

    /// How many requests may wait.
    pub fn slots(&self) -> u32 {
        self.ring.slots()
    }

    /// Places a request that the card will see after [`ReceiveProducer::publish`].
    pub fn place(&mut self, receive: &Receive<'_>) -> Result<(), BadRequest> {
        let slots = self.ring.slots();
        let used = self.produced.wrapping_sub(self.ring.consumed().load(Ordering::Acquire));
        if used >= u64::from(slots) {
            return Err(Full { slots }.into());
        }
        if receive.scatter.len() > self.entries {
            let (entries, limit) = (receive.scatter.len(), self.entries);
            return Err(BadRequest::TooManyEntries { entries, limit });
        }
        let slot = self.ring.slot(self.produced);
        store(&slot[0], receive.id);
        store(&slot[1], receive.scatter.len() as u64);
        for (words, entry) in slot[HEADER..].chunks_exact(2).zip(receive.scatter) {
            store(&words[0], entry.address);
            store(&words[1], pair(entry.length, entry.key.0));
        }
        self.produced += 1;
        Ok(())
    }

    /// Shows the card everything that was placed. True means that the card wants a doorbell, because it
    /// would otherwise not look: the queue pair is in the error state and flushes.
    #[inline]
    #[must_use = "true asks for a doorbell"]
    pub fn publish(&mut self) -> bool {
        self.ring.produced().store(self.produced, Ordering::Release);
        fence(Ordering::SeqCst);
        self.ring.control().load(Ordering::Relaxed) != 0
    }

    /// Forgets everything that was placed and not published.
    pub fn abandon(&mut self) {
        self.produced = self.ring.produced().load(Ordering::Relaxed);
    }
}

impl ReceiveConsumer {
    /// The card's end of the ring in `words`.
    pub fn new(words: Words, slots: u32, entries: usize) -> ReceiveConsumer {
        ReceiveConsumer { ring: Ring::new(words, ReceiveProducer::shape(slots, entries)), entries, taken: 0 }
    }

    /// The card's end of a ring whose card is gone: goes on where that one stopped.
    pub fn resume(words: Words, slots: u32, entries: usize) -> ReceiveConsumer {
        let mut consumer = ReceiveConsumer::new(words, slots, entries);
        consumer.taken = consumer.ring.consumed().load(Ordering::Acquire);
        consumer
    }

    /// How many requests may wait.
    pub fn slots(&self) -> u32 {
        self.ring.slots()
    }

    /// The most scatter entries of one request.
    pub fn entries(&self) -> usize {
        self.entries
    }

    /// How many requests wait.
    #[inline]
    pub fn waiting(&self) -> Result<u32, Impossible> {
        Ok((self.ring.produced_since(self.taken, self.taken)? - self.taken) as u32)
    }

    /// Takes the next request: its scatter entries go to `scatter`, which is cleared first, and its id is
    /// returned. The application gets the slot back at once.
    #[inline]
    pub fn take(&mut self, scatter: &mut alloc::vec::Vec<Sge>) -> Result<Option<u64>, Impossible> {
        if self.waiting()? == 0 {
            return Ok(None);
        }
        let id = self.read(self.taken, scatter);
        self.taken += 1;
        self.ring.consumed().store(self.taken, Ordering::Release);
        Ok(Some(id))
    }

    /// Looks at the scatter entries of the request that has `before` others before it. False if there is none. The
    /// application may still change them.
    #[inline]
    pub fn peek(&self, before: u32, scatter: &mut alloc::vec::Vec<Sge>) -> bool {
        let is_there = self.waiting().is_ok_and(|waiting| before < waiting);
        if is_there {
            self.read(self.taken + u64::from(before), scatter);
        }
        is_there
    }

    /// Copies the scatter entries of a slot and returns its id.
    #[inline]
    fn read(&self, index: u64, scatter: &mut alloc::vec::Vec<Sge>) -> u64 {
        let slot = self.ring.slot(index);
        let count = (load(&slot[1]) as usize).min(self.entries);
        scatter.clear();
        scatter.extend(slot[HEADER..].chunks_exact(2).take(count).map(|words| {
            let second = load(&words[1]);
            Sge { address: load(&words[0]), length: low(second), key: LocalKey(high(second)) }
        }));
        load(&slot[0])
    }

    /// Asks that every post ring the doorbell, or no longer. Look at the ring once more afterwards.
    pub fn want_doorbell(&self, wanted: bool) {
        self.ring.control().store(u64::from(wanted), Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Forgets every waiting request: the queue pair was reset.
    pub fn reset(&mut self) {
        self.taken = self.ring.produced().load(Ordering::Acquire);
        self.ring.consumed().store(self.taken, Ordering::Release);
    }
}
