//! Flows: the queue pairs that a scenario names.
//!
//! The owner of the links keeps one table and fills it as queue pairs connect.

use alloc::collections::BTreeMap;
use core::net::IpAddr;
use softhca_wire::{AddressHeaders, Psn, Qpn, TransportHeader};

/// Identifies a flow by its position in a scenario, independent of its QPN.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId(pub u32);

/// A queue pair by address and QPN.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint {
    /// The host.
    pub address: IpAddr,
    /// The queue pair on it.
    pub qpn: Qpn,
}

/// Whether a packet is a request of the flow's queue pair or a response to it.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PacketType {
    /// Sent by the flow's queue pair.
    Request,
    /// Sent to the flow's queue pair: a response or a CNP.
    Response,
}

/// The requests of a queue pair and their responses, which share a PSN space.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The flow's ID.
    pub id: FlowId,
    /// The queue pair that sends the requests.
    pub requester: Endpoint,
    /// The responder; `None` for a datagram queue pair, which sends to any peer.
    pub responder: Option<Endpoint>,
    /// The first PSN: the origin of relative PSNs.
    pub first_psn: Psn,
}

/// The lookup key of a flow. Packets of a connection do not contain the source QPN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum FlowKey {
    Connected { packet_type: PacketType, from: IpAddr, to: Endpoint },
    Datagram { from: Endpoint },
}

/// The result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlowMatch {
    pub flow: Flow,
    pub packet_type: PacketType,
    /// Distinguishes a flow from earlier ones with the same ID.
    pub serial: u64,
}

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

    /// Adds a flow, or restarts the flow with this ID: links discard its history.
    pub fn insert(&mut self, flow: Flow) {
        self.remove(flow.id);
        self.serial += 1;
        self.by_id.insert(flow.id, (flow, self.serial));
        for key in FlowTable::keys(&flow).into_iter().flatten() {
            self.by_key.insert(key, flow.id);
        }
    }

    /// Removes a flow; its packets no longer match.
    pub fn remove(&mut self, flow_id: FlowId) -> Option<Flow> {
        let (flow, _) = self.by_id.remove(&flow_id)?;
        for key in FlowTable::keys(&flow).into_iter().flatten() {
            // Another flow may own the key by now, if its QPN was reused.
            if self.by_key.get(&key) == Some(&flow_id) {
                self.by_key.remove(&key);
            }
        }
        Some(flow)
    }

    pub fn flow(&self, flow_id: FlowId) -> Option<&Flow> {
        self.by_id.get(&flow_id).map(|(flow, _)| flow)
    }

    /// All flows, ordered by ID.
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

    /// The flow of a packet.
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
    fn requests_and_responses_belong_to_the_flow_of_the_requester() {
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
    fn loopback_queue_pair_has_requests_and_responses() {
        let mut flows = FlowTable::new();
        flows.insert(flow(1, ALICE, ALICE, 0));
        let write = Packet::rc(Operation::Write, 0).between(ALICE, ALICE);
        let ack = Packet::rc(Operation::Acknowledge, 0).between(ALICE, ALICE);
        assert_eq!(find(&flows, write), Some((FlowId(1), PacketType::Request)));
        assert_eq!(find(&flows, ack), Some((FlowId(1), PacketType::Response)));
    }

    #[test]
    fn datagram_belongs_to_the_flow_of_its_sender() {
        let mut flows = FlowTable::new();
        let requester = Endpoint { qpn: Qpn::GSI, ..ALICE };
        flows.insert(Flow { id: FlowId(3), requester, responder: None, first_psn: Psn::new(0) });
        assert_eq!(find(&flows, management_datagram(7, 0x10)), Some((FlowId(3), PacketType::Request)));
    }

    #[test]
    fn flow_keeps_its_key_when_another_with_the_same_qpn_is_removed() {
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
