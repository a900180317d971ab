//! The links and switches of a topology.

use super::network::{Network, link_line};
use super::{LinkPlan, Node, RoutePlan, limits};
use crate::quantity::{Rate, Time};
use crate::source::{Result, Source};
use crate::spec::Topology;

impl Network {
    pub fn build_topology(&mut self, topology: &Topology, source: &Source) -> Result<()> {
        let hosts: Vec<Node> = (0..self.hosts.len()).map(Node::Host).collect();
        let line = |rate: &Option<Rate>, delay: &Time| link_line(*rate, *delay, None, source, "topology");
        match topology {
            Topology::Pair { delay, rate } => {
                let [first, second] = hosts[..] else {
                    let message = format!("topology `pair` needs two hosts, the file has {}", hosts.len());
                    return Err(source.error_at("topology", message));
                };
                let line = line(rate, delay)?;
                self.links.push(LinkPlan { ends: [first, second], line });
            }
            Topology::Star { switch, delay, rate } => {
                let (switch, line) = (self.switch(switch, source)?, line(rate, delay)?);
                self.links.extend(hosts.into_iter().map(|host| LinkPlan { ends: [host, switch], line }));
            }
            Topology::Dumbbell { left, right, delay, rate, bottleneck } => {
                let (line, middle) = (line(rate, delay)?, line(&bottleneck.or(*rate), delay)?);
                let switches = [self.switch("left", source)?, self.switch("right", source)?];
                for (names, side, switch) in [(left, "left", switches[0]), (right, "right", switches[1])] {
                    for (index, name) in names.iter().enumerate() {
                        let path = format!("topology.dumbbell.{side}.{index}");
                        for host in self.hosts_matching(name, source, &path)? {
                            self.links.push(LinkPlan { ends: [Node::Host(host), switch], line });
                        }
                    }
                }
                self.links.push(LinkPlan { ends: switches, line: middle });
            }
            Topology::LeafSpine { leaves, spines, delay, rate, uplink } => {
                let (line, up) = (line(rate, delay)?, line(&uplink.or(*rate), delay)?);
                check_link_count(u64::from(*leaves) * u64::from(*spines) + hosts.len() as u64, source)?;
                let leaves = self.add_switches("leaf", *leaves, source)?;
                let spines = self.add_switches("spine", *spines, source)?;
                let each = hosts.len().div_ceil(leaves.len());
                for (index, host) in hosts.into_iter().enumerate() {
                    self.links.push(LinkPlan { ends: [host, leaves[index / each]], line });
                }
                for leaf in leaves {
                    self.links.extend(spines.iter().map(|spine| LinkPlan { ends: [leaf, *spine], line: up }));
                }
            }
            Topology::Ring { switches, delay, rate } => {
                let line = line(rate, delay)?;
                let switches = self.add_switches("s", *switches, source)?;
                for (index, host) in hosts.into_iter().enumerate() {
                    self.links.push(LinkPlan { ends: [host, switches[index % switches.len()]], line });
                }
                if switches.len() < 2 {
                    return Ok(());
                }
                for (index, switch) in switches.iter().enumerate() {
                    let next = switches[(index + 1) % switches.len()];
                    let link = self.links.len();
                    self.links.push(LinkPlan { ends: [*switch, next], line });
                    // Forward in one direction even where the other is shorter, so that the ring can deadlock.
                    if let Node::Switch(switch) = *switch {
                        let others = (0..self.hosts.len()).filter(|host| host % switches.len() != index);
                        self.routes.extend(others.map(|host| RoutePlan { switch, host, link }));
                    }
                }
            }
            Topology::FatTree { k, delay, rate } => {
                let (half, line) = (k / 2, line(rate, delay)?);
                let max_hosts = u64::from(*k).saturating_pow(3) / 4;
                check_link_count((2 * max_hosts).saturating_add(hosts.len() as u64), source)?;
                if *k < 2 || k % 2 != 0 || hosts.len() as u64 > max_hosts {
                    let message = format!(
                        "a fat tree needs an even k of at least 2 and at most k³/4 hosts; k is {k}, the file has {} hosts",
                        hosts.len()
                    );
                    return Err(source.error_at("topology", message));
                }
                let cores = self.add_switches("core", half * half, source)?;
                let mut edges = Vec::new();
                for pod in 1..=*k {
                    let above = self.add_switches(&format!("pod{pod}-agg"), half, source)?;
                    let below = self.add_switches(&format!("pod{pod}-edge"), half, source)?;
                    for (index, aggregation) in above.iter().enumerate() {
                        self.links
                            .extend(below.iter().map(|edge| LinkPlan { ends: [*edge, *aggregation], line }));
                        let mine = &cores[index * half as usize..(index + 1) * half as usize];
                        self.links
                            .extend(mine.iter().map(|core| LinkPlan { ends: [*aggregation, *core], line }));
                    }
                    edges.extend(below);
                }
                for (index, host) in hosts.into_iter().enumerate() {
                    self.links.push(LinkPlan { ends: [host, edges[index / half as usize]], line });
                }
            }
        }
        Ok(())
    }

    fn add_switches(&mut self, stem: &str, count: u32, source: &Source) -> Result<Vec<Node>> {
        if count == 0 || count > limits::MAX_SWITCHES {
            let message = format!("{count} switches; a topology has 1 to {} of a kind", limits::MAX_SWITCHES);
            return Err(source.error_at("topology", message));
        }
        (1..=count).map(|n| self.switch(&format!("{stem}{n}"), source)).collect()
    }
}

/// Checks the number of links of a topology.
fn check_link_count(links: u64, source: &Source) -> Result<()> {
    match links > limits::MAX_LINKS {
        true => {
            let message = format!("the topology has {links} links, the maximum is {}", limits::MAX_LINKS);
            Err(source.error_at("topology", message))
        }
        false => Ok(()),
    }
}
