//! Why a call failed.

use softhca_queue::{InvalidWorkRequest, QueueFull};
use softhca_types::cm::{EventType, RejectReason};
use softhca_types::{Errno, QpState, VerbsError};
use softhca_wire::Qpn;
use thiserror::Error as ThisError;

/// Why a call failed. Every back end returns the same variant for the same mistake.
///
/// A completion with a status other than success is no error: it is data, see
/// [`CompletionStatus`](crate::CompletionStatus).
///
/// ```
/// use softhca::{Device, Error, QpState, QpType, SendRequest};
///
/// # fn main() -> Result<(), Error> {
/// let context = Device::embedded()?.open();
/// let cq = context.create_completion_queue(1)?;
/// let qp = context.allocate_protection_domain()?.create_queue_pair(QpType::Rc, &cq).build()?;
/// match qp.post_send(&SendRequest::send(1, &[])) {
///     Err(Error::InvalidState { state, .. }) => assert_eq!(state, QpState::Reset),
///     other => panic!("a queue pair in RESET accepts no sends: {other:?}"),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// A queue has no room for another work request.
    #[error(
        "the {queue} queue is full: all {max_wr} work requests are outstanding. Poll completions first (unsignaled sends \
         need a later signaled one), or create the queue with more"
    )]
    QueueFull {
        /// The queue: `send`, `receive` or `shared receive`.
        queue: &'static str,
        /// How many work requests it holds.
        max_wr: u32,
    },
    /// The state of a queue pair does not allow the call.
    #[error("{call}: queue pair {qpn} is in {state}{}", describe_state_remedy(.call))]
    InvalidState {
        /// The queue pair.
        qpn: Qpn,
        /// Its state.
        state: QpState,
        /// The call.
        call: &'static str,
    },
    /// The card rejected the call: a wrong key or state, a limit, a resource that is still used, an injected fault.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// The sockets of an embedded device cannot be bound.
    #[cfg(feature = "sockets")]
    #[error(transparent)]
    Bind(#[from] softhca_udp::BindError),
    /// A system call failed.
    #[error("{what}: {source}{limit}", limit = limit_of(.source))]
    System {
        /// The attempted operation.
        what: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The daemon has no such device.
    #[error("{why}")]
    NoSuchDevice {
        /// The name, and the names that exist.
        why: String,
    },
    /// A daemon rejected the request, for a reason of its own.
    #[error("{message}")]
    DaemonRejected {
        /// The errno that C callers get.
        errno: i32,
        /// The reason.
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
        /// The path of its socket.
        path: String,
        /// The object that is there instead.
        why: String,
        /// Nothing is there, so that a daemon can be started.
        is_absent: bool,
    },
    /// The daemon is gone, and with it the device and everything on it.
    #[error("the daemon is gone ({why}): open the device again when it is back")]
    DeviceGone {
        /// How that was noticed.
        why: String,
    },
    /// The process was forked from the one that opened the device.
    #[error("the device was opened by process {parent} before a fork: open it again in the child")]
    Forked {
        /// The process that opened it.
        parent: u32,
    },
    /// A connection could not be made, or is over.
    #[error("{}", describe_connection_error(*.kind, *.status))]
    Connection {
        /// The event of the connection manager.
        kind: EventType,
        /// Its status: a negative errno, or the reason of a rejection.
        status: i32,
    },
    /// A name that no host has.
    #[error("{name:?} is not the address or the name of a host: {why}")]
    UnknownHost {
        /// The name.
        name: String,
        /// The place in which it was looked up.
        why: String,
    },
    /// The queue pair has no such queue.
    #[error("the queue pair has no {0} queue")]
    NoQueue(&'static str),
    /// Text that is not an endpoint.
    #[error("{0:?} is not an endpoint: GID/queue pair/PSN in hexadecimal")]
    InvalidEndpoint(String),
    /// A range outside of a region.
    #[error("{length} bytes at {offset} are outside of a region of {size}")]
    OutOfRange {
        /// Offset at which the range begins.
        offset: u64,
        /// How many bytes.
        length: u64,
        /// The size of the region.
        size: u64,
    },
}

impl Error {
    /// Whether the device is gone, and with it everything that was on it.
    pub fn is_device_gone(&self) -> bool {
        matches!(self, Error::DeviceGone { .. })
    }

    /// The error of a post to a queue.
    pub(crate) fn from_post(queue: &'static str, error: InvalidWorkRequest) -> Error {
        let too_many = |what, value: usize, limit: usize| VerbsError::LimitExceeded {
            what,
            value: value as u64,
            limit: limit as u64,
        };
        match error {
            InvalidWorkRequest::Full(QueueFull { slots }) => {
                return Error::QueueFull { queue, max_wr: slots };
            }
            InvalidWorkRequest::TooManySges { sges, limit } => too_many("the number of SGEs", sges, limit),
            InvalidWorkRequest::InlineTooLong { bytes, limit } => {
                too_many("the number of bytes of inline data", bytes, limit)
            }
            InvalidWorkRequest::UnknownOpcode(_) => {
                VerbsError::Invalid { what: "opcode", why: "it is not a send opcode" }
            }
        }
        .into()
    }

    /// The errno that C callers get.
    pub fn errno(&self) -> i32 {
        match self {
            Error::Verbs(error) => error.errno(),
            Error::QueueFull { .. } => Errno::ENOMEM.0,
            Error::InvalidState { .. }
            | Error::Forked { .. }
            | Error::NoQueue(_)
            | Error::InvalidEndpoint(_)
            | Error::OutOfRange { .. } => Errno::EINVAL.0,
            Error::UnknownHost { .. } => Errno::ENOENT.0,
            Error::DaemonRejected { errno, .. } => *errno,
            #[cfg(feature = "sockets")]
            Error::Bind(_) => Errno::EADDRINUSE.0,
            Error::System { source, .. } => source.raw_os_error().unwrap_or(Errno::EINVAL.0),
            Error::NoSuchDevice { .. } | Error::NoDaemon { .. } => Errno::ENODEV.0,
            Error::DeviceGone { .. } => Errno::EIO.0,
            Error::Connection { kind, status } if *kind != EventType::Rejected && *status < 0 => -status,
            Error::DaemonRefused { .. } | Error::Connection { .. } => Errno::ECONNREFUSED.0,
        }
    }
}

/// The remedy for a call in a state that does not allow it.
fn describe_state_remedy(call: &str) -> &'static str {
    match call {
        "post_recv" => ". A receive needs INIT: call `init`, or connect the queue pair, first",
        _ => ". A send needs RTS: connect the queue pair first",
    }
}

/// The limit of this process that a failed call met.
fn limit_of(error: &std::io::Error) -> String {
    #[cfg(all(feature = "sockets", target_os = "linux"))]
    return softhca_control::limit_of(error, "this process");
    #[cfg(not(all(feature = "sockets", target_os = "linux")))]
    {
        let _ = error;
        String::new()
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
