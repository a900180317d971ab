//! A card in this process: callers drive it when they poll, a thread of its own when nobody does.

use crate::backend::Result;
use crate::local::{Board, Local, Seat};
use crate::memory::{Block, HostMemory};
use crate::notifier::Notifier;
use crate::time::real_now;
use crate::{Error, Rendezvous};
use parking_lot::Mutex;
use softhca_engine::{Context, Event, Hca, Instant, MemoryId};
use softhca_fabric::{Fault, Flow, Rule, Tally};
use softhca_udp::{Driver, DriverOptions, HostSockets, LinkEvent, Passage, Waker, Witness, wait};
use softhca_wire::Envelope;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// The thread takes over when no caller drove for this long.
const TAKE_OVER: Duration = Duration::from_micros(50);

/// After so many turns without anything to do, a caller that polls lets others have its processor now and then.
const EMPTY_TURNS: u32 = 64;

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

/// A card in this process, on real sockets.
pub(crate) type Embedded = Local<Station>;

/// The sockets of an embedded card, and the thread that serves them when no caller does.
pub(crate) struct Station {
    core: Arc<Core>,
    thread: Option<JoinHandle<()>>,
}

/// Starts a card on these sockets.
pub(crate) fn start(
    sockets: HostSockets,
    options: DriverOptions,
    witness: Box<dyn Witness>,
) -> Result<Embedded> {
    let system = |what| move |source| Error::System { what, source };
    let board = Arc::new(Board::default());
    let reader = Reader { board: board.clone(), next: witness };
    let core = Arc::new(Core {
        driver: Mutex::new(Driver::new(sockets, options, HostMemory::default(), Box::new(reader))),
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
    Local::new(Station { core, thread: Some(thread) }, board)
}

impl Station {
    pub fn address(&self) -> IpAddr {
        self.core.driver.lock().address()
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

impl Drop for Station {
    fn drop(&mut self) {
        self.core.stop.store(true, Ordering::Release);
        self.core.waker.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Seat for Station {
    fn control<R>(&self, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R {
        let result = self.core.driver.lock().control(act);
        self.wake();
        result
    }

    fn add_memory(&self, block: Arc<Block>) -> MemoryId {
        self.core.driver.lock().memory().add(block)
    }

    fn remove_memory(&self, memory: MemoryId) {
        self.core.driver.lock().memory().remove(memory);
    }

    fn hear(&self) {
        self.wake();
    }

    fn drive(&self) {
        if self.core.turn() == Some(true) {
            self.core.empty.store(0, Ordering::Relaxed);
        } else if self.core.empty.fetch_add(1, Ordering::Relaxed) >= EMPTY_TURNS {
            std::thread::yield_now();
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
