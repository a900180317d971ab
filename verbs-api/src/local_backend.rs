//! An HCA in this process, embedded or simulated: control verbs are function calls, rings are on the heap.

use crate::EndpointExchange;
use crate::async_events::AsyncEventQueue;
use crate::backend::{Backend, Result};
use crate::memory::MemoryBlock;
use crate::notifier::Notifier;
use parking_lot::Mutex;
use softhca_engine::{
    Attachments, ClientId, CmChannelId, Command, Context, Counters, CqId, DeviceLimits, Event, Hca, Instant,
    MemoryId, Reply,
};
use softhca_queue::{DoorbellProducer, SendProducer, SharedWords, cm, doorbell_ring};
use softhca_wire::{Gid, Mtu, Qpn};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

/// Delivers the events of an HCA to the application: completion notifications, asynchronous events, CM events.
#[derive(Default)]
pub(crate) struct EventBus {
    completion_queues: Mutex<BTreeMap<CqId, Arc<Notifier>>>,
    async_events: AsyncEventQueue,
    cm_channels: Mutex<BTreeMap<CmChannelId, Arc<Notifier>>>,
}

impl EventBus {
    #[cfg(all(feature = "sockets", target_os = "linux"))]
    pub fn push_async_event(&self, event: softhca_engine::AsyncEvent) {
        self.async_events.push(event);
    }

    /// Lets everyone who waits for a completion look again.
    #[cfg(all(feature = "sockets", target_os = "linux"))]
    pub fn wake_all(&self) {
        let notifiers: Vec<_> = self.completion_queues.lock().values().cloned().collect();
        notifiers.iter().for_each(|notifier| notifier.notify());
    }

    pub fn dispatch(&self, event: &Event) {
        let notifier = match event {
            Event::CompletionNotified { cq } => self.completion_queues.lock().get(cq).cloned(),
            Event::CmEventRaised { channel, .. } => self.cm_channels.lock().get(channel).cloned(),
            Event::AsyncEventRaised { event, .. } => return self.async_events.push(*event),
            _ => None,
        };
        if let Some(notifier) = notifier {
            notifier.notify();
        }
    }
}

/// What runs an HCA: its driver, its memory and its clock.
pub(crate) trait CardRuntime: Send + Sync + 'static {
    /// As in [`Backend`].
    fn check_process(&self) -> Result<()> {
        Ok(())
    }
    /// Calls `act` with the HCA.
    fn control<R>(&self, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R;
    /// Executes a control verb.
    fn execute(&self, client: ClientId, command: Command, attachments: &mut Attachments) -> Result<Reply>;
    /// As in [`Backend`].
    fn is_alive(&self) -> bool {
        true
    }
    /// Sets the notifier of a CM event channel of a connection manager elsewhere. Returns it if there is none.
    fn set_remote_cm_notifier(&self, _: CmChannelId, notifier: Arc<Notifier>) -> Option<Arc<Notifier>> {
        Some(notifier)
    }
    /// As in [`Backend`].
    fn allocate_memory(&self, length: usize) -> Arc<MemoryBlock> {
        Arc::new(MemoryBlock::new(length))
    }
    /// Adds memory that regions can use.
    fn add_memory(&self, block: Arc<MemoryBlock>) -> MemoryId;
    /// Removes memory that no region uses.
    fn remove_memory(&self, memory: MemoryId);
    /// Processes rung doorbells.
    fn on_doorbell(&self);
    /// As in [`Backend`].
    fn active_mtu(&self) -> Mtu;
    /// As in [`Backend`].
    fn resolve_host(&self, name: &str) -> Option<IpAddr>;
    /// As in [`Backend`].
    fn drive(&self) -> bool;
    /// As in [`Backend`].
    fn now(&self) -> Instant;
    /// As in [`Backend`].
    fn spin_wait(&self, notifier: &Notifier, seen: u64) {
        let _ = (notifier, seen);
    }
    /// As in [`Backend`].
    fn wait(&self, notifier: &Notifier, seen: u64, until: Option<Instant>) -> bool;
    #[cfg(feature = "sockets")]
    fn wait_readable(&self, descriptor: std::os::fd::BorrowedFd<'_>) -> std::io::Result<()> {
        softhca_udp::poll_readable(&[descriptor], None).map(drop)
    }
    /// As in [`Backend`].
    fn random(&self) -> u64;
    /// As in [`Backend`].
    fn endpoint_exchange(&self) -> EndpointExchange;
}

/// An HCA in this process.
pub(crate) struct LocalBackend<R: CardRuntime> {
    pub runtime: Arc<R>,
    event_bus: Arc<EventBus>,
    pub client: ClientId,
    doorbell: DoorbellProducer,
}

impl<R: CardRuntime> LocalBackend<R> {
    /// A client of the HCA in `runtime`, whose events go to `event_bus`.
    pub fn new(runtime: R, event_bus: Arc<EventBus>) -> Result<LocalBackend<R>> {
        LocalBackend::open(Arc::new(runtime), event_bus)
    }

    fn open(runtime: Arc<R>, event_bus: Arc<EventBus>) -> Result<LocalBackend<R>> {
        let (doorbell, consumer) = doorbell_ring(DeviceLimits::HCA.max_qp);
        let client = runtime.control(|hca, _| hca.open_client(consumer))?;
        Ok(LocalBackend { runtime, event_bus, client, doorbell })
    }

    /// The client of a new context. One that lost a device, which was removed and is back, cannot use it.
    pub fn for_new_context(self: &Arc<Self>) -> Arc<Self> {
        let must_reopen =
            self.check_process().is_ok() && self.runtime.control(|hca, _| hca.must_reopen(self.client));
        let reopened = must_reopen
            .then(|| LocalBackend::open(self.runtime.clone(), self.event_bus.clone()).ok())
            .flatten();
        reopened.map_or_else(|| self.clone(), Arc::new)
    }
}

impl<R: CardRuntime> Backend for LocalBackend<R> {
    fn check_process(&self) -> Result<()> {
        self.runtime.check_process()
    }

    fn execute_with(
        &self,
        command: Command,
        memory: Option<&Arc<MemoryBlock>>,
    ) -> Result<(Reply, Option<SharedWords>)> {
        self.runtime.check_process()?;
        let rings = match command.ring_words()? {
            0 => None,
            words => Some(SharedWords::heap(words)),
        };
        let memory = memory.map(|block| self.runtime.add_memory(block.clone()));
        let mut attachments = Attachments { rings: rings.clone(), memory };
        let result = self.runtime.execute(self.client, command.clone(), &mut attachments);
        if let Some(memory) = attachments.memory {
            self.runtime.remove_memory(memory);
        }
        let reply = result?;
        match command {
            Command::DestroyCompletionQueue(cq) => {
                self.event_bus.completion_queues.lock().remove(&cq);
            }
            Command::Cm(cm::Command::DestroyEventChannel(channel)) => {
                self.event_bus.cm_channels.lock().remove(&channel);
            }
            _ => {}
        }
        Ok((reply, rings))
    }

    fn set_completion_notifier(&self, cq: CqId, notifier: Arc<Notifier>) {
        self.event_bus.completion_queues.lock().insert(cq, notifier);
    }

    fn set_cm_notifier(&self, channel: CmChannelId, notifier: Arc<Notifier>) {
        if let Some(notifier) = self.runtime.set_remote_cm_notifier(channel, notifier) {
            self.event_bus.cm_channels.lock().insert(channel, notifier);
        }
    }

    fn is_alive(&self) -> bool {
        self.runtime.is_alive()
    }

    fn allocate_memory(&self, length: usize) -> Result<Arc<MemoryBlock>> {
        Ok(self.runtime.allocate_memory(length))
    }

    fn gids(&self) -> Vec<Gid> {
        match self.check_process() {
            Ok(()) => self.runtime.control(|hca, _| hca.gids().to_vec()),
            Err(_) => Vec::new(),
        }
    }

    fn counters(&self) -> Counters {
        match self.check_process() {
            Ok(()) => self.runtime.control(|hca, _| *hca.counters()),
            Err(_) => Counters::default(),
        }
    }

    fn active_mtu(&self) -> Mtu {
        self.runtime.active_mtu()
    }

    fn resolve_host(&self, name: &str) -> Option<IpAddr> {
        self.runtime.resolve_host(name)
    }

    fn async_events(&self) -> &AsyncEventQueue {
        &self.event_bus.async_events
    }

    fn ring_doorbell(&self, qpn: Qpn, send: &SendProducer) {
        send.ring(&self.doorbell, qpn);
        self.runtime.on_doorbell();
    }

    fn drive(&self) -> bool {
        self.runtime.drive()
    }

    fn now(&self) -> Instant {
        self.runtime.now()
    }

    fn spin_wait(&self, notifier: &Notifier, seen: u64) {
        self.runtime.spin_wait(notifier, seen);
    }

    fn wait(&self, notifier: &Notifier, seen: u64, until: Option<Instant>) -> bool {
        self.runtime.wait(notifier, seen, until)
    }

    #[cfg(feature = "sockets")]
    fn wait_readable(&self, descriptor: std::os::fd::BorrowedFd<'_>) -> std::io::Result<()> {
        self.runtime.wait_readable(descriptor)
    }

    fn random(&self) -> u64 {
        self.runtime.random()
    }

    fn endpoint_exchange(&self) -> EndpointExchange {
        self.runtime.endpoint_exchange()
    }
}
