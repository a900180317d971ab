//! Waits until a descriptor is ready, a timeout expires, or another thread calls a waker.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// The most descriptors in one [`wait_readable`].
const MAX_DESCRIPTORS: usize = 32;

/// The ready descriptors of a [`wait_readable`], by their index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    readable: u32,
    error: u32,
}

impl Ready {
    /// Whether the timeout expired, or a signal arrived, with no descriptor ready.
    pub fn is_empty(self) -> bool {
        self.readable | self.error == 0
    }

    /// Whether the descriptor at `index` is readable.
    pub fn readable(self, index: usize) -> bool {
        self.readable & 1 << index != 0
    }

    /// Whether the descriptor at `index` has a pending error.
    pub fn error(self, index: usize) -> bool {
        self.error & 1 << index != 0
    }
}

/// Waits until a descriptor is readable or has an error, at most for `timeout` if given. A signal ends it early, with
/// no descriptor ready.
///
/// # Panics
/// With more than 32 descriptors.
pub fn wait_readable(descriptors: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<Ready> {
    match poll_readable(descriptors, timeout) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Ready::default()),
        other => other,
    }
}

/// As [`wait_readable`], but fails if a signal arrives.
pub fn poll_readable(descriptors: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<Ready> {
    assert!(descriptors.len() <= MAX_DESCRIPTORS, "at most 32 descriptors");
    let mut polled = [libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; MAX_DESCRIPTORS];
    for (slot, descriptor) in polled.iter_mut().zip(descriptors) {
        slot.fd = descriptor.as_raw_fd();
    }
    poll(&mut polled[..descriptors.len()], timeout)?;
    let mut ready = Ready::default();
    for (index, slot) in polled[..descriptors.len()].iter().enumerate() {
        ready.readable |= u32::from(slot.revents & libc::POLLIN != 0) << index;
        ready.error |=
            u32::from(slot.revents & (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) != 0) << index;
    }
    Ok(ready)
}

/// Waits until `descriptor` is writable, at most for `timeout` if given. Returns whether it is.
pub fn wait_writable(descriptor: BorrowedFd<'_>, timeout: Option<Duration>) -> io::Result<bool> {
    let mut polled = [libc::pollfd { fd: descriptor.as_raw_fd(), events: libc::POLLOUT, revents: 0 }];
    match poll(&mut polled, timeout) {
        Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
        _ => Ok(polled[0].revents & libc::POLLOUT != 0),
    }
}

#[cfg(target_os = "linux")]
fn poll(polled: &mut [libc::pollfd], timeout: Option<Duration>) -> io::Result<()> {
    let limit = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    });
    let limit = limit.as_ref().map_or(std::ptr::null(), |limit| limit as *const _);
    // SAFETY: `polled` and `limit` outlive the call, and the length is that of `polled`.
    check(unsafe { libc::ppoll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, limit, std::ptr::null()) })
}

#[cfg(not(target_os = "linux"))]
fn poll(polled: &mut [libc::pollfd], timeout: Option<Duration>) -> io::Result<()> {
    let limit = timeout
        .map_or(-1, |timeout| timeout.as_nanos().div_ceil(1_000_000).try_into().unwrap_or(libc::c_int::MAX));
    // SAFETY: `polled` outlives the call, and the length is its own.
    check(unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, limit) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Ends a [`wait_readable`] of another thread.
#[derive(Debug)]
pub struct Waker {
    reader: File,
    /// The other end of a pipe. An eventfd has one descriptor for both.
    #[cfg(not(target_os = "linux"))]
    writer: File,
}

impl Waker {
    /// A new waker.
    #[cfg(target_os = "linux")]
    pub fn new() -> io::Result<Waker> {
        // SAFETY: no pointers; the result is checked.
        let descriptor = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        check(descriptor)?;
        // SAFETY: the descriptor is new and has no other owner.
        Ok(Waker { reader: unsafe { File::from_raw_fd(descriptor) } })
    }

    /// A new waker.
    #[cfg(not(target_os = "linux"))]
    pub fn new() -> io::Result<Waker> {
        let mut ends = [-1; 2];
        // SAFETY: `ends` has space for two descriptors.
        check(unsafe { libc::pipe(ends.as_mut_ptr()) })?;
        // SAFETY: both descriptors are new and have no other owner.
        let [reader, writer] = ends.map(|end| unsafe { File::from_raw_fd(end) });
        for end in [&reader, &writer] {
            // SAFETY: no pointers.
            check(unsafe { libc::fcntl(end.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) })?;
            // SAFETY: no pointers.
            check(unsafe { libc::fcntl(end.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) })?;
        }
        Ok(Waker { reader, writer })
    }

    /// Makes the descriptor readable until it is cleared.
    pub fn wake(&self) {
        #[cfg(target_os = "linux")]
        let mut writer = &self.reader;
        #[cfg(not(target_os = "linux"))]
        let mut writer = &self.writer;
        // A full counter or pipe is already readable.
        let _ = writer.write(&1u64.to_ne_bytes());
    }

    /// Discards all calls so far.
    pub fn clear(&self) {
        let mut calls = [0; 512];
        while matches!((&self.reader).read(&mut calls), Ok(512)) {}
    }
}

/// The descriptor that becomes readable.
impl From<Waker> for OwnedFd {
    fn from(waker: Waker) -> OwnedFd {
        waker.reader.into()
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }
}
