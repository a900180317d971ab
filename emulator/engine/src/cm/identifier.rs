//! One identifier: a listener, or one end of a connection.

use super::outbox::SOURCE_PORT;
use super::ports::Scope;
use super::{ACK_TIMEOUT, CmState, words};
use crate::{AddressVector, ClientId, CmChannelId, CmId, Error, Instant, Modify, QpKind, State};
use alloc::boxed::Box;
use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use softhca_queue::Access;
use softhca_wire::cm::{CommunicationId, Datagram, PortSpace, ServiceId};
use softhca_wire::{Envelope, Gid, Mtu, Psn, Qpn, QueueKey, RnrTimer};

/// A message as it was sent.
pub(super) struct Sent {
    pub envelope: Envelope,
    pub datagram: Datagram,
}

/// A message that is sent again until its answer comes.
pub(super) struct Unanswered {
    pub message: Box<Sent>,
    pub retries_left: u8,
}

/// What a listener keeps.
pub(super) struct Listening {
    pub backlog: u32,
    /// Requests that the application has neither accepted nor refused.
    pub waiting: u32,
}

pub(super) struct Identifier {
    pub client: ClientId,
    pub channel: CmChannelId,
    pub space: PortSpace,
    pub kind: QpKind,
    pub state: CmState,
    // Options.
    pub traffic_class: u8,
    pub reuse_address: bool,
    pub only_ipv6: bool,
    pub ack_timeout: u8,
    // Addresses.
    pub local: Option<SocketAddr>,
    /// Its own port stands in the port space; that of an accepted connection is its listener's.
    pub is_bound: bool,
    pub peer: Option<SocketAddr>,
    pub source_index: u8,
    pub listening: Option<Listening>,
    /// The listener that a request came to, for as long as it counts against its backlog.
    pub listener: Option<CmId>,
    // The connection.
    pub name: CommunicationId,
    pub remote_name: CommunicationId,
    /// The identifier of the messages of the connect dialogue: the one of its REQ.
    pub transaction: u64,
    /// The transaction of the DREQ that waits for an answer.
    pub release_transaction: u64,
    pub service: ServiceId,
    pub flow_label: u32,
    pub mtu: Mtu,
    pub queue_pair: Qpn,
    pub queue_key: QueueKey,
    pub peer_queue_pair: Qpn,
    /// The PSN that the peer sends first.
    pub receive_psn: Psn,
    /// The PSN that this side sends first.
    pub send_psn: Psn,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub unanswered: Option<Unanswered>,
    /// The answer to a SIDR_REQ, in case that it is asked for again.
    pub answer: Option<Box<Sent>>,
    pub deadline: Option<Instant>,
}

impl Identifier {
    pub fn new(client: ClientId, channel: CmChannelId, space: PortSpace, kind: QpKind) -> Identifier {
        Identifier {
            client,
            channel,
            space,
            kind,
            state: CmState::Idle,
            traffic_class: 0,
            reuse_address: false,
            only_ipv6: false,
            ack_timeout: ACK_TIMEOUT,
            local: None,
            is_bound: false,
            peer: None,
            source_index: 0,
            listening: None,
            listener: None,
            name: CommunicationId::default(),
            remote_name: CommunicationId::default(),
            transaction: 0,
            release_transaction: 0,
            service: ServiceId::default(),
            flow_label: 0,
            mtu: Mtu::B1024,
            queue_pair: Qpn::default(),
            queue_key: words::DATAGRAM_KEY,
            peer_queue_pair: Qpn::default(),
            receive_psn: Psn::default(),
            send_psn: Psn::default(),
            responder_resources: 0,
            initiator_depth: 0,
            retry_count: 0,
            rnr_retry_count: 0,
            unanswered: None,
            answer: None,
            deadline: None,
        }
    }

    /// Whether it is of datagrams, which are resolved and not connected.
    pub fn is_datagram(&self) -> bool {
        self.kind == QpKind::Ud
    }

    pub fn peer_address(&self) -> IpAddr {
        self.peer.map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer| peer.ip())
    }

    pub fn local_address(&self) -> IpAddr {
        self.local.map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |local| local.ip())
    }

    /// The envelope of its messages.
    pub fn envelope(&self) -> Envelope {
        Envelope {
            source_port: SOURCE_PORT,
            traffic_class: self.traffic_class,
            ..Envelope::between(self.local_address(), self.peer_address())
        }
    }

    /// The path of its queue pair.
    pub fn path(&self) -> AddressVector {
        AddressVector {
            destination: Gid::from(self.peer_address()),
            source_index: self.source_index,
            traffic_class: self.traffic_class,
            flow_label: self.flow_label,
            hop_limit: 64,
            service_level: 0,
        }
    }

    /// The addresses that a binding of `address` takes.
    pub fn scope(&self, address: IpAddr) -> Scope {
        match address {
            IpAddr::V4(v4) if v4.is_unspecified() => Scope::Ipv4,
            IpAddr::V6(v6) if v6.is_unspecified() && self.only_ipv6 => Scope::Ipv6,
            IpAddr::V6(v6) if v6.is_unspecified() => Scope::Every,
            address => Scope::Only(address),
        }
    }

    pub fn view(&self, source_gid: Gid) -> words::View {
        words::View {
            state: self.state,
            space: self.space,
            kind: self.kind,
            local: self.local,
            peer: self.peer,
            source_gid,
            path: self.path(),
            mtu: self.mtu,
            peer_queue_pair: self.peer_queue_pair,
        }
    }

    /// What takes its queue pair to a state.
    pub fn attributes(&self, id: CmId, state: State) -> Result<Modify, Error> {
        let modify = Modify::default().state(state);
        let connected = !matches!(
            self.state,
            CmState::Idle
                | CmState::Bound
                | CmState::AddressResolved
                | CmState::RouteResolved
                | CmState::Listening
                | CmState::RequestSent
        );
        let refuse = Err(Error::CmState { id, state: self.state, call: "attributes of the queue pair" });
        match state {
            State::Init if self.is_datagram() => {
                Ok(modify.partition_index(0).port(1).queue_key(self.queue_key))
            }
            State::Init => {
                let reads = Access::REMOTE_READ | Access::REMOTE_ATOMIC;
                let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | reads;
                Ok(modify.partition_index(0).port(1).access(access))
            }
            State::ReadyToReceive if self.is_datagram() => Ok(modify),
            State::ReadyToSend if self.is_datagram() => Ok(modify.send_psn(self.send_psn)),
            State::ReadyToReceive if connected => {
                let modify = modify
                    .path(self.path())
                    .mtu(self.mtu)
                    .destination(self.peer_queue_pair)
                    .receive_psn(self.receive_psn);
                Ok(match self.kind {
                    QpKind::Uc => modify,
                    _ => modify.max_reads_in(self.responder_resources).min_rnr_timer(RnrTimer::new(0)),
                })
            }
            State::ReadyToSend if connected => {
                let modify = modify.send_psn(self.send_psn);
                Ok(match self.kind {
                    QpKind::Uc => modify,
                    _ => modify
                        .timeout(self.ack_timeout)
                        .retry_count(self.retry_count)
                        .rnr_retry(self.rnr_retry_count)
                        .max_reads_out(self.initiator_depth),
                })
            }
            State::Error | State::Reset => Ok(modify),
            _ => refuse,
        }
    }
}
