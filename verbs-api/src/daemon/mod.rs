//! An HCA in a daemon, shared with other processes: rings in shared memory, control verbs over a socket.

mod cm_event_queue;
mod connection;
mod control;
pub(crate) mod direct;
mod direct_open;
mod event_stream;
mod opened_host;
mod orphaned_rings;
mod port_reservations;

pub use control::{DaemonControl, HostAsyncEvent};
pub use event_stream::EventStream;
pub use softhca_control::{ClientStatus, DaemonStatus, FabricPort, HostDevice, HostStatus, QueuePairStatus};

use crate::async_events::AsyncEventQueue;
use crate::backend::{Backend, Result, Runtime};
use crate::local_backend::EventBus;
use crate::memory::MemoryBlock;
use crate::notifier::Notifier;
use crate::real_clock::real_now;
use crate::{Device, EndpointExchange, Error};
use cm_event_queue::CmEventQueue;
use connection::{ControlConnection, ControlSocket, NotificationHandler};
use control::{daemon_name, expect_response, unexpected_reply};
use opened_host::{OpenedHost, missing_descriptors};
use orphaned_rings::{OrphanedRings, QueuePairRings};
use softhca_control::{self as protocol, HOST_VARIABLE, Notification, RegionBacking, Request, Response};
use softhca_engine::{
    AsyncEvent, CmChannelId, Command, Counters, CqId, DeviceLimits, Event, Instant, Profile, Reply,
};
use softhca_fabric::{Flow, Rule, RuleCounters};
use softhca_queue::{DoorbellProducer, MapMode, SendProducer, SharedMemory, SharedWords, SleepFlag};
use softhca_types::VerbsError;
use softhca_wire::{Gid, Mtu, Qpn};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

impl Device {
    /// The device of a host of a daemon. `SOFTHCA_DAEMON` names the daemon, `SOFTHCA_HOST` the host; without
    /// them, the default daemon and its first host.
    pub fn daemon() -> Result<Device> {
        Device::daemon_host(None, None)
    }

    /// The device of a host of a daemon, both by name. `None` is as in [`Device::daemon`].
    pub fn daemon_host(daemon: Option<&str>, host: Option<&str>) -> Result<Device> {
        let host = host.map(String::from).or_else(|| std::env::var(HOST_VARIABLE).ok());
        let (socket, opened) = OpenedHost::connect(&daemon_name(daemon), host)?;
        Device::open_over(socket, opened?)
    }

    /// The device of a host, whose control verbs go over `socket`.
    fn open_over(socket: ControlSocket, opened: OpenedHost) -> Result<Device> {
        let address = opened.host.address;
        let backend: Arc<dyn Backend> = match opened.direct {
            Some(_) => Arc::new(direct_open::open(socket, opened)?),
            None => Arc::new(DaemonBackend::new(socket, opened)?),
        };
        Ok(Device::new(backend, address))
    }

    /// The devices of a daemon, with those that a fault removed. Without a name, of the daemon in `SOFTHCA_DAEMON` or the
    /// default one.
    pub fn list(daemon: Option<&str>) -> Result<Vec<HostDevice>> {
        Ok(ControlSocket::connect(&daemon_name(daemon))?.welcome.hosts)
    }
}

/// State that the notification thread and the callers share.
#[derive(Default)]
struct ClientState {
    event_bus: EventBus,
    cm_events: CmEventQueue,
    orphaned_rings: OrphanedRings,
}

impl NotificationHandler for ClientState {
    fn on_notification(&self, notification: Notification, _: Vec<OwnedFd>) {
        match notification {
            Notification::CompletionNotified(cq) => {
                self.event_bus.dispatch(&Event::CompletionNotified { cq });
            }
            Notification::AsyncEventRaised(event) => self.event_bus.async_events.push(event),
            Notification::CmEventsRaised { channel, events } => self.cm_events.push(channel, events),
            Notification::AsyncEventObserved { .. }
            | Notification::RingsOpened { .. }
            | Notification::ReportRequested
            | Notification::FaultRulesAdded { .. }
            | Notification::FlowsAdded { .. }
            | Notification::FaultRulesCleared
            | Notification::PacketsHandedOver { .. }
            | Notification::DeviceChanged(_)
            | Notification::ProcessGone { .. } => {}
        }
    }

    fn on_disconnect(&self) {
        self.orphaned_rings.flush_all();
        self.event_bus.async_events.push(AsyncEvent::DeviceFatal);
        self.event_bus.wake_all();
        // Callers that wait for a connection find out that the device is gone.
        self.cm_events.wake_all();
    }
}

/// An HCA in a daemon.
pub(crate) struct DaemonBackend {
    connection: ControlConnection,
    state: Arc<ClientState>,
    host: HostDevice,
    /// All hosts of the daemon.
    hosts: Vec<HostDevice>,
    gids: Vec<Gid>,
    doorbell: DoorbellProducer,
    /// Set while the engine thread sleeps. Read-only.
    engine_asleep: SleepFlag,
    waker: File,
}

impl DaemonBackend {
    fn new(socket: ControlSocket, opened: OpenedHost) -> Result<DaemonBackend> {
        let system = |what| move |source| Error::System { what, source };
        let OpenedHost { host, gids, doorbell_slots, notifications, descriptors, .. } = opened;
        let descriptors = <[OwnedFd; 3]>::try_from(descriptors).map_err(|_| missing_descriptors())?;
        let [waker, asleep, page] = descriptors;
        let rings = DoorbellProducer::words(doorbell_slots);
        let page = SharedMemory::adopt(page, rings * 8, MapMode::ReadWrite);
        let page = Arc::new(page.map_err(system("mapping the doorbells"))?);
        let asleep = SharedMemory::adopt(asleep, 8, MapMode::ReadOnly);
        let asleep = Arc::new(asleep.map_err(system("mapping the state of the engine thread"))?);
        let state = Arc::new(ClientState::default());
        let hosts = socket.welcome.hosts.clone();
        Ok(DaemonBackend {
            connection: socket.start_notification_thread(notifications.into(), state.clone())?,
            state,
            host,
            hosts,
            gids,
            doorbell: DoorbellProducer::new(page.words(0, rings), doorbell_slots),
            engine_asleep: SleepFlag::new(asleep.words(0, SleepFlag::WORDS)),
            waker: File::from(waker),
        })
    }

    fn call(&self, request: &Request) -> Result<Response> {
        self.connection.call(request, &[]).map(|(response, _)| response)
    }

    fn call_done(&self, request: &Request) -> Result<()> {
        match self.call(request)? {
            Response::Done => Ok(()),
            other => Err(unexpected_reply(&other)),
        }
    }

    /// Has the daemon execute a control verb. Returns the descriptors that accompany the reply.
    fn request(
        &self,
        command: &Command,
        backing: Option<RegionBacking>,
        passed: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>)> {
        let call_site = command.call().and_then(|_| crate::fault::call_site());
        let request = Request::Execute { command: command.clone(), backing, call_site };
        let (response, descriptors) = self.connection.call(&request, passed)?;
        Ok((expect_response!(response, Executed)?, descriptors))
    }

    /// Executes a verb that registers `block`. The daemon maps the memory, or accesses it in this process.
    fn register(&self, command: &Command, block: &MemoryBlock) -> Result<Reply> {
        let memory = block.mapping().and_then(|owner| owner.clone().downcast::<SharedMemory>().ok());
        if let Some(descriptor) = memory.and_then(|memory| memory.take_descriptor()) {
            let backing = Some(RegionBacking::MemoryFile);
            return Ok(self.request(command, backing, &[descriptor.as_fd()])?.0);
        }
        let backing = Some(RegionBacking::ProcessMemory { address: block.address() });
        Ok(self.request(command, backing, &[])?.0)
    }

    fn adopt_rings(&self, descriptors: Vec<OwnedFd>, words: usize) -> Result<SharedWords> {
        let Some(descriptor) = descriptors.into_iter().next() else {
            return Err(Error::DeviceGone { why: "it did not pass the memory of the rings".into() });
        };
        let memory = SharedMemory::adopt(descriptor, words * 8, MapMode::ReadWrite)
            .map_err(|source| Error::System { what: "mapping the rings", source })?;
        Ok(Arc::new(memory).words(0, words))
    }

    /// Remembers the rings of a new queue for the case that the daemon dies.
    fn track_rings(&self, command: &Command, reply: &Reply, rings: &SharedWords) {
        let orphaned = &self.state.orphaned_rings;
        match (command, reply) {
            (Command::CreateCompletionQueue { cqe }, Reply::CompletionQueue(cq)) => {
                orphaned.add_completion_queue(*cq, rings.clone(), *cqe);
            }
            (Command::ResizeCompletionQueue { cq, cqe }, _) => {
                orphaned.add_completion_queue(*cq, rings.clone(), *cqe);
            }
            (Command::CreateQueuePair { init, capabilities }, Reply::QueuePair(qpn)) => {
                let (init, capabilities) = (*init, *capabilities);
                orphaned.add_queue_pair(*qpn, QueuePairRings { init, capabilities, words: rings.clone() });
            }
            _ => {}
        }
    }
}

impl Runtime for DaemonBackend {
    fn is_alive(&self) -> bool {
        !self.state.orphaned_rings.is_daemon_gone()
    }

    fn check_process(&self) -> Result<()> {
        self.connection.check_process()
    }

    fn device_name(&self) -> &str {
        &self.host.device_name
    }

    fn profile(&self) -> &'static Profile {
        Profile::from_name(&self.host.profile).unwrap_or(Profile::SOFTHCA)
    }

    fn limits(&self) -> DeviceLimits {
        self.host.limits
    }

    fn active_mtu(&self) -> Mtu {
        self.host.active_mtu
    }

    fn resolve_host(&self, name: &str) -> Option<IpAddr> {
        self.hosts.iter().find(|host| host.name == name).map(|host| host.address)
    }

    fn stall(&self, _: Duration) -> Result<()> {
        Err(VerbsError::Unsupported { what: "a stall of a daemon's card" }.into())
    }

    fn add_rule(&self, seed: u64, rule: Rule) {
        let rules = protocol::encode(&vec![(rule, "")]);
        expect_success(self.call_done(&Request::AddFaultRules { host: None, seed, rules }));
    }

    fn add_flow(&self, seed: u64, flow: Flow) {
        let flows = protocol::encode(&vec![flow]);
        expect_success(self.call_done(&Request::AddFlows { host: None, seed, flows }));
    }

    fn rules(&self) -> Vec<(Rule, RuleCounters)> {
        let reply = self.call(&Request::QueryFaultRules { host: None });
        expect_success(reply.and_then(control::decode_rules))
    }

    /// The daemon drives the HCA: a poll only reads memory.
    fn drive(&self) -> bool {
        false
    }

    fn now(&self) -> Instant {
        real_now()
    }

    fn wait(&self, notifier: &Notifier, seen: u64, until: Option<Instant>) -> bool {
        notifier.wait(seen, until.map(|until| until.since(real_now())))
    }

    fn random(&self) -> u64 {
        RandomState::new().hash_one(0)
    }

    fn endpoint_exchange(&self) -> EndpointExchange {
        EndpointExchange::process_wide()
    }
}

fn expect_success<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|error| panic!("fault rules on a daemon's card: {error}"))
}

impl Backend for DaemonBackend {
    fn execute_with(
        &self,
        command: Command,
        memory: Option<&Arc<MemoryBlock>>,
    ) -> Result<(Reply, Option<SharedWords>)> {
        self.check_process()?;
        match &command {
            Command::Cm(command) => {
                let request =
                    |command| self.request(&Command::Cm(command), None, &[]).map(|(reply, _)| reply);
                let reply = self.state.cm_events.execute(command.clone(), self.is_alive(), request)?;
                return Ok((reply, None));
            }
            Command::DestroyCompletionQueue(cq) => {
                self.state.event_bus.completion_queues.lock().remove(cq);
                self.state.orphaned_rings.remove_completion_queue(*cq);
            }
            Command::DestroyQueuePair(qpn) => self.state.orphaned_rings.remove_queue_pair(*qpn),
            _ => {}
        }
        let words = softhca_queue::ring_words(&command)?;
        let (reply, descriptors) = match memory {
            Some(block) => (self.register(&command, block)?, Vec::new()),
            None => self.request(&command, None, &[])?,
        };
        if words == 0 {
            return Ok((reply, None));
        }
        let rings = self.adopt_rings(descriptors, words)?;
        self.track_rings(&command, &reply, &rings);
        Ok((reply, Some(rings)))
    }

    fn set_completion_notifier(&self, cq: CqId, notifier: Arc<Notifier>) {
        self.state.event_bus.completion_queues.lock().insert(cq, notifier);
    }

    fn set_cm_notifier(&self, channel: CmChannelId, notifier: Arc<Notifier>) {
        self.state.cm_events.add_channel(channel, notifier);
    }

    /// Memory that the daemon can map.
    fn allocate_memory(&self, length: usize) -> Result<Arc<MemoryBlock>> {
        let memory = SharedMemory::create("softhca-region", length, MapMode::ReadWrite)
            .map_err(|source| Error::System { what: "creating memory to share with the daemon", source })?;
        Ok(Arc::new(Arc::new(memory).block()))
    }

    fn gids(&self) -> Vec<Gid> {
        self.gids.clone()
    }

    fn counters(&self) -> Counters {
        match self.call(&Request::Counters { host: None }) {
            Ok(Response::Counters(counters)) => counters,
            _ => Counters::default(),
        }
    }

    fn async_events(&self) -> &AsyncEventQueue {
        &self.state.event_bus.async_events
    }

    fn ring_doorbell(&self, qpn: Qpn, send: &SendProducer) {
        send.ring(&self.doorbell, qpn);
        if self.engine_asleep.is_set() {
            let _ = (&self.waker).write(&1u64.to_ne_bytes());
        }
        if self.state.orphaned_rings.is_daemon_gone() {
            self.state.orphaned_rings.flush(qpn);
        }
    }
}
