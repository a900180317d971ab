//! Protection domains, memory regions and memory windows.

use crate::abi::*;
use crate::context::ContextHandle;
use crate::errno::{self, Rejection};
use crate::faults;
use crate::object::{self, Handle};
use core::ffi::{c_int, c_uint, c_void};
use core::mem::MaybeUninit;
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

pub struct Td;

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

pub fn allocate(context: ContextHandle) -> Result<Handle<Pd>, Rejection> {
    let domain = context.find()?.context.allocate_protection_domain()?;
    let abi = ibv_pd { context, handle: domain.handle() };
    Ok(object::create(abi, Pd { domain, in_use: UseCount::default(), _parent: None }))
}

pub extern "C" fn alloc_pd(context: ContextHandle) -> Handle<Pd> {
    errno::handle("ibv_alloc_pd", || allocate(context))
}

pub extern "C" fn dealloc_pd(pd: Handle<Pd>) -> c_int {
    errno::code("ibv_dealloc_pd", || {
        let pd = pd.find()?;
        faults::announce(Verb::DeallocPd, Some((Resource::ProtectionDomain, pd.domain.handle())))?;
        let users = Arc::strong_count(&pd.in_use) - 1;
        if users > 0 {
            return Err(Rejection::busy(format!(
                "{users} objects use the protection domain: queue pairs, memory regions, memory windows, address \
                 handles, shared receive queues or parent domains"
            )));
        }
        pd.destroy();
        Ok(())
    })
}

pub extern "C" fn alloc_td(context: ContextHandle, attr: &ibv_td_init_attr) -> Handle<Td> {
    errno::handle("ibv_alloc_td", || {
        context.find()?;
        check_mask(attr.comp_mask, 0)?;
        Ok(object::create(ibv_td { context }, Td))
    })
}

pub extern "C" fn dealloc_td(td: Handle<Td>) -> c_int {
    errno::code("ibv_dealloc_td", || {
        td.find()?.destroy();
        Ok(())
    })
}

/// Rejects attributes that this library does not know.
pub fn check_mask(comp_mask: u32, known: u32) -> Result<(), Rejection> {
    match comp_mask & !known {
        0 => Ok(()),
        unknown => Err(Rejection::invalid(format!("comp_mask has unknown bits {unknown:#x}"))),
    }
}

/// All objects are thread-safe, and custom allocators are never needed: a parent domain adds nothing to its domain.
pub extern "C" fn alloc_parent_domain(
    context: ContextHandle,
    attr: &ibv_parent_domain_init_attr,
) -> Handle<Pd> {
    /// Allocators and their context.
    const KNOWN: u32 = 0b11;
    errno::handle("ibv_alloc_parent_domain", || {
        check_mask(attr.comp_mask, KNOWN)?;
        let parent = attr.pd.find()?;
        let abi = ibv_pd { context, handle: parent.abi().handle };
        let (domain, in_use) = (parent.domain.clone(), UseCount::default());
        Ok(object::create(abi, Pd { domain, in_use, _parent: Some(parent.add_user()) }))
    })
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

fn register(
    pd: Handle<Pd>,
    at: *mut c_void,
    length: usize,
    address: u64,
    access: c_uint,
) -> Result<Handle<Mr>, Rejection> {
    let domain = pd.find()?;
    let (access, base) = (rights(access)?, first_byte(at, length)?);
    // SAFETY: the daemon accesses the memory through the kernel, which rejects addresses that do not exist.
    let region = unsafe { domain.domain.register_memory_iova(base, length, address, access) }?;
    let key = region.rkey().0;
    let context = domain.abi().context;
    let abi = ibv_mr { context, pd, addr: at, length, handle: key >> 8, lkey: key, rkey: key };
    Ok(object::create(abi, Mr { region, domain: Mutex::new(domain.add_user()) }))
}

pub extern "C" fn reg_mr(pd: Handle<Pd>, at: *mut c_void, length: usize, access: c_int) -> Handle<Mr> {
    errno::handle("ibv_reg_mr", || register(pd, at, length, at as u64, access as c_uint))
}

pub extern "C" fn reg_mr_iova(
    pd: Handle<Pd>,
    at: *mut c_void,
    length: usize,
    address: u64,
    access: c_int,
) -> Handle<Mr> {
    errno::handle("ibv_reg_mr_iova", || register(pd, at, length, address, access as c_uint))
}

pub extern "C" fn reg_mr_iova2(
    pd: Handle<Pd>,
    at: *mut c_void,
    length: usize,
    address: u64,
    access: c_uint,
) -> Handle<Mr> {
    errno::handle("ibv_reg_mr_iova2", || register(pd, at, length, address, access))
}

pub extern "C" fn reg_dmabuf_mr(_: Handle<Pd>, _: u64, _: usize, _: u64, _: c_int, _: c_int) -> Handle<Mr> {
    let why = "memory of another device cannot be registered";
    errno::handle("ibv_reg_dmabuf_mr", || Err(Rejection::unsupported(why)))
}

/// Registers memory, optionally at another address. Memory of another device and DMA handles are not supported.
pub extern "C" fn reg_mr_ex(pd: Handle<Pd>, attr: Option<&ibv_mr_init_attr>) -> Handle<Mr> {
    const KNOWN: u64 = IBV_REG_MR_MASK_IOVA | IBV_REG_MR_MASK_ADDR;
    errno::handle("ibv_reg_mr_ex", || {
        let attr = attr.ok_or_else(|| Rejection::invalid("the attributes are null"))?;
        let unknown = attr.comp_mask & !KNOWN;
        if unknown != 0 {
            return Err(Rejection::unsupported(format!("comp_mask bits {unknown:#x} are not supported")));
        }
        if attr.comp_mask & IBV_REG_MR_MASK_ADDR == 0 {
            return Err(Rejection::invalid("comp_mask lacks IBV_REG_MR_MASK_ADDR"));
        }
        let has_iova = attr.comp_mask & IBV_REG_MR_MASK_IOVA != 0;
        let address = if has_iova { attr.iova } else { attr.addr as u64 };
        register(pd, attr.addr, attr.length, address, attr.access as c_uint)
    })
}

/// The handle of [`alloc_buf`]: its mapping.
#[allow(non_camel_case_types, reason = "the name of the C headers")]
pub struct ibv_buf {
    at: *mut c_void,
    size: usize,
}

/// Allocates whole pages, which registration can share with a daemon.
pub extern "C" fn alloc_buf(
    pd: Handle<Pd>,
    size: usize,
    into: Option<&mut MaybeUninit<Box<ibv_buf>>>,
) -> *mut c_void {
    errno::pointer("ibv_alloc_buf", || {
        pd.find()?;
        let Some(into) = into.filter(|_| size > 0) else {
            return Err(Rejection::invalid("the size is 0, or the handle has no place"));
        };
        let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at a place that the kernel chooses.
        let at = unsafe { libc::mmap(core::ptr::null_mut(), size, rights, kind, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(Rejection::new(libc::ENOMEM, format!("no memory for {size} bytes")));
        }
        into.write(Box::new(ibv_buf { at, size }));
        Ok(at)
    })
}

pub extern "C" fn free_buf(buf: Option<Box<ibv_buf>>) {
    if let Some(buf) = buf {
        // SAFETY: the mapping of `alloc_buf`.
        unsafe { libc::munmap(buf.at, buf.size) };
    }
}

pub extern "C" fn reg_buf_mr(
    pd: Handle<Pd>,
    buf: Option<&ibv_buf>,
    at: *mut c_void,
    length: usize,
    access: c_int,
) -> Handle<Mr> {
    errno::handle("ibv_reg_buf_mr", || {
        let buf = buf.ok_or_else(|| Rejection::invalid("the buffer is null"))?;
        let offset = (at as usize).checked_sub(buf.at as usize);
        if offset.and_then(|offset| offset.checked_add(length)).is_none_or(|end| end > buf.size) {
            return Err(Rejection::invalid("the range is outside of the buffer"));
        }
        register(pd, at, length, at as u64, access as c_uint)
    })
}

pub extern "C" fn export_buf_dmabuf_fd(_: Option<&ibv_buf>) -> c_int {
    Rejection::new(libc::ENODATA, "the buffer is not backed by a DMA-buf")
        .minus_one("ibv_export_buf_dmabuf_fd")
}

pub extern "C" fn rereg_mr(
    mr: Handle<Mr>,
    flags: c_int,
    pd: Handle<Pd>,
    at: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    const KNOWN: c_int =
        IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
    const VERB: &str = "ibv_rereg_mr";
    let has = |flag| flags & flag != 0;
    let read_input = || {
        let region = mr.find()?;
        if flags & !KNOWN != 0 || flags == 0 {
            return Err(Rejection::invalid(format!("flags {flags:#x} request no known change")));
        }
        let domain = has(IBV_REREG_MR_CHANGE_PD).then(|| pd.find()).transpose()?;
        if has(IBV_REREG_MR_CHANGE_TRANSLATION) && length == 0 {
            return Err(Rejection::invalid("the length is 0"));
        }
        let base = has(IBV_REREG_MR_CHANGE_TRANSLATION).then(|| first_byte(at, length)).transpose()?;
        let new = has(IBV_REREG_MR_CHANGE_ACCESS).then(|| rights(access as c_uint)).transpose()?;
        Ok((region, domain, base.map(|base| (base, length, at as u64)), new))
    };
    let (region, domain, memory, new) = match read_input() {
        Ok(input) => input,
        Err(rejection) => {
            rejection.code(VERB);
            return IBV_REREG_MR_ERR_INPUT;
        }
    };
    let new_domain = domain.as_ref().map(|pd| &pd.domain);
    // SAFETY: as in `register`.
    if let Err(error) = unsafe { region.region.reregister_memory(new_domain, memory, new) } {
        Rejection::from(error).code(VERB);
        return IBV_REREG_MR_ERR_CMD;
    }
    let key = region.region.rkey().0;
    region.update(|abi| {
        (abi.lkey, abi.rkey) = (key, key);
        if memory.is_some() {
            (abi.addr, abi.length) = (at, length);
        }
        if domain.is_some() {
            abi.pd = pd;
        }
    });
    if let Some(domain) = domain {
        *region.domain.lock() = domain.add_user();
    }
    0
}

pub extern "C" fn dereg_mr(mr: Handle<Mr>) -> c_int {
    errno::code("ibv_dereg_mr", || {
        let mr = mr.find()?;
        match mr.region.deregister() {
            // A lost device has released everything.
            Err(error) if !error.is_device_gone() => Err(error.into()),
            _ => {
                mr.destroy();
                Ok(())
            }
        }
    })
}

pub extern "C" fn alloc_mw(pd: Handle<Pd>, kind: c_int) -> Handle<Mw> {
    errno::handle("ibv_alloc_mw", || {
        let domain = pd.find()?;
        let mw_type = match kind {
            IBV_MW_TYPE_1 => MemoryWindowType::Type1,
            IBV_MW_TYPE_2 => MemoryWindowType::Type2,
            _ => return Err(Rejection::invalid(format!("{kind} is not a type of memory window"))),
        };
        let window = domain.domain.allocate_memory_window(mw_type)?;
        let (context, rkey) = (domain.abi().context, window.rkey().0);
        let abi = ibv_mw { context, pd, rkey, handle: rkey >> 8, r#type: kind };
        Ok(object::create(abi, Mw { window, _domain: domain.add_user() }))
    })
}

pub extern "C" fn dealloc_mw(mw: Handle<Mw>) -> c_int {
    errno::code("ibv_dealloc_mw", || {
        let mw = mw.find()?;
        faults::announce(Verb::DeallocMw, Some((Resource::MemoryWindow, mw.window.rkey().0)))?;
        mw.destroy();
        Ok(())
    })
}
