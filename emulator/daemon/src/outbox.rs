//! News for a connection, from whichever thread has them.
//!
//! Whoever has news sends them itself, which saves waking the connection's thread, unless others wait to be sent before
//! them or the socket takes no more: then they are put where that thread finds them.

use parking_lot::Mutex;
use softhca_queue::control::{Frame, Message, News, encode, send_frame};
use softhca_udp::Waker;
use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;

/// News that may wait for a client that does not read.
const MOST: usize = 8192;

/// News for a connection.
pub(crate) struct Outbox {
    waiting: Mutex<Waiting>,
    waker: Waker,
    /// Where news go, once that is known.
    way: OnceLock<UnixStream>,
}

#[derive(Default)]
struct Waiting {
    news: VecDeque<News>,
    /// The connection's thread has some that it has not sent yet.
    taken: bool,
    overrun: bool,
}

impl Outbox {
    pub fn new() -> io::Result<Outbox> {
        Ok(Outbox { waiting: Mutex::default(), waker: Waker::new()?, way: OnceLock::new() })
    }

    /// Lets news go over this socket, which does not block.
    pub fn lead_to(&self, stream: UnixStream) {
        let _ = self.way.set(stream);
    }

    /// Sends news, or puts them in. Never blocks.
    pub fn put(&self, news: News) {
        let mut waiting = self.waiting.lock();
        let was_empty = waiting.news.is_empty();
        if was_empty && !waiting.taken && self.sends(&news) {
            return;
        }
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

    /// Whether the socket took the frame. It takes so short a one as a whole or not at all; the rest of a part would have
    /// no place, and ends the connection.
    fn sends(&self, news: &News) -> bool {
        // The connection's thread fetches these only when it sends them.
        let is_complete = !matches!(news, News::CmRaised { .. });
        let Some(way) = self.way.get().filter(|_| is_complete) else { return false };
        let frame = Frame::lay_out(&encode(&Message::News(news.clone())), 0);
        match send_frame(way.as_fd(), &frame, 0, &[]) {
            Ok(count) if count < frame.len() => way.shutdown(Shutdown::Both).is_ok(),
            result => result.is_ok(),
        }
    }

    /// Takes the oldest news. `None` if too many waited: what was lost cannot be told.
    pub fn take(&self) -> Option<VecDeque<News>> {
        self.waker.clear();
        let mut waiting = self.waiting.lock();
        waiting.taken |= !waiting.news.is_empty();
        (!waiting.overrun).then(|| std::mem::take(&mut waiting.news))
    }

    /// All that was taken has been sent.
    pub fn is_sent(&self) {
        self.waiting.lock().taken = false;
    }
}

impl AsFd for Outbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.waker.as_fd()
    }
}
