//! Finds where the program called this library: the innermost return address outside of it.

use core::ffi::{CStr, c_int, c_void};
use core::mem::MaybeUninit;
use softhca::fault::CallSite;

/// A frame of the stack, as the unwinder sees it.
#[repr(C)]
struct UnwindContext {
    _opaque: [u8; 0],
}

/// Results of a callback of the unwinder.
const CONTINUE: c_int = 0;
const STOP: c_int = 4;

// The runtime of Rust links the unwinder.
unsafe extern "C" {
    fn _Unwind_Backtrace(
        callback: extern "C" fn(*mut UnwindContext, *mut c_void) -> c_int,
        argument: *mut c_void,
    ) -> c_int;
    fn _Unwind_GetIP(context: *mut UnwindContext) -> usize;
}

/// The module of an address; `None` for code that no file contains.
fn module_of(address: usize) -> Option<libc::Dl_info> {
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `dladdr` accepts any address, and writes the structure if it returns another value than 0.
    unsafe {
        let result = libc::dladdr(address as *const c_void, found.as_mut_ptr());
        (result != 0).then(|| found.assume_init())
    }
}

/// The module of this library, and the first call from another module.
struct Search {
    own: *mut c_void,
    found: Option<CallSite>,
}

extern "C" fn look_at_frame(context: *mut UnwindContext, argument: *mut c_void) -> c_int {
    // SAFETY: the unwinder passes the argument of `find` and a frame that is valid during the call.
    let (search, address) = unsafe { (&mut *argument.cast::<Search>(), _Unwind_GetIP(context)) };
    let Some(module) = module_of(address) else { return CONTINUE };
    if module.dli_fbase == search.own {
        return CONTINUE;
    }
    // SAFETY: the name of a module that is loaded, because its code is on the stack.
    let path = unsafe { CStr::from_ptr(module.dli_fname) }.to_string_lossy();
    let name = path.rsplit('/').next().unwrap_or_default();
    search.found = Some(CallSite::new(name, address.wrapping_sub(module.dli_fbase as usize) as u64));
    STOP
}

/// The call site of the verb that this thread executes.
pub fn find() -> Option<CallSite> {
    let own = module_of(find as *const () as usize)?.dli_fbase;
    let mut search = Search { own, found: None };
    // SAFETY: the callback matches the argument, which lives until the end of the call.
    unsafe { _Unwind_Backtrace(look_at_frame, (&raw mut search).cast()) };
    search.found
}
