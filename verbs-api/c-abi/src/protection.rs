//! Protection domains, memory regions and memory windows.

use crate::abi::*;
use crate::errno::{Rejection, check};
use crate::faults;
use crate::{context, errno, object};
use core::ffi::{c_int, c_uint, c_void};
use core::ptr::NonNull;
use parking_lot::Mutex;
use softhca::{AccessFlags, MemoryRegion, MemoryWindow, MemoryWindowType, ProtectionDomain};
use softhca::{Resource, Verb};
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
    Pd = ibv_pd, "protection domain", |pd| Some((pd.context, pd.handle));
    Td = ibv_td, "thread domain", |td| Some((td.context, 0));
    Mr = ibv_mr, "memory region", |mr| Some((mr.context, mr.handle));
    Mw = ibv_mw, "memory window", |mw| Some((mw.context, mw.handle));
}

pub unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: a context of this library.
    let open = check!("ibv_alloc_pd", null, unsafe { context::find(context) });
    let domain = check!("ibv_alloc_pd", null, open.context.allocate_protection_domain());
    let handle = domain.handle();
    object::create(ibv_pd { context, handle }, Pd { domain, in_use: UseCount::default(), _parent: None })
}

pub unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    const VERB: &str = "ibv_dealloc_pd";
    // SAFETY: a domain of this library.
    let state = check!(VERB, code, unsafe { object::find::<Pd>(pd) });
    let object = Some((Resource::ProtectionDomain, state.domain.handle()));
    check!(VERB, code, faults::announce(Verb::DeallocPd, object));
    let users = Arc::strong_count(&state.in_use) - 1;
    if users > 0 {
        return Rejection::busy(format!(
            "{users} objects use the protection domain: queue pairs, memory regions, memory windows, address handles, \
             shared receive queues or parent domains"
        ))
        .code(VERB);
    }
    // SAFETY: as above.
    drop(unsafe { object::destroy::<Pd>(pd) });
    0
}

pub unsafe extern "C" fn alloc_td(context: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td {
    // SAFETY: a context of this library.
    check!("ibv_alloc_td", null, unsafe { context::find(context) });
    // SAFETY: the caller's attributes.
    let mask = unsafe { (*attr).comp_mask };
    if mask != 0 {
        return Rejection::invalid(format!("comp_mask has unknown bits {mask:#x}")).null("ibv_alloc_td");
    }
    object::create(ibv_td { context }, Td)
}

pub unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    // SAFETY: a thread domain of this library.
    check!("ibv_dealloc_td", code, unsafe { object::find::<Td>(td) });
    // SAFETY: as above.
    drop(unsafe { object::destroy::<Td>(td) });
    0
}

/// All objects are thread-safe, and custom allocators are never needed: a parent domain adds nothing to its domain.
pub unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    /// Allocators and their context.
    const KNOWN: u32 = 0b11;
    const VERB: &str = "ibv_alloc_parent_domain";
    // SAFETY: the caller's attributes.
    let attr = unsafe { &*attr };
    let unknown = attr.comp_mask & !KNOWN;
    if unknown != 0 {
        return Rejection::invalid(format!("comp_mask has unknown bits {unknown:#x}")).null(VERB);
    }
    // SAFETY: objects of this library.
    let state = check!(VERB, null, unsafe { object::find::<Pd>(attr.pd) });
    // SAFETY: a domain of this library.
    let handle = unsafe { (*attr.pd).handle };
    let (domain, users) = (state.domain.clone(), UseCount::default());
    object::create(ibv_pd { context, handle }, Pd { domain, in_use: users, _parent: Some(state.add_user()) })
}

/// The access flags of a mask.
fn rights(mask: c_uint) -> Result<AccessFlags, Rejection> {
    let wanted = mask & !(IBV_ACCESS_OPTIONAL_RANGE & !AccessFlags::all().bits());
    AccessFlags::from_bits(wanted).ok_or_else(|| {
        let unknown = wanted & !AccessFlags::all().bits();
        Rejection::unsupported(format!("access flags {unknown:#x} are not supported"))
    })
}

/// The first byte of memory to register. A region without bytes needs no address.
fn first_byte(at: *mut c_void, length: usize) -> Result<NonNull<u8>, Rejection> {
    let nowhere = || (length == 0).then(NonNull::dangling);
    NonNull::new(at.cast::<u8>()).or_else(nowhere).ok_or_else(|| Rejection::invalid("the address is null"))
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
    let state = check!(verb, null, unsafe { object::find::<Pd>(pd) });
    let access = check!(verb, null, rights(access));
    let base = check!(verb, null, first_byte(at, length));
    // SAFETY: the daemon accesses the memory through the kernel, which rejects addresses that do not exist.
    let result = unsafe { state.domain.register_memory_iova(base, length, address, access) };
    let region = check!(verb, null, result);
    let key = region.rkey().0;
    // SAFETY: a domain of this library.
    let context = unsafe { (*pd).context };
    let abi = ibv_mr { context, pd, addr: at, length, handle: key >> 8, lkey: key, rkey: key };
    object::create(abi, Mr { region, domain: Mutex::new(state.add_user()) })
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
    Rejection::unsupported("memory of another device cannot be registered").null("ibv_reg_dmabuf_mr")
}

/// Registers memory, optionally at another address. Memory of another device and DMA handles are not supported.
pub unsafe extern "C" fn reg_mr_ex(pd: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> *mut ibv_mr {
    const VERB: &str = "ibv_reg_mr_ex";
    const KNOWN: u64 = IBV_REG_MR_MASK_IOVA | IBV_REG_MR_MASK_ADDR;
    // SAFETY: the caller's attributes.
    let Some(attr) = (unsafe { attr.as_ref() }) else {
        return Rejection::invalid("the attributes are null").null(VERB);
    };
    let unknown = attr.comp_mask & !KNOWN;
    if unknown != 0 {
        return Rejection::unsupported(format!("comp_mask bits {unknown:#x} are not supported")).null(VERB);
    }
    if attr.comp_mask & IBV_REG_MR_MASK_ADDR == 0 {
        return Rejection::invalid("comp_mask lacks IBV_REG_MR_MASK_ADDR").null(VERB);
    }
    let address = if attr.comp_mask & IBV_REG_MR_MASK_IOVA == 0 { attr.addr as u64 } else { attr.iova };
    // SAFETY: the caller guarantees it.
    unsafe { register(VERB, pd, attr.addr, attr.length, address, attr.access as c_uint) }
}

/// The handle of [`alloc_buf`]: its mapping.
#[allow(non_camel_case_types, reason = "the name of the C headers")]
pub struct ibv_buf {
    at: *mut c_void,
    size: usize,
}

/// Allocates whole pages, which registration can share with a daemon.
pub unsafe extern "C" fn alloc_buf(pd: *mut ibv_pd, size: usize, into: *mut *mut ibv_buf) -> *mut c_void {
    const VERB: &str = "ibv_alloc_buf";
    // SAFETY: a domain of this library.
    check!(VERB, null, unsafe { object::find::<Pd>(pd) });
    if size == 0 || into.is_null() {
        return Rejection::invalid("the size is 0, or the handle has no place").null(VERB);
    }
    let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at a place that the kernel chooses.
    let at = unsafe { libc::mmap(core::ptr::null_mut(), size, rights, kind, -1, 0) };
    if at == libc::MAP_FAILED {
        return Rejection::new(libc::ENOMEM, format!("no memory for {size} bytes")).null(VERB);
    }
    // SAFETY: a valid pointer of the caller.
    unsafe { *into = Box::into_raw(Box::new(ibv_buf { at, size })) };
    at
}

pub unsafe extern "C" fn free_buf(buf: *mut ibv_buf) {
    if !buf.is_null() {
        // SAFETY: it came from `alloc_buf`, with its mapping.
        unsafe {
            let buf = Box::from_raw(buf);
            libc::munmap(buf.at, buf.size);
        }
    }
}

pub unsafe extern "C" fn reg_buf_mr(
    pd: *mut ibv_pd,
    buf: *mut ibv_buf,
    at: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    const VERB: &str = "ibv_reg_buf_mr";
    // SAFETY: a buffer of this library.
    let Some(buf) = (unsafe { buf.as_ref() }) else {
        return Rejection::invalid("the buffer is null").null(VERB);
    };
    let offset = (at as usize).checked_sub(buf.at as usize);
    if offset.and_then(|offset| offset.checked_add(length)).is_none_or(|end| end > buf.size) {
        return Rejection::invalid("the range is outside of the buffer").null(VERB);
    }
    // SAFETY: the caller guarantees it.
    unsafe { register(VERB, pd, at, length, at as u64, access as c_uint) }
}

pub unsafe extern "C" fn export_buf_dmabuf_fd(_: *mut ibv_buf) -> c_int {
    Rejection::new(libc::ENODATA, "the buffer is not backed by a DMA-buf")
        .minus_one("ibv_export_buf_dmabuf_fd")
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
    const VERB: &str = "ibv_rereg_mr";
    let has = |flag| flags & flag != 0;
    // SAFETY: objects of this library.
    let input = unsafe {
        object::find::<Mr>(mr).and_then(|state| {
            if flags & !KNOWN != 0 || flags == 0 {
                return Err(Rejection::invalid(format!("flags {flags:#x} request no known change")));
            }
            let domain = has(IBV_REREG_MR_CHANGE_PD).then(|| object::find::<Pd>(pd)).transpose()?;
            if has(IBV_REREG_MR_CHANGE_TRANSLATION) && length == 0 {
                return Err(Rejection::invalid("the length is 0"));
            }
            let base = has(IBV_REREG_MR_CHANGE_TRANSLATION).then(|| first_byte(at, length)).transpose()?;
            let new = has(IBV_REREG_MR_CHANGE_ACCESS).then(|| rights(access as c_uint)).transpose()?;
            Ok((state, domain, base.map(|base| (base, length, at as u64)), new))
        })
    };
    let (state, domain, memory, new) = match input {
        Ok(input) => input,
        Err(rejection) => {
            rejection.code(VERB);
            return IBV_REREG_MR_ERR_INPUT;
        }
    };
    // SAFETY: as in `register`.
    if let Err(error) = unsafe { state.region.reregister_memory(domain.map(|pd| &pd.domain), memory, new) } {
        Rejection::from(error).code(VERB);
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
    let state = check!("ibv_dereg_mr", code, unsafe { object::find::<Mr>(mr) });
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
    const VERB: &str = "ibv_alloc_mw";
    // SAFETY: a domain of this library.
    let state = check!(VERB, null, unsafe { object::find::<Pd>(pd) });
    let window_kind = match kind {
        IBV_MW_TYPE_1 => MemoryWindowType::Type1,
        IBV_MW_TYPE_2 => MemoryWindowType::Type2,
        _ => return Rejection::invalid(format!("{kind} is not a type of memory window")).null(VERB),
    };
    match state.domain.allocate_memory_window(window_kind) {
        Ok(window) => {
            let rkey = window.rkey().0;
            // SAFETY: a domain of this library.
            let context = unsafe { (*pd).context };
            let state = Mw { window, _domain: state.add_user() };
            object::create(ibv_mw { context, pd, rkey, handle: rkey >> 8, r#type: kind }, state)
        }
        Err(error) => Rejection::from(error).null(VERB),
    }
}

pub unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: a window of this library.
    let state = check!("ibv_dealloc_mw", code, unsafe { object::find::<Mw>(mw) });
    let window = Some((Resource::MemoryWindow, state.window.rkey().0));
    check!("ibv_dealloc_mw", code, faults::announce(Verb::DeallocMw, window));
    // SAFETY: as above.
    drop(unsafe { object::destroy::<Mw>(mw) });
    0
}

/// The domain behind a pointer, or why it cannot be used.
///
/// # Safety
/// `pd` is null or a domain of this library.
pub unsafe fn find<'a>(pd: *mut ibv_pd) -> Result<&'a Pd, Rejection> {
    // SAFETY: the caller guarantees it.
    unsafe { object::find::<Pd>(pd) }
}
