//! Service ID resolution for datagram queue pairs: SIDR_REQ, SIDR_REP.

use super::connect::private_data_with_addresses;
use super::identifier::SentMad;
use super::{
    CmCall, CmDropReason, CmMessageKind as Kind, CmState, EventParameters, EventType, api, find_gid,
    simple_event,
};
use crate::CmId;
use api::UdParameters;
use core::net::IpAddr;
use softhca_wire::cm::{CommunicationId, Datagram, PrivateData, RdmaCmHeader, SidrRep, SidrReq, SidrStatus};
use softhca_wire::{AddressHeaders, PartitionKey, Qpn};

impl CmCall<'_, '_> {
    /// Sends the SIDR_REQ of an identifier that `connect` prepared.
    pub(super) fn send_sidr_req(&mut self, id: CmId, data: &[u8]) {
        let Some(identifier) = self.cm.identifiers.get(&id) else { return };
        let request = SidrReq {
            request_id: identifier.local_comm_id.0,
            pkey: PartitionKey::DEFAULT,
            service_id: identifier.service,
            private_data: private_data_with_addresses(identifier, data),
        };
        let transaction = identifier.transaction_id;
        self.set_state(id, CmState::SidrReqSent);
        self.send_with_retries(id, request, transaction);
    }

    /// Handles a SIDR_REQ.
    pub(super) fn on_sidr_req(&mut self, addressing: &AddressHeaders, transaction: u64, req: &SidrReq) {
        let peer = addressing.source;
        let comm_id = CommunicationId(req.request_id);
        if let Some(id) = self.cm.by_remote_comm_id.get(&(peer, comm_id)).copied() {
            self.emit_dropped(Some(id), Kind::SidrReq, peer, CmDropReason::Duplicate);
            if let Some(answer) = &self.cm.identifiers[&id].sidr_reply {
                let (addressing, datagram) = (answer.addressing, answer.datagram);
                self.push_mad(Some(id), addressing, datagram, true);
            }
            return;
        }
        let header = req.rdma_cm_header().and_then(Result::ok);
        let space = req.service_id.port_space();
        let listener = header.zip(space).and_then(|(header, space)| {
            self.cm.ports.listener(space, req.service_id.port(), header.destination)
        });
        let listener = listener.filter(|id| self.cm.identifiers[id].is_datagram());
        let (Some(listener), Some(header), Some(source)) =
            (listener, header, find_gid(self.hca, addressing.destination))
        else {
            let rep = SidrRep {
                request_id: req.request_id,
                status: SidrStatus::UNSUPPORTED_SERVICE,
                service_id: req.service_id,
                ..SidrRep::default()
            };
            return self.reply(addressing, transaction, rep);
        };
        if self.cm.identifiers[&listener].is_backlog_full() {
            let limit =
                self.cm.identifiers[&listener].backlog.as_ref().map_or(0, |listening| listening.limit);
            let reason = CmDropReason::BacklogFull { limit };
            return self.emit_dropped(Some(listener), Kind::SidrReq, peer, reason);
        }
        let Some(id) = self.cm.create_child(listener, addressing, &header, source.1) else {
            let reason = CmDropReason::TooManyIdentifiers;
            return self.emit_dropped(Some(listener), Kind::SidrReq, peer, reason);
        };
        self.cm.by_remote_comm_id.insert((peer, comm_id), id);
        let identifier = self.cm.identifiers.get_mut(&id).expect("create_child has inserted it");
        identifier.remote_comm_id = comm_id;
        identifier.transaction_id = transaction;
        identifier.service = req.service_id;
        let (address_vector, qkey) = (identifier.path(), identifier.queue_key);
        self.set_state(id, CmState::SidrReqReceived);
        let parameters = EventParameters::Ud(UdParameters { address_vector, qpn: Qpn::default(), qkey });
        let private_data = req.private_data.0[RdmaCmHeader::LEN..].to_vec();
        let (listener, event) = (Some(listener), simple_event(id, EventType::ConnectRequest));
        self.raise_event(api::Event { listener, private_data, parameters, ..event });
    }

    /// Sends the SIDR_REP of an identifier that `accept` prepared.
    pub(super) fn send_sidr_rep(&mut self, id: CmId, data: &[u8]) {
        let Some(identifier) = self.cm.identifiers.get_mut(&id) else { return };
        let rep = SidrRep {
            request_id: identifier.remote_comm_id.0,
            status: SidrStatus::VALID,
            qpn: identifier.qpn,
            service_id: identifier.service,
            qkey: identifier.queue_key,
            private_data: PrivateData::new(data).unwrap_or_default(),
            ..SidrRep::default()
        };
        let transaction = identifier.transaction_id;
        let (addressing, datagram) = (identifier.addressing(), Datagram::new(transaction, rep));
        identifier.sidr_reply = Some(alloc::boxed::Box::new(SentMad { addressing, datagram }));
        self.set_state(id, CmState::SidrResolved);
        self.send(id, rep, transaction);
    }

    /// Sends a SIDR_REP that rejects the request.
    pub(super) fn reject_sidr(&mut self, id: CmId, status: SidrStatus, data: &[u8]) {
        let Some(identifier) = self.cm.identifiers.get(&id) else { return };
        let rep = SidrRep {
            request_id: identifier.remote_comm_id.0,
            status,
            service_id: identifier.service,
            private_data: PrivateData::new(data).unwrap_or_default(),
            ..SidrRep::default()
        };
        let transaction = identifier.transaction_id;
        self.send(id, rep, transaction);
    }

    /// Handles a SIDR_REP.
    pub(super) fn on_sidr_rep(&mut self, peer: IpAddr, rep: &SidrRep) {
        let Some(id) = self.cm.find_by_comm_id(CommunicationId(rep.request_id), peer) else {
            return self.emit_dropped(None, Kind::SidrRep, peer, CmDropReason::NoSuchConnection);
        };
        let identifier = self.cm.identifiers.get_mut(&id).expect("find_by_comm_id has returned it");
        if identifier.state != CmState::SidrReqSent {
            return self.emit_dropped(Some(id), Kind::SidrRep, peer, CmDropReason::Duplicate);
        }
        let private_data = rep.private_data.0.to_vec();
        identifier.remote_qpn = rep.qpn;
        let target = UdParameters { address_vector: identifier.path(), qpn: rep.qpn, qkey: rep.qkey };
        self.stop_retries(id);
        let (state, kind, parameters) = match rep.status {
            SidrStatus::VALID => (CmState::SidrResolved, EventType::Established, EventParameters::Ud(target)),
            _ => (CmState::Closed, EventType::Unreachable, EventParameters::None),
        };
        self.set_state(id, state);
        self.cm.remove_connection(id);
        let status = i32::from(rep.status.0);
        self.raise_event(api::Event { status, private_data, parameters, ..simple_event(id, kind) });
    }
}
