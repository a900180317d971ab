//! Data packets: the way from the device at one port to those at others, by forwarding tables.
//!
//! A packet is forwarded until it arrives or is dropped, in one call, so packets stay in order. None is dropped for lack of
//! room: a device that has too much on its way waits for its receivers.

use super::{Hop, Passing, Subnet};
use crate::drop_reason::DropReason;
use crate::node::{MULTICAST_CAP, default_sl_to_vl};
use crate::performance::PortCounter;
use crate::topology::PortId;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use softhca_wire::smp::{KeyViolation, Lid, PortState, TrapNumber};
use softhca_wire::{LocalPacket, Lrh, Malformed};

/// A device with so many bytes on their way has no room for more.
pub const MAX_IN_FLIGHT: usize = 1 << 20;
/// A device that sends more does not wait for room: the packets are dropped.
const MAX_EXCESS: usize = 4 * MAX_IN_FLIGHT;
/// The virtual lane of subnet management. A service level that maps to it has no lane for data.
const MANAGEMENT_LANE: u8 = 15;
/// The first multicast LID.
const FIRST_MULTICAST: u16 = Lid::MAX_UNICAST.0 + 1;
/// Ports in the mask of a multicast forwarding table.
const MASK_PORTS: u8 = 16;
/// LIDs in a block of a multicast forwarding table.
const BLOCK_LIDS: u16 = 32;

/// The packets of a device.
#[derive(Default)]
struct Device {
    /// With the port that sent each.
    arrived: VecDeque<(PortId, Vec<u8>)>,
    /// The bytes that it has sent and nobody has received.
    in_flight: usize,
    /// It has asked for room in vain.
    waits: bool,
}

/// The devices at the ports of HCAs, and the packets on their way between them.
#[derive(Default)]
pub(super) struct Devices {
    attached: BTreeMap<PortId, Device>,
    /// Devices with new packets, or with room that they wait for.
    ready: BTreeSet<PortId>,
}

/// A packet on its way.
struct Packet<'a> {
    lrh: Lrh,
    passing: Passing,
    bytes: &'a [u8],
}

impl Subnet {
    /// Attaches a device to a port of an HCA: data can arrive there.
    pub fn attach_device(&mut self, port: PortId) {
        self.devices.attached.entry(port).or_default();
    }

    /// Whether the device at a port may send. If not, it becomes ready when it may.
    pub fn has_room(&mut self, port: PortId) -> bool {
        let Some(device) = self.devices.attached.get_mut(&port) else { return false };
        device.waits = device.in_flight >= MAX_IN_FLIGHT;
        !device.waits
    }

    /// The next packet that arrived at the device of a port, from the LRH to the VCRC.
    pub fn receive_data(&mut self, port: PortId) -> Option<Vec<u8>> {
        let (origin, bytes) = self.devices.attached.get_mut(&port)?.arrived.pop_front()?;
        if let Some(sender) = self.devices.attached.get_mut(&origin) {
            sender.in_flight -= bytes.len();
            if sender.waits && sender.in_flight < MAX_IN_FLIGHT {
                sender.waits = false;
                self.devices.ready.insert(origin);
            }
        }
        Some(bytes)
    }

    /// The ports with new packets, or with room that they wait for, since the last call.
    pub fn take_ready(&mut self) -> BTreeSet<PortId> {
        core::mem::take(&mut self.devices.ready)
    }

    /// Sends a packet of the device at a port: from the LRH to the VCRC.
    pub fn send_data(&mut self, origin: PortId, bytes: &[u8]) {
        if let Err(reason) = self.try_send_data(origin, bytes) {
            self.count_drop(reason);
        }
    }

    fn try_send_data(&mut self, origin: PortId, bytes: &[u8]) -> Result<(), DropReason> {
        let local = LocalPacket::parse(bytes).map_err(|why| {
            let is_damaged = matches!(why, Malformed::Checksum { .. });
            let counter = if is_damaged { PortCounter::SymbolErrors } else { PortCounter::ReceiveErrors };
            self.count(origin, counter, 1);
            DropReason::Malformed
        })?;
        let transport = local.transport().map_err(|_| DropReason::Malformed)?;
        let info = self.port_info(origin);
        if !info.has_lid(local.lrh.slid) {
            return Err(DropReason::WrongLid);
        }
        if info.state != PortState::ACTIVE {
            self.count(origin, PortCounter::TransmitDiscards, 1);
            return Err(DropReason::PortState);
        }
        let device = self.devices.attached.get(&origin).ok_or(DropReason::NoAgent)?;
        if device.in_flight >= MAX_EXCESS {
            return Err(DropReason::QueueFull);
        }
        let passing = Passing {
            words: local.lrh.words.into(),
            payload: transport.payload.len(),
            p_key: Some(transport.header.bth.pkey.0),
            is_subnet_management: false,
        };
        let packet = Packet { lrh: local.lrh, passing, bytes };
        match local.lrh.dlid {
            dlid if dlid.is_unicast() => {
                let next = |subnet: &Subnet, at: PortId, has_left| {
                    let hop = subnet.unicast_hop(at, has_left, dlid)?;
                    subnet.check_lane(at, has_left, &hop, packet.lrh.service_level)?;
                    Ok(hop)
                };
                let at = self.follow(origin, &packet.passing, next)?;
                self.arrive(origin, at, packet.bytes)
            }
            Lid(0) | Lid::PERMISSIVE => Err(DropReason::NoRoute),
            _ => self.spread(origin, &packet),
        }
    }

    /// The next step of a packet with a unicast LID.
    fn unicast_hop(&self, at: PortId, has_left: bool, dlid: Lid) -> Result<Hop, DropReason> {
        let node = &self.nodes[at.node];
        match node.ports[usize::from(node.management_port(at.port))].info.has_lid(dlid) {
            true => Ok(Hop::Arrived),
            false => self.lid_hop(at, has_left, dlid),
        }
    }

    /// Whether the service level has a lane for data on the next link.
    fn check_lane(&self, at: PortId, has_left: bool, hop: &Hop, level: u8) -> Result<(), DropReason> {
        let Hop::Out(out) = *hop else { return Ok(()) };
        let node = &self.nodes[at.node];
        let table = match &node.forwarding {
            Some(forwarding) if has_left => {
                forwarding.sl_to_vl.get(&(at.port, out)).copied().unwrap_or_else(default_sl_to_vl)
            }
            _ => node.ports[usize::from(out)].sl_to_vl,
        };
        match table.0[usize::from(level & 0xf)] {
            MANAGEMENT_LANE => Err(DropReason::NoLane),
            _ => Ok(()),
        }
    }

    /// Forwards a copy of a packet to each port of its multicast group. A copy that reaches a port of a switch again, as in
    /// a loop of tables, ends there.
    fn spread(&mut self, origin: PortId, packet: &Packet<'_>) -> Result<(), DropReason> {
        // The sending HCA passes the packet to its own members.
        self.arrive(origin, origin, packet.bytes)?;
        let mut reached = BTreeSet::new();
        let mut open = Vec::from([(origin, origin.port)]);
        while let Some((at, out)) = open.pop() {
            let lane = self.check_lane(at, at != origin, &Hop::Out(out), packet.lrh.service_level);
            let crossed = lane.and_then(|()| self.cross(PortId { port: out, ..at }, &packet.passing));
            let next = match crossed {
                Ok(next) => next,
                Err(reason) => {
                    self.count_drop(reason);
                    continue;
                }
            };
            if !self.nodes[next.node].is_switch() {
                if let Err(reason) = self.arrive(origin, next, packet.bytes) {
                    self.count_drop(reason);
                }
            } else if !reached.insert(next) {
                self.count(next, PortCounter::RelayErrors, 1);
                self.count_drop(DropReason::TooManyHops);
            } else {
                let ports = self.multicast_ports(next.node, packet.lrh.dlid);
                if ports.is_empty() {
                    self.count(next, PortCounter::RelayErrors, 1);
                    self.count_drop(DropReason::NoRoute);
                }
                open.extend(ports.into_iter().filter(|port| *port != next.port).map(|port| (next, port)));
            }
        }
        Ok(())
    }

    /// The output ports of a multicast LID at a switch.
    fn multicast_ports(&self, node: usize, dlid: Lid) -> Vec<u8> {
        let Some(forwarding) = &self.nodes[node].forwarding else { return Vec::new() };
        let index = dlid.0 - FIRST_MULTICAST;
        if index >= MULTICAST_CAP {
            return Vec::new();
        }
        let is_set = |port: &u8| {
            let block = forwarding.multicast.get(&(index / BLOCK_LIDS, port / MASK_PORTS));
            let mask = block.map_or(0, |block| block.word(usize::from(index % BLOCK_LIDS)));
            mask >> (port % MASK_PORTS) & 1 != 0
        };
        (1..=self.nodes[node].info.port_count).filter(is_set).collect()
    }

    /// Passes a packet to the device at a port.
    fn arrive(&mut self, origin: PortId, at: PortId, bytes: &[u8]) -> Result<(), DropReason> {
        let device = self.devices.attached.get_mut(&at).ok_or(DropReason::NoAgent)?;
        device.arrived.push_back((origin, bytes.to_vec()));
        self.devices.ready.insert(at);
        if let Some(sender) = self.devices.attached.get_mut(&origin) {
            sender.in_flight += bytes.len();
        }
        Ok(())
    }

    /// Counts a packet whose P_Key or Q_Key the device at a port does not accept, and tells the manager.
    pub fn report_bad_key(&mut self, at: PortId, trap: TrapNumber, violation: KeyViolation) {
        let info = self.port_mut(at);
        let (count, reason) = match trap {
            TrapNumber::BAD_Q_KEY => (&mut info.q_key_violations, DropReason::QueueKey),
            _ => (&mut info.p_key_violations, DropReason::PartitionKey),
        };
        *count = count.saturating_add(1);
        self.changed.insert(at);
        self.count_drop(reason);
        self.raise_key_violation(at, trap, violation);
        self.expire(self.now);
    }
}
