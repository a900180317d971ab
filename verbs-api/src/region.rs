//! Memory regions and windows.

use crate::memory::Block;
use crate::{Access, Error, LocalKey, ProtectionDomain, RemoteAddress, RemoteKey, Sge, WindowKind};
use parking_lot::Mutex;
use std::sync::Arc;

/// Registered memory.
///
/// Peers and the card change it at any time, so it is read and written by copy, never borrowed.
#[derive(Clone)]
pub struct MemoryRegion {
    inner: Arc<Inner>,
}

struct Inner {
    domain: ProtectionDomain,
    block: Arc<Block>,
    key: Mutex<RemoteKey>,
    base: u64,
    length: u64,
}

impl MemoryRegion {
    pub(crate) fn new(
        domain: &ProtectionDomain,
        block: Arc<Block>,
        base: Option<u64>,
        length: u64,
        access: Access,
    ) -> Result<MemoryRegion, Error> {
        let backend = &domain.inner.backend;
        let (key, base) = backend.register(domain.inner.id, base, length, block.clone(), access)?;
        let inner = Inner { domain: domain.clone(), block, key: Mutex::new(key), base, length };
        Ok(MemoryRegion { inner: Arc::new(inner) })
    }

    /// How many bytes.
    pub fn len(&self) -> u64 {
        self.inner.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.inner.length == 0
    }

    /// The address of the first byte, in the region's own terms.
    pub fn address(&self) -> u64 {
        self.inner.base
    }

    /// The key for local use.
    pub fn local_key(&self) -> LocalKey {
        LocalKey(self.inner.key.lock().0)
    }

    /// The key for peers.
    pub fn remote_key(&self) -> RemoteKey {
        *self.inner.key.lock()
    }

    /// A scatter/gather entry of `length` bytes at `offset`.
    pub fn entry(&self, offset: u64, length: u32) -> Sge {
        Sge { address: self.inner.base + offset, length, key: self.local_key() }
    }

    /// The place at `offset`, as a peer names it.
    pub fn remote(&self, offset: u64) -> RemoteAddress {
        RemoteAddress { address: self.inner.base + offset, key: self.remote_key() }
    }

    /// Copies bytes in. Whoever sees them sees what this thread wrote before.
    ///
    /// # Panics
    /// If they do not fit, as with a slice.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) {
        self.inner.block.write(offset, bytes).expect("bytes inside of the region");
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
        self.inner.block.read(offset, into).expect("bytes inside of the region");
    }

    /// The eight bytes at `offset`, in one access.
    ///
    /// # Panics
    /// If they are outside of the region or not aligned.
    pub fn load(&self, offset: u64) -> u64 {
        self.inner.block.load(offset).expect("eight aligned bytes inside of the region")
    }

    /// Changes what is allowed, in place. Peers need the new key.
    pub fn change_access(&self, access: Access) -> Result<(), Error> {
        self.inner.domain.inner.backend.check_process()?;
        let mut key = self.inner.key.lock();
        *key = self.inner.domain.inner.backend.reregister(*key, None, Some(access))?;
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let backend = &self.domain.inner.backend;
        if backend.check_process().is_ok() {
            let _ = backend.deregister(*self.key.lock());
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
    key: RemoteKey,
}

impl MemoryWindow {
    pub(crate) fn new(domain: &ProtectionDomain, kind: WindowKind) -> Result<MemoryWindow, Error> {
        let key = domain.inner.backend.allocate_window(domain.inner.id, kind)?;
        Ok(MemoryWindow { inner: Arc::new(WindowInner { domain: domain.clone(), key }) })
    }

    /// The key that it was allocated with.
    pub fn key(&self) -> RemoteKey {
        self.inner.key
    }
}

impl Drop for WindowInner {
    fn drop(&mut self) {
        let _ = self.domain.inner.backend.free_window(self.key);
    }
}
