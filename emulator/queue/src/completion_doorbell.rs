//! Signals completions to a client in another process, without a system call unless the client sleeps.

use crate::SharedWords;
use crate::shared_memory::{futex_wait, futex_wake_all};
use crate::sync::{Ordering, fence};
use std::time::Duration;

const COUNT: usize = 0;
const WAITERS: usize = 8;

/// A counter of completions that all completion queues of a client share, so that a program that polls several of
/// them can sleep on all at once.
#[derive(Clone)]
pub struct CompletionDoorbell {
    words: SharedWords,
}

impl CompletionDoorbell {
    /// The size in words.
    pub const WORDS: usize = 16;

    /// The doorbell in `words`.
    ///
    /// # Panics
    /// If `words` is too short.
    pub fn new(words: SharedWords) -> CompletionDoorbell {
        assert!(words.len() >= Self::WORDS, "a completion doorbell has {} words", Self::WORDS);
        CompletionDoorbell { words }
    }

    /// Signals a completion.
    #[inline]
    pub fn ring(&self) {
        self.words[COUNT].fetch_add(1, Ordering::SeqCst);
        if self.words[WAITERS].load(Ordering::SeqCst) != 0 {
            self.words[WAITERS].store(0, Ordering::SeqCst);
            futex_wake_all(&self.words[COUNT]);
        }
    }

    /// The number of signals so far.
    #[inline]
    pub fn count(&self) -> u64 {
        self.words[COUNT].load(Ordering::Acquire)
    }

    /// Sleeps until the count differs from `seen`, at most for `timeout`.
    pub fn wait(&self, seen: u64, timeout: Duration) {
        self.words[WAITERS].store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.count() == seen {
            futex_wait(&self.words[COUNT], seen, timeout);
        }
    }
}
