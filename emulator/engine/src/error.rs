//! The errors of control verbs.

use crate::{CmId, QpAttributeMask, QpState};
use core::net::IpAddr;
use softhca_queue::CorruptRing;
use softhca_queue::cm::CmState;
use softhca_wire::Qpn;
use thiserror::Error;

/// A kind of resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each variant is the resource of its name")]
pub enum Resource {
    Client,
    ProtectionDomain,
    MemoryRegion,
    MemoryWindow,
    CompletionQueue,
    SharedReceiveQueue,
    QueuePair,
    AddressHandle,
    XrcDomain,
    MulticastGroup,
    CmIdentifier,
    CmChannel,
    CmPort,
}

impl Resource {
    /// The name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Resource::Client => "client",
            Resource::ProtectionDomain => "protection domain",
            Resource::MemoryRegion => "memory region",
            Resource::MemoryWindow => "memory window",
            Resource::CompletionQueue => "completion queue",
            Resource::SharedReceiveQueue => "shared receive queue",
            Resource::QueuePair => "queue pair",
            Resource::AddressHandle => "address handle",
            Resource::XrcDomain => "XRC domain",
            Resource::MulticastGroup => "multicast group",
            Resource::CmIdentifier => "connection identifier",
            Resource::CmChannel => "event channel",
            Resource::CmPort => "port",
        }
    }
}

/// The reason for the failure of a control verb.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// The resource does not exist, or belongs to another client.
    #[error("there is no {} {number:#x}", .resource.name())]
    NotFound {
        /// The kind.
        resource: Resource,
        /// The given number.
        number: u32,
    },
    /// Another resource uses it.
    #[error("{} {number:#x} is still used by a {}", .resource.name(), .user.name())]
    Busy {
        /// The kind.
        resource: Resource,
        /// The number.
        number: u32,
        /// The kind of the user.
        user: Resource,
    },
    /// The limit of the HCA or of this client is reached.
    #[error("no more than {limit} {}s", .resource.name())]
    Exhausted {
        /// The kind.
        resource: Resource,
        /// The limit.
        limit: usize,
    },
    /// A number exceeds a limit of the HCA.
    #[error("{what} is {value}, the card allows {limit}")]
    TooLarge {
        /// The name of the number.
        what: &'static str,
        /// The requested value.
        value: u64,
        /// The maximum.
        limit: u64,
    },
    /// A value is invalid.
    #[error("{what}: {why}")]
    Invalid {
        /// The name of the value.
        what: &'static str,
        /// The reason.
        why: &'static str,
    },
    /// The state machine has no such transition.
    #[error("queue pair {queue_pair}: no transition from {from} to {to}")]
    InvalidTransition {
        /// The queue pair.
        queue_pair: Qpn,
        /// The current state.
        from: QpState,
        /// The requested state.
        to: QpState,
    },
    /// A transition lacks required attributes, or has attributes that it does not allow.
    #[error("queue pair {queue_pair}, {from} to {to}: missing {missing}, not allowed {forbidden}")]
    InvalidAttributes {
        /// The queue pair.
        queue_pair: Qpn,
        /// The current state.
        from: QpState,
        /// The requested state.
        to: QpState,
        /// The missing attributes.
        missing: QpAttributeMask,
        /// The attributes that are not allowed.
        forbidden: QpAttributeMask,
    },
    /// The client's ring is corrupt.
    #[error("the client's ring is broken: {0}")]
    CorruptRing(#[from] CorruptRing),
    /// The port is in use.
    #[error("port {port} of the {space} port space is in use on this host")]
    AddressInUse {
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
    /// The host has no address of this IP version.
    #[error("{address} cannot be reached: the host has no address of that IP version")]
    NetworkUnreachable {
        /// The destination.
        address: IpAddr,
    },
    /// The state of a connection identifier does not allow the command.
    #[error("connection identifier {:#x} is {state}: {call} is not possible now", .id.0)]
    InvalidCmState {
        /// The identifier.
        id: CmId,
        /// The current state.
        state: CmState,
        /// The command.
        call: &'static str,
    },
    /// The HCA does not support a feature.
    #[error("{what} is not supported")]
    Unsupported {
        /// The feature.
        what: &'static str,
    },
}

impl VerbsError {
    /// The errno for C callers.
    pub const fn errno(&self) -> i32 {
        const ENOENT: i32 = 2;
        const ENOMEM: i32 = 12;
        const EBUSY: i32 = 16;
        const EINVAL: i32 = 22;
        const EOPNOTSUPP: i32 = 95;
        const EADDRINUSE: i32 = 98;
        const EADDRNOTAVAIL: i32 = 99;
        const ENETUNREACH: i32 = 101;
        match self {
            VerbsError::NotFound { .. } => ENOENT,
            VerbsError::Busy { .. } => EBUSY,
            VerbsError::Exhausted { .. } => ENOMEM,
            VerbsError::Unsupported { .. } => EOPNOTSUPP,
            VerbsError::AddressInUse { .. } => EADDRINUSE,
            VerbsError::AddressNotAvailable { .. } => EADDRNOTAVAIL,
            VerbsError::NetworkUnreachable { .. } => ENETUNREACH,
            VerbsError::TooLarge { .. }
            | VerbsError::Invalid { .. }
            | VerbsError::InvalidTransition { .. }
            | VerbsError::InvalidAttributes { .. }
            | VerbsError::InvalidCmState { .. }
            | VerbsError::CorruptRing(_) => EINVAL,
        }
    }
}
