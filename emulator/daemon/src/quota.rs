//! The resources of a client and their limits.

use crate::ClientLimits;
use crate::command_error::CommandError;
use softhca_engine::{Resource, VerbsError};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts a mapping until it is dropped.
pub(crate) struct MappingGuard(Arc<AtomicUsize>);

impl Drop for MappingGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Reserves one of the mappings of the daemon.
pub(crate) fn reserve_mapping(all: &Arc<AtomicUsize>, limit: usize) -> Result<MappingGuard, CommandError> {
    if all.fetch_add(1, Ordering::Relaxed) >= limit {
        all.fetch_sub(1, Ordering::Relaxed);
        let text = format!("the daemon maps at most {limit} rings and memory regions for all its clients");
        return Err(CommandError::new(libc::ENOMEM, text));
    }
    Ok(MappingGuard(all.clone()))
}

/// The resources that a client uses.
pub(crate) struct ClientQuota {
    limits: ClientLimits,
    used: BTreeMap<&'static str, (usize, Resource)>,
    rings: BTreeMap<(&'static str, u32), (u64, MappingGuard)>,
    ring_bytes: u64,
    has_changed: bool,
}

impl ClientQuota {
    pub fn new(limits: ClientLimits) -> ClientQuota {
        ClientQuota {
            limits,
            used: BTreeMap::new(),
            rings: BTreeMap::new(),
            ring_bytes: 0,
            has_changed: true,
        }
    }

    fn limit(&self, resource: Resource) -> usize {
        let limits = &self.limits;
        match resource {
            Resource::QueuePair => limits.max_qp,
            Resource::CompletionQueue => limits.max_cq,
            Resource::SharedReceiveQueue => limits.max_srq,
            Resource::ProtectionDomain => limits.max_pd,
            Resource::MemoryRegion | Resource::MemoryWindow => limits.max_mr,
            Resource::AddressHandle => limits.max_ah,
            Resource::XrcDomain => limits.max_xrcd,
            // A connection has one queue pair; a requested connection has none yet.
            Resource::CmIdentifier | Resource::CmChannel => limits.max_qp.saturating_mul(2),
            Resource::Client | Resource::MulticastGroup | Resource::CmPort => usize::MAX,
        }
    }

    /// Checks that the client may create another resource.
    pub fn check(&self, resource: Resource) -> Result<(), CommandError> {
        let limit = self.limit(resource);
        let keys = [Resource::MemoryRegion, Resource::MemoryWindow];
        let used: usize = match keys.contains(&resource) {
            true => keys.iter().map(|key| self.count(*key)).sum(),
            false => self.count(resource),
        };
        if used >= limit {
            return Err(VerbsError::Exhausted { resource, limit }.into());
        }
        Ok(())
    }

    fn count(&self, resource: Resource) -> usize {
        self.used.get(resource.name()).map_or(0, |(count, _)| *count)
    }

    /// Counts a resource that was created.
    pub fn add(&mut self, resource: Resource) {
        self.used.entry(resource.name()).or_insert((0, resource)).0 += 1;
        self.has_changed = true;
    }

    /// Counts a resource that was destroyed.
    pub fn remove(&mut self, resource: Resource) {
        if let Some((count, _)) = self.used.get_mut(resource.name()) {
            *count = count.saturating_sub(1);
            self.has_changed = true;
        }
    }

    /// Checks that the client may create rings with this many bytes.
    pub fn check_rings(&self, bytes: u64) -> Result<(), CommandError> {
        let limit = self.limits.max_ring_bytes;
        if self.ring_bytes.saturating_add(bytes) > limit {
            let text = format!("the rings of a client have at most {limit} bytes");
            return Err(CommandError::new(libc::ENOMEM, text));
        }
        Ok(())
    }

    /// Counts the rings of a resource, which replace its earlier rings.
    pub fn add_rings(&mut self, resource: Resource, number: u32, bytes: u64, guard: MappingGuard) {
        self.remove_rings(resource, number);
        self.ring_bytes += bytes;
        self.rings.insert((resource.name(), number), (bytes, guard));
    }

    /// Removes the rings of a resource.
    pub fn remove_rings(&mut self, resource: Resource, number: u32) {
        if let Some((bytes, _)) = self.rings.remove(&(resource.name(), number)) {
            self.ring_bytes -= bytes;
        }
    }

    /// The number of resources by type, if it has changed since the last call.
    pub fn changed_counts(&mut self) -> Option<Vec<(String, u32)>> {
        let counts = || self.used.iter().map(|(name, (count, _))| ((*name).into(), *count as u32)).collect();
        std::mem::take(&mut self.has_changed).then(counts)
    }
}
