//! The words of connection management between an application and a card: calls, their replies, events.
//!
//! They are those of librdmacm, without its pointers. A [`Call`] is what the application asks of the card's
//! connection manager, an [`Event`] what it hears; where the card is does not matter to either.

use crate::{AddressVector, CmChannelId, CmId, Limits, Modify, QpKind, State};
use alloc::vec::Vec;
use core::fmt;
use core::net::{IpAddr, SocketAddr};
pub use softhca_wire::cm::{PortSpace, RejectReason};
use softhca_wire::{Gid, Mtu, Qpn, QueueKey};

/// The key of datagram queue pairs that the RDMA CM connects: `RDMA_UDP_QKEY`.
pub const DATAGRAM_KEY: QueueKey = QueueKey(0x0123_4567);
/// The most bytes of private data in a connect request, behind the addresses.
pub const REQUEST_DATA: usize = 56;
/// The most bytes of private data in a request of datagrams, behind the addresses.
pub const SERVICE_REQUEST_DATA: usize = 180;
/// The most bytes of private data in an acceptance.
pub const REPLY_DATA: usize = 196;
/// The most bytes of private data in an acceptance of datagrams.
pub const SERVICE_REPLY_DATA: usize = 136;
/// The most bytes of private data in a refusal.
pub const REJECT_DATA: usize = 148;

/// What a side of a connection offers and asks for.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameters {
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
    pub shared_receive_queue: bool,
    /// The queue pair that is connected.
    pub queue_pair: Qpn,
    /// The key of a datagram queue pair, if it is not [`DATAGRAM_KEY`].
    pub queue_key: Option<QueueKey>,
}

impl Default for Parameters {
    fn default() -> Parameters {
        Parameters {
            private_data: Vec::new(),
            responder_resources: 1,
            initiator_depth: 1,
            flow_control: false,
            retry_count: 7,
            rnr_retry_count: 7,
            shared_receive_queue: false,
            queue_pair: Qpn::default(),
            queue_key: None,
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
    OnlyIpv6(bool),
    /// The exponent of 4.096 µs that an acknowledgement of the connection may take.
    AckTimeout(u8),
}

/// What an application asks of the connection manager.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is the call of librdmacm of its name, with the operands of that call")]
pub enum Call {
    CreateChannel,
    DestroyChannel(CmChannelId),
    /// Takes the oldest event of a channel.
    Take(CmChannelId),
    Create {
        channel: CmChannelId,
        space: PortSpace,
        /// RC or UC for connections; the spaces of datagrams imply UD.
        kind: QpKind,
    },
    Destroy(CmId),
    /// Moves an identifier and its events to another channel.
    Migrate {
        id: CmId,
        channel: CmChannelId,
    },
    SetOption {
        id: CmId,
        option: CmOption,
    },
    Bind {
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
        mtu: Mtu,
    },
    Listen {
        id: CmId,
        /// Requests that may wait for the application; zero for as many as the card allows.
        backlog: u32,
    },
    Connect {
        id: CmId,
        parameters: Parameters,
    },
    Accept {
        id: CmId,
        parameters: Parameters,
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
    Attributes {
        id: CmId,
        state: State,
    },
    Query(CmId),
    Join {
        id: CmId,
        group: IpAddr,
    },
    Leave {
        id: CmId,
        group: IpAddr,
    },
}

/// How a queue pair follows its connection: the states that it goes through, each with what the connection manager
/// knows, and what the connection manager is asked for then. It stops at what is refused.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advance {
    /// The identifier.
    pub id: CmId,
    /// Its queue pair.
    pub queue_pair: Qpn,
    /// The states. One that is in RESET or in the error state already need not go to the error state.
    pub states: Vec<State>,
    /// Of a side that accepts: the reads and atomics that it serves at a time, and the most that it wants outstanding.
    pub reads: Option<(u8, u8)>,
    /// What is done then.
    pub then: Then,
}

/// The call that a queue pair is made ready for.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is the call of its name")]
pub enum Then {
    Nothing,
    Accept(Parameters),
    Establish,
    Disconnect,
}

impl Advance {
    /// Takes a queue pair through these states.
    pub fn new(id: CmId, queue_pair: Qpn, states: &[State], then: Then) -> Advance {
        Advance { id, queue_pair, states: states.into(), reads: None, then }
    }

    /// The attributes that the connection manager tells, within what this side serves and wants.
    pub fn adjust(&self, mut attributes: Modify) -> Modify {
        if let Some((served, wanted)) = self.reads {
            attributes.max_reads_in = attributes.max_reads_in.map(|_| served.min(Limits::CARD.reads));
            attributes.max_reads_out = attributes.max_reads_out.map(|offered| offered.min(wanted));
        }
        attributes
    }

    /// What is asked for when the queue pair is there.
    pub fn last_call(&self) -> Option<Call> {
        match &self.then {
            Then::Nothing => None,
            Then::Accept(parameters) => Some(Call::Accept { id: self.id, parameters: parameters.clone() }),
            Then::Establish => Some(Call::Establish(self.id)),
            Then::Disconnect => Some(Call::Disconnect(self.id)),
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
    Channel(CmChannelId),
    /// An identifier was made.
    Id(CmId),
    /// What was asked for.
    View(View),
    /// What takes the queue pair there.
    Attributes(Modify),
    /// The oldest event, if there is one, and how many are left.
    Event(Option<Event>, u32),
}

/// What happened to an identifier. The numbers are those of `enum rdma_cm_event_type`.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
#[allow(missing_docs, reason = "the names are those of librdmacm")]
pub enum EventKind {
    AddressResolved = 0,
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
    AddressChange = 14,
    TimewaitExit = 15,
}

impl EventKind {
    /// The name that `rdma_event_str` gives it.
    pub const fn name(self) -> &'static str {
        match self {
            EventKind::AddressResolved => "RDMA_CM_EVENT_ADDR_RESOLVED",
            EventKind::AddressError => "RDMA_CM_EVENT_ADDR_ERROR",
            EventKind::RouteResolved => "RDMA_CM_EVENT_ROUTE_RESOLVED",
            EventKind::RouteError => "RDMA_CM_EVENT_ROUTE_ERROR",
            EventKind::ConnectRequest => "RDMA_CM_EVENT_CONNECT_REQUEST",
            EventKind::ConnectResponse => "RDMA_CM_EVENT_CONNECT_RESPONSE",
            EventKind::ConnectError => "RDMA_CM_EVENT_CONNECT_ERROR",
            EventKind::Unreachable => "RDMA_CM_EVENT_UNREACHABLE",
            EventKind::Rejected => "RDMA_CM_EVENT_REJECTED",
            EventKind::Established => "RDMA_CM_EVENT_ESTABLISHED",
            EventKind::Disconnected => "RDMA_CM_EVENT_DISCONNECTED",
            EventKind::DeviceRemoval => "RDMA_CM_EVENT_DEVICE_REMOVAL",
            EventKind::MulticastJoin => "RDMA_CM_EVENT_MULTICAST_JOIN",
            EventKind::MulticastError => "RDMA_CM_EVENT_MULTICAST_ERROR",
            EventKind::AddressChange => "RDMA_CM_EVENT_ADDR_CHANGE",
            EventKind::TimewaitExit => "RDMA_CM_EVENT_TIMEWAIT_EXIT",
        }
    }
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What the peer offers and asks for, seen from the side that hears it: its `initiator_depth` is how many
/// reads this side may have to serve, and is told as `responder_resources`.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each field is that of `struct rdma_conn_param`")]
pub struct Offer {
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: bool,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub shared_receive_queue: bool,
    pub queue_pair: Qpn,
}

/// Where datagrams go: `struct rdma_ud_param`.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramTarget {
    /// The way there.
    pub path: AddressVector,
    /// The queue pair.
    pub queue_pair: Qpn,
    /// The key to send with.
    pub queue_key: QueueKey,
}

/// What an event tells besides its kind.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Nothing.
    None,
    /// Of a connection.
    Connection(Offer),
    /// Of datagrams, and of multicast groups.
    Datagram(DatagramTarget),
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
    pub kind: EventKind,
    /// Zero; a negative errno; or, of a refusal, its reason.
    pub status: i32,
    /// What the peer's application sent, filled up with zeros where the message has a fixed size.
    pub private_data: Vec<u8>,
    /// The rest.
    pub detail: Detail,
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
    RequestSent,
    /// A REQ came, and waits for the application.
    RequestReceived,
    /// A REP is out.
    ReplySent,
    /// A REP came, and waits until the application's queue pair is ready.
    ReplyReceived,
    /// The connection stands.
    Established,
    /// A DREQ is out.
    DisconnectSent,
    /// A DREQ came, and waits for the application.
    DisconnectReceived,
    /// Over, until no packet of it can be on its way.
    TimeWait,
    /// A SIDR_REQ is out.
    ServiceRequestSent,
    /// A SIDR_REQ came, and waits for the application.
    ServiceRequestReceived,
    /// The other side's datagram queue pair is known, or this side's was told.
    Resolved,
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
            CmState::RequestSent => "REQ sent",
            CmState::RequestReceived => "REQ received",
            CmState::ReplySent => "REP sent",
            CmState::ReplyReceived => "REP received",
            CmState::Established => "established",
            CmState::DisconnectSent => "DREQ sent",
            CmState::DisconnectReceived => "DREQ received",
            CmState::TimeWait => "time-wait",
            CmState::ServiceRequestSent => "SIDR_REQ sent",
            CmState::ServiceRequestReceived => "SIDR_REQ received",
            CmState::Resolved => "resolved",
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
pub struct View {
    /// Its state.
    pub state: CmState,
    /// Its port space.
    pub space: PortSpace,
    /// The transport of its queue pair.
    pub kind: QpKind,
    /// Its own address, if it has one.
    pub local: Option<SocketAddr>,
    /// The other side's, if there is one.
    pub peer: Option<SocketAddr>,
    /// The GID that it sends from.
    pub source_gid: Gid,
    /// The path to the other side.
    pub path: AddressVector,
    /// The path MTU.
    pub mtu: Mtu,
    /// The queue pair at the other side.
    pub peer_queue_pair: Qpn,
}
