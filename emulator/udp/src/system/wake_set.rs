//! Event descriptors that other processes write, as one descriptor to sleep on.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// A set of event descriptors, each heard once per write. Nobody who has one of them can silence another.
#[derive(Debug)]
pub(crate) struct WakeSet {
    set: OwnedFd,
}

impl WakeSet {
    pub fn new() -> io::Result<WakeSet> {
        // SAFETY: no pointers; the result is checked.
        let set = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if set < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and belongs to nobody else.
        Ok(WakeSet { set: unsafe { OwnedFd::from_raw_fd(set) } })
    }

    /// Adds one. It leaves the set when its last copy anywhere is closed.
    pub fn add(&self, bell: BorrowedFd<'_>) -> io::Result<()> {
        // Edge triggered: every write is heard, and nobody has to read.
        let mut event = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: 0 };
        let (set, bell) = (self.set.as_raw_fd(), bell.as_raw_fd());
        // SAFETY: `event` outlives the call.
        match unsafe { libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, bell, &mut event) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Forgets all writes so far.
    pub fn clear(&self) {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        // SAFETY: `events` has as much room as is said.
        while unsafe { libc::epoll_wait(self.set.as_raw_fd(), events.as_mut_ptr(), 64, 0) } == 64 {}
    }
}

impl AsFd for WakeSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}
