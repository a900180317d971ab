//! What can go wrong, by whose fault.

use softhca_queue::InvalidWorkRequest;
use softhca_queue::cm::{EventType, RejectReason};
use thiserror::Error as ThisError;

/// Why a call was refused. A completion status is data, not an error.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// The card refused a control verb.
    #[error(transparent)]
    Verb(#[from] softhca_engine::VerbsError),
    /// A work request could not be posted.
    #[error(transparent)]
    Post(#[from] InvalidWorkRequest),
    /// The host's sockets could not be had.
    #[cfg(feature = "sockets")]
    #[error(transparent)]
    Bind(#[from] softhca_udp::BindError),
    /// The system failed.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A daemon's card refused a control verb.
    #[error("{message}")]
    DaemonRejected {
        /// The errno that C callers get.
        errno: i32,
        /// Why, in the daemon's words.
        message: String,
    },
    /// The daemon does not accept another connection, or not this one.
    #[error("the daemon at {path} refused the connection: {why}")]
    DaemonRefused {
        /// Its socket.
        path: String,
        /// The reason.
        why: String,
    },
    /// No daemon is running, or its socket cannot be used.
    #[error("no daemon at {path}: {why}; start one with `softhca daemon`")]
    NoDaemon {
        /// Where it was looked for.
        path: String,
        /// What was found instead.
        why: String,
        /// Nobody is there, so that one can be started.
        is_absent: bool,
    },
    /// The daemon is gone, and with it the card and everything on it.
    #[error("the daemon is gone ({why}): open the device again when it is back")]
    DeviceGone {
        /// How that was noticed.
        why: String,
    },
    /// The process was forked from the one that opened the device.
    #[error("the device was opened by process {parent} before a fork: open it again in the child")]
    Forked {
        /// Who opened it.
        parent: u32,
    },
    /// A connection could not be made, or is over.
    #[error("{}", describe_connection_error(*.kind, *.status))]
    Connection {
        /// What the connection manager told.
        kind: EventType,
        /// Its status: a negative errno, or the reason of a refusal.
        status: i32,
    },
    /// A name that no host has.
    #[error("{name:?} is not the address or the name of a host: {why}")]
    UnknownHost {
        /// The name.
        name: String,
        /// What was looked up.
        why: String,
    },
    /// The queue pair has no such queue.
    #[error("the queue pair has no {0} queue")]
    NoQueue(&'static str),
    /// Text that does not name an endpoint.
    #[error("{0:?} is not an endpoint: GID/queue pair/PSN in hexadecimal")]
    InvalidEndpoint(String),
    /// A range outside of a region.
    #[error("{length} bytes at {offset} are outside of a region of {size}")]
    OutOfRange {
        /// Where the range begins.
        offset: u64,
        /// How many bytes.
        length: u64,
        /// The size of the region.
        size: u64,
    },
}

impl Error {
    /// Whether the card is gone, and with it everything that was on it.
    pub fn is_device_gone(&self) -> bool {
        matches!(self, Error::DeviceGone { .. })
    }

    /// The errno that C callers get.
    pub fn errno(&self) -> i32 {
        const ENOENT: i32 = 2;
        const EIO: i32 = 5;
        const ENOMEM: i32 = 12;
        const ENODEV: i32 = 19;
        const EINVAL: i32 = 22;
        #[cfg(feature = "sockets")]
        const EADDRINUSE: i32 = 98;
        const ECONNREFUSED: i32 = 111;
        match self {
            Error::Verb(error) => error.errno(),
            Error::Post(InvalidWorkRequest::Full(_)) => ENOMEM,
            Error::Post(_) | Error::NoQueue(_) | Error::InvalidEndpoint(_) | Error::OutOfRange { .. } => {
                EINVAL
            }
            #[cfg(feature = "sockets")]
            Error::Bind(_) => EADDRINUSE,
            Error::DaemonRejected { errno, .. } => *errno,
            Error::NoDaemon { .. } => ENODEV,
            Error::DaemonRefused { .. } => ECONNREFUSED,
            Error::DeviceGone { .. } => EIO,
            Error::Forked { .. } => EINVAL,
            Error::Connection { kind: EventType::Rejected, .. } => ECONNREFUSED,
            Error::Connection { status, .. } if *status < 0 => -status,
            Error::Connection { .. } => ECONNREFUSED,
            Error::UnknownHost { .. } => ENOENT,
            Error::System { source, .. } => source.raw_os_error().unwrap_or(EINVAL),
        }
    }
}

fn describe_connection_error(kind: EventType, status: i32) -> String {
    let errno = || std::io::Error::from_raw_os_error(-status);
    match (kind, status) {
        (EventType::Rejected, reason) => {
            format!("the connection was refused: reason {}", RejectReason(reason as u16))
        }
        (kind, 0) => format!("the connection is over: {kind}"),
        (kind, status) if status < 0 => format!("the connection failed: {kind}, {}", errno()),
        (kind, status) => format!("the connection failed: {kind}, status {status}"),
    }
}
