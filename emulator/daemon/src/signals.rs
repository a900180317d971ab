//! Being told to end.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// SIGINT and SIGTERM as a descriptor that becomes readable.
pub struct Signals {
    descriptor: OwnedFd,
}

impl Signals {
    /// Takes both signals for the whole process: call it before any thread starts.
    pub fn take() -> io::Result<Signals> {
        // SAFETY: an all-zero set is valid memory for `sigemptyset` to fill.
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: `set` outlives the calls; the numbers are signals.
        let descriptor = unsafe {
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, libc::SIGINT);
            libc::sigaddset(&mut set, libc::SIGTERM);
            if libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
            libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and belongs to nobody else.
        Ok(Signals { descriptor: unsafe { OwnedFd::from_raw_fd(descriptor) } })
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}
