//! The memory behind regions, by the numbers that a card knows it by.

#[cfg(target_os = "linux")]
mod bystanders;
#[cfg(target_os = "linux")]
mod in_place;
#[cfg(target_os = "linux")]
mod mappings;

#[cfg(target_os = "linux")]
pub(crate) use {bystanders::spawn as spawn_bystander, in_place::Tenure};

use softhca_engine::{Atomic, Memory, MemoryFault, MemoryId};
pub(crate) use softhca_queue::Block;
use std::sync::Arc;

/// The blocks that a card knows by number.
#[derive(Default)]
pub(crate) struct HostMemory {
    blocks: Vec<Option<Arc<Block>>>,
    free: Vec<u32>,
}

impl HostMemory {
    pub fn add(&mut self, block: Arc<Block>) -> MemoryId {
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

    fn block(&self, memory: MemoryId) -> Result<&Block, MemoryFault> {
        self.blocks.get(memory.0 as usize).and_then(Option::as_deref).ok_or(MemoryFault)
    }
}

impl Memory for HostMemory {
    fn read(&self, memory: MemoryId, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        self.block(memory)?.read(offset, into)
    }

    fn write(&mut self, memory: MemoryId, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        self.block(memory)?.write(offset, from)
    }

    fn atomic(&mut self, memory: MemoryId, offset: u64, operation: Atomic) -> Result<u64, MemoryFault> {
        self.block(memory)?.atomic(offset, operation)
    }
}

/// A block that a world's host has adopted.
pub(crate) struct Adopted(pub Arc<Block>);

impl Memory for Adopted {
    fn read(&self, _: MemoryId, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        self.0.read(offset, into)
    }

    fn write(&mut self, _: MemoryId, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        self.0.write(offset, from)
    }

    fn atomic(&mut self, _: MemoryId, offset: u64, operation: Atomic) -> Result<u64, MemoryFault> {
        self.0.atomic(offset, operation)
    }
}
