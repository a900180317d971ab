//! Multicast groups on real sockets.
//!
//! A group of a network belongs to everybody on it: two runs at once, or a run and a program, would get each other's
//! datagrams. The groups of a file stand for addresses that are made from that of the run's first card, which is nobody else's.

use super::RealQueuePair;
use crate::plan::Plan;
use crate::verbs::qkey_of;
use softhca::{AddressHandle, AddressVector, Device, Error};
use softhca_wire::{Gid, QueueKey};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

/// What the groups of a plan are called on the network, and how its queue pairs send to them.
#[derive(Default)]
pub(super) struct MulticastGroups {
    names: BTreeMap<IpAddr, IpAddr>,
    targets: BTreeMap<(usize, IpAddr), (AddressHandle, QueueKey)>,
}

impl MulticastGroups {
    pub fn new(plan: &Plan, devices: &[Device], sides: &[RealQueuePair]) -> Result<MulticastGroups, Error> {
        let mut groups = MulticastGroups::default();
        for (index, group) in plan.multicast_groups().into_iter().enumerate() {
            let name = match devices[0].address() {
                IpAddr::V4(first) => {
                    let [_, _, net, host] = first.octets();
                    IpAddr::V4(Ipv4Addr::new(239, net, host, index as u8))
                }
                IpAddr::V6(_) => group,
            };
            groups.names.insert(group, name);
        }
        for (qp, group) in plan.multicast_sends() {
            let traffic_class = plan.pair_of(qp).traffic_class;
            let vector = AddressVector { traffic_class, ..AddressVector::to(groups.gid(group)) };
            let handle = sides[qp].domain.create_address_handle(vector)?;
            groups.targets.insert((qp, group), (handle, qkey_of(plan.pair_of(qp))));
        }
        Ok(groups)
    }

    pub fn gid(&self, group: IpAddr) -> Gid {
        Gid::from(self.names[&group])
    }

    pub fn target(&self, qp: usize, group: IpAddr) -> (&AddressHandle, QueueKey) {
        let (handle, key) = &self.targets[&(qp, group)];
        (handle, *key)
    }
}
