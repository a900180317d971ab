//! Waking threads and tasks that wait.

use crate::event_fd::EventFd;
use crate::executor::{WaitReason, record_wait_reason};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// A counter of things that happened, for any number of waiters.
#[derive(Default)]
pub(crate) struct Notifier {
    state: Mutex<State>,
    changed: Condvar,
    /// The channel that is notified too, and its token.
    channel: Option<(Arc<ChannelEvents>, u64)>,
    /// The descriptor that becomes readable too, once somebody asked for it.
    descriptor: OnceLock<EventFd>,
}

#[derive(Default)]
struct State {
    count: u64,
    wakers: Vec<Waker>,
}

impl Notifier {
    /// A notifier that also notifies a channel.
    pub fn with_channel(channel: &Arc<ChannelEvents>, token: u64) -> Notifier {
        Notifier { channel: Some((channel.clone(), token)), ..Notifier::default() }
    }

    /// Something happened.
    pub fn notify(&self) {
        // A thread that sees the new count and clears the descriptor finds it readable already.
        self.make_readable();
        let mut state = self.state.lock();
        state.count += 1;
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        self.changed.notify_all();
        wakers.into_iter().for_each(Waker::wake);
        if let Some((channel, token)) = &self.channel {
            channel.push(*token);
        }
    }

    /// A descriptor that becomes readable when something happens. It is readable at first: what happened
    /// before is not known here.
    #[cfg(feature = "sockets")]
    pub fn descriptor(&self) -> Result<std::os::fd::BorrowedFd<'_>, crate::Error> {
        if self.descriptor.get().is_none() {
            let made = EventFd::new()
                .map_err(|source| crate::Error::System { what: "making an event descriptor", source })?;
            made.wake();
            let _ = self.descriptor.set(made);
        }
        Ok(std::os::fd::AsFd::as_fd(self.descriptor.get().expect("it was just made")))
    }

    /// Makes the descriptor readable.
    pub fn make_readable(&self) {
        if let Some(descriptor) = self.descriptor.get() {
            descriptor.wake();
        }
    }

    /// Makes the descriptor unreadable until something happens.
    pub fn clear(&self) {
        if let Some(descriptor) = self.descriptor.get() {
            descriptor.clear();
        }
    }

    /// How often something happened so far.
    pub fn count(&self) -> u64 {
        self.state.lock().count
    }

    /// Sleeps until something has happened since `seen`. False if the time was over first.
    pub fn wait(&self, seen: u64, timeout: Option<Duration>) -> bool {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.state.lock();
        while state.count == seen {
            match deadline {
                None => self.changed.wait(&mut state),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left == Duration::ZERO || self.changed.wait_for(&mut state, left).timed_out() {
                        return state.count != seen;
                    }
                }
            }
        }
        true
    }

    /// Takes a value, or wakes the task when something has happened. `reason` is what the task then waits for.
    pub fn poll_take<T>(
        &self,
        context: &mut Context<'_>,
        reason: impl FnOnce() -> WaitReason,
        take: impl FnOnce() -> Option<T>,
    ) -> Poll<T> {
        let seen = self.count();
        if let Some(value) = take() {
            return Poll::Ready(value);
        }
        let (mut state, waker) = (self.state.lock(), context.waker());
        if state.count != seen {
            drop(state);
            waker.wake_by_ref();
        } else if !state.wakers.iter().any(|known| known.will_wake(waker)) {
            state.wakers.push(waker.clone());
        }
        record_wait_reason(reason);
        Poll::Pending
    }
}

/// The events of a completion channel: the tokens of the queues with a notification, oldest first.
pub(crate) struct ChannelEvents {
    tokens: Mutex<VecDeque<u64>>,
    pub notifier: Notifier,
    /// Readable while an event waits.
    pub event_fd: EventFd,
}

impl ChannelEvents {
    pub fn new(event_fd: EventFd) -> ChannelEvents {
        ChannelEvents { tokens: Mutex::default(), notifier: Notifier::default(), event_fd }
    }

    /// A queue has a notification.
    fn push(&self, token: u64) {
        let mut tokens = self.tokens.lock();
        tokens.push_back(token);
        self.event_fd.wake();
        drop(tokens);
        self.notifier.notify();
    }

    pub fn pop(&self) -> Option<u64> {
        let mut tokens = self.tokens.lock();
        let token = tokens.pop_front()?;
        if tokens.is_empty() {
            self.event_fd.clear();
        }
        Some(token)
    }

    /// Removes the events of a queue.
    pub fn remove(&self, token: u64) {
        let mut tokens = self.tokens.lock();
        tokens.retain(|other| *other != token);
        if tokens.is_empty() {
            self.event_fd.clear();
        }
    }
}
