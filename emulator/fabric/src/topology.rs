//! Topologies: switches and their connections.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use thiserror::Error;

/// A named topology.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    /// Two hosts and a link.
    Pair,
    /// One switch with all hosts.
    Star { hosts: u32 },
    /// Two switches joined by one link, with hosts on both.
    Dumbbell { left: u32, right: u32 },
    /// Leaf switches with hosts, each connected to every spine switch.
    LeafSpine { leaves: u32, spines: u32, hosts_per_leaf: u32 },
    /// Three tiers of switches with `k` ports each, k³/4 hosts; k is even.
    FatTree { k: u32 },
    /// A ring of switches with hosts on each; frames travel in one direction.
    Ring { switches: u32, hosts_per_switch: u32 },
}

/// The end of a link in a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LayoutNode {
    /// The host with this index.
    Host(u32),
    /// The switch with this index.
    Switch(u32),
}

/// Hosts, switches, links and static routes.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Layout {
    /// The number of hosts.
    pub hosts: u32,
    /// The names of the switches.
    pub switches: Vec<String>,
    /// The links: host links first, then links between switches.
    pub links: Vec<[LayoutNode; 2]>,
    /// Static routes: at a switch, to a host, over the link with this index.
    pub routes: Vec<(u32, u32, usize)>,
}

/// Why a topology is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum TopologyError {
    #[error("every count of a topology must be at least 1")]
    Empty,
    #[error("the port count of a fat tree must be even and not zero, got {k}")]
    OddPorts { k: u32 },
    #[error("the topology has {expected} hosts, got {hosts}")]
    WrongHostCount { hosts: usize, expected: u32 },
    #[error("a topology has at most 65535 hosts, got {hosts}")]
    TooLarge { hosts: u64 },
}

impl Topology {
    /// The number of hosts.
    pub fn hosts(&self) -> u64 {
        match *self {
            Topology::Pair => 2,
            Topology::Star { hosts } => hosts.into(),
            Topology::Dumbbell { left, right } => u64::from(left) + u64::from(right),
            Topology::LeafSpine { leaves, hosts_per_leaf, .. } => {
                u64::from(leaves) * u64::from(hosts_per_leaf)
            }
            Topology::FatTree { k } => u64::from(k).saturating_pow(3) / 4,
            Topology::Ring { switches, hosts_per_switch } => {
                u64::from(switches) * u64::from(hosts_per_switch)
            }
        }
    }

    /// Hosts, switches, links and static routes.
    pub fn layout(&self) -> Result<Layout, TopologyError> {
        let hosts = self.hosts();
        let spines = match *self {
            Topology::LeafSpine { spines, .. } => spines,
            _ => 1,
        };
        if let Topology::FatTree { k } = *self
            && (k == 0 || k % 2 == 1)
        {
            return Err(TopologyError::OddPorts { k });
        }
        if hosts == 0
            || spines == 0
            || matches!(*self, Topology::Dumbbell { left: 0, .. } | Topology::Dumbbell { right: 0, .. })
        {
            return Err(TopologyError::Empty);
        }
        if hosts > u64::from(u16::MAX) {
            return Err(TopologyError::TooLarge { hosts });
        }
        let mut layout = Layout { hosts: hosts as u32, ..Layout::default() };
        match *self {
            Topology::Pair => layout.links.push([LayoutNode::Host(0), LayoutNode::Host(1)]),
            Topology::Star { hosts } => {
                layout.switches.push("s1".into());
                layout.attach_hosts(0, 0..hosts);
            }
            Topology::Dumbbell { left, right } => {
                layout.switches.extend(["left".into(), "right".into()]);
                layout.attach_hosts(0, 0..left);
                layout.attach_hosts(1, left..left + right);
                layout.connect_switches(0, 1);
            }
            Topology::LeafSpine { leaves, spines, hosts_per_leaf } => {
                layout.add_switches("leaf", leaves);
                layout.add_switches("spine", spines);
                for leaf in 0..leaves {
                    layout.attach_hosts(leaf, leaf * hosts_per_leaf..(leaf + 1) * hosts_per_leaf);
                }
                for leaf in 0..leaves {
                    (0..spines).for_each(|spine| layout.connect_switches(leaf, leaves + spine));
                }
            }
            Topology::FatTree { k } => layout.fat_tree(k),
            Topology::Ring { switches, hosts_per_switch } => layout.ring(switches, hosts_per_switch),
        }
        Ok(layout)
    }
}

impl Layout {
    fn add_switches(&mut self, kind: &str, count: u32) {
        self.switches.extend((1..=count).map(|number| format!("{kind}{number}")));
    }

    fn attach_hosts(&mut self, switch: u32, hosts: core::ops::Range<u32>) {
        self.links.extend(hosts.map(|host| [LayoutNode::Host(host), LayoutNode::Switch(switch)]));
    }

    fn connect_switches(&mut self, first: u32, second: u32) {
        self.links.push([LayoutNode::Switch(first), LayoutNode::Switch(second)]);
    }

    /// Pods of k/2 edge and k/2 aggregation switches, and (k/2)² core switches; each aggregation switch
    /// connects to k/2 of them.
    fn fat_tree(&mut self, k: u32) {
        let half = k / 2;
        for pod in 1..=k {
            self.switches.extend((1..=half).map(|number| format!("edge{pod}.{number}")));
            self.switches.extend((1..=half).map(|number| format!("agg{pod}.{number}")));
        }
        self.add_switches("core", half * half);
        let edge = |pod: u32, number: u32| pod * k + number;
        let aggregation = |pod: u32, number: u32| pod * k + half + number;
        for pod in 0..k {
            for number in 0..half {
                let first = (pod * half + number) * half;
                self.attach_hosts(edge(pod, number), first..first + half);
            }
        }
        for pod in 0..k {
            for lower in 0..half {
                (0..half).for_each(|upper| self.connect_switches(edge(pod, lower), aggregation(pod, upper)));
            }
            for lower in 0..half {
                (0..half).for_each(|upper| {
                    self.connect_switches(aggregation(pod, lower), k * k + lower * half + upper)
                });
            }
        }
    }

    fn ring(&mut self, switches: u32, hosts_per_switch: u32) {
        self.add_switches("s", switches);
        for switch in 0..switches {
            self.attach_hosts(switch, switch * hosts_per_switch..(switch + 1) * hosts_per_switch);
        }
        let first = self.links.len();
        if switches == 1 {
            return;
        }
        (0..switches).for_each(|switch| self.connect_switches(switch, (switch + 1) % switches));
        for switch in 0..switches {
            let others = (0..self.hosts).filter(|host| host / hosts_per_switch != switch);
            self.routes.extend(others.map(|host| (switch, host, first + switch as usize)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fat_tree_has_the_published_counts() {
        let layout = Topology::FatTree { k: 8 }.layout().unwrap();
        assert_eq!((layout.hosts, layout.switches.len()), (128, 80));
        assert_eq!(layout.links.len(), 3 * 128);
        let mut ports = alloc::vec![0; 80];
        for end in layout.links.iter().flatten() {
            if let LayoutNode::Switch(switch) = end {
                ports[*switch as usize] += 1;
            }
        }
        assert!(ports.iter().all(|count| *count == 8));
    }

    #[test]
    fn every_leaf_reaches_every_spine() {
        let layout = Topology::LeafSpine { leaves: 3, spines: 2, hosts_per_leaf: 4 }.layout().unwrap();
        assert_eq!((layout.hosts, layout.switches.len(), layout.links.len()), (12, 5, 12 + 6));
    }

    #[test]
    fn invalid_topologies_are_rejected() {
        assert_eq!(Topology::FatTree { k: 7 }.layout(), Err(TopologyError::OddPorts { k: 7 }));
        assert_eq!(Topology::Star { hosts: 0 }.layout(), Err(TopologyError::Empty));
        assert_eq!(Topology::Dumbbell { left: 3, right: 0 }.layout(), Err(TopologyError::Empty));
        for k in [100, u32::MAX - 1] {
            assert!(matches!(Topology::FatTree { k }.layout(), Err(TopologyError::TooLarge { .. })));
        }
    }
}
