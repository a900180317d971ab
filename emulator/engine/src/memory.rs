//! The memory behind memory regions, as the HCA accesses it.

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
