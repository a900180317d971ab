//! Completion channels.

use crate::backend::Backend;
use crate::completion_queue::{self, CompletionQueue};
use crate::endpoint_exchange::assert_may_block;
use crate::event_fd::EventFd;
use crate::executor::WaitReason;
use crate::notifier::Notifier;
use crate::{Context, Error};
use parking_lot::Mutex;
use softhca_engine::Instant;
use std::collections::{BTreeMap, VecDeque};
use std::future::poll_fn;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Reports which of several completion queues has completions: `struct ibv_comp_channel`.
///
/// A queue notifies its channel once for each [`request_notification`](CompletionQueue::request_notification): request,
/// poll until the queue is empty, then wait here. The descriptor of the channel is readable while an event waits, for
/// `poll`, `epoll` or a runtime. Waiting on a queue itself requests notifications, too; ignore the events of those.
///
/// ```
/// # fn main() -> Result<(), softhca::Error> {
/// use softhca::{Device, CqNotify, QpType, SendRequest};
/// use std::time::Duration;
///
/// let context = Device::embedded()?.open();
/// let channel = context.create_completion_channel()?;
/// let queue = context.create_completion_queue_with_channel(16, &channel)?;
/// queue.request_notification(CqNotify::NextCompletion);
/// // A request of a queue pair that is not connected is flushed once it is in the error state.
/// let pair = context.allocate_protection_domain()?.create_queue_pair(QpType::Rc, &queue).build()?;
/// pair.modify(&softhca::ModifyQp::default().state(softhca::QpState::Error))?;
/// pair.post_send(&SendRequest::send(1, &[]))?;
/// assert!(channel.wait_for(Duration::from_secs(5)) == Some(queue.clone()));
/// assert_eq!(queue.poll().unwrap().wr_id, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct CompletionChannel {
    inner: Arc<Channel>,
}

pub(crate) struct Channel {
    backend: Arc<dyn Backend>,
    /// The queues that have news, oldest first.
    events: Mutex<VecDeque<u64>>,
    queues: Mutex<BTreeMap<u64, Weak<completion_queue::Inner>>>,
    notifier: Notifier,
    event_fd: EventFd,
}

impl Channel {
    /// Gives a queue a place on the channel.
    pub fn attach(&self, queue: &Arc<completion_queue::Inner>) {
        self.queues.lock().insert(queue.token(), Arc::downgrade(queue));
    }

    /// Takes a queue and its events off.
    pub fn detach(&self, token: u64) {
        self.queues.lock().remove(&token);
        let mut events = self.events.lock();
        events.retain(|event| *event != token);
        if events.is_empty() {
            self.event_fd.clear();
        }
    }

    /// A queue has news.
    pub fn notify(&self, token: u64) {
        let mut events = self.events.lock();
        events.push_back(token);
        self.event_fd.wake();
        drop(events);
        self.notifier.notify();
    }

    fn pop_event(&self) -> Option<CompletionQueue> {
        loop {
            let token = {
                let mut events = self.events.lock();
                let token = events.pop_front()?;
                if events.is_empty() {
                    self.event_fd.clear();
                }
                token
            };
            if let Some(queue) = self.queues.lock().get(&token).and_then(Weak::upgrade) {
                return Some(CompletionQueue::from_inner(queue));
            }
        }
    }
}

impl CompletionChannel {
    pub(crate) fn new(context: &Context) -> Result<CompletionChannel, Error> {
        let event_fd =
            EventFd::new().map_err(|source| Error::System { what: "making an event descriptor", source })?;
        let inner = Channel {
            backend: context.backend.clone(),
            events: Mutex::default(),
            queues: Mutex::default(),
            notifier: Notifier::default(),
            event_fd,
        };
        Ok(CompletionChannel { inner: Arc::new(inner) })
    }

    pub(crate) fn inner(&self) -> &Arc<Channel> {
        &self.inner
    }

    /// The queue of the oldest event, if there is one.
    ///
    /// # Panics
    /// In a child of the process that opened the device.
    pub fn poll(&self) -> Option<CompletionQueue> {
        self.inner.backend.assert_same_process();
        self.inner.pop_event()
    }

    /// The queue of the next event; sleeps until there is one.
    ///
    /// # Panics
    /// As [`CompletionQueue::wait`].
    pub fn wait(&self) -> CompletionQueue {
        loop {
            if let Some(queue) = self.wait_until(None) {
                return queue;
            }
        }
    }

    /// The queue of the next event, or none when the time is over.
    ///
    /// # Panics
    /// As [`CompletionQueue::wait`].
    pub fn wait_for(&self, timeout: Duration) -> Option<CompletionQueue> {
        self.wait_until(Some(self.inner.backend.now().plus(timeout)))
    }

    fn wait_until(&self, until: Option<Instant>) -> Option<CompletionQueue> {
        assert_may_block("CompletionChannel::wait", "channel.next().await");
        loop {
            self.inner.backend.assert_same_process();
            let seen = self.inner.notifier.count();
            if let Some(queue) = self.inner.pop_event() {
                return Some(queue);
            }
            if !self.inner.backend.wait(&self.inner.notifier, seen, until) {
                return self.inner.pop_event();
            }
        }
    }

    /// Blocks until `descriptor`, which is readable while the channel is, may be readable. Fails if a signal arrives.
    #[cfg(feature = "sockets")]
    #[doc(hidden)]
    pub fn wait_readable(&self, descriptor: std::os::fd::BorrowedFd<'_>) -> std::io::Result<()> {
        self.inner.backend.wait_readable(&[descriptor], None)
    }

    /// The queue of the next event, for async code.
    pub async fn next(&self) -> CompletionQueue {
        poll_fn(|context| {
            self.inner.backend.assert_same_process();
            self.inner.notifier.poll_take(context, || WaitReason::ChannelEvent, || self.inner.pop_event())
        })
        .await
    }
}

/// Readable while an event waits.
#[cfg(feature = "sockets")]
impl std::os::fd::AsFd for CompletionChannel {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.inner.event_fd.as_fd()
    }
}
