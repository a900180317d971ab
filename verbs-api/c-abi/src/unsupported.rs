//! Symbols that only exist so that programs load. The build generates a function for each, with its name.

use crate::errno::Rejection;
use core::ffi::{c_int, c_void};

fn rejection() -> Rejection {
    Rejection::unsupported("SoftHCA does not support this call")
}

/// A function that returns an errno.
pub fn code(verb: &str) -> c_int {
    rejection().code(verb)
}

/// A function that returns −1 and sets errno.
pub fn minus_one(verb: &str) -> c_int {
    rejection().minus_one(verb)
}

/// A function that returns a pointer.
pub fn null(verb: &str) -> *mut c_void {
    rejection().null(verb)
}

/// A function that returns a number or a negative errno.
pub fn negative(verb: &str) -> c_int {
    rejection().negative(verb)
}

/// A query for something that the device does not have.
pub fn no_device(verb: &str) -> c_int {
    Rejection::new(libc::ENODEV, "the device has no data direct device").code(verb)
}

/// A function that returns nothing, or a number that means "no".
pub extern "C" fn nothing() -> u64 {
    0
}
