//! Event channels.

use super::handles::{ChannelInner, EventChannel, Id};
use super::{Event, EventParameters, EventType, PortSpace};
use crate::backend::Backend;
use crate::endpoint_exchange::assert_may_block;
use crate::executor::WaitReason;
use crate::notifier::Notifier;
use crate::{Context, Error, QpType};
use parking_lot::Mutex;
use softhca_engine::{CmId, Instant};
use softhca_types::cm::{self, Command, Reply};
use softhca_types::reply;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

impl EventChannel {
    /// Creates a channel on a device.
    pub fn new(context: &Context) -> Result<EventChannel, Error> {
        let notifier = Arc::new(Notifier::default());
        let id =
            reply!(context.backend.execute_cm(Command::CreateEventChannel)?, Reply::EventChannel(id) => id);
        context.backend.set_cm_notifier(id, notifier.clone());
        let (context, identifiers) = (context.clone(), Mutex::default());
        let empty_at = AtomicU64::new(u64::MAX);
        Ok(EventChannel {
            inner: Arc::new(ChannelInner { context, id, notifier, drained_at: empty_at, identifiers }),
        })
    }

    /// The device.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    pub(super) fn backend(&self) -> &Arc<dyn Backend> {
        &self.inner.context.backend
    }

    /// Creates an identifier whose events come to this channel: for reliable connections in the TCP and IB port spaces, for
    /// datagrams in the others.
    pub fn create_id(&self, space: PortSpace) -> Result<Id, Error> {
        self.create_id_with_kind(space, QpType::Rc)
    }

    /// Creates an identifier with this service type, which the IB port space leaves open.
    pub fn create_id_with_kind(&self, space: PortSpace, kind: QpType) -> Result<Id, Error> {
        let command = Command::CreateId { channel: self.inner.id, port_space: space, qp_type: kind };
        Ok(self.wrap_id(reply!(self.backend().execute_cm(command)?, Reply::Id(id) => id)))
    }

    /// A handle of an identifier that the card made.
    fn wrap_id(&self, id: CmId) -> Id {
        let identifier = Id::new(id, self.clone());
        self.add(&identifier);
        identifier
    }

    pub(super) fn add(&self, id: &Id) {
        self.inner.identifiers.lock().insert(id.inner.id, Arc::downgrade(&id.inner));
    }

    pub(super) fn remove(&self, id: CmId) {
        self.inner.identifiers.lock().remove(&id);
    }

    fn find(&self, id: CmId) -> Option<Id> {
        let inner = self.inner.identifiers.lock().get(&id)?.upgrade()?;
        Some(Id { inner })
    }

    /// Whether an event may wait: false if the last poll left none and no event was raised since. It makes no system call.
    pub fn may_have_event(&self) -> bool {
        self.inner.drained_at.load(Ordering::Relaxed) != self.inner.notifier.count()
    }

    /// Takes the oldest event, if there is one.
    pub fn poll(&self) -> Result<Option<Event>, Error> {
        loop {
            self.inner.notifier.clear();
            let seen = self.inner.notifier.count();
            let reply = self.backend().execute_cm(Command::GetEvent(self.inner.id))?;
            let (event, left) = reply!(reply, Reply::Event(event, left) => (event, left));
            match left {
                0 => self.inner.drained_at.store(seen, Ordering::Relaxed),
                _ => self.inner.notifier.make_readable(),
            }
            let Some(event) = event else { return Ok(None) };
            if let Some(event) = self.process_event(event) {
                return Ok(Some(event));
            }
        }
    }

    /// Gives an event its handles, and does what the library has to do before the application gets it.
    fn process_event(&self, event: cm::Event) -> Option<Event> {
        let cm::Event { id, listener, event_type: mut kind, mut status, private_data, parameters: detail } =
            event;
        let listener = listener.and_then(|listener| self.find(listener));
        let id = match kind {
            EventType::ConnectRequest => self.wrap_id(id),
            // Nobody has the identifier any more: nobody wants its events.
            _ => self.find(id)?,
        };
        match (kind, detail) {
            (EventType::ConnectResponse, _) if id.queue_pair().is_some() => match id.complete_connection() {
                Ok(()) => kind = EventType::Established,
                Err(error) => {
                    let _ = id.reject(&[]);
                    (kind, status) = (EventType::ConnectError, -error.errno());
                }
            },
            (EventType::MulticastJoin, EventParameters::Ud(target)) => {
                if let Some(Err(error)) =
                    id.queue_pair().map(|pair| pair.attach_multicast(target.address_vector.dgid))
                {
                    (kind, status) = (EventType::MulticastError, -error.errno());
                }
            }
            (EventType::Rejected | EventType::Unreachable, _) => id.stop_queue_pair(),
            _ => {}
        }
        Some(Event { id, listener, kind, status, private_data, detail })
    }

    /// Waits for the next event: the thread sleeps.
    ///
    /// # Panics
    /// In the host code of a `World`, where [`EventChannel::next`] is to be awaited.
    pub fn wait(&self) -> Result<Event, Error> {
        loop {
            if let Some(event) = self.wait_until(None)? {
                return Ok(event);
            }
        }
    }

    /// Waits for the next event; `None` when the time is over.
    ///
    /// # Panics
    /// As [`EventChannel::wait`].
    pub fn wait_for(&self, timeout: Duration) -> Result<Option<Event>, Error> {
        self.wait_until(Some(self.backend().now().plus(timeout)))
    }

    fn wait_until(&self, until: Option<Instant>) -> Result<Option<Event>, Error> {
        assert_may_block("EventChannel::wait", "channel.next().await");
        loop {
            let seen = self.inner.notifier.count();
            if self.may_have_event()
                && let Some(event) = self.poll()?
            {
                return Ok(Some(event));
            }
            if self.backend().spin_wait(&self.inner.notifier, seen) {
                continue;
            }
            self.backend().hand_over();
            if !self.backend().wait(&self.inner.notifier, seen, until) {
                return self.poll();
            }
        }
    }

    /// Waits for the next event in async code. No event is lost if the future is dropped before it is ready.
    pub async fn next(&self) -> Result<Event, Error> {
        poll_fn(|context| self.poll_next_event(context)).await
    }

    pub(super) fn poll_next_event(&self, context: &mut std::task::Context<'_>) -> Poll<Result<Event, Error>> {
        self.inner.notifier.poll_take(context, || WaitReason::CmEvent, || self.poll().transpose())
    }

    /// A descriptor that is readable while an event may wait, for `poll`, `epoll` or a runtime.
    #[cfg(feature = "sockets")]
    pub fn descriptor(&self) -> Result<std::os::fd::BorrowedFd<'_>, Error> {
        self.inner.notifier.descriptor()
    }
}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        // Every identifier holds a handle: none is left.
        let _ = self.context.backend.execute_cm(Command::DestroyEventChannel(self.id));
    }
}
