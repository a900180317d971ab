//! Why a daemon cannot start.

use softhca_control::limit_of;
use std::io;
use thiserror::Error;

/// Why a daemon could not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// The sockets of a host cannot be bound.
    #[error("host {host}: {source}")]
    Bind {
        /// The host.
        host: String,
        /// The reason.
        source: softhca_udp::BindError,
    },
    /// A daemon with this name is running.
    #[error(
        "a daemon named {name:?} is already running: see `softhca status`, run `softhca stop`, or choose another `--name`"
    )]
    AlreadyRunning {
        /// The name.
        name: String,
    },
    /// The name is not valid.
    #[error("{name:?} is not a valid daemon name: use at most 64 letters, digits, '-', '_' and '.'")]
    BadName {
        /// The name.
        name: String,
    },
    /// Two hosts have the same name, or no host is configured.
    #[error("host names: {0}")]
    BadHosts(String),
    /// The network between the hosts is not valid.
    #[error("fabric: {0}")]
    Fabric(#[from] softhca_udp::HostNetworkError),
    /// A system call failed.
    #[error("{0}{limit}", limit = limit_of(.0, "this process"))]
    System(#[from] io::Error),
}
