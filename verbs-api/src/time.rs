//! Time, virtual in a [`World`](crate::sim::World) and real elsewhere.

use crate::executor::{Executor, WaitReason, record_wait_reason};
use crate::real_clock::real_now;
use parking_lot::{Condvar, Mutex};
use softhca_engine::Instant;
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Once};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// The time: virtual in the code of a `World`, where it stands still between awaits, and real elsewhere.
///
/// It counts from the start of the world, or from an arbitrary moment in the life of the process.
pub fn now() -> Instant {
    Executor::current().map_or_else(real_now, |executor| executor.now())
}

/// Waits for `duration`: in virtual time in the code of a `World`, in real time under any runtime.
pub fn sleep(duration: Duration) -> Sleep {
    Sleep { until: now().plus(duration), registered: None }
}

/// The future of [`sleep`].
#[must_use = "futures do nothing unless awaited"]
#[derive(Debug)]
pub struct Sleep {
    until: Instant,
    registered: Option<Waker>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if now() >= self.until {
            return Poll::Ready(());
        }
        if !self.registered.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            self.registered = Some(context.waker().clone());
            match Executor::current() {
                Some(executor) => executor.wake_at(self.until, context.waker().clone()),
                None => TimerThread::wake_at(self.until, context.waker().clone()),
            }
        }
        record_wait_reason(|| WaitReason::Sleep(self.until));
        Poll::Pending
    }
}

/// Waits for a future for at most `duration`: its value, or `None` when the time is over.
///
/// ```
/// use std::time::Duration;
/// let never = std::future::pending::<()>();
/// assert_eq!(softhca::block_on(softhca::timeout(Duration::from_millis(1), never)), None);
/// ```
pub async fn timeout<T>(duration: Duration, future: impl Future<Output = T>) -> Option<T> {
    let (mut future, mut sleep) = (pin!(future), pin!(sleep(duration)));
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(value) => Poll::Ready(Some(value)),
        Poll::Pending => sleep.as_mut().poll(context).map(|()| None),
    })
    .await
}

/// A thread that wakes sleepers of runtimes that are not ours.
#[derive(Default)]
struct TimerThread {
    wakers: Mutex<BTreeMap<(Instant, u64), Waker>>,
    serial: AtomicU64,
    changed: Condvar,
}

impl TimerThread {
    fn wake_at(at: Instant, waker: Waker) {
        static TIMERS: LazyLock<TimerThread> = LazyLock::new(TimerThread::default);
        static THREAD: Once = Once::new();
        THREAD.call_once(|| {
            let thread = std::thread::Builder::new().name("softhca-timer".into());
            thread.spawn(|| TIMERS.run()).expect("a thread for timers");
        });
        let serial = TIMERS.serial.fetch_add(1, Ordering::Relaxed);
        TIMERS.wakers.lock().insert((at, serial), waker);
        TIMERS.changed.notify_one();
    }

    fn run(&self) -> ! {
        let mut wakers = self.wakers.lock();
        loop {
            let later = wakers.split_off(&(real_now(), u64::MAX));
            let due = std::mem::replace(&mut *wakers, later);
            parking_lot::MutexGuard::unlocked(&mut wakers, || due.into_values().for_each(Waker::wake));
            match wakers.keys().next() {
                None => self.changed.wait(&mut wakers),
                Some((at, _)) => {
                    let timeout = at.since(real_now());
                    self.changed.wait_for(&mut wakers, timeout);
                }
            }
        }
    }
}
