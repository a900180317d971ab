//! Who a packet belongs to: the queue pairs that a scenario has names for.
//!
//! The owner of the cables keeps one table for all of them and fills it as queue pairs connect.

use alloc::collections::BTreeMap;
use core::net::IpAddr;
use softhca_wire::{AddressHeaders, Psn, Qpn, TransportHeader};

/// A queue pair by the place that it has in a scenario, whatever number it got in this run.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId(pub u32);

/// A queue pair by address and number.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint {
    /// The host.
    pub address: IpAddr,
    /// The queue pair on it.
    pub qpn: Qpn,
}

/// Whether a packet comes from a flow's queue pair as its request, or goes to it as an answer.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PacketType {
    /// The queue pair asks.
    Request,
    /// The queue pair is answered, or told to slow down.
    Response,
}

/// The requests of one queue pair and the answers to them. They share one PSN space.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Its name.
    pub id: FlowId,
    /// The queue pair that sends the requests.
    pub requester: Endpoint,
    /// The one that answers; none for a datagram queue pair, which sends to anybody.
    pub responder: Option<Endpoint>,
    /// The PSN of its first request: the zero of relative PSNs.
    pub first_psn: Psn,
}

/// What in a packet identifies its flow. Connected packets do not name their sender's queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum FlowKey {
    Connected { packet_type: PacketType, from: IpAddr, to: Endpoint },
    Datagram { from: Endpoint },
}

/// A flow as found for a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlowMatch {
    pub flow: Flow,
    pub packet_type: PacketType,
    /// Tells a flow from an earlier one of the same role.
    pub serial: u64,
}

/// The table of flows.
#[derive(Clone, Debug, Default)]
pub struct FlowTable {
    by_id: BTreeMap<FlowId, (Flow, u64)>,
    by_key: BTreeMap<FlowKey, FlowId>,
    serial: u64,
}

impl FlowTable {
    /// An empty table.
    pub const fn new() -> FlowTable {
        FlowTable { by_id: BTreeMap::new(), by_key: BTreeMap::new(), serial: 0 }
    }

    /// Adds a flow, or starts the one of that role anew: what cables remember of it counts no more.
    pub fn insert(&mut self, flow: Flow) {
        self.remove(flow.id);
        self.serial += 1;
        self.by_id.insert(flow.id, (flow, self.serial));
        for key in FlowTable::keys(&flow).into_iter().flatten() {
            self.by_key.insert(key, flow.id);
        }
    }

    /// Takes a flow out; its packets belong to nobody from now on.
    pub fn remove(&mut self, flow_id: FlowId) -> Option<Flow> {
        let (flow, _) = self.by_id.remove(&flow_id)?;
        for key in FlowTable::keys(&flow).into_iter().flatten() {
            // A reused queue pair number may have given the key to another role in the meantime.
            if self.by_key.get(&key) == Some(&flow_id) {
                self.by_key.remove(&key);
            }
        }
        Some(flow)
    }

    /// The flow of this role.
    pub fn flow(&self, flow_id: FlowId) -> Option<&Flow> {
        self.by_id.get(&flow_id).map(|(flow, _)| flow)
    }

    /// Every flow, in the order of roles.
    pub fn iter(&self) -> impl Iterator<Item = &Flow> {
        self.by_id.values().map(|(flow, _)| flow)
    }

    fn keys(flow: &Flow) -> [Option<FlowKey>; 2] {
        let Flow { requester, responder, .. } = *flow;
        match responder {
            None => [Some(FlowKey::Datagram { from: requester }), None],
            Some(responder) => [
                Some(FlowKey::Connected {
                    packet_type: PacketType::Request,
                    from: requester.address,
                    to: responder,
                }),
                Some(FlowKey::Connected {
                    packet_type: PacketType::Response,
                    from: responder.address,
                    to: requester,
                }),
            ],
        }
    }

    /// The flow that a packet belongs to.
    pub(crate) fn find(&self, addressing: &AddressHeaders, header: &TransportHeader) -> Option<FlowMatch> {
        let packet_type = match header.bth.opcode.operation().is_request() {
            true => PacketType::Request,
            false => PacketType::Response,
        };
        let key = match header.deth {
            Some(deth) => {
                FlowKey::Datagram { from: Endpoint { address: addressing.source, qpn: deth.source_qp } }
            }
            None => FlowKey::Connected {
                packet_type,
                from: addressing.source,
                to: Endpoint { address: addressing.destination, qpn: header.bth.destination_qp },
            },
        };
        let (flow, serial) = *self.by_id.get(self.by_key.get(&key)?)?;
        Some(FlowMatch { flow, packet_type, serial })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{ALICE, BOB, Packet, flow, management_datagram};
    use softhca_wire::Operation;

    fn find(flows: &FlowTable, packet: Packet) -> Option<(FlowId, PacketType)> {
        let frame = packet.frame();
        let (header, _) = TransportHeader::parse(&frame.bytes).expect("a header");
        flows.find(&frame.addressing, &header).map(|found| (found.flow.id, found.packet_type))
    }

    #[test]
    fn requests_and_their_answers_belong_to_the_requester() {
        let mut flows = FlowTable::new();
        flows.insert(flow(1, ALICE, BOB, 0));
        flows.insert(flow(2, BOB, ALICE, 0));
        let write = Packet::rc(Operation::Write, 0);
        let ack = Packet::rc(Operation::Acknowledge, 0);
        assert_eq!(find(&flows, write.between(ALICE, BOB)), Some((FlowId(1), PacketType::Request)));
        assert_eq!(find(&flows, ack.between(BOB, ALICE)), Some((FlowId(1), PacketType::Response)));
        assert_eq!(find(&flows, write.between(BOB, ALICE)), Some((FlowId(2), PacketType::Request)));
        assert_eq!(find(&flows, ack.between(ALICE, BOB)), Some((FlowId(2), PacketType::Response)));
    }

    #[test]
    fn a_queue_pair_connected_to_itself_still_has_two_senses() {
        let mut flows = FlowTable::new();
        flows.insert(flow(1, ALICE, ALICE, 0));
        let write = Packet::rc(Operation::Write, 0).between(ALICE, ALICE);
        let ack = Packet::rc(Operation::Acknowledge, 0).between(ALICE, ALICE);
        assert_eq!(find(&flows, write), Some((FlowId(1), PacketType::Request)));
        assert_eq!(find(&flows, ack), Some((FlowId(1), PacketType::Response)));
    }

    #[test]
    fn a_datagram_belongs_to_its_sender_wherever_it_goes() {
        let mut flows = FlowTable::new();
        let requester = Endpoint { qpn: Qpn::GSI, ..ALICE };
        flows.insert(Flow { id: FlowId(3), requester, responder: None, first_psn: Psn::new(0) });
        assert_eq!(find(&flows, management_datagram(7, 0x10)), Some((FlowId(3), PacketType::Request)));
    }

    #[test]
    fn a_role_keeps_its_name_when_another_takes_over_its_number() {
        let mut flows = FlowTable::new();
        flows.insert(flow(1, ALICE, BOB, 0));
        flows.insert(flow(2, ALICE, BOB, 0));
        flows.remove(FlowId(1));
        let write = Packet::rc(Operation::Write, 0).between(ALICE, BOB);
        assert_eq!(find(&flows, write), Some((FlowId(2), PacketType::Request)));
        flows.remove(FlowId(2));
        assert_eq!(find(&flows, write), None);
        assert_eq!(flows.iter().count(), 0);
    }
}
