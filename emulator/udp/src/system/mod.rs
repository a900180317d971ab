//! What differs between operating systems. The only place with unsafe code.

mod interface;
pub use interface::{Interface, interface_of};

mod process;
pub use process::ProcessMark;

mod wait;
pub use wait::{Ready, Waker, wait, wait_writable};

#[cfg(target_os = "linux")]
mod bells;
#[cfg(target_os = "linux")]
pub(crate) use bells::Bells;

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
pub(crate) use linux::*;

#[cfg(not(target_os = "linux"))]
mod plain;
#[cfg(not(target_os = "linux"))]
pub(crate) use plain::*;

/// Whether an error number tells of an earlier datagram's fate, not of this call.
pub(crate) fn is_of_the_network(number: i32) -> bool {
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
