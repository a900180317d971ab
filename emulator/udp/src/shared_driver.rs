//! A driver behind a lock, shared by callers and a thread that polls it when no caller does.

use crate::sync::{
    Arc, AsFd, AtomicBool, AtomicU32, AtomicU64, BorrowedFd, Builder, Instant, JoinHandle, Mutex, MutexGuard,
    Ordering, OwnedFd,
};
use crate::system::{WakeSet, request_short_time_slices};
use crate::{Driver, ProcessIdentity, Ready, SignalsBlocked, Waker, poll_readable, wait_readable};
use softhca_queue::SleepFlag;
use std::io;
use std::time::Duration;

/// The thread takes over when no caller has polled for this long.
const TAKEOVER_DELAY: Duration = Duration::from_micros(50);
/// Takeover delay if every waiting application calls the library. Such a caller drives the card itself: the thread is
/// of no use while the caller copies data.
const LONG_TAKEOVER_DELAY: Duration = Duration::from_micros(200);

/// The longest interval at which the thread checks that callers poll. The interval doubles while they do: every check
/// takes the processor from a program that polls on each of them.
const MAX_CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// The thread listens for packets while callers poll from this score on. It gains points each time that no caller had
/// received a packet when the thread polled. That happens in a program that waits for a write to its memory. It loses a
/// point each time that it was woken, or looked, in vain: such a program polls for its own completions in between.
const LISTEN_SCORE: u32 = 2;
const LISTEN_GAIN: u32 = 4;
const MAX_SCORE: u32 = 16;

/// The descriptors of a sleep that packets make readable, by their index.
const PACKETS: [usize; 3] = [0, 1, 2];

/// The descriptors of a sleep beside those of its caller.
const OWN_DESCRIPTORS: usize = 4;
/// The most descriptors that a caller can wait for.
pub const MAX_CALLER_DESCRIPTORS: usize = 28;

/// After a poll in which nothing moved, so many calls look at the rings only. A poll makes system calls, and a program may
/// look at its completion queues between other work.
const SKIPPED_POLLS: u32 = 8;
/// The thread sleeps on the sockets: callers look at the rings only.
const SKIP_SOCKETS: u32 = u32::MAX - 1;
/// The thread sleeps on the sockets, and there are no rings: a call has nothing to do.
const SKIP_ALL: u32 = u32::MAX;

/// How long a caller that waits drives before it sleeps.
const SPIN_TIME: Duration = Duration::from_micros(50);

/// The most time that a stopping driver takes to send what is pending.
const SHUTDOWN_LINGER: Duration = Duration::from_millis(100);
/// The most time between two polls of an exiting process.
const EXIT_POLL_INTERVAL: Duration = Duration::from_micros(100);
/// How long it may send packets that fault rules delay.
const DELAY_LINGER: Duration = Duration::from_secs(2);

/// Which thread polls the driver.
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

/// What a caller that polls reads before it drives.
pub struct PollGate {
    /// How many calls do not poll, [`SKIP_SOCKETS`] or [`SKIP_ALL`].
    skips_left: AtomicU32,
    /// Counts the calls. Callers that race may count once.
    calls: AtomicU64,
    /// The process in which the driver's thread runs.
    process: ProcessIdentity,
}

impl PollGate {
    /// Counts a call. Returns whether the caller drives if its completion queue is empty.
    #[inline]
    pub fn enter(&self) -> bool {
        self.calls.store(self.calls.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        self.skips_left.load(Ordering::Relaxed) != SKIP_ALL
    }

    /// Whether the caller is not in a child of the driver's process.
    #[inline]
    pub fn is_of_this_process(&self) -> bool {
        self.process.is_current()
    }
}

/// The state that callers and the thread share.
struct Shared {
    driver: Mutex<Driver>,
    policy: DrivePolicy,
    /// The start of the driver's clock.
    started: Instant,
    /// When a caller last polled, in the driver's time.
    driven_at: AtomicU64,
    gate: Arc<PollGate>,
    /// The count of calls when a caller last handed over.
    calls_before_hand_over: AtomicU64,
    /// The thread sleeps on the sockets, which have been quiet for a while. Written under the driver's lock.
    are_sockets_watched: AtomicBool,
    /// Not zero while the thread or a caller sleeps on the sockets and a doorbell must wake it.
    sleep_flag: SleepFlag,
    /// When the sleeper wakes by itself, in the driver's time. Written under the driver's lock.
    wakes_at: AtomicU64,
    stop: AtomicBool,
    /// Doorbells, and packets of other processes of the host, wake the sleeper. Written under the driver's lock.
    is_announced_asleep: AtomicBool,
    /// The thread sleeps on the sockets. Set under the driver's lock.
    thread_sleeps: AtomicBool,
    /// Odd while a caller waits for packets ([`SharedDriver::wait_readable`]). Every wait has a number of its own.
    waits: AtomicU64,
    /// Callers that wait while another does so for packets.
    blocked_callers: AtomicU32,
    /// The thread leaves polling to callers.
    waiting_for_callers: AtomicBool,
    /// The thread leaves polling to a caller that waits, until it is woken.
    parked: AtomicBool,
    /// A caller may wait for a write to its memory without a call: the thread may listen beside callers that poll.
    may_wait_silently: AtomicBool,
    /// See [`LISTEN_SCORE`]. Only the thread writes it.
    score: AtomicU32,
    /// Wakes the thread or the caller that sleeps on the sockets.
    waker: Waker,
    /// Wakes the thread, whatever it waits for.
    thread_waker: Waker,
    wake_set: Arc<WakeSet>,
    sockets: [OwnedFd; 2],
}

/// A driver that any thread may use, with a thread of its own.
pub struct SharedDriver {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl SharedDriver {
    /// Starts the thread. `sleep_flag` informs the producers of doorbells that it sleeps.
    pub fn start(mut driver: Driver, policy: DrivePolicy, sleep_flag: SleepFlag) -> io::Result<SharedDriver> {
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
            gate: Arc::new(PollGate {
                skips_left: AtomicU32::new(0),
                calls: AtomicU64::new(0),
                process: ProcessIdentity::current(),
            }),
            calls_before_hand_over: AtomicU64::new(0),
            are_sockets_watched: AtomicBool::new(false),
            sleep_flag,
            wakes_at: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            is_announced_asleep: AtomicBool::new(false),
            thread_sleeps: AtomicBool::new(false),
            waits: AtomicU64::new(0),
            blocked_callers: AtomicU32::new(0),
            waiting_for_callers: AtomicBool::new(false),
            parked: AtomicBool::new(false),
            may_wait_silently: AtomicBool::new(false),
            score: AtomicU32::new(0),
            waker: Waker::new()?,
            thread_waker: Waker::new()?,
            wake_set,
        });
        let _blocked = SignalsBlocked::begin();
        let thread = Builder::new().name(name).spawn({
            let core = core.clone();
            move || core.run()
        })?;
        Ok(SharedDriver { shared: core, thread: Some(thread) })
    }

    /// Executes a control verb: calls `act` with the driver. A waiting caller gets the lock before the next poll.
    /// Polls if no caller has for a moment. Wakes the thread if work is left that is due before it would wake by itself.
    pub fn control<R>(&self, act: impl FnOnce(&mut Driver) -> R) -> R {
        self.control_locked(self.shared.driver.lock(), act)
    }

    /// As [`SharedDriver::control`], but waits at most for `timeout`. Returns `act` if the driver was not available.
    pub fn try_control<R, F: FnOnce(&mut Driver) -> R>(&self, timeout: Duration, act: F) -> Result<R, F> {
        match self.shared.driver.try_lock_for(timeout) {
            Some(driver) => Ok(self.control_locked(driver, act)),
            None => Err(act),
        }
    }

    fn control_locked<R>(&self, mut driver: MutexGuard<'_, Driver>, act: impl FnOnce(&mut Driver) -> R) -> R {
        let result = act(&mut driver);
        let shared = &*self.shared;
        shared.gate.skips_left.store(0, Ordering::Release);
        // Callers that execute verbs receive packets as callers that poll do: the thread would compete for the lock.
        if shared.policy == DrivePolicy::Callers && shared.are_callers_idle() {
            shared.poll_for_caller(&mut driver, true);
        }
        shared.release(driver);
        result
    }

    /// What callers read before they call [`SharedDriver::drive`].
    pub fn poll_gate(&self) -> Arc<PollGate> {
        self.shared.gate.clone()
    }

    /// One bounded poll in the caller's thread, unless another thread polls or there is no reason to: then it reads memory
    /// only. Never sleeps. Returns whether it polled.
    #[inline]
    pub fn drive(&self) -> bool {
        match self.shared.gate.skips_left.load(Ordering::Relaxed) {
            SKIP_ALL => false,
            skips => self.shared.drive_for_caller(skips),
        }
    }

    /// Drives in the thread of a caller that waits, for a moment, until `is_done`: a packet that comes soon has to wake no
    /// thread. Acknowledges what it receives. Returns whether it is done.
    pub fn spin(&self, is_done: impl Fn() -> bool) -> bool {
        let shared = &*self.shared;
        let until = Instant::now() + SPIN_TIME;
        while !is_done() {
            if Instant::now() >= until {
                return false;
            }
            if let Some(mut driver) = shared.driver.try_lock() {
                let _ = driver.poll_and_acknowledge();
                shared.driven_at.store(driver.polled_at().nanos(), Ordering::Relaxed);
                shared.release(driver);
            }
            // The packet may have to come from this processor.
            std::thread::yield_now();
        }
        true
    }

    /// A caller may wait for a write to its memory without a call, from now on. Until then, the thread does not compete
    /// with callers that poll.
    pub fn allow_silent_waits(&self) {
        self.shared.may_wait_silently.store(true, Ordering::Relaxed);
    }

    /// The caller stops polling: the thread takes over at once instead of after a delay.
    pub fn hand_over(&self) {
        let shared = &*self.shared;
        shared.calls_before_hand_over.store(shared.gate.calls.load(Ordering::Relaxed), Ordering::Relaxed);
        shared.driven_at.store(0, Ordering::SeqCst);
        if shared.waiting_for_callers.load(Ordering::SeqCst) || shared.parked.load(Ordering::SeqCst) {
            shared.thread_waker.wake();
        }
    }

    /// Waits until one of `descriptors`, up to [`MAX_CALLER_DESCRIPTORS`], is readable, a packet has arrived or the time is
    /// over. The caller drives meanwhile, unless another caller does: a packet then wakes the thread that waits for it,
    /// and no other. Fails if a signal arrives.
    pub fn wait_readable(&self, descriptors: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<()> {
        let shared = &*self.shared;
        let wait = shared.waits.load(Ordering::Relaxed);
        let next = wait | 1;
        if next == wait
            || shared.waits.compare_exchange(wait, next, Ordering::SeqCst, Ordering::Relaxed).is_err()
        {
            shared.blocked_callers.fetch_add(1, Ordering::SeqCst);
            // The other caller may have left before it could see this one.
            if !shared.has_waiting_caller() {
                self.hand_over();
            }
            let result = poll_readable(descriptors, timeout);
            shared.blocked_callers.fetch_sub(1, Ordering::SeqCst);
            return result.map(drop);
        }
        let result = shared.drive_asleep(descriptors, timeout);
        shared.driven_at.store(shared.now(), Ordering::SeqCst);
        shared.waits.store(next + 1, Ordering::SeqCst);
        if shared.blocked_callers.load(Ordering::SeqCst) > 0 {
            self.hand_over();
        } else if shared.parked.load(Ordering::SeqCst) {
            shared.thread_waker.wake();
        }
        result
    }

    /// A caller has rung a doorbell. If the thread sleeps, the caller sends what it has posted: a thread wakes up later, and
    /// waking it costs more than a poll.
    pub fn on_doorbell(&self) {
        let shared = &*self.shared;
        shared.gate.skips_left.store(0, Ordering::Release);
        if !shared.sleep_flag.is_set() {
            return;
        }
        let callers_drive = shared.policy == DrivePolicy::Callers;
        match callers_drive.then(|| shared.driver.try_lock()).flatten() {
            Some(mut driver) => {
                shared.poll_for_caller(&mut driver, false);
                shared.release(driver);
            }
            None => shared.waker.wake(),
        }
    }

    /// Gives the ports up for good. Threads that wait for packets hold the sockets: they are woken.
    pub fn close(&self) -> io::Result<()> {
        let copies = self.shared.sockets.each_ref().map(|socket| socket.as_fd());
        let closed = self.control(|driver| driver.close(copies));
        self.shared.waker.wake();
        self.shared.thread_waker.wake();
        closed
    }

    /// Sends what is pending, in the thread that ends the process, and publishes the last counters.
    pub fn flush_at_exit(&self) {
        let began = Instant::now();
        while self.shared.gate.is_of_this_process()
            && let Some(mut driver) = self.shared.driver.try_lock_until(began + SHUTDOWN_LINGER)
        {
            driver.set_asleep(true);
            let Some(left) = time_to_linger(&driver, began) else { return };
            if driver.poll().is_err() {
                return;
            }
            // Grants may arrive meanwhile.
            let next = driver.next_timeout().unwrap_or(left).min(EXIT_POLL_INTERVAL);
            drop(driver);
            std::thread::sleep(next.min(left));
        }
    }

    /// Lets an event descriptor wake the thread too, until its last copy is closed.
    pub fn add_wake_source(&self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.shared.wake_set.add(descriptor)
    }
}

impl Drop for SharedDriver {
    fn drop(&mut self) {
        if !self.shared.gate.is_of_this_process() {
            // In a forked child: the thread belongs to the parent.
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        self.shared.thread_waker.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// How long a driver may still need to send what is left, if something is.
fn time_to_linger(driver: &Driver, began: Instant) -> Option<Duration> {
    let limit = match driver.has_delayed_packets() {
        true => DELAY_LINGER,
        false if driver.has_pending_transmit() || driver.hca().has_orphaned_acks() => SHUTDOWN_LINGER,
        false => return None,
    };
    limit.checked_sub(began.elapsed())
}

impl Shared {
    fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Polls in a caller's thread unless `skips` calls are left that look at the rings only. Returns whether it polled.
    fn drive_for_caller(&self, skips: u32) -> bool {
        let Some(mut driver) = self.driver.try_lock() else { return false };
        // Rings are memory: looking at them costs no system call.
        if skips > 0 && !driver.has_packets_in_rings() {
            if skips != SKIP_SOCKETS {
                self.gate.skips_left.store(skips - 1, Ordering::Relaxed);
            }
            return false;
        }
        // A doorbell that this poll does not see is rung later, and sets it to zero.
        self.gate.skips_left.swap(SKIPPED_POLLS, Ordering::AcqRel);
        let is_watched = self.are_sockets_watched.load(Ordering::Relaxed);
        let skips = match self.poll_for_caller(&mut driver, !is_watched) {
            true => 0,
            false if is_watched => skips_while_watched(&driver),
            false => SKIPPED_POLLS,
        };
        let _ =
            self.gate.skips_left.compare_exchange(SKIPPED_POLLS, skips, Ordering::Relaxed, Ordering::Relaxed);
        self.release(driver);
        true
    }

    /// The thread is about to poll and then to sleep on the sockets. Meanwhile callers do not read them if they have been
    /// quiet. Returns whether that is so.
    fn watch_sockets(&self, driver: &Driver) -> bool {
        let is_quiet = driver.are_sockets_quiet();
        self.are_sockets_watched.store(is_quiet, Ordering::Relaxed);
        is_quiet
    }

    /// The thread does not sleep on the sockets any more. A caller that polls now may still let callers skip all: the
    /// next turn of the thread ends that.
    fn end_watch(&self) {
        self.are_sockets_watched.store(false, Ordering::Relaxed);
        self.gate.skips_left.store(0, Ordering::Relaxed);
    }

    /// Records that callers poll if any has called since the last check.
    fn notice_calls(&self, check: &mut CallerCheck) {
        let calls = self.gate.calls.load(Ordering::Relaxed);
        if std::mem::replace(&mut check.calls, calls) != calls
            && calls != self.calls_before_hand_over.load(Ordering::Relaxed)
        {
            self.driven_at.store(self.now(), Ordering::Relaxed);
        }
    }

    /// Whether no caller has polled for a moment, or the last one handed over.
    fn are_callers_idle(&self) -> bool {
        let idle = self.now().saturating_sub(self.driven_at.load(Ordering::Relaxed));
        idle >= self.takeover_delay().as_nanos() as u64
    }

    fn takeover_delay(&self) -> Duration {
        if self.may_wait_silently.load(Ordering::Relaxed) { TAKEOVER_DELAY } else { LONG_TAKEOVER_DELAY }
    }

    /// Unlocks the driver, and wakes the sleeper if it would sleep past the driver's next timeout. The caller may not
    /// poll again, and the datagram that would have woken the sleeper may have been read.
    fn release(&self, driver: MutexGuard<'_, Driver>) {
        let is_due = self.sleep_flag.is_set()
            && driver.next_deadline().is_some_and(|at| at.nanos() < self.wakes_at.load(Ordering::Relaxed));
        if is_due {
            // One wake-up is enough, however often callers poll until the sleeper runs.
            self.wakes_at.store(0, Ordering::Relaxed);
        }
        drop(driver);
        if is_due {
            self.waker.wake();
        }
    }

    /// Whether a caller waits for packets.
    fn has_waiting_caller(&self) -> bool {
        self.waits.load(Ordering::SeqCst) & 1 == 1
    }

    /// One poll in a caller's thread. Returns whether any packet moved.
    fn poll_for_caller(&self, driver: &mut Driver, reads_sockets: bool) -> bool {
        let polled = if reads_sockets { driver.poll() } else { driver.poll_without_sockets() };
        let moved = polled.unwrap_or(false);
        self.driven_at.store(driver.polled_at().nanos(), Ordering::Relaxed);
        moved
    }

    fn run(&self) {
        request_short_time_slices();
        let mut check = CallerCheck { interval: self.takeover_delay(), wait: 0, calls: 0 };
        while !self.stop.load(Ordering::Acquire) {
            match self.policy {
                DrivePolicy::Callers => self.poll_if_callers_idle(&mut check),
                DrivePolicy::Thread { busy_poll } => self.poll_until_idle(busy_poll),
            }
        }
        self.drain();
    }

    /// Sends what is pending at shutdown, where a peer may wait for the last ACK of a connection, and publishes the last
    /// counters.
    fn drain(&self) {
        let began = Instant::now();
        loop {
            let mut driver = self.driver.lock();
            driver.set_asleep(true);
            let Some(left) = time_to_linger(&driver, began) else { return };
            if driver.poll().is_err() {
                return;
            }
            // A grant or the end of a pause may be missing.
            let timeout = driver.next_timeout().map_or(left, |next| next.min(left));
            drop(driver);
            self.sleep_in_thread(Some(timeout));
        }
    }

    /// Leaves polling to callers while they poll or wait for packets.
    fn poll_if_callers_idle(&self, check: &mut CallerCheck) {
        // One poll of a caller handles the timers that are due.
        self.gate.skips_left.store(0, Ordering::Relaxed);
        self.notice_calls(check);
        let wait = self.waits.load(Ordering::SeqCst);
        if wait & 1 == 1 {
            self.end_watch();
            let is_long = std::mem::replace(&mut check.wait, wait) == wait;
            if is_long {
                return self.park(wait);
            }
            // The thread may have slept beside the caller and cleared a doorbell's call to wake.
            let mut driver = self.driver.lock();
            let _ = driver.poll_and_acknowledge();
            self.release(driver);
            return self.wait_for_callers(check.next_interval());
        }
        match self.are_callers_idle().then(|| self.driver.try_lock()) {
            Some(Some(driver)) => {
                check.interval = self.takeover_delay();
                if self.poll_or_sleep(driver) {
                    self.count_poll(true);
                }
            }
            _ if self.must_listen() => self.listen_beside_callers(TAKEOVER_DELAY, true),
            // The caller that holds the lock may poll after its verb: others that wait for the lock go first.
            Some(None) if self.driven_at.load(Ordering::Relaxed) == 0 => {
                self.end_watch();
                self.wait_for_wake(Some(TAKEOVER_DELAY));
            }
            _ => {
                self.listen_beside_callers(check.next_interval(), false);
                if self.receive_for_silent_callers() {
                    check.interval = self.takeover_delay();
                }
            }
        }
    }

    /// Sleeps until the caller that waits for packets leaves.
    fn park(&self, wait: u64) {
        self.parked.store(true, Ordering::SeqCst);
        if self.waits.load(Ordering::SeqCst) == wait && !self.stop.load(Ordering::Acquire) {
            self.wait_for_wake(None);
        }
        self.parked.store(false, Ordering::SeqCst);
    }

    /// Waits until a caller wakes the thread.
    fn wait_for_wake(&self, timeout: Option<Duration>) {
        if wait_readable(&[self.thread_waker.as_fd()], timeout).is_ok_and(|ready| ready.readable(0)) {
            self.thread_waker.clear();
        }
    }

    /// Drives in the thread of a caller that waits: sleeps until one of `descriptors` is readable, a packet arrives or the
    /// time is over.
    fn drive_asleep(&self, descriptors: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<()> {
        let mut driver = self.driver.lock();
        self.announce_asleep(&mut driver, true);
        let moved = driver.poll_and_acknowledge().unwrap_or(false);
        let timeout = [self.set_wake_time(&driver), timeout].into_iter().flatten().min();
        drop(driver);
        let result = if moved { Ok(Ready::default()) } else { self.sleep(descriptors, timeout) };
        let mut driver = self.driver.lock();
        self.announce_asleep(&mut driver, self.thread_sleeps.load(Ordering::Relaxed));
        if !moved {
            let _ = driver.poll_and_acknowledge();
        }
        self.release(driver);
        result.map(drop)
    }

    fn must_listen(&self) -> bool {
        self.score.load(Ordering::Relaxed) >= LISTEN_SCORE && self.may_wait_silently.load(Ordering::Relaxed)
    }

    /// Counts a poll of the thread that found packets, or for which there was no need.
    fn count_poll(&self, moved: bool) {
        let score = self.score.load(Ordering::Relaxed);
        let score = if moved { MAX_SCORE.min(score + LISTEN_GAIN) } else { score.saturating_sub(1) };
        self.score.store(score, Ordering::Relaxed);
    }

    /// Waits for `timeout`, or until a packet arrives or a caller hands over. Receives the packet if no caller does. A packet
    /// in a ring and a doorbell wake the thread if it `is_asleep`.
    fn listen_beside_callers(&self, timeout: Duration, is_asleep: bool) {
        // A thread that must listen waits for the lock: packets do not wake it elsewhere.
        let driver = if is_asleep { Some(self.driver.lock()) } else { self.driver.try_lock() };
        let Some(mut driver) = driver else { return self.wait_for_callers(timeout) };
        if !self.watch_sockets(&driver) && !is_asleep {
            drop(driver);
            return self.wait_for_callers(timeout);
        }
        if is_asleep || self.is_announced_asleep.load(Ordering::Relaxed) && !self.has_waiting_caller() {
            self.announce_asleep(&mut driver, is_asleep);
        }
        self.thread_sleeps.store(is_asleep, Ordering::Relaxed);
        let mut timeout = timeout;
        if is_asleep {
            // Packets that came before their senders could see the flag.
            let _ = driver.poll_and_acknowledge();
            timeout = driver.next_timeout().map_or(timeout, |next| next.min(timeout));
        }
        drop(driver);
        self.waiting_for_callers.store(true, Ordering::SeqCst);
        // A caller that handed over before it could see the flag does not wake the thread.
        let mut ready = Ready::default();
        if is_asleep || self.driven_at.load(Ordering::SeqCst) != 0 {
            ready = self.sleep_in_thread(Some(timeout));
        }
        self.waiting_for_callers.store(false, Ordering::SeqCst);
        self.thread_sleeps.store(false, Ordering::Relaxed);
        if PACKETS.into_iter().any(|index| ready.readable(index)) {
            self.end_watch();
            let moved = self.driver.try_lock().map(|mut driver| driver.poll_and_acknowledge());
            if is_asleep {
                self.count_poll(matches!(moved, Some(Ok(true))));
            }
        }
    }

    /// Receives what callers have left in the rings: they poll, but wait for writes to their memory in between. Returns
    /// whether there was anything.
    fn receive_for_silent_callers(&self) -> bool {
        if !self.may_wait_silently.load(Ordering::Relaxed) {
            return false;
        }
        let Some(mut driver) = self.driver.try_lock() else { return false };
        let moved = driver.has_packets_in_rings() && driver.poll_and_acknowledge().unwrap_or(false);
        self.count_poll(moved);
        moved
    }

    /// Waits for `timeout`, or until a caller hands over.
    fn wait_for_callers(&self, timeout: Duration) {
        self.end_watch();
        self.announce_awake();
        self.waiting_for_callers.store(true, Ordering::SeqCst);
        // A caller that handed over before it could see the flag does not wake the thread.
        if self.driven_at.load(Ordering::SeqCst) != 0 {
            self.wait_for_wake(Some(timeout));
        }
        self.waiting_for_callers.store(false, Ordering::SeqCst);
    }

    /// Polls until the driver has been idle for `busy_poll`.
    fn poll_until_idle(&self, busy_poll: Duration) {
        let mut last = Instant::now();
        while !self.stop.load(Ordering::Acquire) {
            self.announce_awake();
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
    fn poll_or_sleep(&self, mut driver: MutexGuard<'_, Driver>) -> bool {
        self.announce_asleep(&mut driver, true);
        self.thread_sleeps.store(true, Ordering::Relaxed);
        self.watch_sockets(&driver);
        // Processes a doorbell that was rung before its producer could see the flag.
        let moved = driver.poll_and_acknowledge().unwrap_or(false);
        let timeout = self.set_wake_time(&driver);
        drop(driver);
        if !moved {
            self.sleep_in_thread(timeout);
        }
        self.thread_sleeps.store(false, Ordering::Relaxed);
        self.end_watch();
        self.announce_awake();
        moved
    }

    /// Says whether doorbells, and packets of other processes of the host, must wake the sleeper.
    fn announce_asleep(&self, driver: &mut Driver, is_asleep: bool) {
        driver.set_asleep(is_asleep);
        match is_asleep {
            true => self.sleep_flag.set(),
            false => self.sleep_flag.clear(),
        }
        self.is_announced_asleep.store(is_asleep, Ordering::Relaxed);
    }

    /// The thread is awake. Nothing changes if another thread polls now, or if a caller sleeps.
    fn announce_awake(&self) {
        if self.is_announced_asleep.load(Ordering::Relaxed)
            && let Some(mut driver) = self.driver.try_lock()
            && !self.has_waiting_caller()
        {
            self.announce_asleep(&mut driver, false);
        }
    }

    /// Records when the sleeper wakes by itself. Returns how long that is.
    fn set_wake_time(&self, driver: &Driver) -> Option<Duration> {
        let deadline = driver.next_deadline().map(|at| at.nanos());
        self.wakes_at.store(deadline.unwrap_or(u64::MAX), Ordering::Relaxed);
        deadline.map(|at| Duration::from_nanos(at.saturating_sub(self.now())))
    }

    /// Sleeps until a doorbell, a packet or a caller wakes the thread.
    fn sleep_in_thread(&self, timeout: Option<Duration>) -> Ready {
        let ready = self.sleep(&[self.thread_waker.as_fd()], timeout).unwrap_or_default();
        if ready.readable(OWN_DESCRIPTORS) {
            self.thread_waker.clear();
        }
        ready
    }

    /// Sleeps until a doorbell, a packet or one of `others` ends it.
    fn sleep(&self, others: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<Ready> {
        let [roce, link] = &self.sockets;
        let waker = self.waker.as_fd();
        let mut descriptors = [waker; OWN_DESCRIPTORS + MAX_CALLER_DESCRIPTORS];
        descriptors[..OWN_DESCRIPTORS].copy_from_slice(&[
            roce.as_fd(),
            link.as_fd(),
            self.wake_set.as_fd(),
            waker,
        ]);
        let end = OWN_DESCRIPTORS + others.len();
        descriptors[OWN_DESCRIPTORS..end].copy_from_slice(others);
        let ready = poll_readable(&descriptors[..end], timeout)?;
        if ready.readable(3) {
            self.waker.clear();
        }
        if ready.error(0) || ready.error(1) {
            self.driver.lock().on_socket_error();
        }
        if ready.readable(2) {
            self.wake_set.clear();
        }
        Ok(ready)
    }
}

/// How many calls do not poll after a poll in which nothing moved, while the thread sleeps on the sockets: it does not
/// know of timers that callers have started.
fn skips_while_watched(driver: &Driver) -> u32 {
    let is_near = |at: u64| at <= driver.polled_at().nanos() + MAX_CHECK_INTERVAL.as_nanos() as u64;
    match driver.next_deadline() {
        Some(at) if is_near(at.nanos()) => SKIPPED_POLLS,
        _ if driver.has_rings() => SKIP_SOCKETS,
        _ => SKIP_ALL,
    }
}

/// The thread's knowledge of callers that poll.
struct CallerCheck {
    /// When the thread checks again.
    interval: Duration,
    /// The number of the wait that it saw last.
    wait: u64,
    /// The number of calls that it saw last.
    calls: u64,
}

impl CallerCheck {
    fn next_interval(&mut self) -> Duration {
        let interval = self.interval;
        self.interval = MAX_CHECK_INTERVAL.min(2 * interval);
        interval
    }
}
