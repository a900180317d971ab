//! A card in this process: callers drive it when they poll, a thread of its own when nobody does.

use crate::Error;
use crate::backend::{Backend, NewQueuePair, Result, Sizes};
use crate::memory::{Block, HostMemory};
use crate::notifier::Notifier;
use parking_lot::Mutex;
use softhca_engine::{
    AddressVector, AhId, AsyncEvent, ClientId, Context, Counters, CqId, Event, Hca, Instant, Limits, Modify,
    PdId, QpInit, QpKind, QpRings, QpView, Region, SrqId, SrqInit, State, WindowKind, XrcdId,
};
use softhca_fabric::{Fault, Flow, Rule, Tally};
use softhca_queue::{
    Access, CompletionConsumer, DoorbellProducer, ReceiveProducer, SendProducer, completion_ring, doorbell,
    receive_ring, send_ring,
};
use softhca_udp::{Driver, DriverOptions, HostSockets, LinkEvent, Passage, Waker, Witness, wait};
use softhca_wire::{Envelope, Gid, Qpn, RemoteKey};
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// The thread takes over when no caller drove for this long.
const TAKE_OVER: Duration = Duration::from_micros(50);

/// After so many turns without anything to do, a caller that polls lets others have its processor now and then.
const EMPTY_TURNS: u32 = 64;

/// Where the card's news for the application is put up.
#[derive(Default)]
struct Board {
    queues: Mutex<BTreeMap<CqId, Arc<Notifier>>>,
    events: Mutex<VecDeque<AsyncEvent>>,
    event_news: Notifier,
}

impl Board {
    fn put_up(&self, event: &Event) {
        match event {
            Event::Notified { cq } => {
                let queue = self.queues.lock().get(cq).cloned();
                if let Some(queue) = queue {
                    queue.notify();
                }
            }
            Event::Raised { event, .. } => {
                self.events.lock().push_back(*event);
                self.event_news.notify();
            }
            _ => {}
        }
    }
}

/// Reads the card's events for the board, and passes everything on.
struct Reader {
    board: Arc<Board>,
    next: Box<dyn Witness>,
}

impl Witness for Reader {
    fn card(&mut self, now: Instant, event: &Event) {
        self.board.put_up(event);
        self.next.card(now, event);
    }

    fn frame(&mut self, now: Instant, passage: Passage, envelope: &Envelope, packet: &[u8]) {
        self.next.frame(now, passage, envelope, packet);
    }

    fn fault(&mut self, now: Instant, fault: &Fault) {
        self.next.fault(now, fault);
    }

    fn link(&mut self, now: Instant, event: &LinkEvent) {
        self.next.link(now, event);
    }
}

/// What callers and the thread share.
struct Core {
    driver: Mutex<Driver<HostMemory>>,
    started: std::time::Instant,
    /// When somebody last drove, in nanoseconds since the start.
    driven_at: AtomicU64,
    /// Turns in a row that callers took for nothing.
    empty: AtomicU32,
    /// The thread sleeps until something arrives: a doorbell must wake it.
    asleep: AtomicBool,
    stop: AtomicBool,
    waker: Waker,
}

impl Core {
    fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// One turn, unless somebody else drives. Says whether anything moved.
    fn turn(&self) -> Option<bool> {
        let mut driver = self.driver.try_lock()?;
        let moved = driver.turn().unwrap_or(false);
        drop(driver);
        self.driven_at.store(self.now(), Ordering::Relaxed);
        Some(moved)
    }

    fn serve(&self) {
        while !self.stop.load(Ordering::Acquire) {
            let idle = self.now().saturating_sub(self.driven_at.load(Ordering::Relaxed));
            if idle < TAKE_OVER.as_nanos() as u64 {
                std::thread::sleep(TAKE_OVER);
                continue;
            }
            let Some(mut driver) = self.driver.try_lock() else { continue };
            self.asleep.store(true, Ordering::SeqCst);
            // A doorbell that rang before it could see us asleep is heard by this turn.
            let moved = driver.turn().unwrap_or(false);
            if moved {
                self.asleep.store(false, Ordering::SeqCst);
                continue;
            }
            let timeout = driver.next_timeout();
            let [roce, link] = driver.descriptors().map(|fd| fd.try_clone_to_owned());
            drop(driver);
            self.sleep(roce.ok(), link.ok(), timeout);
        }
    }

    fn sleep(
        &self,
        roce: Option<std::os::fd::OwnedFd>,
        link: Option<std::os::fd::OwnedFd>,
        timeout: Option<Duration>,
    ) {
        use std::os::fd::AsFd;
        let mut descriptors = vec![self.waker.as_fd()];
        descriptors.extend([&roce, &link].into_iter().flatten().map(|fd| fd.as_fd()));
        let ready = wait(&descriptors, timeout).unwrap_or_default();
        self.asleep.store(false, Ordering::SeqCst);
        if ready.readable(0) {
            self.waker.clear();
        }
        if ready.error(1) || ready.error(2) {
            self.driver.lock().note_socket_error();
        }
    }
}

/// A card in this process.
pub(crate) struct Embedded {
    core: Arc<Core>,
    board: Arc<Board>,
    client: ClientId,
    doorbell: DoorbellProducer,
    /// Where the next region that the card allocates begins: the same in every run.
    next_address: Mutex<u64>,
    thread: Option<JoinHandle<()>>,
}

impl Embedded {
    pub fn start(
        sockets: HostSockets,
        options: DriverOptions,
        witness: Box<dyn Witness>,
    ) -> Result<Embedded> {
        let system = |what| move |source| Error::System { what, source };
        let board = Arc::new(Board::default());
        let reader = Reader { board: board.clone(), next: witness };
        let mut driver = Driver::new(sockets, options, HostMemory::default(), Box::new(reader));
        let (doorbell, heard) = doorbell(Limits::CARD.queue_pairs as u32);
        let client = driver.control(|hca, _| hca.open_client(heard))?;
        let core = Arc::new(Core {
            driver: Mutex::new(driver),
            started: std::time::Instant::now(),
            driven_at: AtomicU64::new(0),
            empty: AtomicU32::new(0),
            asleep: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            waker: Waker::new().map_err(system("making an event descriptor"))?,
        });
        let thread = std::thread::Builder::new()
            .name("softhca".into())
            .spawn({
                let core = core.clone();
                move || core.serve()
            })
            .map_err(system("starting the card's thread"))?;
        Ok(Embedded {
            core,
            board,
            client,
            doorbell,
            next_address: Mutex::new(0x1000_0000),
            thread: Some(thread),
        })
    }

    pub fn address(&self) -> IpAddr {
        self.core.driver.lock().address()
    }

    fn control<R>(&self, act: impl FnOnce(&mut Hca, &mut Context<'_>, ClientId) -> R) -> R {
        let client = self.client;
        let result = self.core.driver.lock().control(|hca, ctx| act(hca, ctx, client));
        self.wake();
        result
    }

    /// Wakes the thread, if it sleeps.
    fn wake(&self) {
        if self.core.asleep.load(Ordering::SeqCst) {
            self.core.waker.wake();
        }
    }

    pub fn add_rule(&self, seed: u64, rule: Rule) {
        self.core.driver.lock().add_rule(seed, rule);
    }

    pub fn add_flow(&self, seed: u64, flow: Flow) {
        self.core.driver.lock().add_flow(seed, flow);
    }

    pub fn rules(&self) -> Vec<(Rule, Tally)> {
        self.core.driver.lock().rules().map(|(rule, tally)| (rule.clone(), tally)).collect()
    }

    pub fn start_clock_at(&self, started: std::time::Instant) {
        self.core.driver.lock().start_clock_at(started);
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        self.core.stop.store(true, Ordering::Release);
        self.core.waker.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Backend for Embedded {
    fn gids(&self) -> Vec<Gid> {
        self.core.driver.lock().card().gids().to_vec()
    }

    fn counters(&self) -> Counters {
        *self.core.driver.lock().card().counters()
    }

    fn allocate_domain(&self) -> Result<PdId> {
        Ok(self.control(|hca, _, client| hca.allocate_domain(client))?)
    }

    fn free_domain(&self, domain: PdId) -> Result<()> {
        Ok(self.control(|hca, _, client| hca.free_domain(client, domain))?)
    }

    fn register(
        &self,
        domain: PdId,
        base: Option<u64>,
        length: u64,
        block: Arc<Block>,
        access: Access,
    ) -> Result<(RemoteKey, u64)> {
        let mut next = self.next_address.lock();
        let base = base.unwrap_or(*next);
        let mut driver = self.core.driver.lock();
        let memory = driver.memory().add(block);
        let region = Region { client: self.client, domain, base, length, access, memory };
        match driver.control(|hca, _| hca.register(region)) {
            Ok(key) => {
                *next += length.next_multiple_of(4096) + 4096;
                let base = if access.contains(Access::ZERO_BASED) { 0 } else { base };
                Ok((key, base))
            }
            Err(error) => {
                driver.memory().remove(memory);
                Err(error.into())
            }
        }
    }

    fn reregister(&self, key: RemoteKey, domain: Option<PdId>, access: Option<Access>) -> Result<RemoteKey> {
        Ok(self.control(|hca, _, client| {
            let mut region = hca.region(client, key)?;
            region.domain = domain.unwrap_or(region.domain);
            region.access = access.unwrap_or(region.access);
            hca.reregister(client, key, region)
        })?)
    }

    fn deregister(&self, key: RemoteKey) -> Result<()> {
        let mut driver = self.core.driver.lock();
        let region = driver.control(|hca, _| hca.deregister(self.client, key))?;
        driver.memory().remove(region.memory);
        Ok(())
    }

    fn allocate_window(&self, domain: PdId, kind: WindowKind) -> Result<RemoteKey> {
        Ok(self.control(|hca, _, client| hca.allocate_window(client, domain, kind))?)
    }

    fn free_window(&self, key: RemoteKey) -> Result<()> {
        Ok(self.control(|hca, _, client| hca.free_window(client, key))?)
    }

    fn create_completion_queue(&self, slots: u32) -> Result<(CqId, CompletionConsumer, Arc<Notifier>)> {
        let (producer, consumer) = completion_ring(slots);
        let cq = self.control(|hca, _, client| hca.create_completion_queue(client, producer))?;
        let notifier = Arc::new(Notifier::default());
        self.board.queues.lock().insert(cq, notifier.clone());
        Ok((cq, consumer, notifier))
    }

    fn resize_completion_queue(&self, cq: CqId, slots: u32) -> Result<CompletionConsumer> {
        let (producer, consumer) = completion_ring(slots);
        self.control(|hca, _, client| hca.resize_completion_queue(client, cq, producer))?;
        Ok(consumer)
    }

    fn destroy_completion_queue(&self, cq: CqId) -> Result<()> {
        self.control(|hca, _, client| hca.destroy_completion_queue(client, cq))?;
        self.board.queues.lock().remove(&cq);
        Ok(())
    }

    fn create_shared_receive_queue(
        &self,
        init: SrqInit,
        slots: u32,
        entries: usize,
    ) -> Result<(SrqId, ReceiveProducer)> {
        let (producer, consumer) = receive_ring(slots, entries);
        let srq = self.control(|hca, _, client| hca.create_shared_receive_queue(client, init, consumer))?;
        Ok((srq, producer))
    }

    fn arm_shared_receive_queue(&self, srq: SrqId, limit: u32) -> Result<()> {
        Ok(self.control(|hca, ctx, client| hca.arm_shared_receive_queue(ctx, client, srq, limit))?)
    }

    fn destroy_shared_receive_queue(&self, srq: SrqId) -> Result<()> {
        Ok(self.control(|hca, _, client| hca.destroy_shared_receive_queue(client, srq))?)
    }

    fn open_xrc_domain(&self) -> Result<XrcdId> {
        Ok(self.control(|hca, _, client| hca.open_xrc_domain(client))?)
    }

    fn close_xrc_domain(&self, domain: XrcdId) -> Result<()> {
        Ok(self.control(|hca, _, client| hca.close_xrc_domain(client, domain))?)
    }

    fn create_address_handle(&self, domain: PdId, vector: AddressVector) -> Result<AhId> {
        Ok(self.control(|hca, _, client| hca.create_address_handle(client, domain, vector))?)
    }

    fn destroy_address_handle(&self, handle: AhId) -> Result<()> {
        Ok(self.control(|hca, _, client| hca.destroy_address_handle(client, handle))?)
    }

    fn create_queue_pair(&self, init: QpInit, sizes: Sizes) -> Result<NewQueuePair> {
        let Sizes { sends, receives, entries, inline } = sizes;
        let mut rings = QpRings::default();
        let (mut send, mut receive) = (None, None);
        if init.kind != QpKind::XrcTarget {
            let (producer, consumer) = send_ring(sends, entries, inline);
            (send, rings.send) = (Some(producer), Some(consumer));
        }
        let receives_itself = !matches!(init.kind, QpKind::XrcInitiator | QpKind::XrcTarget);
        if receives_itself && init.shared_receive_queue.is_none() {
            let (producer, consumer) = receive_ring(receives, entries);
            (receive, rings.receive) = (Some(producer), Some(consumer));
        }
        let number = self.control(|hca, _, client| hca.create_queue_pair(client, init, rings))?;
        Ok(NewQueuePair { number, send, receive })
    }

    fn modify_queue_pair(&self, number: Qpn, modify: &Modify) -> Result<State> {
        Ok(self.control(|hca, ctx, client| hca.modify_queue_pair(ctx, client, number, modify))?)
    }

    fn query_queue_pair(&self, number: Qpn) -> Result<QpView> {
        Ok(self.control(|hca, _, client| hca.query_queue_pair(client, number))?)
    }

    fn destroy_queue_pair(&self, number: Qpn) -> Result<()> {
        Ok(self.control(|hca, ctx, client| hca.destroy_queue_pair(ctx, client, number))?)
    }

    fn attach_multicast(&self, number: Qpn, group: Gid) -> Result<()> {
        Ok(self.control(|hca, _, client| hca.attach_multicast(client, number, group))?)
    }

    fn detach_multicast(&self, number: Qpn, group: Gid) -> Result<()> {
        Ok(self.control(|hca, _, client| hca.detach_multicast(client, number, group))?)
    }

    fn take_event(&self) -> Option<AsyncEvent> {
        self.board.events.lock().pop_front()
    }

    fn events(&self) -> &Notifier {
        &self.board.event_news
    }

    fn ring(&self, number: Qpn, send: &SendProducer) {
        send.ring(&self.doorbell, number);
        self.wake();
    }

    fn drive(&self) {
        if self.core.turn() == Some(true) {
            self.core.empty.store(0, Ordering::Relaxed);
        } else if self.core.empty.fetch_add(1, Ordering::Relaxed) >= EMPTY_TURNS {
            std::thread::yield_now();
        }
    }
}
