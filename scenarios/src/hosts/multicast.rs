//! The multicast groups of a plan.

use super::Hosts;
use super::multicast_groups::MulticastGroups;
use crate::plan::Plan;
use crate::verbs::qkey_of;
use softhca::AddressVector;
use std::net::{IpAddr, Ipv4Addr};

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
}
