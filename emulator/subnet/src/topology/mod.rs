//! Nodes and links, from a file or a generator.

mod generate;
mod parse;

use alloc::string::String;
use alloc::vec::Vec;
use thiserror::Error;

pub use generate::GENERATORS;

/// The most nodes of a topology.
pub const MAX_NODES: usize = 10_000;
/// The most bytes of a topology file.
pub const MAX_FILE: usize = 16 << 20;
/// The most ports of a node: 255 stands for no port in a forwarding table.
pub const MAX_PORTS: u8 = 254;

/// A port of a node. Port 0 is the management port of a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId {
    /// The index of the node.
    pub node: usize,
    /// The number of the port.
    pub port: u8,
}

/// Whether packets end at a node or pass it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// A host's channel adapter.
    Hca,
    /// A switch.
    Switch,
}

/// A node of a topology.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopologyNode {
    /// HCA or switch.
    pub kind: NodeKind,
    /// The node description.
    pub description: String,
    /// The node GUID.
    pub guid: u64,
    /// For each port the port at the other end of its link. Index 0 is unused.
    pub peers: Vec<Option<PortId>>,
    /// The GUIDs of an HCA's ports that the file states.
    pub port_guids: Vec<Option<u64>>,
}

impl TopologyNode {
    fn new(kind: NodeKind, description: String, guid: u64, ports: u8) -> TopologyNode {
        let count = usize::from(ports) + 1;
        let (mut peers, mut port_guids) = (Vec::new(), Vec::new());
        peers.resize(count, None);
        port_guids.resize(count, None);
        TopologyNode { kind, description, guid, peers, port_guids }
    }

    /// The name of the node's host: the first word of the description, because real ones are such as `node7 mlx5_0`.
    pub fn host(&self) -> &str {
        self.description.split_whitespace().next().unwrap_or_default()
    }

    /// The number of the last port.
    pub fn port_count(&self) -> u8 {
        (self.peers.len() - 1) as u8
    }

    /// The GUID of a port. A switch has one for all of its ports.
    pub fn port_guid(&self, port: u8) -> u64 {
        let stated = self.port_guids.get(usize::from(port)).copied().flatten();
        match self.kind {
            NodeKind::Hca => stated.unwrap_or(self.guid.wrapping_add(port.into())),
            NodeKind::Switch => self.guid,
        }
    }
}

/// The nodes and links of a subnet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// The nodes; links refer to them by index.
    pub nodes: Vec<TopologyNode>,
}

/// Why a topology was rejected.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TopologyError {
    /// A line of the file is wrong.
    #[error("line {line}, column {column}: {reason}")]
    Line {
        /// The number of the line, from 1.
        line: usize,
        /// The column in characters, from 1.
        column: usize,
        /// The reason.
        reason: String,
    },
    /// The arguments of a generator are wrong.
    #[error("{0}")]
    Generator(String),
    /// The file is too large.
    #[error("the file has {0} bytes, more than {MAX_FILE}")]
    TooLarge(usize),
}

impl Topology {
    /// Reads a file as `ibnetdiscover` prints it and `ibsim` reads it.
    pub fn parse(text: &str) -> Result<Topology, TopologyError> {
        parse::parse(text)
    }

    /// Makes the topology that a text such as `fat-tree:4` names; `None` if it names no generator.
    pub fn generate(text: &str) -> Option<Result<Topology, TopologyError>> {
        generate::generate(text)
    }

    /// The indices of a host's HCAs, in the order of the file. A host may be named by the whole description of an HCA.
    pub fn hcas_of<'a>(&'a self, host: &'a str) -> impl Iterator<Item = usize> + 'a {
        let is_exact = move |node: &TopologyNode| node.description == host;
        let has_exact = self.hcas().any(|index| is_exact(&self.nodes[index]));
        self.hcas().filter(move |index| {
            let node = &self.nodes[*index];
            is_exact(node) || !has_exact && node.host() == host
        })
    }

    /// The indices of all HCAs.
    pub fn hcas(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.nodes.len()).filter(|index| self.nodes[*index].kind == NodeKind::Hca)
    }

    /// The port at the other end of a link.
    pub fn peer(&self, port: PortId) -> Option<PortId> {
        self.nodes.get(port.node)?.peers.get(usize::from(port.port)).copied().flatten()
    }

    fn connect(&mut self, one: PortId, other: PortId) {
        self.nodes[one.node].peers[usize::from(one.port)] = Some(other);
        self.nodes[other.node].peers[usize::from(other.port)] = Some(one);
    }
}

#[cfg(test)]
mod tests;
