//! A driver behind a lock, shared by callers and a thread that polls it when no caller does.

use crate::system::{WakeSet, request_short_time_slices};
use crate::{Driver, ProcessIdentity, SignalsBlocked, Waker, wait_readable};
use parking_lot::{Mutex, MutexGuard};
use softhca_engine::Memory;
use softhca_queue::SleepFlag;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The thread takes over when no caller has polled for this long.
const TAKEOVER_DELAY: Duration = Duration::from_micros(50);

/// The thread listens for packets while callers poll from this score on. It gains a point for each packet that no caller
/// had received when the thread polled, as in a program that waits for a write to its memory, and loses one for each
/// wake-up in vain.
const LISTEN_SCORE: u32 = 2;
const MAX_SCORE: u32 = 16;

/// After a poll in which nothing moved, callers do not poll again for this long: a poll makes system calls, and a program
/// may look at its completion queues between other work.
const IDLE_POLL_INTERVAL: Duration = Duration::from_nanos(300);

/// The most time that a stopping driver takes to send what is pending.
const SHUTDOWN_LINGER: Duration = Duration::from_millis(100);

/// Who polls the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrivePolicy {
    /// Callers, in their own threads ([`SharedDriver::drive`]). The driver's thread takes over when no caller has
    /// polled for a moment.
    Callers,
    /// The driver's thread. It polls until it has been idle for `busy_poll`, then sleeps.
    Thread {
        /// How long the idle thread polls before it sleeps.
        busy_poll: Duration,
    },
}

/// The state that callers and the thread share.
struct Shared<M> {
    driver: Mutex<Driver<M>>,
    policy: DrivePolicy,
    /// The start of the driver's clock.
    started: Instant,
    /// When a caller last polled, in the driver's time.
    driven_at: AtomicU64,
    /// When callers poll next, in the driver's time.
    next_poll_at: AtomicU64,
    /// Not zero while the thread sleeps and a doorbell must wake it.
    sleep_flag: SleepFlag,
    /// When the sleeping thread wakes by itself, in the driver's time. Written under the driver's lock.
    wakes_at: AtomicU64,
    stop: AtomicBool,
    /// Other processes of the host wake the thread for every packet.
    is_announced_asleep: AtomicBool,
    /// The thread leaves polling to callers.
    waiting_for_callers: AtomicBool,
    /// See [`LISTEN_SCORE`]. Only the thread writes it.
    score: AtomicU32,
    waker: Waker,
    wake_set: Arc<WakeSet>,
    sockets: [OwnedFd; 2],
}

/// A driver that any thread may use, with a thread of its own.
pub struct SharedDriver<M> {
    shared: Arc<Shared<M>>,
    thread: Option<JoinHandle<()>>,
    /// The process in which the thread runs.
    process: ProcessIdentity,
}

impl<M: Memory + Send + 'static> SharedDriver<M> {
    /// Starts the thread. `sleep_flag` tells the producers of doorbells that it sleeps.
    pub fn start(
        mut driver: Driver<M>,
        policy: DrivePolicy,
        sleep_flag: SleepFlag,
    ) -> io::Result<SharedDriver<M>> {
        let [roce, link] = driver.descriptors().map(|descriptor| descriptor.try_clone_to_owned());
        let wake_set = Arc::new(WakeSet::new()?);
        driver.set_wake_set(wake_set.clone())?;
        let name = format!("softhca {}", driver.address());
        let started = driver.started();
        let core = Arc::new(Shared {
            sockets: [roce?, link?],
            driver: Mutex::new(driver),
            policy,
            started,
            driven_at: AtomicU64::new(0),
            next_poll_at: AtomicU64::new(0),
            sleep_flag,
            wakes_at: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            is_announced_asleep: AtomicBool::new(false),
            waiting_for_callers: AtomicBool::new(false),
            score: AtomicU32::new(0),
            waker: Waker::new()?,
            wake_set,
        });
        let _blocked = SignalsBlocked::begin();
        let thread = std::thread::Builder::new().name(name).spawn({
            let core = core.clone();
            move || core.run()
        })?;
        Ok(SharedDriver { shared: core, thread: Some(thread), process: ProcessIdentity::current() })
    }

    /// Executes a control verb: calls `act` with the driver. A waiting caller gets the lock before the next poll.
    /// Wakes the thread if the verb left work that is due before the thread would wake by itself.
    pub fn control<R>(&self, act: impl FnOnce(&mut Driver<M>) -> R) -> R {
        self.control_locked(self.shared.driver.lock(), act)
    }

    /// As [`SharedDriver::control`], but waits at most for `timeout`. Returns `act` if the driver was not available.
    pub fn try_control<R, F: FnOnce(&mut Driver<M>) -> R>(&self, timeout: Duration, act: F) -> Result<R, F> {
        match self.shared.driver.try_lock_for(timeout) {
            Some(driver) => Ok(self.control_locked(driver, act)),
            None => Err(act),
        }
    }

    fn control_locked<R>(
        &self,
        mut driver: MutexGuard<'_, Driver<M>>,
        act: impl FnOnce(&mut Driver<M>) -> R,
    ) -> R {
        let result = act(&mut driver);
        let is_asleep = self.shared.sleep_flag.is_set();
        let is_due = is_asleep && driver.next_timeout().is_some_and(|left| self.shared.would_oversleep(left));
        drop(driver);
        if is_due {
            self.shared.waker.wake();
        }
        result
    }

    /// One bounded poll in the caller's thread, unless another thread polls or the last poll was idle a moment ago. Never
    /// sleeps. Returns whether it polled.
    pub fn drive(&self) -> bool {
        let shared = &*self.shared;
        let next = shared.next_poll_at.load(Ordering::Relaxed);
        if next != 0 && shared.now() < next {
            return false;
        }
        let Some(moved) = shared.try_poll() else { return false };
        let next = if moved { 0 } else { shared.now() + IDLE_POLL_INTERVAL.as_nanos() as u64 };
        shared.next_poll_at.store(next, Ordering::Relaxed);
        true
    }

    /// The caller stops polling: the thread takes over at once instead of after a delay.
    pub fn hand_over(&self) {
        self.shared.driven_at.store(0, Ordering::Relaxed);
        if self.shared.waiting_for_callers.load(Ordering::SeqCst) {
            self.shared.waker.wake();
        }
    }

    /// Wakes the thread if it sleeps, after a doorbell.
    pub fn wake(&self) {
        self.shared.next_poll_at.store(0, Ordering::Relaxed);
        if self.shared.sleep_flag.is_set() {
            self.shared.waker.wake();
        }
    }

    /// Sends what is pending, in the thread that ends the process, and publishes the last counters.
    pub fn flush_at_exit(&self) {
        let until = Instant::now() + SHUTDOWN_LINGER;
        while self.process.is_current()
            && let Some(mut driver) = self.shared.driver.try_lock_until(until)
        {
            let is_done = !driver.has_pending_transmit() && !driver.hca().has_orphaned_acks();
            driver.set_asleep(true);
            if is_done || Instant::now() >= until || driver.poll().is_err() {
                return;
            }
        }
    }

    /// Lets an event descriptor wake the thread too, until its last copy is closed.
    pub fn add_wake_source(&self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.shared.wake_set.add(descriptor)
    }
}

impl<M> Drop for SharedDriver<M> {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // In a forked child: the thread belongs to the parent.
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

    /// Whether the sleeping thread would sleep longer than this.
    fn would_oversleep(&self, left: Duration) -> bool {
        self.now().saturating_add(left.as_nanos() as u64) < self.wakes_at.load(Ordering::Relaxed)
    }

    /// One poll, unless another thread polls. Returns whether any packet moved.
    fn try_poll(&self) -> Option<bool> {
        let mut driver = self.driver.try_lock()?;
        let moved = driver.poll().unwrap_or(false);
        self.driven_at.store(driver.polled_at().nanos(), Ordering::Relaxed);
        let has_pending = driver.has_pending_transmit();
        drop(driver);
        // The caller may not poll again, and the datagram that would have woken the thread has been read.
        if has_pending && self.sleep_flag.is_set() {
            self.waker.wake();
        }
        Some(moved)
    }

    fn run(&self) {
        request_short_time_slices();
        while !self.stop.load(Ordering::Acquire) {
            match self.policy {
                DrivePolicy::Callers => self.poll_if_callers_idle(),
                DrivePolicy::Thread { busy_poll } => self.poll_until_idle(busy_poll),
            }
        }
        self.drain();
    }

    /// Sends what is pending at shutdown, where a peer may wait for the last ACK of a connection, and publishes the last
    /// counters.
    fn drain(&self) {
        let until = Instant::now() + SHUTDOWN_LINGER;
        loop {
            let mut driver = self.driver.lock();
            let left = until.saturating_duration_since(Instant::now());
            let is_done = !driver.has_pending_transmit() && !driver.hca().has_orphaned_acks();
            driver.set_asleep(true);
            if is_done || left == Duration::ZERO || driver.poll().is_err() {
                return;
            }
            // A grant or the end of a pause may be missing.
            let timeout = driver.next_timeout().map_or(left, |next| next.min(left));
            drop(driver);
            self.sleep(Some(timeout));
        }
    }

    /// Leaves polling to callers while they poll.
    fn poll_if_callers_idle(&self) {
        let idle = self.now().saturating_sub(self.driven_at.load(Ordering::Relaxed));
        if idle < TAKEOVER_DELAY.as_nanos() as u64 {
            return self.wait_for_callers();
        }
        match self.driver.try_lock() {
            Some(driver) => {
                if self.poll_or_sleep(driver) {
                    self.count_poll(true);
                }
            }
            None => self.wait_for_callers(),
        }
    }

    /// Counts a poll of the thread that found packets, or for which it was woken in vain.
    fn count_poll(&self, moved: bool) {
        let score = self.score.load(Ordering::Relaxed);
        let score = if moved { MAX_SCORE.min(score + 1) } else { score.saturating_sub(1) };
        self.score.store(score, Ordering::Relaxed);
    }

    /// Waits for a moment, until a packet arrives or a caller hands over. Receives the packet if no caller does.
    fn listen_beside_callers(&self) {
        if let Some(mut driver) = self.driver.try_lock() {
            driver.set_asleep(true);
            self.is_announced_asleep.store(true, Ordering::Relaxed);
            // Packets that came before their senders could see the flag.
            let _ = driver.poll();
        }
        self.waiting_for_callers.store(true, Ordering::SeqCst);
        let has_packets = self.sleep(Some(TAKEOVER_DELAY));
        self.waiting_for_callers.store(false, Ordering::SeqCst);
        if has_packets {
            self.count_poll(self.driver.try_lock().is_some_and(|mut driver| driver.poll().unwrap_or(false)));
        }
    }

    /// Waits for a moment, or until a caller hands over.
    fn wait_for_callers(&self) {
        if self.score.load(Ordering::Relaxed) >= LISTEN_SCORE {
            return self.listen_beside_callers();
        }
        if self.is_announced_asleep.load(Ordering::Relaxed) {
            self.announce_awake();
        }
        self.waiting_for_callers.store(true, Ordering::SeqCst);
        if wait_readable(&[self.waker.as_fd()], Some(TAKEOVER_DELAY)).is_ok_and(|ready| ready.readable(0)) {
            self.waker.clear();
        }
        self.waiting_for_callers.store(false, Ordering::SeqCst);
    }

    /// Polls until the driver has been idle for `busy_poll`.
    fn poll_until_idle(&self, busy_poll: Duration) {
        let mut last = Instant::now();
        while !self.stop.load(Ordering::Acquire) {
            let mut driver = self.driver.lock();
            let moved = driver.poll().unwrap_or(false);
            // Passes the lock to a waiting control verb: this thread would otherwise take it again at once.
            MutexGuard::unlock_fair(driver);
            if moved {
                last = Instant::now();
            } else if last.elapsed() >= busy_poll {
                break;
            } else {
                // A thread that yields waits for the time slices of programs that poll.
                std::hint::spin_loop();
            }
        }
        self.poll_or_sleep(self.driver.lock());
    }

    /// Polls once more and, if nothing moved, sleeps until the driver has work. Returns whether any packet moved.
    fn poll_or_sleep(&self, mut driver: MutexGuard<'_, Driver<M>>) -> bool {
        self.sleep_flag.set();
        driver.set_asleep(true);
        self.is_announced_asleep.store(true, Ordering::Relaxed);
        // Processes a doorbell that was rung before its producer could see the flag.
        let moved = driver.poll().unwrap_or(false);
        let timeout = driver.next_timeout();
        let wakes_at = timeout.map_or(u64::MAX, |left| self.now().saturating_add(left.as_nanos() as u64));
        self.wakes_at.store(wakes_at, Ordering::Relaxed);
        drop(driver);
        if !moved {
            self.sleep(timeout);
        }
        self.sleep_flag.clear();
        self.announce_awake();
        moved
    }

    /// Tells other processes that no packet must wake this one, unless another thread polls now.
    fn announce_awake(&self) {
        if let Some(mut driver) = self.driver.try_lock() {
            driver.set_asleep(false);
            self.is_announced_asleep.store(false, Ordering::Relaxed);
        }
    }

    /// Sleeps until a caller or a packet wakes the thread. Returns whether it was a packet.
    fn sleep(&self, timeout: Option<Duration>) -> bool {
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
        [1, 2, 3].into_iter().any(|index| ready.readable(index))
    }
}
