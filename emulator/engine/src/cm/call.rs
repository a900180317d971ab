//! The commands of applications.

use super::identifier::CmIdentifier;
use super::{CmContext, CmState, ConnectionManager, EventParameters, EventType, api, simple_event};
use crate::{AddressVector, ClientId, CmId, DeviceLimits, Resource, VerbsError};
use api::{Command, ConnectionParameters, Reply, UdParameters};
use core::net::IpAddr;
use softhca_wire::cm::{RejectReason, ServiceId};
use softhca_wire::{Gid, Qpn};

impl ConnectionManager {
    pub(crate) fn call(
        &mut self,
        cx: &mut CmContext<'_, '_>,
        client: ClientId,
        call: Command,
    ) -> Result<Reply, VerbsError> {
        match call {
            Command::CreateEventChannel => return self.create_channel(client).map(Reply::EventChannel),
            Command::DestroyEventChannel(channel) => self.destroy_channel(client, channel)?,
            Command::GetEvent(channel) => return self.next_event(client, channel),
            Command::CreateId { channel, port_space: space, qp_type: kind } => {
                return self.create(client, channel, space, kind).map(Reply::Id);
            }
            Command::DestroyId(id) => {
                self.identifier(client, id)?;
                self.destroy(cx, id);
            }
            Command::MigrateId { id, channel } => self.migrate(cx.ctx, client, id, channel)?,
            Command::SetOption { id, option } => self.set_option(client, id, option)?,
            Command::BindAddress { id, address } => self.bind(cx, client, id, address)?,
            Command::ResolveAddress { id, source, destination } => {
                self.resolve_address(cx, client, id, source, destination)?;
            }
            Command::ResolveRoute { id, path_mtu: mtu } => self.resolve_route(cx, client, id, mtu)?,
            Command::Listen { id, backlog } => self.listen(cx, client, id, backlog)?,
            Command::Connect { id, parameters } => self.connect(cx, client, id, &parameters)?,
            Command::Accept { id, parameters } => self.accept(cx, client, id, &parameters)?,
            Command::Reject { id, reason, private_data } => {
                self.reject(cx, client, id, reason, &private_data)?;
            }
            Command::Establish(id) => match self.identifier(client, id)?.state {
                CmState::RepReceived | CmState::RepSent => self.establish(cx, id),
                CmState::Established => {}
                state => return Err(VerbsError::InvalidCmState { id, state, call: "establish" }),
            },
            Command::Disconnect(id) => self.disconnect(cx, client, id)?,
            Command::InitQpAttributes { id, state } => {
                return self.identifier(client, id)?.attributes(id, state).map(Reply::QpAttributes);
            }
            Command::QueryId(id) => {
                let identifier = self.identifier(client, id)?;
                return Ok(Reply::Query(identifier.view(cx.hca.gid(identifier.source_index))));
            }
            Command::JoinMulticast { id, group } => self.join(cx, client, id, group)?,
            Command::LeaveMulticast { id, group } => {
                self.identifier(client, id)?;
                check_group(group)?;
            }
        }
        Ok(Reply::Done)
    }

    /// An identifier of the client.
    pub(super) fn identifier(&mut self, client: ClientId, id: CmId) -> Result<&mut CmIdentifier, VerbsError> {
        let found = self.identifiers.get_mut(&id).filter(|identifier| identifier.client == client);
        found.ok_or(VerbsError::NotFound { resource: Resource::CmIdentifier, number: id.0 })
    }

    fn connect(
        &mut self,
        cx: &mut CmContext<'_, '_>,
        client: ClientId,
        id: CmId,
        parameters: &ConnectionParameters,
    ) -> Result<(), VerbsError> {
        let (psn, comm_id) = (self.next_random() as u32, self.allocate_comm_id());
        let identifier = self.identifier(client, id)?;
        if identifier.state != CmState::RouteResolved {
            return Err(VerbsError::InvalidCmState { id, state: identifier.state, call: "connect" });
        }
        let (datagram, peer) = (identifier.is_datagram(), identifier.peer.expect("the address is resolved"));
        let room = if datagram { api::MAX_SIDR_REQ_PRIVATE_DATA } else { api::MAX_REQ_PRIVATE_DATA };
        check_private_data(&parameters.private_data, room)?;
        check_queue_pair(datagram, parameters)?;
        identifier.apply_parameters(parameters);
        identifier.local_comm_id = comm_id;
        identifier.service = ServiceId::new(identifier.port_space, peer.port());
        identifier.transaction_id = transaction_id(comm_id);
        identifier.rq_psn = softhca_wire::Psn::new(psn);
        self.by_local_comm_id.insert(comm_id, id);
        if datagram {
            self.send_sidr_req(cx, id, &parameters.private_data);
        } else {
            self.send_req(cx, id, parameters);
        }
        Ok(())
    }

    fn accept(
        &mut self,
        cx: &mut CmContext<'_, '_>,
        client: ClientId,
        id: CmId,
        parameters: &ConnectionParameters,
    ) -> Result<(), VerbsError> {
        let identifier = self.identifier(client, id)?;
        let state = identifier.state;
        match state {
            CmState::ReqReceived => {
                check_private_data(&parameters.private_data, api::MAX_REP_PRIVATE_DATA)?;
                check_queue_pair(false, parameters)?;
                identifier.qpn = parameters.qpn;
                // The negotiated depths are the minimum of both sides (IBA 12.7.29, 12.7.30).
                let max_rd_atomic = DeviceLimits::HCA.max_qp_rd_atom;
                identifier.responder_resources = parameters.responder_resources.min(max_rd_atomic);
                let depth = parameters.initiator_depth.min(max_rd_atomic);
                identifier.initiator_depth = identifier.initiator_depth.min(depth);
                self.release_backlog(id);
                self.send_rep(cx, id, parameters);
            }
            CmState::SidrReqReceived => {
                check_private_data(&parameters.private_data, api::MAX_SIDR_REP_PRIVATE_DATA)?;
                check_queue_pair(true, parameters)?;
                identifier.qpn = parameters.qpn;
                identifier.queue_key = parameters.qkey.unwrap_or(api::RDMA_UDP_QKEY);
                self.release_backlog(id);
                self.send_sidr_rep(cx, id, &parameters.private_data);
            }
            state => return Err(VerbsError::InvalidCmState { id, state, call: "accept" }),
        }
        Ok(())
    }

    fn reject(
        &mut self,
        cx: &mut CmContext<'_, '_>,
        client: ClientId,
        id: CmId,
        reason: RejectReason,
        private_data: &[u8],
    ) -> Result<(), VerbsError> {
        let identifier = self.identifier(client, id)?;
        let room =
            if identifier.is_datagram() { api::MAX_SIDR_REP_PRIVATE_DATA } else { api::MAX_REJ_PRIVATE_DATA };
        check_private_data(private_data, room)?;
        match identifier.state {
            CmState::ReqReceived | CmState::SidrReqReceived => {
                self.release_backlog(id);
                self.reject_and_close(cx, id, reason, private_data);
            }
            CmState::RepReceived => self.reject_and_close(cx, id, reason, private_data),
            state => return Err(VerbsError::InvalidCmState { id, state, call: "reject" }),
        }
        Ok(())
    }

    fn disconnect(
        &mut self,
        cx: &mut CmContext<'_, '_>,
        client: ClientId,
        id: CmId,
    ) -> Result<(), VerbsError> {
        match self.identifier(client, id)?.state {
            CmState::Established | CmState::RepSent | CmState::RepReceived => {
                self.send_dreq(cx, id);
            }
            CmState::DreqReceived => {
                self.send_drep(cx, id);
                self.enter_time_wait(cx, id);
            }
            CmState::DreqSent | CmState::TimeWait => {}
            state => return Err(VerbsError::InvalidCmState { id, state, call: "disconnect" }),
        }
        Ok(())
    }

    fn join(
        &mut self,
        cx: &mut CmContext<'_, '_>,
        client: ClientId,
        id: CmId,
        group: IpAddr,
    ) -> Result<(), VerbsError> {
        let identifier = self.identifier(client, id)?;
        check_group(group)?;
        if !identifier.is_datagram() {
            let why = "only identifiers of the UDP and IPoIB port spaces can join a group";
            return Err(VerbsError::Invalid { what: "multicast", why });
        }
        if !matches!(identifier.state, CmState::Bound | CmState::AddressResolved | CmState::RouteResolved) {
            return Err(VerbsError::InvalidCmState { id, state: identifier.state, call: "join" });
        }
        let fits = |gid: &Gid| gid.ip().is_ipv4() == group.is_ipv4();
        let index =
            cx.hca.gids.iter().position(fits).ok_or(VerbsError::NetworkUnreachable { address: group })?;
        let address_vector = AddressVector {
            sgid_index: index as u8,
            traffic_class: identifier.traffic_class,
            ..AddressVector::to(Gid::from(group))
        };
        let qkey = identifier.queue_key;
        let parameters = EventParameters::Ud(UdParameters { address_vector, qpn: Qpn::MULTICAST, qkey });
        let event = simple_event(id, EventType::MulticastJoin);
        self.raise_event(cx.ctx, api::Event { parameters, ..event });
        Ok(())
    }
}

impl CmIdentifier {
    /// Stores the connection parameters of the application.
    fn apply_parameters(&mut self, parameters: &ConnectionParameters) {
        let max_rd_atomic = DeviceLimits::HCA.max_qp_rd_atom;
        self.qpn = parameters.qpn;
        self.queue_key = parameters.qkey.unwrap_or(self.queue_key);
        self.responder_resources = parameters.responder_resources.min(max_rd_atomic);
        self.initiator_depth = parameters.initiator_depth.min(max_rd_atomic);
        self.retry_count = parameters.retry_count.min(7);
        self.rnr_retry_count = parameters.rnr_retry_count.min(7);
    }
}

/// The transaction ID of messages with this communication ID, as Linux forms it.
pub(super) fn transaction_id(comm_id: softhca_wire::cm::CommunicationId) -> u64 {
    const AGENT: u64 = 2;
    AGENT << 32 | u64::from(comm_id.0.swap_bytes())
}

fn check_private_data(data: &[u8], room: usize) -> Result<(), VerbsError> {
    if data.len() > room {
        let (value, limit) = (data.len() as u64, room as u64);
        return Err(VerbsError::LimitExceeded { what: "private data", value, limit });
    }
    Ok(())
}

fn check_queue_pair(datagram: bool, parameters: &ConnectionParameters) -> Result<(), VerbsError> {
    let number = parameters.qpn;
    if number.value() < 2 && !datagram {
        let why = "a connection requires a queue pair number";
        return Err(VerbsError::Invalid { what: "queue pair", why });
    }
    Ok(())
}

fn check_group(group: IpAddr) -> Result<(), VerbsError> {
    if !group.is_multicast() {
        return Err(VerbsError::Invalid { what: "multicast", why: "the address is not a multicast address" });
    }
    Ok(())
}
