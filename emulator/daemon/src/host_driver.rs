//! The driver of a host.

use softhca_udp::{Driver, SharedDriver};
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// How long a task waits for a driver before it lets another thread run the other tasks.
const BUSY_LIMIT: Duration = Duration::from_millis(1);

/// The driver of a host, for use by tasks.
pub(crate) struct HostDriver(pub SharedDriver);

impl HostDriver {
    /// Calls `act` with the driver. The driver is busy for long only if a client stalls the host; then another thread
    /// takes over the other tasks of this one.
    pub fn control<R>(&self, act: impl FnOnce(&mut Driver) -> R) -> R {
        match self.0.try_control(BUSY_LIMIT, act) {
            Ok(result) => result,
            Err(act) => tokio::task::block_in_place(|| self.0.control(act)),
        }
    }

    /// Lets an eventfd wake the engine thread, as long as it is open in any process.
    pub fn add_wake_source(&self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.0.add_wake_source(descriptor)
    }
}
