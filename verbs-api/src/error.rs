//! Why a call failed.

use softhca_queue::cm::{CmState, EventType, RejectReason};
use softhca_queue::{
    CmId, CorruptRing, Errno, InvalidWorkRequest, QpAttributeMask, QpState, QueueFull, Resource, Verb,
    VerbsError,
};
use softhca_wire::Qpn;
use std::net::IpAddr;
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
    /// The state machine has no such transition.
    #[error(
        "queue pair {qpn}: no transition from {from} to {to}. The order is RESET, INIT, RTR, RTS; any state may go to \
         ERR or RESET"
    )]
    InvalidTransition {
        /// The queue pair.
        qpn: Qpn,
        /// Its state.
        from: QpState,
        /// The requested state.
        to: QpState,
    },
    /// A transition lacks required attributes or has attributes that it does not allow.
    #[error("queue pair {qpn}, {from} to {to}: missing {missing}, not allowed {forbidden}")]
    InvalidAttributes {
        /// The queue pair.
        qpn: Qpn,
        /// Its state.
        from: QpState,
        /// The requested state.
        to: QpState,
        /// Required attributes that are absent.
        missing: QpAttributeMask,
        /// Attributes that the transition does not allow.
        forbidden: QpAttributeMask,
    },
    /// A number above a limit of the queue, the device or the client.
    #[error("{what} is {value}, the limit is {limit}")]
    LimitExceeded {
        /// The quantity.
        what: &'static str,
        /// The value given.
        value: u64,
        /// The limit.
        limit: u64,
    },
    /// The device or this client has as many resources of a kind as it may have.
    #[error("no more than {limit} {}s", .resource.name())]
    Exhausted {
        /// The kind.
        resource: Resource,
        /// The limit.
        limit: usize,
    },
    /// An invalid value.
    #[error("{what}: {why}")]
    Invalid {
        /// The operand.
        what: &'static str,
        /// The reason.
        why: &'static str,
    },
    /// The resource does not exist, or another client owns it: a wrong key or number.
    #[error("{} {number:#x} does not exist", .resource.name())]
    NotFound {
        /// Its kind.
        resource: Resource,
        /// The key or number given.
        number: u32,
    },
    /// Another resource still uses it.
    #[error("{} {number:#x} is still used by a {}", .resource.name(), .user.name())]
    Busy {
        /// Its kind.
        resource: Resource,
        /// Its number.
        number: u32,
        /// The kind of its user.
        user: Resource,
    },
    /// A fault rule failed the call.
    #[error("{verb} fails with {errno}: injected by fault rule {rule}")]
    Injected {
        /// The call.
        verb: Verb,
        /// The error.
        errno: Errno,
        /// The number of the rule.
        rule: u32,
    },
    /// A fault rule ends the process in this call.
    #[error("the process ends in {verb}: injected by fault rule {rule}")]
    InjectedKill {
        /// The call.
        verb: Verb,
        /// The number of the rule.
        rule: u32,
    },
    /// The device raised DEVICE_FATAL.
    #[error("the device failed (DEVICE_FATAL): close it and open it again")]
    DeviceFailed,
    /// The device does not support this.
    #[error("{what} is not supported")]
    Unsupported {
        /// The feature.
        what: &'static str,
    },
    /// The rings of this client are corrupt.
    #[error("the client's ring is corrupt: {0}")]
    CorruptRing(CorruptRing),
    /// Another identifier of connection management has the port.
    #[error("port {port} of the {space} port space is in use on this host")]
    PortInUse {
        /// The name of the port space.
        space: &'static str,
        /// The port.
        port: u16,
    },
    /// The host does not have this address.
    #[error("{address} is not an address of this host")]
    AddressNotAvailable {
        /// The address.
        address: IpAddr,
    },
    /// The host has no address of that IP version.
    #[error("{address} is unreachable: the host has no address of that IP version")]
    NetworkUnreachable {
        /// The destination.
        address: IpAddr,
    },
    /// The network rejects the multicast join.
    #[error("the host cannot join multicast group {group}: errno {errno}")]
    MulticastJoinFailed {
        /// The group.
        group: IpAddr,
        /// The errno of the system call.
        errno: i32,
    },
    /// The state of a connection does not allow the call.
    #[error("connection identifier {:#x} is {state}: {call} is not possible now", .id.0)]
    InvalidCmState {
        /// The identifier.
        id: CmId,
        /// Its state.
        state: CmState,
        /// The call.
        call: &'static str,
    },
    /// The sockets of an embedded device cannot be bound.
    #[cfg(feature = "sockets")]
    #[error(transparent)]
    Bind(#[from] softhca_udp::BindError),
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
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
        /// What is there instead.
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
        /// Where it was looked up.
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
        /// Where the range begins.
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
        match error {
            InvalidWorkRequest::Full(QueueFull { slots }) => Error::QueueFull { queue, max_wr: slots },
            InvalidWorkRequest::TooManySges { sges, limit } => {
                Error::LimitExceeded { what: "the number of SGEs", value: sges as u64, limit: limit as u64 }
            }
            InvalidWorkRequest::InlineTooLong { bytes, limit } => Error::LimitExceeded {
                what: "the number of bytes of inline data",
                value: bytes as u64,
                limit: limit as u64,
            },
            InvalidWorkRequest::UnknownOpcode(_) => {
                Error::Invalid { what: "opcode", why: "it is not a send opcode" }
            }
        }
    }

    /// The errno that C callers get.
    pub fn errno(&self) -> i32 {
        const ENOENT: i32 = 2;
        const EIO: i32 = 5;
        const ENOMEM: i32 = 12;
        const EBUSY: i32 = 16;
        const ENODEV: i32 = 19;
        const EINVAL: i32 = 22;
        const EOPNOTSUPP: i32 = 95;
        const EADDRINUSE: i32 = 98;
        const EADDRNOTAVAIL: i32 = 99;
        const ENETUNREACH: i32 = 101;
        const ECONNREFUSED: i32 = 111;
        match self {
            Error::Injected { errno, .. } => errno.0,
            Error::DeviceFailed | Error::InjectedKill { .. } => EIO,
            Error::QueueFull { .. } | Error::Exhausted { .. } => ENOMEM,
            Error::InvalidState { .. }
            | Error::InvalidTransition { .. }
            | Error::InvalidAttributes { .. }
            | Error::LimitExceeded { .. }
            | Error::Invalid { .. }
            | Error::CorruptRing(_)
            | Error::InvalidCmState { .. }
            | Error::Forked { .. }
            | Error::NoQueue(_)
            | Error::InvalidEndpoint(_)
            | Error::OutOfRange { .. } => EINVAL,
            Error::NotFound { .. } | Error::UnknownHost { .. } => ENOENT,
            Error::Busy { .. } => EBUSY,
            Error::Unsupported { .. } => EOPNOTSUPP,
            Error::PortInUse { .. } => EADDRINUSE,
            Error::AddressNotAvailable { .. } => EADDRNOTAVAIL,
            Error::NetworkUnreachable { .. } => ENETUNREACH,
            Error::MulticastJoinFailed { errno, .. } | Error::DaemonRejected { errno, .. } => *errno,
            #[cfg(feature = "sockets")]
            Error::Bind(_) => EADDRINUSE,
            Error::System { source, .. } => source.raw_os_error().unwrap_or(EINVAL),
            Error::NoSuchDevice { .. } | Error::NoDaemon { .. } => ENODEV,
            Error::DaemonRefused { .. } => ECONNREFUSED,
            Error::DeviceGone { .. } => EIO,
            Error::Connection { kind: EventType::Rejected, .. } => ECONNREFUSED,
            Error::Connection { status, .. } if *status < 0 => -status,
            Error::Connection { .. } => ECONNREFUSED,
        }
    }
}

impl From<VerbsError> for Error {
    fn from(error: VerbsError) -> Error {
        match error {
            VerbsError::NotFound { resource, number } => Error::NotFound { resource, number },
            VerbsError::Busy { resource, number, user } => Error::Busy { resource, number, user },
            VerbsError::Exhausted { resource, limit } => Error::Exhausted { resource, limit },
            VerbsError::TooLarge { what, value, limit } => Error::LimitExceeded { what, value, limit },
            VerbsError::Invalid { what, why } => Error::Invalid { what, why },
            VerbsError::InvalidTransition { queue_pair: qpn, from, to } => {
                Error::InvalidTransition { qpn, from, to }
            }
            VerbsError::InvalidAttributes { queue_pair: qpn, from, to, missing, forbidden } => {
                Error::InvalidAttributes { qpn, from, to, missing, forbidden }
            }
            VerbsError::CorruptRing(why) => Error::CorruptRing(why),
            VerbsError::AddressInUse { space, port } => Error::PortInUse { space, port },
            VerbsError::AddressNotAvailable { address } => Error::AddressNotAvailable { address },
            VerbsError::NetworkUnreachable { address } => Error::NetworkUnreachable { address },
            VerbsError::MulticastJoinFailed { group, errno } => Error::MulticastJoinFailed { group, errno },
            VerbsError::InvalidCmState { id, state, call } => Error::InvalidCmState { id, state, call },
            VerbsError::Unsupported { what } => Error::Unsupported { what },
            VerbsError::Injected { verb, errno, rule } => Error::Injected { verb, errno, rule },
            VerbsError::InjectedKill { verb, rule } => Error::InjectedKill { verb, rule },
            VerbsError::DeviceFailed => Error::DeviceFailed,
            _ => Error::Invalid { what: "command", why: "the device rejected it" },
        }
    }
}

/// What to do about a call in a state that does not allow it.
fn describe_state_remedy(call: &str) -> &'static str {
    match call {
        "post_recv" => ". A receive needs INIT: call `init`, or connect the queue pair, first",
        _ => ". A send needs RTS: connect the queue pair first",
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
