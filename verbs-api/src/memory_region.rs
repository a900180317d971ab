//! Memory regions and windows.

use crate::backend::Backend;
use crate::memory::MemoryBlock;
use crate::{
    AccessFlags, Error, LocalKey, MemoryWindowType, ProtectionDomain, RemoteAddress, RemoteKey, Sge,
};
use parking_lot::Mutex;
use softhca_engine::{Command, DeviceLimits, Reply};
use softhca_queue::MemoryFault;
use softhca_types::{VerbsError, reply};
use std::ptr::NonNull;
use std::sync::Arc;

impl ProtectionDomain {
    /// Allocates zeroed memory and registers it. The card assigns its address.
    pub fn allocate_region(&self, length: u64, access: AccessFlags) -> Result<MemoryRegion, Error> {
        let block = self.inner.backend.allocate_memory(size_of_memory(length)?)?;
        MemoryRegion::new(self, block, None, access)
    }

    /// Allocates a region in private memory of this process, which a daemon accesses through the kernel. With a daemon,
    /// [`ProtectionDomain::allocate_region`] is faster.
    pub fn allocate_private_region(&self, length: u64, access: AccessFlags) -> Result<MemoryRegion, Error> {
        MemoryRegion::new(self, crate::memory::allocate(size_of_memory(length)?)?, None, access)
    }

    /// Registers memory of the caller's own, at its own address.
    ///
    /// # Safety
    /// `length` bytes at `base` stay mapped and readable, and with LOCAL_WRITE writable, until the region is dropped or
    /// deregistered. Until then, no Rust reference to them exists while a peer or the card may write them.
    #[allow(unsafe_code)]
    pub unsafe fn register_memory(
        &self,
        base: NonNull<u8>,
        length: usize,
        access: AccessFlags,
    ) -> Result<MemoryRegion, Error> {
        // SAFETY: as the caller says.
        unsafe { self.register_memory_iova(base, length, base.as_ptr() as u64, access) }
    }

    /// Registers memory of the caller's own, whose first byte work requests and peers find at `address`.
    ///
    /// # Safety
    /// As [`ProtectionDomain::register_memory`].
    #[allow(unsafe_code)]
    pub unsafe fn register_memory_iova(
        &self,
        base: NonNull<u8>,
        length: usize,
        address: u64,
        access: AccessFlags,
    ) -> Result<MemoryRegion, Error> {
        let writable = access.contains(AccessFlags::LOCAL_WRITE);
        // SAFETY: as the caller says.
        let block = Arc::new(unsafe { MemoryBlock::borrowed(base, length, writable) });
        MemoryRegion::new(self, block, Some(address), access)
    }

    /// Allocates a memory window. A bind ([`Operation::BindMemoryWindow`](crate::Operation::BindMemoryWindow)) gives it a range.
    pub fn allocate_memory_window(&self, kind: MemoryWindowType) -> Result<MemoryWindow, Error> {
        MemoryWindow::new(self, kind)
    }
}

/// A length that this process can have in memory.
fn size_of_memory(length: u64) -> Result<usize, Error> {
    let limit = DeviceLimits::MAX_MR_SIZE.min(isize::MAX as u64);
    if length > limit {
        let what = "the length of a region";
        return Err(VerbsError::LimitExceeded { what, value: length, limit }.into());
    }
    Ok(length as usize)
}

/// Registered memory.
///
/// Peers and the card change it at any time, so it is read and written by copy, never borrowed.
#[derive(Clone)]
pub struct MemoryRegion {
    inner: Arc<Inner>,
}

struct Inner {
    backend: Arc<dyn Backend>,
    registration: Mutex<Registration>,
}

/// The present registration of a region, which may be registered again with other parameters.
#[derive(Clone)]
struct Registration {
    domain: ProtectionDomain,
    block: Arc<MemoryBlock>,
    rkey: RemoteKey,
    iova: u64,
    is_registered: bool,
}

impl MemoryRegion {
    fn new(
        domain: &ProtectionDomain,
        block: Arc<MemoryBlock>,
        iova: Option<u64>,
        access: AccessFlags,
    ) -> Result<MemoryRegion, Error> {
        let backend = domain.inner.backend.clone();
        let length = block.len() as u64;
        let command = Command::RegisterMemoryRegion { pd: domain.inner.id, iova, length, access };
        let (reply, _) = backend.execute_with(command, Some(&block))?;
        let (rkey, iova) = reply!(reply, Reply::MemoryRegion { rkey, iova } => (rkey, iova));
        let registration = Registration { domain: domain.clone(), block, rkey, iova, is_registered: true };
        Ok(MemoryRegion { inner: Arc::new(Inner { backend, registration: Mutex::new(registration) }) })
    }

    /// The length in bytes.
    pub fn len(&self) -> u64 {
        self.inner.registration.lock().block.len() as u64
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The address of the first byte, as work requests name it (the iova).
    pub fn address(&self) -> u64 {
        self.inner.registration.lock().iova
    }

    /// The key for SGEs of this host.
    pub fn lkey(&self) -> LocalKey {
        LocalKey(self.rkey().0)
    }

    /// The key for remote access by peers.
    pub fn rkey(&self) -> RemoteKey {
        self.inner.registration.lock().rkey
    }

    /// A scatter/gather entry of `length` bytes at `offset`.
    pub fn sge(&self, offset: u64, length: u32) -> Sge {
        let present = self.inner.registration.lock();
        Sge { address: present.iova + offset, length, lkey: LocalKey(present.rkey.0) }
    }

    /// Address and rkey of the byte at `offset`, for work requests of a peer.
    pub fn remote_address(&self, offset: u64) -> RemoteAddress {
        let present = self.inner.registration.lock();
        RemoteAddress { address: present.iova + offset, rkey: present.rkey }
    }

    /// Accesses the memory. A caller may unmap its own memory once the region is deregistered or has other memory. Such
    /// memory is accessed under the lock, and not after deregistration.
    fn access<R>(&self, access: impl FnOnce(&MemoryBlock) -> Result<R, MemoryFault>) -> R {
        let present = self.inner.registration.lock();
        let result = if present.block.is_borrowed() {
            assert!(present.is_registered, "the region is deregistered: its memory may be gone");
            access(&present.block)
        } else {
            let block = present.block.clone();
            drop(present);
            access(&block)
        };
        result.expect("mapped bytes inside of the region, aligned for `load`")
    }

    /// Copies bytes in. A peer or thread that sees the last byte sees all others, and everything that this thread wrote
    /// before.
    ///
    /// # Panics
    /// If they do not fit, as with a slice. If the region is memory of the caller: after deregistration, and without
    /// LOCAL_WRITE, because it may be read-only.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) {
        self.access(|block| {
            assert!(
                block.is_writable(),
                "the region is read-only: its memory was registered without LOCAL_WRITE"
            );
            block.write(offset, bytes)
        });
    }

    /// Copies bytes out.
    ///
    /// # Panics
    /// If the range is outside of the region, as with a slice, or if the region is memory of the caller and deregistered.
    pub fn read_at(&self, offset: u64, length: u64) -> Vec<u8> {
        assert!(length <= self.len(), "bytes inside of the region");
        let mut bytes = vec![0; length as usize];
        self.read_into(offset, &mut bytes);
        bytes
    }

    /// Copies bytes out to a slice of the caller.
    ///
    /// # Panics
    /// As [`MemoryRegion::read_at`].
    pub fn read_into(&self, offset: u64, into: &mut [u8]) {
        self.access(|block| block.read(offset, into));
    }

    /// The eight bytes at `offset`, in one access.
    ///
    /// # Panics
    /// As [`MemoryRegion::read_at`], and if they are not aligned.
    pub fn load(&self, offset: u64) -> u64 {
        self.access(|block| block.load(offset))
    }

    /// Changes the access flags in place. The key stays the same.
    pub fn change_access(&self, access: AccessFlags) -> Result<(), Error> {
        self.reregister(None, None, Some(access))
    }

    /// Moves the region to another protection domain. The key stays the same.
    pub fn change_protection_domain(&self, domain: &ProtectionDomain) -> Result<(), Error> {
        self.reregister(Some(domain), None, None)
    }

    /// Registers the region again as something else, in place: what is `Some` changes. The memory comes with
    /// the address that its first byte gets; peers then need the new key.
    ///
    /// # Safety
    /// As [`ProtectionDomain::register_memory`], for the memory and access flags that the region then has.
    #[allow(unsafe_code)]
    pub unsafe fn reregister_memory(
        &self,
        domain: Option<&ProtectionDomain>,
        memory: Option<(NonNull<u8>, usize, u64)>,
        access: Option<AccessFlags>,
    ) -> Result<(), Error> {
        let block = self.inner.registration.lock().block.clone();
        let writable = access.map_or(block.is_writable(), |access| access.contains(AccessFlags::LOCAL_WRITE));
        let memory = memory.map(|(at, length, base)| {
            // SAFETY: as the caller says.
            (base, Arc::new(unsafe { MemoryBlock::borrowed(at, length, writable) }))
        });
        if access.is_some() && writable && memory.is_none() {
            // SAFETY: as the caller says.
            unsafe { block.set_writable() };
        }
        self.reregister(domain, memory, access)
    }

    fn reregister(
        &self,
        domain: Option<&ProtectionDomain>,
        memory: Option<(u64, Arc<MemoryBlock>)>,
        access: Option<AccessFlags>,
    ) -> Result<(), Error> {
        self.inner.backend.check_process()?;
        let mut present = self.inner.registration.lock();
        let block = memory.as_ref().map_or(&present.block, |(_, block)| block);
        if access.is_some_and(|access| access.contains(AccessFlags::LOCAL_WRITE)) && !block.is_writable() {
            let why = "the memory was registered as read-only, without LOCAL_WRITE";
            return Err(VerbsError::Invalid { what: "access flags", why }.into());
        }
        let pd = domain.map(|domain| domain.inner.id);
        let mapping = memory.as_ref().map(|(iova, block)| (*iova, block.len() as u64));
        let command = Command::ReregisterMemoryRegion { rkey: present.rkey, pd, mapping, access };
        let block = memory.map(|(_, block)| block);
        let (reply, _) = self.inner.backend.execute_with(command, block.as_ref())?;
        (present.rkey, present.iova) = reply!(reply, Reply::MemoryRegion { rkey, iova } => (rkey, iova));
        if let Some(domain) = domain {
            present.domain = domain.clone();
        }
        if let Some(block) = block {
            present.block = block;
        }
        Ok(())
    }

    /// Deregisters the region now, as `ibv_dereg_mr` does: it fails with [`VerbsError::Busy`] while a window is
    /// bound. Dropping the last handle deregisters it in any case.
    pub fn deregister(&self) -> Result<(), Error> {
        self.inner.backend.check_process()?;
        let mut present = self.inner.registration.lock();
        if present.is_registered {
            let command = Command::DeregisterMemoryRegion { rkey: present.rkey, invalidate_windows: false };
            self.inner.backend.execute(command)?;
            present.is_registered = false;
        }
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let present = self.registration.get_mut();
        if present.is_registered && self.backend.check_process().is_ok() {
            // The card must forget the memory before it is released. This fails only if the card is gone.
            let command = Command::DeregisterMemoryRegion { rkey: present.rkey, invalidate_windows: true };
            let _ = self.backend.execute(command);
        }
    }
}

/// A window onto a part of a region, bound by a work request.
#[derive(Clone)]
pub struct MemoryWindow {
    inner: Arc<WindowInner>,
}

struct WindowInner {
    domain: ProtectionDomain,
    rkey: RemoteKey,
}

impl MemoryWindow {
    fn new(domain: &ProtectionDomain, mw_type: MemoryWindowType) -> Result<MemoryWindow, Error> {
        let command = Command::AllocateMemoryWindow { pd: domain.inner.id, mw_type };
        let rkey = reply!(domain.inner.backend.execute(command)?, Reply::MemoryWindow(rkey) => rkey);
        Ok(MemoryWindow { inner: Arc::new(WindowInner { domain: domain.clone(), rkey }) })
    }

    /// The key that it was allocated with.
    pub fn rkey(&self) -> RemoteKey {
        self.inner.rkey
    }
}

impl Drop for WindowInner {
    fn drop(&mut self) {
        let _ = self.domain.inner.backend.execute(Command::DeallocateMemoryWindow(self.rkey));
    }
}
