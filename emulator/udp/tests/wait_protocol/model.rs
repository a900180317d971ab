//! Models of what the shared driver uses: locks and threads of shuttle, descriptors and time of a simulated system, and a
//! driver whose packets are numbers of completion queues.

use crate::sync::{Instant, MutexGuard};
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::{Condvar, Mutex};
use std::cell::RefCell;
use std::io;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

const ROCE: usize = 0;
const LINK: usize = 1;
const RINGS: usize = 2;

/// How often a timed wait looks before it times out.
const LOOKS: usize = 3;

/// How long the timer of a packet runs.
const TIMER: Duration = Duration::from_micros(30);

/// What a packet, or a work request, asks of the driver.
#[derive(Clone, Copy)]
pub struct Packet {
    pub effect: Effect,
    /// The effect comes when a timer expires.
    pub is_delayed: bool,
}

#[derive(Clone, Copy)]
pub enum Effect {
    /// A completion in a queue.
    Completion(usize),
    /// A write to memory that the program looks at.
    Write,
}

#[derive(Default)]
struct State {
    nanos: u64,
    /// Whether each descriptor is readable. That of the socket follows from `socket`.
    readable: Vec<bool>,
    socket: Vec<Packet>,
    ring: Vec<Packet>,
    doorbells: Vec<Packet>,
    /// Packets in a ring must wake the process.
    is_asleep: bool,
    queues: Vec<Queue>,
    writes: usize,
}

/// A completion queue with its channel.
struct Queue {
    completions: usize,
    is_armed: bool,
    channel: usize,
}

impl State {
    fn descriptor(&mut self) -> usize {
        self.readable.push(false);
        self.readable.len() - 1
    }

    fn apply(&mut self, effect: Effect) {
        let Effect::Completion(queue) = effect else {
            self.writes += 1;
            return;
        };
        let queue = &mut self.queues[queue];
        queue.completions += 1;
        if std::mem::take(&mut queue.is_armed) {
            self.readable[queue.channel] = true;
        }
    }
}

/// The simulated system.
#[derive(Default)]
pub struct System {
    state: Mutex<State>,
    changed: Condvar,
}

thread_local! {
    /// The system of the current execution. All threads of an execution are coroutines of one thread.
    static SYSTEM: RefCell<Option<Arc<System>>> = const { RefCell::new(None) };
}

fn system() -> Arc<System> {
    SYSTEM.with_borrow(|system| system.clone().expect("an execution has begun"))
}

impl System {
    /// Begins an execution with so many completion queues.
    pub fn begin(queues: usize) -> Arc<System> {
        let system = Arc::new(System::default());
        SYSTEM.set(Some(system.clone()));
        system.change(|state| {
            state.readable = vec![false; 3];
            for _ in 0..queues {
                let channel = state.descriptor();
                state.queues.push(Queue { completions: 0, is_armed: false, channel });
            }
        });
        system
    }

    fn change<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let result = change(&mut self.state.lock().unwrap());
        self.changed.notify_all();
        result
    }

    pub fn send_through_socket(&self, packet: Packet) {
        self.change(|state| state.socket.push(packet));
    }

    pub fn send_through_ring(&self, packet: Packet) {
        self.change(|state| state.ring.push(packet));
        if self.change(|state| state.is_asleep) {
            self.change(|state| state.readable[RINGS] = true);
        }
    }

    /// Rings a doorbell. The caller wakes the driver.
    pub fn post(&self, packet: Packet) {
        self.change(|state| state.doorbells.push(packet));
    }

    /// Takes a completion.
    pub fn poll_cq(&self, queue: usize) -> bool {
        self.change(|state| {
            let queue = &mut state.queues[queue];
            let is_complete = queue.completions > 0;
            queue.completions -= usize::from(is_complete);
            is_complete
        })
    }

    pub fn request_notification(&self, queue: usize) {
        self.change(|state| state.queues[queue].is_armed = true);
    }

    pub fn channel(&self, queue: usize) -> BorrowedFd<'_> {
        BorrowedFd(self.change(|state| state.queues[queue].channel), PhantomData)
    }

    /// Waits for the effect of writes, as a program does that looks at its memory and calls no verb.
    pub fn wait_for_writes(&self, count: usize) {
        let state = self.state.lock().unwrap();
        drop(self.changed.wait_while(state, |state| state.writes < count).unwrap());
    }

    /// Takes an event from a channel.
    pub fn take_event(&self, channel: BorrowedFd<'_>) -> bool {
        self.change(|state| std::mem::take(&mut state.readable[channel.0]))
    }
}

/// The time of the system. It advances a little whenever it is read.
pub fn now() -> u64 {
    system().change(|state| {
        state.nanos += 1_000;
        state.nanos
    })
}

#[derive(Clone, Copy)]
pub struct BorrowedFd<'a>(usize, PhantomData<&'a ()>);

impl BorrowedFd<'_> {
    pub fn try_clone_to_owned(&self) -> io::Result<OwnedFd> {
        Ok(OwnedFd(self.0))
    }
}

pub trait AsFd {
    fn as_fd(&self) -> BorrowedFd<'_>;
}

pub struct OwnedFd(usize);

impl AsFd for OwnedFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        BorrowedFd(self.0, PhantomData)
    }
}

/// An event descriptor.
pub struct Waker(usize);

impl Waker {
    pub fn new() -> io::Result<Waker> {
        Ok(Waker(system().change(State::descriptor)))
    }

    pub fn wake(&self) {
        system().change(|state| state.readable[self.0] = true);
    }

    pub fn clear(&self) {
        system().change(|state| state.readable[self.0] = false);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        BorrowedFd(self.0, PhantomData)
    }
}

/// The wake-ups of rings.
pub struct WakeSet(Waker);

impl WakeSet {
    pub fn new() -> io::Result<WakeSet> {
        Ok(WakeSet(Waker(RINGS)))
    }

    pub fn add(&self, _: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    pub fn clear(&self) {
        self.0.clear();
    }
}

#[derive(Clone, Copy, Default)]
pub struct Ready(u32);

impl Ready {
    pub fn readable(self, index: usize) -> bool {
        self.0 & 1 << index != 0
    }

    pub fn error(self, _: usize) -> bool {
        false
    }
}

/// Blocks until a descriptor is readable. A wait with a timeout looks a few times and returns: it never blocks for ever, so
/// that only a wait without one can miss its wake-up.
pub fn poll_readable(descriptors: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<Ready> {
    let system = system();
    let mut state = system.state.lock().unwrap();
    for look in 0.. {
        let is_readable = |state: &State, descriptor: &BorrowedFd<'_>| match descriptor.0 {
            ROCE => !state.socket.is_empty(),
            other => state.readable[other],
        };
        let bits = descriptors.iter().enumerate();
        let ready = bits.fold(0, |bits, (index, at)| bits | u32::from(is_readable(&state, at)) << index);
        if ready != 0 {
            return Ok(Ready(ready));
        }
        state = match timeout {
            None => system.changed.wait(state).unwrap(),
            Some(timeout) if look == LOOKS => {
                state.nanos += timeout.as_nanos() as u64;
                return Ok(Ready(0));
            }
            Some(_) => {
                drop(state);
                shuttle::thread::yield_now();
                system.state.lock().unwrap()
            }
        };
    }
    unreachable!("the loop ends by returning")
}

pub use poll_readable as wait_readable;

pub struct Driver {
    timer: Option<(u64, Effect)>,
    polled_at: u64,
}

pub struct Time(u64);

impl Time {
    pub fn nanos(&self) -> u64 {
        self.0
    }
}

/// An HCA without ACKs.
pub struct Hca;

impl Hca {
    pub fn has_orphaned_acks(&self) -> bool {
        false
    }
}

impl Driver {
    pub fn new() -> Driver {
        Driver { timer: None, polled_at: 0 }
    }

    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [ROCE, LINK].map(|index| BorrowedFd(index, PhantomData))
    }

    pub fn set_wake_set(&mut self, _: Arc<WakeSet>) -> io::Result<()> {
        Ok(())
    }

    pub fn address(&self) -> &'static str {
        "model"
    }

    pub fn started(&self) -> Instant {
        Instant::START
    }

    pub fn polled_at(&self) -> Time {
        Time(self.polled_at)
    }

    pub fn hca(&self) -> Hca {
        Hca
    }

    pub fn close(&mut self, _: [BorrowedFd<'_>; 2]) -> io::Result<()> {
        Ok(())
    }

    pub fn has_delayed_packets(&self) -> bool {
        false
    }

    pub fn has_pending_transmit(&self) -> bool {
        false
    }

    pub fn on_socket_error(&mut self) {}

    pub fn set_asleep(&mut self, is_asleep: bool) {
        system().change(|state| state.is_asleep = is_asleep);
    }

    pub fn has_packets_in_rings(&self) -> bool {
        system().change(|state| !state.ring.is_empty())
    }

    pub fn has_rings(&self) -> bool {
        true
    }

    pub fn are_sockets_quiet(&self) -> bool {
        thread_rng().r#gen()
    }

    pub fn next_deadline(&self) -> Option<Time> {
        self.timer.map(|(at, _)| Time(at))
    }

    pub fn next_timeout(&self) -> Option<Duration> {
        self.timer.map(|(at, _)| Duration::from_nanos(at.saturating_sub(now())))
    }

    pub fn poll(&mut self) -> io::Result<bool> {
        self.poll_step(true)
    }

    pub fn poll_without_sockets(&mut self) -> io::Result<bool> {
        self.poll_step(false)
    }

    /// Processes doorbells, the ring, a random number of datagrams, and the timer, each at another moment.
    fn poll_step(&mut self, reads_sockets: bool) -> io::Result<bool> {
        let system = system();
        self.polled_at = now();
        let mut packets = system.change(|state| std::mem::take(&mut state.ring));
        packets.extend(system.change(|state| std::mem::take(&mut state.doorbells)));
        packets.extend(system.change(|state| {
            let count = thread_rng().gen_range(0..=state.socket.len()).max(1).min(state.socket.len());
            state.socket.drain(..if reads_sockets { count } else { 0 }).collect::<Vec<_>>()
        }));
        for packet in &packets {
            let due = match packet.is_delayed {
                // One timer at a time: the earlier one expires now.
                true => self
                    .timer
                    .replace((now() + TIMER.as_nanos() as u64, packet.effect))
                    .map(|(_, earlier)| earlier),
                false => Some(packet.effect),
            };
            due.into_iter().for_each(|effect| system.change(|state| state.apply(effect)));
        }
        let now = now();
        if let Some((_, effect)) = self.timer.take_if(|(at, _)| *at <= now) {
            system.change(|state| state.apply(effect));
        }
        Ok(!packets.is_empty())
    }

    pub fn poll_and_acknowledge(&mut self) -> io::Result<bool> {
        self.poll()
    }
}

pub fn request_short_time_slices() {}

/// The one process of the model.
pub struct ProcessIdentity;

impl ProcessIdentity {
    pub fn current() -> ProcessIdentity {
        ProcessIdentity
    }

    pub fn is_current(&self) -> bool {
        true
    }
}

pub struct SignalsBlocked;

impl SignalsBlocked {
    pub fn begin() -> SignalsBlocked {
        SignalsBlocked
    }
}

/// The interface of `parking_lot` over shuttle's mutex.
pub struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    pub fn new(value: T) -> Lock<T> {
        Lock(Mutex::new(value))
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        Guard(self.0.lock().unwrap())
    }

    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock().ok().map(Guard)
    }

    pub fn try_lock_for(&self, _: Duration) -> Option<MutexGuard<'_, T>> {
        self.try_lock()
    }

    pub fn try_lock_until(&self, _: Instant) -> Option<MutexGuard<'_, T>> {
        self.try_lock()
    }
}

pub struct Guard<'a, T>(shuttle::sync::MutexGuard<'a, T>);

impl<T> Guard<'_, T> {
    pub fn unlock_fair(guard: Self) {
        drop(guard);
        shuttle::thread::yield_now();
    }
}

impl<T> std::ops::Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> std::ops::DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}
