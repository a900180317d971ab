//! The memory behind registered regions, as the card reaches it.

pub use softhca_queue::{AtomicOperation, MemoryFault};

/// A piece of memory that the driver knows by this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemoryId(pub u32);

/// Bytes in a piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLocation {
    /// The memory.
    pub memory: MemoryId,
    /// Where they begin.
    pub offset: u64,
    /// How many they are.
    pub length: usize,
}

/// Reads and writes the memory behind regions. Ranges were checked against the region before.
///
/// Of a write, the last bytes (up to eight) become visible after all others.
pub trait Memory {
    /// Fills `into` with the bytes at `offset`.
    fn read(&self, memory: MemoryId, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault>;

    /// Stores `from` at `offset`.
    fn write(&mut self, memory: MemoryId, offset: u64, from: &[u8]) -> Result<(), MemoryFault>;

    /// Whether every access costs so much by itself that those of several packets are worth bringing together.
    fn prefers_batches(&self) -> bool {
        false
    }

    /// Reads what several packets carry: each of `places` into `into`, `stride` bytes behind the one before. False if
    /// that is no cheaper than [`Memory::read`] for each, or if not all of it can be reached; `into` holds anything then.
    fn read_batch(&self, places: &[MemoryLocation], into: &mut [u8], stride: usize) -> bool {
        let _ = (places, into, stride);
        false
    }

    /// Stores what several packets carried, a place for each: each as [`Memory::write`] does, and after those before
    /// it. Returns how many were stored, from the first: none if that is no cheaper.
    fn write_batch(&mut self, places: &[MemoryLocation], from: &[&[u8]]) -> usize {
        let _ = (places, from);
        0
    }

    /// Changes the aligned eight bytes at `offset` and returns what they were.
    fn atomic(
        &mut self,
        memory: MemoryId,
        offset: u64,
        operation: AtomicOperation,
    ) -> Result<u64, MemoryFault>;
}
