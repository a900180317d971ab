//! A card in a daemon, shared with other processes: rings in shared memory, control calls over a socket.

mod cm_event_queue;
mod connection;
mod control;
mod orphaned_rings;

pub use control::{DaemonControl, HostAsyncEvent};
pub use softhca_queue::control::{ClientStatus, DaemonStatus, FabricPort, HostDevice, HostStatus};

use crate::async_events::AsyncEventQueue;
use crate::backend::{Backend, NewQueuePair, QpCapabilities, Result};
use crate::memory::{MemoryBlock, RegisteredRange};
use crate::notifier::Notifier;
use crate::time::real_now;
use crate::{Device, EndpointExchange, Error};
use cm_event_queue::CmEventQueue;
use connection::{ControlConnection, ControlSocket, NotificationHandler};
use control::{daemon_name, unexpected_reply};
use orphaned_rings::{OrphanedRings, QueuePairRings};
use parking_lot::Mutex;
use softhca_engine::{
    AddressVector, AhId, AsyncEvent, CmChannelId, Counters, CqId, DeviceLimits, Instant, MemoryWindowType,
    ModifyQp, PdId, PortState, QpInitAttributes, QpSnapshot, QpState, QpType, SrqAttributes, SrqId,
    SrqInitAttributes, XrcdId,
};
use softhca_fabric::{Flow, Rule, RuleCounters};
use softhca_queue::control::{
    self as protocol, HOST_VARIABLE, Notification, RegionBacking, RegionMapping, Request, Response,
    SharedRange,
};
use softhca_queue::{
    AccessFlags, CompletionConsumer, CompletionDoorbell, CompletionProducer, DoorbellProducer, MapMode,
    ReceiveProducer, SendProducer, SharedMemory, SharedWords, cm,
};
use softhca_wire::{Gid, Mtu, Qpn, RemoteKey};
use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Polls in vain after which a caller lets others have its processor: the card needs one too.
const YIELD_AFTER: u32 = 16;
/// Polls in vain after which a caller waits for the card.
const WAIT_AFTER: u32 = 32;
/// The most that a poll waits then.
const MAX_POLL_WAIT: Duration = Duration::from_micros(50);

macro_rules! expect {
    ($reply:expr, $pattern:pat => $value:expr) => {
        match $reply {
            $pattern => Ok($value),
            other => Err(unexpected_reply(&other)),
        }
    };
}

impl Device {
    /// The card of a daemon: of the host in `SOFTHCA_HOST`, or of its first host; of the daemon in
    /// `SOFTHCA_DAEMON`, or the one without a name.
    pub fn daemon() -> Result<Device> {
        Device::daemon_host(None, None)
    }

    /// The card of a host of a daemon, both by name.
    pub fn daemon_host(daemon: Option<&str>, host: Option<&str>) -> Result<Device> {
        let host = host.map(String::from).or_else(|| std::env::var(HOST_VARIABLE).ok());
        let card = DaemonBackend::open(ControlSocket::connect(&daemon_name(daemon))?, host)?;
        let address = card.host.address;
        Ok(Device::from_daemon(card, address))
    }

    /// The devices of a daemon; of the one in `SOFTHCA_DAEMON`, or the default one, if it is given no name.
    pub fn list(daemon: Option<&str>) -> Result<Vec<HostDevice>> {
        Ok(ControlSocket::connect(&daemon_name(daemon))?.welcome.hosts)
    }
}

/// What the thread that reads and the callers share.
#[derive(Default)]
struct ClientState {
    completion_queues: Mutex<BTreeMap<CqId, CqPollState>>,
    async_events: AsyncEventQueue,
    cm_events: CmEventQueue,
    orphaned_rings: OrphanedRings,
}

/// A completion queue, as the one who polls it sees it.
struct CqPollState {
    notifier: Arc<Notifier>,
    /// Polls in vain so far, and what the bell had counted at the last.
    empty_polls: u32,
    last_count: u64,
}

impl NotificationHandler for ClientState {
    fn on_notification(&self, news: Notification) {
        match news {
            Notification::CompletionNotified(cq) => {
                let news = self.completion_queues.lock().get(&cq).map(|queue| queue.notifier.clone());
                if let Some(news) = news {
                    news.notify();
                }
            }
            Notification::AsyncEventRaised(event) => self.async_events.push(event),
            Notification::CmEventsRaised { channel, events } => self.cm_events.push(channel, events),
            Notification::AsyncEventObserved { .. } => {}
        }
    }

    fn on_disconnect(&self) {
        self.orphaned_rings.flush_all();
        self.async_events.push(AsyncEvent::DeviceFatal);
        let queues: Vec<_> =
            self.completion_queues.lock().values().map(|queue| queue.notifier.clone()).collect();
        for news in queues {
            news.notify();
        }
        // Whoever waits for a connection finds out that the device is gone.
        self.cm_events.wake_all();
    }
}

/// A card in a daemon.
pub(crate) struct DaemonBackend {
    connection: ControlConnection,
    state: Arc<ClientState>,
    host: HostDevice,
    /// Every host of the daemon.
    hosts: Vec<HostDevice>,
    gids: Vec<Gid>,
    doorbell: DoorbellProducer,
    completion_doorbell: CompletionDoorbell,
    /// Not zero: the engine thread sleeps. Only to be read.
    engine_asleep: SharedWords,
    waker: File,
    /// The program's own memory that is registered.
    registered_ranges: Mutex<BTreeMap<RemoteKey, RegisteredRange>>,
}

impl DaemonBackend {
    fn open(mut greeted: ControlSocket, host: Option<String>) -> Result<DaemonBackend> {
        let system = |what| move |source| Error::System { what, source };
        // Lets the daemon in where the kernel would not.
        let memory = File::options().read(true).write(true).open("/proc/self/mem").ok();
        let passed: Vec<BorrowedFd<'_>> = memory.iter().map(|memory| memory.as_fd()).collect();
        let (reply, descriptors) = greeted.call(&Request::Open { host }, &passed)?;
        let Response::Opened { host, gids, doorbell_slots: doorbells } = reply else {
            return Err(unexpected_reply(&reply));
        };
        let Ok([waker, asleep, news, page]) = <[OwnedFd; 4]>::try_from(descriptors) else {
            return Err(Error::DeviceGone { why: "it did not pass its descriptors".into() });
        };
        let rings = DoorbellProducer::words(doorbells);
        let page = SharedMemory::adopt(page, (CompletionDoorbell::WORDS + rings) * 8, MapMode::ReadWrite);
        let page = Arc::new(page.map_err(system("mapping the doorbells"))?);
        let asleep = SharedMemory::adopt(asleep, 8, MapMode::ReadOnly);
        let asleep = Arc::new(asleep.map_err(system("mapping the page of the card's state"))?);
        let board = Arc::new(ClientState::default());
        let hosts = greeted.welcome.hosts.clone();
        Ok(DaemonBackend {
            connection: greeted.start_notification_thread(news.into(), board.clone())?,
            state: board,
            host,
            hosts,
            gids,
            doorbell: DoorbellProducer::new(page.words(CompletionDoorbell::WORDS, rings), doorbells),
            completion_doorbell: CompletionDoorbell::new(page.words(0, CompletionDoorbell::WORDS)),
            engine_asleep: asleep.words(0, 1),
            waker: File::from(waker),
            registered_ranges: Mutex::default(),
        })
    }

    pub fn device_name(&self) -> &str {
        &self.host.device_name
    }

    pub fn limits(&self) -> DeviceLimits {
        self.host.limits
    }

    pub fn add_rule(&self, seed: u64, rule: Rule) -> Result<()> {
        let rules = protocol::encode(&vec![(rule, "")]);
        self.call_done(&Request::AddFaultRules { host: None, seed, rules })
    }

    pub fn add_flow(&self, seed: u64, flow: Flow) -> Result<()> {
        self.call_done(&Request::AddFlows { host: None, seed, flows: protocol::encode(&vec![flow]) })
    }

    pub fn rules(&self) -> Result<Vec<(Rule, RuleCounters)>> {
        control::decode_rules(self.call(&Request::QueryFaultRules { host: None })?)
    }

    fn call(&self, call: &Request) -> Result<Response> {
        self.connection.call(call, &[]).map(|(reply, _)| reply)
    }

    fn call_done(&self, call: &Request) -> Result<()> {
        match self.call(call)? {
            Response::Done => Ok(()),
            other => Err(unexpected_reply(&other)),
        }
    }

    /// A call that makes rings: its reply, and `words` of the memory that comes with it.
    fn call_for_memory(&self, call: &Request, words: usize) -> Result<(Response, Arc<SharedMemory>)> {
        let (reply, descriptors) = self.connection.call(call, &[])?;
        let Some(descriptor) = descriptors.into_iter().next() else { return Err(unexpected_reply(&reply)) };
        let memory = SharedMemory::adopt(descriptor, words * 8, MapMode::ReadWrite)
            .map_err(|source| Error::System { what: "mapping the rings", source })?;
        Ok((reply, Arc::new(memory)))
    }

    /// Asks for a region of these bytes: the daemon has them mapped, or reaches for them in this process. The
    /// program's own are registered for as long as their tenure.
    fn register_block(
        &self,
        block: &MemoryBlock,
        call: impl Fn(RegionBacking) -> Request,
    ) -> Result<(RemoteKey, u64, Option<RegisteredRange>)> {
        let ask = |place, passed: &[BorrowedFd<'_>]| {
            let (reply, _) = self.connection.call(&call(place), passed)?;
            expect!(reply, Response::MemoryRegion { rkey, iova } => (rkey, iova))
        };
        let memory = block.mapping().and_then(|owner| owner.clone().downcast::<SharedMemory>().ok());
        if let Some(descriptor) = memory.and_then(|memory| memory.take_descriptor()) {
            let (key, base) = ask(RegionBacking::MemoryFile, &[descriptor.as_fd()])?;
            return Ok((key, base, None));
        }
        let address = block.address();
        let mut tenure = RegisteredRange::register(address as usize, block.len());
        if let Some((part, file)) = tenure.shared() {
            let shared = Some(SharedRange { offset: part.start, length: part.end - part.start });
            if let Ok((key, base)) = ask(RegionBacking::ProcessMemory { address, shared }, &[file]) {
                return Ok((key, base, Some(tenure)));
            }
            // It may have no room for another mapping.
            tenure.unshare();
        }
        let (key, base) = ask(RegionBacking::ProcessMemory { address, shared: None }, &[])?;
        Ok((key, base, Some(tenure)))
    }

    fn keep_range(&self, key: RemoteKey, tenure: Option<RegisteredRange>) {
        if let Some(tenure) = tenure {
            self.registered_ranges.lock().insert(key, tenure);
        }
    }
}

impl Backend for DaemonBackend {
    fn is_alive(&self) -> bool {
        !self.state.orphaned_rings.is_daemon_gone()
    }

    fn check_process(&self) -> Result<()> {
        self.connection.check_process()
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

    fn allocate_protection_domain(&self) -> Result<PdId> {
        expect!(self.call(&Request::AllocateProtectionDomain)?, Response::ProtectionDomain(domain) => domain)
    }

    fn free_protection_domain(&self, domain: PdId) -> Result<()> {
        self.call_done(&Request::DeallocateProtectionDomain(domain))
    }

    fn allocate_memory(&self, length: usize) -> Result<Arc<MemoryBlock>> {
        let memory = SharedMemory::create("softhca-region", length, MapMode::ReadWrite)
            .map_err(|source| Error::System { what: "making memory to share with the daemon", source })?;
        Ok(Arc::new(Arc::new(memory).block()))
    }

    fn register_memory(
        &self,
        domain: PdId,
        base: Option<u64>,
        length: u64,
        block: Arc<MemoryBlock>,
        access: AccessFlags,
    ) -> Result<(RemoteKey, u64)> {
        self.check_process()?;
        let call = |place| Request::RegisterMemoryRegion {
            pd: domain,
            mapping: RegionMapping { iova: base, length, backing: place },
            access,
        };
        let (key, base, tenure) = self.register_block(&block, call)?;
        self.keep_range(key, tenure);
        Ok((key, base))
    }

    fn reregister_memory(
        &self,
        key: RemoteKey,
        domain: Option<PdId>,
        translation: Option<(u64, Arc<MemoryBlock>)>,
        access: Option<AccessFlags>,
    ) -> Result<RemoteKey> {
        let Some((base, block)) = translation else {
            let call = Request::ReregisterMemoryRegion { rkey: key, pd: domain, mapping: None, access };
            return expect!(self.call(&call)?, Response::MemoryRegion { rkey, .. } => rkey);
        };
        let call = |place| {
            let translation =
                Some(RegionMapping { iova: Some(base), length: block.len() as u64, backing: place });
            Request::ReregisterMemoryRegion { rkey: key, pd: domain, mapping: translation, access }
        };
        let (new, _, tenure) = self.register_block(&block, call)?;
        let before = self.registered_ranges.lock().remove(&key);
        self.keep_range(new, tenure);
        drop(before);
        Ok(new)
    }

    fn deregister_memory(&self, key: RemoteKey) -> Result<()> {
        let result = self.call_done(&Request::DeregisterMemoryRegion(key));
        // A card that is gone has let go of everything.
        if result.as_ref().err().is_none_or(Error::is_device_gone) {
            let ended = self.registered_ranges.lock().remove(&key);
            drop(ended);
        }
        result
    }

    fn allocate_memory_window(&self, domain: PdId, kind: MemoryWindowType) -> Result<RemoteKey> {
        expect!(self.call(&Request::AllocateMemoryWindow { pd: domain, mw_type: kind })?, Response::MemoryWindow(key) => key)
    }

    fn free_memory_window(&self, key: RemoteKey) -> Result<()> {
        self.call_done(&Request::DeallocateMemoryWindow(key))
    }

    fn create_completion_queue(&self, slots: u32, news: Arc<Notifier>) -> Result<(CqId, CompletionConsumer)> {
        let words = CompletionProducer::layout(slots).words();
        let (reply, memory) = self.call_for_memory(&Request::CreateCompletionQueue { cqe: slots }, words)?;
        let cq = expect!(reply, Response::CompletionQueue(cq) => cq)?;
        let ring = memory.words(0, words);
        self.state
            .completion_queues
            .lock()
            .insert(cq, CqPollState { notifier: news, empty_polls: 0, last_count: 0 });
        self.state.orphaned_rings.add_completion_queue(cq, ring.clone(), slots);
        Ok((cq, CompletionConsumer::new(ring, slots)))
    }

    fn resize_completion_queue(&self, cq: CqId, slots: u32) -> Result<CompletionConsumer> {
        let words = CompletionProducer::layout(slots).words();
        let (_, memory) = self.call_for_memory(&Request::ResizeCompletionQueue { cq, cqe: slots }, words)?;
        let ring = memory.words(0, words);
        self.state.orphaned_rings.add_completion_queue(cq, ring.clone(), slots);
        Ok(CompletionConsumer::new(ring, slots))
    }

    fn destroy_completion_queue(&self, cq: CqId) -> Result<()> {
        self.check_process()?;
        self.state.completion_queues.lock().remove(&cq);
        self.state.orphaned_rings.remove_completion_queue(cq);
        self.call_done(&Request::DestroyCompletionQueue(cq))
    }

    fn create_shared_receive_queue(
        &self,
        init: SrqInitAttributes,
        slots: u32,
        entries: usize,
    ) -> Result<(SrqId, ReceiveProducer)> {
        let words = ReceiveProducer::layout(slots, entries).words();
        let call = Request::CreateSharedReceiveQueue { init, max_wr: slots, max_sge: entries as u32 };
        let (reply, memory) = self.call_for_memory(&call, words)?;
        let srq = expect!(reply, Response::SharedReceiveQueue(srq) => srq)?;
        Ok((srq, ReceiveProducer::new(memory.words(0, words), slots, entries)))
    }

    fn set_srq_limit(&self, srq: SrqId, limit: u32) -> Result<()> {
        self.call_done(&Request::ModifySharedReceiveQueue { srq, srq_limit: limit })
    }

    fn query_shared_receive_queue(&self, srq: SrqId) -> Result<SrqAttributes> {
        let reply = self.call(&Request::QuerySharedReceiveQueue(srq))?;
        expect!(reply, Response::SrqAttributes(view) => view)
    }

    fn destroy_shared_receive_queue(&self, srq: SrqId) -> Result<()> {
        self.call_done(&Request::DestroySharedReceiveQueue(srq))
    }

    fn open_xrc_domain(&self) -> Result<XrcdId> {
        expect!(self.call(&Request::OpenXrcDomain)?, Response::XrcDomain(domain) => domain)
    }

    fn close_xrc_domain(&self, domain: XrcdId) -> Result<()> {
        self.call_done(&Request::CloseXrcDomain(domain))
    }

    fn create_address_handle(&self, domain: PdId, vector: AddressVector) -> Result<AhId> {
        let call = Request::CreateAddressHandle { pd: domain, address_vector: vector };
        expect!(self.call(&call)?, Response::AddressHandle(handle) => handle)
    }

    fn destroy_address_handle(&self, handle: AhId) -> Result<()> {
        self.call_done(&Request::DestroyAddressHandle(handle))
    }

    fn create_queue_pair(&self, init: QpInitAttributes, sizes: QpCapabilities) -> Result<NewQueuePair> {
        let QpCapabilities {
            max_send_wr: sends,
            max_recv_wr: receives,
            max_sge: entries,
            max_inline_data: inline,
        } = sizes;
        let has_sends = init.qp_type != QpType::XrcTarget;
        let has_receives =
            !matches!(init.qp_type, QpType::XrcInitiator | QpType::XrcTarget) && init.srq.is_none();
        let send_words = if has_sends { SendProducer::layout(sends, entries, inline).words() } else { 0 };
        let receive_words = if has_receives { ReceiveProducer::layout(receives, entries).words() } else { 0 };
        let sizes = protocol::QpCapabilities {
            max_send_wr: sends,
            max_recv_wr: receives,
            max_sge: entries as u32,
            max_inline_data: inline as u32,
        };
        let call = Request::CreateQueuePair { init, capabilities: sizes };
        let (reply, memory) = self.call_for_memory(&call, send_words + receive_words)?;
        let number = expect!(reply, Response::QueuePair(number) => number)?;
        let (send, receive) = (memory.words(0, send_words), memory.words(send_words, receive_words));
        self.state.orphaned_rings.add_queue_pair(
            number,
            QueuePairRings {
                capabilities: sizes,
                send_queue: has_sends.then(|| send.clone()),
                recv_queue: has_receives.then(|| receive.clone()),
                send_cq: init.send_cq,
                recv_cq: init.recv_cq,
            },
        );
        Ok(NewQueuePair {
            qpn: number,
            send_queue: has_sends.then(|| SendProducer::new(send, sends, entries, inline)),
            recv_queue: has_receives.then(|| ReceiveProducer::new(receive, receives, entries)),
        })
    }

    fn modify_queue_pair(&self, number: Qpn, modify: &ModifyQp) -> Result<QpState> {
        let call = Request::ModifyQueuePair { qpn: number, modify: *modify };
        expect!(self.call(&call)?, Response::QpState(state) => state)
    }

    fn query_queue_pair(&self, number: Qpn) -> Result<QpSnapshot> {
        expect!(self.call(&Request::QueryQueuePair(number))?, Response::QpSnapshot(view) => view)
    }

    fn destroy_queue_pair(&self, number: Qpn) -> Result<()> {
        self.check_process()?;
        self.state.orphaned_rings.remove_queue_pair(number);
        self.call_done(&Request::DestroyQueuePair(number))
    }

    fn attach_multicast(&self, number: Qpn, group: Gid) -> Result<()> {
        self.call_done(&Request::AttachMulticast { qpn: number, group })
    }

    fn detach_multicast(&self, number: Qpn, group: Gid) -> Result<()> {
        self.call_done(&Request::DetachMulticast { qpn: number, group })
    }

    fn create_cm_channel(&self, news: Arc<Notifier>) -> Result<CmChannelId> {
        let reply = self.call(&Request::Cm(cm::Command::CreateEventChannel))?;
        let channel = expect!(reply, Response::Cm(cm::Reply::EventChannel(channel)) => channel)?;
        self.state.cm_events.add_channel(channel, news);
        Ok(channel)
    }

    fn destroy_cm_channel(&self, channel: CmChannelId) -> Result<()> {
        self.check_process()?;
        for request in self.state.cm_events.remove_channel(channel) {
            let _ = self.cm(cm::Command::DestroyId(request));
        }
        self.cm(cm::Command::DestroyEventChannel(channel)).map(|_| ())
    }

    fn cm(&self, call: cm::Command) -> Result<cm::Reply> {
        self.check_process()?;
        let mut orphans = Vec::new();
        match &call {
            // Events are here already.
            cm::Command::GetEvent(channel) => {
                let (event, left) = self.state.cm_events.pop(*channel);
                if event.is_none() && !self.is_alive() {
                    return Err(Error::DeviceGone { why: "it closed the connection".into() });
                }
                return Ok(cm::Reply::Event(event, left));
            }
            cm::Command::MigrateId { id, channel } => self.state.cm_events.migrate_id(*id, *channel),
            cm::Command::DestroyId(id) => orphans = self.state.cm_events.remove_id(*id),
            _ => {}
        }
        let reply = self.call(&Request::Cm(call));
        // Requests that nobody took have nobody to answer them.
        for orphan in orphans {
            let _ = self.call(&Request::Cm(cm::Command::DestroyId(orphan)));
        }
        expect!(reply?, Response::Cm(reply) => reply)
    }

    fn advance_queue_pair(&self, advance: &cm::QpTransition) -> Result<()> {
        expect!(self.call(&Request::TransitionQueuePair(advance.clone()))?, Response::Cm(_) => ())
    }

    fn active_mtu(&self) -> Mtu {
        self.host.active_mtu
    }

    fn port_state(&self) -> PortState {
        match self.call(&Request::QueryPort) {
            Ok(Response::PortState(state)) => state,
            _ => PortState::Down,
        }
    }

    fn resolve_host(&self, name: &str) -> Option<IpAddr> {
        self.hosts.iter().find(|host| host.name == name).map(|host| host.address)
    }

    fn async_events(&self) -> &AsyncEventQueue {
        &self.state.async_events
    }

    fn ring_doorbell(&self, number: Qpn, send: &SendProducer) {
        send.ring(&self.doorbell, number);
        if self.engine_asleep[0].load(Ordering::SeqCst) != 0 {
            let _ = (&self.waker).write(&1u64.to_ne_bytes());
        }
        if self.state.orphaned_rings.is_daemon_gone() {
            self.state.orphaned_rings.flush(number);
        }
    }

    /// The card drives itself: a caller in vain stands back, so that it gets a processor to do so.
    fn drive(&self, queue: CqId) {
        let count = self.completion_doorbell.count();
        let (seen, empty) = {
            let mut queues = self.state.completion_queues.lock();
            let Some(queue) = queues.get_mut(&queue) else { return };
            queue.empty_polls =
                if queue.last_count == count { queue.empty_polls.saturating_add(1) } else { 0 };
            let seen = std::mem::replace(&mut queue.last_count, count);
            (seen, queue.empty_polls)
        };
        if seen != count || empty < YIELD_AFTER || self.state.orphaned_rings.is_daemon_gone() {
            std::hint::spin_loop();
        } else if empty < WAIT_AFTER {
            std::thread::yield_now();
        } else {
            self.completion_doorbell.wait(count, MAX_POLL_WAIT);
        }
    }

    fn now(&self) -> Instant {
        real_now()
    }

    fn wait(&self, news: &Notifier, seen: u64, until: Option<Instant>) -> bool {
        news.wait(seen, until.map(|until| until.since(real_now())))
    }

    fn random(&self) -> u64 {
        RandomState::new().hash_one(0)
    }

    fn endpoint_exchange(&self) -> EndpointExchange {
        EndpointExchange::process_wide()
    }
}
