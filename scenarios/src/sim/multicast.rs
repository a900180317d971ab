//! Multicast groups in virtual time: where datagrams to a group go.

use super::SimQueuePair;
use crate::plan::Plan;
use crate::verbs::qkey_of;
use softhca_engine::AddressVector;
use softhca_fabric::World;
use softhca_queue::UdDestination;
use softhca_wire::{Gid, Qpn};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Where datagrams to each group go, by the queue pair that sends them.
pub(super) struct MulticastGroups(BTreeMap<(usize, IpAddr), UdDestination>);

impl MulticastGroups {
    pub fn new(plan: &Plan, world: &mut World, sides: &[SimQueuePair]) -> Result<MulticastGroups, String> {
        let mut groups = BTreeMap::new();
        for (qp, group) in plan.multicast_sends() {
            let (side, traffic_class) = (&sides[qp], plan.pair_of(qp).traffic_class);
            let vector = AddressVector { traffic_class, ..AddressVector::to(Gid::from(group)) };
            let handle = world
                .verbs(side.host)
                .create_address_handle(side.domain, vector)
                .map_err(|why| format!("{}: cannot address {group}: {why}", plan.qps[qp].name))?;
            let queue_key = qkey_of(plan.pair_of(qp));
            let datagram = UdDestination { ah: handle.0, remote_qpn: Qpn::MULTICAST, remote_qkey: queue_key };
            groups.insert((qp, group), datagram);
        }
        Ok(MulticastGroups(groups))
    }

    pub fn datagram(&self, qp: usize, group: IpAddr) -> UdDestination {
        self.0.get(&(qp, group)).copied().expect("every group that a step sends to has an address handle")
    }
}
