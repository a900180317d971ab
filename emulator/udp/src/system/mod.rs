//! System calls and the differences between operating systems. The only module with unsafe code.

mod interface;
pub use interface::{Interface, interface_of};

mod process;
pub use process::ProcessIdentity;

mod wait;
pub use wait::{Ready, Waker, wait_readable, wait_writable};

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

/// Fills at most 256 bytes from the operating system's random number generator.
pub(crate) fn fill_random(bytes: &mut [u8]) -> std::io::Result<()> {
    // SAFETY: the pointer and the length describe `bytes`, which the call only writes to.
    match unsafe { libc::getentropy(bytes.as_mut_ptr().cast(), bytes.len()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
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
