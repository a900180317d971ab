//! Multicast groups in virtual time: where datagrams to a group go.

use super::Side;
use crate::plan::Plan;
use crate::verbs::key_of;
use softhca_engine::AddressVector;
use softhca_fabric::World;
use softhca_queue::Datagram;
use softhca_wire::{Gid, Qpn};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Where datagrams to each group go, by the queue pair that sends them.
pub(super) struct Groups(BTreeMap<(usize, IpAddr), Datagram>);

impl Groups {
    pub fn new(plan: &Plan, world: &mut World, sides: &[Side]) -> Result<Groups, String> {
        let mut groups = BTreeMap::new();
        for (qp, group) in plan.sent_to_groups() {
            let (side, traffic_class) = (&sides[qp], plan.pair_of(qp).traffic_class);
            let vector = AddressVector { traffic_class, ..AddressVector::to(Gid::from(group)) };
            let handle = world
                .on(side.host)
                .create_address_handle(side.domain, vector)
                .map_err(|why| format!("{}: cannot address {group}: {why}", plan.qps[qp].name))?;
            let queue_key = key_of(plan.pair_of(qp));
            let datagram = Datagram { address_handle: handle.0, queue_pair: Qpn::MULTICAST, queue_key };
            groups.insert((qp, group), datagram);
        }
        Ok(Groups(groups))
    }

    pub fn datagram(&self, qp: usize, group: IpAddr) -> Datagram {
        self.0.get(&(qp, group)).copied().expect("every group that a step sends to has an address handle")
    }
}
