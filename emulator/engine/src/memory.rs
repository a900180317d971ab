//! The memory behind memory regions, as the HCA accesses it.

pub use softhca_queue::{AtomicOperation, MemoryFault};

/// The driver's identifier of a memory object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemoryId(pub u32);

/// A range of bytes in a memory object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLocation {
    /// The memory object.
    pub memory: MemoryId,
    /// The offset of the first byte.
    pub offset: u64,
    /// The number of bytes.
    pub length: usize,
}

/// Accesses the memory behind memory regions. The caller has checked all ranges against the region.
///
/// The last bytes of a write (up to eight) become visible after all others.
pub trait Memory {
    /// Reads the bytes at `offset` into `into`.
    fn read(&self, memory: MemoryId, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault>;

    /// Writes `from` at `offset`.
    fn write(&mut self, memory: MemoryId, offset: u64, from: &[u8]) -> Result<(), MemoryFault>;

    /// Whether every access is so expensive that the caller should combine the accesses of several packets.
    fn prefers_batches(&self) -> bool {
        false
    }

    /// Reads the payload of several packets: each of `places` to `into`, `stride` bytes apart. Returns false if that
    /// is no cheaper than separate reads, or if a part is inaccessible; the content of `into` is then undefined.
    fn read_batch(&self, places: &[MemoryLocation], into: &mut [u8], stride: usize) -> bool {
        let _ = (places, into, stride);
        false
    }

    /// Writes the payload of several packets in order, each like [`Memory::write`]. Returns the number of writes,
    /// from the first; zero if that is no cheaper than separate writes.
    fn write_batch(&mut self, places: &[MemoryLocation], from: &[&[u8]]) -> usize {
        let _ = (places, from);
        0
    }

    /// Executes an atomic operation on the aligned eight bytes at `offset` and returns their original value.
    fn atomic(
        &mut self,
        memory: MemoryId,
        offset: u64,
        operation: AtomicOperation,
    ) -> Result<u64, MemoryFault>;
}
