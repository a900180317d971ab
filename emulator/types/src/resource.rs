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

macro_rules! async_events {
    ($($variant:ident $(($object:ty))? $name:literal $advice:literal;)*) => {
        /// An asynchronous event of the verbs. The names are those of `enum ibv_event_type`.
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[allow(missing_docs, reason = "the names are those of every verbs text")]
        pub enum AsyncEvent { $( $variant $(($object))?, )* }

        impl AsyncEvent {
            /// All names.
            pub const NAMES: [&str; [$($name),*].len()] = [$($name),*];

            /// Its name in `enum ibv_event_type`, without the prefix.
            pub const fn name(&self) -> &'static str {
                match self { $( AsyncEvent::$variant { .. } => $name, )* }
            }

            /// The cause of the event and what to do about it.
            pub const fn advice(&self) -> &'static str {
                match self { $( AsyncEvent::$variant { .. } => $advice, )* }
            }
        }
    };
}

async_events! {
    CompletionQueueError(CqId) "CQ_ERR"
        "the completion queue overflowed and its queue pairs are in ERR: create it with an entry for every work request \
         that can be outstanding, or poll more often";
    QueuePairFatal(Qpn) "QP_FATAL"
        "the queue pair is in ERR: a packet is lost and recovery is fatal, or its completion queue failed";
    QueuePairRequestError(Qpn) "QP_REQ_ERR"
        "the peer sent an invalid request and the queue pair is in ERR: the receive may be too small";
    QueuePairAccessError(Qpn) "QP_ACCESS_ERR"
        "the peer used a wrong rkey, range or access and the queue pair is in ERR: check the rkey, and the REMOTE_ access \
         flags of region and queue pair";
    CommunicationEstablished(Qpn) "COMM_EST" "the first message arrived before RTS";
    SendQueueDrained(Qpn) "SQ_DRAINED" "all outstanding sends have completed";
    LastWorkRequestReached(Qpn) "QP_LAST_WQE_REACHED"
        "the queue pair takes no more receives from its shared receive queue";
    SharedReceiveQueueError(SrqId) "SRQ_ERR" "the shared receive queue failed";
    SharedReceiveQueueLimit(SrqId) "SRQ_LIMIT_REACHED"
        "fewer receives are posted than the limit: post more and set it again";
    PortActive "PORT_ACTIVE" "the link is up";
    PortDown "PORT_ERR" "the link is down";
    GidChange "GID_CHANGE" "the GID table changed";
    DeviceFatal "DEVICE_FATAL" "the device is gone: open it again";
    LidChange "LID_CHANGE" "the LID of the port changed";
    PkeyChange "PKEY_CHANGE" "the P_Key table changed";
    SmChange "SM_CHANGE" "another subnet manager manages the port";
    ClientReregister "CLIENT_REREGISTER" "the subnet manager asks programs to register again";
}

impl AsyncEvent {
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
