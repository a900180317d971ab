//! Connection establishment: REQ, MRA, REP, RTU, REJ.

use super::identifier::CmIdentifier;
use super::{
    CmCall, CmDropReason, CmFailure, CmMessageKind as Kind, CmState, ConnectionManager, EventParameters,
    EventType, MAX_MRA_TIMEOUT, TARGET_ACK_DELAY, api, find_gid, simple_event,
};
use crate::{CmId, QpType};
use api::{ConnectionParameters, PeerParameters};
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use softhca_wire::cm::{
    CommunicationId, MessageType, Mra, Path, PortSpace, PrivateData, RdmaCmHeader, Rej, RejectReason, Rep,
    Req, Rtu, SidrStatus,
};
use softhca_wire::{AddressHeaders, Gid, PartitionKey, Psn};

/// The RDMA CM header, followed by the application's private data.
pub(super) fn private_data_with_addresses<const N: usize>(
    identifier: &CmIdentifier,
    data: &[u8],
) -> PrivateData<N> {
    let header = RdmaCmHeader {
        source: identifier.local_address(),
        source_port: identifier.local.map_or(0, |local| local.port()),
        destination: identifier.peer_address(),
    };
    let mut bytes = header.emit().to_vec();
    bytes.extend(data);
    PrivateData::new(&bytes).unwrap_or_default()
}

impl ConnectionManager {
    /// Creates an identifier for a request to `listener`, if the limits allow it.
    pub(super) fn create_child(
        &mut self,
        listener: CmId,
        addressing: &AddressHeaders,
        header: &RdmaCmHeader,
        source_index: u8,
    ) -> Option<CmId> {
        let parent = &self.identifiers[&listener];
        let mut child = CmIdentifier::new(parent.client, parent.channel, parent.port_space, parent.kind);
        let port = parent.local.map_or(0, |local| local.port());
        child.local = Some(SocketAddr::new(addressing.destination, port));
        child.peer = Some(SocketAddr::new(addressing.source, header.source_port));
        child.source_index = source_index;
        child.listener = Some(listener);
        let id = self.insert(child).ok()?;
        let parent = self.identifiers.get_mut(&listener);
        if let Some(listening) = parent.and_then(|parent| parent.backlog.as_mut()) {
            listening.pending += 1;
        }
        Some(id)
    }

    /// The identifier with this local communication ID, if `peer` is its peer.
    pub(super) fn find_by_comm_id(&self, comm_id: CommunicationId, peer: IpAddr) -> Option<CmId> {
        let id = self.by_local_comm_id.get(&comm_id)?;
        self.identifiers.get(id).filter(|identifier| identifier.peer_address() == peer).map(|_| *id)
    }
}

impl CmCall<'_, '_> {
    /// Sends the REQ of an identifier that `connect` prepared.
    pub(super) fn send_req(&mut self, id: CmId, parameters: &ConnectionParameters) {
        let Some(identifier) = self.cm.identifiers.get(&id) else { return };
        let primary = Path {
            local_lid: 0xffff,
            remote_lid: 0xffff,
            local_gid: Gid::from(identifier.local_address()),
            remote_gid: Gid::from(identifier.peer_address()),
            flow_label: identifier.flow_label,
            traffic_class: identifier.traffic_class,
            hop_limit: 64,
            local_ack_timeout: identifier.ack_timeout,
            ..Path::default()
        };
        let times = self.hca.settings.cm;
        let request = Req {
            local_id: identifier.local_comm_id,
            service_id: identifier.service,
            local_ca_guid: self.hca.gid(0).guid(),
            local_qpn: identifier.qpn,
            responder_resources: identifier.responder_resources,
            initiator_depth: identifier.initiator_depth,
            remote_response_timeout: times.response_timeout,
            transport_service_type: u8::from(identifier.kind == QpType::Uc),
            end_to_end_flow_control: parameters.flow_control,
            starting_psn: identifier.rq_psn,
            local_response_timeout: times.response_timeout,
            retry_count: identifier.retry_count,
            pkey: PartitionKey::DEFAULT,
            path_mtu_code: identifier.mtu.code(),
            rnr_retry_count: identifier.rnr_retry_count,
            max_cm_retries: times.max_retries.min(15),
            srq: parameters.srq,
            primary_path: primary,
            private_data: private_data_with_addresses(identifier, &parameters.private_data),
            ..Req::default()
        };
        let transaction = identifier.transaction_id;
        self.set_state(id, CmState::ReqSent);
        self.send_with_retries(id, request, transaction);
    }

    /// Handles a REQ.
    pub(super) fn on_req(&mut self, addressing: &AddressHeaders, transaction: u64, req: &Req) {
        let peer = addressing.source;
        if let Some(id) = self.cm.by_remote_comm_id.get(&(peer, req.local_id)).copied() {
            return self.on_duplicate_req(id, peer);
        }
        let reject = |this: &mut CmCall<'_, '_>, reason, information: &[u8]| {
            this.reject_unmatched_req(addressing, transaction, req, reason, information);
        };
        let Some(Ok(header)) = req.rdma_cm_header() else {
            return reject(self, RejectReason::INVALID_SERVICE_ID, &[]);
        };
        let space = req.service_id.port_space().expect("a REQ with addresses has a port space");
        let listener = self.cm.ports.listener(space, req.service_id.port(), header.destination);
        let Some(listener) = listener.filter(|_| !matches!(space, PortSpace::Udp | PortSpace::IpOverIb))
        else {
            return reject(self, RejectReason::INVALID_SERVICE_ID, &[]);
        };
        let Some(source) = find_gid(self.hca, addressing.destination) else {
            return reject(self, RejectReason::PRIMARY_GID, &[]);
        };
        if req.primary_path.remote_gid != source.0 || req.primary_path.local_gid != Gid::from(peer) {
            return reject(self, RejectReason::PRIMARY_GID, &[]);
        }
        let kind = self.cm.identifiers[&listener].kind;
        let transport = match (req.transport_service_type, req.extended_transport_type) {
            (0, _) => Some(QpType::Rc),
            (1, _) => Some(QpType::Uc),
            _ => None,
        };
        if transport != Some(kind) {
            return reject(self, RejectReason::INVALID_TRANSPORT, &[]);
        }
        let mtu = match req.path_mtu() {
            Some(mtu) if mtu <= self.hca.settings.mtu => mtu,
            _ => return reject(self, RejectReason::INVALID_MTU, &[self.hca.settings.mtu.code()]),
        };
        // The peer's queue pair belongs to another connection here. The peer has lost that connection, so that it
        // ends here too (IBA 12.9.8.3.1).
        if let Some(stale) = self.cm.by_remote_qpn.get(&(peer, req.local_qpn)).copied() {
            reject(self, RejectReason::STALE_CONNECTION, &[]);
            if self.cm.identifiers[&stale].state == CmState::Established {
                self.send_dreq(stale);
            }
            return;
        }
        if self.cm.identifiers[&listener].is_backlog_full() {
            let limit =
                self.cm.identifiers[&listener].backlog.as_ref().map_or(0, |listening| listening.limit);
            let reason = CmDropReason::BacklogFull { limit };
            return self.emit_dropped(Some(listener), Kind::Req, peer, reason);
        }
        let Some(id) = self.cm.create_child(listener, addressing, &header, source.1) else {
            return reject(self, RejectReason::NO_RESOURCES, &[]);
        };
        let (comm_id, psn) = (self.cm.allocate_comm_id(), Psn::new(self.cm.next_random() as u32));
        self.cm.by_local_comm_id.insert(comm_id, id);
        self.cm.by_remote_comm_id.insert((peer, req.local_id), id);
        self.cm.by_remote_qpn.insert((peer, req.local_qpn), id);
        let identifier = self.cm.identifiers.get_mut(&id).expect("create_child has inserted it");
        identifier.local_comm_id = comm_id;
        identifier.remote_comm_id = req.local_id;
        identifier.transaction_id = transaction;
        identifier.service = req.service_id;
        identifier.flow_label = req.primary_path.flow_label;
        identifier.traffic_class = req.primary_path.traffic_class;
        identifier.ack_timeout = req.primary_path.local_ack_timeout;
        identifier.mtu = mtu;
        identifier.remote_qpn = req.local_qpn;
        identifier.rq_psn = psn;
        identifier.sq_psn = req.starting_psn;
        // The peer's responder resources bound this side's initiator depth, and vice versa.
        identifier.initiator_depth = req.responder_resources;
        identifier.responder_resources = req.initiator_depth;
        identifier.retry_count = req.retry_count;
        identifier.rnr_retry_count = req.rnr_retry_count;
        self.set_state(id, CmState::ReqReceived);
        let offer = PeerParameters {
            responder_resources: req.initiator_depth,
            initiator_depth: req.responder_resources,
            flow_control: req.end_to_end_flow_control,
            retry_count: req.retry_count,
            rnr_retry_count: req.rnr_retry_count,
            srq: req.srq,
            qpn: req.local_qpn,
        };
        let private_data = req.private_data.0[RdmaCmHeader::LEN..].to_vec();
        let (listener, parameters) = (Some(listener), EventParameters::Connection(offer));
        let event = simple_event(id, EventType::ConnectRequest);
        self.raise_event(api::Event { listener, private_data, parameters, ..event });
    }

    /// The peer retransmits its REQ.
    fn on_duplicate_req(&mut self, id: CmId, peer: IpAddr) {
        self.emit_dropped(Some(id), Kind::Req, peer, CmDropReason::Duplicate);
        let identifier = &self.cm.identifiers[&id];
        match identifier.state {
            CmState::ReqReceived => self.send_mra(id, MessageType::REQ),
            CmState::RepSent => {
                let Some(unanswered) = &identifier.awaited_reply else { return };
                let (addressing, datagram) = (unanswered.message.addressing, unanswered.message.datagram);
                self.push_mad(Some(id), addressing, datagram, true);
            }
            CmState::TimeWait => self.send_rej(id, RejectReason::STALE_CONNECTION, &[]),
            _ => {}
        }
    }

    /// Rejects a REQ that has no identifier.
    fn reject_unmatched_req(
        &mut self,
        addressing: &AddressHeaders,
        transaction: u64,
        req: &Req,
        reason: RejectReason,
        information: &[u8],
    ) {
        let rej = Rej {
            remote_id: req.local_id,
            message_rejected: MessageType::REQ,
            additional_info_length: information.len() as u8,
            reason,
            additional_info: PrivateData::new(information).unwrap_or_default(),
            ..Rej::default()
        };
        self.reply(addressing, transaction, rej);
    }

    /// Sends an MRA: the application has not answered yet.
    fn send_mra(&mut self, id: CmId, subject: MessageType) {
        let Some(identifier) = self.cm.identifiers.get(&id) else { return };
        let mra = Mra {
            local_id: identifier.local_comm_id,
            remote_id: identifier.remote_comm_id,
            message_mraed: subject,
            service_timeout: self.hca.settings.cm.service_timeout,
            ..Mra::default()
        };
        self.send(id, mra, identifier.transaction_id);
    }

    /// Sends the REP of an identifier that `accept` prepared.
    pub(super) fn send_rep(&mut self, id: CmId, parameters: &ConnectionParameters) {
        let Some(identifier) = self.cm.identifiers.get(&id) else { return };
        let rep = Rep {
            local_id: identifier.local_comm_id,
            remote_id: identifier.remote_comm_id,
            local_qpn: identifier.qpn,
            starting_psn: identifier.rq_psn,
            responder_resources: identifier.responder_resources,
            initiator_depth: identifier.initiator_depth,
            target_ack_delay: TARGET_ACK_DELAY,
            end_to_end_flow_control: parameters.flow_control,
            rnr_retry_count: parameters.rnr_retry_count.min(7),
            srq: parameters.srq,
            local_ca_guid: self.hca.gid(0).guid(),
            private_data: PrivateData::new(&parameters.private_data).unwrap_or_default(),
            ..Rep::default()
        };
        let transaction = identifier.transaction_id;
        self.set_state(id, CmState::RepSent);
        self.send_with_retries(id, rep, transaction);
    }

    /// Handles a REP.
    pub(super) fn on_rep(&mut self, addressing: &AddressHeaders, transaction: u64, rep: &Rep) {
        let Some(id) = self.cm.find_by_comm_id(rep.remote_id, addressing.source) else {
            return self.reject_unknown_rep(addressing, transaction, rep);
        };
        let identifier = self.cm.identifiers.get_mut(&id).expect("find_by_comm_id has returned it");
        match identifier.state {
            CmState::ReqSent => {}
            // The RTU was lost, or the application has not answered yet.
            CmState::Established if identifier.remote_comm_id == rep.local_id => {
                let rtu = Rtu { local_id: rep.remote_id, remote_id: rep.local_id, ..Rtu::default() };
                return self.send(id, rtu, transaction);
            }
            CmState::RepReceived if identifier.remote_comm_id == rep.local_id => {
                return self.send_mra(id, MessageType::REP);
            }
            state => {
                return self.emit_dropped(
                    Some(id),
                    Kind::Rep,
                    addressing.source,
                    CmDropReason::UnexpectedInState(state),
                );
            }
        }
        let max_rd_atomic = self.hca.settings.profile.limits().max_qp_rd_atom;
        identifier.remote_comm_id = rep.local_id;
        identifier.remote_qpn = rep.local_qpn;
        identifier.sq_psn = rep.starting_psn;
        identifier.initiator_depth =
            rep.responder_resources.min(identifier.initiator_depth).min(max_rd_atomic);
        identifier.responder_resources = rep.initiator_depth.min(max_rd_atomic);
        identifier.rnr_retry_count = rep.rnr_retry_count;
        self.hca.processes.on_reply(addressing.source, identifier.service, rep.local_id);
        self.cm.by_remote_comm_id.insert((addressing.source, rep.local_id), id);
        self.cm.by_remote_qpn.insert((addressing.source, rep.local_qpn), id);
        self.stop_retries(id);
        self.set_state(id, CmState::RepReceived);
        let offer = PeerParameters {
            responder_resources: rep.initiator_depth,
            initiator_depth: rep.responder_resources,
            flow_control: rep.end_to_end_flow_control,
            retry_count: 0,
            rnr_retry_count: rep.rnr_retry_count,
            srq: rep.srq,
            qpn: rep.local_qpn,
        };
        let (private_data, parameters) = (rep.private_data.0.to_vec(), EventParameters::Connection(offer));
        let event = simple_event(id, EventType::ConnectResponse);
        self.raise_event(api::Event { private_data, parameters, ..event });
    }

    /// Rejects a REP to an unknown or finished request.
    fn reject_unknown_rep(&mut self, addressing: &AddressHeaders, transaction: u64, rep: &Rep) {
        self.emit_dropped(None, Kind::Rep, addressing.source, CmDropReason::NoSuchConnection);
        let rej = Rej {
            local_id: rep.remote_id,
            remote_id: rep.local_id,
            message_rejected: MessageType::REP,
            reason: RejectReason::INVALID_COMMUNICATION_ID,
            ..Rej::default()
        };
        self.reply(addressing, transaction, rej);
    }

    /// Establishes the connection. The active side sends an RTU; the REP was its event. The passive side raises an
    /// event.
    pub(super) fn establish(&mut self, id: CmId) {
        let Some(identifier) = self.cm.identifiers.get(&id) else { return };
        let is_active_side = identifier.state == CmState::RepReceived;
        if is_active_side {
            let (local_id, remote_id) = (identifier.local_comm_id, identifier.remote_comm_id);
            let transaction = identifier.transaction_id;
            let rtu = Rtu { local_id, remote_id, ..Rtu::default() };
            self.send(id, rtu, transaction);
        }
        self.stop_retries(id);
        self.set_state(id, CmState::Established);
        if !is_active_side {
            self.raise_simple_event(id, EventType::Established, 0);
        }
    }

    /// Handles an RTU.
    pub(super) fn on_rtu(&mut self, peer: IpAddr, rtu: &Rtu) {
        let Some(id) = self.cm.find_by_comm_id(rtu.remote_id, peer) else {
            return self.emit_dropped(None, Kind::Rtu, peer, CmDropReason::NoSuchConnection);
        };
        match self.cm.identifiers[&id].state {
            CmState::RepSent => self.establish(id),
            CmState::Established => self.emit_dropped(Some(id), Kind::Rtu, peer, CmDropReason::Duplicate),
            state => self.emit_dropped(Some(id), Kind::Rtu, peer, CmDropReason::UnexpectedInState(state)),
        }
    }

    /// Handles an MRA: extends the timeout.
    pub(super) fn on_mra(&mut self, peer: IpAddr, mra: &Mra) {
        let Some(id) = self.cm.find_by_comm_id(mra.remote_id, peer) else {
            return self.emit_dropped(None, Kind::Mra, peer, CmDropReason::NoSuchConnection);
        };
        let state = self.cm.identifiers[&id].state;
        let fits = matches!(
            (state, mra.message_mraed),
            (CmState::ReqSent, MessageType::REQ) | (CmState::RepSent, MessageType::REP)
        );
        if !fits {
            return self.emit_dropped(Some(id), Kind::Mra, peer, CmDropReason::UnexpectedInState(state));
        }
        let wait = Duration::from_nanos(4096 << mra.service_timeout.min(MAX_MRA_TIMEOUT));
        let at = self.ctx.now.plus(self.hca.settings.cm.reply_timeout()).plus(wait);
        self.set_deadline(id, Some(at));
    }

    /// Rejects the pending request of an identifier and closes it.
    pub(super) fn reject_and_close(&mut self, id: CmId, reason: RejectReason, private_data: &[u8]) {
        if self.cm.identifiers.get(&id).is_some_and(|identifier| identifier.is_datagram()) {
            self.reject_sidr(id, SidrStatus::REJECTED, private_data);
        } else {
            self.send_rej(id, reason, private_data);
        }
        self.stop_retries(id);
        self.set_state(id, CmState::Closed);
        self.cm.remove_connection(id);
    }

    /// Sends a REJ.
    pub(super) fn send_rej(&mut self, id: CmId, reason: RejectReason, private_data: &[u8]) {
        let Some(identifier) = self.cm.identifiers.get(&id) else { return };
        let subject = match identifier.state {
            CmState::ReqReceived | CmState::TimeWait => MessageType::REQ,
            CmState::RepReceived => MessageType::REP,
            _ => MessageType::OTHER,
        };
        // Linux includes its communication ID only if the peer knows it.
        let local_id = match subject {
            MessageType::REQ => Default::default(),
            _ => identifier.local_comm_id,
        };
        let rej = Rej {
            local_id,
            remote_id: identifier.remote_comm_id,
            message_rejected: subject,
            reason,
            private_data: PrivateData::new(private_data).unwrap_or_default(),
            ..Rej::default()
        };
        let transaction = identifier.transaction_id;
        self.send(id, rej, transaction);
    }

    /// Handles a REJ.
    pub(super) fn on_rej(&mut self, peer: IpAddr, rej: &Rej) {
        // A peer that times out before the REP does not know our communication ID.
        let found = self.cm.find_by_comm_id(rej.remote_id, peer);
        let found = found.or_else(|| self.cm.by_remote_comm_id.get(&(peer, rej.local_id)).copied());
        let Some(id) = found else {
            return self.emit_dropped(None, Kind::Rej, peer, CmDropReason::NoSuchConnection);
        };
        let state = self.cm.identifiers[&id].state;
        match state {
            CmState::ReqSent | CmState::RepSent | CmState::ReqReceived | CmState::RepReceived => {
                self.cm.release_backlog(id);
                self.stop_retries(id);
                self.set_state(id, CmState::Closed);
                self.cm.remove_connection(id);
                let (status, private_data) = (i32::from(rej.reason.0), rej.private_data.0.to_vec());
                let event = simple_event(id, EventType::Rejected);
                self.raise_event(api::Event { status, private_data, ..event });
            }
            CmState::Established => {
                self.enter_time_wait(id);
                self.raise_simple_event(id, EventType::Disconnected, 0);
            }
            CmState::DreqSent => self.fail_connection(id, CmFailure::PeerUnreachable),
            state => self.emit_dropped(Some(id), Kind::Rej, peer, CmDropReason::UnexpectedInState(state)),
        }
    }
}

impl CmIdentifier {
    pub(super) fn is_backlog_full(&self) -> bool {
        self.backlog.as_ref().is_none_or(|listening| listening.pending >= listening.limit)
    }
}
