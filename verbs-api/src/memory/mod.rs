//! The memory behind regions, by the numbers that a card knows it by.

#[cfg(all(feature = "sockets", target_os = "linux"))]
mod fork_safe;
#[cfg(all(feature = "sockets", target_os = "linux"))]
mod library_threads;
#[cfg(all(feature = "sockets", target_os = "linux"))]
mod mappings;
#[cfg(feature = "sockets")]
mod memory_table;
#[cfg(all(feature = "sockets", target_os = "linux"))]
mod page_sharing;

#[cfg(all(feature = "sockets", target_os = "linux"))]
use fork_safe::ForkSafe;
#[cfg(all(feature = "sockets", target_os = "linux"))]
pub(crate) use {library_threads::spawn as spawn_bystander, page_sharing::RegisteredRange};

#[cfg(feature = "sockets")]
pub(crate) use memory_table::MemoryTable;
use softhca_engine::{AtomicOperation, Memory, MemoryFault, MemoryId};
pub(crate) use softhca_queue::MemoryBlock;
use std::sync::Arc;

/// A block that a world's host has adopted.
pub(crate) struct AdoptedBlock(pub Arc<MemoryBlock>);

impl Memory for AdoptedBlock {
    fn read(&self, _: MemoryId, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        self.0.read(offset, into)
    }

    fn write(&mut self, _: MemoryId, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        self.0.write(offset, from)
    }

    fn atomic(&mut self, _: MemoryId, offset: u64, operation: AtomicOperation) -> Result<u64, MemoryFault> {
        self.0.atomic(offset, operation)
    }
}
