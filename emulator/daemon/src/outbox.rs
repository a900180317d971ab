//! News for a connection, from whichever thread has them.

use parking_lot::Mutex;
use softhca_queue::control::News;
use softhca_udp::Waker;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// News that may wait for a client that does not read.
const MOST: usize = 8192;

/// News for a connection.
pub(crate) struct Outbox {
    waiting: Mutex<Waiting>,
    waker: Waker,
}

#[derive(Default)]
struct Waiting {
    news: VecDeque<News>,
    overrun: bool,
}

impl Outbox {
    pub fn new() -> io::Result<Outbox> {
        Ok(Outbox { waiting: Mutex::default(), waker: Waker::new()? })
    }

    /// Puts news in. Never blocks.
    pub fn put(&self, news: News) {
        let mut waiting = self.waiting.lock();
        let was_empty = waiting.news.is_empty();
        if waiting.news.len() >= MOST {
            waiting.overrun = true;
        } else {
            waiting.news.push_back(news);
        }
        drop(waiting);
        if was_empty {
            self.waker.wake();
        }
    }

    /// Takes the oldest news. `None` if too many waited: what was lost cannot be told.
    pub fn take(&self) -> Option<VecDeque<News>> {
        self.waker.clear();
        let mut waiting = self.waiting.lock();
        (!waiting.overrun).then(|| std::mem::take(&mut waiting.news))
    }
}

impl AsFd for Outbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.waker.as_fd()
    }
}
