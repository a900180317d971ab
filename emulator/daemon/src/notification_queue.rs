//! News for a connection, from whichever thread has them.
//!
//! Whoever has news sends them itself, which saves waking the connection's thread, unless others wait to be sent before
//! them or the socket takes no more: then they are put where that thread finds them.

use parking_lot::Mutex;
use softhca_queue::control::{FramedMessage, Message, Notification, encode, send_message};
use softhca_udp::Waker;
use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;

/// News that may wait for a client that does not read.
const MAX_PENDING: usize = 8192;

/// News for a connection.
pub(crate) struct NotificationQueue {
    pending: Mutex<Pending>,
    waker: Waker,
    /// Where news go, once that is known.
    socket: OnceLock<UnixStream>,
}

#[derive(Default)]
struct Pending {
    notifications: VecDeque<Notification>,
    /// The connection's thread has some that it has not sent yet.
    draining: bool,
    overflowed: bool,
}

impl NotificationQueue {
    pub fn new() -> io::Result<NotificationQueue> {
        Ok(NotificationQueue { pending: Mutex::default(), waker: Waker::new()?, socket: OnceLock::new() })
    }

    /// Lets news go over this socket, which does not block.
    pub fn attach_socket(&self, stream: UnixStream) {
        let _ = self.socket.set(stream);
    }

    /// Sends news, or puts them in. Never blocks.
    pub fn push(&self, news: Notification) {
        let mut waiting = self.pending.lock();
        let was_empty = waiting.notifications.is_empty();
        if was_empty && !waiting.draining && self.try_send(&news) {
            return;
        }
        if waiting.notifications.len() >= MAX_PENDING {
            waiting.overflowed = true;
        } else {
            waiting.notifications.push_back(news);
        }
        drop(waiting);
        if was_empty {
            self.waker.wake();
        }
    }

    /// Whether the socket took the frame. It takes so short a one as a whole or not at all; the rest of a part would have
    /// no place, and ends the connection.
    fn try_send(&self, news: &Notification) -> bool {
        // The connection's thread fetches these only when it sends them.
        let is_complete = !matches!(news, Notification::CmEventsRaised { .. });
        let Some(way) = self.socket.get().filter(|_| is_complete) else { return false };
        let frame = FramedMessage::frame(&encode(&Message::Notification(news.clone())), 0);
        match send_message(way.as_fd(), &frame, 0, &[]) {
            Ok(count) if count < frame.len() => way.shutdown(Shutdown::Both).is_ok(),
            result => result.is_ok(),
        }
    }

    /// Takes the oldest news. `None` if too many waited: what was lost cannot be told.
    pub fn drain(&self) -> Option<VecDeque<Notification>> {
        self.waker.clear();
        let mut waiting = self.pending.lock();
        waiting.draining |= !waiting.notifications.is_empty();
        (!waiting.overflowed).then(|| std::mem::take(&mut waiting.notifications))
    }

    /// All that was taken has been sent.
    pub fn finish_drain(&self) {
        self.pending.lock().draining = false;
    }
}

impl AsFd for NotificationQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.waker.as_fd()
    }
}
