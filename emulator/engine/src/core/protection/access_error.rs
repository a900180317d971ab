//! The reasons for denying access to memory.

use softhca_types::AccessFlags;
use thiserror::Error;

/// The reason for denying access to memory.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum AccessError {
    #[error("no memory region has key {key:#x}")]
    UnknownKey { key: u32 },
    #[error("key {key:#x} is stale: the current key is {current:#x}")]
    StaleKey { key: u32, current: u32 },
    #[error("key {key:#x} is invalidated")]
    Invalidated { key: u32 },
    #[error("key {key:#x} belongs to another protection domain")]
    PdMismatch { key: u32 },
    #[error("memory window {key:#x} is bound: a type 2 window must be invalidated before the next bind")]
    AlreadyBound { key: u32 },
    #[error("memory window {key:#x} is bound to another queue pair")]
    QpMismatch { key: u32 },
    #[error("{length} bytes at {address:#x} are outside {base:#x}+{size} (key {key:#x})")]
    OutOfBounds { key: u32, address: u64, length: u64, base: u64, size: u64 },
    #[error("key {key:#x} allows {}; the access requires {}", FlagNames(*granted), FlagNames(*required))]
    InsufficientAccess { key: u32, granted: AccessFlags, required: AccessFlags },
    #[error("the queue pair allows {}; the access requires {}", FlagNames(*granted), FlagNames(*required))]
    QueuePairAccess { granted: AccessFlags, required: AccessFlags },
    #[error("key {key:#x} is a memory window: local access requires a memory region")]
    NotAMemoryRegion { key: u32 },
    #[error("the memory behind key {key:#x} is inaccessible")]
    Unreachable { key: u32 },
}

/// Formats access flags by name.
struct FlagNames(AccessFlags);

impl core::fmt::Display for FlagNames {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        if self.0.is_empty() {
            return f.write_str("nothing");
        }
        for (index, (name, _)) in self.0.iter_names().enumerate() {
            write!(f, "{}{name}", if index == 0 { "" } else { " and " })?;
        }
        Ok(())
    }
}
