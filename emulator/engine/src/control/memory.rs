//! Control verbs of protection domains, regions and windows.

use crate::{ClientId, Error, Hca, PdId, Region, WindowKind};
use softhca_wire::RemoteKey;

impl Hca {
    /// Allocates a protection domain.
    pub fn allocate_domain(&mut self, client: ClientId) -> Result<PdId, Error> {
        self.known(client)?;
        self.card.protection.allocate_domain(client)
    }

    /// Frees a protection domain that nothing uses.
    pub fn free_domain(&mut self, client: ClientId, domain: PdId) -> Result<(), Error> {
        self.card.protection.free_domain(client, domain)
    }

    /// Registers a region. The key serves local and remote access.
    pub fn register(&mut self, region: Region) -> Result<RemoteKey, Error> {
        let tag = self.tag();
        self.card.protection.register(region, tag)
    }

    /// Registers a region under a key of the caller's choice, if it is free. For replaying captures.
    pub fn register_as(&mut self, region: Region, key: RemoteKey) -> Result<(), Error> {
        self.card.protection.register_as(region, key)
    }

    /// Changes a region in place. It gets a new key if its addresses now mean something else.
    pub fn reregister(&mut self, client: ClientId, key: RemoteKey, new: Region) -> Result<RemoteKey, Error> {
        self.card.protection.reregister(client, key, new)
    }

    /// What a region was registered as.
    pub fn region(&mut self, client: ClientId, key: RemoteKey) -> Result<Region, Error> {
        self.card.protection.region(client, key)
    }

    /// Removes a region that no window is bound to.
    pub fn deregister(&mut self, client: ClientId, key: RemoteKey) -> Result<Region, Error> {
        self.card.protection.deregister(client, key)
    }

    /// Allocates a memory window.
    pub fn allocate_window(
        &mut self,
        client: ClientId,
        domain: PdId,
        kind: WindowKind,
    ) -> Result<RemoteKey, Error> {
        let tag = self.tag();
        self.card.protection.allocate_window(client, domain, kind, tag)
    }

    /// Frees a memory window, bound or not.
    pub fn free_window(&mut self, client: ClientId, key: RemoteKey) -> Result<(), Error> {
        self.card.protection.free_window(client, key)
    }
}
