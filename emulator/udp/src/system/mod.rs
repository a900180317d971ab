//! System calls and the differences between operating systems. The only module with unsafe code.

mod interface;
pub use interface::{Interface, interface_of};

mod process;
pub use process::{ProcessIdentity, at_exit};

mod signals;
pub use signals::SignalsBlocked;

mod wait;
pub use wait::{Ready, Waker, poll_readable, wait_readable, wait_writable};

#[cfg(target_os = "linux")]
mod wake_set;
#[cfg(target_os = "linux")]
pub(crate) use wake_set::WakeSet;

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
pub(crate) use linux::*;

#[cfg(not(target_os = "linux"))]
mod fallback;
#[cfg(not(target_os = "linux"))]
pub(crate) use fallback::*;

use std::num::NonZeroU64;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Numbers from the operating system's random number generator: for secrets, unpredictable numbers and file names.
///
/// # Panics
/// If the operating system has none.
pub fn random_words() -> [u64; 2] {
    let mut words = [0u64; 2];
    // SAFETY: the pointer and the length describe `words`, which the call only writes to.
    let result = unsafe { libc::getentropy(words.as_mut_ptr().cast(), size_of_val(&words)) };
    let error = std::io::Error::last_os_error();
    assert_eq!(result, 0, "the operating system has a random number generator: {error}");
    words
}

/// A number of the machine that stays the same until it restarts, if the operating system has one. Containers have that of
/// their machine.
pub(crate) fn machine_number() -> Option<NonZeroU64> {
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = boot_id.chars().filter(char::is_ascii_hexdigit).collect();
    let number = u128::from_str_radix(&digits, 16).ok()?;
    NonZeroU64::new(number as u64 ^ (number >> 64) as u64)
}

/// The time of CLOCK_MONOTONIC, which is the same in all processes.
pub fn monotonic_nanos() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes to `time` alone.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Lets a descriptor refer to what another one does, in place of what it referred to.
pub(crate) fn replace_descriptor(descriptor: BorrowedFd<'_>, by: BorrowedFd<'_>) -> std::io::Result<()> {
    // SAFETY: both are open, and the owner of the first may close it as before.
    let result = unsafe { libc::dup2(by.as_raw_fd(), descriptor.as_raw_fd()) };
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether an errno reports an error of an earlier datagram, not of this call.
pub(crate) fn is_deferred_network_error(number: i32) -> bool {
    matches!(
        number,
        libc::ECONNREFUSED
            | libc::EHOSTUNREACH
            | libc::ENETUNREACH
            | libc::EHOSTDOWN
            | libc::ENETDOWN
            | libc::ENOPROTOOPT
            | libc::EPROTO
            | libc::EMSGSIZE
    )
}
