//! Shapes of networks: which switches there are, and what is connected to what.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

/// A shape that has a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    /// Two hosts and a cable.
    Pair,
    /// One switch, and every host on it.
    Star {
        /// How many hosts.
        hosts: u32,
    },
    /// Two switches with one cable between them, and hosts on both.
    Dumbbell {
        /// Hosts on the first switch.
        left: u32,
        /// Hosts on the second.
        right: u32,
    },
    /// Leaves with hosts, each connected to every spine.
    LeafSpine {
        /// How many leaves.
        leaves: u32,
        /// How many spines.
        spines: u32,
        /// Hosts on each leaf.
        hosts_per_leaf: u32,
    },
    /// Three tiers of switches with `k` ports each, k³/4 hosts.
    FatTree {
        /// Ports of each switch; even.
        k: u32,
    },
    /// Switches in a circle, with hosts on each; frames go one way round, from each switch to the next.
    Ring {
        /// How many switches.
        switches: u32,
        /// Hosts on each.
        hosts_per_switch: u32,
    },
}

/// One end of a cable in a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LayoutNode {
    /// The host with this index.
    Host(u32),
    /// The switch with this index.
    Switch(u32),
}

/// What is connected to what.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Layout {
    /// How many hosts.
    pub hosts: u32,
    /// The names of the switches.
    pub switches: Vec<String>,
    /// The cables: of hosts first, then those between switches.
    pub links: Vec<[LayoutNode; 2]>,
    /// Routes that are not the shortest: at a switch, to a host, over a cable of `cables`.
    pub routes: Vec<(u32, u32, usize)>,
}

/// Why a topology cannot be built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopologyError {
    /// A count is zero.
    Empty,
    /// The ports of a fat tree's switches are an odd number, or none.
    OddPorts {
        /// How many.
        k: u32,
    },
    /// Another number of hosts than it has.
    WrongHostCount {
        /// How many there are.
        hosts: usize,
        /// How many it has.
        expected: u32,
    },
    /// More than 65,535 hosts.
    TooLarge {
        /// How many.
        hosts: u64,
    },
}

impl core::fmt::Display for TopologyError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            TopologyError::Empty => {
                f.write_str("a topology needs at least one of everything that it is made of")
            }
            TopologyError::OddPorts { k } => {
                write!(f, "a fat tree of {k} ports: half of them lead up, so the number must be even")
            }
            TopologyError::WrongHostCount { hosts, expected: wanted } => {
                write!(f, "{hosts} hosts for a topology of {wanted}")
            }
            TopologyError::TooLarge { hosts } => write!(f, "{hosts} hosts, at most 65535 fit"),
        }
    }
}

impl core::error::Error for TopologyError {}

impl Topology {
    /// How many hosts it has.
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

    /// What is connected to what.
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

    /// Pods of k/2 edge and k/2 aggregation switches, and (k/2)² core switches: each aggregation switch of
    /// a pod leads to k/2 of them.
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
    fn a_fat_tree_has_as_many_of_everything_as_its_inventors_say() {
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
    fn what_cannot_be_built_is_refused() {
        assert_eq!(Topology::FatTree { k: 7 }.layout(), Err(TopologyError::OddPorts { k: 7 }));
        assert_eq!(Topology::Star { hosts: 0 }.layout(), Err(TopologyError::Empty));
        assert_eq!(Topology::Dumbbell { left: 3, right: 0 }.layout(), Err(TopologyError::Empty));
        for k in [100, u32::MAX - 1] {
            assert!(matches!(Topology::FatTree { k }.layout(), Err(TopologyError::TooLarge { .. })));
        }
    }
}
