//! The counters of the network between the hosts of a daemon.

use softhca_control::FabricPort;
use softhca_fabric::{Fabric, HostId, HostPortCounters, LinkId, Node};
use softhca_udp::HostNetwork;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// The names of the nodes at the ends of links.
struct NodeNames<'a> {
    hosts: &'a [&'a str],
    /// External machines by their link: the address, and the host that they are attached to.
    external: BTreeMap<LinkId, (IpAddr, HostId)>,
}

impl NodeNames<'_> {
    fn node(&self, fabric: &Fabric, link: LinkId, node: Node) -> String {
        match node {
            Node::Switch(switch) => fabric.switch(switch).name().into(),
            Node::Host(HostId(index)) => match (self.hosts.get(index as usize), self.external.get(&link)) {
                (Some(name), _) => (*name).into(),
                (None, Some((address, _))) => address.to_string(),
                (None, None) => format!("port {index}"),
            },
        }
    }

    fn attached_host(&self, link: LinkId) -> Option<String> {
        let (_, HostId(index)) = self.external.get(&link)?;
        self.hosts.get(*index as usize).map(|name| (*name).into())
    }
}

/// The counters of every port: of switches, then of hosts, then of external machines.
pub(crate) fn collect(network: &HostNetwork, hosts: &[&str]) -> Vec<FabricPort> {
    network.with_fabric(|fabric| {
        let external =
            fabric.external_ports().map(|(host, address, link, _)| (link, (address, host))).collect();
        let names = NodeNames { hosts, external };
        let port = |link: LinkId, node: Node, counters| {
            let peer = fabric.link_ends(link).into_iter().find(|end| *end != node).unwrap_or(node);
            let [node, peer] = [node, peer].map(|node| names.node(fabric, link, node));
            FabricPort { node, peer, host: names.attached_host(link), counters }
        };
        let mut ports = Vec::new();
        for id in &network.topology().switches {
            let switch = fabric.switch(*id);
            for (link, _) in switch.links() {
                let counters = switch.counters(link).unwrap_or_default();
                let counts = counters.iter().map(|(name, values)| (name.to_owned(), values.to_vec()));
                ports.push(port(link, Node::Switch(*id), counts.collect()));
            }
        }
        for link in &network.topology().links {
            for host in fabric.link_ends(*link).into_iter().filter_map(Node::host) {
                ports.push(port(*link, host.into(), host_counters(&fabric.port_counters(host))));
            }
        }
        for (_, _, link, counters) in fabric.external_ports() {
            let [at, _] = fabric.link_ends(link);
            ports.push(port(link, at, host_counters(&counters)));
        }
        ports
    })
}

/// The counters of a host port, with the names of the switch port counters.
fn host_counters(counters: &HostPortCounters) -> Vec<(String, Vec<u64>)> {
    let HostPortCounters { pauses_sent, pauses_received, paused_ns, dropped_frames, watchdog_fired } =
        counters;
    let counts: [(&str, &[u64]); 5] = [
        ("dropped_frames", &[*dropped_frames]),
        ("pauses_sent", pauses_sent),
        ("pauses_received", pauses_received),
        ("paused_ns", paused_ns),
        ("watchdog_fired", &[*watchdog_fired]),
    ];
    counts.map(|(name, values)| (name.to_owned(), values.to_vec())).into()
}
