//! The memory behind registered regions, as the card reaches it.

pub use softhca_queue::{Atomic, MemoryFault};

/// A piece of memory that the driver knows by this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemoryId(pub u32);

/// Reads and writes the memory behind regions. Ranges were checked against the region before.
///
/// Of a write, the last bytes (up to eight) become visible after all others.
pub trait Memory {
    /// Fills `into` with the bytes at `offset`.
    fn read(&self, memory: MemoryId, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault>;

    /// Stores `from` at `offset`.
    fn write(&mut self, memory: MemoryId, offset: u64, from: &[u8]) -> Result<(), MemoryFault>;

    /// Changes the aligned eight bytes at `offset` and returns what they were.
    fn atomic(&mut self, memory: MemoryId, offset: u64, operation: Atomic) -> Result<u64, MemoryFault>;
}
