//! Finds where the program called this library: the innermost return address outside of it, and its source line.

use core::ffi::{CStr, c_int, c_void};
use core::mem::MaybeUninit;
use core::ops::Range;
use parking_lot::Mutex;
use softhca::QueuePair;
use softhca::fault::{CallSite, MAX_CALL_SITES};
use std::backtrace::Backtrace;
use std::collections::HashMap;
use std::sync::LazyLock;

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

/// The code of this library.
static OWN: LazyLock<Range<usize>> = LazyLock::new(|| {
    let mut search = ModuleSearch { address: find as *const () as usize, found: 0..0 };
    // SAFETY: the callback matches the argument, which lives until the end of the call.
    unsafe { libc::dl_iterate_phdr(Some(look_at_module), (&raw mut search).cast()) };
    search.found
});

struct ModuleSearch {
    address: usize,
    found: Range<usize>,
}

unsafe extern "C" fn look_at_module(info: *mut libc::dl_phdr_info, _: usize, argument: *mut c_void) -> c_int {
    // SAFETY: the caller passes the argument of `OWN`, and a module with its headers.
    let (search, base, headers) = unsafe {
        let info = &*info;
        let headers = core::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
        (&mut *argument.cast::<ModuleSearch>(), info.dlpi_addr as usize, headers)
    };
    let segments = headers.iter().filter(|header| header.p_type == libc::PT_LOAD);
    let mut ranges = segments.map(|header| {
        let start = base.wrapping_add(header.p_vaddr as usize);
        start..start.wrapping_add(header.p_memsz as usize)
    });
    let found = ranges.find(|range| range.contains(&search.address));
    search.found = found.clone().unwrap_or_default();
    c_int::from(found.is_some())
}

/// The innermost return addresses outside of this library. Without optimization, functions of verbs.h are calls of their
/// own, and the second address is the caller of such a function.
type Callers = [usize; 2];

extern "C" fn look_at_frame(context: *mut UnwindContext, argument: *mut c_void) -> c_int {
    // SAFETY: the unwinder passes the argument of `callers` and a frame that is valid during the call.
    let (callers, address) = unsafe { (&mut *argument.cast::<Callers>(), _Unwind_GetIP(context)) };
    if OWN.contains(&address) {
        return CONTINUE;
    }
    let Some(free) = callers.iter_mut().find(|known| **known == 0) else { return STOP };
    *free = address;
    CONTINUE
}

fn callers() -> Callers {
    let mut callers = Callers::default();
    // SAFETY: the callback matches the argument, which lives until the end of the call.
    unsafe { _Unwind_Backtrace(look_at_frame, (&raw mut callers).cast()) };
    callers
}

/// The return address as module and offset.
fn module_and_offset(address: usize) -> Option<CallSite> {
    let module = module_of(address)?;
    // SAFETY: the name of a module that is loaded, because its code is on the stack.
    let path = unsafe { CStr::from_ptr(module.dli_fname) }.to_string_lossy();
    let name = path.rsplit('/').next().unwrap_or_default();
    Some(CallSite::new(name, address.wrapping_sub(module.dli_fbase as usize) as u64))
}

/// The call site of the verb that this thread executes, as module and offset.
pub fn find() -> Option<CallSite> {
    module_and_offset(callers()[0])
}

/// The variable with which `softhca exec` asks for the places of calls that post work requests.
const CALL_SITES_VARIABLE: &str = "SOFTHCA_CALL_SITES";

/// The numbers of the known calls, by context; `None` unless they are wanted.
static POSTS: LazyLock<Option<Mutex<Posts>>> =
    LazyLock::new(|| std::env::var_os(CALL_SITES_VARIABLE).map(|_| Mutex::default()));

type Posts = HashMap<(usize, Callers), u16>;

/// The number of the call that posts work requests to this queue pair, for the event log; 0 if it is not wanted.
#[inline]
pub fn of_post(pair: &QueuePair) -> u16 {
    POSTS.as_ref().map_or(0, |posts| number_of(posts, pair))
}

#[cold]
fn number_of(posts: &Mutex<Posts>, pair: &QueuePair) -> u16 {
    let (context, callers) = (pair.context_address(), callers());
    let mut posts = posts.lock();
    if let Some(number) = posts.get(&(context, callers)) {
        return *number;
    }
    if posts.len() >= usize::from(MAX_CALL_SITES) {
        return 0;
    }
    let number = posts.len() as u16 + 1;
    let site = in_source(&Backtrace::force_capture()).or_else(|| module_and_offset(callers[0]));
    let number = site.and_then(|site| pair.name_call_site(number, site).ok()).map_or(0, |()| number);
    posts.insert((context, callers), number);
    number
}

/// The headers whose functions a program calls as verbs.
const HEADERS: [&str; 2] = ["infiniband/verbs.h", "rdma/rdma_verbs.h"];

/// The line of the program, if it has debug information. In the text of a backtrace, a function is a line
/// `4: 0x55d0c1 - name` and, if its place is known, a line `at path:line:column`.
fn in_source(backtrace: &Backtrace) -> Option<CallSite> {
    let text = format!("{backtrace:#}");
    let mut lines = text.lines().map(str::trim).peekable();
    while let Some(function) = lines.next() {
        let place = lines.next_if(|line| line.starts_with("at "));
        let digits = function.split_once("0x")?.1.split(' ').next()?;
        if OWN.contains(&usize::from_str_radix(digits, 16).ok()?) {
            continue;
        }
        let mut parts = place?.strip_prefix("at ")?.rsplitn(3, ':').skip(1);
        let (line, path) = (parts.next()?.parse().ok()?, parts.next()?);
        if !HEADERS.iter().any(|header| path.ends_with(header)) {
            return Some(CallSite::in_source(path.rsplit('/').next().unwrap_or(path), line));
        }
    }
    None
}
