//! Control verbs of protection domains, regions and windows.

use crate::core::hca::Hca;
use crate::core::transport::Transport;
use crate::{ClientId, MemoryRegion, MemoryWindowType, PdId, VerbsResult};
use softhca_wire::RemoteKey;

impl<T: Transport> Hca<T> {
    /// Allocates a protection domain.
    pub fn allocate_protection_domain(&mut self, client: ClientId) -> VerbsResult<PdId> {
        self.check_client(client)?;
        self.state.objects.protection.allocate_protection_domain(client)
    }

    /// Registers a region. The key serves local and remote access.
    pub fn register_memory_region(&mut self, region: MemoryRegion) -> VerbsResult<RemoteKey> {
        let tag = self.state.objects.random.key_tag();
        self.state.objects.protection.register_memory_region(region, tag)
    }

    /// Registers a region under a key of the caller's choice, if it is free. For replaying captures.
    pub fn register_memory_region_with_key(&mut self, region: MemoryRegion, key: RemoteKey) -> VerbsResult {
        self.state.objects.protection.register_memory_region_with_key(region, key)
    }

    /// Changes a region in place. It gets a new key if its addresses now mean something else.
    pub fn reregister_memory_region(
        &mut self,
        client: ClientId,
        key: RemoteKey,
        new: MemoryRegion,
    ) -> VerbsResult<RemoteKey> {
        self.state.objects.protection.reregister_memory_region(client, key, new)
    }

    /// The parameters with which a region was registered.
    pub fn query_memory_region(&mut self, client: ClientId, key: RemoteKey) -> VerbsResult<MemoryRegion> {
        self.state.objects.protection.memory_region(client, key)
    }

    /// Allocates a memory window.
    pub fn allocate_memory_window(
        &mut self,
        client: ClientId,
        domain: PdId,
        kind: MemoryWindowType,
    ) -> VerbsResult<RemoteKey> {
        let tag = self.state.objects.random.key_tag();
        self.state.objects.protection.allocate_memory_window(client, domain, kind, tag)
    }
}
