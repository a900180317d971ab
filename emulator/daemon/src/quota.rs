//! How much of everything a client has, and may have.

use crate::Share;
use crate::refusal::Refusal;
use softhca_engine::Resource;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A mapping that counts while it lives.
pub(crate) struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts one more mapping of the daemon.
pub(crate) fn count_mapping(all: &Arc<AtomicUsize>, limit: usize) -> Result<Counted, Refusal> {
    if all.fetch_add(1, Ordering::Relaxed) >= limit {
        all.fetch_sub(1, Ordering::Relaxed);
        let text = format!("the daemon has no more than {limit} rings and regions for all its clients");
        return Err(Refusal::new(libc::ENOMEM, text));
    }
    Ok(Counted(all.clone()))
}

/// What a client has.
pub(crate) struct Quota {
    share: Share,
    used: BTreeMap<&'static str, (usize, Resource)>,
    rings: BTreeMap<(&'static str, u32), (u64, Counted)>,
    ring_bytes: u64,
    has_changed: bool,
}

impl Quota {
    pub fn new(share: Share) -> Quota {
        Quota { share, used: BTreeMap::new(), rings: BTreeMap::new(), ring_bytes: 0, has_changed: true }
    }

    fn limit(&self, resource: Resource) -> usize {
        let share = &self.share;
        match resource {
            Resource::QueuePair => share.queue_pairs,
            Resource::CompletionQueue => share.completion_queues,
            Resource::SharedReceiveQueue => share.shared_receive_queues,
            Resource::ProtectionDomain => share.protection_domains,
            Resource::MemoryRegion | Resource::MemoryWindow => share.keys,
            Resource::AddressHandle => share.address_handles,
            Resource::XrcDomain => share.xrc_domains,
            // A connection has a queue pair, and one that is asked for has none yet.
            Resource::CmIdentifier | Resource::CmChannel => share.queue_pairs.saturating_mul(2),
            Resource::Client | Resource::MulticastGroup | Resource::Port => usize::MAX,
        }
    }

    /// Whether another may be made.
    pub fn check(&self, resource: Resource) -> Result<(), Refusal> {
        let limit = self.limit(resource);
        let keys = [Resource::MemoryRegion, Resource::MemoryWindow];
        let used: usize = match keys.contains(&resource) {
            true => keys.iter().map(|key| self.count(*key)).sum(),
            false => self.count(resource),
        };
        if used >= limit {
            let text = format!("a client has no more than {limit} {}s", resource.name());
            return Err(Refusal::new(libc::ENOMEM, text));
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
    pub fn check_rings(&self, bytes: u64) -> Result<(), Refusal> {
        let limit = self.share.ring_bytes;
        if self.ring_bytes.saturating_add(bytes) > limit {
            let text = format!("the rings of a client have no more than {limit} bytes");
            return Err(Refusal::new(libc::ENOMEM, text));
        }
        Ok(())
    }

    /// The rings of a resource were made, or made anew.
    pub fn add_rings(&mut self, resource: Resource, number: u32, bytes: u64, counted: Counted) {
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
