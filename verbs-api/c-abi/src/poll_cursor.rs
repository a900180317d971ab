//! The place of a program in an extended completion queue.

use parking_lot::RawMutex;
use parking_lot::lock_api::RawMutex as _;
use softhca::Completion;
use std::cell::UnsafeCell;

/// The completion that is being read, from `start_poll` to `end_poll`.
pub struct PollCursor {
    /// Held in between.
    pub lock: RawMutex,
    pub current: UnsafeCell<Option<Completion>>,
}

impl Default for PollCursor {
    fn default() -> PollCursor {
        PollCursor { lock: RawMutex::INIT, current: UnsafeCell::new(None) }
    }
}

// SAFETY: only the holder of the lock accesses the completion.
unsafe impl Sync for PollCursor {}
