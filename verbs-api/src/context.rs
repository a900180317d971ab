//! An open device.

use crate::backend::Backend;
use crate::endpoint_exchange::assert_may_block;
use crate::executor::WaitReason;
use crate::{Counters, Error};
use softhca_engine::{AsyncEvent, Command, PortState, Reply, Resource};
use softhca_types::{FaultTrigger, InfiniBandPort, InjectedEvent, ProgramFaults, Verb, VerbSet};
use softhca_wire::Gid;
use std::future::poll_fn;
use std::net::IpAddr;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

/// An open device.
#[derive(Clone)]
pub struct Context {
    pub(crate) backend: Arc<dyn Backend>,
    address: IpAddr,
    /// The verbs that the device does not execute itself and wants to see: fault rules name them.
    announced: VerbSet,
}

impl Context {
    pub(crate) fn new(backend: Arc<dyn Backend>, address: IpAddr, faults: Option<ProgramFaults>) -> Context {
        let announced = faults.as_ref().map_or(VerbSet::EMPTY, ProgramFaults::announced);
        if let Some(faults) = faults {
            // A device that is gone fails every call that a rule could fail.
            let _ = backend.execute(Command::InjectFaults(faults));
        }
        Context { backend, address, announced }
    }

    /// Lets the device count a call that it does not execute itself, for fault rules: a post, a poll, a query. The error
    /// is that of the rule that hits the call. Without such a rule this is one comparison.
    #[inline]
    pub fn announce_call(&self, verb: Verb, object: Option<(Resource, u32)>) -> Result<(), Error> {
        if self.announced.contains(verb) { self.announce(verb, object) } else { Ok(()) }
    }

    /// Whether the device wants to see calls of this verb.
    #[inline]
    pub fn announces(&self, verb: Verb) -> bool {
        self.announced.contains(verb)
    }

    #[cold]
    fn announce(&self, verb: Verb, object: Option<(Resource, u32)>) -> Result<(), Error> {
        self.backend.execute(Command::AnnounceCall { verb, object }).map(|_| ())
    }

    /// Raises an asynchronous event with the consequences that it has on a card. The number is that of the queue pair,
    /// completion queue or shared receive queue, if the event concerns one.
    pub fn raise_event(&self, event: InjectedEvent, object: Option<u32>) -> Result<(), Error> {
        self.backend.execute(Command::RaiseEvent { event, object }).map(|_| ())
    }

    /// Reports a step of a scenario, or a fault outside of this program, to the faults that wait for it.
    pub fn note_trigger(&self, trigger: FaultTrigger) -> Result<(), Error> {
        self.backend.execute(Command::NoteTrigger(trigger)).map(|_| ())
    }

    /// The host's address.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Whether the device still exists. The device of a daemon that ended does not.
    pub fn is_alive(&self) -> bool {
        self.backend.is_alive()
    }

    /// Fails if the device failed, was removed or is gone, as every control verb does then.
    pub fn check_device(&self) -> Result<(), Error> {
        self.backend.execute(Command::QueryPort).map(drop)
    }

    /// Fails with [`Error::Forked`] in a child of the process that opened the device, as every verb does there. Rings,
    /// doorbells and sockets belong to the parent. A child opens a device of its own. Verbs that return no error panic
    /// with the same message.
    pub fn check_process(&self) -> Result<(), Error> {
        self.backend.check_process()
    }

    /// The caller has polled completion queues and is about to sleep in `poll` or `epoll`, on the descriptor of a
    /// channel. The thread of the device serves its sockets at once. Without this call it finds out within a
    /// millisecond. Waits of this library do it themselves.
    pub fn hand_over(&self) {
        self.backend.hand_over();
    }

    /// The program may wait for a write to its memory without a call of this library. Until then, the thread of the device
    /// leaves packets to callers that poll.
    #[doc(hidden)]
    pub fn allow_silent_waits(&self) {
        self.backend.allow_silent_waits();
    }

    /// The most descriptors of [`Context::wait_readable`].
    #[cfg(feature = "sockets")]
    #[doc(hidden)]
    pub const MAX_DESCRIPTORS: usize = softhca_udp::MAX_CALLER_DESCRIPTORS;

    /// Blocks until one of the descriptors is readable or the time is over, or returns early. If callers drive the
    /// card, this one drives it meanwhile. Fails if a signal arrives.
    #[cfg(feature = "sockets")]
    #[doc(hidden)]
    pub fn wait_readable(
        &self,
        descriptors: &[std::os::fd::BorrowedFd<'_>],
        timeout: Option<std::time::Duration>,
    ) -> std::io::Result<()> {
        self.backend.wait_readable(descriptors, timeout)
    }

    /// The GID at an index of the port's table.
    pub fn gid(&self, index: u8) -> Option<Gid> {
        self.backend.gids().get(usize::from(index)).copied()
    }

    /// The state of the port: down while its link carries nothing, and when the card is gone.
    pub fn port_state(&self) -> PortState {
        self.backend.port_state()
    }

    /// The attributes that only a port of an InfiniBand subnet has; `None` for a RoCE port.
    pub fn infiniband_port(&self) -> Result<Option<InfiniBandPort>, Error> {
        match self.backend.execute(Command::QueryInfiniBandPort)? {
            Reply::InfiniBandPort(port) => Ok(port),
            _ => Ok(None),
        }
    }

    /// The number of entries in the port's GID table.
    pub fn gid_table_len(&self) -> u8 {
        self.backend.gids().len() as u8
    }

    /// The GID index to use towards a peer or multicast group: the first entry with the same IP version.
    pub fn gid_index_for(&self, peer: Gid) -> u8 {
        let gids = self.backend.gids();
        let same = |gid: &Gid| gid.ip().is_ipv4() == peer.ip().is_ipv4();
        gids.iter().position(same).unwrap_or(0) as u8
    }

    /// The group that packets to `group` travel to: a card without an IPv6 address uses an IPv4 group in place of an IPv6
    /// one, and every such card the same.
    pub(crate) fn group_of(&self, group: Gid) -> Gid {
        let needs_ipv6 = group.is_multicast() && group.ip().is_ipv6();
        match needs_ipv6 && self.backend.gids().iter().all(|gid| gid.ip().is_ipv4()) {
            true => group.ipv4_group(),
            false => group,
        }
    }

    /// The counters of the device since its start; `docs/reference/counters.md` explains each.
    pub fn counters(&self) -> Counters {
        self.backend.counters()
    }

    /// A descriptor that is readable while an asynchronous event waits, for `poll`, `epoll` or a runtime.
    #[cfg(feature = "sockets")]
    pub fn async_fd(&self) -> Result<std::os::fd::BorrowedFd<'_>, Error> {
        self.backend.async_events().descriptor()
    }

    /// Takes the oldest asynchronous event, if there is one.
    ///
    /// # Panics
    /// In a child of the process that opened the device.
    pub fn poll_async_event(&self) -> Option<AsyncEvent> {
        self.backend.assert_same_process();
        self.backend.async_events().pop()
    }

    /// Waits for an asynchronous event; `None` when the time is over.
    ///
    /// # Panics
    /// In the host code of a `World`, where [`Context::next_async_event`] is to be awaited.
    pub fn wait_async_event(&self, timeout: Duration) -> Option<AsyncEvent> {
        self.backend.assert_same_process();
        assert_may_block("Context::wait_async_event", "context.next_async_event().await");
        let until = self.backend.now().plus(timeout);
        loop {
            let seen = self.backend.async_events().notifier().count();
            if let Some(event) = self.backend.async_events().pop() {
                return Some(event);
            }
            if !self.backend.wait(self.backend.async_events().notifier(), seen, Some(until)) {
                return self.backend.async_events().pop();
            }
        }
    }

    /// The next asynchronous event, for async code.
    pub async fn next_async_event(&self) -> AsyncEvent {
        self.async_events().next().await
    }

    /// The asynchronous events, for async code. All streams of a device share its events.
    pub fn async_events(&self) -> AsyncEvents {
        AsyncEvents { backend: self.backend.clone() }
    }
}

/// The asynchronous events of a device.
///
/// With feature `tokio` it is a `Stream`, which never ends.
#[derive(Clone)]
pub struct AsyncEvents {
    backend: Arc<dyn Backend>,
}

impl AsyncEvents {
    /// The next event. None is lost if the future is dropped before it is ready.
    pub async fn next(&self) -> AsyncEvent {
        poll_fn(|context| self.poll_next_event(context)).await
    }

    fn poll_next_event(&self, context: &mut std::task::Context<'_>) -> Poll<AsyncEvent> {
        self.backend.assert_same_process();
        let events = self.backend.async_events();
        events.notifier().poll_take(context, || WaitReason::AsyncEvent, || events.pop())
    }
}

#[cfg(feature = "tokio")]
impl futures_core::Stream for AsyncEvents {
    type Item = AsyncEvent;

    fn poll_next(
        self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> Poll<Option<AsyncEvent>> {
        self.poll_next_event(context).map(Some)
    }
}
