//! Computes shortest-path routes and the multicast tree.

use super::Network;
use crate::switch::{NextHop, RoutingTable};
use crate::{HostId, Node, SwitchId};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec;
use alloc::vec::Vec;

/// The neighbors of each switch, with the port to each.
type Neighbours = Vec<Vec<(u16, usize)>>;

impl Network {
    /// Computes the routing tables: all shortest paths, replaced by static routes where set.
    pub fn compute_routes(&mut self) {
        self.routes_stale = false;
        let mut neighbours: Neighbours = vec![Vec::new(); self.switches.len()];
        // The switch and port of each host link.
        let mut homes: Vec<Vec<(usize, u16)>> = vec![Vec::new(); self.hosts.len()];
        for link in &self.link_ends {
            for here in 0..2 {
                let Node::Switch(switch) = link.ends[here] else { continue };
                match link.ends[1 - here] {
                    Node::Switch(there) => {
                        neighbours[switch.0 as usize].push((link.ports[here], there.0 as usize));
                    }
                    Node::Host(host) => homes[host.0 as usize].push((switch.0 as usize, link.ports[here])),
                }
            }
        }
        for switch in &mut self.switches {
            switch.routes = RoutingTable::default();
            switch.routes.next_hops = vec![NextHop::NONE; self.hosts.len()];
        }
        // Hosts on the same switches share their routes on all other switches.
        let mut groups: BTreeMap<Vec<usize>, Vec<usize>> = BTreeMap::new();
        for (host, home) in homes.iter().enumerate().filter(|(_, home)| !home.is_empty()) {
            groups.entry(home.iter().map(|(switch, _)| *switch).collect()).or_default().push(host);
        }
        for (roots, hosts) in &groups {
            let distances = distances(&neighbours, roots);
            for (index, switch) in self.switches.iter_mut().enumerate() {
                if distances[index] == 0 {
                    for host in hosts {
                        let ports = homes[*host].iter().filter(|(at, _)| *at == index).map(|(_, port)| *port);
                        let ports: Vec<u16> = ports.collect();
                        switch.routes.next_hops[*host] = switch.routes.add(&ports);
                    }
                    continue;
                }
                let closer = |(_, there): &&(u16, usize)| {
                    distances[*there] != usize::MAX && distances[*there] + 1 == distances[index]
                };
                let ports: Vec<u16> =
                    neighbours[index].iter().filter(closer).map(|(port, _)| *port).collect();
                if ports.is_empty() {
                    continue;
                }
                let set = switch.routes.add(&ports);
                hosts.iter().for_each(|host| switch.routes.next_hops[*host] = set);
            }
        }
        for ((SwitchId(switch), HostId(host)), ports) in &self.static_routes {
            let routes = &mut self.switches[*switch as usize].routes;
            routes.next_hops[*host as usize] = routes.add(ports);
        }
        self.compute_multicast_tree(&neighbours, &homes);
    }

    fn compute_multicast_tree(&mut self, neighbours: &Neighbours, homes: &[Vec<(usize, u16)>]) {
        let mut seen = vec![false; self.switches.len()];
        let mut flood: Vec<Vec<u16>> = vec![Vec::new(); self.switches.len()];
        for root in 0..self.switches.len() {
            let mut queue = VecDeque::new();
            if !core::mem::replace(&mut seen[root], true) {
                queue.push_back(root);
            }
            while let Some(here) = queue.pop_front() {
                for (port, there) in &neighbours[here] {
                    if core::mem::replace(&mut seen[*there], true) {
                        continue;
                    }
                    flood[here].push(*port);
                    let back = neighbours[*there]
                        .iter()
                        .find(|(other, _)| self.is_other_end(here, *port, *there, *other));
                    flood[*there].extend(back.map(|(port, _)| *port));
                    queue.push_back(*there);
                }
            }
        }
        for (switch, port) in homes.iter().flatten() {
            flood[*switch].push(*port);
        }
        for (switch, flood) in self.switches.iter_mut().zip(flood) {
            switch.routes.flood = flood;
        }
    }

    /// Whether two ports are the ends of one link.
    fn is_other_end(&self, here: usize, port: u16, there: usize, other: u16) -> bool {
        self.switches[here].ports[usize::from(port)].link
            == self.switches[there].ports[usize::from(other)].link
    }
}

/// The number of hops from each switch to the nearest of `roots`.
fn distances(neighbours: &Neighbours, roots: &[usize]) -> Vec<usize> {
    let mut distances = vec![usize::MAX; neighbours.len()];
    let mut queue = VecDeque::new();
    for root in roots {
        distances[*root] = 0;
        queue.push_back(*root);
    }
    while let Some(here) = queue.pop_front() {
        for (_, there) in &neighbours[here] {
            if distances[*there] == usize::MAX {
                distances[*there] = distances[here] + 1;
                queue.push_back(*there);
            }
        }
    }
    distances
}
