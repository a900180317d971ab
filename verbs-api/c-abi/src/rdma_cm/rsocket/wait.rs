//! Waiting for descriptors of sockets and of the program, while the caller drives a card.

use crate::errno::Rejection;
use core::ffi::c_int;
use softhca::Context;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Blocks until one of the entries is ready or the time is over, or returns early. The caller drives the first card; the
/// threads of the others drive those.
pub fn block(
    contexts: &[Context],
    mut polled: Vec<libc::pollfd>,
    others: &mut [libc::pollfd],
    timeout: Option<Duration>,
) -> Result<(), Rejection> {
    let is_used = |other: &&libc::pollfd| other.fd >= 0;
    let of_sockets = polled.len();
    polled.extend(others.iter().filter(is_used));
    let is_read = |entry: &libc::pollfd| entry.events == libc::POLLIN;
    let may_drive = polled.iter().all(is_read) && polled.len() <= Context::MAX_DESCRIPTORS;
    if let Some((context, of_threads)) = contexts.split_first().filter(|_| may_drive) {
        of_threads.iter().for_each(Context::hand_over);
        // SAFETY: the sockets, which the caller holds, own theirs. The program's descriptors are only passed to `poll`,
        // which reports a descriptor that is not open.
        let borrow = |entry: &libc::pollfd| unsafe { BorrowedFd::borrow_raw(entry.fd) };
        let descriptors: Vec<BorrowedFd<'_>> = polled.iter().map(borrow).collect();
        context.wait_readable(&descriptors, timeout).map_err(|error| wait_failed(&error))?;
        return look(others);
    }
    contexts.iter().for_each(Context::hand_over);
    poll_descriptors(&mut polled, timeout)?;
    for (other, entry) in others.iter_mut().filter(|other| other.fd >= 0).zip(&polled[of_sockets..]) {
        other.revents = entry.revents;
    }
    Ok(())
}

/// Looks which descriptors of the program are ready.
pub fn look(others: &mut [libc::pollfd]) -> Result<(), Rejection> {
    match others.iter().any(|other| other.fd >= 0) {
        true => poll_descriptors(others, Some(Duration::ZERO)),
        false => Ok(()),
    }
}

fn poll_descriptors(entries: &mut [libc::pollfd], timeout: Option<Duration>) -> Result<(), Rejection> {
    let milliseconds =
        timeout.map_or(-1, |time| c_int::try_from(time.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX));
    // SAFETY: the entries are those of the caller.
    match unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, milliseconds) } {
        ..0 => Err(wait_failed(&std::io::Error::last_os_error())),
        _ => Ok(()),
    }
}

fn wait_failed(error: &std::io::Error) -> Rejection {
    Rejection::system(error, "waiting for a socket")
}
