//! The multicast groups of a plan.

use super::Hosts;
use crate::plan::Plan;
use crate::verbs::qkey_of;
use softhca::{AddressHandle, AddressVector};
use softhca_wire::{Gid, QueueKey};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

/// The addresses of the groups, and the destinations of the queue pairs that send to them.
#[derive(Default)]
pub struct MulticastGroups {
    addresses: BTreeMap<IpAddr, IpAddr>,
    targets: BTreeMap<(usize, IpAddr), (AddressHandle, QueueKey)>,
}

impl MulticastGroups {
    pub fn new(plan: &Plan, hosts: &Hosts<'_>) -> Result<MulticastGroups, String> {
        let mut groups = MulticastGroups::default();
        for (index, group) in plan.multicast_groups().into_iter().enumerate() {
            let address = match (&hosts.fabric, hosts.address(0)) {
                // All processes on a network share its groups. The address of the first device belongs to this run
                // only, and so do groups that contain it.
                (None, IpAddr::V4(first)) => {
                    let [_, _, net, host] = first.octets();
                    IpAddr::V4(Ipv4Addr::new(239, net, host, index as u8))
                }
                _ => group,
            };
            groups.addresses.insert(group, address);
        }
        for (qp, group) in plan.multicast_sends() {
            let pair = plan.pair_of(qp);
            let address_vector =
                AddressVector { traffic_class: pair.traffic_class, ..AddressVector::to(groups.gid(group)) };
            let handle = hosts.qps[qp]
                .domain
                .create_address_handle(address_vector)
                .map_err(|error| format!("{}: cannot address {group}: {error}", plan.qps[qp].name))?;
            groups.targets.insert((qp, group), (handle, qkey_of(pair)));
        }
        Ok(groups)
    }

    pub fn gid(&self, group: IpAddr) -> Gid {
        Gid::from(self.addresses[&group])
    }

    pub fn target(&self, qp: usize, group: IpAddr) -> (&AddressHandle, QueueKey) {
        let (handle, qkey) = &self.targets[&(qp, group)];
        (handle, *qkey)
    }
}
