//! Protection domains, and the address handles in them.

use crate::backend::Backend;
use crate::memory::Block;
use crate::region::{MemoryRegion, MemoryWindow};
use crate::{
    Access, AddressVector, CompletionQueue, Context, Error, QpKind, QueuePairBuilder, SharedReceiveQueue,
    WindowKind, XrcDomain,
};
use softhca_engine::{AhId, PdId};
use std::ptr::NonNull;
use std::sync::Arc;

/// A protection domain: what is in it can be used together.
#[derive(Clone)]
pub struct ProtectionDomain {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub backend: Arc<dyn Backend>,
    pub id: PdId,
    pub context: Context,
}

impl ProtectionDomain {
    pub(crate) fn new(context: &Context) -> Result<ProtectionDomain, Error> {
        let backend = context.backend.clone();
        let id = backend.allocate_domain()?;
        Ok(ProtectionDomain { inner: Arc::new(Inner { backend, id, context: context.clone() }) })
    }

    /// Allocates zeroed memory and registers it. The card assigns its address.
    pub fn register(&self, length: usize, access: Access) -> Result<MemoryRegion, Error> {
        let block = self.inner.backend.allocate(length)?;
        MemoryRegion::new(self, block, None, length as u64, access)
    }

    /// The same in memory of this process's own, as `malloc` gives it: what the card of a daemon has to reach out
    /// for. [`ProtectionDomain::register`] is faster there.
    pub fn register_own(&self, length: usize, access: Access) -> Result<MemoryRegion, Error> {
        MemoryRegion::new(self, Arc::new(Block::new(length)), None, length as u64, access)
    }

    /// Registers memory of the caller's own, at its own address.
    ///
    /// # Safety
    /// `length` bytes at `base` stay mapped, readable and (with local write) writable until the region is
    /// dropped, and for as long no Rust reference to them exists: peers write them at any time.
    #[allow(unsafe_code)]
    pub unsafe fn register_foreign(
        &self,
        base: NonNull<u8>,
        length: usize,
        access: Access,
    ) -> Result<MemoryRegion, Error> {
        // SAFETY: as the caller says.
        let block = Arc::new(unsafe { Block::foreign(base, length) });
        MemoryRegion::new(self, block, Some(base.as_ptr() as u64), length as u64, access)
    }

    /// Allocates a memory window.
    pub fn allocate_window(&self, kind: WindowKind) -> Result<MemoryWindow, Error> {
        MemoryWindow::new(self, kind)
    }

    /// Begins to create a queue pair whose sends and receives complete to `queue`.
    pub fn queue_pair(&self, kind: QpKind, queue: &CompletionQueue) -> QueuePairBuilder {
        QueuePairBuilder::new(self, kind, queue)
    }

    /// Creates a shared receive queue.
    pub fn create_shared_receive_queue(
        &self,
        receives: u32,
        entries: usize,
    ) -> Result<SharedReceiveQueue, Error> {
        SharedReceiveQueue::new(self, receives, entries, None)
    }

    /// Creates a shared receive queue that senders of XRC name; its receives complete to `queue`.
    pub fn create_xrc_shared_receive_queue(
        &self,
        xrc_domain: &XrcDomain,
        queue: &CompletionQueue,
        receives: u32,
        entries: usize,
    ) -> Result<SharedReceiveQueue, Error> {
        SharedReceiveQueue::new(self, receives, entries, Some((xrc_domain, queue)))
    }

    /// Creates an address handle.
    pub fn create_address_handle(&self, vector: AddressVector) -> Result<AddressHandle, Error> {
        let id = self.inner.backend.create_address_handle(self.inner.id, vector)?;
        Ok(AddressHandle { inner: Arc::new(HandleInner { domain: self.clone(), id }) })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Everything in the domain holds a handle: nothing is left.
        let _ = self.backend.free_domain(self.id);
    }
}

/// Where datagrams go.
#[derive(Clone)]
pub struct AddressHandle {
    inner: Arc<HandleInner>,
}

struct HandleInner {
    domain: ProtectionDomain,
    id: AhId,
}

impl AddressHandle {
    pub(crate) fn number(&self) -> u32 {
        self.inner.id.0
    }
}

impl Drop for HandleInner {
    fn drop(&mut self) {
        let _ = self.domain.inner.backend.destroy_address_handle(self.id);
    }
}
