//! Completion queues.

use crate::backend::Backend;
use crate::notifier::Notifier;
use crate::{Completion, Context, Error, Notify};
use parking_lot::Mutex;
use softhca_engine::CqId;
use softhca_queue::CompletionConsumer;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

/// How long a wait spins, driving the card, before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// Where completed work requests are reported.
#[derive(Clone)]
pub struct CompletionQueue {
    inner: Arc<Inner>,
}

struct Inner {
    backend: Arc<dyn Backend>,
    id: CqId,
    ring: Mutex<CompletionConsumer>,
    notifier: Arc<Notifier>,
}

impl CompletionQueue {
    pub(crate) fn new(context: &Context, slots: u32) -> Result<CompletionQueue, Error> {
        let backend = context.backend.clone();
        let (id, ring, notifier) = backend.create_completion_queue(slots)?;
        Ok(CompletionQueue { inner: Arc::new(Inner { backend, id, ring: Mutex::new(ring), notifier }) })
    }

    pub(crate) fn id(&self) -> CqId {
        self.inner.id
    }

    /// Takes the oldest completion. If there is none, the card gets a turn on the caller's time.
    pub fn poll(&self) -> Option<Completion> {
        if let Some(completion) = self.inner.ring.lock().pop() {
            return Some(completion);
        }
        self.inner.backend.drive();
        self.inner.ring.lock().pop()
    }

    /// Takes up to `into.capacity() - into.len()` completions, or one batch of sixteen if that is zero.
    pub fn poll_many(&self, into: &mut Vec<Completion>) -> usize {
        let most = match into.capacity() - into.len() {
            0 => 16,
            room => room,
        };
        let before = into.len();
        {
            let mut ring = self.inner.ring.lock();
            into.extend(std::iter::from_fn(|| ring.pop()).take(most));
        }
        if into.len() == before {
            self.inner.backend.drive();
            let mut ring = self.inner.ring.lock();
            into.extend(std::iter::from_fn(|| ring.pop()).take(most));
        }
        into.len() - before
    }

    /// Waits for the next completion: spins for a moment, then sleeps.
    pub fn wait(&self) -> Result<Completion, Error> {
        loop {
            if let Some(completion) = self.wait_until(None) {
                return Ok(completion);
            }
        }
    }

    /// Waits for the next completion, but not longer than `timeout`.
    pub fn wait_for(&self, timeout: Duration) -> Option<Completion> {
        self.wait_until(Some(Instant::now() + timeout))
    }

    fn wait_until(&self, deadline: Option<Instant>) -> Option<Completion> {
        let spin_until = Instant::now() + SPIN;
        loop {
            if let Some(completion) = self.poll() {
                return Some(completion);
            }
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return None;
            }
            if now < spin_until {
                continue;
            }
            let seen = self.inner.notifier.count();
            self.inner.ring.lock().request_notification(Notify::Next);
            if let Some(completion) = self.inner.ring.lock().pop() {
                return Some(completion);
            }
            self.inner.notifier.wait(seen, deadline);
        }
    }

    /// The next completion, for async code. Futures never drive: the card's own thread does.
    pub async fn next(&self) -> Completion {
        poll_fn(|context| {
            let seen = self.inner.notifier.count();
            let ring = &self.inner.ring;
            if let Some(completion) = ring.lock().pop() {
                return Poll::Ready(completion);
            }
            ring.lock().request_notification(Notify::Next);
            if let Some(completion) = ring.lock().pop() {
                return Poll::Ready(completion);
            }
            if !self.inner.notifier.register(seen, context.waker()) {
                context.waker().wake_by_ref();
            }
            Poll::Pending
        })
        .await
    }

    /// Changes how many completions may wait. Those that wait stay.
    pub fn resize(&self, slots: u32) -> Result<(), Error> {
        let mut ring = self.inner.ring.lock();
        *ring = self.inner.backend.resize_completion_queue(self.inner.id, slots)?;
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Every queue pair that completes here holds a handle: none is left.
        let _ = self.backend.destroy_completion_queue(self.id);
    }
}
