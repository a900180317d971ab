//! Verbs of the C library in arbitrary, memory-safe order, on the device of a daemon: `tests/programs/sequences.c`, with the
//! input in place of random numbers. A program does nothing invalid to the library by calling a verb too early, too
//! late or with wrong attributes, and at the end it can destroy everything.

#![no_main]

mod running_daemon;

use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

#[cfg(has_verbs_header)]
unsafe extern "C" {
    fn fuzz_verbs(choices: *const u8, length: usize);
}

/// Without its header, the C program is not compiled.
#[cfg(not(has_verbs_header))]
unsafe fn fuzz_verbs(_: *const u8, _: usize) {}

// The program uses the library only through its C symbols.
use softhca_verbs as _;

fuzz_target!(|choices: &[u8]| {
    LazyLock::force(&running_daemon::SOCKET);
    // SAFETY: the function reads `length` bytes from the pointer, and the fuzzer has one thread that calls it.
    unsafe { fuzz_verbs(choices.as_ptr(), choices.len()) };
});
