//! A descriptor that a task can wait for.

use std::io;
use std::os::fd::OwnedFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Lets tasks wait for an event of a descriptor. Must be called on the runtime.
#[allow(unsafe_code)]
pub(crate) fn register(descriptor: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is open, and stays open and the same because the `AsyncFd` owns it.
    Ok(unsafe { AsyncFd::register_with_interest(descriptor, interest) }?)
}

/// A descriptor whose readability is an event: a pidfd or a signalfd.
pub(crate) struct ReadableFd(AsyncFd<OwnedFd>);

impl ReadableFd {
    /// Must be called on the runtime.
    pub fn new(descriptor: OwnedFd) -> io::Result<ReadableFd> {
        register(descriptor, Interest::READABLE).map(ReadableFd)
    }

    pub async fn readable(&self) {
        let _ = self.0.readable().await;
    }
}
