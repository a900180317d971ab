//! Accesses to memory that other threads, other processes and the HCA change at the same time.
//!
//! Rust defines no such access: plain and volatile accesses that race are undefined behaviour, and so are racing
//! atomics of different sizes. A program that reads the last byte of a message while the HCA stores the last word does
//! exactly that: RDMA hardware allows it. The functions of this file access shared memory in assembly only. The
//! compiler knows nothing about the bytes, and the rules of the processor apply. A byte is never torn, and an aligned
//! word of 1, 2, 4 or 8 bytes is loaded and stored in one access.
//!
//! Everything that accesses a [`MemoryBlock`](crate::MemoryBlock) goes through this file. Miri and processors without an
//! implementation access each byte as an atomic; there, eight bytes are not one access. WebAssembly has one thread.

#![allow(unsafe_code)]

use crate::AtomicOperation;
use core::sync::atomic::{Ordering, fence};

/// Copies `length` bytes of shared memory to memory of the caller. An aligned word of eight bytes is read in one access.
///
/// # Safety
/// `length` bytes at `shared` are readable. `length` bytes at `to` are writable, and nothing else accesses them.
#[inline]
pub unsafe fn read(shared: *const u8, to: *mut u8, length: usize) {
    // SAFETY: the contract of this function; the word is aligned.
    unsafe {
        if length == 8 && shared.cast::<u64>().is_aligned() {
            to.cast::<u64>().write_unaligned(arch::load_u64(shared.cast()));
        } else {
            arch::copy_out(shared, to, length);
        }
    }
    fence(Ordering::Acquire);
}

/// Copies `length` bytes of the caller to shared memory. The last (up to eight) bytes become visible after all others,
/// as an aligned word of eight or four bytes in one access. The last byte is never visible before another byte.
///
/// # Safety
/// `length` bytes at `shared` are writable. `length` bytes at `from` are readable, and nothing writes them.
#[inline]
pub unsafe fn write(from: *const u8, shared: *mut u8, length: usize) {
    let tail = length.min(8);
    let head = length - tail;
    fence(Ordering::Release);
    // SAFETY: the contract of this function: `head` and `tail` bytes are within both ranges, and words are aligned.
    unsafe {
        if head > 0 {
            arch::copy_in(from, shared, head);
            fence(Ordering::Release);
        }
        let (from, shared) = (from.add(head), shared.add(head));
        if tail == 8 && shared.cast::<u64>().is_aligned() {
            arch::store_u64(shared.cast(), from.cast::<u64>().read_unaligned());
        } else if tail == 4 && shared.cast::<u32>().is_aligned() {
            arch::store_u32(shared.cast(), from.cast::<u32>().read_unaligned());
        } else if tail > 0 {
            // The copy function of the C library may begin with the last byte.
            for index in 0..tail - 1 {
                arch::store_u8(shared.add(index), *from.add(index));
            }
            fence(Ordering::Release);
            arch::store_u8(shared.add(tail - 1), *from.add(tail - 1));
        }
    }
}

/// Loads eight bytes in one access, before any later access of the caller.
///
/// # Safety
/// `shared` is aligned, and its eight bytes are readable.
#[inline]
pub unsafe fn load(shared: *const u64) -> u64 {
    // SAFETY: the contract of this function.
    let value = unsafe { arch::load_u64(shared) };
    fence(Ordering::Acquire);
    value
}

/// Applies an atomic operation and returns the previous value. Earlier accesses of the caller come before it, later
/// ones after it.
///
/// # Safety
/// `shared` is aligned, and its eight bytes are readable and writable.
#[inline]
pub unsafe fn atomic(shared: *mut u64, operation: AtomicOperation) -> u64 {
    // SAFETY: the contract of this function.
    unsafe {
        match operation {
            AtomicOperation::CompareSwap { compare, swap } => arch::compare_swap(shared, compare, swap),
            AtomicOperation::FetchAdd { add } => arch::fetch_add(shared, add),
        }
    }
}

/// Accesses to one word, by the instructions that load eight bytes, store eight bytes and store four bytes.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
macro_rules! word_accesses {
    ($load_u64:literal, $store_u64:literal, $store_u32:literal) => {
        #[inline]
        pub unsafe fn load_u64(at: *const u64) -> u64 {
            let value;
            // SAFETY: the caller vouches for the eight bytes.
            unsafe {
                asm!($load_u64, value = out(reg) value, at = in(reg) at, options(nostack, preserves_flags, readonly));
            }
            value
        }

        #[inline]
        pub unsafe fn store_u64(at: *mut u64, value: u64) {
            // SAFETY: the caller vouches for the eight bytes.
            unsafe {
                asm!($store_u64, at = in(reg) at, value = in(reg) value, options(nostack, preserves_flags));
            }
        }

        #[inline]
        pub unsafe fn store_u32(at: *mut u32, value: u32) {
            // SAFETY: the caller vouches for the four bytes.
            unsafe {
                asm!($store_u32, at = in(reg) at, value = in(reg) value, options(nostack, preserves_flags));
            }
        }
    };
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod arch {
    use core::arch::asm;
    #[cfg(not(windows))]
    use core::ffi::c_void;

    #[cfg(not(windows))]
    unsafe extern "C" {
        fn memcpy(to: *mut c_void, from: *const c_void, length: usize) -> *mut c_void;
    }

    pub use copy as copy_in;
    pub use copy as copy_out;

    /// The C library's copy, called from assembly: the compiler sees neither a copy nor its operands.
    #[cfg(not(windows))]
    #[inline]
    pub unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
        // SAFETY: the caller vouches for the ranges. The stack is aligned for a call, because `nostack` is absent.
        unsafe {
            asm!("call {memcpy}", memcpy = sym memcpy, in("rdi") to, in("rsi") from, in("rdx") length,
                 clobber_abi("C"));
        }
    }

    #[cfg(windows)]
    #[inline]
    pub unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
        // SAFETY: the caller vouches for the ranges. The direction flag is clear at the start of every `asm!`.
        unsafe {
            asm!("rep movsb", inout("rdi") to => _, inout("rsi") from => _, inout("rcx") length => _,
                 options(nostack, preserves_flags));
        }
    }

    word_accesses!("mov {value}, [{at}]", "mov [{at}], {value}", "mov [{at}], {value:e}");

    #[inline]
    pub unsafe fn store_u8(at: *mut u8, value: u8) {
        // SAFETY: the caller vouches for the byte.
        unsafe {
            asm!("mov [{at}], {value}", at = in(reg) at, value = in(reg_byte) value,
                 options(nostack, preserves_flags));
        }
    }

    #[inline]
    pub unsafe fn fetch_add(at: *mut u64, add: u64) -> u64 {
        let mut value = add;
        // SAFETY: the caller vouches for the eight bytes.
        unsafe {
            asm!("lock xadd [{at}], {value}", at = in(reg) at, value = inout(reg) value, options(nostack));
        }
        value
    }

    #[inline]
    pub unsafe fn compare_swap(at: *mut u64, compare: u64, swap: u64) -> u64 {
        let mut old = compare;
        // SAFETY: the caller vouches for the eight bytes.
        unsafe {
            asm!("lock cmpxchg [{at}], {swap}", at = in(reg) at, swap = in(reg) swap, inout("rax") old,
                 options(nostack));
        }
        old
    }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod arch {
    use core::arch::asm;

    unsafe extern "C" {
        fn memcpy(to: *mut u8, from: *const u8, length: usize) -> *mut u8;
    }

    pub use copy as copy_in;
    pub use copy as copy_out;

    /// The C library's copy, called from assembly: the compiler sees neither a copy nor its operands.
    #[inline]
    pub unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
        // SAFETY: the caller vouches for the ranges.
        unsafe {
            asm!("bl {memcpy}", memcpy = sym memcpy, in("x0") to, in("x1") from, in("x2") length,
                 clobber_abi("C"));
        }
    }

    word_accesses!("ldr {value}, [{at}]", "str {value}, [{at}]", "str {value:w}, [{at}]");

    #[inline]
    pub unsafe fn store_u8(at: *mut u8, value: u8) {
        // SAFETY: the caller vouches for the byte.
        unsafe {
            asm!("strb {value:w}, [{at}]", at = in(reg) at, value = in(reg) u32::from(value),
                 options(nostack, preserves_flags));
        }
    }

    #[inline]
    pub unsafe fn fetch_add(at: *mut u64, add: u64) -> u64 {
        let old;
        // SAFETY: the caller vouches for the eight bytes.
        unsafe {
            asm!("2:", "ldaxr {old}, [{at}]", "add {new}, {old}, {add}", "stlxr {failed:w}, {new}, [{at}]",
                 "cbnz {failed:w}, 2b", at = in(reg) at, add = in(reg) add, old = out(reg) old, new = out(reg) _,
                 failed = out(reg) _, options(nostack, preserves_flags));
        }
        old
    }

    #[inline]
    pub unsafe fn compare_swap(at: *mut u64, compare: u64, swap: u64) -> u64 {
        let old;
        // SAFETY: the caller vouches for the eight bytes.
        unsafe {
            asm!("2:", "ldaxr {old}, [{at}]", "cmp {old}, {compare}", "b.ne 3f",
                 "stlxr {failed:w}, {swap}, [{at}]", "cbnz {failed:w}, 2b", "3:", at = in(reg) at,
                 compare = in(reg) compare, swap = in(reg) swap, old = out(reg) old, failed = out(reg) _,
                 options(nostack));
        }
        old
    }
}

#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod arch {
    use core::sync::atomic::{AtomicBool, AtomicU8, Ordering};

    /// Makes an operation on eight bytes exclude the others.
    static LOCK: AtomicBool = AtomicBool::new(false);

    /// A byte of shared memory.
    ///
    /// # Safety
    /// The byte is readable, and writable if the caller stores.
    unsafe fn byte<'a>(at: *mut u8) -> &'a AtomicU8 {
        // SAFETY: every access in this process is one of these.
        unsafe { AtomicU8::from_ptr(at) }
    }

    pub unsafe fn copy_out(from: *const u8, to: *mut u8, length: usize) {
        if cfg!(all(target_family = "wasm", not(target_feature = "atomics"))) {
            // SAFETY: the caller vouches for the ranges, and one thread races with nothing.
            return unsafe { core::ptr::copy_nonoverlapping(from, to, length) };
        }
        for index in 0..length {
            // SAFETY: the caller vouches for the ranges.
            unsafe { *to.add(index) = byte(from.add(index).cast_mut()).load(Ordering::Relaxed) };
        }
    }

    pub unsafe fn copy_in(from: *const u8, to: *mut u8, length: usize) {
        if cfg!(all(target_family = "wasm", not(target_feature = "atomics"))) {
            // SAFETY: as above.
            return unsafe { core::ptr::copy_nonoverlapping(from, to, length) };
        }
        for index in 0..length {
            // SAFETY: the caller vouches for the ranges.
            unsafe { byte(to.add(index)).store(*from.add(index), Ordering::Relaxed) };
        }
    }

    pub unsafe fn load_u64(at: *const u64) -> u64 {
        let mut bytes = [0; 8];
        // SAFETY: the caller vouches for the eight bytes.
        unsafe { copy_out(at.cast(), bytes.as_mut_ptr(), 8) };
        u64::from_ne_bytes(bytes)
    }

    pub unsafe fn store_u64(at: *mut u64, value: u64) {
        // SAFETY: the caller vouches for the eight bytes.
        unsafe { store_in_order(at.cast(), &value.to_ne_bytes()) };
    }

    pub unsafe fn store_u32(at: *mut u32, value: u32) {
        // SAFETY: the caller vouches for the four bytes.
        unsafe { store_in_order(at.cast(), &value.to_ne_bytes()) };
    }

    pub unsafe fn store_u8(at: *mut u8, value: u8) {
        // SAFETY: the caller vouches for the byte.
        unsafe { byte(at) }.store(value, Ordering::Relaxed);
    }

    /// The last byte becomes visible last.
    unsafe fn store_in_order(at: *mut u8, value: &[u8]) {
        for (index, part) in value.iter().enumerate() {
            // SAFETY: the caller vouches for the bytes.
            unsafe { byte(at.add(index)) }.store(*part, Ordering::Release);
        }
    }

    pub unsafe fn fetch_add(at: *mut u64, add: u64) -> u64 {
        // SAFETY: the caller vouches for the eight bytes.
        unsafe { exclusive(at, |old| old.wrapping_add(add)) }
    }

    pub unsafe fn compare_swap(at: *mut u64, compare: u64, swap: u64) -> u64 {
        // SAFETY: the caller vouches for the eight bytes.
        unsafe { exclusive(at, |old| if old == compare { swap } else { old }) }
    }

    unsafe fn exclusive(at: *mut u64, change: impl FnOnce(u64) -> u64) -> u64 {
        while LOCK.swap(true, Ordering::Acquire) {
            core::hint::spin_loop();
        }
        // SAFETY: the caller vouches for the eight bytes.
        let old = unsafe { load_u64(at) };
        // SAFETY: as above.
        unsafe { store_u64(at, change(old)) };
        LOCK.store(false, Ordering::Release);
        old
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_and_alignment_is_copied_and_nothing_else() {
        // Miri takes minutes for all of them.
        let [lengths, offsets] = if cfg!(miri) { [13, 3] } else { [1, 1] };
        for length in (0..40).step_by(lengths) {
            for offset in (0..9).step_by(offsets) {
                let source: [u8; 64] = core::array::from_fn(|index| index as u8 + 1);
                let mut shared = [0u64; 16];
                let mut back = [0; 64];
                // SAFETY: 9 + 40 bytes are within the arrays, which nothing else accesses.
                unsafe {
                    let at = shared.as_mut_ptr().cast::<u8>().add(offset);
                    write(source.as_ptr(), at, length);
                    read(at, back.as_mut_ptr(), length);
                }
                assert_eq!(back[..length], source[..length], "{length} bytes at {offset}");
                assert!(back[length..].iter().all(|byte| *byte == 0), "{length} bytes at {offset}");
                let bytes: [u8; 128] =
                    core::array::from_fn(|index| shared[index / 8].to_ne_bytes()[index % 8]);
                assert!(bytes[..offset].iter().chain(&bytes[offset + length..]).all(|byte| *byte == 0));
            }
        }
    }

    #[test]
    fn atomic_operations_return_the_previous_value() {
        let mut word = 5u64;
        let at = &raw mut word;
        let swap = |compare, swap| AtomicOperation::CompareSwap { compare, swap };
        // SAFETY: an aligned word that nothing else accesses.
        unsafe {
            assert_eq!(atomic(at, AtomicOperation::FetchAdd { add: u64::MAX }), 5);
            assert_eq!(atomic(at, swap(5, 9)), 4);
            assert_eq!(load(at), 4);
            assert_eq!(atomic(at, swap(4, 9)), 4);
            assert_eq!(load(at), 9);
        }
    }

    #[test]
    fn concurrent_atomic_operations_exclude_each_other() {
        const ROUNDS: u64 = if cfg!(miri) { 20 } else { 100_000 };
        let block = alloc::sync::Arc::new(crate::MemoryBlock::new(8));
        let threads: alloc::vec::Vec<_> = (0..2)
            .map(|_| {
                let block = block.clone();
                std::thread::spawn(move || {
                    for _ in 0..ROUNDS {
                        block.atomic(0, AtomicOperation::FetchAdd { add: 1 }).unwrap();
                        let old = block.load(0).unwrap();
                        let swap = AtomicOperation::CompareSwap { compare: old, swap: old };
                        block.atomic(0, swap).unwrap();
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(block.load(0), Ok(2 * ROUNDS));
    }
}
