//! Symbols that only exist so that programs load.

use crate::errno;
use core::ffi::{c_int, c_void};

/// A function that returns an errno.
pub unsafe extern "C" fn code() -> c_int {
    errno::set(libc::EOPNOTSUPP);
    libc::EOPNOTSUPP
}

/// A function that returns −1 and sets errno.
pub unsafe extern "C" fn minus_one() -> c_int {
    errno::minus_one(libc::EOPNOTSUPP)
}

/// A function that returns a pointer.
pub unsafe extern "C" fn null() -> *mut c_void {
    errno::null(libc::EOPNOTSUPP)
}

/// A function that returns nothing, or a number that means "no".
pub unsafe extern "C" fn nothing() -> u64 {
    0
}
