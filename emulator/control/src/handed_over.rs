//! Packets that one process of a host hands over to another.

use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};

/// A packet that arrived at the socket of another slot. The kernel merges the packets of one sender and gives all to
/// the slot of the first, and it does not know all listeners.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct HandedOverPacket {
    /// The slot that it is for.
    pub slot: u16,
    /// The sender.
    pub source: SocketAddr,
    /// The address of the host that it was sent to.
    pub destination: IpAddr,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// From the BTH to the ICRC, which is correct.
    pub bytes: Vec<u8>,
}

impl HandedOverPacket {
    /// The slot of a REQ without a listener, and of a REJ whose sender does not know the communication ID of its peer. The
    /// records of the processes say which of them has the connection.
    pub const UNKNOWN_SLOT: u16 = u16::MAX;
    /// The most bytes of a packet: the largest path MTU and all headers. A longer one is not handed over.
    pub const MAX_BYTES: usize = 4096 + 128;
    /// The most packets in one message of the control protocol, which is then within its limit.
    pub const MAX_IN_MESSAGE: usize = 32;
}
