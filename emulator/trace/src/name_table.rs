//! The names of hosts, queue pairs and rules.

use softhca_fabric::{
    BuiltTopology, Direction, Endpoint, EventSink, Fabric, Flow, FlowId, HostId, IdOffsets, LinkId, Node,
    RuleId, SwitchId, World,
};
use softhca_wire::{Psn, Qpn};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// The names of a run. An object without a name is shown by its number or address.
#[cfg_attr(feature = "stream", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, Default)]
pub struct NameTable {
    hosts: BTreeMap<HostId, (String, IpAddr)>,
    hosts_by_address: BTreeMap<IpAddr, HostId>,
    /// Ports of machines that are no hosts of this run.
    ports: BTreeMap<HostId, String>,
    switches: BTreeMap<SwitchId, String>,
    links: BTreeMap<LinkId, [Node; 2]>,
    queue_pairs: BTreeMap<Endpoint, String>,
    peers: BTreeMap<Endpoint, Endpoint>,
    first_psns: BTreeMap<Endpoint, Psn>,
    roles: BTreeMap<FlowId, Endpoint>,
    rules: BTreeMap<RuleId, String>,
}

impl NameTable {
    /// A table without names.
    pub fn new() -> NameTable {
        NameTable::default()
    }

    /// The hosts, switches, links and known queue pairs of a world as it is now. The queue pairs of a host are
    /// called by its name and a number, in the order of their roles: `alice.1`.
    pub fn from_world<S: EventSink>(world: &World<S>) -> NameTable {
        let mut names = NameTable::new();
        for (id, host) in world.hosts() {
            names.add_host(id, host.name(), host.address());
        }
        for (id, switch) in world.switches() {
            names.add_switch(id, switch.name());
        }
        for index in 0.. {
            let Some(ends) = world.try_link_ends(LinkId(index)) else { break };
            names.links.insert(LinkId(index), ends);
        }
        let mut counts = BTreeMap::new();
        for flow in world.flows().iter() {
            let at = flow.requester;
            let count = counts.entry(at.address).and_modify(|count| *count += 1).or_insert(1);
            let name = format!("{}.{count}", names.host_name_at(at.address));
            names.add_queue_pair(at, &name);
            names.add_flow(flow);
        }
        names
    }

    /// Names the switches and links of a network in real time, whose hosts have names already.
    pub fn add_fabric(&mut self, fabric: &Fabric, topology: &BuiltTopology, offsets: IdOffsets) {
        for id in &topology.switches {
            if let Node::Switch(switch) = offsets.node(Node::Switch(*id)) {
                self.add_switch(switch, fabric.switch(*id).name());
            }
        }
        for id in &topology.links {
            self.add_link(offsets.link(*id), fabric.link_ends(*id).map(|end| offsets.node(end)));
        }
    }

    /// Names the port of another machine and its link in a network in real time.
    pub fn add_external_port(
        &mut self,
        (port, address): (HostId, IpAddr),
        (link, ends): (LinkId, [Node; 2]),
        offsets: IdOffsets,
    ) {
        self.ports.insert(offsets.host(port), address.to_string());
        self.add_link(offsets.link(link), ends.map(|end| offsets.node(end)));
    }

    /// Names a host in real time and its own link, whose ends are both the host.
    pub fn add_card(&mut self, id: HostId, name: &str, address: IpAddr) {
        self.add_host(id, name, address);
        self.add_link(LinkId(id.0), [id, id]);
    }

    /// Names a host.
    pub fn add_host(&mut self, id: HostId, name: &str, address: IpAddr) {
        self.hosts.insert(id, (name.to_owned(), address));
        self.hosts_by_address.insert(address, id);
    }

    /// Says which hosts or switches a link joins; its forward direction leads from the first to the second.
    pub fn add_link(&mut self, id: LinkId, ends: [impl Into<Node>; 2]) {
        self.links.insert(id, ends.map(Into::into));
    }

    /// Names a switch.
    pub fn add_switch(&mut self, id: SwitchId, name: &str) {
        self.switches.insert(id, name.to_owned());
    }

    /// Names a queue pair.
    pub fn add_queue_pair(&mut self, endpoint: Endpoint, name: &str) {
        self.queue_pairs.insert(endpoint, name.to_owned());
    }

    /// Says which queue pair is at the other end of a connection, both ways.
    pub fn connect(&mut self, first: Endpoint, second: Endpoint) {
        self.peers.insert(first, second);
        self.peers.insert(second, first);
    }

    /// Registers the flow of a named queue pair.
    pub fn add_flow(&mut self, flow: &Flow) {
        self.first_psns.insert(flow.requester, flow.first_psn);
        self.roles.insert(flow.id, flow.requester);
        if let Some(responder) = flow.responder {
            self.connect(flow.requester, responder);
        }
    }

    /// Says where a queue pair's PSNs start.
    pub fn set_first_psn(&mut self, endpoint: Endpoint, first: Psn) {
        self.first_psns.insert(endpoint, first);
    }

    /// Names a fault rule.
    pub fn add_rule(&mut self, id: RuleId, name: &str) {
        self.rules.insert(id, name.to_owned());
    }

    /// Every host with its address, in the order of their ids.
    pub fn hosts(&self) -> impl Iterator<Item = (&str, IpAddr)> {
        self.hosts.values().map(|(name, address)| (name.as_str(), *address))
    }

    /// The name of a host.
    pub fn host_name(&self, id: HostId) -> String {
        let host = self.hosts.get(&id).map(|(name, _)| name);
        host.or_else(|| self.ports.get(&id)).map_or_else(|| format!("host{}", id.0), String::clone)
    }

    /// The name of the host with this address.
    pub fn host_name_at(&self, address: IpAddr) -> String {
        self.hosts_by_address.get(&address).map_or_else(|| address.to_string(), |id| self.host_name(*id))
    }

    /// The name of a rule.
    pub fn rule_name(&self, id: RuleId) -> String {
        self.rules.get(&id).map_or_else(|| format!("rule {}", id.0), |name| format!("{name:?}"))
    }

    /// The address of a host, if it has a name.
    pub fn address(&self, id: HostId) -> Option<IpAddr> {
        self.hosts.get(&id).map(|(_, address)| *address)
    }

    /// The address of the host that a direction of a link starts at; none if it starts at a switch.
    pub fn sender_address(&self, link: LinkId, direction: Direction) -> Option<IpAddr> {
        let [from, _] = self.link_ends(link, direction)?;
        self.address(from.host()?)
    }

    /// The start and the end of a direction of a link.
    pub fn link_ends(&self, link: LinkId, direction: Direction) -> Option<[Node; 2]> {
        let [first, second] = *self.links.get(&link)?;
        Some(if direction == Direction::Forward { [first, second] } else { [second, first] })
    }

    /// The name of a host or switch.
    pub fn node_name(&self, node_name: Node) -> String {
        match node_name {
            Node::Host(host) => self.host_name(host),
            Node::Switch(id) => {
                self.switches.get(&id).map_or_else(|| format!("switch{}", id.0), String::clone)
            }
        }
    }

    /// The name of a queue pair with its host's address: `alice.1 (10.0.0.1)`.
    pub(crate) fn queue_pair_heading(&self, address: IpAddr, qpn: Option<Qpn>) -> String {
        let known = self.hosts_by_address.contains_key(&address);
        let name = qpn.and_then(|qpn| self.queue_pairs.get(&Endpoint { address, qpn }));
        match (name, qpn) {
            (Some(name), _) => format!("{name} ({address})"),
            (None, Some(qpn)) if known => format!("{} qp {qpn} ({address})", self.host_name_at(address)),
            (None, Some(qpn)) => format!("{address} qp {qpn}"),
            (None, None) if known => format!("{} ({address})", self.host_name_at(address)),
            (None, None) => address.to_string(),
        }
    }

    /// The name of a queue pair, if it has one.
    pub fn queue_pair_name(&self, endpoint: Endpoint) -> Option<&str> {
        self.queue_pairs.get(&endpoint).map(String::as_str)
    }

    pub(crate) fn role_endpoint(&self, role_endpoint: FlowId) -> Option<Endpoint> {
        self.roles.get(&role_endpoint).copied()
    }

    pub(crate) fn peer(&self, of: Endpoint) -> Option<Endpoint> {
        self.peers.get(&of).copied()
    }

    pub(crate) fn first_psn(&self, of: Endpoint) -> Option<Psn> {
        self.first_psns.get(&of).copied()
    }
}
