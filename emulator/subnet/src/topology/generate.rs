//! Topologies by name: `fat-tree:4`.

use super::{MAX_NODES, MAX_PORTS, NodeKind, PortId, Topology, TopologyError, TopologyNode};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

/// The forms of generators, for messages.
pub const GENERATORS: &str = "one-switch:HOSTS, fat-tree:PORTS, dragonfly:ROUTERSxLINKSxHOSTS, torus:XxY[xZ][:HOSTS] or ring:SWITCHES[:HOSTS]";

/// GUIDs of generated nodes: readable in the tools.
const HCA_GUIDS: u64 = 0x5f1c_0000_0000_0000;
const SWITCH_GUIDS: u64 = 0x5f1c_5000_0000_0000;
/// The longest ring or side of a torus: the farthest switch is within reach of a directed route.
const MAX_SIDE: usize = 100;

/// Makes the topology that a text names; `None` if it names no generator.
pub(super) fn generate(text: &str) -> Option<Result<Topology, TopologyError>> {
    let (name, arguments) = text.split_once(':').unwrap_or((text, ""));
    let mut parts = arguments.split(':');
    let sides: Option<Vec<usize>> = match parts.next().unwrap_or_default() {
        "" => Some(Vec::new()),
        text => text.split('x').map(|number| number.parse().ok().filter(|number| *number > 0)).collect(),
    };
    let hosts = parts.next().map_or(Some(1), |text| text.parse().ok());
    let (Some(sides), Some(hosts), None) = (sides, hosts, parts.next()) else {
        let is_generator = matches!(name, "one-switch" | "fat-tree" | "dragonfly" | "torus" | "ring");
        return is_generator.then(|| Err(expected(text)));
    };
    let build = || {
        let mut builder = Builder::default();
        match (name, &sides[..]) {
            ("one-switch", [] | [_]) => builder.one_switch(sides.first().copied().unwrap_or(2)),
            ("fat-tree", [ports]) => builder.fat_tree(*ports),
            ("dragonfly", [routers, links, hosts]) => builder.dragonfly(*routers, *links, *hosts),
            ("ring", [switches]) if *switches >= 3 => builder.torus(&[*switches], hosts),
            ("torus", [_, _] | [_, _, _]) if sides.iter().all(|side| *side >= 2) => {
                builder.torus(&sides, hosts)
            }
            _ => return Err(expected(text)),
        }?;
        Ok(builder.topology)
    };
    matches!(name, "one-switch" | "fat-tree" | "dragonfly" | "torus" | "ring").then(build)
}

fn expected(text: &str) -> TopologyError {
    TopologyError::Generator(format!("{text:?} is not a topology: expected {GENERATORS}"))
}

#[derive(Default)]
struct Builder {
    topology: Topology,
    hosts: usize,
    switches: usize,
    /// The first free port of each node.
    free: Vec<u8>,
}

impl Builder {
    /// Rejects a topology with too many nodes or ports before it is built.
    fn check(&self, hosts: usize, switches: usize, ports: usize) -> Result<(), TopologyError> {
        if hosts.saturating_add(switches) > MAX_NODES {
            let text = format!(
                "the topology has {hosts} hosts and {switches} switches: more than {MAX_NODES} nodes"
            );
            return Err(TopologyError::Generator(text));
        }
        if ports > MAX_PORTS.into() {
            let text = format!("a switch would have {ports} ports: more than {MAX_PORTS}");
            return Err(TopologyError::Generator(text));
        }
        Ok(())
    }

    fn add(&mut self, kind: NodeKind, name: String, guid: u64, ports: usize) -> usize {
        self.topology.nodes.push(TopologyNode::new(kind, name, guid, ports as u8));
        self.free.push(1);
        self.topology.nodes.len() - 1
    }

    fn switch(&mut self, ports: usize) -> usize {
        self.switches += 1;
        let guid = SWITCH_GUIDS + self.switches as u64 * 0x100;
        self.add(NodeKind::Switch, format!("switch{}", self.switches), guid, ports)
    }

    fn host(&mut self, switch: usize) {
        self.hosts += 1;
        let guid = HCA_GUIDS + self.hosts as u64 * 0x100;
        let host = self.add(NodeKind::Hca, format!("node{}", self.hosts), guid, 1);
        self.link(host, switch);
    }

    /// Links the first free ports of two nodes.
    fn link(&mut self, one: usize, other: usize) {
        let mut take = |node: usize| {
            self.free[node] += 1;
            PortId { node, port: self.free[node] - 1 }
        };
        let (one, other) = (take(one), take(other));
        self.topology.connect(one, other);
    }

    fn one_switch(&mut self, hosts: usize) -> Result<(), TopologyError> {
        self.check(hosts, 1, hosts)?;
        let switch = self.switch(hosts.max(8));
        (0..hosts).for_each(|_| self.host(switch));
        Ok(())
    }

    /// Three levels of switches with this many ports: pods of edge and aggregation switches, and a core.
    fn fat_tree(&mut self, ports: usize) -> Result<(), TopologyError> {
        let half = ports / 2;
        if half == 0 || ports % 2 == 1 {
            return Err(TopologyError::Generator("fat-tree: the number of ports must be even".into()));
        }
        self.check(ports, 0, ports)?;
        self.check(ports * half * half, 5 * half * half, ports)?;
        let core: Vec<usize> = (0..half * half).map(|_| self.switch(ports)).collect();
        for _ in 0..ports {
            let aggregation: Vec<usize> = (0..half).map(|_| self.switch(ports)).collect();
            for (index, switch) in aggregation.iter().enumerate() {
                core[index * half..][..half].iter().for_each(|core| self.link(*switch, *core));
            }
            for _ in 0..half {
                let edge = self.switch(ports);
                (0..half).for_each(|_| self.host(edge));
                aggregation.iter().for_each(|switch| self.link(edge, *switch));
            }
        }
        Ok(())
    }

    /// Groups of routers that are linked to each other; `links` of each router lead to other groups.
    fn dragonfly(&mut self, routers: usize, links: usize, hosts: usize) -> Result<(), TopologyError> {
        let groups = routers.saturating_mul(links).saturating_add(1);
        let ports = links.saturating_add(hosts).saturating_add(routers - 1);
        let all = groups.saturating_mul(routers);
        self.check(all.saturating_mul(hosts), all, ports)?;
        let switches: Vec<usize> = (0..all).map(|_| self.switch(ports)).collect();
        for group in switches.chunks(routers) {
            for (index, switch) in group.iter().enumerate() {
                (0..hosts).for_each(|_| self.host(*switch));
                group[..index].iter().for_each(|other| self.link(*switch, *other));
            }
        }
        for group in 0..groups {
            // Link `l` of a group leads to the l-th of the other groups, counted from itself.
            for link in (0..groups - 1).filter(|link| group + link + 1 < groups) {
                let other = group + link + 1;
                let back = groups - 2 - link;
                self.link(switches[group * routers + link / links], switches[other * routers + back / links]);
            }
        }
        Ok(())
    }

    /// A torus; with one dimension, a ring.
    fn torus(&mut self, sides: &[usize], hosts: usize) -> Result<(), TopologyError> {
        if sides.iter().any(|side| *side > MAX_SIDE) {
            let text =
                format!("a side has more than {MAX_SIDE} switches: a directed route has at most 63 hops");
            return Err(TopologyError::Generator(text));
        }
        let count: usize = sides.iter().product();
        let ports = hosts.saturating_add(2 * sides.len());
        self.check(count.saturating_mul(hosts), count, ports)?;
        let switches: Vec<usize> = (0..count).map(|_| self.switch(ports)).collect();
        for switch in &switches {
            (0..hosts).for_each(|_| self.host(*switch));
        }
        let mut stride = 1;
        for (dimension, side) in sides.iter().enumerate() {
            // Equal port numbers at all switches: dimension-order routing of OpenSM needs that.
            let forward = (hosts + 2 * dimension + 1) as u8;
            for index in 0..count {
                let place = index / stride % side;
                let next = index - place * stride + (place + 1) % side * stride;
                // Two switches have one link, not two.
                if place + 1 < *side || *side > 2 {
                    let from = PortId { node: switches[index], port: forward };
                    self.topology.connect(from, PortId { node: switches[next], port: forward + 1 });
                }
            }
            stride *= side;
        }
        Ok(())
    }
}
