//! A small subnet manager: discovers the subnet by directed routes, assigns LIDs, writes forwarding tables and activates
//! ports. It uses MADs only, as OpenSM does.

use crate::node::NO_PORT;
use crate::packet::{Mad, Packet};
use crate::routing::{Edge, RoutingEngine, Target, route};
use crate::subnet::Subnet;
use crate::topology::PortId;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec;
use alloc::vec::Vec;
use softhca_wire::smp::{
    Attribute, AttributeId, Block, Lid, MAX_HOPS, Method, NodeInfo, NodeType, Notice, PortInfo, PortState,
    SmInfo, SmState, Smp, Status, SwitchInfo, TrapNumber,
};

/// A sweep repeats at most this often: nothing in the subnet may keep it busy for ever.
const MAX_SWEEPS: usize = 4;
/// How often a request is sent whose response is lost.
const MAX_TRIES: usize = 4;
/// The time after which a sweep with failures is repeated, in nanoseconds. It doubles with each that fails.
const RETRY_DELAY: u64 = 1_000_000_000;
/// How often the delay doubles.
const MAX_DOUBLINGS: u32 = 6;

/// The result of a sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Nodes found.
    pub nodes: usize,
    /// Switches among them.
    pub switches: usize,
    /// Ports that got no LID because all are in use.
    pub without_lid: usize,
    /// Requests sent.
    pub requests: u64,
    /// Requests without a response, or with an error.
    pub failed: u64,
}

/// A subnet manager at a port of an HCA.
pub struct Manager {
    pub(crate) port: PortId,
    engine: RoutingEngine,
    /// The nodes of the last sweep.
    pub(crate) nodes: Vec<Found>,
    /// The forwarding tables of the switches among them, indexed by LID.
    pub(crate) tables: BTreeMap<usize, Vec<u8>>,
    lids: BTreeMap<u64, Lid>,
    transaction_id: u64,
    activity: u32,
    needs_sweep: bool,
    /// The state of its own port after the last sweep.
    port_state: PortState,
    report: SweepReport,
    /// Sweeps with failures since the last one without.
    failures: u32,
}

/// A node that a sweep found.
pub(crate) struct Found {
    pub(crate) info: NodeInfo,
    pub(crate) path: Vec<u8>,
    /// For a switch, its external ports with links; for an HCA, the port that was found.
    pub(crate) links: Vec<FoundLink>,
    pub(crate) lid: Option<Lid>,
}

pub(crate) struct FoundLink {
    pub(crate) port: u8,
    pub(crate) info: PortInfo,
    /// The index and the port of the other node.
    pub(crate) peer: Option<(usize, u8)>,
}

impl Manager {
    /// A manager that has not swept yet.
    pub fn new(subnet: &mut Subnet, port: PortId, engine: RoutingEngine) -> Manager {
        subnet.set_is_sm(port, true);
        Manager {
            port,
            engine,
            nodes: Vec::new(),
            tables: BTreeMap::new(),
            lids: BTreeMap::new(),
            transaction_id: 0,
            activity: 0,
            needs_sweep: true,
            port_state: PortState::INITIALIZE,
            report: SweepReport::default(),
            failures: 0,
        }
    }

    /// The port at which the manager runs.
    pub fn port(&self) -> PortId {
        self.port
    }

    /// Handles a MAD that arrived at the port; `false` if it is for programs there.
    pub fn receive(&mut self, subnet: &mut Subnet, packet: &Packet) -> bool {
        let Mad::Subnet(smp) = &packet.mad else { return false };
        let id = AttributeId::from_number(smp.attribute_id);
        let (method, response) = match (smp.method, id) {
            (Method::GET, Some(AttributeId::SmInfo)) if !smp.is_returning => {
                (Method::GET_RESP, smp.with(&self.sm_info(subnet)))
            }
            (Method::TRAP, Some(AttributeId::Notice)) => {
                let trap = Notice::from_block(&smp.data).header.trap;
                self.needs_sweep |= trap == TrapNumber::LINK_STATE;
                (Method::TRAP_REPRESS, *smp)
            }
            _ => return false,
        };
        let own = *subnet.port_info(self.port);
        let is_returning = method == Method::GET_RESP && smp.is_directed();
        let response = Smp { method, is_returning, m_key: own.m_key, ..response };
        let dlid = if is_returning && smp.dr_dlid == Lid::PERMISSIVE { Lid::PERMISSIVE } else { packet.slid };
        subnet.send(self.port, Packet { slid: own.lid, dlid, mad: Mad::Subnet(response), ..*packet });
        true
    }

    pub(crate) fn sm_info(&self, subnet: &Subnet) -> SmInfo {
        let guid = subnet.port_guids(self.port)[0];
        SmInfo { guid, sm_key: 0, activity: self.activity, priority: 0, state: SmState::MASTER }
    }

    /// Sweeps if something has changed. Returns what the last sweep did.
    pub fn sweep_if_needed(&mut self, subnet: &mut Subnet) -> Option<SweepReport> {
        let mut last = None;
        // Nobody reports the own link, which was down and is up again.
        let state = subnet.port_info(self.port).state;
        self.needs_sweep |= state == PortState::INITIALIZE && self.port_state != state;
        self.needs_sweep |= subnet.is_sweep_due();
        for _ in 0..MAX_SWEEPS {
            if !core::mem::take(&mut self.needs_sweep) {
                break;
            }
            last = Some(self.sweep(subnet));
        }
        self.port_state = subnet.port_info(self.port).state;
        if let Some(report) = last {
            // A switch that nobody reaches reports nothing when it can be reached again.
            self.failures = if report.failed > 0 { self.failures + 1 } else { 0 };
            let doublings = self.failures.saturating_sub(1).min(MAX_DOUBLINGS);
            subnet.sweep_after((report.failed > 0).then_some(RETRY_DELAY << doublings));
        }
        last
    }

    fn sweep(&mut self, subnet: &mut Subnet) -> SweepReport {
        self.report = SweepReport::default();
        self.activity = self.activity.wrapping_add(1);
        let mut nodes = self.discover(subnet);
        self.assign_lids(&mut nodes);
        self.write_tables(subnet, &nodes);
        self.activate(subnet, &nodes);
        self.report.nodes = nodes.len();
        self.report.switches = nodes.iter().filter(|node| node.is_switch()).count();
        self.nodes = nodes;
        self.report
    }

    /// A directed-route request; `None` if it had no response or failed.
    fn request(&mut self, subnet: &mut Subnet, path: &[u8], smp: Smp) -> Option<Block> {
        let slid = subnet.port_info(self.port).lid;
        let packet = Packet::subnet(slid, Lid::PERMISSIVE, smp.directed(path));
        let response = (0..MAX_TRIES).find_map(|_| {
            self.report.requests += 1;
            subnet.request(self.port, packet)
        });
        let data = response.filter(|response| response.status == Status::OK).map(|response| response.data);
        self.report.failed += u64::from(data.is_none());
        data
    }

    fn next(&mut self, method: Method, id: AttributeId, modifier: u32) -> Smp {
        self.transaction_id += 1;
        Smp::new(method, id, modifier, self.transaction_id)
    }

    /// Reads a block of the forwarding table of a switch.
    pub(crate) fn get_table(&mut self, subnet: &mut Subnet, path: &[u8], block: u32) -> Option<Block> {
        let smp = self.next(Method::GET, AttributeId::LinearForwardingTable, block);
        self.request(subnet, path, smp)
    }

    pub(crate) fn get<A: Attribute>(&mut self, subnet: &mut Subnet, path: &[u8], modifier: u32) -> Option<A> {
        let smp = self.next(Method::GET, A::ID, modifier);
        self.request(subnet, path, smp).map(|block| A::from_block(&block))
    }

    fn set<A: Attribute>(&mut self, subnet: &mut Subnet, path: &[u8], modifier: u32, value: &A) -> Option<A> {
        let smp = self.next(Method::SET, A::ID, modifier).with(value);
        self.request(subnet, path, smp).map(|block| A::from_block(&block))
    }

    /// Finds all nodes, breadth first.
    fn discover(&mut self, subnet: &mut Subnet) -> Vec<Found> {
        let mut nodes: Vec<Found> = Vec::new();
        // An HCA is found once per port, since packets do not pass it.
        let mut index = BTreeMap::new();
        let mut open = VecDeque::from([(Vec::new(), None)]);
        while let Some((path, from)) = open.pop_front() {
            let Some(info) = self.get::<NodeInfo>(subnet, &path, 0) else { continue };
            let is_switch = info.node_type == NodeType::SWITCH;
            let key = (info.node_guid, if is_switch { 0 } else { info.local_port });
            let known = index.get(&key).copied();
            let this = known.unwrap_or(nodes.len());
            if known.is_none() {
                index.insert(key, this);
                nodes.push(Found { info, path: path.clone(), links: Vec::new(), lid: None });
                let ports = if is_switch { 1..=info.port_count } else { info.local_port..=info.local_port };
                for port in ports {
                    let found = self.get::<PortInfo>(subnet, &path, port.into());
                    let Some(info) = found.filter(|info| info.state > PortState::DOWN) else { continue };
                    nodes[this].links.push(FoundLink { port, info, peer: None });
                    let can_explore = is_switch && path.len() < MAX_HOPS.into() || path.is_empty();
                    if can_explore && Some((this, port)) != from {
                        open.push_back(([&path[..], &[port]].concat(), Some((this, port))));
                    }
                }
            }
            if let Some((other, port)) = from {
                connect(&mut nodes, (other, port), (this, info.local_port));
                connect(&mut nodes, (this, info.local_port), (other, port));
            }
        }
        nodes
    }

    /// Gives each switch and each port of an HCA a LID. A port keeps the one it had.
    fn assign_lids(&mut self, nodes: &mut [Found]) {
        let mut free = (1..=Lid::MAX_UNICAST.0).map(Lid);
        let used: alloc::collections::BTreeSet<Lid> = self.lids.values().copied().collect();
        for node in nodes {
            let known = self.lids.get(&node.info.port_guid).copied();
            node.lid = known.or_else(|| free.find(|lid| !used.contains(lid)));
            match node.lid {
                Some(lid) => drop(self.lids.insert(node.info.port_guid, lid)),
                None => self.report.without_lid += 1,
            }
        }
    }

    fn write_tables(&mut self, subnet: &mut Subnet, nodes: &[Found]) {
        let mut switch_index = vec![None; nodes.len()];
        let switches: Vec<usize> = (0..nodes.len()).filter(|node| nodes[*node].is_switch()).collect();
        switches.iter().enumerate().for_each(|(index, node)| switch_index[*node] = Some(index));
        let mut edges = vec![Vec::new(); switches.len()];
        let mut targets = Vec::new();
        for (node, lid) in nodes.iter().enumerate().filter_map(|(node, found)| Some((node, found.lid?))) {
            if let Some(switch) = switch_index[node] {
                targets.push(Target { lid: lid.0, switch, port: 0 });
                let to_switch =
                    |link: &FoundLink| Some(Edge { port: link.port, to: switch_index[link.peer?.0]? });
                edges[switch] = nodes[node].links.iter().filter_map(to_switch).collect();
            } else if let Some((peer, port)) = nodes[node].links.first().and_then(|link| link.peer)
                && let Some(switch) = switch_index[peer]
            {
                targets.push(Target { lid: lid.0, switch, port });
            }
        }
        let tables = route(self.engine, &edges, &targets, NO_PORT);
        let sm_lid = nodes.first().and_then(|own| own.lid).unwrap_or_default();
        self.tables.clear();
        for (node, table) in switches.into_iter().zip(tables) {
            let (path, lid) = (&nodes[node].path, nodes[node].lid.unwrap_or_default());
            if let Some(info) = self.get::<PortInfo>(subnet, path, 0) {
                self.set(subnet, path, 0, &PortInfo { lid, sm_lid, ..requested(&info) });
            }
            if let Some(info) = self.get::<SwitchInfo>(subnet, path, 0) {
                let linear_top = (table.len().saturating_sub(1)) as u16;
                self.set(subnet, path, 0, &SwitchInfo { linear_top, state_change: true, ..info });
            }
            for (block, ports) in table.chunks(Block::LEN).enumerate() {
                let mut data = Block([NO_PORT; Block::LEN]);
                data.0[..ports.len()].copy_from_slice(ports);
                let mut smp = self.next(Method::SET, AttributeId::LinearForwardingTable, block as u32);
                smp.data = data;
                self.request(subnet, path, smp);
            }
            self.tables.insert(node, table);
        }
    }

    /// Configures all linked ports, then takes them through Armed to Active.
    fn activate(&mut self, subnet: &mut Subnet, nodes: &[Found]) {
        let sm_lid = nodes.first().and_then(|own| own.lid).unwrap_or_default();
        for state in [PortState::ARMED, PortState::ACTIVE] {
            for node in nodes {
                for link in &node.links {
                    if link.info.state >= state || link.peer.is_none() {
                        continue;
                    }
                    let mut info = PortInfo { state, ..requested(&link.info) };
                    if !node.is_switch() {
                        let Some(lid) = node.lid else { continue };
                        (info.lid, info.sm_lid) = (lid, sm_lid);
                        info.client_reregister = state == PortState::ARMED;
                    }
                    self.set(subnet, &node.path, link.port.into(), &info);
                }
            }
        }
    }
}

impl Found {
    pub(crate) fn is_switch(&self) -> bool {
        self.info.node_type == NodeType::SWITCH
    }
}

/// A Set that leaves the link as it is.
fn requested(info: &PortInfo) -> PortInfo {
    use softhca_wire::smp::PhysicalState;
    PortInfo { state: PortState::NO_CHANGE, physical_state: PhysicalState::NO_CHANGE, ..*info }
}

fn connect(nodes: &mut [Found], (node, port): (usize, u8), peer: (usize, u8)) {
    if let Some(link) = nodes[node].links.iter_mut().find(|link| link.port == port) {
        link.peer = Some(peer);
    }
}
