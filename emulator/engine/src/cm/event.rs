//! Values of connection-management events.

use core::fmt;
use softhca_queue::cm::CmState;
use softhca_wire::cm::Message;

/// A kind of message, for events: one of [`Message`]'s names.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CmMessageKind(pub(super) &'static str);

impl CmMessageKind {
    pub(crate) fn new(message: &Message) -> CmMessageKind {
        CmMessageKind(message.name())
    }

    /// The name that the specification gives it.
    pub const fn name(self) -> &'static str {
        self.0
    }
}

impl fmt::Debug for CmMessageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// Why a message of the connection manager was not acted on.
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
            CmDropReason::NoSuchConnection => f.write_str("there is no such connection"),
            CmDropReason::UnexpectedInState(state) => write!(f, "the connection is in state {state}"),
            CmDropReason::BacklogFull { limit } => {
                write!(f, "{limit} requests wait already: the backlog of the listener is full")
            }
            CmDropReason::TooManyIdentifiers => f.write_str("the card has no identifier left"),
            CmDropReason::Duplicate => f.write_str("a duplicate"),
            CmDropReason::PeerMismatch => f.write_str("it comes from another host than the connection's"),
            CmDropReason::SendQueueFull => f.write_str("too many messages wait to be sent"),
        }
    }
}

/// Why a connection was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CmFailure {
    /// No answer came, in every try.
    TimedOut,
    /// The peer's port is gone.
    PeerUnreachable,
}
