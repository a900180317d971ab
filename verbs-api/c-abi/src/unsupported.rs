//! Symbols that have to exist so that programs load, and do nothing else.

use crate::errno;
use core::ffi::{c_int, c_void};

/// A call that returns an errno.
pub unsafe extern "C" fn code() -> c_int {
    errno::set(libc::EOPNOTSUPP);
    libc::EOPNOTSUPP
}

/// A call that returns −1 and sets errno.
pub unsafe extern "C" fn minus() -> c_int {
    errno::minus(libc::EOPNOTSUPP)
}

/// A call that returns a pointer.
pub unsafe extern "C" fn null() -> *mut c_void {
    errno::null(libc::EOPNOTSUPP)
}

/// A call that returns nothing, or a number that means "no".
pub unsafe extern "C" fn nothing() -> u64 {
    0
}
