//! Completion channels.

use crate::completion_queue::{Channel, CompletionQueue};
use crate::endpoint_exchange::assert_may_block;
use crate::event_fd::EventFd;
use crate::executor::WaitReason;
use crate::{Context, Error};
use softhca_engine::Instant;
use std::future::poll_fn;
use std::sync::Arc;
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

impl Context {
    /// Creates a completion queue whose notifications go to a channel.
    pub fn create_completion_queue_with_channel(
        &self,
        cqe: u32,
        channel: &CompletionChannel,
    ) -> Result<CompletionQueue, Error> {
        CompletionQueue::new(self, cqe, Some(&channel.inner))
    }

    /// Creates a channel that collects the notifications of several completion queues.
    pub fn create_completion_channel(&self) -> Result<CompletionChannel, Error> {
        CompletionChannel::new(self)
    }
}

impl CompletionChannel {
    fn new(context: &Context) -> Result<CompletionChannel, Error> {
        let event_fd =
            EventFd::new().map_err(|source| Error::System { what: "making an event descriptor", source })?;
        Ok(CompletionChannel { inner: Arc::new(Channel::new(context.backend.clone(), event_fd)) })
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
            let seen = self.inner.events.notifier.count();
            if let Some(queue) = self.inner.pop_event() {
                return Some(queue);
            }
            if !self.inner.backend.wait(&self.inner.events.notifier, seen, until) {
                return self.inner.pop_event();
            }
        }
    }

    /// Blocks until `descriptor`, which is readable while the channel is, may be readable. Fails if a signal arrives.
    #[cfg(feature = "sockets")]
    #[doc(hidden)]
    pub fn wait_readable(&self, descriptor: std::os::fd::BorrowedFd<'_>) -> std::io::Result<()> {
        let Channel { backend, events, .. } = &*self.inner;
        match backend.spin_wait(&events.notifier, events.notifier.count()) {
            true => Ok(()),
            false => backend.wait_readable(&[descriptor], None),
        }
    }

    /// The queue of the next event, for async code.
    pub async fn next(&self) -> CompletionQueue {
        poll_fn(|context| {
            self.inner.backend.assert_same_process();
            self.inner.events.notifier.poll_take(
                context,
                || WaitReason::ChannelEvent,
                || self.inner.pop_event(),
            )
        })
        .await
    }
}

/// Readable while an event waits.
#[cfg(feature = "sockets")]
impl std::os::fd::AsFd for CompletionChannel {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.inner.events.event_fd.as_fd()
    }
}
