//! Sockets that send from the source port of a flow, so that a network can spread flows over equal paths.
//!
//! They only send: whoever answers writes to port 4791.

use crate::socket::{RoceSocket, SocketOptions};
use softhca_wire::ROCE_PORT;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

/// Which source port packets have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Entropy {
    /// 4791, whatever the flow.
    #[default]
    Off,
    /// The one that stands for the flow, made of its flow label or its queue pairs.
    On,
}

/// The most ports in use; flows beyond it leave from 4791.
const MAX_FLOW_SOCKETS: usize = 512;

/// The sockets of flows, by address and port.
#[derive(Default)]
pub(crate) struct FlowSockets {
    /// `None` where somebody else has the port.
    sockets: BTreeMap<SocketAddr, Option<RoceSocket>>,
}

impl FlowSockets {
    /// The port that a flow leaves from: its own if it can be had.
    pub fn source_port_for(&mut self, source: IpAddr, wanted: u16) -> u16 {
        let address = SocketAddr::new(source, wanted);
        if self.sockets.len() >= MAX_FLOW_SOCKETS && !self.sockets.contains_key(&address) {
            return ROCE_PORT;
        }
        // What comes here is read by nobody: the smallest buffer will do.
        let options = SocketOptions { receive_buffer: 0, ..SocketOptions::default() };
        let socket = self.sockets.entry(address).or_insert_with(|| RoceSocket::bind(address, options).ok());
        if socket.is_some() { wanted } else { ROCE_PORT }
    }

    /// The socket of a flow that leaves from its own port.
    pub fn socket(&mut self, source: IpAddr, port: u16) -> Option<&mut RoceSocket> {
        self.sockets.get_mut(&SocketAddr::new(source, port))?.as_mut()
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &RoceSocket> {
        self.sockets.values().flatten()
    }
}
