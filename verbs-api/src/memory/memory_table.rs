//! The memory of embedded devices, by number.

use softhca_engine::{AtomicOperation, Memory, MemoryFault, MemoryId};
use softhca_queue::MemoryBlock;
use std::sync::Arc;

/// The blocks that a card knows by number.
#[derive(Default)]
pub(crate) struct MemoryTable {
    blocks: Vec<Option<Arc<MemoryBlock>>>,
    free: Vec<u32>,
}

impl MemoryTable {
    pub fn add(&mut self, block: Arc<MemoryBlock>) -> MemoryId {
        match self.free.pop() {
            Some(index) => {
                self.blocks[index as usize] = Some(block);
                MemoryId(index)
            }
            None => {
                self.blocks.push(Some(block));
                MemoryId(self.blocks.len() as u32 - 1)
            }
        }
    }

    pub fn remove(&mut self, memory: MemoryId) {
        if let Some(block) = self.blocks.get_mut(memory.0 as usize)
            && block.take().is_some()
        {
            self.free.push(memory.0);
        }
    }

    fn block(&self, memory: MemoryId) -> Result<&MemoryBlock, MemoryFault> {
        self.blocks.get(memory.0 as usize).and_then(Option::as_deref).ok_or(MemoryFault)
    }
}

impl Memory for MemoryTable {
    fn read(&self, memory: MemoryId, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        self.block(memory)?.read(offset, into)
    }

    fn write(&mut self, memory: MemoryId, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        self.block(memory)?.write(offset, from)
    }

    fn atomic(
        &mut self,
        memory: MemoryId,
        offset: u64,
        operation: AtomicOperation,
    ) -> Result<u64, MemoryFault> {
        self.block(memory)?.atomic(offset, operation)
    }
}
