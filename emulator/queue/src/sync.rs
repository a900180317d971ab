//! The atomics of rings and doorbells: those of loom where it explores all their interleavings (`tests/loom.rs`).

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};
