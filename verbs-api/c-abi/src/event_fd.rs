//! Descriptors that programs poll and set to non-blocking, like those of the kernel.

use core::ffi::c_int;
use std::os::fd::AsRawFd;

/// A descriptor that is readable while `inner` is, with flags of its own: programs set O_NONBLOCK on it.
pub fn create(inner: &impl AsRawFd) -> Result<c_int, c_int> {
    let last = || std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    // SAFETY: no pointers.
    let outer = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    if outer < 0 {
        return Err(last());
    }
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
    // SAFETY: both descriptors are open, and the event is local.
    if unsafe { libc::epoll_ctl(outer, libc::EPOLL_CTL_ADD, inner.as_raw_fd(), &mut event) } < 0 {
        let code = last();
        // SAFETY: it was created above.
        unsafe { libc::close(outer) };
        return Err(code);
    }
    Ok(outer)
}

/// Returns what `take` finds, waiting on `descriptor` unless that is non-blocking.
pub fn wait<T>(descriptor: c_int, mut take: impl FnMut() -> Option<T>) -> Result<T, c_int> {
    loop {
        if let Some(taken) = take() {
            return Ok(taken);
        }
        // SAFETY: no pointers.
        let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFL) };
        if flags < 0 {
            return Err(libc::EBADF);
        }
        if flags & libc::O_NONBLOCK != 0 {
            return Err(libc::EAGAIN);
        }
        let mut polled = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
        // SAFETY: one local entry.
        if unsafe { libc::poll(&mut polled, 1, -1) } < 0 {
            return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
        }
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
