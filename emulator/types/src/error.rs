//! Errors of control verbs. Every back end returns the same value for the same mistake.

use crate::cm::CmState;
use crate::{CmId, Errno, QpAttributeMask, QpState, Resource, Verb};
use core::net::IpAddr;
use softhca_wire::{Constant, Qpn};
use thiserror::Error;

/// The other side wrote an index out of range, which only a broken or hostile client does.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("ring index {index} is out of range: expected {min} to {max}")]
pub struct CorruptRing {
    /// The index in shared memory.
    pub index: u64,
    /// The lowest valid index.
    pub min: u64,
    /// The highest valid index.
    pub max: u64,
}

/// Why the card rejected a call: a control verb, or a work request that exceeds a limit.
///
/// A daemon sends it as it is, so that every back end returns the same value for the same mistake.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum VerbsError {
    /// The resource does not exist, or another client owns it: a wrong key or number.
    #[error("{} {number:#x} does not exist", .resource.name())]
    NotFound { resource: Resource, number: u32 },
    /// Another resource still uses it.
    #[error("{} {number:#x} is still used by a {}", .resource.name(), .user.name())]
    Busy { resource: Resource, number: u32, user: Resource },
    /// The HCA or this client has as many resources of a kind as it may have.
    #[error("no more than {limit} {}s", .resource.name())]
    Exhausted { resource: Resource, limit: u32 },
    /// A number above a limit of the queue, the HCA or the client.
    #[error("{what} is {value}, the limit is {limit}")]
    LimitExceeded {
        #[cfg_attr(feature = "serde", serde(deserialize_with = "softhca_wire::deserialize_constant"))]
        what: Constant,
        value: u64,
        limit: u64,
    },
    /// An invalid value.
    #[error("{what}: {why}")]
    Invalid {
        #[cfg_attr(feature = "serde", serde(deserialize_with = "softhca_wire::deserialize_constant"))]
        what: Constant,
        #[cfg_attr(feature = "serde", serde(deserialize_with = "softhca_wire::deserialize_constant"))]
        why: Constant,
    },
    /// The state machine has no such transition.
    #[error(
        "queue pair {qpn}: no transition from {from} to {to}. The order is RESET, INIT, RTR, RTS; any state may go to \
         ERR or RESET"
    )]
    InvalidTransition { qpn: Qpn, from: QpState, to: QpState },
    /// A transition lacks required attributes or has attributes that it does not allow.
    #[error("queue pair {qpn}, {from} to {to}: missing {missing}, not allowed {forbidden}")]
    InvalidAttributes {
        qpn: Qpn,
        from: QpState,
        to: QpState,
        missing: QpAttributeMask,
        forbidden: QpAttributeMask,
    },
    /// The client corrupted its ring.
    #[error("the client's ring is corrupt: {0}")]
    CorruptRing(#[from] CorruptRing),
    /// Another identifier of connection management has the port.
    #[error("port {port} of the {space} port space is in use on this host")]
    PortInUse {
        #[cfg_attr(feature = "serde", serde(deserialize_with = "softhca_wire::deserialize_constant"))]
        space: Constant,
        port: u16,
    },
    /// The host does not have this address.
    #[error("{address} is not an address of this host")]
    AddressNotAvailable { address: IpAddr },
    /// The host has no address of that IP version.
    #[error("{address} is unreachable: the host has no address of that IP version")]
    NetworkUnreachable { address: IpAddr },
    /// The network rejects the multicast join.
    #[error("the host cannot join multicast group {group}: errno {errno}")]
    MulticastJoinFailed { group: IpAddr, errno: i32 },
    /// The state of a connection does not allow the call.
    #[error("connection identifier {:#x} is {state}: {call} is not possible now", .id.0)]
    InvalidCmState {
        id: CmId,
        state: CmState,
        #[cfg_attr(feature = "serde", serde(deserialize_with = "softhca_wire::deserialize_constant"))]
        call: Constant,
    },
    /// A fault rule of the user failed the call.
    #[error("{verb} fails with {errno}: injected by fault rule {rule}")]
    Injected { verb: Verb, errno: Errno, rule: u32 },
    /// A fault rule of the user ends the process in this call.
    #[error("the process ends in {verb}: injected by fault rule {rule}")]
    InjectedKill { verb: Verb, rule: u32 },
    /// The device failed.
    #[error("the device failed (DEVICE_FATAL): close it and open it again")]
    DeviceFailed,
    /// The device was removed.
    #[error("the device was removed: it can be opened when it returns")]
    DeviceRemoved,
    /// The HCA does not support this.
    #[error("{what} is not supported")]
    Unsupported {
        #[cfg_attr(feature = "serde", serde(deserialize_with = "softhca_wire::deserialize_constant"))]
        what: Constant,
    },
}

impl VerbsError {
    /// The errno that C callers get.
    pub const fn errno(&self) -> i32 {
        match self {
            VerbsError::Injected { errno, .. } => *errno,
            VerbsError::DeviceFailed | VerbsError::InjectedKill { .. } => Errno::EIO,
            VerbsError::DeviceRemoved => Errno::ENODEV,
            VerbsError::NotFound { .. } => Errno::ENOENT,
            VerbsError::Busy { .. } => Errno::EBUSY,
            VerbsError::Exhausted { .. } => Errno::ENOMEM,
            VerbsError::Unsupported { .. } => Errno::EOPNOTSUPP,
            VerbsError::PortInUse { .. } => Errno::EADDRINUSE,
            VerbsError::AddressNotAvailable { .. } => Errno::EADDRNOTAVAIL,
            VerbsError::NetworkUnreachable { .. } => Errno::ENETUNREACH,
            VerbsError::MulticastJoinFailed { errno, .. } => Errno(*errno),
            VerbsError::LimitExceeded { .. }
            | VerbsError::Invalid { .. }
            | VerbsError::InvalidTransition { .. }
            | VerbsError::InvalidAttributes { .. }
            | VerbsError::InvalidCmState { .. }
            | VerbsError::CorruptRing(_) => Errno::EINVAL,
        }
        .0
    }
}
