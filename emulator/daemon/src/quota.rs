//! How much of everything a client has, and may have.

use crate::ClientLimits;
use crate::command_error::CommandError;
use softhca_engine::{Resource, VerbsError};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A mapping that counts while it lives.
pub(crate) struct MappingGuard(Arc<AtomicUsize>);

impl Drop for MappingGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts one more mapping of the daemon.
pub(crate) fn reserve_mapping(all: &Arc<AtomicUsize>, limit: usize) -> Result<MappingGuard, CommandError> {
    if all.fetch_add(1, Ordering::Relaxed) >= limit {
        all.fetch_sub(1, Ordering::Relaxed);
        let text = format!("the daemon has no more than {limit} rings and regions for all its clients");
        return Err(CommandError::new(libc::ENOMEM, text));
    }
    Ok(MappingGuard(all.clone()))
}

/// What a client has.
pub(crate) struct ClientQuota {
    limits: ClientLimits,
    used: BTreeMap<&'static str, (usize, Resource)>,
    rings: BTreeMap<(&'static str, u32), (u64, MappingGuard)>,
    ring_bytes: u64,
    has_changed: bool,
}

impl ClientQuota {
    pub fn new(share: ClientLimits) -> ClientQuota {
        ClientQuota {
            limits: share,
            used: BTreeMap::new(),
            rings: BTreeMap::new(),
            ring_bytes: 0,
            has_changed: true,
        }
    }

    fn limit(&self, resource: Resource) -> usize {
        let share = &self.limits;
        match resource {
            Resource::QueuePair => share.max_qp,
            Resource::CompletionQueue => share.max_cq,
            Resource::SharedReceiveQueue => share.max_srq,
            Resource::ProtectionDomain => share.max_pd,
            Resource::MemoryRegion | Resource::MemoryWindow => share.max_mr,
            Resource::AddressHandle => share.max_ah,
            Resource::XrcDomain => share.max_xrcd,
            // A connection has a queue pair, and one that is asked for has none yet.
            Resource::CmIdentifier | Resource::CmChannel => share.max_qp.saturating_mul(2),
            Resource::Client | Resource::MulticastGroup | Resource::CmPort => usize::MAX,
        }
    }

    /// Whether another may be made.
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

    /// One was made.
    pub fn add(&mut self, resource: Resource) {
        self.used.entry(resource.name()).or_insert((0, resource)).0 += 1;
        self.has_changed = true;
    }

    /// One was destroyed.
    pub fn remove(&mut self, resource: Resource) {
        if let Some((count, _)) = self.used.get_mut(resource.name()) {
            *count = count.saturating_sub(1);
            self.has_changed = true;
        }
    }

    /// Whether rings of so many bytes more may be made.
    pub fn check_rings(&self, bytes: u64) -> Result<(), CommandError> {
        let limit = self.limits.max_ring_bytes;
        if self.ring_bytes.saturating_add(bytes) > limit {
            let text = format!("the rings of a client have no more than {limit} bytes");
            return Err(CommandError::new(libc::ENOMEM, text));
        }
        Ok(())
    }

    /// The rings of a resource were made, or made anew.
    pub fn add_rings(&mut self, resource: Resource, number: u32, bytes: u64, counted: MappingGuard) {
        self.remove_rings(resource, number);
        self.ring_bytes += bytes;
        self.rings.insert((resource.name(), number), (bytes, counted));
    }

    /// The rings of a resource are gone.
    pub fn remove_rings(&mut self, resource: Resource, number: u32) {
        if let Some((bytes, _)) = self.rings.remove(&(resource.name(), number)) {
            self.ring_bytes -= bytes;
        }
    }

    /// How many of each, by name, if that has changed since it was asked.
    pub fn changed_counts(&mut self) -> Option<Vec<(String, u32)>> {
        let counts = || self.used.iter().map(|(name, (count, _))| ((*name).into(), *count as u32)).collect();
        std::mem::take(&mut self.has_changed).then(counts)
    }
}
