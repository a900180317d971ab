//! The memory behind memory regions, as the HCA accesses it.

use alloc::sync::Arc;
use alloc::vec::Vec;
use softhca_queue::MemoryBlock;
pub use softhca_queue::{AtomicOperation, MemoryFault};

/// The driver's identifier of a memory object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemoryId(pub u32);

/// Accesses the memory behind memory regions. The caller has checked all ranges against the region.
///
/// The last bytes of a write (up to eight) become visible after all others.
pub trait Memory {
    /// Reads the bytes at `offset` into `into`.
    fn read(&self, memory: MemoryId, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault>;

    /// Writes `from` at `offset`.
    fn write(&mut self, memory: MemoryId, offset: u64, from: &[u8]) -> Result<(), MemoryFault>;

    /// Executes an atomic operation on the aligned eight bytes at `offset` and returns their original value.
    fn atomic(
        &mut self,
        memory: MemoryId,
        offset: u64,
        operation: AtomicOperation,
    ) -> Result<u64, MemoryFault>;
}

/// The memory of regions, by identifier. The identifier of removed memory is used again.
#[derive(Default)]
pub struct MemoryObjects {
    objects: Vec<Option<Arc<MemoryBlock>>>,
    free: Vec<u32>,
}

impl MemoryObjects {
    /// Adds memory.
    pub fn add(&mut self, block: Arc<MemoryBlock>) -> MemoryId {
        let index = self.free.pop().unwrap_or(self.objects.len() as u32);
        self.objects.resize_with(self.objects.len().max(index as usize + 1), || None);
        self.objects[index as usize] = Some(block);
        MemoryId(index)
    }

    /// Removes memory that no region uses any more.
    pub fn remove(&mut self, memory: MemoryId) -> Option<Arc<MemoryBlock>> {
        let removed = self.unmap(memory)?;
        self.free.push(memory.0);
        Some(removed)
    }

    /// Unmaps the memory of a region: later accesses fault. The identifier is not used again.
    pub fn unmap(&mut self, memory: MemoryId) -> Option<Arc<MemoryBlock>> {
        self.objects.get_mut(memory.0 as usize)?.take()
    }

    /// The memory with this identifier.
    pub fn get(&self, memory: MemoryId) -> Result<&Arc<MemoryBlock>, MemoryFault> {
        self.objects.get(memory.0 as usize).and_then(Option::as_ref).ok_or(MemoryFault)
    }
}

impl Memory for MemoryObjects {
    fn read(&self, memory: MemoryId, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        self.get(memory)?.read(offset, into)
    }

    fn write(&mut self, memory: MemoryId, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        self.get(memory)?.write(offset, from)
    }

    fn atomic(
        &mut self,
        memory: MemoryId,
        offset: u64,
        operation: AtomicOperation,
    ) -> Result<u64, MemoryFault> {
        self.get(memory)?.atomic(offset, operation)
    }
}
