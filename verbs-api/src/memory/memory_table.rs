//! The memory of embedded devices, by number.

use softhca_engine::{AtomicOperation, Memory, MemoryFault, MemoryId, MemoryObjects};
use softhca_queue::MemoryBlock;
use std::sync::Arc;

/// The blocks that a card knows by number.
#[derive(Default)]
pub(crate) struct MemoryTable(pub MemoryObjects<Arc<MemoryBlock>>);

impl Memory for MemoryTable {
    fn read(&self, memory: MemoryId, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        self.0.get(memory)?.read(offset, into)
    }

    fn write(&mut self, memory: MemoryId, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        self.0.get(memory)?.write(offset, from)
    }

    fn atomic(
        &mut self,
        memory: MemoryId,
        offset: u64,
        operation: AtomicOperation,
    ) -> Result<u64, MemoryFault> {
        self.0.get(memory)?.atomic(offset, operation)
    }
}
