//! A library to preload: the functions of the C library that take a path, with the paths of RDMA devices redirected.
//!
//! `SOFTHCA_SYSFS` names a folder with a `sys` and a `dev`. Lookups below `/sys/class/infiniband`,
//! `/sys/class/infiniband_verbs`, `/sys/devices/pci5fca:00` and `/dev/infiniband` go there. Everything else, and everything
//! without the variable, goes to the next library unchanged. `softhca exec` uses it where the kernel permits no mount
//! namespace.
//!
//! The C library's own callers do not go through the functions here: `fopen` does not call this `open`. So each function
//! that programs call has its own entry. Nothing here allocates, since an allocator may open files while it starts.

#![cfg(target_os = "linux")]

mod next;
mod redirect;

use core::ffi::{c_char, c_int, c_uint, c_void};
use libc::{DIR, FILE, glob_t, mode_t, size_t, ssize_t};
use next::interpose;
use redirect::{restore, with_redirected};

/// A comparison or filter of `scandir`, which is only passed on.
type Callback = *mut c_void;

interpose! {
    fn open(; path; flags: c_int, mode: mode_t) -> c_int;
    fn open64(; path; flags: c_int, mode: mode_t) -> c_int;
    fn openat(folder: c_int; path; flags: c_int, mode: mode_t) -> c_int;
    fn openat64(folder: c_int; path; flags: c_int, mode: mode_t) -> c_int;
    fn __open_2(; path; flags: c_int) -> c_int;
    fn __open64_2(; path; flags: c_int) -> c_int;
    fn __openat_2(folder: c_int; path; flags: c_int) -> c_int;
    fn __openat64_2(folder: c_int; path; flags: c_int) -> c_int;
    fn fopen(; path; mode: *const c_char) -> *mut FILE;
    fn fopen64(; path; mode: *const c_char) -> *mut FILE;
    fn freopen(; path; mode: *const c_char, stream: *mut FILE) -> *mut FILE;
    fn freopen64(; path; mode: *const c_char, stream: *mut FILE) -> *mut FILE;

    fn stat(; path; into: *mut c_void) -> c_int;
    fn stat64(; path; into: *mut c_void) -> c_int;
    fn lstat(; path; into: *mut c_void) -> c_int;
    fn lstat64(; path; into: *mut c_void) -> c_int;
    fn fstatat(folder: c_int; path; into: *mut c_void, flags: c_int) -> c_int;
    fn fstatat64(folder: c_int; path; into: *mut c_void, flags: c_int) -> c_int;
    fn statx(folder: c_int; path; flags: c_int, mask: c_uint, into: *mut c_void) -> c_int;
    // Programs linked before glibc 2.33 call these.
    fn __xstat(version: c_int; path; into: *mut c_void) -> c_int;
    fn __xstat64(version: c_int; path; into: *mut c_void) -> c_int;
    fn __lxstat(version: c_int; path; into: *mut c_void) -> c_int;
    fn __lxstat64(version: c_int; path; into: *mut c_void) -> c_int;
    fn __fxstatat(version: c_int, folder: c_int; path; into: *mut c_void, flags: c_int) -> c_int;
    fn __fxstatat64(version: c_int, folder: c_int; path; into: *mut c_void, flags: c_int) -> c_int;

    fn access(; path; mode: c_int) -> c_int;
    fn faccessat(folder: c_int; path; mode: c_int, flags: c_int) -> c_int;
    fn readlink(; path; into: *mut c_char, size: size_t) -> ssize_t;
    fn readlinkat(folder: c_int; path; into: *mut c_char, size: size_t) -> ssize_t;
    fn __readlink_chk(; path; into: *mut c_char, size: size_t, room: size_t) -> ssize_t;
    fn __readlinkat_chk(folder: c_int; path; into: *mut c_char, size: size_t, room: size_t) -> ssize_t;
    fn chdir(; path;) -> c_int;
    fn inotify_add_watch(watcher: c_int; path; mask: u32) -> c_int;

    fn opendir(; path;) -> *mut DIR;
    fn scandir(; path; into: *mut c_void, filter: Callback, compare: Callback) -> c_int;
    fn scandir64(; path; into: *mut c_void, filter: Callback, compare: Callback) -> c_int;
    fn scandirat(folder: c_int; path; into: *mut c_void, filter: Callback, compare: Callback) -> c_int;
    fn scandirat64(folder: c_int; path; into: *mut c_void, filter: Callback, compare: Callback) -> c_int;
}

// The result of these is a path below `/sys` again: programs find a device's PCI address in it.
interpose! {
    restoring fn realpath(; path; into: *mut c_char) -> *mut c_char;
    restoring fn __realpath_chk(; path; into: *mut c_char, room: size_t) -> *mut c_char;
    restoring fn canonicalize_file_name(; path;) -> *mut c_char;
}

/// Makes the results of `glob` paths below `/sys` and `/dev` again.
///
/// # Safety
/// `found` is what `glob` wrote if it returned 0.
unsafe fn restore_all(found: *mut glob_t, result: c_int, is_redirected: bool) -> c_int {
    if result == 0 && is_redirected {
        // SAFETY: filled in by `glob`, which reserves `gl_offs` entries before its results and keeps earlier results.
        let (paths, count) = unsafe { ((*found).gl_pathv.add((*found).gl_offs), (*found).gl_pathc) };
        for index in 0..count {
            // SAFETY: each of the results is a string that belongs to the caller.
            unsafe { restore(*paths.add(index), true) };
        }
    }
    result
}

// The two structures are the same where `off_t` has 64 bits.
interpose!(@define [|result, is_redirected| restore_all(into, result, is_redirected)]
    fn glob(; path; flags: c_int, error: Callback, into: *mut glob_t) -> c_int);
interpose!(@define [|result, is_redirected| restore_all(into, result, is_redirected)]
    fn glob64(; path; flags: c_int, error: Callback, into: *mut glob_t) -> c_int);
