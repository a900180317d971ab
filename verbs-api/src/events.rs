//! Asynchronous events that wait to be taken.

use crate::Error;
use crate::notifier::Notifier;
use parking_lot::Mutex;
use softhca_engine::AsyncEvent;
use softhca_udp::Waker;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;

/// Asynchronous events, oldest first.
#[derive(Default)]
pub(crate) struct EventQueue {
    waiting: Mutex<VecDeque<AsyncEvent>>,
    news: Notifier,
    /// Made for those who want a descriptor.
    waker: OnceLock<Waker>,
}

impl EventQueue {
    pub fn push(&self, event: AsyncEvent) {
        let mut waiting = self.waiting.lock();
        waiting.push_back(event);
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
        drop(waiting);
        self.news.notify();
    }

    pub fn take(&self) -> Option<AsyncEvent> {
        let mut waiting = self.waiting.lock();
        let event = waiting.pop_front();
        if waiting.is_empty()
            && let Some(waker) = self.waker.get()
        {
            waker.clear();
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
        if self.waker.get().is_none() {
            let failed = |source| Error::System { what: "making an event descriptor", source };
            let waker = Waker::new().map_err(failed)?;
            if !waiting.is_empty() {
                waker.wake();
            }
            let _ = self.waker.set(waker);
        }
        Ok(self.waker.get().expect("it was made above").as_fd())
    }
}
