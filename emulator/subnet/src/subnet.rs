//! The subnet: nodes, links, and the way of a MAD from port to port.

mod data;

use crate::agent::LinkCommand;
use crate::drop_reason::DropReason;
use crate::fault::{Due, Fault, FaultError, Faults, MIN_FLAP_TIME};
use crate::node::Node;
use crate::packet::{GENERAL_Q_KEY, Mad, Packet};
use crate::performance::{self, PortCounter, PortCounters};
use crate::rmpp::Datagram;
use crate::topology::{PortId, Topology};
use crate::traps::Traps;
use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;
use data::Devices;
pub use data::MAX_IN_FLIGHT;
use softhca_wire::smp::{
    Attribute, AttributeId, CapabilityChange, KeyViolation, Lid, MAX_HOPS, ManagementKeyViolation, Method,
    NodeDescription, Notice, NoticeHeader, NoticeType, PhysicalState, PortCapabilities, PortInfo, PortState,
    Smp, Status, TrapNumber,
};
use softhca_wire::{MadHeader, Mtu, Qpn};

/// The most switches that a packet passes: a directed route between two LID routes.
const MAX_PASSED: usize = 3 * MAX_HOPS as usize;
/// The shortest time between repeated traps, in nanoseconds.
const MIN_TRAP_INTERVAL: u64 = 1_000_000;
/// How long a manager waits for a response, in nanoseconds.
const RESPONSE_TIMEOUT: u64 = 200_000_000;
/// The protection of an M_Key: no request without it is answered (IBA 14.2.4).
const PROTECTS_ALL: u8 = 2;
/// Words of a packet with a MAD, from the LRH to the ICRC: 8 + 12 + 8 + 256 + 4 bytes.
const MAD_WORDS: u64 = 288 / 4;

/// The nodes of a subnet with their agents. Each call handles a packet until it has arrived or was dropped.
pub struct Subnet {
    topology: Topology,
    nodes: Vec<Node>,
    failed: BTreeSet<PortId>,
    faults: Faults,
    traps: Traps,
    /// When the manager sweeps again.
    sweep_at: Option<u64>,
    arrived: VecDeque<(PortId, Packet)>,
    changed: BTreeSet<PortId>,
    devices: Devices,
    drops: [u64; DropReason::ALL.len()],
    now: u64,
}

/// Where a packet goes from a node.
enum Hop {
    Arrived,
    Out(u8),
}

/// The part of a packet that ports check and count.
struct Passing {
    /// Words of four bytes from the LRH to the ICRC.
    words: u64,
    /// Bytes of payload.
    payload: usize,
    /// The P_Key; SMPs have none.
    p_key: Option<u16>,
    is_subnet_management: bool,
}

impl Subnet {
    /// A subnet that nobody manages: ports with a link are in state Initialize.
    pub fn new(topology: Topology) -> Subnet {
        let nodes = topology.nodes.iter().map(Node::new).collect();
        let mut subnet = Subnet {
            topology,
            nodes,
            failed: BTreeSet::new(),
            faults: Faults::default(),
            traps: Traps::default(),
            sweep_at: None,
            arrived: VecDeque::new(),
            changed: BTreeSet::new(),
            devices: Devices::default(),
            drops: [0; DropReason::ALL.len()],
            now: 0,
        };
        for node in 0..subnet.nodes.len() {
            for port in 1..=subnet.nodes[node].info.port_count {
                subnet.train(PortId { node, port });
            }
        }
        subnet.changed.clear();
        subnet
    }

    /// The nodes and links.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The state and settings of a port that exists.
    pub fn port_info(&self, port: PortId) -> &PortInfo {
        &self.nodes[port.node].ports[usize::from(port.port)].info
    }

    /// The GIDs' lower halves of a port, of which unused ones are zero.
    pub fn port_guids(&self, port: PortId) -> &[u64] {
        &self.nodes[port.node].ports[usize::from(port.port)].guids
    }

    /// The partition keys of a port.
    pub fn p_keys(&self, port: PortId) -> &[u16] {
        &self.nodes[port.node].ports[usize::from(port.port)].p_keys
    }

    /// The counters of a port.
    pub fn counters(&self, port: PortId) -> &PortCounters {
        &self.nodes[port.node].ports[usize::from(port.port)].counters
    }

    /// Adds to a counter of a port that exists.
    pub fn count(&mut self, port: PortId, counter: PortCounter, count: u64) {
        self.nodes[port.node].ports[usize::from(port.port)].counters.add(counter, count);
    }

    /// How many packets were dropped for a reason.
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.drops[reason as usize]
    }

    /// Counts a MAD that the owner of the subnet dropped.
    pub fn count_drop(&mut self, reason: DropReason) {
        self.drops[reason as usize] += 1;
    }

    /// The next MAD that arrived at a port of an HCA, for the programs there.
    pub fn take_arrived(&mut self) -> Option<(PortId, Packet)> {
        self.arrived.pop_front()
    }

    /// The ports whose attributes have changed since the last call.
    pub fn take_changed(&mut self) -> BTreeSet<PortId> {
        core::mem::take(&mut self.changed)
    }

    /// When [`Subnet::expire`] has something to do.
    pub fn next_timeout(&self) -> Option<u64> {
        [self.traps.next_timeout(), self.faults.next_timeout(), self.sweep_at].into_iter().flatten().min()
    }

    /// Lets the manager sweep again after a time, in nanoseconds, or not at all.
    pub(crate) fn sweep_after(&mut self, delay: Option<u64>) {
        self.sweep_at = delay.map(|delay| self.now.saturating_add(delay));
    }

    /// Whether the time of [`Subnet::sweep_after`] has come, once.
    pub(crate) fn is_sweep_due(&mut self) -> bool {
        self.sweep_at.take_if(|at| *at <= self.now).is_some()
    }

    /// Advances the time, in nanoseconds, without sending anything.
    pub fn advance(&mut self, now: u64) {
        self.now = self.now.max(now);
    }

    /// Advances the time, in nanoseconds: faults begin, slow agents answer, and traps are sent.
    pub fn expire(&mut self, now: u64) {
        self.now = self.now.max(now);
        while let Some(due) = self.faults.pop_due(self.now) {
            match due {
                // The fault was possible when it was scheduled, and nodes and links do not change.
                Due::Fault(port, fault) => drop(self.begin(port, fault)),
                Due::Started(node) => self.start(node),
                Due::Response(at, response) => self.deliver(at, *response),
            }
        }
        let nodes = &self.nodes;
        let interval = |port: PortId| {
            let timeout = nodes[port.node].ports[usize::from(port.port)].info.subnet_timeout;
            (4096 << timeout).max(MIN_TRAP_INTERVAL)
        };
        for (port, mut notice, transaction_id) in self.traps.due(self.now, interval) {
            let PortInfo { lid, sm_lid, m_key, .. } = *self.port_info(port);
            if !lid.is_unicast() || !sm_lid.is_unicast() {
                // No manager knows this port, so it learns everything when it finds it.
                self.traps.discard(port, notice.header.trap);
                continue;
            }
            notice.header.issuer = lid;
            let mut smp = Smp::new(Method::TRAP, AttributeId::Notice, 0, transaction_id).with(&notice);
            smp.m_key = m_key;
            self.deliver(port, Packet::subnet(lid, sm_lid, smp));
        }
    }

    /// Sends a MAD from a port. Responses of agents return to the sender at once.
    pub fn send(&mut self, origin: PortId, packet: Packet) {
        self.deliver(origin, packet);
        self.expire(self.now);
    }

    /// Sends a request of the manager at a port and returns its response, unless it was lost.
    pub fn request(&mut self, origin: PortId, packet: Packet) -> Option<Smp> {
        let Mad::Subnet(request) = packet.mad else { return None };
        self.send(origin, packet);
        let end = self.now.saturating_add(RESPONSE_TIMEOUT);
        if let Some((at, response)) = self.faults.take_response(request.transaction_id, end) {
            self.deliver(at, response);
        }
        let is_response = |(at, packet): &(PortId, Packet)| {
            let Mad::Subnet(smp) = &packet.mad else { return false };
            *at == origin && smp.method == Method::GET_RESP && smp.transaction_id == request.transaction_id
        };
        let index = self.arrived.iter().rposition(is_response)?;
        match self.arrived.remove(index)?.1.mad {
            Mad::Subnet(response) => Some(response),
            Mad::General(_) => None,
        }
    }

    fn deliver(&mut self, mut from: PortId, mut packet: Packet) {
        // A request has one response, which has none.
        for _ in 0..2 {
            let response = self.carry(from, &mut packet).and_then(|at| {
                from = at;
                self.receive(at, &packet)
            });
            match response {
                Ok(Some(response)) => match self.faults.answers_at(from.node, self.now) {
                    None => packet = response,
                    Some(end) if self.faults.delay(from, &response, end) => return,
                    Some(_) => return self.count_drop(DropReason::QueueFull),
                },
                Ok(None) => return,
                Err(reason) => return self.count_drop(reason),
            }
        }
    }

    /// How often the manager has asked the programs at a port to register again.
    pub fn reregistrations(&self, port: PortId) -> u32 {
        self.nodes[port.node].ports[usize::from(port.port)].reregistrations
    }

    /// Carries a MAD to the node where it ends, and returns the port at which it arrived.
    fn carry(&mut self, origin: PortId, packet: &mut Packet) -> Result<PortId, DropReason> {
        let is_subnet_management = matches!(packet.mad, Mad::Subnet(_));
        let p_key = (!is_subnet_management).then_some(packet.p_key);
        let payload = MadHeader::DATAGRAM_LEN;
        let passing = Passing { words: MAD_WORDS, payload, p_key, is_subnet_management };
        self.follow(origin, &passing, |subnet, at, has_left| subnet.next_hop(at, has_left, packet))
    }

    /// Takes the steps that `next` returns until a packet arrives. Returns the port where it does.
    fn follow(
        &mut self,
        origin: PortId,
        passing: &Passing,
        mut next: impl FnMut(&Subnet, PortId, bool) -> Result<Hop, DropReason>,
    ) -> Result<PortId, DropReason> {
        let mut at = origin;
        let mut has_left = false;
        for _ in 0..=MAX_PASSED {
            let hop = next(self, at, has_left);
            if matches!(hop, Err(DropReason::NoRoute)) && has_left {
                self.count(at, PortCounter::RelayErrors, 1);
            }
            match hop? {
                Hop::Arrived => return Ok(at),
                Hop::Out(port) => at = self.cross(PortId { port, ..at }, passing)?,
            }
            has_left = true;
        }
        Err(DropReason::TooManyHops)
    }

    fn next_hop(&self, at: PortId, has_left: bool, packet: &mut Packet) -> Result<Hop, DropReason> {
        let node = &self.nodes[at.node];
        let own = &node.ports[usize::from(node.management_port(at.port))].info;
        if packet.dlid == Lid::PERMISSIVE || own.has_lid(packet.dlid) {
            return match &mut packet.mad {
                Mad::Subnet(smp) if smp.is_directed() => {
                    let hop = directed_hop(smp, node.is_switch(), at.port, has_left)?;
                    let next = if smp.is_returning { smp.dr_slid } else { smp.dr_dlid };
                    // The directed part has ended, and a LID route follows.
                    let ends =
                        if smp.is_returning { smp.hop_pointer == 0 } else { smp.hop_pointer > smp.hop_count };
                    let goes_on =
                        matches!(hop, Hop::Arrived) && ends && next != Lid::PERMISSIVE && !own.has_lid(next);
                    if goes_on && packet.dlid != next {
                        (packet.slid, packet.dlid) = (own.lid, next);
                        return self.lid_hop(at, has_left, next);
                    }
                    if matches!(hop, Hop::Out(_)) {
                        packet.dlid = Lid::PERMISSIVE;
                    }
                    Ok(hop)
                }
                _ if packet.dlid == Lid::PERMISSIVE && !has_left => Ok(Hop::Out(at.port)),
                _ => Ok(Hop::Arrived),
            };
        }
        self.lid_hop(at, has_left, packet.dlid)
    }

    fn lid_hop(&self, at: PortId, has_left: bool, dlid: Lid) -> Result<Hop, DropReason> {
        let node = &self.nodes[at.node];
        if node.is_switch() {
            let port = node.output_port(dlid).filter(|port| *port != 0);
            return port.map(Hop::Out).ok_or(DropReason::NoRoute);
        }
        if has_left {
            return Err(DropReason::WrongLid);
        }
        if dlid.is_unicast() { Ok(Hop::Out(at.port)) } else { Err(DropReason::NoRoute) }
    }

    /// Crosses a link if the states of both ports let the packet pass.
    fn cross(&mut self, out: PortId, passing: &Passing) -> Result<PortId, DropReason> {
        let Passing { words, payload, is_subnet_management, .. } = *passing;
        let peer = self.topology.peer(out).ok_or(DropReason::LinkDown)?;
        let (sender, receiver) = (self.port_info(out).state, self.port_info(peer).state);
        if sender <= PortState::DOWN || receiver <= PortState::DOWN {
            return Err(DropReason::LinkDown);
        }
        if !is_subnet_management {
            if sender != PortState::ACTIVE || receiver < PortState::ARMED {
                self.count(out, PortCounter::TransmitDiscards, 1);
                return Err(DropReason::PortState);
            }
            if receiver == PortState::ARMED {
                self.port_mut(peer).state = PortState::ACTIVE;
                self.changed.insert(peer);
            }
            self.enforce_partition(out, passing, |info| info.outbound_enforcement)?;
            let mtu = Mtu::from_code(self.port_info(out).neighbor_mtu).unwrap_or(Mtu::B256);
            if payload > mtu.bytes() as usize {
                self.count(out, PortCounter::TransmitDiscards, 1);
                return Err(DropReason::TooLong);
            }
        }
        self.count(out, PortCounter::TransmitData, words);
        self.count(out, PortCounter::TransmitPackets, 1);
        if self.faults.has_bit_error(peer) {
            self.count(peer, PortCounter::SymbolErrors, 1);
            self.count(peer, PortCounter::ReceiveErrors, 1);
            return Err(DropReason::BitError);
        }
        if is_subnet_management && self.faults.loses_smp(peer) {
            self.count(peer, PortCounter::Vl15Dropped, 1);
            return Err(DropReason::NoRoom);
        }
        self.count(peer, PortCounter::ReceiveData, words);
        self.count(peer, PortCounter::ReceivePackets, 1);
        self.enforce_partition(peer, passing, |info| info.inbound_enforcement)?;
        Ok(peer)
    }

    /// Checks the P_Key of a packet at a port of a switch whose manager wants it.
    fn enforce_partition(
        &mut self,
        at: PortId,
        passing: &Passing,
        is_wanted: impl Fn(&PortInfo) -> bool,
    ) -> Result<(), DropReason> {
        let node = &self.nodes[at.node];
        let port = &node.ports[usize::from(at.port)];
        match passing.p_key {
            Some(key) if node.is_switch() && is_wanted(&port.info) && !port.accepts(key) => {
                let info = self.port_mut(at);
                info.p_key_violations = info.p_key_violations.saturating_add(1);
                Err(DropReason::PartitionKey)
            }
            _ => Ok(()),
        }
    }

    /// Handles a packet at its destination, and returns the response of an agent.
    fn receive(&mut self, at: PortId, packet: &Packet) -> Result<Option<Packet>, DropReason> {
        let is_switch = self.nodes[at.node].is_switch();
        match &packet.mad {
            Mad::Subnet(smp) => {
                let is_request = matches!(smp.method, Method::GET | Method::SET) && !smp.is_returning;
                let is_for_manager = smp.attribute_id == AttributeId::SmInfo as u16 && !is_switch;
                if smp.method == Method::TRAP_REPRESS {
                    self.check_m_key(at, smp, packet.slid)?;
                    self.traps.repress(at.node, smp.transaction_id);
                    return Ok(None);
                }
                if is_request && !is_for_manager {
                    self.check_m_key(at, smp, packet.slid)?;
                    return Ok(Some(self.respond(at, packet, *smp)));
                }
            }
            Mad::General(mad) => {
                self.check_keys(at, packet)?;
                let is_request = matches!(Method(mad[3]), Method::GET | Method::SET);
                if mad[1] == MadHeader::CLASS_PERFORMANCE && is_request {
                    return Ok(Some(self.respond_counters(at, packet, mad)));
                }
            }
        }
        if is_switch {
            return Err(DropReason::NoAgent);
        }
        self.arrived.push_back((at, *packet));
        Ok(None)
    }

    /// Executes a request at the agent of a node.
    fn respond(&mut self, at: PortId, packet: &Packet, request: Smp) -> Packet {
        let PortId { node, port } = at;
        let modifier = request.attribute_modifier;
        let management_port = self.nodes[node].management_port(port);
        let result = match AttributeId::from_number(request.attribute_id) {
            None => Err(Status::UNSUPPORTED_ATTRIBUTE),
            Some(id) if request.method == Method::GET => self.nodes[node].get(id, modifier, port),
            Some(id) => self.nodes[node].set(id, modifier, port, &request.data).and_then(|command| {
                self.after_set(at, id, modifier, command);
                self.count_reregistration(at, id, modifier, &request);
                self.nodes[node].get(id, modifier, port)
            }),
        };
        let (status, data) = match result {
            Ok(mut data) => {
                let own = &self.nodes[node].ports[usize::from(management_port)].info;
                let is_hidden = own.m_key_protect == 1 && own.m_key != request.m_key;
                if request.attribute_id == AttributeId::PortInfo as u16 && is_hidden {
                    data.0[..8].fill(0);
                }
                (Status::OK, data)
            }
            Err(status) => (status, request.data),
        };
        let own_lid = self.nodes[node].ports[usize::from(management_port)].info.lid;
        let is_returning = request.is_directed();
        let response = Smp { method: Method::GET_RESP, is_returning, status, data, ..request };
        // A directed response starts on the directed part unless a LID route was last.
        let is_direct = request.is_directed() && request.dr_dlid == Lid::PERMISSIVE;
        let dlid = if is_direct { Lid::PERMISSIVE } else { packet.slid };
        Packet { slid: own_lid, dlid, mad: Mad::Subnet(response), ..*packet }
    }

    /// Executes a request at the performance management agent of a node.
    fn respond_counters(&mut self, at: PortId, packet: &Packet, mad: &Datagram) -> Packet {
        let node = &mut self.nodes[at.node];
        let arrived = node.management_port(at.port);
        let slid = node.ports[usize::from(arrived)].info.lid;
        let mut ports: Vec<_> = node.ports.iter_mut().map(|port| &mut port.counters).collect();
        let mad = Mad::General(performance::respond(mad, &mut ports, arrived));
        let (source_qp, destination_qp) = (packet.destination_qp, packet.source_qp);
        Packet { slid, dlid: packet.slid, source_qp, destination_qp, mad, ..*packet }
    }

    /// The effects of a Set beyond the change of the attribute.
    fn after_set(&mut self, at: PortId, id: AttributeId, modifier: u32, command: Option<LinkCommand>) {
        match id {
            AttributeId::PortInfo => {
                let number = if modifier & 0xff == 0 {
                    self.nodes[at.node].management_port(at.port)
                } else {
                    modifier as u8
                };
                let port = PortId { node: at.node, port: number };
                self.changed.insert(port);
                self.nodes[at.node].ports[usize::from(number)].lease_end = None;
            }
            AttributeId::PKeyTable | AttributeId::GuidInfo => {
                self.changed.insert(at);
            }
            _ => {}
        }
        let Some(command) = command else { return };
        let (LinkCommand::Reset(port) | LinkCommand::Disable(port) | LinkCommand::Enable(port)) = command;
        let port = PortId { node: at.node, port };
        let state = &mut self.nodes[at.node].ports[usize::from(port.port)];
        match command {
            LinkCommand::Reset(_) => self.take_down(port),
            LinkCommand::Disable(_) => state.is_disabled = true,
            LinkCommand::Enable(_) => state.is_disabled = false,
        }
        self.train(port);
    }

    /// Counts a Set of PortInfo that asks the programs at the port to register again.
    fn count_reregistration(&mut self, at: PortId, id: AttributeId, modifier: u32, request: &Smp) {
        if id == AttributeId::PortInfo && PortInfo::from_block(&request.data).client_reregister {
            let number = if modifier & 0xff == 0 { at.port } else { modifier as u8 };
            let port = &mut self.nodes[at.node].ports[usize::from(number)];
            port.reregistrations = port.reregistrations.wrapping_add(1);
        }
    }

    /// Checks the M_Key of a request (IBA 14.2.4).
    fn check_m_key(&mut self, at: PortId, smp: &Smp, slid: Lid) -> Result<(), DropReason> {
        let number = self.nodes[at.node].management_port(at.port);
        let now = self.now;
        let port = &mut self.nodes[at.node].ports[usize::from(number)];
        if port.lease_end.is_some_and(|end| end <= now) {
            (port.info.m_key_protect, port.lease_end) = (0, None);
        }
        let PortInfo { m_key, m_key_protect, m_key_lease, lid, .. } = port.info;
        if m_key == 0 || m_key == smp.m_key {
            if m_key != 0 {
                port.lease_end = None;
            }
            return Ok(());
        }
        if smp.method == Method::GET && m_key_protect <= 1 {
            return Ok(());
        }
        port.info.m_key_violations = port.info.m_key_violations.saturating_add(1);
        if m_key_lease != 0 && port.lease_end.is_none() {
            port.lease_end = Some(now + u64::from(m_key_lease) * 1_000_000_000);
        }
        let details = ManagementKeyViolation {
            lid,
            dr_slid: if smp.is_directed() { smp.dr_slid } else { slid },
            method: smp.method.0,
            attribute_id: smp.attribute_id,
            attribute_modifier: smp.attribute_modifier,
            m_key: smp.m_key,
        };
        let notice = self.notice(at.node, NoticeType::SECURITY, TrapNumber::BAD_M_KEY);
        let issuer = PortId { node: at.node, port: number };
        self.traps.raise(issuer, notice.with_management_key_violation(details), now);
        Err(DropReason::ManagementKey)
    }

    /// Checks the P_Key and Q_Key of a MAD to QP1.
    fn check_keys(&mut self, at: PortId, packet: &Packet) -> Result<(), DropReason> {
        let number = self.nodes[at.node].management_port(at.port);
        let port = &mut self.nodes[at.node].ports[usize::from(number)];
        let (trap, key, reason) = if !port.accepts(packet.p_key) {
            port.info.p_key_violations = port.info.p_key_violations.saturating_add(1);
            (TrapNumber::BAD_P_KEY, packet.p_key.into(), DropReason::PartitionKey)
        } else if packet.q_key != GENERAL_Q_KEY {
            port.info.q_key_violations = port.info.q_key_violations.saturating_add(1);
            (TrapNumber::BAD_Q_KEY, packet.q_key, DropReason::QueueKey)
        } else {
            return Ok(());
        };
        let violation = KeyViolation {
            source: packet.slid,
            destination: packet.dlid,
            key,
            sl: packet.sl,
            source_qp: Qpn::new(packet.source_qp),
            destination_qp: Qpn::new(packet.destination_qp),
            ..KeyViolation::default()
        };
        self.raise_key_violation(PortId { node: at.node, port: number }, trap, violation);
        Err(reason)
    }

    /// Tells the manager of a packet with a wrong key.
    fn raise_key_violation(&mut self, port: PortId, trap: TrapNumber, details: KeyViolation) {
        let notice = self.notice(port.node, NoticeType::SECURITY, trap).with_key_violation(details);
        self.traps.raise(port, notice, self.now);
    }

    fn notice(&self, node: usize, notice_type: NoticeType, trap: TrapNumber) -> Notice {
        let producer = self.nodes[node].info.node_type.0.into();
        let header = NoticeHeader { is_generic: true, notice_type, producer, trap, issuer: Lid(0) };
        Notice::new(header)
    }

    /// Says that a subnet manager runs at a port, or has ended.
    pub fn set_is_sm(&mut self, port: PortId, is_sm: bool) {
        let info = self.port_mut(port);
        if info.capabilities.contains(PortCapabilities::SM) != is_sm {
            info.capabilities.set(PortCapabilities::SM, is_sm);
            self.capabilities_changed(port, 0);
        }
    }

    /// Changes the description of a node.
    pub fn set_description(&mut self, node: usize, text: &str) {
        self.nodes[node].description = NodeDescription::new(text);
        if !self.nodes[node].is_switch() {
            let ports = 1..=self.nodes[node].info.port_count;
            ports.for_each(|port| self.capabilities_changed(PortId { node, port }, 1));
        }
    }

    fn capabilities_changed(&mut self, port: PortId, change_flags: u16) {
        let PortInfo { lid, capabilities, .. } = *self.port_info(port);
        let details = CapabilityChange {
            lid,
            has_other_changes: change_flags != 0,
            capabilities: capabilities.bits(),
            change_flags,
        };
        let notice = self.notice(port.node, NoticeType::INFORMATIONAL, TrapNumber::CAPABILITY_CHANGE);
        self.traps.raise(port, notice.with_capability_change(details), self.now);
        self.changed.insert(port);
        self.expire(self.now);
    }

    /// Begins a fault, now.
    pub fn apply(&mut self, port: PortId, fault: Fault) -> Result<(), FaultError> {
        self.check_fault(port, fault)?;
        self.begin(port, fault)?;
        self.expire(self.now);
        Ok(())
    }

    /// Begins a fault at a time, in nanoseconds.
    pub fn schedule(&mut self, at: u64, port: PortId, fault: Fault) -> Result<(), FaultError> {
        self.check_fault(port, fault)?;
        self.faults.schedule(at, port, fault)
    }

    fn check_fault(&self, port: PortId, fault: Fault) -> Result<(), FaultError> {
        let node = self.nodes.get(port.node).ok_or(FaultError::NoPort)?;
        let first = if node.is_switch() { 0 } else { 1 };
        if !(first..=node.info.port_count).contains(&port.port) {
            return Err(FaultError::NoPort);
        }
        match fault {
            Fault::LinkDown | Fault::LinkUp | Fault::Flap { .. } if self.topology.peer(port).is_none() => {
                Err(FaultError::NoLink)
            }
            Fault::Reboot { .. } if !node.is_switch() || port.port != 0 => Err(FaultError::NoSwitch),
            _ => Ok(()),
        }
    }

    fn begin(&mut self, port: PortId, fault: Fault) -> Result<(), FaultError> {
        match fault {
            Fault::LinkDown => self.set_link(port, false),
            Fault::LinkUp => self.set_link(port, true),
            Fault::Flap { times: 0, .. } => {}
            Fault::Flap { down, up, times } => {
                let (down, up) = (down.max(MIN_FLAP_TIME), up.max(MIN_FLAP_TIME));
                let repaired = self.now.saturating_add(down);
                self.faults.schedule(repaired, port, Fault::LinkUp)?;
                let next = Fault::Flap { down, up, times: times - 1 };
                self.faults.schedule(repaired.saturating_add(up), port, next)?;
                self.set_link(port, false);
            }
            Fault::Count { counter, count } => self.count(port, counter, count),
            Fault::BitErrors { every } => self.faults.set_bit_errors(port, every),
            Fault::LoseSmps { every } => self.faults.set_lost_smps(port, every),
            Fault::SlowAgent { delay } => self.faults.set_delay(port.node, delay),
            Fault::ManagementKey { key } => {
                let port = PortId { port: self.nodes[port.node].management_port(port.port), ..port };
                let info = self.port_mut(port);
                (info.m_key, info.m_key_protect, info.m_key_lease) = (key, PROTECTS_ALL, 0);
                self.changed.insert(port);
            }
            Fault::Reboot { down } => self.reboot(port.node, down)?,
        }
        Ok(())
    }

    /// Takes the links of a switch down for a time, and forgets its settings.
    fn reboot(&mut self, node: usize, down: u64) -> Result<(), FaultError> {
        self.faults.reboot(node, self.now.saturating_add(down))?;
        let ports = (0..=self.nodes[node].info.port_count).map(|port| PortId { node, port });
        ports.clone().for_each(|port| self.take_down(port));
        self.nodes[node] = Node::new(&self.topology.nodes[node]);
        // A trap from before has an issuer that no manager knows any more.
        self.traps.discard(PortId { node, port: 0 }, TrapNumber::LINK_STATE);
        self.changed.extend(ports);
        Ok(())
    }

    /// Brings the links of a switch up that has rebooted.
    fn start(&mut self, node: usize) {
        if self.faults.starts(node, self.now) {
            (1..=self.nodes[node].info.port_count).for_each(|port| self.train(PortId { node, port }));
        }
    }

    /// Breaks the link of a port, or repairs it.
    fn set_link(&mut self, port: PortId, works: bool) {
        let ends = [Some(port), self.topology.peer(port)];
        for end in ends.into_iter().flatten() {
            if works {
                self.failed.remove(&end)
            } else {
                self.failed.insert(end)
            };
        }
        self.train(port);
    }

    fn port_mut(&mut self, port: PortId) -> &mut PortInfo {
        &mut self.nodes[port.node].ports[usize::from(port.port)].info
    }

    /// Brings the link of a port up or down, as both ends permit.
    fn train(&mut self, port: PortId) {
        let Some(peer) = self.topology.peer(port) else {
            let is_disabled = self.nodes[port.node].ports[usize::from(port.port)].is_disabled;
            self.port_mut(port).physical_state =
                if is_disabled { PhysicalState::DISABLED } else { PhysicalState::POLLING };
            return;
        };
        let is_disabled = |end: PortId| self.nodes[end.node].ports[usize::from(end.port)].is_disabled;
        let is_rebooting = [port, peer].iter().any(|end| self.faults.is_rebooting(end.node));
        let works = !self.failed.contains(&port) && !is_rebooting && !is_disabled(port) && !is_disabled(peer);
        let disabled = [is_disabled(port), is_disabled(peer)];
        if !works {
            self.take_down(port);
            for (end, is_disabled) in [port, peer].into_iter().zip(disabled) {
                self.port_mut(end).physical_state =
                    if is_disabled { PhysicalState::DISABLED } else { PhysicalState::POLLING };
            }
        } else if self.port_info(port).state == PortState::DOWN {
            for end in [port, peer] {
                let info = self.port_mut(end);
                (info.state, info.physical_state) = (PortState::INITIALIZE, PhysicalState::LINK_UP);
                self.link_changed(end);
            }
        }
    }

    /// Takes both ends of a link down.
    fn take_down(&mut self, port: PortId) {
        for end in [Some(port), self.topology.peer(port)].into_iter().flatten() {
            let info = self.port_mut(end);
            if info.state != PortState::DOWN {
                (info.state, info.physical_state) = (PortState::DOWN, PhysicalState::POLLING);
                self.count(end, PortCounter::LinkDowned, 1);
                self.link_changed(end);
            }
        }
    }

    /// Reports a changed link state: a switch tells the manager.
    fn link_changed(&mut self, end: PortId) {
        self.changed.insert(end);
        let Some(forwarding) = &mut self.nodes[end.node].forwarding else { return };
        forwarding.info.state_change = true;
        let issuer = PortId { node: end.node, port: 0 };
        let lid = self.port_info(issuer).lid;
        let notice = self.notice(end.node, NoticeType::URGENT, TrapNumber::LINK_STATE);
        self.traps.raise(issuer, notice.with_link_state(lid), self.now);
    }
}

/// The next step of a directed route (IBA 14.2.2).
fn directed_hop(smp: &mut Smp, is_switch: bool, arrived: u8, has_left: bool) -> Result<Hop, DropReason> {
    let (pointer, count) = (smp.hop_pointer, smp.hop_count);
    let index = usize::from(pointer);
    let invalid = Err(DropReason::DirectedRoute);
    if count > MAX_HOPS || pointer > MAX_HOPS + 1 {
        return invalid;
    }
    if smp.is_returning {
        return match pointer {
            0 => Ok(Hop::Arrived),
            1 => {
                smp.hop_pointer = 0;
                Ok(Hop::Arrived)
            }
            _ if pointer == count + 1 || is_switch && pointer <= count => {
                smp.hop_pointer -= 1;
                Ok(Hop::Out(smp.return_path.0[index - 1]))
            }
            _ => invalid,
        };
    }
    if pointer == count + 1 {
        return Ok(Hop::Arrived);
    }
    if pointer > count {
        return invalid;
    }
    if pointer != 0 || count == 0 {
        if pointer != 0 && !has_left {
            return invalid;
        }
        smp.return_path.0[index] = if pointer == 0 { 0 } else { arrived };
    }
    smp.hop_pointer += 1;
    if pointer == count {
        return Ok(Hop::Arrived);
    }
    let out = smp.initial_path.0[index + 1];
    // A channel adapter does not forward; its requests leave through their own port.
    let is_possible = if is_switch { out != 0 } else { !has_left && out == arrived };
    if is_possible { Ok(Hop::Out(out)) } else { invalid }
}

#[cfg(test)]
mod tests;
