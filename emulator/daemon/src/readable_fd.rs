//! A descriptor that a task can wait for.

use std::io;
use std::os::fd::OwnedFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A descriptor whose readability is an event: a pidfd or a signalfd.
pub(crate) struct ReadableFd(AsyncFd<OwnedFd>);

impl ReadableFd {
    /// Must be called on the runtime.
    #[allow(unsafe_code)]
    pub fn new(descriptor: OwnedFd) -> io::Result<ReadableFd> {
        // SAFETY: the descriptor is open, and stays open and the same because the `AsyncFd` owns it.
        let registered = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) };
        Ok(ReadableFd(registered?))
    }

    pub async fn readable(&self) {
        let _ = self.0.readable().await;
    }
}
