//! The memory behind regions.

#[cfg(all(feature = "sockets", target_os = "linux"))]
mod fault_handler;

use crate::Error;
#[cfg(all(feature = "sockets", target_os = "linux"))]
pub(crate) use fault_handler::install as install_fault_handler;
pub(crate) use softhca_queue::MemoryBlock;
use softhca_types::Errno;
use std::io;
use std::sync::Arc;

/// Allocates a zeroed block.
pub(crate) fn allocate(length: usize) -> Result<Arc<MemoryBlock>, Error> {
    let missing = || Error::System {
        what: "memory of a region",
        source: io::Error::from_raw_os_error(Errno::ENOMEM.0),
    };
    MemoryBlock::try_new(length).map(Arc::new).ok_or_else(missing)
}
