//! The words of connection management between an application and a card: calls, their replies, events.
//!
//! They are those of librdmacm, without its pointers. A [`Call`] is what the application asks of the card's
//! connection manager, an [`Event`] what it hears; where the card is does not matter to either.

use crate::{AddressVector, CmChannelId, CmId, DeviceLimits, ModifyQp, QpState, QpType};
use alloc::vec::Vec;
use core::fmt;
use core::net::{IpAddr, SocketAddr};
pub use softhca_wire::cm::{PortSpace, RejectReason};
use softhca_wire::{Gid, Mtu, Qpn, QueueKey};

/// The key of datagram queue pairs that the RDMA CM connects: `RDMA_UDP_QKEY`.
pub const RDMA_UDP_QKEY: QueueKey = QueueKey(0x0123_4567);
/// The most bytes of private data in a connect request, behind the addresses.
pub const MAX_REQ_PRIVATE_DATA: usize = 56;
/// The most bytes of private data in a request of datagrams, behind the addresses.
pub const MAX_SIDR_REQ_PRIVATE_DATA: usize = 180;
/// The most bytes of private data in an acceptance.
pub const MAX_REP_PRIVATE_DATA: usize = 196;
/// The most bytes of private data in an acceptance of datagrams.
pub const MAX_SIDR_REP_PRIVATE_DATA: usize = 136;
/// The most bytes of private data in a refusal.
pub const MAX_REJ_PRIVATE_DATA: usize = 148;

/// What a side of a connection offers and asks for.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionParameters {
    /// For the other side's application.
    pub private_data: Vec<u8>,
    /// How many reads and atomics of the peer this side serves at a time. More than the card can do is taken
    /// as what the card can do.
    pub responder_resources: u8,
    /// How many reads and atomics this side wants to have outstanding. Likewise.
    pub initiator_depth: u8,
    /// Whether AETH credits are honoured.
    pub flow_control: bool,
    /// How often to retransmit.
    pub retry_count: u8,
    /// How often the peer tries again when no receive is posted; 7 for ever.
    pub rnr_retry_count: u8,
    /// Whether the queue pair has a shared receive queue.
    pub srq: bool,
    /// The queue pair that is connected.
    pub qpn: Qpn,
    /// The key of a datagram queue pair, if it is not [`DATAGRAM_KEY`].
    pub qkey: Option<QueueKey>,
}

impl Default for ConnectionParameters {
    fn default() -> ConnectionParameters {
        ConnectionParameters {
            private_data: Vec::new(),
            responder_resources: 1,
            initiator_depth: 1,
            flow_control: false,
            retry_count: 7,
            rnr_retry_count: 7,
            srq: false,
            qpn: Qpn::default(),
            qkey: None,
        }
    }
}

/// An option of an identifier.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CmOption {
    /// The traffic class of messages and of the connection.
    TypeOfService(u8),
    /// Whether an address that another identifier has may be bound.
    ReuseAddress(bool),
    /// Whether an IPv6 wildcard leaves IPv4 out.
    AfOnly(bool),
    /// The exponent of 4.096 µs that an acknowledgement of the connection may take.
    AckTimeout(u8),
}

/// What an application asks of the connection manager.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is the call of librdmacm of its name, with the operands of that call")]
pub enum Command {
    CreateEventChannel,
    DestroyEventChannel(CmChannelId),
    /// Takes the oldest event of a channel.
    GetEvent(CmChannelId),
    CreateId {
        channel: CmChannelId,
        port_space: PortSpace,
        /// RC or UC for connections; the spaces of datagrams imply UD.
        qp_type: QpType,
    },
    DestroyId(CmId),
    /// Moves an identifier and its events to another channel.
    MigrateId {
        id: CmId,
        channel: CmChannelId,
    },
    SetOption {
        id: CmId,
        option: CmOption,
    },
    BindAddress {
        id: CmId,
        address: SocketAddr,
    },
    ResolveAddress {
        id: CmId,
        source: Option<SocketAddr>,
        destination: SocketAddr,
    },
    ResolveRoute {
        id: CmId,
        /// The largest path MTU of the network.
        path_mtu: Mtu,
    },
    Listen {
        id: CmId,
        /// Requests that may wait for the application; zero for as many as the card allows.
        backlog: u32,
    },
    Connect {
        id: CmId,
        parameters: ConnectionParameters,
    },
    Accept {
        id: CmId,
        parameters: ConnectionParameters,
    },
    Reject {
        id: CmId,
        reason: RejectReason,
        private_data: Vec<u8>,
    },
    /// The queue pair of an accepted request is ready, or heard from its peer: `rdma_establish`, `rdma_notify`.
    Establish(CmId),
    Disconnect(CmId),
    /// What takes the queue pair to a state: `rdma_init_qp_attr`.
    InitQpAttributes {
        id: CmId,
        state: QpState,
    },
    QueryId(CmId),
    JoinMulticast {
        id: CmId,
        group: IpAddr,
    },
    LeaveMulticast {
        id: CmId,
        group: IpAddr,
    },
}

/// How a queue pair follows its connection: the states that it goes through, each with what the connection manager
/// knows, and what the connection manager is asked for then. It stops at what is refused.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QpTransition {
    /// The identifier.
    pub id: CmId,
    /// Its queue pair.
    pub qpn: Qpn,
    /// The states. One that is in RESET or in the error state already need not go to the error state.
    pub states: Vec<QpState>,
    /// Of a side that accepts: the reads and atomics that it serves at a time, and the most that it wants outstanding.
    pub rd_atomic: Option<(u8, u8)>,
    /// What is done then.
    pub follow_up: FollowUp,
}

/// The call that a queue pair is made ready for.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is the call of its name")]
pub enum FollowUp {
    None,
    Accept(ConnectionParameters),
    Establish,
    Disconnect,
}

impl QpTransition {
    /// Takes a queue pair through these states.
    pub fn new(id: CmId, queue_pair: Qpn, states: &[QpState], then: FollowUp) -> QpTransition {
        QpTransition { id, qpn: queue_pair, states: states.into(), rd_atomic: None, follow_up: then }
    }

    /// The attributes that the connection manager tells, within what this side serves and wants.
    pub fn limit_rd_atomic(&self, mut attributes: ModifyQp) -> ModifyQp {
        if let Some((served, wanted)) = self.rd_atomic {
            attributes.max_dest_rd_atomic =
                attributes.max_dest_rd_atomic.map(|_| served.min(DeviceLimits::HCA.max_qp_rd_atom));
            attributes.max_rd_atomic = attributes.max_rd_atomic.map(|offered| offered.min(wanted));
        }
        attributes
    }

    /// What is asked for when the queue pair is there.
    pub fn final_command(&self) -> Option<Command> {
        match &self.follow_up {
            FollowUp::None => None,
            FollowUp::Accept(parameters) => {
                Some(Command::Accept { id: self.id, parameters: parameters.clone() })
            }
            FollowUp::Establish => Some(Command::Establish(self.id)),
            FollowUp::Disconnect => Some(Command::Disconnect(self.id)),
        }
    }
}

/// What the connection manager answers.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant, reason = "one at a time, and short-lived")]
pub enum Reply {
    /// It is done, or under way: an event will tell.
    Done,
    /// A channel was made.
    EventChannel(CmChannelId),
    /// An identifier was made.
    Id(CmId),
    /// What was asked for.
    Query(IdSnapshot),
    /// What takes the queue pair there.
    QpAttributes(ModifyQp),
    /// The oldest event, if there is one, and how many are left.
    Event(Option<Event>, u32),
}

/// What happened to an identifier. The numbers are those of `enum rdma_cm_event_type`.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
#[allow(missing_docs, reason = "the names are those of librdmacm")]
pub enum EventType {
    #[cfg_attr(feature = "serde", serde(rename = "addr-resolved"))]
    AddressResolved = 0,
    #[cfg_attr(feature = "serde", serde(rename = "addr-error"))]
    AddressError = 1,
    RouteResolved = 2,
    RouteError = 3,
    ConnectRequest = 4,
    ConnectResponse = 5,
    ConnectError = 6,
    Unreachable = 7,
    Rejected = 8,
    Established = 9,
    Disconnected = 10,
    DeviceRemoval = 11,
    MulticastJoin = 12,
    MulticastError = 13,
    #[cfg_attr(feature = "serde", serde(rename = "addr-change"))]
    AddressChange = 14,
    TimewaitExit = 15,
}

impl EventType {
    /// The name that `rdma_event_str` gives it.
    pub const fn name(self) -> &'static str {
        match self {
            EventType::AddressResolved => "RDMA_CM_EVENT_ADDR_RESOLVED",
            EventType::AddressError => "RDMA_CM_EVENT_ADDR_ERROR",
            EventType::RouteResolved => "RDMA_CM_EVENT_ROUTE_RESOLVED",
            EventType::RouteError => "RDMA_CM_EVENT_ROUTE_ERROR",
            EventType::ConnectRequest => "RDMA_CM_EVENT_CONNECT_REQUEST",
            EventType::ConnectResponse => "RDMA_CM_EVENT_CONNECT_RESPONSE",
            EventType::ConnectError => "RDMA_CM_EVENT_CONNECT_ERROR",
            EventType::Unreachable => "RDMA_CM_EVENT_UNREACHABLE",
            EventType::Rejected => "RDMA_CM_EVENT_REJECTED",
            EventType::Established => "RDMA_CM_EVENT_ESTABLISHED",
            EventType::Disconnected => "RDMA_CM_EVENT_DISCONNECTED",
            EventType::DeviceRemoval => "RDMA_CM_EVENT_DEVICE_REMOVAL",
            EventType::MulticastJoin => "RDMA_CM_EVENT_MULTICAST_JOIN",
            EventType::MulticastError => "RDMA_CM_EVENT_MULTICAST_ERROR",
            EventType::AddressChange => "RDMA_CM_EVENT_ADDR_CHANGE",
            EventType::TimewaitExit => "RDMA_CM_EVENT_TIMEWAIT_EXIT",
        }
    }
}

impl fmt::Display for EventType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What the peer offers and asks for, seen from the side that hears it: its `initiator_depth` is how many
/// reads this side may have to serve, and is told as `responder_resources`.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each field is that of `struct rdma_conn_param`")]
pub struct PeerParameters {
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: bool,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: bool,
    pub qpn: Qpn,
}

/// Where datagrams go: `struct rdma_ud_param`.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdParameters {
    /// The way there.
    pub address_vector: AddressVector,
    /// The queue pair.
    pub qpn: Qpn,
    /// The key to send with.
    pub qkey: QueueKey,
}

/// What an event tells besides its kind.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventParameters {
    /// Nothing.
    None,
    /// Of a connection.
    Connection(PeerParameters),
    /// Of datagrams, and of multicast groups.
    Ud(UdParameters),
}

/// An event of an identifier.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The identifier: a new one with a connect request.
    pub id: CmId,
    /// The listener that a connect request came to.
    pub listener: Option<CmId>,
    /// What happened.
    pub event_type: EventType,
    /// Zero; a negative errno; or, of a refusal, its reason.
    pub status: i32,
    /// What the peer's application sent, filled up with zeros where the message has a fixed size.
    pub private_data: Vec<u8>,
    /// The rest.
    pub parameters: EventParameters,
}

/// The state of an identifier.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CmState {
    /// New.
    Idle,
    /// It has an address.
    Bound,
    /// It knows how to reach its destination.
    AddressResolved,
    /// It knows the path.
    RouteResolved,
    /// It takes requests.
    Listening,
    /// A REQ is out.
    ReqSent,
    /// A REQ came, and waits for the application.
    ReqReceived,
    /// A REP is out.
    RepSent,
    /// A REP came, and waits until the application's queue pair is ready.
    RepReceived,
    /// The connection stands.
    Established,
    /// A DREQ is out.
    DreqSent,
    /// A DREQ came, and waits for the application.
    DreqReceived,
    /// Over, until no packet of it can be on its way.
    TimeWait,
    /// A SIDR_REQ is out.
    SidrReqSent,
    /// A SIDR_REQ came, and waits for the application.
    SidrReqReceived,
    /// The other side's datagram queue pair is known, or this side's was told.
    SidrResolved,
    /// Refused, given up, or over.
    Closed,
}

impl CmState {
    /// The name that traces use.
    pub const fn name(self) -> &'static str {
        match self {
            CmState::Idle => "idle",
            CmState::Bound => "bound",
            CmState::AddressResolved => "address resolved",
            CmState::RouteResolved => "route resolved",
            CmState::Listening => "listening",
            CmState::ReqSent => "REQ sent",
            CmState::ReqReceived => "REQ received",
            CmState::RepSent => "REP sent",
            CmState::RepReceived => "REP received",
            CmState::Established => "established",
            CmState::DreqSent => "DREQ sent",
            CmState::DreqReceived => "DREQ received",
            CmState::TimeWait => "time-wait",
            CmState::SidrReqSent => "SIDR_REQ sent",
            CmState::SidrReqReceived => "SIDR_REQ received",
            CmState::SidrResolved => "resolved",
            CmState::Closed => "closed",
        }
    }
}

impl fmt::Display for CmState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What may be known of an identifier.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdSnapshot {
    /// Its state.
    pub state: CmState,
    /// Its port space.
    pub port_space: PortSpace,
    /// The transport of its queue pair.
    pub qp_type: QpType,
    /// Its own address, if it has one.
    pub local: Option<SocketAddr>,
    /// The other side's, if there is one.
    pub peer: Option<SocketAddr>,
    /// The GID that it sends from.
    pub sgid: Gid,
    /// The path to the other side.
    pub address_vector: AddressVector,
    /// The path MTU.
    pub path_mtu: Mtu,
    /// The queue pair at the other side.
    pub remote_qpn: Qpn,
}
