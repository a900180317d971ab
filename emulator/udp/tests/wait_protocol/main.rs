//! The wait protocol of the shared driver in many interleavings: whatever callers and the driver's thread do, no packet,
//! doorbell or timer stays unprocessed while every thread sleeps. The code under test is the driver's own source file; what
//! it uses are models ([`model`]). Shuttle reports an execution in which all threads are blocked, with the schedule that
//! replays it.

mod model;

/// The shared driver, compiled against the models below.
#[path = "../../src/shared_driver.rs"]
#[allow(dead_code, reason = "the models need not use all of it")]
mod shared_driver;

mod sync {
    pub use crate::model::{AsFd, BorrowedFd, Guard as MutexGuard, Lock as Mutex, OwnedFd};
    pub use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
    pub use shuttle::thread::{Builder, JoinHandle};
    pub use std::sync::Arc;
    use std::time::Duration;

    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    pub struct Instant(u64);

    impl Instant {
        pub const START: Instant = Instant(0);

        pub fn now() -> Instant {
            Instant(crate::model::now())
        }

        pub fn elapsed(&self) -> Duration {
            Instant::now().saturating_duration_since(*self)
        }

        pub fn saturating_duration_since(&self, earlier: Instant) -> Duration {
            Duration::from_nanos(self.0.saturating_sub(earlier.0))
        }
    }

    impl std::ops::Add<Duration> for Instant {
        type Output = Instant;

        fn add(self, duration: Duration) -> Instant {
            Instant(self.0 + duration.as_nanos() as u64)
        }
    }
}

mod system {
    pub use crate::model::{WakeSet, request_short_time_slices};
}

use model::{Driver, Effect, Packet, ProcessIdentity, Ready, SignalsBlocked, System, Waker};
use model::{poll_readable, wait_readable};
use shared_driver::{DrivePolicy, SharedDriver};
use shuttle::rand::{Rng, thread_rng};
use shuttle::thread;
use softhca_queue::{SharedWords, SleepFlag};
use std::sync::Arc;
use std::time::Duration;

fn start(policy: DrivePolicy) -> Arc<SharedDriver> {
    let sleep_flag = SleepFlag::new(SharedWords::heap(SleepFlag::WORDS));
    Arc::new(SharedDriver::start(Driver::new(), policy, sleep_flag).unwrap())
}

/// Polls a few times.
fn drive(driver: &SharedDriver) {
    for _ in 0..thread_rng().gen_range(0..3) {
        if driver.poll_gate().enter() {
            driver.drive();
        }
    }
}

/// Takes `count` completions as a program does that waits for events: polls, requests a notification, polls once more,
/// waits.
fn receive(system: &System, driver: &SharedDriver, queue: usize, mut count: usize) {
    let channel = system.channel(queue);
    while count > 0 {
        drive(driver);
        system.request_notification(queue);
        if system.poll_cq(queue) {
            count -= 1;
            continue;
        }
        while !system.take_event(channel) {
            let timeout = thread_rng().gen_bool(0.3).then_some(Duration::from_micros(30));
            driver.wait_readable(&[channel], timeout).unwrap();
        }
    }
}

/// Lets other threads run for a while.
fn think() {
    for _ in 0..thread_rng().gen_range(0..60) {
        thread::yield_now();
    }
}

fn packet(effect: Effect) -> Packet {
    Packet { effect, is_delayed: thread_rng().gen_bool(0.3) }
}

/// What a thread of the program does.
type Work = Box<dyn FnOnce(&System, &SharedDriver) + Send>;

/// The work of one execution: a random number of callers that wait for packets, one that posts work and waits for its
/// completion, and one that polls for a moment and then looks at its memory only.
fn exchange(policy: DrivePolicy) {
    let waiting = thread_rng().gen_range(0..3);
    let counts = (0..waiting).map(|_| thread_rng().gen_range(0..3)).collect::<Vec<usize>>();
    let [posts, writes] = [(); 2].map(|()| thread_rng().gen_range(0..3));
    let system = System::begin(waiting + 1);
    let driver = start(policy);
    if thread_rng().r#gen() {
        driver.allow_silent_waits();
    }
    let mut threads = Vec::new();
    let mut spawn = |work: Work| {
        let (system, driver) = (system.clone(), driver.clone());
        threads.push(thread::spawn(move || work(&system, &driver)));
    };
    for (queue, &count) in counts.iter().enumerate() {
        spawn(Box::new(move |system, driver| receive(system, driver, queue, count)));
    }
    spawn(Box::new(move |system, driver| {
        for _ in 0..posts {
            think();
            system.post(packet(Effect::Completion(waiting)));
            driver.on_doorbell();
            receive(system, driver, waiting, 1);
        }
    }));
    spawn(Box::new(move |system, driver| {
        drive(driver);
        system.wait_for_writes(writes);
    }));
    let completions =
        counts.iter().enumerate().flat_map(|(queue, &count)| vec![Effect::Completion(queue); count]);
    for effect in completions.chain(std::iter::repeat_n(Effect::Write, writes)) {
        think();
        match thread_rng().r#gen() {
            true => system.send_through_socket(packet(effect)),
            false => system.send_through_ring(packet(effect)),
        }
    }
    for thread in threads {
        thread.join().unwrap();
    }
}

fn check(policy: DrivePolicy) {
    let schedules = std::env::var("SOFTHCA_SCHEDULES").map_or(5_000, |count| count.parse().unwrap());
    shuttle::check_random(move || exchange(policy), schedules);
}

#[test]
fn callers_that_poll_and_wait_miss_nothing() {
    check(DrivePolicy::Callers);
}

#[test]
fn a_thread_that_polls_misses_nothing() {
    check(DrivePolicy::Thread { busy_poll: Duration::from_micros(20) });
}
