//! Sockets that send from the source port of a flow, so that a network can spread flows over equal-cost paths.
//!
//! They only send: peers respond to port 4791.

use crate::socket::{RoceSocket, SocketOptions};
use softhca_wire::ROCE_PORT;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

/// How the UDP source port of packets is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Entropy {
    /// Always 4791.
    #[default]
    Off,
    /// The port derived from the flow label or the queue pair numbers.
    On,
}

/// The most ports in use. Further flows send from 4791.
const MAX_FLOW_SOCKETS: usize = 512;

/// The sockets of flows, by address and port.
#[derive(Default)]
pub(crate) struct FlowSockets {
    /// `None` where another socket has the port.
    sockets: BTreeMap<SocketAddr, Option<RoceSocket>>,
}

impl FlowSockets {
    /// The source port of a flow: `port` if it can be bound, otherwise 4791.
    pub fn source_port_for(&mut self, source: IpAddr, port: u16) -> u16 {
        let address = SocketAddr::new(source, port);
        if self.sockets.len() >= MAX_FLOW_SOCKETS && !self.sockets.contains_key(&address) {
            return ROCE_PORT;
        }
        // No reader: the smallest buffer is sufficient.
        let options = SocketOptions { receive_buffer: 0, ..SocketOptions::default() };
        let socket = self.sockets.entry(address).or_insert_with(|| RoceSocket::bind(address, options).ok());
        if socket.is_some() { port } else { ROCE_PORT }
    }

    /// The socket that is bound to this source port, if the flow has one.
    pub fn socket(&mut self, source: IpAddr, port: u16) -> Option<&mut RoceSocket> {
        self.sockets.get_mut(&SocketAddr::new(source, port))?.as_mut()
    }

    /// All sockets.
    pub fn iter(&self) -> impl Iterator<Item = &RoceSocket> {
        self.sockets.values().flatten()
    }
}
