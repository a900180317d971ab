//! Bytes that a card and others change at the same time, reached through pointers.
//!
//! A card reads and writes registered memory while its owner may do the same; that is what registering means.
//! No reference to such memory ever exists. Copies go through raw pointers in functions that the compiler
//! cannot see through, as device drivers do with memory that hardware shares.

#![allow(unsafe_code)]

use crate::{AtomicOperation, MemoryFault};
use alloc::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use alloc::sync::Arc;
use core::any::Any;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering, fence};

const PAGE: usize = 4096;

/// Memory behind a region: on the heap, in a mapping that another process has too, or somebody else's.
pub struct MemoryBlock {
    base: NonNull<u8>,
    length: usize,
    storage: Storage,
}

/// Who keeps the bytes where they are.
enum Storage {
    /// The block itself, on pages of its own.
    Heap,
    /// A mapping.
    Mapped(Arc<dyn Any + Send + Sync>),
    /// Somebody else, who promised.
    Borrowed,
}

// SAFETY: the block is only reached through copies and atomics, from any thread.
unsafe impl Send for MemoryBlock {}
// SAFETY: as above.
unsafe impl Sync for MemoryBlock {}

impl MemoryBlock {
    /// `length` zeroed bytes on the heap, freed with the block.
    pub fn new(length: usize) -> MemoryBlock {
        let layout = Self::layout(length);
        // SAFETY: the layout has a size of at least one page.
        let base = unsafe { alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { handle_alloc_error(layout) };
        MemoryBlock { base, length, storage: Storage::Heap }
    }

    /// Memory that belongs to somebody else.
    ///
    /// # Safety
    /// `length` bytes at `base` are readable and writable for as long as the block lives, whatever else
    /// happens to them.
    pub unsafe fn borrowed(base: NonNull<u8>, length: usize) -> MemoryBlock {
        MemoryBlock { base, length, storage: Storage::Borrowed }
    }

    /// Memory that `owner` keeps.
    ///
    /// # Safety
    /// `length` bytes at `base` are readable and writable for as long as `owner` lives, whatever else
    /// happens to them.
    pub unsafe fn mapped(base: NonNull<u8>, length: usize, owner: Arc<dyn Any + Send + Sync>) -> MemoryBlock {
        MemoryBlock { base, length, storage: Storage::Mapped(owner) }
    }

    /// Where the bytes are in this process.
    pub fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The mapping that keeps the bytes, if that is what it is.
    pub fn mapping(&self) -> Option<&Arc<dyn Any + Send + Sync>> {
        match &self.storage {
            Storage::Mapped(owner) => Some(owner),
            Storage::Heap | Storage::Borrowed => None,
        }
    }

    fn layout(length: usize) -> Layout {
        Layout::from_size_align(length.max(1).next_multiple_of(PAGE), PAGE)
            .expect("a block fits the address space")
    }

    fn pointer_at(&self, offset: u64, length: usize) -> Result<NonNull<u8>, MemoryFault> {
        let offset = usize::try_from(offset).map_err(|_| MemoryFault)?;
        match offset.checked_add(length) {
            // SAFETY: the offset is inside of the block.
            Some(end) if end <= self.length => Ok(unsafe { self.base.add(offset) }),
            _ => Err(MemoryFault),
        }
    }

    /// Copies the bytes at `offset` out, in any order among themselves, before whatever the caller reads next.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        let from = self.pointer_at(offset, into.len())?;
        // SAFETY: `from` has as many bytes as `into`, and `into` is ours alone.
        unsafe { copy(from.as_ptr(), into.as_mut_ptr(), into.len()) };
        fence(Ordering::Acquire);
        Ok(())
    }

    /// Stores bytes after whatever the caller wrote before, and such that the last eight become visible after
    /// all others: programs spin on the last one.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        let to = self.pointer_at(offset, from.len())?;
        let (head, tail) = from.split_at(from.len().saturating_sub(8));
        fence(Ordering::Release);
        // SAFETY: `to` has as many bytes as `from`, which nobody writes meanwhile.
        unsafe {
            copy(head.as_ptr(), to.as_ptr(), head.len());
            fence(Ordering::Release);
            store_tail(tail, to.as_ptr().add(head.len()));
        }
        Ok(())
    }

    /// Changes the aligned eight bytes at `offset` and returns what they were.
    pub fn atomic(&self, offset: u64, operation: AtomicOperation) -> Result<u64, MemoryFault> {
        let at = self.pointer_at(offset, 8)?.cast::<AtomicU64>();
        if !at.as_ptr().is_aligned() {
            return Err(MemoryFault);
        }
        // SAFETY: eight aligned bytes of the block, which lives as long as the reference.
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

    /// The eight aligned bytes at `offset`.
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
            // SAFETY: allocated in `new` with this layout, and nobody else has it.
            unsafe { dealloc(self.base.as_ptr(), Self::layout(self.length)) };
        }
    }
}

/// Copies bytes that others may change at the same time. Never inlined, so that the compiler assumes nothing
/// about what it reads or writes. Eight aligned bytes go in one access.
///
/// # Safety
/// Both ranges are mapped for `length` bytes and do not overlap.
#[inline(never)]
unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
    if length == 8 && from.cast::<u64>().is_aligned() && to.cast::<u64>().is_aligned() {
        // SAFETY: eight bytes on both sides, aligned as was just seen.
        unsafe { to.cast::<u64>().write_volatile(from.cast::<u64>().read_volatile()) };
    } else {
        // SAFETY: as the caller says.
        unsafe { core::ptr::copy_nonoverlapping(from, to, length) };
    }
}

/// Stores up to eight bytes, the last of them not before the others: in one access if they are an aligned word, else
/// by itself. A copy of a few bytes by the standard library may well begin with the last.
///
/// # Safety
/// `to` is mapped for as many bytes as `tail` has.
unsafe fn store_tail(tail: &[u8], to: *mut u8) {
    // SAFETY: as many bytes as `tail` has, aligned where a word is stored.
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
    fn a_reader_that_spins_on_the_last_byte_sees_the_whole_write() {
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
