//! How calls fail: by a returned errno, by a null pointer with errno set, or by −1 with errno set.

use core::ffi::c_int;
use softhca::Error;
use std::sync::LazyLock;

/// If set, every rejected call prints its reason to stderr.
const EXPLAIN_VARIABLE: &str = "SOFTHCA_EXPLAIN";

pub fn set(errno: c_int) {
    // SAFETY: the location belongs to this thread.
    unsafe { *libc::__errno_location() = errno };
}

/// A null pointer, with errno set.
pub fn null<T>(errno: c_int) -> *mut T {
    set(errno);
    core::ptr::null_mut()
}

/// −1, with errno set.
pub fn minus_one(errno: c_int) -> c_int {
    set(errno);
    -1
}

/// The errno of a rejected call.
pub fn report(verb: &str, error: &Error) -> c_int {
    static EXPLAINED: LazyLock<bool> = LazyLock::new(|| std::env::var_os(EXPLAIN_VARIABLE).is_some());
    if *EXPLAINED {
        eprintln!("softhca: {verb}: {error}");
    }
    error.errno()
}

/// The return value of a verb that returns an errno.
pub fn from_result(verb: &str, result: Result<(), Error>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => {
            let errno = report(verb, &error);
            set(errno);
            errno
        }
    }
}
