//! Protection domains, and the address handles in them.

use crate::backend::Backend;
use crate::memory::MemoryBlock;
use crate::memory_region::{MemoryRegion, MemoryWindow};
use crate::{
    AccessFlags, AddressVector, CompletionQueue, Context, Error, MemoryWindowType, QpType, QueuePairBuilder,
    SharedReceiveQueue, XrcDomain,
};
use softhca_engine::{AhId, Command, DeviceLimits, PdId, Reply};
use softhca_queue::{VerbsError, reply};
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
        let id =
            reply!(backend.execute(Command::AllocateProtectionDomain)?, Reply::ProtectionDomain(pd) => pd);
        Ok(ProtectionDomain { inner: Arc::new(Inner { backend, id, context: context.clone() }) })
    }

    /// Allocates zeroed memory and registers it. The card assigns its address.
    pub fn allocate_region(&self, length: u64, access: AccessFlags) -> Result<MemoryRegion, Error> {
        let block = self.inner.backend.allocate_memory(size_of_memory(length)?)?;
        MemoryRegion::new(self, block, None, access)
    }

    /// The same in private memory of this process, which a daemon accesses through the kernel. With a daemon,
    /// [`ProtectionDomain::allocate_region`] is faster.
    pub fn allocate_private_region(&self, length: u64, access: AccessFlags) -> Result<MemoryRegion, Error> {
        MemoryRegion::new(self, Arc::new(MemoryBlock::new(size_of_memory(length)?)), None, access)
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

    /// Its number.
    pub fn handle(&self) -> u32 {
        self.inner.id.0
    }

    /// Whether another handle exists or a resource belongs to it.
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }

    /// Allocates a memory window. A bind ([`Operation::BindMemoryWindow`](crate::Operation::BindMemoryWindow)) gives it a range.
    pub fn allocate_memory_window(&self, kind: MemoryWindowType) -> Result<MemoryWindow, Error> {
        MemoryWindow::new(self, kind)
    }

    /// Starts to create a queue pair whose sends and receives complete to `queue`; `build` creates it.
    pub fn create_queue_pair(&self, kind: QpType, queue: &CompletionQueue) -> QueuePairBuilder {
        QueuePairBuilder::new(self, kind, queue)
    }

    /// Creates a shared receive queue.
    pub fn create_shared_receive_queue(
        &self,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<SharedReceiveQueue, Error> {
        SharedReceiveQueue::new(self, max_wr, max_sge, None)
    }

    /// Creates a shared receive queue that XRC senders name by its number; its receives complete to `queue`.
    pub fn create_xrc_shared_receive_queue(
        &self,
        xrc_domain: &XrcDomain,
        queue: &CompletionQueue,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<SharedReceiveQueue, Error> {
        SharedReceiveQueue::new(self, max_wr, max_sge, Some((xrc_domain, queue)))
    }

    /// Creates an address handle: the destination of datagrams.
    pub fn create_address_handle(&self, address_vector: AddressVector) -> Result<AddressHandle, Error> {
        let command = Command::CreateAddressHandle { pd: self.inner.id, address_vector };
        let id = reply!(self.inner.backend.execute(command)?, Reply::AddressHandle(ah) => ah);
        Ok(AddressHandle { inner: Arc::new(AddressHandleInner { domain: self.clone(), id }) })
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

impl Drop for Inner {
    fn drop(&mut self) {
        // Everything in the domain holds a handle: nothing is left.
        let _ = self.backend.execute(Command::DeallocateProtectionDomain(self.id));
    }
}

/// Where datagrams go.
#[derive(Clone)]
pub struct AddressHandle {
    inner: Arc<AddressHandleInner>,
}

struct AddressHandleInner {
    domain: ProtectionDomain,
    id: AhId,
}

impl AddressHandle {
    /// Its number.
    pub fn handle(&self) -> u32 {
        self.inner.id.0
    }
}

impl Drop for AddressHandleInner {
    fn drop(&mut self) {
        let _ = self.domain.inner.backend.execute(Command::DestroyAddressHandle(self.id));
    }
}
