//! Device limits, and the resources of a client that they limit.

use crate::{Resource, VerbsError};
use alloc::collections::BTreeMap;

/// The limits in the device attributes (`struct ibv_device_attr`).
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each field is the device attribute of its name")]
pub struct DeviceLimits {
    pub max_clients: u32,
    pub max_qp: u32,
    pub max_cq: u32,
    pub max_srq: u32,
    pub max_pd: u32,
    /// Memory regions and memory windows together.
    pub max_mr: u32,
    pub max_ah: u32,
    pub max_xrcd: u32,
    pub max_mcast_grp: u32,
    pub max_mcast_qp_attach: u32,
    pub max_qp_wr: u32,
    pub max_sge: u32,
    pub max_inline_data: u32,
    pub max_cqe: u32,
    pub max_qp_rd_atom: u8,
    pub max_msg_sz: u32,
}

impl DeviceLimits {
    /// The length of the largest memory region (`max_mr_size`).
    pub const MAX_MR_SIZE: u64 = 1 << 46;

    /// The limits of every HCA.
    pub const HCA: DeviceLimits = DeviceLimits {
        max_clients: 4096,
        max_qp: 32_768,
        max_cq: 32_768,
        max_srq: 8_192,
        max_pd: 8_192,
        max_mr: 65_000,
        max_ah: 65_000,
        max_xrcd: 1_024,
        max_mcast_grp: 1_024,
        max_mcast_qp_attach: 256,
        max_qp_wr: 16_384,
        max_sge: 32,
        max_inline_data: 1_024,
        max_cqe: 4_194_303,
        max_qp_rd_atom: 128,
        max_msg_sz: 1 << 31,
    };

    /// The most resources of a type that a client may have.
    pub const fn of(&self, resource: Resource) -> u32 {
        match resource {
            Resource::QueuePair => self.max_qp,
            Resource::CompletionQueue => self.max_cq,
            Resource::SharedReceiveQueue => self.max_srq,
            Resource::ProtectionDomain => self.max_pd,
            Resource::MemoryRegion | Resource::MemoryWindow => self.max_mr,
            Resource::AddressHandle => self.max_ah,
            Resource::XrcDomain => self.max_xrcd,
            // A connection has one queue pair; a requested connection has none yet.
            Resource::CmIdentifier | Resource::CmChannel => self.max_qp.saturating_mul(2),
            Resource::Client | Resource::MulticastGroup | Resource::CmPort => u32::MAX,
        }
    }
}

/// The number of resources that a client has, by type.
#[derive(Debug, Default)]
pub struct ResourceCounts(BTreeMap<&'static str, u32>);

impl ResourceCounts {
    /// Checks that the client may create another resource.
    pub fn check(&self, limits: &DeviceLimits, resource: Resource) -> Result<(), VerbsError> {
        let limit = limits.of(resource);
        let keys = [Resource::MemoryRegion, Resource::MemoryWindow];
        let used: u32 = match resource {
            Resource::MemoryRegion | Resource::MemoryWindow => keys.iter().map(|key| self.count(*key)).sum(),
            _ => self.count(resource),
        };
        if used < limit { Ok(()) } else { Err(VerbsError::Exhausted { resource, limit }) }
    }

    fn count(&self, resource: Resource) -> u32 {
        self.0.get(resource.name()).copied().unwrap_or(0)
    }

    /// Counts a resource that was created.
    pub fn add(&mut self, resource: Resource) {
        *self.0.entry(resource.name()).or_default() += 1;
    }

    /// Counts a resource that was destroyed.
    pub fn remove(&mut self, resource: Resource) {
        if let Some(count) = self.0.get_mut(resource.name()) {
            *count = count.saturating_sub(1);
        }
    }

    /// Names and numbers.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u32)> {
        self.0.iter().map(|(name, count)| (*name, *count))
    }
}
