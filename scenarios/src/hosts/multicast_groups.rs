//! The multicast groups of a run.

use softhca::AddressHandle;
use softhca_wire::{Gid, QueueKey};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// The addresses of the groups, and the destinations of the queue pairs that send to them.
#[derive(Default)]
pub struct MulticastGroups {
    pub(super) addresses: BTreeMap<IpAddr, IpAddr>,
    pub(super) targets: BTreeMap<(usize, IpAddr), (AddressHandle, QueueKey)>,
}

impl MulticastGroups {
    pub fn gid(&self, group: IpAddr) -> Gid {
        Gid::from(self.addresses[&group])
    }

    pub fn target(&self, qp: usize, group: IpAddr) -> (&AddressHandle, QueueKey) {
        let (handle, qkey) = &self.targets[&(qp, group)];
        (handle, *qkey)
    }
}
