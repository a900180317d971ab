//! Topologies: files and names of generators. A small one becomes a subnet that a manager sweeps.

#![no_main]

use libfuzzer_sys::fuzz_target;
use softhca_subnet::{MadClients, Manager, PortId, RoutingEngine, Subnet, Topology};

/// Larger ones take long to sweep.
const MAX_SWEPT: usize = 24;

fuzz_target!(|text: &str| {
    let topology = match Topology::generate(text).unwrap_or_else(|| Topology::parse(text)) {
        Ok(topology) => topology,
        Err(error) => return drop(error.to_string()),
    };
    let Some(node) = topology.hcas().next().filter(|_| topology.nodes.len() <= MAX_SWEPT) else { return };
    let mut subnet = Subnet::new(topology);
    let manager = Manager::new(&mut subnet, PortId { node, port: 1 }, RoutingEngine::UpDown);
    MadClients::new(subnet, Some(manager));
});
