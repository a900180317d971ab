//! Accesses to memory of the program that may go away: a program may unmap, protect or truncate what it has registered.
//!
//! An HCA pins the pages. Software cannot. Every access here is therefore an instruction range of its own. [`recover`]
//! moves a thread that faults inside such a range to an exit that reports the fault. The library's signal handler calls
//! it; without a handler, a fault ends the program. There are implementations for x86-64 and aarch64. Other processors
//! access the memory directly, and a fault ends the program.

#![allow(unsafe_code)]

#[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), target_os = "linux", not(miri))))]
use crate::shared_access;
use crate::{AtomicOperation, MemoryFault};
use core::sync::atomic::{Ordering, fence};

/// Copies `length` bytes of shared memory to memory of the caller, as `shared_access::read`.
///
/// # Safety
/// `length` bytes at `to` are writable, and nothing else accesses them. `length` bytes at `shared` are readable, or a
/// signal handler calls [`recover`].
#[inline]
pub unsafe fn read(shared: *const u8, to: *mut u8, length: usize) -> Result<(), MemoryFault> {
    // SAFETY: the contract of this function.
    let result = unsafe { arch::copy(to, shared, length) };
    fence(Ordering::Acquire);
    result
}

/// Copies `length` bytes of the caller to shared memory, in the order of `shared_access::write`.
///
/// # Safety
/// `length` bytes at `from` are readable, and nothing writes them. `length` bytes at `shared` are writable, or a signal
/// handler calls [`recover`].
#[inline]
pub unsafe fn write(from: *const u8, shared: *mut u8, length: usize) -> Result<(), MemoryFault> {
    let head = length - length.min(8);
    fence(Ordering::Release);
    // SAFETY: the contract of this function: the head and the tail are within both ranges.
    unsafe {
        if head > 0 {
            arch::copy(shared, from, head)?;
            fence(Ordering::Release);
        }
        arch::store_tail(shared.add(head), from.add(head), length - head)
    }
}

/// Applies an atomic operation, as `shared_access::atomic`.
///
/// # Safety
/// `shared` is aligned. Its eight bytes are readable and writable, or a signal handler calls [`recover`].
#[inline]
pub unsafe fn atomic(shared: *mut u64, operation: AtomicOperation) -> Result<u64, MemoryFault> {
    // SAFETY: the contract of this function.
    unsafe { arch::atomic(shared, operation) }
}

/// The address at which a thread continues after a fault at `instruction`, if `instruction` is an access of this
/// module. The handler sets the program counter to it and returns.
pub fn recover(instruction: usize) -> Option<usize> {
    arch::recover(instruction)
}

#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), target_os = "linux", not(miri)))]
mod arch {
    use super::{AtomicOperation, MemoryFault};

    // Each function is a leaf that leaves the stack alone, so that the exit can return from any of their instructions.
    // They return zero, or one after a fault.
    #[cfg(target_arch = "x86_64")]
    core::arch::global_asm!(
        ".pushsection .text.softhca_guarded,\"ax\",@progbits",
        ".balign 16",
        "softhca_guarded_begin:",
        // (to: rdi, from: rsi, length: rdx)
        "softhca_guarded_copy:",
        "mov rcx, rdx",
        "cmp rcx, 256",
        "jae 5f",
        "2:",
        "cmp rcx, 16",
        "jb 3f",
        "movups xmm0, [rsi]",
        "movups [rdi], xmm0",
        "add rsi, 16",
        "add rdi, 16",
        "sub rcx, 16",
        "jmp 2b",
        "3:",
        "cmp rcx, 8",
        "jb 4f",
        "mov rax, [rsi]",
        "mov [rdi], rax",
        "add rsi, 8",
        "add rdi, 8",
        "sub rcx, 8",
        "4:",
        "test rcx, rcx",
        "jz 6f",
        "mov al, [rsi]",
        "mov [rdi], al",
        "inc rsi",
        "inc rdi",
        "dec rcx",
        "jmp 4b",
        "5:",
        "rep movsb",
        "6:",
        "xor eax, eax",
        "ret",
        // (to: rdi, from: rsi, length: rdx, at most 8): the last byte becomes visible last
        "softhca_guarded_store:",
        "cmp rdx, 8",
        "jne 2f",
        "test dil, 7",
        "jnz 3f",
        "mov rax, [rsi]",
        "mov [rdi], rax",
        "jmp 4f",
        "2:",
        "cmp rdx, 4",
        "jne 3f",
        "test dil, 3",
        "jnz 3f",
        "mov eax, [rsi]",
        "mov [rdi], eax",
        "jmp 4f",
        "3:",
        "test rdx, rdx",
        "jz 4f",
        "mov al, [rsi]",
        "mov [rdi], al",
        "inc rsi",
        "inc rdi",
        "dec rdx",
        "jmp 3b",
        "4:",
        "xor eax, eax",
        "ret",
        // (at: rdi, operand and previous value: rsi)
        "softhca_guarded_fetch_add:",
        "mov rax, [rsi]",
        "lock xadd [rdi], rax",
        "mov [rsi], rax",
        "xor eax, eax",
        "ret",
        // (at: rdi, comparand and previous value: rsi, new value: rdx)
        "softhca_guarded_compare_swap:",
        "mov rax, [rsi]",
        "lock cmpxchg [rdi], rdx",
        "mov [rsi], rax",
        "xor eax, eax",
        "ret",
        "softhca_guarded_end:",
        "softhca_guarded_exit:",
        "mov eax, 1",
        "ret",
        ".popsection",
    );

    #[cfg(target_arch = "aarch64")]
    core::arch::global_asm!(
        ".pushsection .text.softhca_guarded,\"ax\",%progbits",
        ".balign 16",
        "softhca_guarded_begin:",
        // (to: x0, from: x1, length: x2)
        "softhca_guarded_copy:",
        "2:",
        "cmp x2, #32",
        "b.lo 3f",
        "ldp x3, x4, [x1]",
        "ldp x5, x6, [x1, #16]",
        "stp x3, x4, [x0]",
        "stp x5, x6, [x0, #16]",
        "add x1, x1, #32",
        "add x0, x0, #32",
        "sub x2, x2, #32",
        "b 2b",
        "3:",
        "cmp x2, #8",
        "b.lo 4f",
        "ldr x3, [x1], #8",
        "str x3, [x0], #8",
        "sub x2, x2, #8",
        "b 3b",
        "4:",
        "cbz x2, 5f",
        "ldrb w3, [x1], #1",
        "strb w3, [x0], #1",
        "sub x2, x2, #1",
        "b 4b",
        "5:",
        "mov w0, #0",
        "ret",
        // (to: x0, from: x1, length: x2, at most 8): the last byte becomes visible last
        "softhca_guarded_store:",
        "cmp x2, #8",
        "b.ne 2f",
        "tst x0, #7",
        "b.ne 3f",
        "ldr x3, [x1]",
        "str x3, [x0]",
        "b 4f",
        "2:",
        "cmp x2, #4",
        "b.ne 3f",
        "tst x0, #3",
        "b.ne 3f",
        "ldr w3, [x1]",
        "str w3, [x0]",
        "b 4f",
        "3:",
        "cbz x2, 4f",
        "ldrb w3, [x1], #1",
        "stlrb w3, [x0]",
        "add x0, x0, #1",
        "sub x2, x2, #1",
        "b 3b",
        "4:",
        "mov w0, #0",
        "ret",
        // (at: x0, operand and previous value: x1)
        "softhca_guarded_fetch_add:",
        "ldr x3, [x1]",
        "2:",
        "ldaxr x4, [x0]",
        "add x5, x4, x3",
        "stlxr w6, x5, [x0]",
        "cbnz w6, 2b",
        "str x4, [x1]",
        "mov w0, #0",
        "ret",
        // (at: x0, comparand and previous value: x1, new value: x2)
        "softhca_guarded_compare_swap:",
        "ldr x3, [x1]",
        "2:",
        "ldaxr x4, [x0]",
        "cmp x4, x3",
        "b.ne 3f",
        "stlxr w6, x2, [x0]",
        "cbnz w6, 2b",
        "3:",
        "str x4, [x1]",
        "mov w0, #0",
        "ret",
        "softhca_guarded_end:",
        "softhca_guarded_exit:",
        "mov w0, #1",
        "ret",
        ".popsection",
    );

    unsafe extern "C" {
        static softhca_guarded_begin: u8;
        static softhca_guarded_end: u8;
        static softhca_guarded_exit: u8;
        fn softhca_guarded_copy(to: *mut u8, from: *const u8, length: usize) -> u32;
        fn softhca_guarded_store(to: *mut u8, from: *const u8, length: usize) -> u32;
        fn softhca_guarded_fetch_add(at: *mut u64, value: *mut u64) -> u32;
        fn softhca_guarded_compare_swap(at: *mut u64, value: *mut u64, swap: u64) -> u32;
    }

    fn check(fault: u32) -> Result<(), MemoryFault> {
        if fault == 0 { Ok(()) } else { Err(MemoryFault) }
    }

    pub unsafe fn copy(to: *mut u8, from: *const u8, length: usize) -> Result<(), MemoryFault> {
        // SAFETY: the caller vouches for the ranges, or for recovery.
        check(unsafe { softhca_guarded_copy(to, from, length) })
    }

    pub unsafe fn store_tail(to: *mut u8, from: *const u8, length: usize) -> Result<(), MemoryFault> {
        // SAFETY: as above.
        check(unsafe { softhca_guarded_store(to, from, length) })
    }

    pub unsafe fn atomic(at: *mut u64, operation: AtomicOperation) -> Result<u64, MemoryFault> {
        // SAFETY: as above; the word is aligned.
        unsafe {
            match operation {
                AtomicOperation::FetchAdd { add } => {
                    let mut value = add;
                    check(softhca_guarded_fetch_add(at, &mut value)).map(|()| value)
                }
                AtomicOperation::CompareSwap { compare, swap } => {
                    let mut value = compare;
                    check(softhca_guarded_compare_swap(at, &mut value, swap)).map(|()| value)
                }
            }
        }
    }

    pub fn recover(instruction: usize) -> Option<usize> {
        let begin = &raw const softhca_guarded_begin as usize;
        let end = &raw const softhca_guarded_end as usize;
        (begin..end).contains(&instruction).then_some(&raw const softhca_guarded_exit as usize)
    }
}

#[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), target_os = "linux", not(miri))))]
mod arch {
    use super::{AtomicOperation, MemoryFault, shared_access};

    pub unsafe fn copy(to: *mut u8, from: *const u8, length: usize) -> Result<(), MemoryFault> {
        // SAFETY: the caller vouches for the ranges.
        unsafe { shared_access::read(from, to, length) };
        Ok(())
    }

    pub unsafe fn store_tail(to: *mut u8, from: *const u8, length: usize) -> Result<(), MemoryFault> {
        // SAFETY: as above.
        unsafe { shared_access::write(from, to, length) };
        Ok(())
    }

    pub unsafe fn atomic(at: *mut u64, operation: AtomicOperation) -> Result<u64, MemoryFault> {
        // SAFETY: as above; the word is aligned.
        Ok(unsafe { shared_access::atomic(at, operation) })
    }

    pub fn recover(_: usize) -> Option<usize> {
        None
    }
}
