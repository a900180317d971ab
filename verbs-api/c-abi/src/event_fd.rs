//! Descriptors that programs poll and set to non-blocking, like those of the kernel.

use crate::errno::Rejection;
use core::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// A descriptor that is readable while `inner` is, with flags of its own: programs set O_NONBLOCK on it.
pub fn create(inner: &impl AsRawFd) -> Result<c_int, Rejection> {
    create_for_any(&[inner.as_raw_fd()])
}

/// Creates a descriptor that is readable while one of several descriptors is.
pub fn create_for_any(inner: &[c_int]) -> Result<c_int, Rejection> {
    let last = || Rejection::system(&io::Error::last_os_error(), "creating an event descriptor");
    // SAFETY: no pointers.
    let outer = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    if outer < 0 {
        return Err(last());
    }
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
    for descriptor in inner {
        // SAFETY: both descriptors are open, and the event is local.
        if unsafe { libc::epoll_ctl(outer, libc::EPOLL_CTL_ADD, *descriptor, &mut event) } < 0 {
            let failed = last();
            // SAFETY: it was created above.
            unsafe { libc::close(outer) };
            return Err(failed);
        }
    }
    Ok(outer)
}

/// Returns what `take` finds, waiting on `descriptor` unless that is non-blocking.
pub fn wait<T>(descriptor: c_int, take: impl FnMut() -> Option<T>) -> Result<T, Rejection> {
    wait_with(descriptor, poll_readable, take)
}

fn poll_readable(descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let mut polled = libc::pollfd { fd: descriptor.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one local entry.
    let result = unsafe { libc::poll(&mut polled, 1, -1) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// As [`wait`], where `block` waits until the descriptor may be readable.
pub fn wait_with<T>(
    descriptor: c_int,
    block: impl Fn(BorrowedFd<'_>) -> io::Result<()>,
    mut take: impl FnMut() -> Option<T>,
) -> Result<T, Rejection> {
    loop {
        if let Some(taken) = take() {
            return Ok(taken);
        }
        // SAFETY: no pointers.
        let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFL) };
        if flags < 0 {
            return Err(Rejection::system(&io::Error::last_os_error(), "the event descriptor"));
        }
        if flags & libc::O_NONBLOCK != 0 {
            return Err(Rejection::would_block());
        }
        // SAFETY: its flags were just read. A program that closes it meanwhile waits on another file, as in the kernel.
        let waited = block(unsafe { BorrowedFd::borrow_raw(descriptor) });
        waited.map_err(|error| Rejection::system(&error, "waiting for an event"))?;
    }
}

/// Closes a descriptor of [`create`].
pub fn close(descriptor: c_int) {
    // SAFETY: the descriptor belongs to this library and has no other user.
    unsafe { libc::close(descriptor) };
}

/// A descriptor without content.
pub fn null_fd() -> c_int {
    // SAFETY: a constant string.
    unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) }
}
