//! What the ports of the network between the hosts of a daemon counted.

use softhca_fabric::{CableId, Fabric, HostId, HostPortCounters, Node};
use softhca_queue::control::FabricPort;
use softhca_udp::Backbone;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Who is at the ends of cables.
struct Names<'a> {
    hosts: &'a [&'a str],
    /// Other machines, by their cable: the address, and the host that they send to.
    outside: BTreeMap<CableId, (IpAddr, HostId)>,
}

impl Names<'_> {
    fn of(&self, fabric: &Fabric, cable: CableId, node: Node) -> String {
        match node {
            Node::Switch(switch) => fabric.switch(switch).name().into(),
            Node::Host(HostId(index)) => match (self.hosts.get(index as usize), self.outside.get(&cable)) {
                (Some(name), _) => (*name).into(),
                (None, Some((address, _))) => address.to_string(),
                (None, None) => format!("port {index}"),
            },
        }
    }

    fn host(&self, cable: CableId) -> Option<String> {
        let (_, HostId(index)) = self.outside.get(&cable)?;
        self.hosts.get(*index as usize).map(|name| (*name).into())
    }
}

/// The counters of every port: of switches first, then of hosts, then of other machines.
pub(crate) fn count(backbone: &Backbone, hosts: &[&str]) -> Vec<FabricPort> {
    backbone.ask(|fabric| {
        let outside = fabric.outside().map(|(host, address, cable, _)| (cable, (address, host))).collect();
        let names = Names { hosts, outside };
        let port = |cable: CableId, at: Node, counts| {
            let to = fabric.ends(cable).into_iter().find(|end| *end != at).unwrap_or(at);
            let [at, to] = [at, to].map(|node| names.of(fabric, cable, node));
            FabricPort { at, to, host: names.host(cable), counts }
        };
        let mut ports = Vec::new();
        for id in &backbone.laid().switches {
            let switch = fabric.switch(*id);
            for (cable, _) in switch.cables() {
                let counters = switch.counters(cable).unwrap_or_default();
                let counts = counters.iter().map(|(name, values)| (name.to_owned(), values.to_vec()));
                ports.push(port(cable, Node::Switch(*id), counts.collect()));
            }
        }
        for cable in &backbone.laid().cables {
            for host in fabric.ends(*cable).into_iter().filter_map(Node::host) {
                ports.push(port(*cable, host.into(), counts_of(&fabric.port_counters(host))));
            }
        }
        for (_, _, cable, counters) in fabric.outside() {
            let [at, _] = fabric.ends(cable);
            ports.push(port(cable, at, counts_of(&counters)));
        }
        ports
    })
}

/// What the port of a host counts, under the names that ports of switches have for it.
fn counts_of(counters: &HostPortCounters) -> Vec<(String, Vec<u64>)> {
    let HostPortCounters { pauses_sent, pauses_received, paused_ns, lost_frames, watchdog_fired } = counters;
    let counts: [(&str, &[u64]); 5] = [
        ("lost_frames", &[*lost_frames]),
        ("pauses_sent", pauses_sent),
        ("pauses_received", pauses_received),
        ("paused_ns", paused_ns),
        ("watchdog_fired", &[*watchdog_fired]),
    ];
    counts.map(|(name, values)| (name.to_owned(), values.to_vec())).into()
}
