//! Locks, atomics, threads, time and descriptors of the wait protocol. A test replaces them with models, to run the protocol
//! in many interleavings (`tests/wait_protocol`).

pub(crate) use parking_lot::{Mutex, MutexGuard};
pub(crate) use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
pub(crate) use std::thread::{Builder, JoinHandle};
pub(crate) use std::time::Instant;
