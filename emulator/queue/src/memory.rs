//! Operations on the memory of an application.

use thiserror::Error;

/// The memory is not accessible: it is no longer mapped, or its owner has exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the memory of the region is not accessible")]
pub struct MemoryFault;

/// An atomic operation on eight bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the operands of the operations of that name")]
pub enum AtomicOperation {
    CompareSwap { compare: u64, swap: u64 },
    FetchAdd { add: u64 },
}

impl AtomicOperation {
    /// The value that replaces `old`.
    pub const fn apply(self, old: u64) -> u64 {
        match self {
            AtomicOperation::CompareSwap { compare, swap } if old == compare => swap,
            AtomicOperation::CompareSwap { .. } => old,
            AtomicOperation::FetchAdd { add } => old.wrapping_add(add),
        }
    }
}
