//! What resources are created with, and what may be known of them.

use crate::{CqId, PdId, QpAttributes, QpState, QpType, SrqId, XrcdId};
use softhca_wire::{Psn, Qpn};

/// What a queue pair is created with.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpInitAttributes {
    /// What it is.
    pub qp_type: QpType,
    /// Its protection domain; an XRC target has none of its own.
    pub pd: Option<PdId>,
    /// Where sends complete.
    pub send_cq: Option<CqId>,
    /// Where receives complete.
    pub recv_cq: Option<CqId>,
    /// Where receives come from, if not from its own queue.
    pub srq: Option<SrqId>,
    /// The domain of an XRC target.
    pub xrcd: Option<XrcdId>,
    /// Every send reports its success.
    pub sq_sig_all: bool,
}

/// What a shared receive queue is created with.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqInitAttributes {
    /// Its protection domain.
    pub pd: PdId,
    /// Raise an event when fewer receives than this wait; zero for none.
    pub srq_limit: u32,
    /// Of XRC: where receives complete, and the domain that lets senders in.
    pub xrc: Option<(CqId, XrcdId)>,
}

/// What a caller may know of a shared receive queue.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqAttributes {
    /// Receives that may wait.
    pub max_wr: u32,
    /// Scatter entries of each.
    pub max_sge: u32,
    /// The armed limit; zero if there is none.
    pub srq_limit: u32,
}

/// Which of the two kinds of memory window.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryWindowType {
    /// Bound by a verb; the card chooses the key; any queue pair of the domain.
    Type1,
    /// Bound by a work request; the application chooses the key; one queue pair.
    Type2,
}

/// What a caller may know of a queue pair.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpSnapshot {
    /// Its number.
    pub qpn: Qpn,
    /// What it is.
    pub qp_type: QpType,
    /// The state that it is in.
    pub state: QpState,
    /// What was set.
    pub attributes: QpAttributes,
    /// The next PSN that it sends.
    pub next_psn: Psn,
    /// The PSN that it expects.
    pub expected_psn: Psn,
    /// Work requests that were taken and have not completed.
    pub outstanding: usize,
    /// The send queue is draining and has not finished.
    pub sq_draining: bool,
}

/// The state of a port, as far as a card without a subnet manager has one.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum PortState {
    /// Its link carries nothing.
    Down,
    /// It sends and receives.
    #[default]
    Active,
}

/// An asynchronous event of the verbs. The names are those of `enum ibv_event_type`.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the names are those of every verbs text")]
pub enum AsyncEvent {
    CompletionQueueError(CqId),
    QueuePairFatal(Qpn),
    QueuePairRequestError(Qpn),
    QueuePairAccessError(Qpn),
    CommunicationEstablished(Qpn),
    SendQueueDrained(Qpn),
    LastWorkRequestReached(Qpn),
    SharedReceiveQueueError(SrqId),
    SharedReceiveQueueLimit(SrqId),
    PortActive,
    PortDown,
    GidChange,
    DeviceFatal,
}

impl AsyncEvent {
    /// The names of all of them.
    pub const NAMES: [&str; 13] = [
        "CQ_ERR",
        "QP_FATAL",
        "QP_REQ_ERR",
        "QP_ACCESS_ERR",
        "COMM_EST",
        "SQ_DRAINED",
        "QP_LAST_WQE_REACHED",
        "SRQ_ERR",
        "SRQ_LIMIT_REACHED",
        "PORT_ACTIVE",
        "PORT_ERR",
        "GID_CHANGE",
        "DEVICE_FATAL",
    ];

    /// Its name in `enum ibv_event_type`, without the prefix.
    pub const fn name(&self) -> &'static str {
        Self::NAMES[match self {
            AsyncEvent::CompletionQueueError(_) => 0,
            AsyncEvent::QueuePairFatal(_) => 1,
            AsyncEvent::QueuePairRequestError(_) => 2,
            AsyncEvent::QueuePairAccessError(_) => 3,
            AsyncEvent::CommunicationEstablished(_) => 4,
            AsyncEvent::SendQueueDrained(_) => 5,
            AsyncEvent::LastWorkRequestReached(_) => 6,
            AsyncEvent::SharedReceiveQueueError(_) => 7,
            AsyncEvent::SharedReceiveQueueLimit(_) => 8,
            AsyncEvent::PortActive => 9,
            AsyncEvent::PortDown => 10,
            AsyncEvent::GidChange => 11,
            AsyncEvent::DeviceFatal => 12,
        }]
    }

    /// The queue pair that it is about, if it is about one.
    pub const fn qpn(&self) -> Option<Qpn> {
        match *self {
            AsyncEvent::QueuePairFatal(qp)
            | AsyncEvent::QueuePairRequestError(qp)
            | AsyncEvent::QueuePairAccessError(qp)
            | AsyncEvent::CommunicationEstablished(qp)
            | AsyncEvent::SendQueueDrained(qp)
            | AsyncEvent::LastWorkRequestReached(qp) => Some(qp),
            _ => None,
        }
    }
}
