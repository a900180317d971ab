//! Commands, replies and events of the connection manager.
//!
//! They follow librdmacm, without its pointers, and are the same for an embedded HCA and one in a daemon.

mod state;

pub use state::CmState;

use crate::{AddressVector, CmChannelId, CmId, DeviceLimits, ModifyQp, QpState, QpType, Resource, Verb};
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
pub use softhca_wire::cm::{PortSpace, RejectReason};
use softhca_wire::{Gid, Mtu, Qpn, QueueKey};

/// The Q_Key of UD queue pairs that the RDMA CM connects.
pub const RDMA_UDP_QKEY: QueueKey = QueueKey(0x0123_4567);
/// The most bytes of private data in a REQ, without the IP addressing header.
pub const MAX_REQ_PRIVATE_DATA: usize = 56;
/// The most bytes of private data in a SIDR_REQ, without the IP addressing header.
pub const MAX_SIDR_REQ_PRIVATE_DATA: usize = 180;
/// The most bytes of private data in a REP.
pub const MAX_REP_PRIVATE_DATA: usize = 196;
/// The most bytes of private data in a SIDR_REP.
pub const MAX_SIDR_REP_PRIVATE_DATA: usize = 136;
/// The most bytes of private data in a REJ.
pub const MAX_REJ_PRIVATE_DATA: usize = 148;

/// The parameters of a connection (`struct rdma_conn_param`).
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionParameters {
    /// Passed to the application of the peer.
    pub private_data: Vec<u8>,
    /// The most outstanding READs and atomics that this side accepts as responder. Reduced to the limit of the HCA.
    pub responder_resources: u8,
    /// The most outstanding READs and atomics that this side sends as requester. Reduced to the limit of the HCA.
    pub initiator_depth: u8,
    /// Whether end-to-end credits are used.
    pub flow_control: bool,
    /// The retry count of the connection.
    pub retry_count: u8,
    /// The RNR retry count of the peer; 7 means without limit.
    pub rnr_retry_count: u8,
    /// Whether the queue pair has a shared receive queue.
    pub srq: bool,
    /// The local queue pair.
    pub qpn: Qpn,
    /// The Q_Key of a UD queue pair, if it differs from [`RDMA_UDP_QKEY`].
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

/// An option of a communication identifier (`rdma_set_option`).
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CmOption {
    /// The traffic class of CM messages and of the connection.
    TypeOfService(u8),
    /// Whether an address that another identifier uses may be bound.
    ReuseAddress(bool),
    /// Whether an IPv6 wildcard address excludes IPv4.
    AfOnly(bool),
    /// The exponent of the ACK timeout of the connection.
    AckTimeout(u8),
}

/// A command to the connection manager.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is the call of librdmacm of its name, with the operands of that call")]
pub enum Command {
    CreateEventChannel,
    DestroyEventChannel(CmChannelId),
    /// Removes the oldest event of a channel.
    GetEvent(CmChannelId),
    CreateId {
        channel: CmChannelId,
        port_space: PortSpace,
        /// RC or UC for connections; datagram port spaces imply UD.
        qp_type: QpType,
    },
    DestroyId(CmId),
    /// Creates an identifier without events that reserves a port, for a process with a connection manager of its own.
    ReservePort {
        port_space: PortSpace,
        qp_type: QpType,
        reuse_address: bool,
        only_ipv6: bool,
        address: SocketAddr,
    },
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
        /// The most requests that wait for the application; zero means the limit of the HCA.
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
    /// The queue pair of an accepted request is ready or received a packet: `rdma_establish`, `rdma_notify`.
    Establish(CmId),
    Disconnect(CmId),
    /// The attributes that move the queue pair to a state: `rdma_init_qp_attr`.
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

impl Command {
    /// As [`crate::Command::call`].
    pub fn call(&self) -> Option<(Verb, Option<(Resource, u32)>)> {
        let (verb, id) = match self {
            Command::CreateEventChannel => return Some((Verb::RdmaCreateEventChannel, None)),
            Command::CreateId { .. } | Command::ReservePort { .. } => {
                return Some((Verb::RdmaCreateId, None));
            }
            Command::MigrateId { id, .. } => (Verb::RdmaMigrateId, id),
            Command::SetOption { id, .. } => (Verb::RdmaSetOption, id),
            Command::BindAddress { id, .. } => (Verb::RdmaBindAddr, id),
            Command::ResolveAddress { id, .. } => (Verb::RdmaResolveAddr, id),
            Command::ResolveRoute { id, .. } => (Verb::RdmaResolveRoute, id),
            Command::Listen { id, .. } => (Verb::RdmaListen, id),
            Command::Connect { id, .. } => (Verb::RdmaConnect, id),
            Command::Accept { id, .. } => (Verb::RdmaAccept, id),
            Command::Reject { id, .. } => (Verb::RdmaReject, id),
            Command::Establish(id) => (Verb::RdmaEstablish, id),
            Command::Disconnect(id) => (Verb::RdmaDisconnect, id),
            Command::JoinMulticast { id, .. } => (Verb::RdmaJoinMulticast, id),
            Command::LeaveMulticast { id, .. } => (Verb::RdmaLeaveMulticast, id),
            Command::DestroyEventChannel(_)
            | Command::GetEvent(_)
            | Command::DestroyId(_)
            | Command::InitQpAttributes { .. }
            | Command::QueryId(_) => return None,
        };
        Some((verb, Some((Resource::CmIdentifier, id.0))))
    }
}

/// Moves a queue pair through a list of states with the attributes of its connection, and then executes a command of
/// the connection manager. The first error ends the sequence.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QpTransition {
    /// The identifier.
    pub id: CmId,
    /// The queue pair.
    pub qpn: Qpn,
    /// The states. An error of the transition to the error state is ignored: the queue pair is in RESET or ERROR.
    pub states: Vec<QpState>,
    /// For the passive side: its `responder_resources` and the upper limit of its `initiator_depth`.
    pub rd_atomic: Option<(u8, u8)>,
    /// The command that follows.
    pub follow_up: FollowUp,
}

/// The command that follows the state transitions.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is the command of its name")]
pub enum FollowUp {
    None,
    Accept(ConnectionParameters),
    Establish,
    Disconnect,
}

impl QpTransition {
    /// Moves a queue pair through these states.
    pub fn new(id: CmId, queue_pair: Qpn, states: &[QpState], then: FollowUp) -> QpTransition {
        QpTransition { id, qpn: queue_pair, states: states.into(), rd_atomic: None, follow_up: then }
    }

    /// Limits READs and atomics in the attributes of the connection manager to those of this side.
    fn limit_rd_atomic(&self, mut attributes: ModifyQp) -> ModifyQp {
        if let Some((served, wanted)) = self.rd_atomic {
            attributes.max_dest_rd_atomic =
                attributes.max_dest_rd_atomic.map(|_| served.min(DeviceLimits::HCA.max_qp_rd_atom));
            attributes.max_rd_atomic = attributes.max_rd_atomic.map(|offered| offered.min(wanted));
        }
        attributes
    }

    /// Executes the transition on `hca`: the connection manager executes commands by `manage`, and the queue pair moves by
    /// `modify`.
    pub fn execute<H, E>(
        &self,
        hca: &mut H,
        mut manage: impl FnMut(&mut H, Command) -> Result<Reply, E>,
        mut modify: impl FnMut(&mut H, &ModifyQp) -> Result<(), E>,
    ) -> Result<Reply, E> {
        for state in &self.states {
            let query = Command::InitQpAttributes { id: self.id, state: *state };
            let Reply::QpAttributes(attributes) = manage(hca, query)? else {
                unreachable!("the connection manager replies with attributes")
            };
            let modified = modify(hca, &self.limit_rd_atomic(attributes));
            // A queue pair in RESET or in the error state needs no transition to the error state.
            if *state != QpState::Error {
                modified?;
            }
        }
        match self.final_command() {
            Some(command) => manage(hca, command),
            None => Ok(Reply::Done),
        }
    }

    /// The command that follows.
    pub(crate) fn final_command(&self) -> Option<Command> {
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

/// A reply of the connection manager.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant, reason = "one at a time, and short-lived")]
pub enum Reply {
    /// The command is done, or in progress: an event reports its result.
    Done,
    /// The new event channel.
    EventChannel(CmChannelId),
    /// The new identifier.
    Id(CmId),
    /// The identifier that reserves a port, and the port; zero if it is not bound.
    Reserved(CmId, u16),
    /// The state and addresses of an identifier.
    Query(IdSnapshot),
    /// The attributes of the queue pair.
    QpAttributes(ModifyQp),
    /// The oldest event, if any, and the number of remaining events.
    Event(Option<Event>, u32),
}

softhca_wire::named_enum! {
    /// The type of an event. The numbers are those of `enum rdma_cm_event_type`.
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
    #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
    #[repr(u32)]
    #[allow(missing_docs, reason = "the names are those of librdmacm")]
    // The names are those of `rdma_event_str`.
    pub enum EventType {
        #[cfg_attr(feature = "serde", serde(rename = "addr-resolved"))]
        AddressResolved = 0 => "RDMA_CM_EVENT_ADDR_RESOLVED",
        #[cfg_attr(feature = "serde", serde(rename = "addr-error"))]
        AddressError = 1 => "RDMA_CM_EVENT_ADDR_ERROR",
        RouteResolved = 2 => "RDMA_CM_EVENT_ROUTE_RESOLVED",
        RouteError = 3 => "RDMA_CM_EVENT_ROUTE_ERROR",
        ConnectRequest = 4 => "RDMA_CM_EVENT_CONNECT_REQUEST",
        ConnectResponse = 5 => "RDMA_CM_EVENT_CONNECT_RESPONSE",
        ConnectError = 6 => "RDMA_CM_EVENT_CONNECT_ERROR",
        Unreachable = 7 => "RDMA_CM_EVENT_UNREACHABLE",
        Rejected = 8 => "RDMA_CM_EVENT_REJECTED",
        Established = 9 => "RDMA_CM_EVENT_ESTABLISHED",
        Disconnected = 10 => "RDMA_CM_EVENT_DISCONNECTED",
        DeviceRemoval = 11 => "RDMA_CM_EVENT_DEVICE_REMOVAL",
        MulticastJoin = 12 => "RDMA_CM_EVENT_MULTICAST_JOIN",
        MulticastError = 13 => "RDMA_CM_EVENT_MULTICAST_ERROR",
        #[cfg_attr(feature = "serde", serde(rename = "addr-change"))]
        AddressChange = 14 => "RDMA_CM_EVENT_ADDR_CHANGE",
        TimewaitExit = 15 => "RDMA_CM_EVENT_TIMEWAIT_EXIT",
    }
}

/// The connection parameters of the peer, from the perspective of this side: the `initiator_depth` of the peer is the
/// `responder_resources` of this side.
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

/// The destination of datagrams: `struct rdma_ud_param`.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdParameters {
    /// The address.
    pub address_vector: AddressVector,
    /// The queue pair.
    pub qpn: Qpn,
    /// The Q_Key.
    pub qkey: QueueKey,
}

/// The parameters of an event.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventParameters {
    /// The event has no parameters.
    None,
    /// The parameters of a connection.
    Connection(PeerParameters),
    /// The destination of datagrams or the address of a multicast group.
    Ud(UdParameters),
}

/// An event of a communication identifier (`struct rdma_cm_event`).
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The identifier: a new one for a connect request.
    pub id: CmId,
    /// The listener that received a connect request.
    pub listener: Option<CmId>,
    /// The type.
    pub event_type: EventType,
    /// Zero, a negative errno, or the reason of a reject.
    pub status: i32,
    /// The private data of the peer, padded with zeros if the message has a fixed size.
    pub private_data: Vec<u8>,
    /// The parameters.
    pub parameters: EventParameters,
}

/// The state and addresses of a communication identifier.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdSnapshot {
    /// The state.
    pub state: CmState,
    /// The port space.
    pub port_space: PortSpace,
    /// The type of its queue pair.
    pub qp_type: QpType,
    /// Whether its address may be one that is in use ([`CmOption::ReuseAddress`]).
    pub reuse_address: bool,
    /// Whether `::` means IPv6 addresses only ([`CmOption::AfOnly`]).
    pub only_ipv6: bool,
    /// The local address.
    pub local: Option<SocketAddr>,
    /// The address of the peer.
    pub peer: Option<SocketAddr>,
    /// The source GID.
    pub sgid: Gid,
    /// The address vector to the peer.
    pub address_vector: AddressVector,
    /// The path MTU.
    pub path_mtu: Mtu,
    /// The queue pair of the peer.
    pub remote_qpn: Qpn,
}
