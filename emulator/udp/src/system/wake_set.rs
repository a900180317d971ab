//! Event descriptors that other processes write, combined into one descriptor to wait on.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// A set of event descriptors. Every write wakes once, and no owner of a descriptor can suppress another.
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
        // SAFETY: the descriptor is new and has no other owner.
        Ok(WakeSet { set: unsafe { OwnedFd::from_raw_fd(set) } })
    }

    /// Adds a descriptor. It leaves the set when its last copy in any process is closed.
    pub fn add(&self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        // Edge triggered: every write wakes, and no reader is needed.
        let mut event = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: 0 };
        let (set, descriptor) = (self.set.as_raw_fd(), descriptor.as_raw_fd());
        // SAFETY: `event` outlives the call.
        match unsafe { libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, descriptor, &mut event) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Discards all writes so far.
    pub fn clear(&self) {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        // SAFETY: `events` has space for 64 entries.
        while unsafe { libc::epoll_wait(self.set.as_raw_fd(), events.as_mut_ptr(), 64, 0) } == 64 {}
    }
}

impl AsFd for WakeSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}
