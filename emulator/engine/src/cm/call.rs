//! The commands of applications.

use super::identifier::CmIdentifier;
use super::{CmCall, CmState, ConnectionManager, EventParameters, EventType, api, simple_event};
use crate::{AddressVector, ClientId, CmId, Resource, VerbsError, VerbsResult};
use api::{CmOption, Command, ConnectionParameters, Reply, UdParameters};
use core::net::IpAddr;
use softhca_wire::cm::{RejectReason, ServiceId};
use softhca_wire::{Gid, Qpn};

impl ConnectionManager {
    /// An identifier of the client.
    pub(super) fn identifier(&mut self, client: ClientId, id: CmId) -> VerbsResult<&mut CmIdentifier> {
        let found = self.identifiers.get_mut(&id).filter(|identifier| identifier.client == client);
        found.ok_or(VerbsError::NotFound { resource: Resource::CmIdentifier, number: id.0 })
    }
}

impl CmCall<'_, '_> {
    pub(crate) fn execute(&mut self, client: ClientId, command: Command) -> VerbsResult<Reply> {
        match command {
            Command::CreateEventChannel => return self.cm.create_channel(client).map(Reply::EventChannel),
            Command::DestroyEventChannel(channel) => self.cm.destroy_channel(client, channel)?,
            Command::GetEvent(channel) => return self.cm.next_event(client, channel),
            Command::CreateId { channel, port_space: space, qp_type: kind } => {
                self.cm.channel(client, channel)?;
                return self.cm.create(client, channel, space, kind).map(Reply::Id);
            }
            Command::ReservePort { port_space, qp_type, reuse_address, only_ipv6, address } => {
                let id = self.create_reservation(client, port_space, qp_type)?;
                self.cm.set_option(client, id, CmOption::ReuseAddress(reuse_address))?;
                self.cm.set_option(client, id, CmOption::AfOnly(only_ipv6))?;
                return self.reserve_port(client, id, address);
            }
            Command::DestroyId(id) => {
                self.cm.identifier(client, id)?;
                self.destroy(id);
            }
            Command::MigrateId { id, channel } => self.migrate(client, id, channel)?,
            Command::SetOption { id, option } => self.cm.set_option(client, id, option)?,
            Command::BindAddress { id, address } => self.bind(client, id, address)?,
            Command::ResolveAddress { id, source, destination } => {
                self.resolve_address(client, id, source, destination)?;
            }
            Command::ResolveRoute { id, path_mtu: mtu } => self.resolve_route(client, id, mtu)?,
            Command::Listen { id, backlog } => self.listen(client, id, backlog)?,
            Command::Connect { id, parameters } => self.connect(client, id, &parameters)?,
            Command::Accept { id, parameters } => self.accept(client, id, &parameters)?,
            Command::Reject { id, reason, private_data } => {
                self.reject(client, id, reason, &private_data)?;
            }
            Command::Establish(id) => match self.cm.identifier(client, id)?.state {
                CmState::RepReceived | CmState::RepSent => self.establish(id),
                CmState::Established => {}
                state => return Err(VerbsError::InvalidCmState { id, state, call: "establish" }),
            },
            Command::Disconnect(id) => self.disconnect(client, id)?,
            Command::InitQpAttributes { id, state } => {
                return self.cm.identifier(client, id)?.attributes(id, state).map(Reply::QpAttributes);
            }
            Command::QueryId(id) => {
                let identifier = self.cm.identifier(client, id)?;
                return Ok(Reply::Query(identifier.view(self.hca.gid(identifier.source_index))));
            }
            Command::JoinMulticast { id, group } => self.join(client, id, group)?,
            Command::LeaveMulticast { id, group } => {
                self.cm.identifier(client, id)?;
                check_group(group)?;
            }
        }
        Ok(Reply::Done)
    }

    fn connect(&mut self, client: ClientId, id: CmId, parameters: &ConnectionParameters) -> VerbsResult {
        let (psn, comm_id) = (self.cm.next_random() as u32, self.cm.allocate_comm_id());
        let max_rd_atomic = self.hca.settings.profile.limits().max_qp_rd_atom;
        let identifier = self.cm.identifier(client, id)?;
        if identifier.state != CmState::RouteResolved {
            return Err(VerbsError::InvalidCmState { id, state: identifier.state, call: "connect" });
        }
        let (datagram, peer) = (identifier.is_datagram(), identifier.peer.expect("the address is resolved"));
        let room = if datagram { api::MAX_SIDR_REQ_PRIVATE_DATA } else { api::MAX_REQ_PRIVATE_DATA };
        check_private_data(&parameters.private_data, room)?;
        check_queue_pair(datagram, parameters)?;
        identifier.apply_parameters(parameters, max_rd_atomic);
        identifier.local_comm_id = comm_id;
        identifier.service = ServiceId::new(identifier.port_space, peer.port());
        identifier.transaction_id = transaction_id(comm_id);
        identifier.rq_psn = softhca_wire::Psn::new(psn);
        self.cm.by_local_comm_id.insert(comm_id, id);
        if datagram {
            self.send_sidr_req(id, &parameters.private_data);
        } else {
            self.send_req(id, parameters);
        }
        Ok(())
    }

    fn accept(&mut self, client: ClientId, id: CmId, parameters: &ConnectionParameters) -> VerbsResult {
        let max_rd_atomic = self.hca.settings.profile.limits().max_qp_rd_atom;
        let identifier = self.cm.identifier(client, id)?;
        let state = identifier.state;
        match state {
            CmState::ReqReceived => {
                check_private_data(&parameters.private_data, api::MAX_REP_PRIVATE_DATA)?;
                check_queue_pair(false, parameters)?;
                identifier.qpn = parameters.qpn;
                // The negotiated depths are the minimum of both sides (IBA 12.7.29, 12.7.30).
                identifier.responder_resources = parameters.responder_resources.min(max_rd_atomic);
                let depth = parameters.initiator_depth.min(max_rd_atomic);
                identifier.initiator_depth = identifier.initiator_depth.min(depth);
                self.cm.release_backlog(id);
                self.send_rep(id, parameters);
            }
            CmState::SidrReqReceived => {
                check_private_data(&parameters.private_data, api::MAX_SIDR_REP_PRIVATE_DATA)?;
                check_queue_pair(true, parameters)?;
                identifier.qpn = parameters.qpn;
                identifier.queue_key = parameters.qkey.unwrap_or(api::RDMA_UDP_QKEY);
                self.cm.release_backlog(id);
                self.send_sidr_rep(id, &parameters.private_data);
            }
            state => return Err(VerbsError::InvalidCmState { id, state, call: "accept" }),
        }
        Ok(())
    }

    fn reject(
        &mut self,
        client: ClientId,
        id: CmId,
        reason: RejectReason,
        private_data: &[u8],
    ) -> VerbsResult {
        let identifier = self.cm.identifier(client, id)?;
        let room =
            if identifier.is_datagram() { api::MAX_SIDR_REP_PRIVATE_DATA } else { api::MAX_REJ_PRIVATE_DATA };
        check_private_data(private_data, room)?;
        match identifier.state {
            CmState::ReqReceived | CmState::SidrReqReceived => {
                self.cm.release_backlog(id);
                self.reject_and_close(id, reason, private_data);
            }
            CmState::RepReceived => self.reject_and_close(id, reason, private_data),
            state => return Err(VerbsError::InvalidCmState { id, state, call: "reject" }),
        }
        Ok(())
    }

    fn disconnect(&mut self, client: ClientId, id: CmId) -> VerbsResult {
        match self.cm.identifier(client, id)?.state {
            CmState::Established | CmState::RepSent | CmState::RepReceived => {
                self.send_dreq(id);
            }
            CmState::DreqReceived => {
                self.send_drep(id);
                self.enter_time_wait(id);
            }
            CmState::DreqSent | CmState::TimeWait => {}
            state => return Err(VerbsError::InvalidCmState { id, state, call: "disconnect" }),
        }
        Ok(())
    }

    fn join(&mut self, client: ClientId, id: CmId, group: IpAddr) -> VerbsResult {
        let identifier = self.cm.identifier(client, id)?;
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
            self.hca.gids.iter().position(fits).ok_or(VerbsError::NetworkUnreachable { address: group })?;
        let address_vector = AddressVector {
            sgid_index: index as u8,
            traffic_class: identifier.traffic_class,
            ..AddressVector::to(Gid::from(group))
        };
        let qkey = identifier.queue_key;
        let parameters = EventParameters::Ud(UdParameters { address_vector, qpn: Qpn::MULTICAST, qkey });
        let event = simple_event(id, EventType::MulticastJoin);
        self.raise_event(api::Event { parameters, ..event });
        Ok(())
    }
}

impl CmIdentifier {
    /// Stores the connection parameters of the application.
    fn apply_parameters(&mut self, parameters: &ConnectionParameters, max_rd_atomic: u8) {
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

fn check_private_data(data: &[u8], room: usize) -> VerbsResult {
    if data.len() > room {
        let (value, limit) = (data.len() as u64, room as u64);
        return Err(VerbsError::LimitExceeded { what: "private data", value, limit });
    }
    Ok(())
}

fn check_queue_pair(datagram: bool, parameters: &ConnectionParameters) -> VerbsResult {
    let number = parameters.qpn;
    if number.value() < 2 && !datagram {
        let why = "a connection requires a queue pair number";
        return Err(VerbsError::Invalid { what: "queue pair", why });
    }
    Ok(())
}

fn check_group(group: IpAddr) -> VerbsResult {
    if !group.is_multicast() {
        return Err(VerbsError::Invalid { what: "multicast", why: "the address is not a multicast address" });
    }
    Ok(())
}
