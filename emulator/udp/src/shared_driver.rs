//! A driver behind a lock, and the thread that drives it when, or because, nobody else does.

use crate::system::WakeSet;
use crate::{Driver, ProcessIdentity, Waker, wait_readable};
use parking_lot::{Mutex, MutexGuard};
use softhca_engine::Memory;
use softhca_queue::SharedWords;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The thread takes over when no caller drove for this long.
const TAKEOVER_DELAY: Duration = Duration::from_micros(50);

/// After so many turns without anything to do, a caller that drives lets others have its processor now and then.
const IDLE_POLLS_BEFORE_YIELD: u32 = 64;

/// How long a card that ends may take to send what it has.
const SHUTDOWN_LINGER: Duration = Duration::from_millis(100);

/// Who drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrivePolicy {
    /// Callers, on their own time ([`Station::drive`]). The thread takes over when none did for a moment.
    Callers,
    /// The thread. It goes on for this long after the last thing that happened, and sleeps then.
    Thread {
        /// How long it looks for more before it sleeps.
        busy_poll: Duration,
    },
}

/// What callers and the thread share.
struct Shared<M> {
    driver: Mutex<Driver<M>>,
    policy: DrivePolicy,
    /// When the card's time began.
    started: Instant,
    /// When somebody last drove, in the card's time.
    driven_at: AtomicU64,
    /// Turns in a row that callers took for nothing.
    idle_polls: AtomicU32,
    /// Not zero: the thread sleeps until something arrives, and a doorbell must wake it.
    sleep_flag: SharedWords,
    /// When the sleeping thread wakes by itself, in the card's time. Written under the driver's lock.
    wakes_at: AtomicU64,
    stop: AtomicBool,
    /// The thread lets callers drive.
    waiting_for_callers: AtomicBool,
    waker: Waker,
    wake_set: Arc<WakeSet>,
    sockets: [OwnedFd; 2],
}

/// A driver that any thread may use, and that is never left alone.
pub struct SharedDriver<M> {
    shared: Arc<Shared<M>>,
    thread: Option<JoinHandle<()>>,
    /// Where the thread runs.
    process: ProcessIdentity,
}

impl<M: Memory + Send + 'static> SharedDriver<M> {
    /// Starts the thread. The first of the `asleep` words tells whoever rings a doorbell that the thread needs
    /// to be woken.
    pub fn start(
        mut driver: Driver<M>,
        conduct: DrivePolicy,
        asleep: SharedWords,
    ) -> io::Result<SharedDriver<M>> {
        let [roce, link] = driver.descriptors().map(|descriptor| descriptor.try_clone_to_owned());
        let bells = Arc::new(WakeSet::new()?);
        driver.set_wake_set(bells.clone())?;
        let name = format!("softhca {}", driver.address());
        let started = driver.started();
        let core = Arc::new(Shared {
            sockets: [roce?, link?],
            driver: Mutex::new(driver),
            policy: conduct,
            started,
            driven_at: AtomicU64::new(0),
            idle_polls: AtomicU32::new(0),
            sleep_flag: asleep,
            wakes_at: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            waiting_for_callers: AtomicBool::new(false),
            waker: Waker::new()?,
            wake_set: bells,
        });
        let thread = std::thread::Builder::new().name(name).spawn({
            let core = core.clone();
            move || core.run()
        })?;
        Ok(SharedDriver { shared: core, thread: Some(thread), process: ProcessIdentity::current() })
    }

    /// Calls `act` with the driver: a control verb. Whoever waits here goes before the next turn. The thread is woken if
    /// the verb left it something to do before it would wake by itself.
    pub fn control<R>(&self, act: impl FnOnce(&mut Driver<M>) -> R) -> R {
        let mut driver = self.shared.driver.lock();
        let result = act(&mut driver);
        let is_asleep = self.shared.sleep_flag[0].load(Ordering::SeqCst) != 0;
        let is_due = is_asleep && driver.next_timeout().is_some_and(|left| self.shared.would_oversleep(left));
        drop(driver);
        if is_due {
            self.shared.waker.wake();
        }
        result
    }

    /// One bounded turn on the caller's time, unless somebody else drives.
    pub fn drive(&self) {
        if self.shared.try_poll() == Some(true) {
            self.shared.idle_polls.store(0, Ordering::Relaxed);
        } else if self.shared.idle_polls.fetch_add(1, Ordering::Relaxed) >= IDLE_POLLS_BEFORE_YIELD {
            std::thread::yield_now();
        }
    }

    /// A caller that drove will not for a while: the thread takes over now, not when it finds out.
    pub fn hand_over(&self) {
        self.shared.driven_at.store(0, Ordering::Relaxed);
        if self.shared.waiting_for_callers.load(Ordering::SeqCst) {
            self.shared.waker.wake();
        }
    }

    /// Wakes the thread, if it sleeps: a doorbell rang.
    pub fn wake(&self) {
        if self.shared.sleep_flag[0].load(Ordering::SeqCst) != 0 {
            self.shared.waker.wake();
        }
    }

    /// Lets an event descriptor wake the thread too, as long as it is open anywhere.
    pub fn add_wake_source(&self, bell: BorrowedFd<'_>) -> io::Result<()> {
        self.shared.wake_set.add(bell)
    }
}

impl<M> Drop for SharedDriver<M> {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // A copy in a child: the thread is the parent's.
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        self.shared.waker.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl<M: Memory> Shared<M> {
    fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Whether the sleeping thread would sleep for longer than this.
    fn would_oversleep(&self, left: Duration) -> bool {
        self.now().saturating_add(left.as_nanos() as u64) < self.wakes_at.load(Ordering::Relaxed)
    }

    /// One turn, unless somebody else drives. Says whether anything moved.
    fn try_poll(&self) -> Option<bool> {
        let mut driver = self.driver.try_lock()?;
        let moved = driver.poll().unwrap_or(false);
        self.driven_at.store(driver.polled_at().nanos(), Ordering::Relaxed);
        let is_left = driver.has_pending_transmit();
        drop(driver);
        // The caller may not come back, and what would have woken the thread is out of the socket.
        if is_left && self.sleep_flag[0].load(Ordering::SeqCst) != 0 {
            self.waker.wake();
        }
        Some(moved)
    }

    fn run(&self) {
        while !self.stop.load(Ordering::Acquire) {
            match self.policy {
                DrivePolicy::Callers => self.poll_if_callers_idle(),
                DrivePolicy::Thread { busy_poll: linger } => self.poll_until_idle(linger),
            }
        }
        self.drain();
    }

    /// Sends what is left to be sent: a peer may wait for the last word of a connection.
    fn drain(&self) {
        let until = Instant::now() + SHUTDOWN_LINGER;
        loop {
            let mut driver = self.driver.lock();
            let left = until.saturating_duration_since(Instant::now());
            let is_done = !driver.has_pending_transmit() && !driver.hca().has_orphaned_acks();
            if is_done || left == Duration::ZERO || driver.poll().is_err() {
                return;
            }
            // A peer may have to let it, or a pause to end.
            let timeout = driver.next_timeout().map_or(left, |next| next.min(left));
            drop(driver);
            self.sleep(Some(timeout));
        }
    }

    /// Leaves the card to its callers while they drive.
    fn poll_if_callers_idle(&self) {
        let idle = self.now().saturating_sub(self.driven_at.load(Ordering::Relaxed));
        if idle < TAKEOVER_DELAY.as_nanos() as u64 {
            return self.wait_for_callers();
        }
        match self.driver.try_lock() {
            Some(driver) => self.poll_or_sleep(driver),
            None => self.wait_for_callers(),
        }
    }

    /// Lets callers drive for a moment, or until they hand the card over.
    fn wait_for_callers(&self) {
        self.waiting_for_callers.store(true, Ordering::SeqCst);
        if wait_readable(&[self.waker.as_fd()], Some(TAKEOVER_DELAY)).is_ok_and(|ready| ready.readable(0)) {
            self.waker.clear();
        }
        self.waiting_for_callers.store(false, Ordering::SeqCst);
    }

    /// Drives until nothing happened for a while.
    fn poll_until_idle(&self, linger: Duration) {
        let mut last = Instant::now();
        while !self.stop.load(Ordering::Acquire) {
            let mut driver = self.driver.lock();
            let moved = driver.poll().unwrap_or(false);
            // A control verb that waits for the lock gets it now: the thread would take it again at once.
            MutexGuard::unlock_fair(driver);
            if moved {
                last = Instant::now();
            } else if last.elapsed() >= linger {
                break;
            } else {
                // Whoever is to give us something to do may wait for this processor.
                std::thread::yield_now();
            }
        }
        self.poll_or_sleep(self.driver.lock());
    }

    /// One last turn; if it was for nothing, sleeps until there is something to do.
    fn poll_or_sleep(&self, mut driver: MutexGuard<'_, Driver<M>>) {
        self.sleep_flag[0].store(1, Ordering::SeqCst);
        // A doorbell that rang before it could see us asleep is heard by this turn.
        let moved = driver.poll().unwrap_or(false);
        let timeout = driver.next_timeout();
        let wakes_at = timeout.map_or(u64::MAX, |left| self.now().saturating_add(left.as_nanos() as u64));
        self.wakes_at.store(wakes_at, Ordering::Relaxed);
        drop(driver);
        if !moved {
            self.sleep(timeout);
        }
        self.sleep_flag[0].store(0, Ordering::SeqCst);
    }

    fn sleep(&self, timeout: Option<Duration>) {
        let [roce, link] = &self.sockets;
        let descriptors = [self.waker.as_fd(), roce.as_fd(), link.as_fd(), self.wake_set.as_fd()];
        let ready = wait_readable(&descriptors, timeout).unwrap_or_default();
        if ready.readable(0) {
            self.waker.clear();
        }
        if ready.error(1) || ready.error(2) {
            self.driver.lock().on_socket_error();
        }
        if ready.readable(3) {
            self.wake_set.clear();
        }
    }
}
