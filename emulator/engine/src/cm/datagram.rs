//! Finding the datagram queue pair of a service: SIDR_REQ, SIDR_REP.

use super::connect::{answer_to, ignore, with_addresses};
use super::identifier::Sent;
use super::{CmIgnored, CmKind, CmState, Detail, EventKind, Manager, own_gid, words};
use crate::card::Card;
use crate::{CmId, Context, Event};
use core::net::IpAddr;
use softhca_wire::cm::{CommunicationId, Datagram, PrivateData, RdmaCmHeader, SidrRep, SidrReq, SidrStatus};
use softhca_wire::{Envelope, PartitionKey};
use words::DatagramTarget;

impl Manager {
    /// Sends the SIDR_REQ of an identifier that `connect` prepared.
    pub(super) fn send_service_request(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        id: CmId,
        data: &[u8],
    ) {
        let Some(identifier) = self.identifiers.get(&id) else { return };
        let request = SidrReq {
            request_id: identifier.name.0,
            partition: PartitionKey::DEFAULT,
            service: identifier.service,
            private_data: with_addresses(identifier, data),
        };
        let transaction = identifier.transaction;
        self.enter(ctx, id, CmState::ServiceRequestSent);
        self.send_until_answered(card, ctx, id, request, transaction);
    }

    /// Takes a SIDR_REQ.
    pub(super) fn on_service_request(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        envelope: &Envelope,
        transaction: u64,
        req: &SidrReq,
    ) {
        let peer = envelope.source;
        let name = CommunicationId(req.request_id);
        if let Some(id) = self.by_peer.get(&(peer, name)).copied() {
            ignore(ctx, Some(id), "SIDR_REQ", peer, CmIgnored::Duplicate);
            if let Some(answer) = &self.identifiers[&id].answer {
                let (envelope, datagram) = (answer.envelope, answer.datagram);
                self.outbox.push(card, ctx, Some(id), envelope, datagram, true);
            }
            return;
        }
        let header = req.addresses().and_then(Result::ok);
        let space = req.service.port_space();
        let listener = header
            .zip(space)
            .and_then(|(header, space)| self.ports.listener(space, req.service.port(), header.destination));
        let listener = listener.filter(|id| self.identifiers[id].is_datagram());
        let (Some(listener), Some(header), Some(source)) =
            (listener, header, own_gid(card, envelope.destination))
        else {
            let rep = SidrRep {
                request_id: req.request_id,
                status: SidrStatus::UNSUPPORTED_SERVICE,
                service: req.service,
                ..SidrRep::default()
            };
            let datagram = Datagram::new(transaction, rep);
            return self.outbox.push(card, ctx, None, answer_to(envelope), datagram, false);
        };
        if self.identifiers[&listener].is_full() {
            let limit =
                self.identifiers[&listener].listening.as_ref().map_or(0, |listening| listening.backlog);
            let (message, reason) = (CmKind::of(&(*req).into()), CmIgnored::BacklogFull { limit });
            return ctx.tell(Event::CmIgnored { id: Some(listener), message, peer, reason });
        }
        let Some(id) = self.child(listener, envelope, &header, source.1) else {
            return ignore(ctx, Some(listener), "SIDR_REQ", peer, CmIgnored::TooManyIdentifiers);
        };
        self.by_peer.insert((peer, name), id);
        let identifier = self.identifiers.get_mut(&id).expect("it was just made");
        identifier.remote_name = name;
        identifier.transaction = transaction;
        identifier.service = req.service;
        let (path, queue_key) = (identifier.path(), identifier.queue_key);
        self.enter(ctx, id, CmState::ServiceRequestReceived);
        let detail = Detail::Datagram(DatagramTarget { path, queue_pair: Default::default(), queue_key });
        let private_data = req.private_data.0[RdmaCmHeader::LEN..].to_vec();
        let (listener, kind) = (Some(listener), EventKind::ConnectRequest);
        self.raise(ctx, words::Event { id, listener, kind, status: 0, private_data, detail });
    }

    /// Names the queue pair of an identifier that `accept` prepared.
    pub(super) fn send_service_reply(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        id: CmId,
        data: &[u8],
    ) {
        let Some(identifier) = self.identifiers.get_mut(&id) else { return };
        let rep = SidrRep {
            request_id: identifier.remote_name.0,
            status: SidrStatus::VALID,
            qp: identifier.queue_pair,
            service: identifier.service,
            queue_key: identifier.queue_key,
            private_data: PrivateData::new(data).unwrap_or_default(),
            ..SidrRep::default()
        };
        let transaction = identifier.transaction;
        let (envelope, datagram) = (identifier.envelope(), Datagram::new(transaction, rep));
        identifier.answer = Some(alloc::boxed::Box::new(Sent { envelope, datagram }));
        self.enter(ctx, id, CmState::Resolved);
        self.send(card, ctx, id, rep, transaction);
    }

    /// Names none.
    pub(super) fn refuse_service(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        id: CmId,
        status: SidrStatus,
        data: &[u8],
    ) {
        let Some(identifier) = self.identifiers.get(&id) else { return };
        let rep = SidrRep {
            request_id: identifier.remote_name.0,
            status,
            service: identifier.service,
            private_data: PrivateData::new(data).unwrap_or_default(),
            ..SidrRep::default()
        };
        let transaction = identifier.transaction;
        self.send(card, ctx, id, rep, transaction);
    }

    /// Takes a SIDR_REP.
    pub(super) fn on_service_reply(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        peer: IpAddr,
        rep: &SidrRep,
    ) {
        let Some(id) = self.named(CommunicationId(rep.request_id), peer) else {
            return ignore(ctx, None, "SIDR_REP", peer, CmIgnored::NoSuchConnection);
        };
        let identifier = self.identifiers.get_mut(&id).expect("it was just found");
        if identifier.state != CmState::ServiceRequestSent {
            return ignore(ctx, Some(id), "SIDR_REP", peer, CmIgnored::Duplicate);
        }
        let private_data = rep.private_data.0.to_vec();
        identifier.peer_queue_pair = rep.qp;
        let target = DatagramTarget { path: identifier.path(), queue_pair: rep.qp, queue_key: rep.queue_key };
        self.answered(card, id);
        let (state, kind, detail) = match rep.status {
            SidrStatus::VALID => (CmState::Resolved, EventKind::Established, Detail::Datagram(target)),
            _ => (CmState::Closed, EventKind::Unreachable, Detail::None),
        };
        self.enter(ctx, id, state);
        self.forget_connection(id);
        let status = i32::from(rep.status.0);
        self.raise(ctx, words::Event { id, listener: None, kind, status, private_data, detail });
    }
}
