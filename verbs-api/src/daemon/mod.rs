//! A card in a daemon, shared with other processes: rings in shared memory, control calls over a socket.

mod connection;
mod control;
mod fatal;
mod inbox;

pub use control::{DaemonControl, SeenEvent};
pub use softhca_queue::control::{ClientStatus, FabricPort, HostCard, HostStatus, Status as DaemonStatus};

use crate::backend::{Backend, NewQueuePair, Result, Sizes};
use crate::events::EventQueue;
use crate::memory::{Block, Tenure};
use crate::notifier::Notifier;
use crate::time::real_now;
use crate::{Device, Error, Rendezvous};
use connection::{Greeted, Line, Listener};
use control::{daemon_name, unexpected};
use fatal::{Ends, Estate};
use inbox::Inbox;
use parking_lot::Mutex;
use softhca_engine::{
    AddressVector, AhId, AsyncEvent, CmChannelId, Counters, CqId, Instant, Limits, Modify, PdId, PortState,
    QpInit, QpKind, QpView, SharedReceiveView, SrqId, SrqInit, State, WindowKind, XrcdId,
};
use softhca_fabric::{Flow, Rule, Tally};
use softhca_queue::control::{self as protocol, Call, HOST_VARIABLE, News, Part, Place, Reply, Translation};
use softhca_queue::{
    Access, Bell, CompletionConsumer, CompletionProducer, DoorbellProducer, ReceiveProducer, Rights,
    SendProducer, SharedMemory, Words, cm,
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
const LONGEST_POLL: Duration = Duration::from_micros(50);

macro_rules! expect {
    ($reply:expr, $pattern:pat => $value:expr) => {
        match $reply {
            $pattern => Ok($value),
            other => Err(unexpected(&other)),
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
        let card = Daemon::open(Greeted::connect(&daemon_name(daemon))?, host)?;
        let address = card.host.address;
        Ok(Device::of_daemon(card, address))
    }

    /// The devices of a daemon; of the one in `SOFTHCA_DAEMON`, or the default one, if it is given no name.
    pub fn list(daemon: Option<&str>) -> Result<Vec<HostCard>> {
        Ok(Greeted::connect(&daemon_name(daemon))?.welcome.hosts)
    }
}

/// What the thread that reads and the callers share.
#[derive(Default)]
struct Board {
    queues: Mutex<BTreeMap<CqId, Watched>>,
    events: EventQueue,
    inbox: Inbox,
    estate: Estate,
}

/// A completion queue, as the one who polls it sees it.
struct Watched {
    news: Arc<Notifier>,
    /// Polls in vain so far, and what the bell had counted at the last.
    empty: u32,
    seen: u64,
}

impl Listener for Board {
    fn news(&self, news: News) {
        match news {
            News::Notified(cq) => {
                let news = self.queues.lock().get(&cq).map(|queue| queue.news.clone());
                if let Some(news) = news {
                    news.notify();
                }
            }
            News::Raised(event) => self.events.push(event),
            News::CmRaised { channel, events } => self.inbox.put(channel, events),
            News::Seen { .. } => {}
        }
    }

    fn gone(&self) {
        self.estate.wind_up();
        self.events.push(AsyncEvent::DeviceFatal);
        let queues: Vec<_> = self.queues.lock().values().map(|queue| queue.news.clone()).collect();
        for news in queues {
            news.notify();
        }
        // Whoever waits for a connection finds out that the device is gone.
        self.inbox.wake_all();
    }
}

/// A card in a daemon.
pub(crate) struct Daemon {
    line: Line,
    board: Arc<Board>,
    host: HostCard,
    /// Every host of the daemon.
    hosts: Vec<HostCard>,
    gids: Vec<Gid>,
    doorbell: DoorbellProducer,
    bell: Bell,
    /// Not zero: the engine thread sleeps. Only to be read.
    asleep: Words,
    waker: File,
    /// The program's own memory that is registered.
    tenures: Mutex<BTreeMap<RemoteKey, Tenure>>,
}

impl Daemon {
    fn open(mut greeted: Greeted, host: Option<String>) -> Result<Daemon> {
        let system = |what| move |source| Error::System { what, source };
        // Lets the daemon in where the kernel would not.
        let memory = File::options().read(true).write(true).open("/proc/self/mem").ok();
        let passed: Vec<BorrowedFd<'_>> = memory.iter().map(|memory| memory.as_fd()).collect();
        let (reply, descriptors) = greeted.ask(&Call::Open { host }, &passed)?;
        let Reply::Opened { host, gids, doorbells } = reply else { return Err(unexpected(&reply)) };
        let Ok([waker, asleep, news, page]) = <[OwnedFd; 4]>::try_from(descriptors) else {
            return Err(Error::DeviceGone { why: "it did not pass its descriptors".into() });
        };
        let rings = DoorbellProducer::words(doorbells);
        let page = SharedMemory::adopt(page, (Bell::WORDS + rings) * 8, Rights::ReadWrite);
        let page = Arc::new(page.map_err(system("mapping the doorbells"))?);
        let asleep = SharedMemory::adopt(asleep, 8, Rights::Read);
        let asleep = Arc::new(asleep.map_err(system("mapping the page of the card's state"))?);
        let board = Arc::new(Board::default());
        let hosts = greeted.welcome.hosts.clone();
        Ok(Daemon {
            line: greeted.listen(news.into(), board.clone())?,
            board,
            host,
            hosts,
            gids,
            doorbell: DoorbellProducer::new(page.words(Bell::WORDS, rings), doorbells),
            bell: Bell::new(page.words(0, Bell::WORDS)),
            asleep: asleep.words(0, 1),
            waker: File::from(waker),
            tenures: Mutex::default(),
        })
    }

    pub fn device_name(&self) -> &str {
        &self.host.device
    }

    pub fn limits(&self) -> Limits {
        self.host.limits
    }

    pub fn add_rule(&self, seed: u64, rule: Rule) -> Result<()> {
        let rules = protocol::encode(&vec![(rule, "")]);
        self.done(&Call::AddRules { host: None, seed, rules })
    }

    pub fn add_flow(&self, seed: u64, flow: Flow) -> Result<()> {
        self.done(&Call::AddFlows { host: None, seed, flows: protocol::encode(&vec![flow]) })
    }

    pub fn rules(&self) -> Result<Vec<(Rule, Tally)>> {
        control::read_rules(self.call(&Call::Rules { host: None })?)
    }

    fn call(&self, call: &Call) -> Result<Reply> {
        self.line.call(call, &[]).map(|(reply, _)| reply)
    }

    fn done(&self, call: &Call) -> Result<()> {
        match self.call(call)? {
            Reply::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// A call that makes rings: its reply, and `words` of the memory that comes with it.
    fn make(&self, call: &Call, words: usize) -> Result<(Reply, Arc<SharedMemory>)> {
        let (reply, descriptors) = self.line.call(call, &[])?;
        let Some(descriptor) = descriptors.into_iter().next() else { return Err(unexpected(&reply)) };
        let memory = SharedMemory::adopt(descriptor, words * 8, Rights::ReadWrite)
            .map_err(|source| Error::System { what: "mapping the rings", source })?;
        Ok((reply, Arc::new(memory)))
    }

    /// Asks for a region of these bytes: the daemon has them mapped, or reaches for them in this process. The
    /// program's own are registered for as long as their tenure.
    fn place(&self, block: &Block, call: impl Fn(Place) -> Call) -> Result<(RemoteKey, u64, Option<Tenure>)> {
        let ask = |place, passed: &[BorrowedFd<'_>]| {
            let (reply, _) = self.line.call(&call(place), passed)?;
            expect!(reply, Reply::Region { key, base } => (key, base))
        };
        let memory = block.owner().and_then(|owner| owner.clone().downcast::<SharedMemory>().ok());
        if let Some(descriptor) = memory.and_then(|memory| memory.take_descriptor()) {
            let (key, base) = ask(Place::Shared, &[descriptor.as_fd()])?;
            return Ok((key, base, None));
        }
        let address = block.address();
        let mut tenure = Tenure::begin(address as usize, block.len());
        if let Some((part, file)) = tenure.shared() {
            let shared = Some(Part { offset: part.start, length: part.end - part.start });
            if let Ok((key, base)) = ask(Place::Process { address, shared }, &[file]) {
                return Ok((key, base, Some(tenure)));
            }
            // It may have no room for another mapping.
            tenure.unshare();
        }
        let (key, base) = ask(Place::Process { address, shared: None }, &[])?;
        Ok((key, base, Some(tenure)))
    }

    fn keep(&self, key: RemoteKey, tenure: Option<Tenure>) {
        if let Some(tenure) = tenure {
            self.tenures.lock().insert(key, tenure);
        }
    }
}

impl Backend for Daemon {
    fn is_alive(&self) -> bool {
        !self.board.estate.is_ours()
    }

    fn check_process(&self) -> Result<()> {
        self.line.check_process()
    }

    fn gids(&self) -> Vec<Gid> {
        self.gids.clone()
    }

    fn counters(&self) -> Counters {
        match self.call(&Call::Counters { host: None }) {
            Ok(Reply::Counters(counters)) => counters,
            _ => Counters::default(),
        }
    }

    fn allocate_domain(&self) -> Result<PdId> {
        expect!(self.call(&Call::AllocateDomain)?, Reply::Domain(domain) => domain)
    }

    fn free_domain(&self, domain: PdId) -> Result<()> {
        self.done(&Call::FreeDomain(domain))
    }

    fn allocate(&self, length: usize) -> Result<Arc<Block>> {
        let memory = SharedMemory::create("softhca-region", length, Rights::ReadWrite)
            .map_err(|source| Error::System { what: "making memory to share with the daemon", source })?;
        Ok(Arc::new(Arc::new(memory).block()))
    }

    fn register(
        &self,
        domain: PdId,
        base: Option<u64>,
        length: u64,
        block: Arc<Block>,
        access: Access,
    ) -> Result<(RemoteKey, u64)> {
        self.check_process()?;
        let call =
            |place| Call::Register { domain, translation: Translation { base, length, place }, access };
        let (key, base, tenure) = self.place(&block, call)?;
        self.keep(key, tenure);
        Ok((key, base))
    }

    fn reregister(
        &self,
        key: RemoteKey,
        domain: Option<PdId>,
        translation: Option<(u64, Arc<Block>)>,
        access: Option<Access>,
    ) -> Result<RemoteKey> {
        let Some((base, block)) = translation else {
            let call = Call::Reregister { key, domain, translation: None, access };
            return expect!(self.call(&call)?, Reply::Region { key, .. } => key);
        };
        let call = |place| {
            let translation = Some(Translation { base: Some(base), length: block.len() as u64, place });
            Call::Reregister { key, domain, translation, access }
        };
        let (new, _, tenure) = self.place(&block, call)?;
        let before = self.tenures.lock().remove(&key);
        self.keep(new, tenure);
        drop(before);
        Ok(new)
    }

    fn deregister(&self, key: RemoteKey) -> Result<()> {
        let result = self.done(&Call::Deregister(key));
        // A card that is gone has let go of everything.
        if result.as_ref().err().is_none_or(Error::is_gone) {
            let ended = self.tenures.lock().remove(&key);
            drop(ended);
        }
        result
    }

    fn allocate_window(&self, domain: PdId, kind: WindowKind) -> Result<RemoteKey> {
        expect!(self.call(&Call::AllocateWindow { domain, kind })?, Reply::Window(key) => key)
    }

    fn free_window(&self, key: RemoteKey) -> Result<()> {
        self.done(&Call::FreeWindow(key))
    }

    fn create_completion_queue(&self, slots: u32, news: Arc<Notifier>) -> Result<(CqId, CompletionConsumer)> {
        let words = CompletionProducer::shape(slots).words();
        let (reply, memory) = self.make(&Call::CreateCompletionQueue { slots }, words)?;
        let cq = expect!(reply, Reply::CompletionQueue(cq) => cq)?;
        let ring = memory.words(0, words);
        self.board.queues.lock().insert(cq, Watched { news, empty: 0, seen: 0 });
        self.board.estate.add_queue(cq, ring.clone(), slots);
        Ok((cq, CompletionConsumer::new(ring, slots)))
    }

    fn resize_completion_queue(&self, cq: CqId, slots: u32) -> Result<CompletionConsumer> {
        let words = CompletionProducer::shape(slots).words();
        let (_, memory) = self.make(&Call::ResizeCompletionQueue { cq, slots }, words)?;
        let ring = memory.words(0, words);
        self.board.estate.add_queue(cq, ring.clone(), slots);
        Ok(CompletionConsumer::new(ring, slots))
    }

    fn destroy_completion_queue(&self, cq: CqId) -> Result<()> {
        self.check_process()?;
        self.board.queues.lock().remove(&cq);
        self.board.estate.remove_queue(cq);
        self.done(&Call::DestroyCompletionQueue(cq))
    }

    fn create_shared_receive_queue(
        &self,
        init: SrqInit,
        slots: u32,
        entries: usize,
    ) -> Result<(SrqId, ReceiveProducer)> {
        let words = ReceiveProducer::shape(slots, entries).words();
        let call = Call::CreateSharedReceiveQueue { init, slots, entries: entries as u32 };
        let (reply, memory) = self.make(&call, words)?;
        let srq = expect!(reply, Reply::SharedReceiveQueue(srq) => srq)?;
        Ok((srq, ReceiveProducer::new(memory.words(0, words), slots, entries)))
    }

    fn arm_shared_receive_queue(&self, srq: SrqId, limit: u32) -> Result<()> {
        self.done(&Call::ArmSharedReceiveQueue { srq, limit })
    }

    fn query_shared_receive_queue(&self, srq: SrqId) -> Result<SharedReceiveView> {
        let reply = self.call(&Call::QuerySharedReceiveQueue(srq))?;
        expect!(reply, Reply::SharedReceiveView(view) => view)
    }

    fn destroy_shared_receive_queue(&self, srq: SrqId) -> Result<()> {
        self.done(&Call::DestroySharedReceiveQueue(srq))
    }

    fn open_xrc_domain(&self) -> Result<XrcdId> {
        expect!(self.call(&Call::OpenXrcDomain)?, Reply::XrcDomain(domain) => domain)
    }

    fn close_xrc_domain(&self, domain: XrcdId) -> Result<()> {
        self.done(&Call::CloseXrcDomain(domain))
    }

    fn create_address_handle(&self, domain: PdId, vector: AddressVector) -> Result<AhId> {
        let call = Call::CreateAddressHandle { domain, vector };
        expect!(self.call(&call)?, Reply::AddressHandle(handle) => handle)
    }

    fn destroy_address_handle(&self, handle: AhId) -> Result<()> {
        self.done(&Call::DestroyAddressHandle(handle))
    }

    fn create_queue_pair(&self, init: QpInit, sizes: Sizes) -> Result<NewQueuePair> {
        let Sizes { sends, receives, entries, inline } = sizes;
        let has_sends = init.kind != QpKind::XrcTarget;
        let has_receives = !matches!(init.kind, QpKind::XrcInitiator | QpKind::XrcTarget)
            && init.shared_receive_queue.is_none();
        let send_words = if has_sends { SendProducer::shape(sends, entries, inline).words() } else { 0 };
        let receive_words = if has_receives { ReceiveProducer::shape(receives, entries).words() } else { 0 };
        let sizes = protocol::Sizes { sends, receives, entries: entries as u32, inline: inline as u32 };
        let call = Call::CreateQueuePair { init, sizes };
        let (reply, memory) = self.make(&call, send_words + receive_words)?;
        let number = expect!(reply, Reply::QueuePair(number) => number)?;
        let (send, receive) = (memory.words(0, send_words), memory.words(send_words, receive_words));
        self.board.estate.add_queue_pair(
            number,
            Ends {
                sizes,
                send: has_sends.then(|| send.clone()),
                receive: has_receives.then(|| receive.clone()),
                send_cq: init.send_cq,
                receive_cq: init.receive_cq,
            },
        );
        Ok(NewQueuePair {
            number,
            send: has_sends.then(|| SendProducer::new(send, sends, entries, inline)),
            receive: has_receives.then(|| ReceiveProducer::new(receive, receives, entries)),
        })
    }

    fn modify_queue_pair(&self, number: Qpn, modify: &Modify) -> Result<State> {
        let call = Call::ModifyQueuePair { number, modify: *modify };
        expect!(self.call(&call)?, Reply::State(state) => state)
    }

    fn query_queue_pair(&self, number: Qpn) -> Result<QpView> {
        expect!(self.call(&Call::QueryQueuePair(number))?, Reply::View(view) => view)
    }

    fn destroy_queue_pair(&self, number: Qpn) -> Result<()> {
        self.check_process()?;
        self.board.estate.remove_queue_pair(number);
        self.done(&Call::DestroyQueuePair(number))
    }

    fn attach_multicast(&self, number: Qpn, group: Gid) -> Result<()> {
        self.done(&Call::AttachMulticast { number, group })
    }

    fn detach_multicast(&self, number: Qpn, group: Gid) -> Result<()> {
        self.done(&Call::DetachMulticast { number, group })
    }

    fn create_cm_channel(&self, news: Arc<Notifier>) -> Result<CmChannelId> {
        let reply = self.call(&Call::Cm(cm::Call::CreateChannel))?;
        let channel = expect!(reply, Reply::Cm(cm::Reply::Channel(channel)) => channel)?;
        self.board.inbox.add_channel(channel, news);
        Ok(channel)
    }

    fn destroy_cm_channel(&self, channel: CmChannelId) -> Result<()> {
        self.check_process()?;
        for request in self.board.inbox.remove_channel(channel) {
            let _ = self.cm(cm::Call::Destroy(request));
        }
        self.cm(cm::Call::DestroyChannel(channel)).map(|_| ())
    }

    fn cm(&self, call: cm::Call) -> Result<cm::Reply> {
        self.check_process()?;
        let mut orphans = Vec::new();
        match &call {
            // Events are here already.
            cm::Call::Take(channel) => {
                let (event, left) = self.board.inbox.take(*channel);
                if event.is_none() && !self.is_alive() {
                    return Err(Error::DeviceGone { why: "it closed the connection".into() });
                }
                return Ok(cm::Reply::Event(event, left));
            }
            cm::Call::Migrate { id, channel } => self.board.inbox.move_to(*id, *channel),
            cm::Call::Destroy(id) => orphans = self.board.inbox.forget(*id),
            _ => {}
        }
        let reply = self.call(&Call::Cm(call));
        // Requests that nobody took have nobody to answer them.
        for orphan in orphans {
            let _ = self.call(&Call::Cm(cm::Call::Destroy(orphan)));
        }
        expect!(reply?, Reply::Cm(reply) => reply)
    }

    fn advance_queue_pair(&self, advance: &cm::Advance) -> Result<()> {
        expect!(self.call(&Call::AdvanceQueuePair(advance.clone()))?, Reply::Cm(_) => ())
    }

    fn active_mtu(&self) -> Mtu {
        self.host.active_mtu
    }

    fn port_state(&self) -> PortState {
        match self.call(&Call::QueryPort) {
            Ok(Reply::Port(state)) => state,
            _ => PortState::Down,
        }
    }

    fn host_named(&self, name: &str) -> Option<IpAddr> {
        self.hosts.iter().find(|host| host.name == name).map(|host| host.address)
    }

    fn events(&self) -> &EventQueue {
        &self.board.events
    }

    fn ring(&self, number: Qpn, send: &SendProducer) {
        send.ring(&self.doorbell, number);
        if self.asleep[0].load(Ordering::SeqCst) != 0 {
            let _ = (&self.waker).write(&1u64.to_ne_bytes());
        }
        if self.board.estate.is_ours() {
            self.board.estate.flush(number);
        }
    }

    /// The card drives itself: a caller in vain stands back, so that it gets a processor to do so.
    fn drive(&self, queue: CqId) {
        let count = self.bell.count();
        let (seen, empty) = {
            let mut queues = self.board.queues.lock();
            let Some(queue) = queues.get_mut(&queue) else { return };
            queue.empty = if queue.seen == count { queue.empty.saturating_add(1) } else { 0 };
            let seen = std::mem::replace(&mut queue.seen, count);
            (seen, queue.empty)
        };
        if seen != count || empty < YIELD_AFTER || self.board.estate.is_ours() {
            std::hint::spin_loop();
        } else if empty < WAIT_AFTER {
            std::thread::yield_now();
        } else {
            self.bell.wait(count, LONGEST_POLL);
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

    fn rendezvous(&self) -> Rendezvous {
        Rendezvous::of_process()
    }
}
