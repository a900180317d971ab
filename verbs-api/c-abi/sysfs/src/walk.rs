//! `ftw` and `nftw`: the program's callback gets paths below `/sys` and `/dev` again.

use crate::Callback;
use crate::next::{Path, next_function};
use crate::redirect::{shown, with_redirected};
use core::cell::Cell;
use core::ffi::{CStr, c_int, c_void};
use core::mem::transmute;
use core::ptr;

type Visit = unsafe extern "C" fn(Path, *const c_void, c_int) -> c_int;
type VisitWithPlace = unsafe extern "C" fn(Path, *const c_void, c_int, *const Place) -> c_int;

/// `struct FTW`: where the name begins in the path, and the depth.
#[repr(C)]
struct Place {
    base: c_int,
    level: c_int,
}

thread_local! {
    /// The program's callback in the innermost walk of this thread.
    static CALLBACK: Cell<Callback> = const { Cell::new(ptr::null_mut()) };
}

/// The path that the program sees, and how much shorter it is.
///
/// # Safety
/// `path` is a string.
unsafe fn restored(path: Path) -> (Path, c_int) {
    // SAFETY: the caller guarantees it. Both pointers are in one string.
    unsafe {
        let below = shown(CStr::from_ptr(path)).map_or(path, CStr::as_ptr);
        (below, below.offset_from(path) as c_int)
    }
}

unsafe extern "C" fn visit(path: Path, status: *const c_void, kind: c_int) -> c_int {
    // SAFETY: the program gave `ftw` this callback; `ftw` gave the arguments.
    unsafe { transmute::<Callback, Visit>(CALLBACK.get())(restored(path).0, status, kind) }
}

unsafe extern "C" fn visit_with_place(
    path: Path,
    status: *const c_void,
    kind: c_int,
    place: *const Place,
) -> c_int {
    // SAFETY: the program gave `nftw` this callback; `nftw` gave the arguments.
    unsafe {
        let (path, removed) = restored(path);
        let place = Place { base: (*place).base - removed, level: (*place).level };
        transmute::<Callback, VisitWithPlace>(CALLBACK.get())(path, status, kind, &place)
    }
}

/// Defines functions that walk a folder. The callback restores paths if the folder is redirected.
macro_rules! walks {
    ($(fn $name:ident(path, $callback:ident $(, $after:ident: $after_type:ty)*) -> c_int;)*) => {$(
        #[allow(missing_docs, reason = "the function of the C library")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(path: Path, callback: Callback $(, $after: $after_type)*) -> c_int {
            let next = next_function!($name as unsafe extern "C" fn(Path, Callback $(, $after_type)*) -> c_int);
            let outer = CALLBACK.replace(callback);
            let walk = |found: Path| {
                let callback = if found == path { callback } else { $callback as Callback };
                // SAFETY: the caller's arguments, with a valid path and a callback of the same type.
                unsafe { next(found, callback $(, $after)*) }
            };
            // SAFETY: the path is null or a string, as the caller guarantees.
            let (result, _) = unsafe { with_redirected(path, walk) };
            CALLBACK.set(outer);
            result
        }
    )*};
}

walks! {
    fn ftw(path, visit, open: c_int) -> c_int;
    fn ftw64(path, visit, open: c_int) -> c_int;
    fn nftw(path, visit_with_place, open: c_int, flags: c_int) -> c_int;
    fn nftw64(path, visit_with_place, open: c_int, flags: c_int) -> c_int;
}
