//! Completion queues.

use crate::backend::Backend;
use crate::endpoint_exchange::assert_may_block;
use crate::event_fd::EventFd;
use crate::executor::WaitReason;
use crate::notifier::{ChannelEvents, Notifier};
use crate::{Completion, Context, CqNotify, Error, Qpn};
use parking_lot::Mutex;
use softhca_engine::{Command, CqId, Instant, Reply};
use softhca_queue::{CompletionConsumer, CompletionView};
use softhca_types::reply;
#[cfg(feature = "sockets")]
use softhca_udp::PollGate;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

/// How long a wait spins, driving the card, before it sleeps.
const SPIN_TIME: Duration = Duration::from_micros(50);

/// A queue that reports completed work requests.
#[derive(Clone)]
pub struct CompletionQueue {
    inner: Arc<Inner>,
}

struct Inner {
    backend: Arc<dyn Backend>,
    id: CqId,
    completions: Mutex<CompletionConsumer>,
    /// The ring that the queue was created with.
    first_ring: CompletionView,
    is_resized: AtomicBool,
    /// What a poll reads before it drives the card, if callers drive it.
    #[cfg(feature = "sockets")]
    gate: Option<Arc<PollGate>>,
    notifier: Arc<Notifier>,
    /// The channel that it is on, and under which token.
    channel: Option<Arc<Channel>>,
    token: u64,
}

/// A completion channel: the queues on it, and their events.
pub(crate) struct Channel {
    pub backend: Arc<dyn Backend>,
    pub events: Arc<ChannelEvents>,
    queues: Mutex<BTreeMap<u64, Weak<Inner>>>,
}

impl Channel {
    pub fn new(backend: Arc<dyn Backend>, event_fd: EventFd) -> Channel {
        Channel { backend, events: Arc::new(ChannelEvents::new(event_fd)), queues: Mutex::default() }
    }

    /// Gives a queue a place on the channel.
    fn attach(&self, queue: &Arc<Inner>) {
        self.queues.lock().insert(queue.token, Arc::downgrade(queue));
    }

    /// Takes a queue and its events off.
    fn detach(&self, token: u64) {
        self.queues.lock().remove(&token);
        self.events.remove(token);
    }

    /// Takes the oldest event.
    pub fn pop_event(&self) -> Option<CompletionQueue> {
        loop {
            let token = self.events.pop()?;
            if let Some(inner) = self.queues.lock().get(&token).and_then(Weak::upgrade) {
                return Some(CompletionQueue { inner });
            }
        }
    }
}

crate::handle::handle!(CompletionQueue);

impl Context {
    /// Creates a completion queue with room for exactly `cqe` completions. One more overflows it: the queue fails
    /// ([`AsyncEvent::CompletionQueueError`](crate::AsyncEvent::CompletionQueueError)), and its queue pairs with it.
    pub fn create_completion_queue(&self, cqe: u32) -> Result<CompletionQueue, Error> {
        CompletionQueue::new(self, cqe, None)
    }
}

impl CompletionQueue {
    pub(crate) fn new(
        context: &Context,
        cqe: u32,
        channel: Option<&Arc<Channel>>,
    ) -> Result<CompletionQueue, Error> {
        static TOKENS: AtomicU64 = AtomicU64::new(0);
        let token = TOKENS.fetch_add(1, Ordering::Relaxed);
        let backend = context.backend.clone();
        let channel = channel.cloned();
        let with_channel = |channel: &Arc<Channel>| Notifier::with_channel(&channel.events, token);
        let notifier = Arc::new(channel.as_ref().map_or_else(Notifier::default, with_channel));
        let (reply, rings) = backend.execute_with_rings(Command::CreateCompletionQueue { cqe })?;
        let id = reply!(reply, Reply::CompletionQueue(cq) => cq);
        backend.set_completion_notifier(id, notifier.clone());
        let ring = CompletionConsumer::new(rings, cqe);
        let inner = Arc::new(Inner {
            id,
            first_ring: ring.view(),
            is_resized: AtomicBool::new(false),
            completions: Mutex::new(ring),
            #[cfg(feature = "sockets")]
            gate: backend.poll_gate(),
            backend,
            notifier,
            channel,
            token,
        });
        if let Some(channel) = &inner.channel {
            channel.attach(&inner);
        }
        Ok(CompletionQueue { inner })
    }

    pub(crate) fn id(&self) -> CqId {
        self.inner.id
    }

    /// As [`Context::check_process`].
    #[inline]
    pub fn check_process(&self) -> Result<(), Error> {
        #[cfg(feature = "sockets")]
        if self.inner.gate.as_ref().is_some_and(|gate| gate.is_of_this_process()) {
            return Ok(());
        }
        self.inner.backend.check_process()
    }

    /// Whether this is the process that opened the device, as far as one word shows it.
    #[inline]
    pub fn is_of_this_process(&self) -> bool {
        #[cfg(feature = "sockets")]
        if let Some(gate) = &self.inner.gate {
            return gate.is_of_this_process();
        }
        false
    }

    /// Whether a poll would find nothing, and have nothing to drive. Counts as a poll if it would find nothing.
    #[inline]
    pub fn is_idle(&self) -> bool {
        #[cfg(feature = "sockets")]
        if let Some(gate) = &self.inner.gate {
            return self.is_surely_empty() && !gate.enter();
        }
        false
    }

    /// Whether there is surely no completion. Takes no lock.
    #[inline]
    fn is_surely_empty(&self) -> bool {
        !self.inner.is_resized.load(Ordering::Relaxed) && self.inner.first_ring.is_empty()
    }

    /// Counts a poll. Returns whether it drives the card if it finds nothing.
    #[inline]
    fn enter_poll(&self) -> bool {
        #[cfg(feature = "sockets")]
        if let Some(gate) = &self.inner.gate {
            return gate.enter();
        }
        true
    }

    /// Its number, as in asynchronous events.
    pub fn handle(&self) -> u32 {
        self.inner.id.0
    }

    /// The maximum number of completions that it holds.
    pub fn cqe(&self) -> u32 {
        self.inner.completions.lock().slots()
    }

    /// Whether another handle exists or a queue pair uses it.
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }

    /// Forgets the completions of a queue pair that was reset.
    pub(crate) fn discard_qp(&self, queue_pair: Qpn) {
        self.inner.completions.lock().discard_qp(queue_pair);
    }

    /// Takes the oldest completion. If there is none, the caller's thread drives an embedded device once. Polling never
    /// sleeps; an empty poll takes a fraction of a microsecond.
    ///
    /// # Panics
    /// In the host code of a `World`, after ten thousand calls in vain without an await: time stands still. In
    /// a child of the process that opened the device.
    pub fn poll(&self) -> Option<Completion> {
        let drives = self.enter_poll();
        if let Some(completion) = self.try_poll() {
            return Some(completion);
        }
        if !drives || !self.inner.backend.drive() {
            return None;
        }
        self.inner.completions.lock().pop()
    }

    /// Takes the oldest completion, and never drives the card: on a simulated card, time does not advance.
    ///
    /// # Panics
    /// In a child of the process that opened the device.
    pub fn try_poll(&self) -> Option<Completion> {
        self.assert_same_process();
        self.inner.completions.lock().pop()
    }

    #[inline]
    fn assert_same_process(&self) {
        if let Err(error) = self.check_process() {
            panic!("{error}");
        }
    }

    /// Takes up to `into.capacity() - into.len()` completions, or one batch of sixteen if that is zero.
    pub fn poll_many(&self, into: &mut Vec<Completion>) -> u32 {
        self.assert_same_process();
        let most = match into.capacity() - into.len() {
            0 => 16,
            room => room.try_into().unwrap_or(u32::MAX),
        };
        self.poll_each(most, |completion| into.push(completion))
    }

    /// Passes up to `most` completions to `take`, oldest first, and returns their number. If there are none, the caller's
    /// thread drives an embedded device once.
    #[inline(always)]
    pub fn poll_each(&self, most: u32, mut take: impl FnMut(Completion)) -> u32 {
        let mut drives = self.enter_poll();
        loop {
            let taken = if self.is_surely_empty() { 0 } else { self.take_each(most, &mut take) };
            if taken > 0 || most == 0 || !drives || !self.inner.backend.drive() {
                return taken;
            }
            drives = false;
        }
    }

    #[inline(always)]
    fn take_each(&self, most: u32, take: &mut impl FnMut(Completion)) -> u32 {
        let mut taken = 0;
        let mut ring = self.inner.completions.lock();
        while taken < most
            && let Some(completion) = ring.pop()
        {
            take(completion);
            taken += 1;
        }
        taken
    }

    /// As [`CompletionQueue::poll_each`] for programs whose poll can fail. `check` decides for each completion whether
    /// it is delivered. If `check` fails, the completion stays queued. The call returns the error unless it has
    /// delivered others.
    pub fn poll_each_checked<E>(
        &self,
        most: u32,
        mut check: impl FnMut() -> Result<(), E>,
        mut take: impl FnMut(Completion),
    ) -> Result<u32, E> {
        let mut taken = 0;
        if self.enter_poll() && self.inner.completions.lock().is_empty() {
            self.inner.backend.drive();
        }
        while taken < most && !self.inner.completions.lock().is_empty() {
            match check() {
                Err(error) if taken == 0 => return Err(error),
                Err(_) => break,
                Ok(()) => taken += self.take_each(1, &mut take),
            }
        }
        Ok(taken)
    }

    /// Waits for the next completion: spins for a moment, then sleeps.
    ///
    /// On a simulated device, outside of host code, virtual time advances.
    ///
    /// # Panics
    /// In the host code of a `World`, where [`CompletionQueue::next`] is to be awaited; and on a simulated
    /// card when no event is scheduled.
    pub fn wait(&self) -> Result<Completion, Error> {
        self.inner.backend.check_process()?;
        loop {
            if let Some(completion) = self.wait_until(None) {
                return Ok(completion);
            }
        }
    }

    /// Waits for the next completion, but not longer than `timeout`.
    ///
    /// # Panics
    /// As [`CompletionQueue::wait`].
    pub fn wait_for(&self, timeout: Duration) -> Option<Completion> {
        self.wait_until(Some(self.inner.backend.now().plus(timeout)))
    }

    fn wait_until(&self, deadline: Option<Instant>) -> Option<Completion> {
        assert_may_block("CompletionQueue::wait", "queue.next().await");
        let backend = &self.inner.backend;
        let spin_until = backend.now().plus(SPIN_TIME);
        let mut last = None;
        loop {
            if let Some(completion) = self.poll() {
                return Some(completion);
            }
            let now = backend.now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return None;
            }
            // Spinning does not advance virtual time.
            if now < spin_until && last.replace(now) != Some(now) {
                continue;
            }
            let seen = self.inner.notifier.count();
            self.request_notification(CqNotify::NextCompletion);
            if let Some(completion) = self.inner.completions.lock().pop() {
                return Some(completion);
            }
            backend.wait(&self.inner.notifier, seen, deadline);
        }
    }

    /// Asks for one notification: of the next completion, or the next that its sender solicited.
    ///
    /// Poll once more afterwards, as with `ibv_req_notify_cq`: completions that arrived before the call do not notify.
    pub fn request_notification(&self, notify: CqNotify) {
        self.assert_same_process();
        self.inner.completions.lock().request_notification(notify);
    }

    /// The next completion, for async code under any runtime. The future does not drive the device: its own thread
    /// does. No completion is lost if the future is dropped before it is ready.
    pub async fn next(&self) -> Completion {
        poll_fn(|context| self.poll_next_completion(context)).await
    }

    fn poll_next_completion(&self, context: &mut std::task::Context<'_>) -> Poll<Completion> {
        self.assert_same_process();
        let take = || {
            let mut completions = self.inner.completions.lock();
            completions.pop().or_else(|| {
                completions.request_notification(CqNotify::NextCompletion);
                completions.pop()
            })
        };
        self.inner.notifier.poll_take(context, || WaitReason::Completion(self.inner.id), take)
    }

    /// Changes the maximum number of completions. Pending completions stay.
    pub fn resize(&self, cqe: u32) -> Result<(), Error> {
        self.inner.backend.check_process()?;
        let mut ring = self.inner.completions.lock();
        let command = Command::ResizeCompletionQueue { cq: self.inner.id, cqe };
        let (_, rings) = self.inner.backend.execute_with_rings(command)?;
        *ring = CompletionConsumer::new(rings, cqe);
        self.inner.is_resized.store(true, Ordering::Relaxed);
        Ok(())
    }
}

/// The completions. It never ends. Several streams of one queue share its completions.
#[cfg(feature = "tokio")]
impl futures_core::Stream for CompletionQueue {
    type Item = Completion;

    fn poll_next(
        self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> Poll<Option<Completion>> {
        self.poll_next_completion(context).map(Some)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.backend.check_process().is_err() {
            return;
        }
        if let Some(channel) = &self.channel {
            channel.detach(self.token);
        }
        // Every queue pair that completes here holds a handle: none is left.
        let _ = self.backend.execute(Command::DestroyCompletionQueue(self.id));
    }
}
