//! Why a socket could not be bound.

use crate::PortOwner;
use crate::port_owner::find_owner;
use std::io;
use std::net::{IpAddr, SocketAddr};
use thiserror::Error;

/// The environment variable with the host's address.
pub const ADDRESS_VARIABLE: &str = "SOFTHCA_ADDRESS";

/// Why a socket could not be bound.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BindError {
    /// Another socket has the port.
    #[error("{address} is in use by {owner}")]
    InUse {
        /// The requested address.
        address: SocketAddr,
        /// The owner of the port.
        owner: PortOwner,
    },
    /// The address does not belong to this machine.
    #[error("{} is not an address of this machine{}", address.ip(), alias_hint(address.ip()))]
    NotLocal {
        /// The requested address.
        address: SocketAddr,
    },
    /// `SOFTHCA_ADDRESS` is not an IP address.
    #[error(
        "{ADDRESS_VARIABLE} is {value:?}: expected an IP address, or an IPv4 and an IPv6 address separated by a comma"
    )]
    BadVariable {
        /// The value of the variable.
        value: String,
    },
    /// Any other error.
    #[error("cannot open {address}")]
    Other {
        /// The requested address.
        address: SocketAddr,
        /// The error of the system call.
        source: io::Error,
    },
}

/// The command that adds a loopback address, where the system needs one.
fn alias_hint(address: IpAddr) -> String {
    if cfg!(target_os = "macos") && address.is_loopback() {
        format!("; add it with: sudo ifconfig lo0 alias {address}")
    } else {
        String::new()
    }
}

impl BindError {
    /// Interprets a failed bind.
    pub(crate) fn from_io(address: SocketAddr, source: io::Error) -> BindError {
        match source.kind() {
            io::ErrorKind::AddrInUse => BindError::InUse { address, owner: find_owner(address) },
            io::ErrorKind::AddrNotAvailable => BindError::NotLocal { address },
            _ => BindError::Other { address, source },
        }
    }
}
