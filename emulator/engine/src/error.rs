//! What a caller can do wrong.

use crate::{CmId, QpAttributeMask, QpState};
use core::net::IpAddr;
use softhca_queue::CorruptRing;
use softhca_queue::cm::CmState;
use softhca_wire::Qpn;
use thiserror::Error;

/// A kind of resource, for messages.
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
    /// What to call it in a sentence.
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

/// Why a control verb was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// No such resource, or it belongs to another client.
    #[error("there is no {} {number:#x}", .resource.name())]
    NotFound {
        /// Its kind.
        resource: Resource,
        /// The number given.
        number: u32,
    },
    /// Something still uses it.
    #[error("{} {number:#x} is still used by a {}", .resource.name(), .user.name())]
    Busy {
        /// Its kind.
        resource: Resource,
        /// Its number.
        number: u32,
        /// What uses it.
        user: Resource,
    },
    /// The card, or this client, has no more of them.
    #[error("no more than {limit} {}s", .resource.name())]
    Exhausted {
        /// The kind.
        resource: Resource,
        /// The limit.
        limit: usize,
    },
    /// A number outside of what the card offers.
    #[error("{what} is {value}, the card allows {limit}")]
    TooLarge {
        /// Which number.
        what: &'static str,
        /// What was asked for.
        value: u64,
        /// The most.
        limit: u64,
    },
    /// A value that makes no sense.
    #[error("{what}: {why}")]
    Invalid {
        /// Which value.
        what: &'static str,
        /// Why not.
        why: &'static str,
    },
    /// The state machine has no such transition.
    #[error("queue pair {queue_pair}: no transition from {from} to {to}")]
    InvalidTransition {
        /// Which queue pair.
        queue_pair: Qpn,
        /// The state it is in.
        from: QpState,
        /// The state asked for.
        to: QpState,
    },
    /// A transition lacks attributes or has ones that it does not allow.
    #[error("queue pair {queue_pair}, {from} to {to}: missing {missing}, not allowed {forbidden}")]
    InvalidAttributes {
        /// Which queue pair.
        queue_pair: Qpn,
        /// The state it is in.
        from: QpState,
        /// The state asked for.
        to: QpState,
        /// What it needs besides.
        missing: QpAttributeMask,
        /// What it does not take.
        forbidden: QpAttributeMask,
    },
    /// The client's ring is broken.
    #[error("the client's ring is broken: {0}")]
    CorruptRing(#[from] CorruptRing),
    /// Somebody else has the port.
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
    /// The host has no address of that IP version.
    #[error("{address} cannot be reached: the host has no address of that IP version")]
    NetworkUnreachable {
        /// The destination.
        address: IpAddr,
    },
    /// A call that the state of a connection does not allow.
    #[error("connection identifier {:#x} is {state}: {call} is not possible now", .id.0)]
    InvalidCmState {
        /// Which identifier.
        id: CmId,
        /// The state that it is in.
        state: CmState,
        /// What was asked for.
        call: &'static str,
    },
    /// The card does not have this.
    #[error("{what} is not supported")]
    Unsupported {
        /// What.
        what: &'static str,
    },
}

impl VerbsError {
    /// The errno that C callers get.
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
