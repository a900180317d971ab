//! Waking whoever waits: threads, tasks.

use parking_lot::{Condvar, Mutex};
use std::task::Waker;
use std::time::{Duration, Instant};

/// A counter of things that happened, for any number of waiters.
#[derive(Default)]
pub(crate) struct Notifier {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    count: u64,
    wakers: Vec<Waker>,
}

impl Notifier {
    /// Something happened.
    pub fn notify(&self) {
        let mut state = self.state.lock();
        state.count += 1;
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        self.changed.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// How often something happened so far.
    pub fn count(&self) -> u64 {
        self.state.lock().count
    }

    /// Sleeps until something has happened since `seen`. False if the time was over first.
    pub fn wait(&self, seen: u64, timeout: Option<Duration>) -> bool {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.state.lock();
        while state.count == seen {
            match deadline {
                None => self.changed.wait(&mut state),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left == Duration::ZERO || self.changed.wait_for(&mut state, left).timed_out() {
                        return state.count != seen;
                    }
                }
            }
        }
        true
    }

    /// Has `waker` called when something has happened since `seen`. False if it has already.
    pub fn register(&self, seen: u64, waker: &Waker) -> bool {
        let mut state = self.state.lock();
        if state.count != seen {
            return false;
        }
        if !state.wakers.iter().any(|known| known.will_wake(waker)) {
            state.wakers.push(waker.clone());
        }
        true
    }
}
