//! Process-wide state that the child of a fork replaces.
//!
//! A thread of the parent may hold the lock at the time of the fork; the child does not have that thread. Handlers of a
//! fork hold no lock, because handlers of the program run between them and may call verbs. So the child never uses
//! the parent's state: it leaves it as it is, and begins with new state behind a new lock.

#![allow(unsafe_code)]

use parking_lot::{Mutex, MutexGuard};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

pub(super) struct ForkSafe<T: 'static>(AtomicPtr<Mutex<T>>);

impl<T: Default> ForkSafe<T> {
    pub const fn new() -> ForkSafe<T> {
        ForkSafe(AtomicPtr::new(null_mut()))
    }

    pub fn lock(&self) -> MutexGuard<'static, T> {
        let mut state = self.0.load(Ordering::Acquire);
        if state.is_null() {
            let new = Box::into_raw(Box::default());
            match self.0.compare_exchange(null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => state = new,
                Err(other) => {
                    // SAFETY: just made, and not published.
                    drop(unsafe { Box::from_raw(new) });
                    state = other;
                }
            }
        }
        // SAFETY: published state is never freed.
        unsafe { &*state }.lock()
    }

    /// Begins with new state, in the only thread of a child. The old state is not freed.
    pub fn replace(&self) {
        self.0.store(null_mut(), Ordering::Release);
    }
}
