//! The executor behind [`World::run`](crate::sim::World::run) and [`block_on`]: one thread, one queue of woken
//! tasks in the order in which they were woken. Nothing here knows of cards.

use crate::real_clock::real_now;
use parking_lot::{Condvar, Mutex};
use softhca_engine::{CqId, Instant};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::future::{Future, poll_fn};
use std::hash::{BuildHasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

/// Empty polls that code in a world may make without an await.
const MAX_EMPTY_POLLS: u32 = 10_000;

thread_local! {
    static CURRENT: RefCell<Option<Rc<Executor>>> = const { RefCell::new(None) };
}

/// The reason why a task waits. The message of a [deadlock](crate::sim::FailureCause::Deadlock) lists it for each host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitReason {
    /// A completion on this queue.
    Completion(CqId),
    /// An event on a completion channel.
    ChannelEvent,
    /// An event of connection management.
    CmEvent,
    /// An asynchronous event of the device.
    AsyncEvent,
    /// A value under this name in the [`EndpointExchange`](crate::EndpointExchange).
    PublishedValue(String),
    /// The end of a sleep.
    Sleep(Instant),
    /// The end of another task.
    Task,
    /// Any event, after [`yield_now`].
    AnyEvent,
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WaitReason::Completion(cq) => write!(f, "a completion on queue {:#x}", cq.0),
            WaitReason::ChannelEvent => f.write_str("an event on a completion channel"),
            WaitReason::CmEvent => f.write_str("an event of connection management"),
            WaitReason::AsyncEvent => f.write_str("an asynchronous event"),
            WaitReason::PublishedValue(name) => write!(f, "somebody to publish {name:?}"),
            WaitReason::Sleep(until) => write!(f, "the time {until:?}"),
            WaitReason::Task => f.write_str("another task"),
            WaitReason::AnyEvent => f.write_str("anything to happen"),
        }
    }
}

/// The source of the executor's time.
enum Clock {
    Real,
    Virtual(Cell<Instant>),
}

struct Task {
    group: usize,
    future: Pin<Box<dyn Future<Output = ()>>>,
    wait_reasons: Vec<WaitReason>,
}

/// Tasks that were woken and not polled yet.
#[derive(Default)]
struct ReadyQueue {
    tasks: Mutex<VecDeque<u64>>,
    available: Condvar,
}

struct TaskWaker {
    task: u64,
    queued: AtomicBool,
    ready: Arc<ReadyQueue>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::AcqRel) {
            self.ready.tasks.lock().push_back(self.task);
            self.ready.available.notify_one();
        }
    }
}

/// A panic of a task.
pub(crate) struct TaskPanic {
    pub group: usize,
    pub payload: Box<dyn Any + Send>,
}

impl TaskPanic {
    pub fn message(&self) -> String {
        let text = self.payload.downcast_ref::<&str>().map(|text| text.to_string());
        text.or_else(|| self.payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".into())
    }
}

/// Runs tasks on the thread that it is on. Tasks are in groups: the hosts of a world.
pub(crate) struct Executor {
    clock: Clock,
    seed: u64,
    tasks: RefCell<BTreeMap<u64, Task>>,
    wakers: RefCell<BTreeMap<u64, Arc<TaskWaker>>>,
    next_task: Cell<u64>,
    ready: Arc<ReadyQueue>,
    timers: RefCell<BTreeMap<(Instant, u64), Waker>>,
    timer_serial: Cell<u64>,
    /// Tasks that wait for anything to happen.
    yielded: RefCell<Vec<Waker>>,
    group: Cell<usize>,
    wait_reasons: RefCell<Vec<WaitReason>>,
    empty_polls: Cell<u32>,
    /// How many generators each group was given.
    rng_streams: RefCell<BTreeMap<usize, u64>>,
}

impl Executor {
    fn new(clock: Clock, seed: u64) -> Rc<Executor> {
        Rc::new(Executor {
            clock,
            seed,
            tasks: RefCell::default(),
            wakers: RefCell::default(),
            next_task: Cell::new(0),
            ready: Arc::default(),
            timers: RefCell::default(),
            timer_serial: Cell::new(0),
            yielded: RefCell::default(),
            group: Cell::new(0),
            wait_reasons: RefCell::default(),
            empty_polls: Cell::new(0),
            rng_streams: RefCell::default(),
        })
    }

    /// One whose time [`Executor::set_now`] sets.
    pub fn in_virtual_time(seed: u64) -> Rc<Executor> {
        Executor::new(Clock::Virtual(Cell::new(Instant::ZERO)), seed)
    }

    /// The executor of the task that calls.
    pub fn current() -> Option<Rc<Executor>> {
        CURRENT.with_borrow(Option::clone)
    }

    /// Calls `act` as code of this executor.
    pub fn enter<R>(self: &Rc<Self>, act: impl FnOnce() -> R) -> R {
        struct Restore(Option<Rc<Executor>>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.set(self.0.take());
            }
        }
        let _restore = Restore(CURRENT.replace(Some(self.clone())));
        act()
    }

    /// The group of the task that ran last.
    pub fn group(&self) -> usize {
        self.group.get()
    }

    pub fn is_virtual(&self) -> bool {
        matches!(self.clock, Clock::Virtual(_))
    }

    pub fn now(&self) -> Instant {
        match &self.clock {
            Clock::Real => real_now(),
            Clock::Virtual(now) => now.get(),
        }
    }

    pub fn set_now(&self, now: Instant) {
        if let Clock::Virtual(clock) = &self.clock {
            clock.set(now);
        }
    }

    /// The seed, the group of the task that calls, and how often it was asked before.
    pub fn next_rng_stream(&self) -> [u64; 3] {
        let group = self.group.get();
        let mut generators = self.rng_streams.borrow_mut();
        let count = generators.entry(group).or_default();
        *count += 1;
        [self.seed, group as u64, *count]
    }

    /// Adds a task to a group.
    pub fn spawn_in(&self, group: usize, future: impl Future<Output = ()> + 'static) {
        let id = self.next_task.get();
        self.next_task.set(id + 1);
        let waker = TaskWaker { task: id, queued: AtomicBool::new(false), ready: self.ready.clone() };
        let waker = Arc::new(waker);
        self.tasks
            .borrow_mut()
            .insert(id, Task { group, future: Box::pin(future), wait_reasons: Vec::new() });
        self.wakers.borrow_mut().insert(id, waker.clone());
        waker.wake();
    }

    /// Polls the task that was woken first. Says whether there was one.
    pub fn poll_one(self: &Rc<Self>) -> Result<bool, TaskPanic> {
        let Some(id) = self.ready.tasks.lock().pop_front() else { return Ok(false) };
        let Some(waker) = self.wakers.borrow().get(&id).cloned() else { return Ok(true) };
        waker.queued.store(false, Ordering::Release);
        let Some(mut task) = self.tasks.borrow_mut().remove(&id) else { return Ok(true) };
        self.group.set(task.group);
        self.empty_polls.set(0);
        self.wait_reasons.borrow_mut().clear();
        let waker = Waker::from(waker);
        let mut context = Context::from_waker(&waker);
        let polled = self.enter(|| {
            let poll = catch_unwind(AssertUnwindSafe(|| task.future.as_mut().poll(&mut context)));
            match poll {
                Ok(Poll::Pending) => Ok(Some(task)),
                Ok(Poll::Ready(())) => {
                    drop(task);
                    Ok(None)
                }
                Err(payload) => Err(TaskPanic { group: task.group, payload }),
            }
        });
        match polled? {
            Some(mut task) => {
                task.wait_reasons = self.wait_reasons.take();
                self.tasks.borrow_mut().insert(id, task);
            }
            None => {
                self.wakers.borrow_mut().remove(&id);
            }
        }
        Ok(true)
    }

    /// The reasons why the tasks of a group wait.
    pub fn wait_reasons(&self, group: usize) -> Vec<WaitReason> {
        let tasks = self.tasks.borrow();
        tasks.values().filter(|task| task.group == group).flat_map(|task| task.wait_reasons.clone()).collect()
    }

    /// Notes what the running task waits for.
    pub fn record_wait(&self, wait: WaitReason) {
        self.wait_reasons.borrow_mut().push(wait);
    }

    /// Notes that the running task looked for something in vain.
    ///
    /// # Panics
    /// In virtual time, when it did so too often: time stands still while code runs.
    pub fn count_empty_poll(&self) {
        let polls = self.empty_polls.get() + 1;
        self.empty_polls.set(polls);
        assert!(
            !self.is_virtual() || polls < MAX_EMPTY_POLLS,
            "{MAX_EMPTY_POLLS} empty polls without an await: in a World time stands still while code runs, \
             so nothing can complete. Use `queue.next().await`, or `softhca::yield_now().await` between polls"
        );
    }

    pub fn wake_at(&self, at: Instant, waker: Waker) {
        let serial = self.timer_serial.get();
        self.timer_serial.set(serial + 1);
        self.timers.borrow_mut().insert((at, serial), waker);
    }

    pub fn next_timer(&self) -> Option<Instant> {
        self.timers.borrow().keys().next().map(|(at, _)| *at)
    }

    /// Wakes the tasks whose time has come.
    pub fn fire_timers(&self) {
        let later = self.timers.borrow_mut().split_off(&(self.now(), u64::MAX));
        let due = self.timers.replace(later);
        due.into_values().for_each(Waker::wake);
    }

    /// Has the running task woken when anything happens.
    fn wake_on_next_event(&self, waker: &Waker) {
        match self.is_virtual() {
            true => self.yielded.borrow_mut().push(waker.clone()),
            false => waker.wake_by_ref(),
        }
    }

    /// Wakes the tasks that wait for anything to happen.
    pub fn wake_yielded(&self) {
        self.yielded.take().into_iter().for_each(Waker::wake);
    }
}

/// Notes what the running task waits for.
pub(crate) fn record_wait_reason(wait: impl FnOnce() -> WaitReason) {
    if let Some(executor) = Executor::current().filter(|executor| executor.is_virtual()) {
        executor.record_wait(wait());
    }
}

/// Runs a future to its end on this thread, in real time. Tasks that it [`spawn`]s end with it.
///
/// ```
/// use std::time::Duration;
/// let sum = softhca::block_on(async {
///     let task = softhca::spawn(async { 20 });
///     softhca::sleep(Duration::from_millis(1)).await;
///     task.await + 22
/// });
/// assert_eq!(sum, 42);
/// ```
///
/// # Panics
/// Inside of `block_on` or of a `World`: await the future instead. If a task panics.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    assert!(Executor::current().is_none(), "block_on inside of async code: await the future instead");
    let executor = Executor::new(Clock::Real, RandomState::new().hash_one(0));
    let main =
        Arc::new(TaskWaker { task: u64::MAX, queued: AtomicBool::new(false), ready: executor.ready.clone() });
    let waker = Waker::from(main.clone());
    let mut future = pin!(future);
    waker.wake_by_ref();
    loop {
        if main.queued.swap(false, Ordering::AcqRel)
            && let Poll::Ready(value) =
                executor.enter(|| future.as_mut().poll(&mut Context::from_waker(&waker)))
        {
            return value;
        }
        match executor.poll_one() {
            Ok(true) => continue,
            Ok(false) => {}
            Err(panicked) => resume_unwind(panicked.payload),
        }
        executor.fire_timers();
        let mut woken = executor.ready.tasks.lock();
        if woken.is_empty() {
            let timeout = executor.next_timer().map(|at| at.since(real_now()));
            executor.ready.available.wait_for(&mut woken, timeout.unwrap_or(Duration::from_secs(3600)));
        }
    }
}

struct JoinState<T> {
    value: Option<T>,
    waker: Option<Waker>,
    /// The task is gone, with or without a value.
    ended: bool,
}

/// Ends a task, even if it panics or its runtime drops it.
struct TaskEnd<T>(Arc<Mutex<JoinState<T>>>);

impl<T> Drop for TaskEnd<T> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.ended = true;
        state.waker.take().into_iter().for_each(Waker::wake);
    }
}

/// A spawned task: a future of its result. The task continues when this is dropped.
///
/// # Panics
/// When polled after the task panicked or its runtime was shut down.
pub struct JoinHandle<T> {
    state: Arc<Mutex<JoinState<T>>>,
}

impl<T> Future for JoinHandle<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut joint = self.state.lock();
        match joint.value.take() {
            Some(value) => Poll::Ready(value),
            None if joint.ended => {
                panic!("the task ended without a value: it panicked, or its runtime is gone")
            }
            None => {
                joint.waker = Some(context.waker().clone());
                record_wait_reason(|| WaitReason::Task);
                Poll::Pending
            }
        }
    }
}

/// Runs a future concurrently with the caller: on the same host of a `World`, or within the same [`block_on`].
///
/// # Panics
/// Outside of both. Under tokio use `spawn_send` (feature `tokio`) or tokio's own.
pub fn spawn<T: 'static>(future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
    let executor = Executor::current();
    let executor = executor.expect("spawn needs a World's host code or block_on around it");
    let (handle, task) = joinable(future);
    executor.spawn_in(executor.group.get(), task);
    handle
}

/// Runs a future concurrently with the caller. It runs on the same host of a `World`, within the same [`block_on`], or
/// as a task of the current tokio runtime. Code that uses it runs on all three.
///
/// # Panics
/// Outside of all three.
#[cfg(feature = "tokio")]
pub fn spawn_send<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    match Executor::current() {
        Some(_) => spawn(future),
        None => {
            let (handle, task) = joinable(future);
            tokio::spawn(task);
            handle
        }
    }
}

/// A future that leaves its value to a handle.
fn joinable<T>(future: impl Future<Output = T>) -> (JoinHandle<T>, impl Future<Output = ()>) {
    let state = Arc::new(Mutex::new(JoinState { value: None, waker: None, ended: false }));
    let end = TaskEnd(state.clone());
    let task = async move {
        let value = future.await;
        end.0.lock().value = Some(value);
    };
    (JoinHandle { state }, task)
}

/// Lets other tasks run. In a `World` it returns after the next event, so that a loop that polls makes progress.
pub async fn yield_now() {
    let mut yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        record_wait_reason(|| WaitReason::AnyEvent);
        match Executor::current() {
            Some(executor) => executor.wake_on_next_event(context.waker()),
            None => context.waker().wake_by_ref(),
        }
        Poll::Pending
    })
    .await;
}
