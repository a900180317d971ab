//! What the ports of the network between the hosts of a daemon counted.

use softhca_fabric::{Fabric, HostId, HostPortCounters, LinkId, Node};
use softhca_queue::control::FabricPort;
use softhca_udp::HostNetwork;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Who is at the ends of cables.
struct NodeNames<'a> {
    hosts: &'a [&'a str],
    /// Other machines, by their cable: the address, and the host that they send to.
    external: BTreeMap<LinkId, (IpAddr, HostId)>,
}

impl NodeNames<'_> {
    fn node(&self, fabric: &Fabric, cable: LinkId, node: Node) -> String {
        match node {
            Node::Switch(switch) => fabric.switch(switch).name().into(),
            Node::Host(HostId(index)) => match (self.hosts.get(index as usize), self.external.get(&cable)) {
                (Some(name), _) => (*name).into(),
                (None, Some((address, _))) => address.to_string(),
                (None, None) => format!("port {index}"),
            },
        }
    }

    fn attached_host(&self, cable: LinkId) -> Option<String> {
        let (_, HostId(index)) = self.external.get(&cable)?;
        self.hosts.get(*index as usize).map(|name| (*name).into())
    }
}

/// The counters of every port: of switches first, then of hosts, then of other machines.
pub(crate) fn collect(backbone: &HostNetwork, hosts: &[&str]) -> Vec<FabricPort> {
    backbone.with_fabric(|fabric| {
        let outside =
            fabric.external_ports().map(|(host, address, cable, _)| (cable, (address, host))).collect();
        let names = NodeNames { hosts, external: outside };
        let port = |cable: LinkId, at: Node, counts| {
            let to = fabric.link_ends(cable).into_iter().find(|end| *end != at).unwrap_or(at);
            let [at, to] = [at, to].map(|node| names.node(fabric, cable, node));
            FabricPort { node: at, peer: to, host: names.attached_host(cable), counters: counts }
        };
        let mut ports = Vec::new();
        for id in &backbone.topology().switches {
            let switch = fabric.switch(*id);
            for (cable, _) in switch.links() {
                let counters = switch.counters(cable).unwrap_or_default();
                let counts = counters.iter().map(|(name, values)| (name.to_owned(), values.to_vec()));
                ports.push(port(cable, Node::Switch(*id), counts.collect()));
            }
        }
        for cable in &backbone.topology().links {
            for host in fabric.link_ends(*cable).into_iter().filter_map(Node::host) {
                ports.push(port(*cable, host.into(), host_counters(&fabric.port_counters(host))));
            }
        }
        for (_, _, cable, counters) in fabric.external_ports() {
            let [at, _] = fabric.link_ends(cable);
            ports.push(port(cable, at, host_counters(&counters)));
        }
        ports
    })
}

/// What the port of a host counts, under the names that ports of switches have for it.
fn host_counters(counters: &HostPortCounters) -> Vec<(String, Vec<u64>)> {
    let HostPortCounters {
        pauses_sent,
        pauses_received,
        paused_ns,
        dropped_frames: lost_frames,
        watchdog_fired,
    } = counters;
    let counts: [(&str, &[u64]); 5] = [
        ("lost_frames", &[*lost_frames]),
        ("pauses_sent", pauses_sent),
        ("pauses_received", pauses_received),
        ("paused_ns", paused_ns),
        ("watchdog_fired", &[*watchdog_fired]),
    ];
    counts.map(|(name, values)| (name.to_owned(), values.to_vec())).into()
}
