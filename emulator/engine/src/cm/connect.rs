//! Making connections: REQ, MRA, REP, RTU, REJ.

use super::identifier::Identifier;
use super::outbox::SOURCE_PORT;
use super::{
    CmFailure, CmIgnored, CmKind, CmState, Detail, EventKind, MOST_PATIENCE, Manager, TARGET_ACK_DELAY,
    own_gid, words,
};
use crate::card::Card;
use crate::{CmId, Context, Event, Limits, QpKind};
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use softhca_wire::cm::{
    Datagram, Mra, Path, PortSpace, PrivateData, RdmaCmHeader, Rej, RejectReason, Rep, Req, Rtu, SidrStatus,
    Subject,
};
use softhca_wire::{Envelope, Gid, PartitionKey, Psn};
use words::{Offer, Parameters};

/// The header of the RDMA CM, and the application's data behind it.
pub(super) fn with_addresses<const N: usize>(identifier: &Identifier, data: &[u8]) -> PrivateData<N> {
    let header = RdmaCmHeader {
        source: identifier.local_address(),
        source_port: identifier.local.map_or(0, |local| local.port()),
        destination: identifier.peer_address(),
    };
    let mut bytes = header.emit().to_vec();
    bytes.extend(data);
    PrivateData::new(&bytes).unwrap_or_default()
}

impl Manager {
    /// Sends the REQ of an identifier that `connect` prepared.
    pub(super) fn send_request(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        id: CmId,
        parameters: &Parameters,
    ) {
        let Some(identifier) = self.identifiers.get(&id) else { return };
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
        let times = card.settings.cm;
        let request = Req {
            local_id: identifier.name,
            service: identifier.service,
            local_guid: card.gid(0).guid(),
            local_qp: identifier.queue_pair,
            responder_resources: identifier.responder_resources,
            initiator_depth: identifier.initiator_depth,
            remote_response_timeout: times.response,
            transport: u8::from(identifier.kind == QpKind::Uc),
            flow_control: parameters.flow_control,
            starting_psn: identifier.receive_psn,
            local_response_timeout: times.response,
            retry_count: identifier.retry_count,
            partition: PartitionKey::DEFAULT,
            mtu: identifier.mtu.code(),
            rnr_retry_count: identifier.rnr_retry_count,
            max_cm_retries: times.retries.min(15),
            shared_receive_queue: parameters.shared_receive_queue,
            primary,
            private_data: with_addresses(identifier, &parameters.private_data),
            ..Req::default()
        };
        let transaction = identifier.transaction;
        self.enter(ctx, id, CmState::RequestSent);
        self.send_until_answered(card, ctx, id, request, transaction);
    }

    /// Takes a REQ.
    pub(super) fn on_request(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        envelope: &Envelope,
        transaction: u64,
        req: &Req,
    ) {
        let peer = envelope.source;
        if let Some(id) = self.by_peer.get(&(peer, req.local_id)).copied() {
            return self.on_request_again(card, ctx, id, peer);
        }
        let refuse =
            |this: &mut Manager, card: &mut Card, ctx: &mut Context<'_>, reason, information: &[u8]| {
                this.refuse_stranger(card, ctx, envelope, transaction, req, reason, information);
            };
        let Some(Ok(header)) = req.addresses() else {
            return refuse(self, card, ctx, RejectReason::INVALID_SERVICE_ID, &[]);
        };
        let space = req.service.port_space().expect("it has addresses");
        let listener = self.ports.listener(space, req.service.port(), header.destination);
        let Some(listener) = listener.filter(|_| !matches!(space, PortSpace::Udp | PortSpace::IpOverIb))
        else {
            return refuse(self, card, ctx, RejectReason::INVALID_SERVICE_ID, &[]);
        };
        let Some(source) = own_gid(card, envelope.destination) else {
            return refuse(self, card, ctx, RejectReason::PRIMARY_GID, &[]);
        };
        if req.primary.remote_gid != source.0 || req.primary.local_gid != Gid::from(peer) {
            return refuse(self, card, ctx, RejectReason::PRIMARY_GID, &[]);
        }
        let kind = self.identifiers[&listener].kind;
        let transport = match (req.transport, req.extended_transport) {
            (0, _) => Some(QpKind::Rc),
            (1, _) => Some(QpKind::Uc),
            _ => None,
        };
        if transport != Some(kind) {
            return refuse(self, card, ctx, RejectReason::INVALID_TRANSPORT, &[]);
        }
        let mtu = match req.path_mtu() {
            Some(mtu) if mtu <= card.settings.mtu => mtu,
            _ => return refuse(self, card, ctx, RejectReason::INVALID_MTU, &[card.settings.mtu.code()]),
        };
        // The queue pair is known as part of another connection: the peer does not know that one any more, so
        // that it is over here too (IBA 12.9.8.3.1).
        if let Some(stale) = self.by_peer_queue_pair.get(&(peer, req.local_qp)).copied() {
            refuse(self, card, ctx, RejectReason::STALE_CONNECTION, &[]);
            if self.identifiers[&stale].state == CmState::Established {
                self.send_disconnect(card, ctx, stale);
            }
            return;
        }
        if self.identifiers[&listener].is_full() {
            let limit =
                self.identifiers[&listener].listening.as_ref().map_or(0, |listening| listening.backlog);
            let reason = CmIgnored::BacklogFull { limit };
            return ctx.tell(Event::CmIgnored {
                id: Some(listener),
                message: CmKind::of(&(*req).into()),
                peer,
                reason,
            });
        }
        let Some(id) = self.child(listener, envelope, &header, source.1) else {
            return refuse(self, card, ctx, RejectReason::NO_RESOURCES, &[]);
        };
        let (name, psn) = (self.draw_name(), Psn::new(self.draw() as u32));
        self.by_name.insert(name, id);
        self.by_peer.insert((peer, req.local_id), id);
        self.by_peer_queue_pair.insert((peer, req.local_qp), id);
        let identifier = self.identifiers.get_mut(&id).expect("it was just made");
        identifier.name = name;
        identifier.remote_name = req.local_id;
        identifier.transaction = transaction;
        identifier.service = req.service;
        identifier.flow_label = req.primary.flow_label;
        identifier.traffic_class = req.primary.traffic_class;
        identifier.ack_timeout = req.primary.local_ack_timeout;
        identifier.mtu = mtu;
        identifier.peer_queue_pair = req.local_qp;
        identifier.receive_psn = psn;
        identifier.send_psn = req.starting_psn;
        // What the peer serves is what this side may have outstanding, and the other way round.
        identifier.initiator_depth = req.responder_resources;
        identifier.responder_resources = req.initiator_depth;
        identifier.retry_count = req.retry_count;
        identifier.rnr_retry_count = req.rnr_retry_count;
        self.enter(ctx, id, CmState::RequestReceived);
        let offer = Offer {
            responder_resources: req.initiator_depth,
            initiator_depth: req.responder_resources,
            flow_control: req.flow_control,
            retry_count: req.retry_count,
            rnr_retry_count: req.rnr_retry_count,
            shared_receive_queue: req.shared_receive_queue,
            queue_pair: req.local_qp,
        };
        let private_data = req.private_data.0[RdmaCmHeader::LEN..].to_vec();
        self.raise(
            ctx,
            words::Event {
                id,
                listener: Some(listener),
                kind: EventKind::ConnectRequest,
                status: 0,
                private_data,
                detail: Detail::Connection(offer),
            },
        );
    }

    /// The peer did not hear an answer to its REQ.
    fn on_request_again(&mut self, card: &mut Card, ctx: &mut Context<'_>, id: CmId, peer: IpAddr) {
        let identifier = &self.identifiers[&id];
        ctx.tell(Event::CmIgnored {
            id: Some(id),
            message: CmKind("REQ"),
            peer,
            reason: CmIgnored::Duplicate,
        });
        match identifier.state {
            CmState::RequestReceived => self.ask_for_patience(card, ctx, id, Subject::REQ),
            CmState::ReplySent => {
                let Some(unanswered) = &identifier.unanswered else { return };
                let (envelope, datagram) = (unanswered.message.envelope, unanswered.message.datagram);
                self.outbox.push(card, ctx, Some(id), envelope, datagram, true);
            }
            CmState::TimeWait => self.send_reject(card, ctx, id, RejectReason::STALE_CONNECTION, &[]),
            _ => {}
        }
    }

    /// An identifier for a request that came to `listener`, if there is room.
    pub(super) fn child(
        &mut self,
        listener: CmId,
        envelope: &Envelope,
        header: &RdmaCmHeader,
        source_index: u8,
    ) -> Option<CmId> {
        let parent = &self.identifiers[&listener];
        let mut child = Identifier::new(parent.client, parent.channel, parent.space, parent.kind);
        let port = parent.local.map_or(0, |local| local.port());
        child.local = Some(SocketAddr::new(envelope.destination, port));
        child.peer = Some(SocketAddr::new(envelope.source, header.source_port));
        child.source_index = source_index;
        child.listener = Some(listener);
        let id = self.insert(child).ok()?;
        let parent = self.identifiers.get_mut(&listener);
        if let Some(listening) = parent.and_then(|parent| parent.listening.as_mut()) {
            listening.waiting += 1;
        }
        Some(id)
    }

    /// Refuses a REQ that no identifier stands for.
    fn refuse_stranger(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        envelope: &Envelope,
        transaction: u64,
        req: &Req,
        reason: RejectReason,
        information: &[u8],
    ) {
        let rej = Rej {
            remote_id: req.local_id,
            subject: Subject::REQ,
            information_length: information.len() as u8,
            reason,
            information: PrivateData::new(information).unwrap_or_default(),
            ..Rej::default()
        };
        self.outbox.push(card, ctx, None, answer_to(envelope), Datagram::new(transaction, rej), false);
    }

    /// Asks the peer to wait: the application has its message.
    fn ask_for_patience(&mut self, card: &mut Card, ctx: &mut Context<'_>, id: CmId, subject: Subject) {
        let Some(identifier) = self.identifiers.get(&id) else { return };
        let mra = Mra {
            local_id: identifier.name,
            remote_id: identifier.remote_name,
            subject,
            service_timeout: card.settings.cm.service,
            ..Mra::default()
        };
        self.send(card, ctx, id, mra, identifier.transaction);
    }

    /// Sends the REP of an identifier that `accept` prepared.
    pub(super) fn send_reply(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        id: CmId,
        parameters: &Parameters,
    ) {
        let Some(identifier) = self.identifiers.get(&id) else { return };
        let rep = Rep {
            local_id: identifier.name,
            remote_id: identifier.remote_name,
            local_qp: identifier.queue_pair,
            starting_psn: identifier.receive_psn,
            responder_resources: identifier.responder_resources,
            initiator_depth: identifier.initiator_depth,
            target_ack_delay: TARGET_ACK_DELAY,
            flow_control: parameters.flow_control,
            rnr_retry_count: parameters.rnr_retry_count.min(7),
            shared_receive_queue: parameters.shared_receive_queue,
            local_guid: card.gid(0).guid(),
            private_data: PrivateData::new(&parameters.private_data).unwrap_or_default(),
            ..Rep::default()
        };
        let transaction = identifier.transaction;
        self.enter(ctx, id, CmState::ReplySent);
        self.send_until_answered(card, ctx, id, rep, transaction);
    }

    /// Takes a REP.
    pub(super) fn on_reply(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        envelope: &Envelope,
        transaction: u64,
        rep: &Rep,
    ) {
        let Some(id) = self.named(rep.remote_id, envelope.source) else {
            return self.refuse_unknown(card, ctx, envelope, transaction, rep);
        };
        let identifier = self.identifiers.get_mut(&id).expect("it was just found");
        match identifier.state {
            CmState::RequestSent => {}
            // The RTU was lost, or the application takes its time.
            CmState::Established if identifier.remote_name == rep.local_id => {
                let rtu = Rtu { local_id: rep.remote_id, remote_id: rep.local_id, ..Rtu::default() };
                return self.send(card, ctx, id, rtu, transaction);
            }
            CmState::ReplyReceived if identifier.remote_name == rep.local_id => {
                return self.ask_for_patience(card, ctx, id, Subject::REP);
            }
            state => return ignore(ctx, Some(id), "REP", envelope.source, CmIgnored::OutOfPlace(state)),
        }
        let most = Limits::CARD.reads;
        identifier.remote_name = rep.local_id;
        identifier.peer_queue_pair = rep.local_qp;
        identifier.send_psn = rep.starting_psn;
        identifier.initiator_depth = rep.responder_resources.min(identifier.initiator_depth).min(most);
        identifier.responder_resources = rep.initiator_depth.min(most);
        identifier.rnr_retry_count = rep.rnr_retry_count;
        self.by_peer.insert((envelope.source, rep.local_id), id);
        self.by_peer_queue_pair.insert((envelope.source, rep.local_qp), id);
        self.answered(card, id);
        self.enter(ctx, id, CmState::ReplyReceived);
        let offer = Offer {
            responder_resources: rep.initiator_depth,
            initiator_depth: rep.responder_resources,
            flow_control: rep.flow_control,
            retry_count: 0,
            rnr_retry_count: rep.rnr_retry_count,
            shared_receive_queue: rep.shared_receive_queue,
            queue_pair: rep.local_qp,
        };
        let kind = EventKind::ConnectResponse;
        let (private_data, detail) = (rep.private_data.0.to_vec(), Detail::Connection(offer));
        self.raise(ctx, words::Event { id, listener: None, kind, status: 0, private_data, detail });
    }

    /// Nobody asked for this connection, or nobody does any more.
    fn refuse_unknown(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        envelope: &Envelope,
        transaction: u64,
        rep: &Rep,
    ) {
        ignore(ctx, None, "REP", envelope.source, CmIgnored::NoSuchConnection);
        let rej = Rej {
            local_id: rep.remote_id,
            remote_id: rep.local_id,
            subject: Subject::REP,
            reason: RejectReason::INVALID_COMMUNICATION_ID,
            ..Rej::default()
        };
        self.outbox.push(card, ctx, None, answer_to(envelope), Datagram::new(transaction, rej), false);
    }

    /// The connection stands: the asking side says so, the asked side was told or heard its peer. An event
    /// tells it to the asked side; the asking side has heard it from the REP.
    pub(super) fn establish(&mut self, card: &mut Card, ctx: &mut Context<'_>, id: CmId) {
        let Some(identifier) = self.identifiers.get(&id) else { return };
        let asking = identifier.state == CmState::ReplyReceived;
        if asking {
            let (local_id, remote_id) = (identifier.name, identifier.remote_name);
            let transaction = identifier.transaction;
            let rtu = Rtu { local_id, remote_id, ..Rtu::default() };
            self.send(card, ctx, id, rtu, transaction);
        }
        self.answered(card, id);
        self.enter(ctx, id, CmState::Established);
        if !asking {
            self.raise_plain(ctx, id, EventKind::Established, 0);
        }
    }

    /// Takes an RTU.
    pub(super) fn on_ready(&mut self, card: &mut Card, ctx: &mut Context<'_>, peer: IpAddr, rtu: &Rtu) {
        let Some(id) = self.named(rtu.remote_id, peer) else {
            return ignore(ctx, None, "RTU", peer, CmIgnored::NoSuchConnection);
        };
        match self.identifiers[&id].state {
            CmState::ReplySent => self.establish(card, ctx, id),
            CmState::Established => ignore(ctx, Some(id), "RTU", peer, CmIgnored::Duplicate),
            state => ignore(ctx, Some(id), "RTU", peer, CmIgnored::OutOfPlace(state)),
        }
    }

    /// Takes an MRA: the answer comes later.
    pub(super) fn on_patience(&mut self, card: &mut Card, ctx: &mut Context<'_>, peer: IpAddr, mra: &Mra) {
        let Some(id) = self.named(mra.remote_id, peer) else {
            return ignore(ctx, None, "MRA", peer, CmIgnored::NoSuchConnection);
        };
        let identifier = self.identifiers.get_mut(&id).expect("it was just found");
        let fits = matches!(
            (identifier.state, mra.subject),
            (CmState::RequestSent, Subject::REQ) | (CmState::ReplySent, Subject::REP)
        );
        if !fits {
            return ignore(ctx, Some(id), "MRA", peer, CmIgnored::OutOfPlace(identifier.state));
        }
        let wait = Duration::from_nanos(4096 << mra.service_timeout.min(MOST_PATIENCE));
        let at = ctx.now.plus(card.settings.cm.answer()).plus(wait);
        self.arm(card, id, Some(at));
    }

    /// Refuses what an identifier waits with, and closes it.
    pub(super) fn refuse(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        id: CmId,
        reason: RejectReason,
        private_data: &[u8],
    ) {
        if self.identifiers.get(&id).is_some_and(|identifier| identifier.is_datagram()) {
            self.refuse_service(card, ctx, id, SidrStatus::REJECTED, private_data);
        } else {
            self.send_reject(card, ctx, id, reason, private_data);
        }
        self.answered(card, id);
        self.enter(ctx, id, CmState::Closed);
        self.forget_connection(id);
    }

    /// Sends a REJ of an identifier.
    pub(super) fn send_reject(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        id: CmId,
        reason: RejectReason,
        private_data: &[u8],
    ) {
        let Some(identifier) = self.identifiers.get(&id) else { return };
        let subject = match identifier.state {
            CmState::RequestReceived | CmState::TimeWait => Subject::REQ,
            CmState::ReplyReceived => Subject::REP,
            _ => Subject::OTHER,
        };
        // Linux names itself only where the peer knows the name.
        let local_id = match subject {
            Subject::REQ => Default::default(),
            _ => identifier.name,
        };
        let rej = Rej {
            local_id,
            remote_id: identifier.remote_name,
            subject,
            reason,
            private_data: PrivateData::new(private_data).unwrap_or_default(),
            ..Rej::default()
        };
        let transaction = identifier.transaction;
        self.send(card, ctx, id, rej, transaction);
    }

    /// Takes a REJ.
    pub(super) fn on_reject(&mut self, card: &mut Card, ctx: &mut Context<'_>, peer: IpAddr, rej: &Rej) {
        // Who gives up while it waits for an answer does not know our name yet.
        let found = self.named(rej.remote_id, peer);
        let found = found.or_else(|| self.by_peer.get(&(peer, rej.local_id)).copied());
        let Some(id) = found else {
            return ignore(ctx, None, "REJ", peer, CmIgnored::NoSuchConnection);
        };
        let state = self.identifiers[&id].state;
        match state {
            CmState::RequestSent | CmState::ReplySent | CmState::RequestReceived | CmState::ReplyReceived => {
                self.release_backlog(id);
                self.answered(card, id);
                self.enter(ctx, id, CmState::Closed);
                self.forget_connection(id);
                let (kind, status) = (EventKind::Rejected, i32::from(rej.reason.0));
                let private_data: Vec<u8> = rej.private_data.0.to_vec();
                let detail = Detail::None;
                self.raise(ctx, words::Event { id, listener: None, kind, status, private_data, detail });
            }
            CmState::Established => {
                self.enter_time_wait(card, ctx, id);
                self.raise_plain(ctx, id, EventKind::Disconnected, 0);
            }
            CmState::DisconnectSent => self.give_up(card, ctx, id, CmFailure::LinkDead),
            state => ignore(ctx, Some(id), "REJ", peer, CmIgnored::OutOfPlace(state)),
        }
    }

    /// The identifier with this name, if the message about it comes from its peer.
    pub(super) fn named(&self, name: softhca_wire::cm::CommunicationId, peer: IpAddr) -> Option<CmId> {
        let id = self.by_name.get(&name)?;
        self.identifiers.get(id).filter(|identifier| identifier.peer_address() == peer).map(|_| *id)
    }
}

impl Identifier {
    pub(super) fn is_full(&self) -> bool {
        self.listening.as_ref().is_none_or(|listening| listening.waiting >= listening.backlog)
    }
}

/// The envelope of an answer.
pub(super) fn answer_to(envelope: &Envelope) -> Envelope {
    Envelope {
        source_port: SOURCE_PORT,
        traffic_class: envelope.traffic_class & !3,
        ..Envelope::between(envelope.destination, envelope.source)
    }
}

/// Tells that a message was not acted on.
pub(super) fn ignore(
    ctx: &mut Context<'_>,
    id: Option<CmId>,
    message: &'static str,
    peer: IpAddr,
    reason: CmIgnored,
) {
    ctx.tell(Event::CmIgnored { id, message: CmKind(message), peer, reason });
}
