//! An HCA in this process, embedded or simulated: control verbs are function calls, rings are on the heap.

use crate::async_events::AsyncEventQueue;
use crate::backend::{Backend, Result, Runtime};
use crate::memory::MemoryBlock;
use crate::notifier::Notifier;
use parking_lot::Mutex;
use softhca_engine::{
    Attachments, ClientId, CmChannelId, Command, Context, Counters, CqId, DeviceLimits, Event, Hca, MemoryId,
    Reply, VerbsError,
};
use softhca_queue::{DoorbellConsumer, DoorbellProducer, SendProducer, SharedWords, doorbell_ring};
use softhca_types::{CallSite, cm};
use softhca_wire::{Gid, Qpn};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Delivers the events of an HCA to the application: completion notifications, asynchronous events, CM events.
#[derive(Default)]
pub(crate) struct EventBus {
    pub completion_queues: Mutex<BTreeMap<CqId, Arc<Notifier>>>,
    pub async_events: AsyncEventQueue,
    cm_channels: Mutex<BTreeMap<CmChannelId, Arc<Notifier>>>,
}

impl EventBus {
    /// Lets every thread that waits for a completion or a CM event look again.
    #[cfg(all(feature = "sockets", target_os = "linux"))]
    pub fn wake_all(&self) {
        let mut notifiers: Vec<_> = self.completion_queues.lock().values().cloned().collect();
        notifiers.extend(self.cm_channels.lock().values().cloned());
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

/// The client of an HCA in this process.
pub(crate) struct LocalClient {
    pub id: ClientId,
    event_bus: Arc<EventBus>,
    doorbell: DoorbellProducer,
}

impl LocalClient {
    /// Opens a client, whose events go to `event_bus`.
    pub fn open(
        event_bus: Arc<EventBus>,
        open: impl FnOnce(DoorbellConsumer) -> std::result::Result<ClientId, VerbsError>,
    ) -> Result<LocalClient> {
        let (doorbell, consumer) = doorbell_ring(DeviceLimits::HCA.max_qp);
        Ok(LocalClient { id: open(consumer)?, event_bus, doorbell })
    }
}

/// The place in the program that calls the verb, while calls are recorded.
fn call_site(command: &Command) -> Option<CallSite> {
    command.call().and_then(|_| crate::fault::call_site())
}

/// The runtime of an HCA in this process: its driver and its memory.
pub(crate) trait CardRuntime: Runtime + 'static {
    fn client(&self) -> &LocalClient;
    /// This HCA for another client.
    fn with_client(&self, client: LocalClient) -> Self
    where
        Self: Sized;
    /// Calls `act` with the HCA.
    fn control<R>(&self, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R;
    /// Executes a control verb.
    fn execute_command(&self, command: Command, attachments: &mut Attachments) -> Result<Reply>;
    /// As [`Backend::allocate_memory`].
    fn allocate_block(&self, length: usize) -> Result<Arc<MemoryBlock>> {
        crate::memory::allocate(length)
    }
    /// Adds memory that regions can use.
    fn add_memory(&self, block: Arc<MemoryBlock>) -> MemoryId;
    /// Removes memory that no region uses.
    fn remove_memory(&self, memory: MemoryId);
    /// Processes rung doorbells.
    fn on_doorbell(&self);
}

impl<R: CardRuntime> Backend for R {
    fn reopened(&self) -> Option<Arc<dyn Backend>> {
        let is_lost =
            self.check_process().is_ok() && self.control(|hca, _| hca.must_reopen(self.client().id));
        let open = |doorbell| self.control(|hca, _| hca.open_client(doorbell));
        let client = is_lost.then(|| LocalClient::open(self.client().event_bus.clone(), open))?.ok()?;
        Some(Arc::new(self.with_client(client)))
    }

    fn execute_with(
        &self,
        command: Command,
        memory: Option<&Arc<MemoryBlock>>,
    ) -> Result<(Reply, Option<SharedWords>)> {
        self.check_process()?;
        let rings = match softhca_queue::ring_words(&command)? {
            0 => None,
            words => Some(SharedWords::heap(words)),
        };
        let memory = memory.map(|block| self.add_memory(block.clone()));
        let mut attachments =
            Attachments { rings: rings.clone(), memory, call_site: call_site(&command), is_part: false };
        let result = self.execute_command(command.clone(), &mut attachments);
        if let Some(memory) = attachments.memory {
            self.remove_memory(memory);
        }
        let reply = result?;
        match command {
            Command::DestroyCompletionQueue(cq) => {
                self.client().event_bus.completion_queues.lock().remove(&cq);
            }
            Command::Cm(cm::Command::DestroyEventChannel(channel)) => {
                self.client().event_bus.cm_channels.lock().remove(&channel);
            }
            _ => {}
        }
        Ok((reply, rings))
    }

    fn set_completion_notifier(&self, cq: CqId, notifier: Arc<Notifier>) {
        self.client().event_bus.completion_queues.lock().insert(cq, notifier);
    }

    fn set_cm_notifier(&self, channel: CmChannelId, notifier: Arc<Notifier>) {
        self.client().event_bus.cm_channels.lock().insert(channel, notifier);
    }

    fn allocate_memory(&self, length: usize) -> Result<Arc<MemoryBlock>> {
        self.allocate_block(length)
    }

    fn gids(&self) -> Vec<Gid> {
        match self.check_process() {
            Ok(()) => self.control(|hca, _| hca.gids().to_vec()),
            Err(_) => Vec::new(),
        }
    }

    fn counters(&self) -> Counters {
        match self.check_process() {
            Ok(()) => self.control(|hca, _| *hca.counters()),
            Err(_) => Counters::default(),
        }
    }

    fn async_events(&self) -> &AsyncEventQueue {
        &self.client().event_bus.async_events
    }

    fn ring_doorbell(&self, qpn: Qpn, send: &SendProducer) {
        send.ring(&self.client().doorbell, qpn);
        self.on_doorbell();
    }
}
