//! The memory behind regions, by the numbers that a card knows it by.

#[cfg(target_os = "linux")]
mod library_threads;
#[cfg(target_os = "linux")]
mod mappings;
#[cfg(target_os = "linux")]
mod page_sharing;

#[cfg(target_os = "linux")]
pub(crate) use {library_threads::spawn as spawn_bystander, page_sharing::RegisteredRange};

use softhca_engine::{AtomicOperation, Memory, MemoryFault, MemoryId};
pub(crate) use softhca_queue::MemoryBlock;
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
