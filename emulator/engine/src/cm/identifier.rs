//! An identifier: a listener or one end of a connection.

use super::mad_queue::SOURCE_PORT;
use super::ports::Scope;
use crate::{
    AddressVector, ClientId, CmChannelId, CmId, Instant, ModifyQp, QpState, QpType, VerbsError, VerbsResult,
};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use softhca_types::AccessFlags;
use softhca_types::cm::{self as api, CmState};
use softhca_wire::cm::{CommunicationId, Datagram, PortSpace, ServiceId};
use softhca_wire::{AddressHeaders, Gid, Mtu, Psn, Qpn, QueueKey, RnrTimer};

/// The default exponent of the ACK timeout.
const DEFAULT_ACK_TIMEOUT: u8 = 19;

/// A message as it was sent.
pub(super) struct SentMad {
    pub addressing: AddressHeaders,
    pub datagram: Datagram,
}

/// A message that is retransmitted until its reply arrives.
pub(super) struct AwaitedReply {
    pub message: Box<SentMad>,
    pub retries_left: u8,
}

impl AwaitedReply {
    /// The number that leads to the process which is to reply.
    pub fn target(&self) -> Qpn {
        self.message.datagram.target().qpn()
    }
}

/// The backlog of a listener.
pub(super) struct ListenBacklog {
    pub limit: u32,
    /// Requests that the application has neither accepted nor rejected.
    pub pending: u32,
}

pub(super) struct CmIdentifier {
    pub client: ClientId,
    pub channel: CmChannelId,
    pub port_space: PortSpace,
    pub kind: QpType,
    pub state: CmState,
    // Options.
    pub traffic_class: u8,
    pub reuse_address: bool,
    pub only_ipv6: bool,
    pub ack_timeout: u8,
    // Addresses.
    pub local: Option<SocketAddr>,
    /// The identifier owns its local port. An accepted connection shares the port of its listener.
    pub is_bound: bool,
    pub peer: Option<SocketAddr>,
    pub source_index: u8,
    pub backlog: Option<ListenBacklog>,
    /// Requests to the port, which wait until the identifier listens.
    pub early_requests: Vec<(AddressHeaders, Datagram)>,
    /// The listener of a request that counts against its backlog.
    pub listener: Option<CmId>,
    // The connection.
    pub local_comm_id: CommunicationId,
    pub remote_comm_id: CommunicationId,
    /// The transaction ID of the REQ, which all messages of the connection setup carry.
    pub transaction_id: u64,
    /// The transaction ID of the unanswered DREQ.
    pub dreq_transaction_id: u64,
    pub service: ServiceId,
    pub flow_label: u32,
    pub mtu: Mtu,
    pub qpn: Qpn,
    pub queue_key: QueueKey,
    pub remote_qpn: Qpn,
    /// The first PSN that the peer sends.
    pub rq_psn: Psn,
    /// The first PSN that this side sends.
    pub sq_psn: Psn,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub awaited_reply: Option<AwaitedReply>,
    /// The reply to a SIDR_REQ, for retransmission.
    pub sidr_reply: Option<Box<SentMad>>,
    pub deadline: Option<Instant>,
}

impl CmIdentifier {
    pub fn new(client: ClientId, channel: CmChannelId, space: PortSpace, kind: QpType) -> CmIdentifier {
        CmIdentifier {
            client,
            channel,
            port_space: space,
            kind,
            state: CmState::Idle,
            traffic_class: 0,
            reuse_address: false,
            only_ipv6: false,
            ack_timeout: DEFAULT_ACK_TIMEOUT,
            local: None,
            is_bound: false,
            peer: None,
            source_index: 0,
            backlog: None,
            early_requests: Vec::new(),
            listener: None,
            local_comm_id: CommunicationId::default(),
            remote_comm_id: CommunicationId::default(),
            transaction_id: 0,
            dreq_transaction_id: 0,
            service: ServiceId::default(),
            flow_label: 0,
            mtu: Mtu::B1024,
            qpn: Qpn::default(),
            queue_key: api::RDMA_UDP_QKEY,
            remote_qpn: Qpn::default(),
            rq_psn: Psn::default(),
            sq_psn: Psn::default(),
            responder_resources: 0,
            initiator_depth: 0,
            retry_count: 0,
            rnr_retry_count: 0,
            awaited_reply: None,
            sidr_reply: None,
            deadline: None,
        }
    }

    /// Whether the identifier is of a datagram service, which is resolved and not connected.
    pub fn is_datagram(&self) -> bool {
        self.kind == QpType::Ud
    }

    pub fn peer_address(&self) -> IpAddr {
        self.peer.map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer| peer.ip())
    }

    pub fn local_address(&self) -> IpAddr {
        self.local.map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |local| local.ip())
    }

    /// The addressing headers of its messages.
    pub fn addressing(&self) -> AddressHeaders {
        AddressHeaders {
            source_port: SOURCE_PORT,
            traffic_class: self.traffic_class,
            ..AddressHeaders::between(self.local_address(), self.peer_address())
        }
    }

    /// The address vector of its queue pair.
    pub fn path(&self) -> AddressVector {
        AddressVector {
            dgid: Gid::from(self.peer_address()),
            sgid_index: self.source_index,
            traffic_class: self.traffic_class,
            flow_label: self.flow_label,
            hop_limit: 64,
            service_level: 0,
            ..AddressVector::default()
        }
    }

    /// The addresses that a binding to `address` covers.
    pub fn scope(&self, address: IpAddr) -> Scope {
        match address {
            IpAddr::V4(v4) if v4.is_unspecified() => Scope::Ipv4,
            IpAddr::V6(v6) if v6.is_unspecified() && self.only_ipv6 => Scope::Ipv6,
            IpAddr::V6(v6) if v6.is_unspecified() => Scope::Every,
            address => Scope::Only(address),
        }
    }

    pub fn view(&self, source_gid: Gid) -> api::IdSnapshot {
        api::IdSnapshot {
            state: self.state,
            port_space: self.port_space,
            qp_type: self.kind,
            reuse_address: self.reuse_address,
            only_ipv6: self.only_ipv6,
            local: self.local,
            peer: self.peer,
            sgid: source_gid,
            address_vector: self.path(),
            path_mtu: self.mtu,
            remote_qpn: self.remote_qpn,
        }
    }

    /// The attributes for a transition of its queue pair.
    pub fn attributes(&self, id: CmId, state: QpState) -> VerbsResult<ModifyQp> {
        let modify = ModifyQp::default().state(state);
        let connected = !matches!(
            self.state,
            CmState::Idle
                | CmState::Bound
                | CmState::AddressResolved
                | CmState::RouteResolved
                | CmState::Listening
                | CmState::ReqSent
        );
        let refuse =
            Err(VerbsError::InvalidCmState { id, state: self.state, call: "attributes of the queue pair" });
        match state {
            QpState::Init if self.is_datagram() => Ok(modify.pkey_index(0).port(1).qkey(self.queue_key)),
            QpState::Init => {
                let reads = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC;
                let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | reads;
                Ok(modify.pkey_index(0).port(1).access_flags(access))
            }
            QpState::ReadyToReceive if self.is_datagram() => Ok(modify),
            QpState::ReadyToSend if self.is_datagram() => Ok(modify.sq_psn(self.sq_psn)),
            QpState::ReadyToReceive if connected => {
                let modify = modify
                    .address_vector(self.path())
                    .path_mtu(self.mtu)
                    .dest_qpn(self.remote_qpn)
                    .rq_psn(self.rq_psn);
                Ok(match self.kind {
                    QpType::Uc => modify,
                    _ => modify.max_dest_rd_atomic(self.responder_resources).min_rnr_timer(RnrTimer::new(0)),
                })
            }
            QpState::ReadyToSend if connected => {
                let modify = modify.sq_psn(self.sq_psn);
                Ok(match self.kind {
                    QpType::Uc => modify,
                    _ => modify
                        .timeout(self.ack_timeout)
                        .retry_count(self.retry_count)
                        .rnr_retry(self.rnr_retry_count)
                        .max_rd_atomic(self.initiator_depth),
                })
            }
            QpState::Error | QpState::Reset => Ok(modify),
            _ => refuse,
        }
    }
}
