//! The signal handler behind registered memory that the program has unmapped, protected or truncated. The HCA's access
//! to it fails, and not the program.

#![allow(unsafe_code)]

use softhca_queue::recover_from_memory_fault;
use std::sync::OnceLock;
use std::{mem, ptr};

const SIGNALS: [libc::c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// The program's own action for each signal.
static PREVIOUS: OnceLock<[libc::sigaction; 2]> = OnceLock::new();

/// Installs the handler, once. A handler that the program installs later replaces it.
pub(crate) fn install() {
    PREVIOUS.get_or_init(|| {
        SIGNALS.map(|signal| {
            // SAFETY: a zeroed action is valid, and its fields are set; the kernel writes the previous one.
            unsafe {
                let mut action: libc::sigaction = mem::zeroed();
                action.sa_sigaction = on_fault as extern "C" fn(_, _, _) as libc::sighandler_t;
                // On the program's signal stack, if it has one: its own handler may need that.
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
                libc::sigemptyset(&mut action.sa_mask);
                let mut previous: libc::sigaction = mem::zeroed();
                libc::sigaction(signal, &action, &mut previous);
                previous
            }
        })
    });
}

extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes the context of the thread that the signal interrupted.
    if unsafe { resume_after_access(context.cast()) } {
        return;
    }
    // SAFETY: the kernel passes what it knows about the signal. The codes of signals that processes send are not positive.
    let is_sent = unsafe { (*info).si_code } <= 0;
    let index = SIGNALS.iter().position(|other| *other == signal).unwrap_or(0);
    // The handler may run before `install` has returned, and then there is nothing else to call.
    let previous = PREVIOUS.get().map(|all| all[index]);
    match previous {
        Some(action) if action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN => {
            // SAFETY: the program's own handler, with the arguments that its flags ask for.
            unsafe {
                if action.sa_flags & libc::SA_SIGINFO != 0 {
                    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                        mem::transmute(action.sa_sigaction);
                    handler(signal, info, context);
                } else {
                    let handler: extern "C" fn(libc::c_int) = mem::transmute(action.sa_sigaction);
                    handler(signal);
                }
            }
        }
        // A signal that a process sent has no instruction that faults again.
        Some(action) if action.sa_sigaction == libc::SIG_IGN && is_sent => {}
        _ => {
            // SAFETY: as the program had it. The instruction faults again, now with this effect.
            unsafe {
                let mut default: libc::sigaction = mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &default, ptr::null_mut());
                if is_sent {
                    libc::raise(signal);
                }
            }
        }
    }
}

/// Moves a thread that faulted in an access of the HCA to the exit of that access.
///
/// # Safety
/// `context` is that of a signal handler.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
unsafe fn resume_after_access(context: *mut libc::ucontext_t) -> bool {
    // SAFETY: the caller guarantees it.
    #[cfg(target_arch = "x86_64")]
    let register = unsafe { &mut (*context).uc_mcontext.gregs[libc::REG_RIP as usize] };
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    let register = unsafe { &mut (*context).uc_mcontext.pc };
    match recover_from_memory_fault(*register as usize) {
        Some(exit) => {
            *register = exit as _;
            true
        }
        None => false,
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
unsafe fn resume_after_access(_: *mut libc::ucontext_t) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use softhca_engine::{AtomicOperation, MemoryFault};
    use softhca_queue::MemoryBlock;
    use std::ptr::NonNull;

    const LENGTH: usize = 3 * 4096;

    /// Far from where the kernel puts mappings of other threads: after munmap, none of them takes the place.
    const PLACE: usize = 0x0a00_0000_0000;

    fn map() -> NonNull<u8> {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory. The kernel takes the address if it is free, and chooses another one if it is not.
        let memory = unsafe { libc::mmap(PLACE as *mut libc::c_void, LENGTH, protection, flags, -1, 0) };
        NonNull::new(memory.cast()).unwrap()
    }

    #[test]
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    fn memory_that_goes_away_fails_the_access_and_not_the_program() {
        super::install();
        super::install();
        let base = map();
        // SAFETY: the handler recovers from faults.
        let block = unsafe { MemoryBlock::borrowed(base, LENGTH, true) };
        let add = AtomicOperation::FetchAdd { add: 1 };
        let swap = AtomicOperation::CompareSwap { compare: 0, swap: 9 };
        for size in [0, 1, 4, 7, 8, 9, 100, 300, 4096] {
            let (bytes, mut back) = (vec![size as u8; size], vec![0; size]);
            assert_eq!(block.write(4000, &bytes), Ok(()));
            assert_eq!(block.read(4000, &mut back), Ok(()));
            assert_eq!(back, bytes);
        }
        assert_eq!((block.atomic(0, add), block.atomic(0, swap), block.load(0)), (Ok(0), Ok(1), Ok(1)));
        // SAFETY: nothing but the block refers to the page.
        assert_eq!(unsafe { libc::mprotect(base.as_ptr().add(4096).cast(), 4096, libc::PROT_READ) }, 0);
        for size in [200, 1000, 4096] {
            let (bytes, mut back) = (vec![1; size], vec![0; size]);
            assert_eq!(block.write(4000, &bytes), Err(MemoryFault), "{size}");
            assert_eq!(block.read(4000, &mut back), Ok(()), "{size}");
        }
        assert_eq!((block.atomic(4096, add), block.atomic(4096, swap)), (Err(MemoryFault), Err(MemoryFault)));
        // SAFETY: as above.
        assert_eq!(unsafe { libc::munmap(base.as_ptr().cast(), LENGTH) }, 0);
        for size in [1, 8, 64, 4096] {
            let (bytes, mut back) = (vec![1; size], vec![0; size]);
            assert_eq!(block.write(8192, &bytes), Err(MemoryFault), "{size}");
            assert_eq!(block.read(8192, &mut back), Err(MemoryFault), "{size}");
        }
    }
}
