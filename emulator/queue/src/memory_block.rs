//! The bytes of a memory region, which the HCA and the application may change at the same time.
//!
//! The crate never creates a reference to such memory. It copies through raw pointers, in functions that the
//! compiler cannot inline, as a device driver does with memory that it shares with hardware.

#![allow(unsafe_code)]

use crate::{AtomicOperation, MemoryFault};
use alloc::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use alloc::sync::Arc;
use core::any::Any;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering, fence};

const PAGE: usize = 4096;

/// The memory of a region: on the heap, in a mapping that another process shares, or owned by the caller.
pub struct MemoryBlock {
    base: NonNull<u8>,
    length: usize,
    storage: Storage,
}

/// Who owns the bytes.
enum Storage {
    /// The block, on its own pages.
    Heap,
    /// A mapping.
    Mapped(Arc<dyn Any + Send + Sync>),
    /// The caller, who keeps them mapped.
    Borrowed,
}

// SAFETY: any thread may access the block, which it does through copies and atomics only.
unsafe impl Send for MemoryBlock {}
// SAFETY: as above.
unsafe impl Sync for MemoryBlock {}

impl MemoryBlock {
    /// Allocates `length` zeroed bytes on the heap. Dropping the block frees them.
    pub fn new(length: usize) -> MemoryBlock {
        let layout = Self::layout(length);
        // SAFETY: the layout has a size of at least one page.
        let base = unsafe { alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { handle_alloc_error(layout) };
        MemoryBlock { base, length, storage: Storage::Heap }
    }

    /// Wraps memory that the caller owns.
    ///
    /// # Safety
    /// `length` bytes at `base` stay readable and writable for the lifetime of the block. Others may change them.
    pub unsafe fn borrowed(base: NonNull<u8>, length: usize) -> MemoryBlock {
        MemoryBlock { base, length, storage: Storage::Borrowed }
    }

    /// Wraps memory that `owner` keeps mapped.
    ///
    /// # Safety
    /// `length` bytes at `base` stay readable and writable for the lifetime of `owner`. Others may change them.
    pub unsafe fn mapped(base: NonNull<u8>, length: usize, owner: Arc<dyn Any + Send + Sync>) -> MemoryBlock {
        MemoryBlock { base, length, storage: Storage::Mapped(owner) }
    }

    /// The address of the first byte in this process.
    pub fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether the block has no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The owner of a mapped block.
    pub fn mapping(&self) -> Option<&Arc<dyn Any + Send + Sync>> {
        match &self.storage {
            Storage::Mapped(owner) => Some(owner),
            Storage::Heap | Storage::Borrowed => None,
        }
    }

    fn layout(length: usize) -> Layout {
        Layout::from_size_align(length.max(1).next_multiple_of(PAGE), PAGE)
            .expect("the block fits the address space")
    }

    fn pointer_at(&self, offset: u64, length: usize) -> Result<NonNull<u8>, MemoryFault> {
        let offset = usize::try_from(offset).map_err(|_| MemoryFault)?;
        match offset.checked_add(length) {
            // SAFETY: the offset is inside the block.
            Some(end) if end <= self.length => Ok(unsafe { self.base.add(offset) }),
            _ => Err(MemoryFault),
        }
    }

    /// Copies the bytes at `offset` out, in any order, before any later read of the caller.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        let from = self.pointer_at(offset, into.len())?;
        // SAFETY: `from` has as many bytes as `into`, and nothing else refers to `into`.
        unsafe { copy(from.as_ptr(), into.as_mut_ptr(), into.len()) };
        fence(Ordering::Acquire);
        Ok(())
    }

    /// Stores bytes after all earlier writes of the caller. The last eight become visible after all others, because
    /// programs poll the last byte of a message.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        let to = self.pointer_at(offset, from.len())?;
        let (head, tail) = from.split_at(from.len().saturating_sub(8));
        fence(Ordering::Release);
        // SAFETY: `to` has as many bytes as `from`, which nothing else writes.
        unsafe {
            copy(head.as_ptr(), to.as_ptr(), head.len());
            fence(Ordering::Release);
            store_tail(tail, to.as_ptr().add(head.len()));
        }
        Ok(())
    }

    /// Applies an atomic operation to the aligned eight bytes at `offset` and returns their previous value.
    pub fn atomic(&self, offset: u64, operation: AtomicOperation) -> Result<u64, MemoryFault> {
        let at = self.pointer_at(offset, 8)?.cast::<AtomicU64>();
        if !at.as_ptr().is_aligned() {
            return Err(MemoryFault);
        }
        // SAFETY: eight aligned bytes of the block, which outlives the reference.
        let word = unsafe { at.as_ref() };
        Ok(match operation {
            AtomicOperation::CompareSwap { compare, swap } => {
                match word.compare_exchange(compare, swap, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(old) | Err(old) => old,
                }
            }
            AtomicOperation::FetchAdd { add } => word.fetch_add(add, Ordering::AcqRel),
        })
    }

    /// Loads the eight aligned bytes at `offset`.
    pub fn load(&self, offset: u64) -> Result<u64, MemoryFault> {
        self.atomic(offset, AtomicOperation::FetchAdd { add: 0 })
    }
}

impl core::fmt::Debug for MemoryBlock {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Block({} bytes at {:#x})", self.length, self.address())
    }
}

impl Drop for MemoryBlock {
    fn drop(&mut self) {
        if let Storage::Heap = self.storage {
            // SAFETY: allocated in `new` with this layout, and nothing else refers to it.
            unsafe { dealloc(self.base.as_ptr(), Self::layout(self.length)) };
        }
    }
}

/// Copies bytes that others may change at the same time. It is never inlined, so that the compiler assumes nothing
/// about the bytes. Eight aligned bytes are copied in one access.
///
/// # Safety
/// Both ranges are mapped for `length` bytes and do not overlap.
#[inline(never)]
unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
    if length == 8 && from.cast::<u64>().is_aligned() && to.cast::<u64>().is_aligned() {
        // SAFETY: eight bytes on both sides, with the alignment checked above.
        unsafe { to.cast::<u64>().write_volatile(from.cast::<u64>().read_volatile()) };
    } else {
        // SAFETY: the contract of this function.
        unsafe { core::ptr::copy_nonoverlapping(from, to, length) };
    }
}

/// Stores up to eight bytes such that the last one becomes visible last: an aligned word in one access, else the last
/// byte separately. The copy function of the standard library may begin with the last byte.
///
/// # Safety
/// `to` is mapped for the length of `tail`.
unsafe fn store_tail(tail: &[u8], to: *mut u8) {
    // SAFETY: the stores cover the length of `tail`, and words are aligned.
    unsafe {
        if let Ok(word) = tail.try_into()
            && to.cast::<u64>().is_aligned()
        {
            to.cast::<u64>().write_volatile(u64::from_ne_bytes(word));
        } else if let Ok(word) = tail.try_into()
            && to.cast::<u32>().is_aligned()
        {
            to.cast::<u32>().write_volatile(u32::from_ne_bytes(word));
        } else if let Some((last, others)) = tail.split_last() {
            for (index, byte) in others.iter().enumerate() {
                to.add(index).write_volatile(*byte);
            }
            fence(Ordering::Release);
            to.add(others.len()).write_volatile(*last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;

    #[test]
    fn a_reader_that_polls_the_last_byte_sees_the_whole_write() {
        const ROUNDS: u32 = 200_000;
        let block = Arc::new(MemoryBlock::new(8192));
        let sizes = [1usize, 2, 3, 4, 5, 6, 7, 8, 9, 11, 64, 100, 1000, 4096, 8191, 8192];
        let acknowledged = Arc::new(AtomicU64::new(0));
        let writer = std::thread::spawn({
            let (block, acknowledged) = (block.clone(), acknowledged.clone());
            move || {
                let mut data = vec![0; 8192];
                for round in 1..=ROUNDS {
                    let size = sizes[round as usize % sizes.len()];
                    data[..size].fill(round as u8);
                    block.write(0, &data[..size]).unwrap();
                    while acknowledged.load(Ordering::Acquire) < u64::from(round) {
                        std::hint::spin_loop();
                    }
                }
            }
        });
        let mut seen = vec![0; 8192];
        let mut last = [0];
        for round in 1..=ROUNDS {
            let size = sizes[round as usize % sizes.len()];
            loop {
                block.read(size as u64 - 1, &mut last).unwrap();
                if last[0] == round as u8 {
                    break;
                }
                std::hint::spin_loop();
            }
            fence(Ordering::Acquire);
            block.read(0, &mut seen[..size]).unwrap();
            assert!(seen[..size].iter().all(|byte| *byte == round as u8), "round {round}, {size} bytes");
            acknowledged.store(u64::from(round), Ordering::Release);
        }
        writer.join().unwrap();
    }
}
