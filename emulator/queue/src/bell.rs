//! How the card tells a client in another process that something came, without a system call if nobody sleeps.

use crate::Words;
use crate::shared::{wait_on, wake_all};
use core::sync::atomic::{Ordering, fence};
use std::time::Duration;

const COUNT: usize = 0;
const SLEEPERS: usize = 8;

/// A count of completions that every queue of a client shares, so that a program that polls several in turn
/// sleeps on all of them.
#[derive(Clone)]
pub struct Bell {
    words: Words,
}

impl Bell {
    /// Words that a bell takes.
    pub const WORDS: usize = 16;

    /// The bell in `words`.
    ///
    /// # Panics
    /// If they are too few.
    pub fn new(words: Words) -> Bell {
        assert!(words.len() >= Self::WORDS, "a bell has {} words", Self::WORDS);
        Bell { words }
    }

    /// Something came.
    #[inline]
    pub fn strike(&self) {
        self.words[COUNT].fetch_add(1, Ordering::SeqCst);
        if self.words[SLEEPERS].load(Ordering::SeqCst) != 0 {
            self.words[SLEEPERS].store(0, Ordering::SeqCst);
            wake_all(&self.words[COUNT]);
        }
    }

    /// How often something came.
    #[inline]
    pub fn count(&self) -> u64 {
        self.words[COUNT].load(Ordering::Acquire)
    }

    /// Sleeps until something came since `seen`, at most for `timeout`.
    pub fn wait(&self, seen: u64, timeout: Duration) {
        self.words[SLEEPERS].store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.count() == seen {
            wait_on(&self.words[COUNT], seen, timeout);
        }
    }
}
