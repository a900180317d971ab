//! The resources of a client and their limits.

use crate::Config;
use crate::command_error::CommandError;
use parking_lot::Mutex;
use softhca_engine::{DeviceLimits, Resource};
use softhca_types::ResourceCounts;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The kernel maps whole pages.
const PAGE: u64 = 4096;

/// A limit of all processes together. Each process has a guaranteed amount; what it uses beyond that comes from a pool
/// that all share, and of which one process may use half.
#[derive(Clone, Copy)]
struct SharedLimit {
    /// The unit, for messages.
    unit: &'static str,
    total: u64,
    guaranteed: u64,
    pool: u64,
}

impl SharedLimit {
    fn new(unit: &'static str, total: u64, max_processes: usize) -> SharedLimit {
        let processes = (max_processes as u64).max(1);
        let guaranteed = total / (4 * processes);
        SharedLimit { unit, total, guaranteed, pool: total - guaranteed * processes }
    }

    fn per_process(&self) -> u64 {
        self.guaranteed + self.pool / 2
    }

    /// Adds `amount` to what a process uses and to what is used of the pool, or says which limit that exceeds.
    fn add(&self, pid: u32, used: &mut u64, pool_used: &mut u64, amount: u64) -> Result<(), String> {
        let SharedLimit { unit, total, guaranteed, pool } = *self;
        let wanted = used.saturating_add(amount);
        let limit = self.per_process();
        if wanted > limit {
            return Err(format!(
                "the rings and memory regions of process {pid} have {used} {unit} in the daemon; with {amount} more \
                 they exceed the limit of a process, {limit} {unit}"
            ));
        }
        let excess = wanted.saturating_sub(guaranteed) - used.saturating_sub(guaranteed);
        if pool_used.saturating_add(excess) > pool {
            return Err(format!(
                "the rings and memory regions of all processes exceed the limit of the daemon, {total} {unit}; \
                 process {pid} has {used}, more than which is not guaranteed"
            ));
        }
        (*used, *pool_used) = (wanted, *pool_used + excess);
        Ok(())
    }

    fn remove(&self, used: &mut u64, pool_used: &mut u64, amount: u64) {
        let left = *used - amount;
        *pool_used -= used.saturating_sub(self.guaranteed) - left.saturating_sub(self.guaranteed);
        *used = left;
    }
}

/// The mappings of rings and memory regions in the daemon, by number and by bytes. Both are limited: the kernel limits
/// the number of mappings, and a process without free addresses cannot allocate memory.
pub(crate) struct Mappings {
    number: SharedLimit,
    bytes: SharedLimit,
    used: Mutex<UsedMappings>,
}

#[derive(Default)]
struct UsedMappings {
    /// Number and bytes, by process.
    processes: BTreeMap<u32, [u64; 2]>,
    /// Number and bytes beyond what is guaranteed.
    pool: [u64; 2],
}

impl Mappings {
    pub fn new(config: &Config) -> Arc<Mappings> {
        Arc::new(Mappings {
            number: SharedLimit::new("mappings", config.max_mappings as u64, config.max_clients),
            bytes: SharedLimit::new("bytes", config.max_mapped_bytes, config.max_clients),
            used: Mutex::default(),
        })
    }

    /// Reserves a mapping for a process.
    pub fn reserve(self: &Arc<Self>, pid: u32, bytes: usize) -> Result<MappingGuard, CommandError> {
        let bytes = (bytes as u64).next_multiple_of(PAGE);
        let mut all = self.used.lock();
        let UsedMappings { processes, pool } = &mut *all;
        let used = processes.entry(pid).or_default();
        let exhausted = |message: String| CommandError::new(libc::ENOMEM, message);
        self.number.add(pid, &mut used[0], &mut pool[0], 1).map_err(exhausted)?;
        if let Err(message) = self.bytes.add(pid, &mut used[1], &mut pool[1], bytes) {
            self.number.remove(&mut used[0], &mut pool[0], 1);
            return Err(exhausted(message));
        }
        Ok(MappingGuard { mappings: self.clone(), pid, bytes })
    }
}

/// Counts a mapping until it is dropped.
pub(crate) struct MappingGuard {
    mappings: Arc<Mappings>,
    pid: u32,
    bytes: u64,
}

impl Drop for MappingGuard {
    fn drop(&mut self) {
        let Mappings { number, bytes, used } = &*self.mappings;
        let mut all = used.lock();
        let UsedMappings { processes, pool } = &mut *all;
        let Some(used) = processes.get_mut(&self.pid) else { return };
        number.remove(&mut used[0], &mut pool[0], 1);
        bytes.remove(&mut used[1], &mut pool[1], self.bytes);
        if used[0] == 0 {
            processes.remove(&self.pid);
        }
    }
}

/// The resources that a client uses.
pub(crate) struct ClientQuota {
    device_limits: DeviceLimits,
    max_ring_bytes: u64,
    used: ResourceCounts,
    rings: BTreeMap<(&'static str, u32), (u64, MappingGuard)>,
    ring_bytes: u64,
    has_changed: bool,
}

impl ClientQuota {
    pub fn new(device_limits: DeviceLimits, max_ring_bytes: u64) -> ClientQuota {
        ClientQuota {
            device_limits,
            max_ring_bytes,
            used: ResourceCounts::default(),
            rings: BTreeMap::new(),
            ring_bytes: 0,
            has_changed: true,
        }
    }

    /// Checks that the client may create another resource.
    pub fn check(&self, resource: Resource) -> Result<(), CommandError> {
        Ok(self.used.check(&self.device_limits, resource)?)
    }

    /// Counts a resource that was created.
    pub fn add(&mut self, resource: Resource) {
        self.used.add(resource);
        self.has_changed = true;
    }

    /// Counts a resource that was destroyed.
    pub fn remove(&mut self, resource: Resource) {
        self.used.remove(resource);
        self.has_changed = true;
    }

    /// Checks that the client may create rings with this many bytes.
    pub fn check_rings(&self, bytes: u64) -> Result<(), CommandError> {
        let limit = self.max_ring_bytes;
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
        let counts = || self.used.iter().map(|(name, count)| (name.into(), count)).collect();
        std::mem::take(&mut self.has_changed).then(counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_cannot_take_what_is_guaranteed_to_others() {
        let limit = SharedLimit::new("mappings", 800, 10);
        assert_eq!((limit.guaranteed, limit.pool, limit.per_process()), (20, 600, 320));
        let mut pool = 0;
        let mut used = [0; 10];
        for (pid, used) in used.iter_mut().enumerate() {
            let count = std::iter::from_fn(|| limit.add(pid as u32, used, &mut pool, 1).ok()).count();
            assert_eq!(count as u64, if pid < 2 { 320 } else { 20 });
        }
        let message = limit.add(0, &mut used[0], &mut pool, 1).unwrap_err();
        assert!(message.contains("process 0") && message.contains("320"), "{message}");
        let message = limit.add(9, &mut used[9], &mut pool, 1).unwrap_err();
        assert!(message.contains("800"), "{message}");
        used.iter_mut().for_each(|used| limit.remove(used, &mut pool, *used));
        assert_eq!((used, pool), ([0; 10], 0));
        assert!(limit.add(0, &mut used[0], &mut pool, u64::MAX).is_err());
    }
}
