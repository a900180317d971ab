//! Memory that two processes have, and waking across them.
//!
//! It is a memfd that cannot shrink, so that no access to a mapping of it can fail, whatever the other side does.

#![allow(unsafe_code)]

use crate::{MemoryBlock, SharedWords};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The file system of memory files, as `fstatfs` tells it.
const TMPFS: u64 = 0x0102_1994;

/// What the other side may do with memory that is passed to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapMode {
    /// Read it.
    ReadOnly,
    /// Read and write it.
    ReadWrite,
}

/// A mapping of memory that another process may map too.
pub struct SharedMemory {
    base: NonNull<u8>,
    length: usize,
    /// Until it was passed on: descriptors are scarce.
    descriptor: Mutex<Option<OwnedFd>>,
}

// SAFETY: the mapping is only reached through atomics and copies, from any thread.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// `length` zeroed bytes. `name` is what /proc shows.
    pub fn create(name: &str, length: usize, others: MapMode) -> io::Result<SharedMemory> {
        let descriptor = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&descriptor, length.max(1) as u64)?;
        let base = map(&descriptor, length, ProtFlags::READ | ProtFlags::WRITE)?;
        let memory = SharedMemory { base, length, descriptor: Mutex::new(None) };
        let mut seals = SealFlags::SHRINK | SealFlags::GROW;
        if others == MapMode::ReadOnly {
            seals |= SealFlags::FUTURE_WRITE;
        }
        rustix::fs::fcntl_add_seals(&descriptor, seals)?;
        rustix::fs::fcntl_add_seals(&descriptor, SealFlags::SEAL)?;
        *memory.descriptor.lock().expect("no panic under the lock") = Some(descriptor);
        Ok(memory)
    }

    /// Maps what somebody else created, if it can be trusted to stay: a memory file, sealed against shrinking,
    /// with at least `length` bytes.
    pub fn adopt(descriptor: OwnedFd, length: usize, rights: MapMode) -> io::Result<SharedMemory> {
        let refuse = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        let seals = rustix::fs::fcntl_get_seals(&descriptor);
        if !seals.is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            return refuse("the descriptor is not a memory file sealed with F_SEAL_SHRINK");
        }
        // Huge pages can be taken back by a hole, and then run out: an access would end the process.
        if rustix::fs::fstatfs(&descriptor)?.f_type as u64 != TMPFS {
            return refuse("the descriptor is not a memory file of plain pages");
        }
        if (rustix::fs::fstat(&descriptor)?.st_size as u64) < length as u64 {
            return refuse("the memory file is shorter than the region");
        }
        let protection = match rights {
            MapMode::ReadOnly => ProtFlags::READ,
            MapMode::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        let base = map(&descriptor, length, protection)?;
        Ok(SharedMemory { base, length, descriptor: Mutex::new(None) })
    }

    /// The descriptor to pass to the other side: once.
    pub fn take_descriptor(&self) -> Option<OwnedFd> {
        self.descriptor.lock().expect("no panic under the lock").take()
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// `count` words from the word `first` on. If it was adopted to be read, they must not be written.
    ///
    /// # Panics
    /// If there are not as many.
    pub fn words(self: &Arc<Self>, first: usize, count: usize) -> SharedWords {
        let end = first.checked_add(count).and_then(|end| end.checked_mul(8));
        assert!(
            end.is_some_and(|end| end <= self.length),
            "{count} words at {first} of {} bytes",
            self.length
        );
        // SAFETY: the words are inside of the mapping, which begins on a page and which `self` keeps.
        unsafe { SharedWords::mapped(self.base.cast::<AtomicU64>().add(first), count, self.clone()) }
    }

    /// All of it, as the memory behind a region.
    pub fn block(self: &Arc<Self>) -> MemoryBlock {
        // SAFETY: the bytes are those of the mapping, which `self` keeps.
        unsafe { MemoryBlock::mapped(self.base, self.length, self.clone()) }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length; whoever uses it holds `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length.max(1)) };
    }
}

fn map(descriptor: &OwnedFd, length: usize, protection: ProtFlags) -> io::Result<NonNull<u8>> {
    // SAFETY: a new mapping at a place that the kernel chooses.
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

/// The half of a word that a futex looks at: the one that changes with every step.
fn futex_word(word: &AtomicU64) -> &AtomicU32 {
    let at = core::ptr::from_ref(word).cast::<AtomicU32>();
    // SAFETY: a half of an atomic word, aligned, for as long as the word; both are only accessed as atomics.
    unsafe { &*at.add(usize::from(cfg!(target_endian = "big"))) }
}

/// Sleeps until somebody wakes the word, unless it no longer is `expected`, and at most for `timeout`.
pub fn futex_wait(word: &AtomicU64, expected: u64, timeout: Duration) {
    use rustix::thread::futex;
    let timeout =
        futex::Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    // Whatever ends it, the caller looks again.
    let _ = futex::wait(futex_word(word), futex::Flags::empty(), expected as u32, Some(&timeout));
}

/// Wakes everybody who sleeps on the word, in any process.
pub fn futex_wake_all(word: &AtomicU64) {
    let _ =
        rustix::thread::futex::wake(futex_word(word), rustix::thread::futex::Flags::empty(), i32::MAX as u32);
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::Ordering;

    #[test]
    fn memory_that_could_shrink_is_refused() {
        let descriptor = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&descriptor, 4096).unwrap();
        assert!(SharedMemory::adopt(descriptor, 4096, MapMode::ReadWrite).is_err());
    }

    #[test]
    fn memory_that_is_too_short_is_refused() {
        let memory = SharedMemory::create("test", 4096, MapMode::ReadWrite).unwrap();
        let descriptor = memory.take_descriptor().unwrap();
        assert!(SharedMemory::adopt(descriptor, 4097, MapMode::ReadWrite).is_err());
    }

    #[test]
    fn what_one_side_writes_the_other_reads_and_only_reads() {
        let memory = Arc::new(SharedMemory::create("test", 64, MapMode::ReadOnly).unwrap());
        let descriptor = memory.take_descriptor().unwrap();
        let again = descriptor.try_clone().unwrap();
        assert!(SharedMemory::adopt(again, 64, MapMode::ReadWrite).is_err());
        let other = Arc::new(SharedMemory::adopt(descriptor, 64, MapMode::ReadOnly).unwrap());
        memory.words(1, 1)[0].store(7, Ordering::Release);
        assert_eq!(other.words(0, 8)[1].load(Ordering::Acquire), 7);
    }

    #[test]
    fn a_sleeper_is_woken_or_its_time_is_over() {
        let word = Arc::new(AtomicU64::new(0));
        futex_wait(&word, 1, Duration::from_secs(60));
        futex_wait(&word, 0, Duration::from_micros(50));
        let waker = std::thread::spawn({
            let word = word.clone();
            move || {
                word.store(1, Ordering::SeqCst);
                futex_wake_all(&word);
            }
        });
        while word.load(Ordering::SeqCst) == 0 {
            futex_wait(&word, 0, Duration::from_secs(60));
        }
        waker.join().unwrap();
    }
}
