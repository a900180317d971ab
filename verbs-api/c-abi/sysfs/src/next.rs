//! The functions of the next library in the search order, usually the C library's.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};
use libc::ssize_t;

/// The result of a function that the next library does not have.
pub trait Failure {
    /// With errno set.
    fn failure() -> Self;
}

impl Failure for c_int {
    fn failure() -> c_int {
        -1
    }
}

impl Failure for ssize_t {
    fn failure() -> ssize_t {
        -1
    }
}

impl<T> Failure for *mut T {
    fn failure() -> *mut T {
        ptr::null_mut()
    }
}

/// Fails a call because no other library has the function.
pub fn missing<R: Failure>() -> R {
    // SAFETY: the location of the calling thread's errno.
    unsafe { *libc::__errno_location() = libc::ENOSYS };
    R::failure()
}

/// Versions of functions that are no longer the default, by architecture.
#[cfg(target_arch = "x86_64")]
const OLD_VERSIONS: [&CStr; 2] = [c"GLIBC_2.2.5", c"GLIBC_2.4"];
#[cfg(not(target_arch = "x86_64"))]
const OLD_VERSIONS: [&CStr; 1] = [c"GLIBC_2.17"];

/// The next function of this name; null if there is none.
pub fn find(known: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let mut found = known.load(Ordering::Relaxed);
    if found.is_null() {
        // SAFETY: the name is a string.
        found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
        for version in OLD_VERSIONS {
            if found.is_null() {
                // SAFETY: both are strings.
                found = unsafe { libc::dlvsym(libc::RTLD_NEXT, name.as_ptr(), version.as_ptr()) };
            }
        }
        known.store(found, Ordering::Relaxed);
    }
    found
}

/// A pointer that is a path in C.
pub type Path = *const c_char;

/// The next function of a name. The function that uses it fails if there is none.
macro_rules! next_function {
    ($name:ident as $function:ty) => {{
        static NEXT: core::sync::atomic::AtomicPtr<core::ffi::c_void> =
            core::sync::atomic::AtomicPtr::new(core::ptr::null_mut());
        const NAME: &core::ffi::CStr =
            match core::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name without a null byte"),
            };
        let next = $crate::next::find(&NEXT, NAME);
        if next.is_null() {
            return $crate::next::missing();
        }
        // SAFETY: the function of this name has this type. Optional arguments are passed as any others are.
        let next: $function = unsafe { core::mem::transmute(next) };
        next
    }};
}
pub(crate) use next_function;

/// Defines functions that redirect their path. `path` has arguments before and after it. `restoring` functions return a
/// path.
macro_rules! interpose {
    ($(fn $name:ident($($before:ident: $before_type:ty),*; $path:ident; $($after:ident: $after_type:ty),*) -> $result:ty;)*) => {
        $(interpose!(@define [|result, _| result] fn $name($($before: $before_type),*; $path; $($after: $after_type),*) -> $result);)*
    };
    ($(restoring fn $name:ident($($before:ident: $before_type:ty),*; $path:ident; $($after:ident: $after_type:ty),*) -> $result:ty;)*) => {
        $(interpose!(@define [restore] fn $name($($before: $before_type),*; $path; $($after: $after_type),*) -> $result);)*
    };
    (@define [$finish:expr] fn $name:ident($($before:ident: $before_type:ty),*; $path:ident; $($after:ident: $after_type:ty),*) -> $result:ty) => {
        #[allow(missing_docs, reason = "the function of the C library")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($before: $before_type,)* $path: $crate::next::Path $(, $after: $after_type)*) -> $result {
            let next = $crate::next::next_function!(
                $name as unsafe extern "C" fn($($before_type,)* $crate::next::Path $(, $after_type)*) -> $result
            );
            // SAFETY: the caller's arguments, with a valid path.
            let call = |$path| unsafe { next($($before,)* $path $(, $after)*) };
            // SAFETY: the path is null or a string, as the caller guarantees.
            let (result, is_redirected) = unsafe { with_redirected($path, call) };
            // SAFETY: the result of the function is null, or what it returns for a path.
            #[allow(unused_unsafe, reason = "only some results are restored")]
            unsafe { ($finish)(result, is_redirected) }
        }
    };
}
pub(crate) use interpose;
