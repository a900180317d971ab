//! Asynchronous events that wait to be taken.

use crate::Error;
use crate::notifier::Notifier;
use parking_lot::Mutex;
use softhca_engine::AsyncEvent;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;

/// Asynchronous events, oldest first.
#[derive(Default)]
pub(crate) struct EventQueue {
    waiting: Mutex<VecDeque<AsyncEvent>>,
    news: Notifier,
}

impl EventQueue {
    pub fn push(&self, event: AsyncEvent) {
        let mut waiting = self.waiting.lock();
        waiting.push_back(event);
        // Told under the lock: whoever takes the event finds the descriptor readable, and clears it.
        self.news.notify();
    }

    pub fn take(&self) -> Option<AsyncEvent> {
        let mut waiting = self.waiting.lock();
        let event = waiting.pop_front();
        if waiting.is_empty() {
            self.news.clear();
        }
        event
    }

    /// Tells when there is another.
    pub fn news(&self) -> &Notifier {
        &self.news
    }

    /// A descriptor that is readable while events wait.
    pub fn descriptor(&self) -> Result<BorrowedFd<'_>, Error> {
        let waiting = self.waiting.lock();
        let descriptor = self.news.descriptor()?;
        if waiting.is_empty() {
            self.news.clear();
        }
        Ok(descriptor)
    }
}
