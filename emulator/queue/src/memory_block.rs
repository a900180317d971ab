//! The bytes of a memory region, which the HCA and the application may change at the same time.
//!
//! The crate never creates a reference to such memory. It copies through raw pointers, in assembly: see
//! `shared_access.rs`.

#![allow(unsafe_code)]

use crate::{AtomicOperation, MemoryFault, guarded_access, shared_access};
use alloc::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;
use core::any::Any;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, Ordering};
use softhca_types::AccessFlags;
use softhca_wire::{Psn, Qpn};

const PAGE: usize = 4096;

/// The side of a queue pair whose data is written: READ responses and atomic results reach the memory of the requester,
/// SENDs, WRITEs and atomics that of the responder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WriterRole {
    /// It writes the results of its own work requests.
    Requester,
    /// It writes the requests of its peer.
    Responder,
}

/// The message of which a card writes data to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteOrigin {
    /// The queue pair that received it.
    pub qp: Qpn,
    /// The side of the queue pair.
    pub role: WriterRole,
    /// The first PSN of the message.
    pub first_psn: Psn,
    /// The time, in nanoseconds.
    pub now_ns: u64,
}

/// Memory that has no address in this process, such as that of a simulated host.
pub trait ExternalMemory: Send + Sync {
    /// Copies the bytes at `offset` out.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault>;
    /// Stores bytes at `offset`.
    fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemoryFault>;
    /// Applies an atomic operation to the eight bytes at `offset` and returns their previous value.
    fn atomic(&self, offset: u64, operation: AtomicOperation) -> Result<u64, MemoryFault>;
    /// Loads the aligned eight bytes at `offset` in one access.
    fn load(&self, offset: u64) -> Result<u64, MemoryFault> {
        self.atomic(offset, AtomicOperation::FetchAdd { add: 0 })
    }
    /// Stores bytes of a message at `offset`. The memory may choose when they become visible.
    fn place(&self, offset: u64, from: &[u8], origin: &WriteOrigin) -> Result<(), MemoryFault> {
        let _ = origin;
        self.write(offset, from)
    }
    /// Applies an atomic operation of a message. The memory may choose when its result becomes visible.
    fn place_atomic(
        &self,
        offset: u64,
        operation: AtomicOperation,
        origin: &WriteOrigin,
    ) -> Result<u64, MemoryFault> {
        let _ = origin;
        self.atomic(offset, operation)
    }
    /// Copies the bytes at `offset` out for a READ that began at `since`. Each byte may have any value since then.
    fn sample(&self, offset: u64, into: &mut [u8], since: u64) -> Result<(), MemoryFault> {
        let _ = since;
        self.read(offset, into)
    }
    /// Checks that the memory permits this access. The error says why it does not.
    fn check_access(&self, access: AccessFlags) -> Result<(), String> {
        let _ = access;
        Ok(())
    }
}

/// The memory of a region: on the heap, in a mapping that another process shares, owned by the caller, or external.
pub struct MemoryBlock {
    base: NonNull<u8>,
    length: usize,
    /// Read-only memory of the caller becomes writable when it is registered again.
    writable: AtomicBool,
    storage: Storage,
}

/// The owner of the bytes.
enum Storage {
    /// The block, in an allocation that begins so many bytes before it.
    Heap { offset: usize },
    /// The block, in a mapping of its own.
    #[cfg(all(feature = "shared", target_os = "linux", not(miri)))]
    Private,
    /// A mapping.
    Mapped(Arc<dyn Any + Send + Sync>),
    /// The caller, which should keep them mapped.
    Borrowed,
    /// Somewhere else; `base` is not used.
    External(Box<dyn ExternalMemory>),
}

// SAFETY: any thread may access the block, which it does through copies and atomics only.
unsafe impl Send for MemoryBlock {}
// SAFETY: as above.
unsafe impl Sync for MemoryBlock {}

impl MemoryBlock {
    /// Blocks of this size are mapped where the system can: a heap clears memory that it has used, and touches every page.
    pub(crate) const MAPPED: usize = 48 << 10;

    /// Allocates `length` zeroed bytes. Dropping the block frees them. A system without memory ends the program.
    pub fn new(length: usize) -> MemoryBlock {
        Self::try_new(length).unwrap_or_else(|| handle_alloc_error(Self::layout(length)))
    }

    /// The same; `None` if the system has no memory for it.
    pub fn try_new(length: usize) -> Option<MemoryBlock> {
        #[cfg(all(feature = "shared", target_os = "linux", not(miri)))]
        if length >= Self::MAPPED
            && let Some(block) = Self::map(length)
        {
            return Some(block);
        }
        let layout = Self::layout(length);
        // SAFETY: the layout has a size of at least one page.
        let allocation = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let offset = allocation.as_ptr().addr().wrapping_neg() % PAGE;
        // SAFETY: the layout has a page more than the block, which begins within it.
        let base = unsafe { allocation.add(offset) };
        Some(MemoryBlock { base, length, writable: true.into(), storage: Storage::Heap { offset } })
    }

    #[cfg(all(feature = "shared", target_os = "linux", not(miri)))]
    fn map(length: usize) -> Option<MemoryBlock> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe { mmap_anonymous(core::ptr::null_mut(), length, protection, MapFlags::PRIVATE) };
        let base = NonNull::new(base.ok()?.cast())?;
        Some(MemoryBlock { base, length, writable: true.into(), storage: Storage::Private })
    }

    /// Wraps memory that the caller owns.
    ///
    /// # Safety
    /// `length` bytes at `base` stay readable, and writable if `writable` is set, for the lifetime of the block; or
    /// a signal handler calls [`recover_from_memory_fault`](crate::recover_from_memory_fault), and an access fails.
    /// Others may change them.
    pub unsafe fn borrowed(base: NonNull<u8>, length: usize, writable: bool) -> MemoryBlock {
        MemoryBlock { base, length, writable: writable.into(), storage: Storage::Borrowed }
    }

    /// Wraps memory that `owner` keeps mapped.
    ///
    /// # Safety
    /// `length` bytes at `base` stay readable, and writable if `writable` is set, for the lifetime of `owner`. Others
    /// may change them.
    pub unsafe fn mapped(
        base: NonNull<u8>,
        length: usize,
        writable: bool,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> MemoryBlock {
        MemoryBlock { base, length, writable: writable.into(), storage: Storage::Mapped(owner) }
    }

    /// Wraps memory that has no address in this process.
    pub fn external(length: usize, memory: Box<dyn ExternalMemory>) -> MemoryBlock {
        let base = NonNull::dangling();
        MemoryBlock { base, length, writable: true.into(), storage: Storage::External(memory) }
    }

    /// Checks that memory without an address in this process permits this access. The error says why it does not.
    pub fn check_access(&self, access: AccessFlags) -> Result<(), String> {
        match &self.storage {
            Storage::External(memory) => memory.check_access(access),
            _ => Ok(()),
        }
    }

    /// The first byte.
    #[cfg(not(loom))]
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
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

    /// Whether the caller owns the bytes and may unmap them after the region is deregistered.
    pub fn is_borrowed(&self) -> bool {
        matches!(self.storage, Storage::Borrowed)
    }

    /// The owner of a mapped block.
    pub fn mapping(&self) -> Option<&Arc<dyn Any + Send + Sync>> {
        match &self.storage {
            Storage::Mapped(owner) => Some(owner),
            _ => None,
        }
    }

    /// The allocation of a block that begins at a page. It asks for the smallest alignment: with a larger one, the
    /// allocator would write to all pages to zero them, instead of taking new ones.
    fn layout(length: usize) -> Layout {
        let size = length.max(1).checked_next_multiple_of(PAGE).and_then(|size| size.checked_add(PAGE));
        size.and_then(|size| Layout::from_size_align(size, 1).ok()).expect("the block fits the address space")
    }

    fn pointer_at(&self, offset: u64, length: usize) -> Result<NonNull<u8>, MemoryFault> {
        let offset = usize::try_from(offset).map_err(|_| MemoryFault)?;
        match offset.checked_add(length) {
            // SAFETY: the offset is inside the block.
            Some(end) if end <= self.length => Ok(unsafe { self.base.add(offset) }),
            _ => Err(MemoryFault),
        }
    }

    /// Whether the block can be written.
    pub fn is_writable(&self) -> bool {
        self.writable.load(Ordering::Relaxed)
    }

    /// Allows writes from now on.
    ///
    /// # Safety
    /// The bytes are writable for the rest of the lifetime of the block.
    pub unsafe fn set_writable(&self) {
        self.writable.store(true, Ordering::Relaxed);
    }

    fn writable_at(&self, offset: u64, length: usize) -> Result<NonNull<u8>, MemoryFault> {
        if self.is_writable() { self.pointer_at(offset, length) } else { Err(MemoryFault) }
    }

    /// Copies the bytes at `offset` out, in any order, before any later access of the caller.
    #[inline]
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        if let Storage::External(memory) = &self.storage {
            return memory.read(offset, into);
        }
        let from = self.pointer_at(offset, into.len())?;
        #[cfg(miri)]
        if !self.is_writable() {
            // An atomic reference needs permission to write. Nothing in this process writes the bytes.
            // SAFETY: `from` has as many bytes as `into`.
            unsafe { core::ptr::copy_nonoverlapping(from.as_ptr(), into.as_mut_ptr(), into.len()) };
            return Ok(());
        }
        // SAFETY: `from` has as many bytes as `into`, and nothing else refers to `into`.
        unsafe {
            match self.storage {
                Storage::Borrowed => guarded_access::read(from.as_ptr(), into.as_mut_ptr(), into.len())?,
                _ => shared_access::read(from.as_ptr(), into.as_mut_ptr(), into.len()),
            }
        }
        Ok(())
    }

    /// Stores bytes after all earlier accesses of the caller. The last eight become visible after all others, because
    /// programs poll the last byte of a message.
    #[inline]
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemoryFault> {
        if let Storage::External(memory) = &self.storage {
            return memory.write(offset, from);
        }
        let to = self.writable_at(offset, from.len())?;
        // SAFETY: `to` has as many bytes as `from`, which nothing else writes.
        unsafe {
            match self.storage {
                Storage::Borrowed => guarded_access::write(from.as_ptr(), to.as_ptr(), from.len())?,
                _ => shared_access::write(from.as_ptr(), to.as_ptr(), from.len()),
            }
        }
        Ok(())
    }

    /// As [`MemoryBlock::write`], for bytes of a message.
    pub fn place(&self, offset: u64, from: &[u8], origin: &WriteOrigin) -> Result<(), MemoryFault> {
        match &self.storage {
            Storage::External(memory) => memory.place(offset, from, origin),
            _ => self.write(offset, from),
        }
    }

    /// As [`MemoryBlock::atomic`], for an atomic operation of a message.
    pub fn place_atomic(
        &self,
        offset: u64,
        operation: AtomicOperation,
        origin: &WriteOrigin,
    ) -> Result<u64, MemoryFault> {
        match &self.storage {
            Storage::External(memory) => memory.place_atomic(offset, operation, origin),
            _ => self.atomic(offset, operation),
        }
    }

    /// As [`MemoryBlock::read`], for a READ that began at `since`.
    pub fn sample(&self, offset: u64, into: &mut [u8], since: u64) -> Result<(), MemoryFault> {
        match &self.storage {
            Storage::External(memory) => memory.sample(offset, into, since),
            _ => self.read(offset, into),
        }
    }

    /// Applies an atomic operation to the aligned eight bytes at `offset` and returns their previous value.
    pub fn atomic(&self, offset: u64, operation: AtomicOperation) -> Result<u64, MemoryFault> {
        if let Storage::External(memory) = &self.storage {
            return memory.atomic(offset, operation);
        }
        let at = self.writable_at(offset, 8)?.cast::<u64>();
        if !at.as_ptr().is_aligned() {
            return Err(MemoryFault);
        }
        // SAFETY: eight aligned, writable bytes of the block.
        unsafe {
            match self.storage {
                Storage::Borrowed => guarded_access::atomic(at.as_ptr(), operation),
                _ => Ok(shared_access::atomic(at.as_ptr(), operation)),
            }
        }
    }

    /// Loads the eight aligned bytes at `offset` in one access.
    pub fn load(&self, offset: u64) -> Result<u64, MemoryFault> {
        if let Storage::External(memory) = &self.storage {
            return memory.load(offset);
        }
        let at = self.pointer_at(offset, 8)?.cast::<u64>();
        if !at.as_ptr().is_aligned() {
            return Err(MemoryFault);
        }
        #[cfg(miri)]
        if !self.is_writable() {
            // SAFETY: eight aligned bytes of the block, which nothing in this process writes.
            return Ok(unsafe { at.read() });
        }
        // SAFETY: eight aligned bytes of the block.
        Ok(unsafe { shared_access::load(at.as_ptr()) })
    }
}

impl core::fmt::Debug for MemoryBlock {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Block({} bytes at {:#x})", self.length, self.address())
    }
}

impl Drop for MemoryBlock {
    fn drop(&mut self) {
        match self.storage {
            Storage::Heap { offset } => {
                // SAFETY: allocated in `new` with this layout, so many bytes before, and nothing else refers to it.
                unsafe { dealloc(self.base.as_ptr().sub(offset), Self::layout(self.length)) };
            }
            #[cfg(all(feature = "shared", target_os = "linux", not(miri)))]
            Storage::Private => {
                // SAFETY: mapped in `map` with this length, and nothing else refers to it.
                let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::{AtomicU64, fence};
    use std::vec;

    #[test]
    #[cfg(all(feature = "shared", target_os = "linux", not(miri)))]
    fn a_block_larger_than_the_address_space_is_not_allocated() {
        assert!(MemoryBlock::try_new(isize::MAX as usize - 2 * PAGE).is_none());
    }

    #[test]
    fn new_blocks_begin_at_a_page_and_are_zero() {
        for length in [0, 1, PAGE, PAGE + 1, 40_000, 70_000] {
            let block = MemoryBlock::new(length);
            let mut bytes = vec![1; length];
            assert_eq!(block.read(0, &mut bytes), Ok(()));
            assert!(bytes.iter().all(|byte| *byte == 0));
            assert_eq!(block.address() % PAGE as u64, 0);
        }
    }

    #[test]
    fn read_only_memory_is_read_and_never_written() {
        let bytes = [7u64; 2];
        // SAFETY: the bytes outlive the block, which does not write them.
        let block = unsafe { MemoryBlock::borrowed(NonNull::from(&bytes).cast(), 16, false) };
        let mut copy = [0; 8];
        assert_eq!(block.read(8, &mut copy), Ok(()));
        assert_eq!((u64::from_ne_bytes(copy), block.load(0)), (7, Ok(7)));
        assert_eq!(block.write(0, &[1]), Err(MemoryFault));
        assert_eq!(block.atomic(0, AtomicOperation::FetchAdd { add: 0 }), Err(MemoryFault));
    }

    #[test]
    fn a_reader_that_polls_the_last_byte_sees_the_whole_write() {
        const ROUNDS: u32 = if cfg!(miri) { 50 } else { 200_000 };
        let block = Arc::new(MemoryBlock::new(8192));
        let sizes: &[usize] = match cfg!(miri) {
            true => &[1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 64],
            false => &[1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 64, 100, 1000, 4096, 8191, 8192],
        };
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
