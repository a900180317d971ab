//! Errors of control verbs. Every back end returns the same value for the same mistake.

use crate::cm::CmState;
use crate::{CmId, CorruptRing, Errno, QpAttributeMask, QpState, Verb};
use core::net::IpAddr;
use softhca_wire::Qpn;
use thiserror::Error;

/// Text of the program. A name of its own keeps serde from borrowing it from its input.
type StaticStr = &'static str;

/// A kind of resource, for messages.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
    /// Its name in messages.
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

/// Why the card rejected a call: a control verb, or a work request that exceeds a limit.
///
/// A daemon sends it as it is, so that every back end returns the same value for the same mistake.
#[cfg_attr(feature = "control", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum VerbsError {
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
    /// The HCA or this client has as many resources of a kind as it may have.
    #[error("no more than {limit} {}s", .resource.name())]
    Exhausted {
        /// The kind.
        resource: Resource,
        /// The limit.
        limit: u32,
    },
    /// A number above a limit of the queue, the HCA or the client.
    #[error("{what} is {value}, the limit is {limit}")]
    LimitExceeded {
        /// The quantity.
        #[cfg_attr(feature = "control", serde(deserialize_with = "static_text"))]
        what: StaticStr,
        /// The value given.
        value: u64,
        /// The limit.
        limit: u64,
    },
    /// An invalid value.
    #[error("{what}: {why}")]
    Invalid {
        /// The operand.
        #[cfg_attr(feature = "control", serde(deserialize_with = "static_text"))]
        what: StaticStr,
        /// The reason.
        #[cfg_attr(feature = "control", serde(deserialize_with = "static_text"))]
        why: StaticStr,
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
    /// The client corrupted its ring.
    #[error("the client's ring is corrupt: {0}")]
    CorruptRing(#[from] CorruptRing),
    /// Another identifier of connection management has the port.
    #[error("port {port} of the {space} port space is in use on this host")]
    PortInUse {
        /// The name of the port space.
        #[cfg_attr(feature = "control", serde(deserialize_with = "static_text"))]
        space: StaticStr,
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
        #[cfg_attr(feature = "control", serde(deserialize_with = "static_text"))]
        call: StaticStr,
    },
    /// A fault rule of the user failed the call.
    #[error("{verb} fails with {errno}: injected by fault rule {rule}")]
    Injected {
        /// The call.
        verb: Verb,
        /// The error.
        errno: Errno,
        /// The number of the rule.
        rule: u32,
    },
    /// A fault rule of the user ends the process in this call.
    #[error("the process ends in {verb}: injected by fault rule {rule}")]
    InjectedKill {
        /// The call.
        verb: Verb,
        /// The number of the rule.
        rule: u32,
    },
    /// The device failed.
    #[error("the device failed (DEVICE_FATAL): close it and open it again")]
    DeviceFailed,
    /// The device was removed.
    #[error("the device was removed: it can be opened when it returns")]
    DeviceRemoved,
    /// The HCA does not support this.
    #[error("{what} is not supported")]
    Unsupported {
        /// The feature.
        #[cfg_attr(feature = "control", serde(deserialize_with = "static_text"))]
        what: StaticStr,
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

/// Decodes text that every build of this protocol version contains. Each distinct text is allocated once.
#[cfg(feature = "control")]
fn static_text<'de, D: serde::Deserializer<'de>>(input: D) -> Result<&'static str, D::Error> {
    use alloc::collections::BTreeSet;
    use alloc::string::String;
    static TEXTS: std::sync::Mutex<BTreeSet<&'static str>> = std::sync::Mutex::new(BTreeSet::new());
    let text: String = serde::Deserialize::deserialize(input)?;
    let mut texts = TEXTS.lock().expect("no panic under the lock");
    if let Some(known) = texts.get(text.as_str()) {
        return Ok(known);
    }
    let text: &'static str = text.leak();
    texts.insert(text);
    Ok(text)
}
