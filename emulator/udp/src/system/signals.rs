//! Threads of the library take none of the program's signals.

use std::{mem, ptr};

/// Signals of an instruction, which the thread that executes it must handle.
const SYNCHRONOUS: [libc::c_int; 5] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP];

/// Blocks the signals of the calling thread, and of the threads that it starts, until it is dropped.
pub struct SignalsBlocked(libc::sigset_t);

impl SignalsBlocked {
    /// Blocks them.
    pub fn begin() -> SignalsBlocked {
        // SAFETY: a set of signals is plain bits, filled here; the previous mask is stored in another.
        unsafe {
            let mut blocked: libc::sigset_t = mem::zeroed();
            let mut previous: libc::sigset_t = mem::zeroed();
            libc::sigfillset(&mut blocked);
            for signal in SYNCHRONOUS {
                libc::sigdelset(&mut blocked, signal);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &blocked, &mut previous);
            SignalsBlocked(previous)
        }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: the mask that the thread had.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, ptr::null_mut()) };
    }
}
