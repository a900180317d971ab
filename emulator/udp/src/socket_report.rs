//! The kernel's reports about a socket.

use std::net::SocketAddr;

/// An error report of the network or the kernel about an earlier datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetworkError {
    /// The destination of the datagram, if the kernel reports it.
    pub peer: Option<SocketAddr>,
    /// Why it was not delivered.
    pub cause: NetworkErrorCause,
}

/// Why a datagram was not delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkErrorCause {
    /// The port is closed (ICMP port unreachable).
    PortUnreachable,
    /// It exceeds the MTU of a link on the path.
    TooLarge {
        /// The MTU, in bytes of IP packet.
        mtu: u32,
    },
    /// Another errno.
    Other(i32),
}

/// The fill level of a receive buffer (SO_MEMINFO).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiveMemory {
    /// Bytes charged now.
    pub charged: u32,
    /// The limit.
    pub limit: u32,
    /// Datagrams, or chunks of them, dropped since the socket was opened.
    pub dropped: u32,
}
