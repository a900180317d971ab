//! The memory behind registered regions, as the card reaches it.

use thiserror::Error;

/// A piece of memory that the driver knows by this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemoryId(pub u32);

/// The memory could not be reached: it is no longer mapped, or its owner has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the memory behind the region cannot be reached")]
pub struct MemoryFault;

/// An operation on eight bytes that nobody else may interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the operands of the operations of that name")]
pub enum Atomic {
    CompareSwap { compare: u64, swap: u64 },
    FetchAdd { add: u64 },
}

impl Atomic {
    /// The value to store where `old` was found.
    pub const fn apply(self, old: u64) -> u64 {
        match self {
            Atomic::CompareSwap { compare, swap } if old == compare => swap,
            Atomic::CompareSwap { .. } => old,
            Atomic::FetchAdd { add } => old.wrapping_add(add),
        }
    }
}

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
