//! The attributes that resources are created with, and the results of queries.

use crate::{CqId, PdId, QpAttributes, QpState, QpType, SrqId, XrcdId};
use core::fmt;
use softhca_wire::{Psn, Qpn};

/// The attributes that a queue pair is created with (`struct ibv_qp_init_attr`).
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpInitAttributes {
    /// The type.
    pub qp_type: QpType,
    /// The protection domain; an XRC target has none.
    pub pd: Option<PdId>,
    /// The completion queue of the send queue.
    pub send_cq: Option<CqId>,
    /// The completion queue of the receive queue.
    pub recv_cq: Option<CqId>,
    /// The shared receive queue that replaces the receive queue.
    pub srq: Option<SrqId>,
    /// The XRC domain of an XRC target.
    pub xrcd: Option<XrcdId>,
    /// Every send work request generates a completion.
    pub sq_sig_all: bool,
}

/// The attributes that a shared receive queue is created with (`struct ibv_srq_init_attr`).
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqInitAttributes {
    /// The protection domain.
    pub pd: PdId,
    /// The limit: fewer WQEs than this raise an event. Zero disables it.
    pub srq_limit: u32,
    /// For an XRC SRQ: its completion queue and XRC domain.
    pub xrc: Option<(CqId, XrcdId)>,
}

/// The attributes of a shared receive queue (`struct ibv_srq_attr`).
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqAttributes {
    /// The most WQEs.
    pub max_wr: u32,
    /// The most SGEs of a WQE.
    pub max_sge: u32,
    /// The armed limit; zero if it is disabled.
    pub srq_limit: u32,
}

/// The type of a memory window (`enum ibv_mw_type`).
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryWindowType {
    /// Bound by a verb. The HCA chooses the rkey. Any queue pair of the protection domain may use it.
    Type1,
    /// Bound by a work request. The application chooses the rkey. One queue pair may use it.
    Type2,
}

/// The result of `ibv_query_qp`.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpSnapshot {
    /// The queue pair number.
    pub qpn: Qpn,
    /// The type.
    pub qp_type: QpType,
    /// The state.
    pub state: QpState,
    /// The attributes.
    pub attributes: QpAttributes,
    /// The next PSN that the requester sends.
    pub next_psn: Psn,
    /// The PSN that the responder expects.
    pub expected_psn: Psn,
    /// The WQEs that the HCA has dequeued and not completed.
    pub outstanding: u32,
    /// The send queue is draining.
    pub sq_draining: bool,
}

/// The state of a port. An HCA without a subnet manager has only these two.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum PortState {
    /// The link is down.
    Down,
    /// The port sends and receives.
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
    LidChange,
    PkeyChange,
}

impl AsyncEvent {
    /// All names.
    pub const NAMES: [&str; 15] = [
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
        "LID_CHANGE",
        "PKEY_CHANGE",
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
            AsyncEvent::LidChange => 13,
            AsyncEvent::PkeyChange => 14,
        }]
    }

    /// The cause of the event and what to do about it.
    pub const fn advice(&self) -> &'static str {
        match self {
            AsyncEvent::CompletionQueueError(_) => {
                "the completion queue overflowed and its queue pairs are in ERR: create it with an entry for every work \
                 request that can be outstanding, or poll more often"
            }
            AsyncEvent::QueuePairFatal(_) => {
                "the queue pair is in ERR: a packet is lost and recovery is fatal, or its completion queue failed"
            }
            AsyncEvent::QueuePairRequestError(_) => {
                "the peer sent an invalid request and the queue pair is in ERR: the receive may be too small"
            }
            AsyncEvent::QueuePairAccessError(_) => {
                "the peer used a wrong rkey, range or access and the queue pair is in ERR: check the rkey, and the \
                 REMOTE_ access flags of region and queue pair"
            }
            AsyncEvent::CommunicationEstablished(_) => "the first message arrived before RTS",
            AsyncEvent::SendQueueDrained(_) => "all outstanding sends have completed",
            AsyncEvent::LastWorkRequestReached(_) => {
                "the queue pair takes no more receives from its shared receive queue"
            }
            AsyncEvent::SharedReceiveQueueError(_) => "the shared receive queue failed",
            AsyncEvent::SharedReceiveQueueLimit(_) => {
                "fewer receives are posted than the limit: post more and set it again"
            }
            AsyncEvent::PortActive => "the link is up",
            AsyncEvent::PortDown => "the link is down",
            AsyncEvent::GidChange => "the GID table changed",
            AsyncEvent::DeviceFatal => "the device is gone: open it again",
            AsyncEvent::LidChange => "the LID of the port changed",
            AsyncEvent::PkeyChange => "the P_Key table changed",
        }
    }

    /// The queue pair of a queue pair event.
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

/// One line: the event, its object, its cause and its remedy.
impl fmt::Display for AsyncEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match *self {
            AsyncEvent::CompletionQueueError(cq) => write!(f, " of completion queue {:#x}", cq.0)?,
            AsyncEvent::SharedReceiveQueueError(srq) | AsyncEvent::SharedReceiveQueueLimit(srq) => {
                write!(f, " of shared receive queue {:#x}", srq.0)?;
            }
            _ => {}
        }
        if let Some(qpn) = self.qpn() {
            write!(f, " of queue pair {qpn}")?;
        }
        write!(f, ": {}", self.advice())
    }
}
