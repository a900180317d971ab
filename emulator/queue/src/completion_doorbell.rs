//! How the card tells a client in another process that something came, without a system call if nobody sleeps.

use crate::SharedWords;
use crate::shared_memory::{futex_wait, futex_wake_all};
use core::sync::atomic::{Ordering, fence};
use std::time::Duration;

const COUNT: usize = 0;
const WAITERS: usize = 8;

/// A count of completions that every queue of a client shares, so that a program that polls several in turn
/// sleeps on all of them.
#[derive(Clone)]
pub struct CompletionDoorbell {
    words: SharedWords,
}

impl CompletionDoorbell {
    /// Words that a bell takes.
    pub const WORDS: usize = 16;

    /// The bell in `words`.
    ///
    /// # Panics
    /// If they are too few.
    pub fn new(words: SharedWords) -> CompletionDoorbell {
        assert!(words.len() >= Self::WORDS, "a bell has {} words", Self::WORDS);
        CompletionDoorbell { words }
    }

    /// Something came.
    #[inline]
    pub fn ring(&self) {
        self.words[COUNT].fetch_add(1, Ordering::SeqCst);
        if self.words[WAITERS].load(Ordering::SeqCst) != 0 {
            self.words[WAITERS].store(0, Ordering::SeqCst);
            futex_wake_all(&self.words[COUNT]);
        }
    }

    /// How often something came.
    #[inline]
    pub fn count(&self) -> u64 {
        self.words[COUNT].load(Ordering::Acquire)
    }

    /// Sleeps until something came since `seen`, at most for `timeout`.
    pub fn wait(&self, seen: u64, timeout: Duration) {
        self.words[WAITERS].store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.count() == seen {
            futex_wait(&self.words[COUNT], seen, timeout);
        }
    }
}
