//! The output port of each LID at each switch.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

softhca_wire::named_enum! {
    /// How the subnet manager chooses routes.
    pub enum RoutingEngine {
        /// Shortest paths, spread over equal ones.
        MinHop => "min-hop",
        /// Shortest paths that never go up after they went down a tree, so that no cycle of waiting buffers exists.
        UpDown => "up-down",
    }
}

/// A link between two switches, as one of them sees it.
#[derive(Clone, Copy)]
pub struct Edge {
    /// The output port.
    pub port: u8,
    /// The index of the other switch.
    pub to: usize,
}

/// A LID, and the switch and port where it ends. Port 0 is the switch itself.
#[derive(Clone, Copy)]
pub struct Target {
    pub lid: u16,
    pub switch: usize,
    pub port: u8,
}

const UNREACHED: u32 = u32::MAX;

/// Computes the table of each switch, indexed by LID; `no_port` where there is no route. Equal input has equal output.
pub fn route(engine: RoutingEngine, edges: &[Vec<Edge>], targets: &[Target], no_port: u8) -> Vec<Vec<u8>> {
    let size = targets.iter().map(|target| usize::from(target.lid) + 1).max().unwrap_or(0);
    let mut tables = vec![vec![no_port; size]; edges.len()];
    let mut load: Vec<[u32; 256]> = vec![[0; 256]; edges.len()];
    let order = match engine {
        RoutingEngine::MinHop => None,
        RoutingEngine::UpDown => Some(Order::new(edges)),
    };
    let mut by_switch: Vec<Vec<Target>> = vec![Vec::new(); edges.len()];
    targets.iter().for_each(|target| by_switch[target.switch].push(*target));
    for (root, targets) in by_switch.iter().enumerate().filter(|(_, targets)| !targets.is_empty()) {
        let next = match &order {
            None => shortest(edges, root),
            Some(order) => order.shortest(edges, root),
        };
        for (switch, candidates) in next.iter().enumerate() {
            for target in targets {
                let port = if switch == root {
                    Some(target.port)
                } else {
                    candidates.iter().copied().min_by_key(|port| (load[switch][usize::from(*port)], *port))
                };
                let Some(port) = port else { continue };
                tables[switch][usize::from(target.lid)] = port;
                // A switch receives nothing but management.
                load[switch][usize::from(port)] += u32::from(target.port != 0);
            }
        }
    }
    tables
}

fn distances(edges: &[Vec<Edge>], root: usize) -> Vec<u32> {
    let mut distance = vec![UNREACHED; edges.len()];
    distance[root] = 0;
    let mut open = VecDeque::from([root]);
    while let Some(switch) = open.pop_front() {
        for edge in &edges[switch] {
            if distance[edge.to] == UNREACHED {
                distance[edge.to] = distance[switch] + 1;
                open.push_back(edge.to);
            }
        }
    }
    distance
}

/// For each switch the ports of shortest paths to `root`.
fn shortest(edges: &[Vec<Edge>], root: usize) -> Vec<Vec<u8>> {
    let distance = distances(edges, root);
    let is_closer = |switch: usize, edge: &&Edge| {
        distance[switch] != UNREACHED && distance[edge.to].checked_add(1) == Some(distance[switch])
    };
    let ports = |switch: usize| {
        edges[switch].iter().filter(|edge| is_closer(switch, edge)).map(|edge| edge.port).collect()
    };
    (0..edges.len()).map(ports).collect()
}

/// An order of switches from the root of a tree down: a link goes up to the switch that comes first.
struct Order {
    rank: Vec<usize>,
    from_top: Vec<usize>,
}

impl Order {
    /// The root is the switch from which the farthest one is nearest; of several, the first.
    fn new(edges: &[Vec<Edge>]) -> Order {
        let farthest = |switch: &usize| {
            let reached = distances(edges, *switch).into_iter().filter(|distance| *distance != UNREACHED);
            let (count, farthest) =
                reached.fold((0usize, 0), |(count, far), distance| (count + 1, far.max(distance)));
            (usize::MAX - count, farthest)
        };
        let root = (0..edges.len()).min_by_key(farthest).unwrap_or(0);
        let distance = if edges.is_empty() { Vec::new() } else { distances(edges, root) };
        let mut from_top: Vec<usize> = (0..edges.len()).collect();
        from_top.sort_by_key(|switch| (distance[*switch], *switch));
        let mut rank = vec![0; edges.len()];
        from_top.iter().enumerate().for_each(|(place, switch)| rank[*switch] = place);
        Order { rank, from_top }
    }

    /// For each switch the ports of shortest legal paths to `root`. A switch with a path that only goes down uses it, so
    /// that packets that came from above never go up again.
    fn shortest(&self, edges: &[Vec<Edge>], root: usize) -> Vec<Vec<u8>> {
        let mut down = vec![UNREACHED; edges.len()];
        down[root] = 0;
        let mut open = VecDeque::from([root]);
        while let Some(switch) = open.pop_front() {
            for above in
                edges[switch].iter().map(|edge| edge.to).filter(|to| self.rank[*to] < self.rank[switch])
            {
                if down[above] == UNREACHED {
                    down[above] = down[switch] + 1;
                    open.push_back(above);
                }
            }
        }
        let mut distance = down.clone();
        let mut next = vec![Vec::new(); edges.len()];
        for &switch in self.from_top.iter().filter(|switch| **switch != root) {
            let goes_down = down[switch] != UNREACHED;
            // The distances of switches above are final.
            let length = |edge: &Edge| match (self.rank[edge.to] > self.rank[switch]) == goes_down {
                true if goes_down => down[edge.to],
                true => distance[edge.to],
                false => UNREACHED,
            };
            let best = edges[switch].iter().map(length).min().unwrap_or(UNREACHED);
            if best != UNREACHED {
                next[switch] =
                    edges[switch].iter().filter(|edge| length(edge) == best).map(|edge| edge.port).collect();
                distance[switch] = best + 1;
            }
        }
        next
    }
}
