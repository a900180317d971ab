//! Values of connection-management events.

use core::fmt;
use softhca_types::cm::CmState;
pub use softhca_wire::cm::MessageKind as CmMessageKind;

/// The reason for dropping a CM message.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the sentences of `Display` say what each means")]
pub enum CmDropReason {
    NoSuchConnection,
    UnexpectedInState(CmState),
    BacklogFull { limit: u32 },
    TooManyIdentifiers,
    Duplicate,
    PeerMismatch,
    SendQueueFull,
}

impl fmt::Display for CmDropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CmDropReason::NoSuchConnection => f.write_str("unknown connection"),
            CmDropReason::UnexpectedInState(state) => write!(f, "the connection is in state {state}"),
            CmDropReason::BacklogFull { limit } => {
                write!(f, "the listener's backlog of {limit} requests is full")
            }
            CmDropReason::TooManyIdentifiers => f.write_str("the limit of connection identifiers is reached"),
            CmDropReason::Duplicate => f.write_str("duplicate message"),
            CmDropReason::PeerMismatch => f.write_str("the source is not the peer of the connection"),
            CmDropReason::SendQueueFull => f.write_str("the send queue of QP1 is full"),
        }
    }
}

/// The reason for the failure of a connection.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CmFailure {
    /// All tries timed out.
    TimedOut,
    /// The peer's port is dead.
    PeerUnreachable,
}
