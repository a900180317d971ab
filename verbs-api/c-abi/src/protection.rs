//! Protection domains, memory regions and memory windows.

use crate::abi::*;
use crate::{context, errno, object};
use core::ffi::{c_int, c_uint, c_void};
use core::ptr::NonNull;
use parking_lot::Mutex;
use softhca::{AccessFlags, MemoryRegion, MemoryWindow, MemoryWindowType, ProtectionDomain};
use std::sync::Arc;

/// The state of an `ibv_pd`. A parent domain is another handle of its protection domain.
pub struct Pd {
    pub domain: ProtectionDomain,
    in_use: UseCount,
    /// For a parent domain: the domain it was created from.
    _parent: Option<UseCount>,
}

/// A reference that every object of a domain holds until it is destroyed.
pub type UseCount = Arc<()>;

impl Pd {
    pub fn add_user(&self) -> UseCount {
        self.in_use.clone()
    }
}

struct Td;

pub struct Mr {
    region: MemoryRegion,
    domain: Mutex<UseCount>,
}

pub struct Mw {
    /// Deallocates the window when it is dropped.
    pub window: MemoryWindow,
    _domain: UseCount,
}

object::kinds! {
    Pd = ibv_pd;
    Td = ibv_td;
    Mr = ibv_mr;
    Mw = ibv_mw;
}

pub unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: a context of this library.
    let Some(open) = (unsafe { context::of(context) }) else { return errno::null(libc::EINVAL) };
    match open.context.allocate_protection_domain() {
        Ok(domain) => {
            let handle = domain.handle();
            object::create(
                ibv_pd { context, handle },
                Pd { domain, in_use: UseCount::default(), _parent: None },
            )
        }
        Err(error) => errno::null(errno::report("ibv_alloc_pd", &error)),
    }
}

pub unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: a domain of this library.
    match unsafe { object::state::<Pd>(pd) } {
        None => libc::EINVAL,
        Some(state) if Arc::strong_count(&state.in_use) > 1 => libc::EBUSY,
        Some(_) => {
            // SAFETY: as above.
            drop(unsafe { object::destroy::<Pd>(pd) });
            0
        }
    }
}

pub unsafe extern "C" fn alloc_td(context: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td {
    // SAFETY: a context of this library, and the caller's attributes.
    if unsafe { context::of(context) }.is_none() || unsafe { (*attr).comp_mask } != 0 {
        return errno::null(libc::EINVAL);
    }
    object::create(ibv_td { context }, Td)
}

pub unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    // SAFETY: a thread domain of this library.
    if unsafe { object::destroy::<Td>(td) }.is_some() { 0 } else { libc::EINVAL }
}

/// All objects are thread-safe, and custom allocators are never needed: a parent domain adds nothing to its domain.
pub unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    /// Allocators and their context.
    const KNOWN: u32 = 0b11;
    // SAFETY: the caller's attributes.
    let attr = unsafe { &*attr };
    if attr.comp_mask & !KNOWN != 0 {
        return errno::null(libc::EINVAL);
    }
    // SAFETY: objects of this library.
    let Some(state) = (unsafe { object::state::<Pd>(attr.pd) }) else { return errno::null(libc::EINVAL) };
    // SAFETY: a domain of this library.
    let handle = unsafe { (*attr.pd).handle };
    let (domain, users) = (state.domain.clone(), UseCount::default());
    object::create(ibv_pd { context, handle }, Pd { domain, in_use: users, _parent: Some(state.add_user()) })
}

/// The access flags of a mask; `None` if a flag is not supported.
fn rights(mask: c_uint) -> Option<AccessFlags> {
    AccessFlags::from_bits(mask & !(IBV_ACCESS_OPTIONAL_RANGE & !AccessFlags::all().bits()))
}

unsafe fn register(
    verb: &str,
    pd: *mut ibv_pd,
    at: *mut c_void,
    length: usize,
    address: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: a domain of this library.
    let Some(state) = (unsafe { object::state::<Pd>(pd) }) else { return errno::null(libc::EINVAL) };
    let Some(access) = rights(access) else { return errno::null(libc::EOPNOTSUPP) };
    // A region without bytes needs no address.
    let nowhere = || (length == 0).then(NonNull::dangling);
    let Some(base) = NonNull::new(at.cast::<u8>()).or_else(nowhere) else {
        return errno::null(libc::EINVAL);
    };
    // SAFETY: the daemon accesses the memory through the kernel, which rejects addresses that do not exist.
    match unsafe { state.domain.register_memory_iova(base, length, address, access) } {
        Ok(region) => {
            let key = region.rkey().0;
            // SAFETY: a domain of this library.
            let context = unsafe { (*pd).context };
            let abi = ibv_mr { context, pd, addr: at, length, handle: key >> 8, lkey: key, rkey: key };
            object::create(abi, Mr { region, domain: Mutex::new(state.add_user()) })
        }
        Err(error) => errno::null(errno::report(verb, &error)),
    }
}

pub unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    at: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller guarantees it.
    unsafe { register("ibv_reg_mr", pd, at, length, at as u64, access as c_uint) }
}

pub unsafe extern "C" fn reg_mr_iova(
    pd: *mut ibv_pd,
    at: *mut c_void,
    length: usize,
    address: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller guarantees it.
    unsafe { register("ibv_reg_mr_iova", pd, at, length, address, access as c_uint) }
}

pub unsafe extern "C" fn reg_mr_iova2(
    pd: *mut ibv_pd,
    at: *mut c_void,
    length: usize,
    address: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: the caller guarantees it.
    unsafe { register("ibv_reg_mr_iova2", pd, at, length, address, access) }
}

pub unsafe extern "C" fn reg_dmabuf_mr(
    _: *mut ibv_pd,
    _: u64,
    _: usize,
    _: u64,
    _: c_int,
    _: c_int,
) -> *mut ibv_mr {
    errno::null(libc::EOPNOTSUPP)
}

pub unsafe extern "C" fn rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    at: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    const KNOWN: c_int =
        IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
    let bad = |code| {
        errno::set(code);
        IBV_REREG_MR_ERR_INPUT
    };
    // SAFETY: a region of this library.
    let Some(state) = (unsafe { object::state::<Mr>(mr) }).filter(|_| flags & !KNOWN == 0 && flags != 0)
    else {
        return bad(libc::EINVAL);
    };
    let mut domain = None;
    if flags & IBV_REREG_MR_CHANGE_PD != 0 {
        // SAFETY: a domain of this library.
        let Some(found) = (unsafe { object::state::<Pd>(pd) }) else { return bad(libc::EINVAL) };
        domain = Some(found);
    }
    let mut memory = None;
    if flags & IBV_REREG_MR_CHANGE_TRANSLATION != 0 {
        let Some(base) = NonNull::new(at.cast::<u8>()).filter(|_| length > 0) else {
            return bad(libc::EINVAL);
        };
        memory = Some((base, length, at as u64));
    }
    let mut new = None;
    if flags & IBV_REREG_MR_CHANGE_ACCESS != 0 {
        new = rights(access as c_uint);
        if new.is_none() {
            return bad(libc::EOPNOTSUPP);
        }
    }
    // SAFETY: as in `register`.
    if let Err(error) = unsafe { state.region.reregister_memory(domain.map(|pd| &pd.domain), memory, new) } {
        errno::set(errno::report("ibv_rereg_mr", &error));
        return IBV_REREG_MR_ERR_CMD;
    }
    let key = state.region.rkey().0;
    // SAFETY: a region of this library, which no other thread changes meanwhile.
    let abi = unsafe { &mut *mr };
    (abi.lkey, abi.rkey) = (key, key);
    if memory.is_some() {
        (abi.addr, abi.length) = (at, length);
    }
    if let Some(domain) = domain {
        abi.pd = pd;
        *state.domain.lock() = domain.add_user();
    }
    0
}

pub unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: a region of this library.
    let Some(state) = (unsafe { object::state::<Mr>(mr) }) else { return libc::EINVAL };
    match state.region.deregister() {
        // A lost device has released everything.
        Err(error) if !error.is_device_gone() => errno::from_result("ibv_dereg_mr", Err(error)),
        _ => {
            // SAFETY: as above.
            drop(unsafe { object::destroy::<Mr>(mr) });
            0
        }
    }
}

pub unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: c_int) -> *mut ibv_mw {
    // SAFETY: a domain of this library.
    let Some(state) = (unsafe { object::state::<Pd>(pd) }) else { return errno::null(libc::EINVAL) };
    let window_kind = match kind {
        IBV_MW_TYPE_1 => MemoryWindowType::Type1,
        IBV_MW_TYPE_2 => MemoryWindowType::Type2,
        _ => return errno::null(libc::EINVAL),
    };
    match state.domain.allocate_memory_window(window_kind) {
        Ok(window) => {
            let rkey = window.rkey().0;
            // SAFETY: a domain of this library.
            let context = unsafe { (*pd).context };
            let state = Mw { window, _domain: state.add_user() };
            object::create(ibv_mw { context, pd, rkey, handle: rkey >> 8, r#type: kind }, state)
        }
        Err(error) => errno::null(errno::report("ibv_alloc_mw", &error)),
    }
}

pub unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: a window of this library.
    if unsafe { object::destroy::<Mw>(mw) }.is_some() { 0 } else { libc::EINVAL }
}

/// The domain behind a pointer that may be null.
///
/// # Safety
/// `pd` is null or a domain of this library.
pub unsafe fn of<'a>(pd: *mut ibv_pd) -> Option<&'a Pd> {
    // SAFETY: the caller guarantees it.
    unsafe { object::state::<Pd>(pd) }
}
