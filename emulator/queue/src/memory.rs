//! What a card does to the memory of an application.

use thiserror::Error;

/// The memory could not be reached: it is no longer mapped, or its owner has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the memory behind the region cannot be reached")]
pub struct MemoryFault;

/// An operation on eight bytes that nobody else may interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the operands of the operations of that name")]
pub enum AtomicOperation {
    CompareSwap { compare: u64, swap: u64 },
    FetchAdd { add: u64 },
}

impl AtomicOperation {
    /// The value to store where `old` was found.
    pub const fn apply(self, old: u64) -> u64 {
        match self {
            AtomicOperation::CompareSwap { compare, swap } if old == compare => swap,
            AtomicOperation::CompareSwap { .. } => old,
            AtomicOperation::FetchAdd { add } => old.wrapping_add(add),
        }
    }
}
