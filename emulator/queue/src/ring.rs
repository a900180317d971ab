//! The layout that all rings share: two indices that only grow, each on its own cache line, and slots.

use crate::SharedWords;
use crate::sync::{AtomicU64, Ordering};
use softhca_types::{CorruptRing, Sge};
use softhca_wire::LocalKey;
use thiserror::Error;

pub(crate) const PRODUCER_INDEX: usize = 0;
pub(crate) const CONSUMER_INDEX: usize = 8;
const CONTROL: usize = 16;
const SLOTS: usize = 24;

/// The ring has no free slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the queue is full: all {slots} slots are in use")]
pub struct QueueFull {
    /// The number of slots in the ring.
    pub slots: u32,
}

/// The number and size of the slots of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    /// The number of slots.
    pub slots: u32,
    /// The size of a slot in words of eight bytes.
    pub stride: u32,
}

impl RingLayout {
    /// The size of the ring in words, indices included.
    pub const fn words(self) -> usize {
        SLOTS + self.slots as usize * self.stride as usize
    }
}

/// One side of a ring.
#[derive(Clone)]
pub(crate) struct Ring {
    words: SharedWords,
    layout: RingLayout,
    /// The bits of an index that are its slot, or zero if the number of slots is no power of two.
    mask: u64,
}

impl Ring {
    /// # Panics
    /// If `words` is shorter than the layout. The code that maps the memory checks the length first.
    pub fn new(words: SharedWords, shape: RingLayout) -> Ring {
        assert!(words.len() >= shape.words(), "a ring of {shape:?} needs {} words", shape.words());
        let slots = u64::from(shape.slots);
        Ring { words, layout: shape, mask: if slots.is_power_of_two() { slots - 1 } else { 0 } }
    }

    pub fn slots(&self) -> u32 {
        self.layout.slots
    }

    pub fn words(&self) -> &SharedWords {
        &self.words
    }

    #[inline]
    pub fn producer_index(&self) -> &AtomicU64 {
        &self.words[PRODUCER_INDEX]
    }

    #[inline]
    pub fn consumer_index(&self) -> &AtomicU64 {
        &self.words[CONSUMER_INDEX]
    }

    /// A word with a different meaning in each kind of ring.
    #[inline]
    pub fn control(&self) -> &AtomicU64 {
        &self.words[CONTROL]
    }

    /// The words of the slot of `index`, which grows without bound.
    #[inline]
    pub fn slot(&self, index: u64) -> &[AtomicU64] {
        let stride = self.layout.stride as usize;
        // A division takes longer than the rest of this function.
        let slot = if self.mask > 0 { index & self.mask } else { index % u64::from(self.layout.slots) };
        let at = SLOTS + slot as usize * stride;
        &self.words[at..at + stride]
    }

    /// The first words of the slot of `index`.
    ///
    /// # Panics
    /// If a slot is shorter.
    #[inline]
    pub fn slot_head<const N: usize>(&self, index: u64) -> &[AtomicU64; N] {
        self.slot(index).first_chunk().expect("a slot has a head")
    }

    /// The producer index, if it is valid: not below `dequeued`, and at most `slots` above `retired`.
    #[inline]
    pub fn checked_producer_index(&self, dequeued: u64, retired: u64) -> Result<u64, CorruptRing> {
        let index = self.producer_index().load(Ordering::Acquire);
        let max = retired.saturating_add(u64::from(self.layout.slots));
        if index < dequeued || index > max {
            Err(CorruptRing { index, min: dequeued, max })
        } else {
            Ok(index)
        }
    }
}

/// Writes words.
#[inline]
pub(crate) fn store_all<const N: usize>(words: &[AtomicU64; N], values: [u64; N]) {
    words.iter().zip(values).for_each(|(word, value)| store(word, value));
}

/// Reads words.
#[inline]
pub(crate) fn load_all<const N: usize>(words: &[AtomicU64; N]) -> [u64; N] {
    words.each_ref().map(load)
}

/// Replaces the contents of `into` by `count` SGEs, of two words each.
#[inline]
pub(crate) fn read_sges(words: &[AtomicU64], count: usize, into: &mut alloc::vec::Vec<Sge>) {
    into.clear();
    for sge in words.chunks_exact(2).take(count) {
        let second = load(&sge[1]);
        into.push(Sge { address: load(&sge[0]), length: low(second), lkey: LocalKey(high(second)) });
    }
}

/// Writes SGEs, of two words each.
#[inline]
pub(crate) fn write_sges(words: &[AtomicU64], from: &[Sge]) {
    for (words, sge) in words.chunks_exact(2).zip(from) {
        store(&words[0], sge.address);
        store(&words[1], pair(sge.length, sge.lkey.0));
    }
}

#[inline]
pub(crate) fn load(word: &AtomicU64) -> u64 {
    word.load(Ordering::Relaxed)
}

#[inline]
pub(crate) fn store(word: &AtomicU64, value: u64) {
    word.store(value, Ordering::Relaxed);
}

#[inline]
pub(crate) const fn pair(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

#[inline]
pub(crate) const fn low(word: u64) -> u32 {
    word as u32
}

#[inline]
pub(crate) const fn high(word: u64) -> u32 {
    (word >> 32) as u32
}
