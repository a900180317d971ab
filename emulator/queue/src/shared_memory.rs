//! Memory that two processes share.
//!
//! The memory is a memfd that is sealed against shrinking, so that an access to a mapping cannot fail.

#![allow(unsafe_code)]

use crate::{MemoryBlock, SharedWords};
use core::ptr::NonNull;
use core::sync::atomic::AtomicU64;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

/// The file system type of a memfd in `fstatfs`.
const TMPFS: u64 = 0x0102_1994;

/// How memory is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapMode {
    /// For reading.
    ReadOnly,
    /// For reading and writing.
    ReadWrite,
}

/// A mapping of memory that another process may map as well.
pub struct SharedMemory {
    base: NonNull<u8>,
    length: usize,
    mode: MapMode,
    /// `None` once it is passed to the other process: descriptors are scarce.
    descriptor: Mutex<Option<OwnedFd>>,
}

// SAFETY: any thread may access the mapping, which it does through atomics and copies only.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates `length` zeroed bytes, which the other process maps in the mode `others`. /proc shows `name`.
    pub fn create(name: &str, length: usize, others: MapMode) -> io::Result<SharedMemory> {
        let descriptor = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&descriptor, length.max(1) as u64)?;
        let base = map(&descriptor, length, ProtFlags::READ | ProtFlags::WRITE)?;
        let memory = SharedMemory { base, length, mode: MapMode::ReadWrite, descriptor: Mutex::new(None) };
        let mut seals = SealFlags::SHRINK | SealFlags::GROW;
        if others == MapMode::ReadOnly {
            seals |= SealFlags::FUTURE_WRITE;
        }
        rustix::fs::fcntl_add_seals(&descriptor, seals)?;
        rustix::fs::fcntl_add_seals(&descriptor, SealFlags::SEAL)?;
        *memory.descriptor.lock().expect("no panic under the lock") = Some(descriptor);
        Ok(memory)
    }

    /// Maps a memfd of another process, if it is sealed against shrinking and has at least `length` bytes.
    pub fn adopt(descriptor: OwnedFd, length: usize, mode: MapMode) -> io::Result<SharedMemory> {
        let invalid = |reason: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        let seals = rustix::fs::fcntl_get_seals(&descriptor);
        if !seals.is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            return invalid("the descriptor is not a memfd sealed with F_SEAL_SHRINK");
        }
        // A hole can free huge pages, which may then run out: an access would kill this process.
        if rustix::fs::fstatfs(&descriptor)?.f_type as u64 != TMPFS {
            return invalid("the descriptor is a memfd of huge pages");
        }
        if (rustix::fs::fstat(&descriptor)?.st_size as u64) < length as u64 {
            return invalid("the memfd is shorter than the memory region");
        }
        let protection = match mode {
            MapMode::ReadOnly => ProtFlags::READ,
            MapMode::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        let base = map(&descriptor, length, protection)?;
        Ok(SharedMemory { base, length, mode, descriptor: Mutex::new(None) })
    }

    /// The descriptor to pass to the other process. Returns it once.
    pub fn take_descriptor(&self) -> Option<OwnedFd> {
        self.descriptor.lock().expect("no panic under the lock").take()
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether the memory has no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// `count` words starting at word `first`. They must not be written if the mapping is read-only.
    ///
    /// # Panics
    /// If the memory is too short.
    pub fn words(self: &Arc<Self>, first: usize, count: usize) -> SharedWords {
        let end = first.checked_add(count).and_then(|end| end.checked_mul(8));
        assert!(
            end.is_some_and(|end| end <= self.length),
            "{count} words at {first} of {} bytes",
            self.length
        );
        // SAFETY: the words are inside the mapping, which starts on a page and which `self` keeps.
        unsafe { SharedWords::mapped(self.base.cast::<AtomicU64>().add(first), count, self.clone()) }
    }

    /// The whole memory as the block of a memory region.
    pub fn block(self: &Arc<Self>) -> MemoryBlock {
        let writable = self.mode == MapMode::ReadWrite;
        // SAFETY: the bytes are those of the mapping, which `self` keeps.
        unsafe { MemoryBlock::mapped(self.base, self.length, writable, self.clone()) }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length; every user holds `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length.max(1)) };
    }
}

fn map(descriptor: &OwnedFd, length: usize, protection: ProtFlags) -> io::Result<NonNull<u8>> {
    // SAFETY: a new mapping at an address that the kernel chooses.
    let base = unsafe {
        rustix::mm::mmap(
            core::ptr::null_mut(),
            length.max(1),
            protection,
            MapFlags::SHARED,
            descriptor.as_fd(),
            0,
        )?
    };
    NonNull::new(base.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::Ordering;

    #[test]
    fn memory_that_can_shrink_is_an_error() {
        let descriptor = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&descriptor, 4096).unwrap();
        assert!(SharedMemory::adopt(descriptor, 4096, MapMode::ReadWrite).is_err());
    }

    #[test]
    fn memory_that_is_too_short_is_an_error() {
        let memory = SharedMemory::create("test", 4096, MapMode::ReadWrite).unwrap();
        let descriptor = memory.take_descriptor().unwrap();
        assert!(SharedMemory::adopt(descriptor, 4097, MapMode::ReadWrite).is_err());
    }

    #[test]
    fn read_only_memory_can_be_read_and_not_written() {
        let memory = Arc::new(SharedMemory::create("test", 64, MapMode::ReadOnly).unwrap());
        let descriptor = memory.take_descriptor().unwrap();
        let copy = descriptor.try_clone().unwrap();
        assert!(SharedMemory::adopt(copy, 64, MapMode::ReadWrite).is_err());
        let other = Arc::new(SharedMemory::adopt(descriptor, 64, MapMode::ReadOnly).unwrap());
        memory.words(1, 1)[0].store(7, Ordering::Release);
        assert_eq!(other.words(0, 8)[1].load(Ordering::Acquire), 7);
    }
}
