//! Shared memory as a slice of atomics.

#[cfg(not(loom))]
use crate::MemoryBlock;
use crate::sync::AtomicU64;
use alloc::sync::Arc;
use core::any::Any;
use core::fmt;
use core::ops::{Deref, Range};
use core::ptr::NonNull;

/// Words of eight bytes that another thread or process may change at any time: on the heap, or in a shared mapping.
#[derive(Clone)]
pub struct SharedWords {
    base: NonNull<AtomicU64>,
    len: usize,
    /// Keeps the allocation or the mapping alive.
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the words are only accessed as `&[AtomicU64]`, which is Sync, and the owner is Send + Sync.
#[allow(unsafe_code)]
unsafe impl Send for SharedWords {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Allocates `len` zeroed words.
    pub fn heap(len: usize) -> SharedWords {
        #[cfg(not(loom))]
        if len >= MemoryBlock::MAPPED / 8 {
            let block = MemoryBlock::new(len * 8);
            return SharedWords { base: block.base().cast(), len, _owner: Arc::new(block) };
        }
        #[cfg(loom)]
        let mut block: alloc::vec::Vec<AtomicU64> = (0..len).map(|_| AtomicU64::new(0)).collect();
        #[cfg(not(loom))]
        let mut block = {
            const { assert!(align_of::<u128>() >= align_of::<AtomicU64>()) };
            alloc::vec![0_u128; len.div_ceil(2)]
        };
        let base = NonNull::from(block.as_mut_slice()).cast();
        SharedWords { base, len, _owner: Arc::new(block) }
    }

    /// A part of the words.
    ///
    /// # Panics
    /// If the range is not inside.
    pub fn part(&self, range: Range<usize>) -> SharedWords {
        let base = NonNull::from(&self[range.clone()]).cast();
        SharedWords { base, len: range.len(), _owner: self._owner.clone() }
    }

    /// Wraps the `len` words at `base`.
    ///
    /// # Safety
    /// `base` is aligned to eight bytes, and `len` words from there stay mapped, readable and writable for the
    /// lifetime of `owner`. All other writes in this process go through atomics.
    #[allow(unsafe_code)]
    pub unsafe fn mapped(
        base: NonNull<AtomicU64>,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> SharedWords {
        SharedWords { base, len, _owner: owner }
    }
}

impl fmt::Debug for SharedWords {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("SharedWords").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Deref for SharedWords {
    type Target = [AtomicU64];

    #[inline]
    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: `heap` and the contract of `mapped` give `len` live, aligned words, and atomics may be
        // shared with any writer.
        #[allow(unsafe_code)]
        unsafe {
            core::slice::from_raw_parts(self.base.as_ptr(), self.len)
        }
    }
}
