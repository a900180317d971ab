//! Asynchronous events that wait to be taken.

use crate::notifier::Notifier;
use parking_lot::Mutex;
use softhca_engine::AsyncEvent;
use std::collections::VecDeque;

/// Asynchronous events, oldest first.
#[derive(Default)]
pub(crate) struct AsyncEventQueue {
    events: Mutex<VecDeque<AsyncEvent>>,
    notifier: Notifier,
}

impl AsyncEventQueue {
    pub fn push(&self, event: AsyncEvent) {
        let mut waiting = self.events.lock();
        waiting.push_back(event);
        // Under the lock: the thread that takes the event finds the descriptor readable, and clears it.
        self.notifier.notify();
    }

    pub fn pop(&self) -> Option<AsyncEvent> {
        let mut waiting = self.events.lock();
        let event = waiting.pop_front();
        if waiting.is_empty() {
            self.notifier.clear();
        }
        event
    }

    /// Tells when there is another.
    pub fn notifier(&self) -> &Notifier {
        &self.notifier
    }

    /// A descriptor that is readable while events wait.
    #[cfg(feature = "sockets")]
    pub fn descriptor(&self) -> Result<std::os::fd::BorrowedFd<'_>, crate::Error> {
        let waiting = self.events.lock();
        let descriptor = self.notifier.descriptor()?;
        if waiting.is_empty() {
            self.notifier.clear();
        }
        Ok(descriptor)
    }
}
