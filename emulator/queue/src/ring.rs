//! What all rings have in common: two indices that only grow, on cache lines of their own, and slots.

use crate::Words;
use core::sync::atomic::{AtomicU64, Ordering};
use thiserror::Error;

const PRODUCED: usize = 0;
const CONSUMED: usize = 8;
const CONTROL: usize = 16;
const SLOTS: usize = 24;

/// The ring has no free slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the queue is full: all {slots} slots wait for completion")]
pub struct Full {
    /// How many slots the ring has.
    pub slots: u32,
}

/// The other side's index cannot be: only a broken or hostile client writes such a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("ring index {index} is impossible: between {from} and {to} was expected")]
pub struct Impossible {
    /// What the shared index says.
    pub index: u64,
    /// The least it can be.
    pub from: u64,
    /// The most it can be.
    pub to: u64,
}

/// How many slots a ring has, and how many words each takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Slots.
    pub slots: u32,
    /// Words of eight bytes per slot.
    pub stride: u32,
}

impl Shape {
    /// Words that a ring of this shape takes, indices included.
    pub const fn words(self) -> usize {
        SLOTS + self.slots as usize * self.stride as usize
    }
}

/// One side's view of a ring.
#[derive(Clone)]
pub(crate) struct Ring {
    words: Words,
    shape: Shape,
}

impl Ring {
    /// # Panics
    /// If `words` is shorter than the shape needs: whoever maps the memory checks that first.
    pub fn new(words: Words, shape: Shape) -> Ring {
        assert!(words.len() >= shape.words(), "a ring of {shape:?} needs {} words", shape.words());
        Ring { words, shape }
    }

    pub fn slots(&self) -> u32 {
        self.shape.slots
    }

    #[inline]
    pub fn produced(&self) -> &AtomicU64 {
        &self.words[PRODUCED]
    }

    #[inline]
    pub fn consumed(&self) -> &AtomicU64 {
        &self.words[CONSUMED]
    }

    /// A word whose meaning is the ring's kind's own.
    #[inline]
    pub fn control(&self) -> &AtomicU64 {
        &self.words[CONTROL]
    }

    /// The words of the slot that the growing index `index` stands for.
    #[inline]
    pub fn slot(&self, index: u64) -> &[AtomicU64] {
        let stride = self.shape.stride as usize;
        let at = SLOTS + (index % u64::from(self.shape.slots)) as usize * stride;
        &self.words[at..at + stride]
    }

    /// The other side's produced index, if it can be: the consumer has taken `taken` of at most `slots`
    /// that may be outstanding since `retired`.
    #[inline]
    pub fn produced_since(&self, taken: u64, retired: u64) -> Result<u64, Impossible> {
        let index = self.produced().load(Ordering::Acquire);
        let to = retired.saturating_add(u64::from(self.shape.slots));
        if index < taken || index > to { Err(Impossible { index, from: taken, to }) } else { Ok(index) }
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
