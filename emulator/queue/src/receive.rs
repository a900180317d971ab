//! Receive queues and shared receive queues.
//!
//! A slot (WQE) holds the work request ID, the number of SGEs, and the SGEs of two words each.

use crate::ring::{Ring, load, read_sges, store, write_sges};
use crate::sync::{Ordering, fence};
use crate::{InvalidWorkRequest, QueueFull, RingLayout, SharedWords};
use softhca_types::{CorruptRing, ReceiveWorkRequest, Sge};

const HEADER: usize = 2;

/// The application's side of a receive queue.
pub struct ReceiveProducer {
    ring: Ring,
    max_sge: usize,
    produced: u64,
}

/// The HCA's side of a receive queue.
pub struct ReceiveConsumer {
    ring: Ring,
    max_sge: usize,
    dequeued: u64,
}

/// Creates a receive queue on the heap of this process.
pub fn receive_ring(slots: u32, max_sge: usize) -> (ReceiveProducer, ReceiveConsumer) {
    let words = SharedWords::heap(ReceiveProducer::layout(slots, max_sge).words());
    (ReceiveProducer::new(words.clone(), slots, max_sge), ReceiveConsumer::new(words, slots, max_sge))
}

impl ReceiveProducer {
    /// The layout of a ring with these limits.
    pub const fn layout(slots: u32, max_sge: usize) -> RingLayout {
        RingLayout { slots, stride: (HEADER + max_sge * 2) as u32 }
    }

    /// The application's side of the ring in `words`.
    pub fn new(words: SharedWords, slots: u32, max_sge: usize) -> ReceiveProducer {
        ReceiveProducer { ring: Ring::new(words, Self::layout(slots, max_sge)), max_sge, produced: 0 }
    }

    /// The application's side of a ring that the HCA has filled by [`ReceiveConsumer::move_to`].
    pub fn resume(words: SharedWords, slots: u32, max_sge: usize) -> ReceiveProducer {
        let mut producer = ReceiveProducer::new(words, slots, max_sge);
        producer.produced = producer.ring.producer_index().load(Ordering::Acquire);
        producer
    }

    /// The number of WQEs that the queue holds.
    pub fn slots(&self) -> u32 {
        self.ring.slots()
    }

    /// Writes a WQE. The HCA sees it after [`ReceiveProducer::publish`].
    #[inline]
    pub fn enqueue(&mut self, receive: &ReceiveWorkRequest<'_>) -> Result<(), InvalidWorkRequest> {
        let slots = self.ring.slots();
        let used = self.produced.wrapping_sub(self.ring.consumer_index().load(Ordering::Acquire));
        if used >= u64::from(slots) {
            return Err(QueueFull { slots }.into());
        }
        if receive.sg_list.len() > self.max_sge {
            let (sges, limit) = (receive.sg_list.len(), self.max_sge);
            return Err(InvalidWorkRequest::TooManySges { sges, limit });
        }
        let slot = self.ring.slot(self.produced);
        store(&slot[0], receive.wr_id);
        store(&slot[1], receive.sg_list.len() as u64);
        write_sges(&slot[HEADER..], receive.sg_list);
        self.produced += 1;
        Ok(())
    }

    /// Makes all written WQEs visible to the HCA. Returns true if the HCA needs a doorbell: in the error state it
    /// flushes, and does not look at the queue without one.
    #[inline]
    #[must_use = "true requests a doorbell"]
    pub fn publish(&mut self) -> bool {
        self.ring.producer_index().store(self.produced, Ordering::Release);
        fence(Ordering::SeqCst);
        self.ring.control().load(Ordering::Relaxed) != 0
    }

    /// Discards WQEs that are written but not published.
    pub fn discard_unpublished(&mut self) {
        self.produced = self.ring.producer_index().load(Ordering::Relaxed);
    }
}

impl ReceiveConsumer {
    /// The HCA's side of the ring in `words`.
    pub fn new(words: SharedWords, slots: u32, max_sge: usize) -> ReceiveConsumer {
        ReceiveConsumer {
            ring: Ring::new(words, ReceiveProducer::layout(slots, max_sge)),
            max_sge,
            dequeued: 0,
        }
    }

    /// Takes over the HCA's side of a ring whose HCA is gone, at the WQE where that HCA stopped.
    pub fn resume(words: SharedWords, slots: u32, max_sge: usize) -> ReceiveConsumer {
        let mut consumer = ReceiveConsumer::new(words, slots, max_sge);
        consumer.dequeued = consumer.ring.consumer_index().load(Ordering::Acquire);
        consumer
    }

    /// The number of WQEs that the queue holds.
    pub fn slots(&self) -> u32 {
        self.ring.slots()
    }

    /// The most SGEs of a WQE.
    pub fn max_sge(&self) -> usize {
        self.max_sge
    }

    /// The number of WQEs in the queue.
    #[inline]
    pub fn pending(&self) -> Result<u32, CorruptRing> {
        Ok((self.ring.checked_producer_index(self.dequeued, self.dequeued)? - self.dequeued) as u32)
    }

    /// Removes the next WQE, replaces the contents of `sg_list` by its SGEs, and returns its work request ID. The
    /// application may reuse the slot immediately.
    #[inline]
    pub fn dequeue(&mut self, sg_list: &mut alloc::vec::Vec<Sge>) -> Result<Option<u64>, CorruptRing> {
        if self.pending()? == 0 {
            return Ok(None);
        }
        let id = self.read(self.dequeued, sg_list);
        self.dequeued += 1;
        self.ring.consumer_index().store(self.dequeued, Ordering::Release);
        Ok(Some(id))
    }

    /// Copies the WQEs in the queue to a new ring with slots of the same size. False if that ring is too small.
    pub fn move_to(&self, other: &mut ReceiveConsumer) -> Result<bool, CorruptRing> {
        let pending = self.pending()?;
        if pending > other.slots() || self.max_sge != other.max_sge {
            return Ok(false);
        }
        for index in 0..u64::from(pending) {
            for (to, from) in other.ring.slot(index).iter().zip(self.ring.slot(self.dequeued + index)) {
                store(to, load(from));
            }
        }
        other.ring.producer_index().store(pending.into(), Ordering::Release);
        Ok(true)
    }

    /// Copies the SGEs of a slot and returns its work request ID.
    #[inline]
    fn read(&self, index: u64, sg_list: &mut alloc::vec::Vec<Sge>) -> u64 {
        let slot = self.ring.slot(index);
        let count = (load(&slot[1]) as usize).min(self.max_sge);
        read_sges(&slot[HEADER..], count, sg_list);
        load(&slot[0])
    }

    /// Requests a doorbell with every post, or cancels the request. Poll the ring once more afterwards.
    pub fn request_doorbell(&self, requested: bool) {
        self.ring.control().store(u64::from(requested), Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Discards all WQEs: the queue pair was reset.
    pub fn reset(&mut self) {
        self.dequeued = self.ring.producer_index().load(Ordering::Acquire);
        self.ring.consumer_index().store(self.dequeued, Ordering::Release);
    }
}
