//! What all rings have in common: two indices that only grow, on cache lines of their own, and slots.

use crate::SharedWords;
use core::sync::atomic::{AtomicU64, Ordering};
use thiserror::Error;

const PRODUCER_INDEX: usize = 0;
const CONSUMER_INDEX: usize = 8;
const CONTROL: usize = 16;
const SLOTS: usize = 24;

/// The ring has no free slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the queue is full: all {slots} slots wait for completion")]
pub struct QueueFull {
    /// How many slots the ring has.
    pub slots: u32,
}

/// The other side's index cannot be: only a broken or hostile client writes such a value.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("ring index {index} is impossible: between {min} and {max} was expected")]
pub struct CorruptRing {
    /// What the shared index says.
    pub index: u64,
    /// The least it can be.
    pub min: u64,
    /// The most it can be.
    pub max: u64,
}

/// How many slots a ring has, and how many words each takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    /// Slots.
    pub slots: u32,
    /// Words of eight bytes per slot.
    pub stride: u32,
}

impl RingLayout {
    /// Words that a ring of this shape takes, indices included.
    pub const fn words(self) -> usize {
        SLOTS + self.slots as usize * self.stride as usize
    }
}

/// One side's view of a ring.
#[derive(Clone)]
pub(crate) struct Ring {
    words: SharedWords,
    layout: RingLayout,
}

impl Ring {
    /// # Panics
    /// If `words` is shorter than the shape needs: whoever maps the memory checks that first.
    pub fn new(words: SharedWords, shape: RingLayout) -> Ring {
        assert!(words.len() >= shape.words(), "a ring of {shape:?} needs {} words", shape.words());
        Ring { words, layout: shape }
    }

    pub fn slots(&self) -> u32 {
        self.layout.slots
    }

    #[inline]
    pub fn producer_index(&self) -> &AtomicU64 {
        &self.words[PRODUCER_INDEX]
    }

    #[inline]
    pub fn consumer_index(&self) -> &AtomicU64 {
        &self.words[CONSUMER_INDEX]
    }

    /// A word whose meaning is the ring's kind's own.
    #[inline]
    pub fn control(&self) -> &AtomicU64 {
        &self.words[CONTROL]
    }

    /// The words of the slot that the growing index `index` stands for.
    #[inline]
    pub fn slot(&self, index: u64) -> &[AtomicU64] {
        let stride = self.layout.stride as usize;
        let at = SLOTS + (index % u64::from(self.layout.slots)) as usize * stride;
        &self.words[at..at + stride]
    }

    /// The other side's produced index, if it can be: the consumer has taken `taken` of at most `slots`
    /// that may be outstanding since `retired`.
    #[inline]
    pub fn checked_producer_index(&self, taken: u64, retired: u64) -> Result<u64, CorruptRing> {
        let index = self.producer_index().load(Ordering::Acquire);
        let to = retired.saturating_add(u64::from(self.layout.slots));
        if index < taken || index > to { Err(CorruptRing { index, min: taken, max: to }) } else { Ok(index) }
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
