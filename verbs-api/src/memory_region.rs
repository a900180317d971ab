//! Memory regions and windows.

use crate::backend::Backend;
use crate::memory::MemoryBlock;
use crate::{
    AccessFlags, Error, LocalKey, MemoryWindowType, ProtectionDomain, RemoteAddress, RemoteKey, Sge,
};
use parking_lot::Mutex;
use std::ptr::NonNull;
use std::sync::Arc;

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

/// What the region is at present: it may be registered again as something else.
#[derive(Clone)]
struct Registration {
    domain: ProtectionDomain,
    block: Arc<MemoryBlock>,
    rkey: RemoteKey,
    base: u64,
    is_registered: bool,
}

impl MemoryRegion {
    pub(crate) fn new(
        domain: &ProtectionDomain,
        block: Arc<MemoryBlock>,
        base: Option<u64>,
        access: AccessFlags,
    ) -> Result<MemoryRegion, Error> {
        let backend = domain.inner.backend.clone();
        let length = block.len() as u64;
        let (key, base) = backend.register_memory(domain.inner.id, base, length, block.clone(), access)?;
        let present =
            Mutex::new(Registration { domain: domain.clone(), block, rkey: key, base, is_registered: true });
        Ok(MemoryRegion { inner: Arc::new(Inner { backend, registration: present }) })
    }

    /// How many bytes.
    pub fn len(&self) -> u64 {
        self.inner.registration.lock().block.len() as u64
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The address of the first byte, in the region's own terms.
    pub fn address(&self) -> u64 {
        self.inner.registration.lock().base
    }

    /// The key for local use.
    pub fn lkey(&self) -> LocalKey {
        LocalKey(self.rkey().0)
    }

    /// The key for peers.
    pub fn rkey(&self) -> RemoteKey {
        self.inner.registration.lock().rkey
    }

    /// A scatter/gather entry of `length` bytes at `offset`.
    pub fn sge(&self, offset: u64, length: u32) -> Sge {
        let present = self.inner.registration.lock();
        Sge { address: present.base + offset, length, lkey: LocalKey(present.rkey.0) }
    }

    /// The place at `offset`, as a peer names it.
    pub fn remote_address(&self, offset: u64) -> RemoteAddress {
        let present = self.inner.registration.lock();
        RemoteAddress { address: present.base + offset, rkey: present.rkey }
    }

    fn block(&self) -> Arc<MemoryBlock> {
        self.inner.registration.lock().block.clone()
    }

    /// Copies bytes in. Whoever sees them sees what this thread wrote before.
    ///
    /// # Panics
    /// If they do not fit, as with a slice.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) {
        self.block().write(offset, bytes).expect("bytes inside of the region");
    }

    /// Copies bytes out.
    ///
    /// # Panics
    /// If the range is outside of the region, as with a slice.
    pub fn read_at(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.read_into(offset, &mut bytes);
        bytes
    }

    /// Copies bytes out to where the caller wants them.
    ///
    /// # Panics
    /// If the range is outside of the region, as with a slice.
    pub fn read_into(&self, offset: u64, into: &mut [u8]) {
        self.block().read(offset, into).expect("bytes inside of the region");
    }

    /// The eight bytes at `offset`, in one access.
    ///
    /// # Panics
    /// If they are outside of the region or not aligned.
    pub fn load(&self, offset: u64) -> u64 {
        self.block().load(offset).expect("eight aligned bytes inside of the region")
    }

    /// Changes what is allowed, in place, under the same key.
    pub fn change_access(&self, access: AccessFlags) -> Result<(), Error> {
        self.reregister(None, None, Some(access))
    }

    /// Moves the region to another protection domain, in place, under the same key.
    pub fn change_protection_domain(&self, domain: &ProtectionDomain) -> Result<(), Error> {
        self.reregister(Some(domain), None, None)
    }

    /// Registers the region again as something else, in place: what is `Some` changes. The memory comes with
    /// the address that its first byte gets; peers then need the new key.
    ///
    /// # Safety
    /// As [`ProtectionDomain::register_foreign`], for the new memory.
    #[allow(unsafe_code)]
    pub unsafe fn reregister_memory(
        &self,
        domain: Option<&ProtectionDomain>,
        memory: Option<(NonNull<u8>, usize, u64)>,
        access: Option<AccessFlags>,
    ) -> Result<(), Error> {
        // SAFETY: as the caller says.
        let memory =
            memory.map(|(at, length, base)| (base, Arc::new(unsafe { MemoryBlock::borrowed(at, length) })));
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
        let id = domain.map(|domain| domain.inner.id);
        present.rkey = self.inner.backend.reregister_memory(present.rkey, id, memory.clone(), access)?;
        if let Some(domain) = domain {
            present.domain = domain.clone();
        }
        if let Some((base, block)) = memory {
            (present.base, present.block) = (base, block);
        }
        if access.is_some_and(|access| access.contains(AccessFlags::ZERO_BASED)) {
            present.base = 0;
        }
        Ok(())
    }

    /// Takes the region off the card now, or says why that cannot be: a window is bound to it. Otherwise
    /// that happens when the last handle is dropped, window or not.
    pub fn deregister(&self) -> Result<(), Error> {
        self.inner.backend.check_process()?;
        let mut present = self.inner.registration.lock();
        if present.is_registered {
            self.inner.backend.deregister_memory(present.rkey)?;
            present.is_registered = false;
        }
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let present = self.registration.get_mut();
        if present.is_registered && self.backend.check_process().is_ok() {
            let _ = self.backend.deregister_memory(present.rkey);
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
    pub(crate) fn new(domain: &ProtectionDomain, kind: MemoryWindowType) -> Result<MemoryWindow, Error> {
        let key = domain.inner.backend.allocate_memory_window(domain.inner.id, kind)?;
        Ok(MemoryWindow { inner: Arc::new(WindowInner { domain: domain.clone(), rkey: key }) })
    }

    /// The key that it was allocated with.
    pub fn rkey(&self) -> RemoteKey {
        self.inner.rkey
    }
}

impl Drop for WindowInner {
    fn drop(&mut self) {
        let _ = self.domain.inner.backend.free_memory_window(self.rkey);
    }
}
