//! The memory behind memory regions, as the HCA accesses it.

use alloc::vec::Vec;
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

/// Memory objects by identifier. The identifier of a removed object is used again.
pub struct MemoryObjects<T> {
    objects: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for MemoryObjects<T> {
    fn default() -> MemoryObjects<T> {
        MemoryObjects { objects: Vec::new(), free: Vec::new() }
    }
}

impl<T> MemoryObjects<T> {
    /// Adds an object.
    pub fn add(&mut self, object: T) -> MemoryId {
        let index = self.free.pop().unwrap_or(self.objects.len() as u32);
        self.objects.resize_with(self.objects.len().max(index as usize + 1), || None);
        self.objects[index as usize] = Some(object);
        MemoryId(index)
    }

    /// Removes an object.
    pub fn remove(&mut self, memory: MemoryId) -> Option<T> {
        let removed = self.objects.get_mut(memory.0 as usize)?.take()?;
        self.free.push(memory.0);
        Some(removed)
    }

    /// The object with this identifier.
    pub fn get(&self, memory: MemoryId) -> Result<&T, MemoryFault> {
        self.objects.get(memory.0 as usize).and_then(Option::as_ref).ok_or(MemoryFault)
    }
}
