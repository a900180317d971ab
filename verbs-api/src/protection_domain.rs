//! Protection domains, and the address handles in them.

use crate::backend::Backend;
use crate::{AddressVector, Context, Error};
use softhca_engine::{AhId, Command, PdId, Reply};
use softhca_types::reply;
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

impl Context {
    /// Allocates a protection domain, which memory regions and queue pairs belong to.
    pub fn allocate_protection_domain(&self) -> Result<ProtectionDomain, Error> {
        ProtectionDomain::new(self)
    }
}

impl ProtectionDomain {
    fn new(context: &Context) -> Result<ProtectionDomain, Error> {
        let backend = context.backend.clone();
        let id =
            reply!(backend.execute(Command::AllocateProtectionDomain)?, Reply::ProtectionDomain(pd) => pd);
        Ok(ProtectionDomain { inner: Arc::new(Inner { backend, id, context: context.clone() }) })
    }

    /// Its number.
    pub fn handle(&self) -> u32 {
        self.inner.id.0
    }

    /// Whether another handle exists or a resource belongs to it.
    pub fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }

    /// Creates an address handle: the destination of datagrams.
    pub fn create_address_handle(&self, mut address_vector: AddressVector) -> Result<AddressHandle, Error> {
        address_vector.dgid = self.inner.context.group_of(address_vector.dgid);
        let command = Command::CreateAddressHandle { pd: self.inner.id, address_vector };
        let id = reply!(self.inner.backend.execute(command)?, Reply::AddressHandle(ah) => ah);
        Ok(AddressHandle { inner: Arc::new(AddressHandleInner { domain: self.clone(), id }) })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Everything in the domain holds a handle: nothing is left.
        let _ = self.backend.execute(Command::DeallocateProtectionDomain(self.id));
    }
}

/// The destination of datagrams.
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
