//! The calls of applications.

use super::identifier::Identifier;
use super::{CmState, Detail, EventKind, Manager, words};
use crate::card::Card;
use crate::{AddressVector, ClientId, CmId, Context, Error, Hca, Limits, Resource};
use alloc::vec::Vec;
use core::net::IpAddr;
use softhca_wire::cm::{RejectReason, ServiceId};
use softhca_wire::{Gid, Qpn};
use words::{Call, DatagramTarget, Parameters, Reply};

impl Hca {
    /// Carries out a call of an application to the connection manager.
    pub fn cm(&mut self, ctx: &mut Context<'_>, client: ClientId, call: Call) -> Result<Reply, Error> {
        self.known(client)?;
        self.cm.call(&mut self.card, ctx, client, call)
    }

    /// How many identifiers and channels the connection manager has, and how many ended connections it
    /// remembers.
    pub fn cm_census(&self) -> [usize; 3] {
        self.cm.census()
    }
}

impl Manager {
    fn call(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        client: ClientId,
        call: Call,
    ) -> Result<Reply, Error> {
        match call {
            Call::CreateChannel => return self.create_channel(client).map(Reply::Channel),
            Call::DestroyChannel(channel) => self.destroy_channel(client, channel)?,
            Call::Take(channel) => return self.take(client, channel),
            Call::Create { channel, space, kind } => {
                return self.create(client, channel, space, kind).map(Reply::Id);
            }
            Call::Destroy(id) => {
                self.own(client, id)?;
                self.destroy(card, ctx, id);
            }
            Call::Migrate { id, channel } => self.migrate(ctx, client, id, channel)?,
            Call::SetOption { id, option } => self.set_option(client, id, option)?,
            Call::Bind { id, address } => self.bind(card, ctx, client, id, address)?,
            Call::ResolveAddress { id, source, destination } => {
                self.resolve_address(card, ctx, client, id, source, destination)?;
            }
            Call::ResolveRoute { id, mtu } => self.resolve_route(card, ctx, client, id, mtu)?,
            Call::Listen { id, backlog } => self.listen(card, ctx, client, id, backlog)?,
            Call::Connect { id, parameters } => self.connect(card, ctx, client, id, &parameters)?,
            Call::Accept { id, parameters } => self.accept(card, ctx, client, id, &parameters)?,
            Call::Reject { id, reason, private_data } => {
                self.reject(card, ctx, client, id, reason, &private_data)?;
            }
            Call::Establish(id) => match self.own(client, id)?.state {
                CmState::ReplyReceived | CmState::ReplySent => self.establish(card, ctx, id),
                CmState::Established => {}
                state => return Err(Error::CmState { id, state, call: "establish" }),
            },
            Call::Disconnect(id) => self.disconnect(card, ctx, client, id)?,
            Call::Attributes { id, state } => {
                return self.own(client, id)?.attributes(id, state).map(Reply::Attributes);
            }
            Call::Query(id) => {
                let identifier = self.own(client, id)?;
                return Ok(Reply::View(identifier.view(card.gid(identifier.source_index))));
            }
            Call::Join { id, group } => self.join(card, ctx, client, id, group)?,
            Call::Leave { id, group } => {
                self.own(client, id)?;
                check_group(group)?;
            }
        }
        Ok(Reply::Done)
    }

    /// An identifier of the client.
    pub(super) fn own(&mut self, client: ClientId, id: CmId) -> Result<&mut Identifier, Error> {
        let found = self.identifiers.get_mut(&id).filter(|identifier| identifier.client == client);
        found.ok_or(Error::NotFound { resource: Resource::CmIdentifier, number: id.0 })
    }

    fn connect(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        client: ClientId,
        id: CmId,
        parameters: &Parameters,
    ) -> Result<(), Error> {
        let (psn, name) = (self.draw() as u32, self.draw_name());
        let identifier = self.own(client, id)?;
        if identifier.state != CmState::RouteResolved {
            return Err(Error::CmState { id, state: identifier.state, call: "connect" });
        }
        let (datagram, peer) = (identifier.is_datagram(), identifier.peer.expect("it is resolved"));
        let room = if datagram { words::SERVICE_REQUEST_DATA } else { words::REQUEST_DATA };
        check_data(&parameters.private_data, room)?;
        check_queue_pair(datagram, parameters)?;
        identifier.take(parameters);
        identifier.name = name;
        identifier.service = ServiceId::new(identifier.space, peer.port());
        identifier.transaction = transaction(name);
        identifier.receive_psn = softhca_wire::Psn::new(psn);
        self.by_name.insert(name, id);
        if datagram {
            self.send_service_request(card, ctx, id, &parameters.private_data);
        } else {
            self.send_request(card, ctx, id, parameters);
        }
        Ok(())
    }

    fn accept(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        client: ClientId,
        id: CmId,
        parameters: &Parameters,
    ) -> Result<(), Error> {
        let identifier = self.own(client, id)?;
        let state = identifier.state;
        match state {
            CmState::RequestReceived => {
                check_data(&parameters.private_data, words::REPLY_DATA)?;
                check_queue_pair(false, parameters)?;
                identifier.queue_pair = parameters.queue_pair;
                // Neither side does more than both can (IBA 12.7.29, 12.7.30).
                let most = Limits::CARD.reads;
                identifier.responder_resources = parameters.responder_resources.min(most);
                let depth = parameters.initiator_depth.min(most);
                identifier.initiator_depth = identifier.initiator_depth.min(depth);
                self.release_backlog(id);
                self.send_reply(card, ctx, id, parameters);
            }
            CmState::ServiceRequestReceived => {
                check_data(&parameters.private_data, words::SERVICE_REPLY_DATA)?;
                check_queue_pair(true, parameters)?;
                identifier.queue_pair = parameters.queue_pair;
                identifier.queue_key = parameters.queue_key.unwrap_or(words::DATAGRAM_KEY);
                self.release_backlog(id);
                self.send_service_reply(card, ctx, id, &parameters.private_data);
            }
            state => return Err(Error::CmState { id, state, call: "accept" }),
        }
        Ok(())
    }

    fn reject(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        client: ClientId,
        id: CmId,
        reason: RejectReason,
        private_data: &[u8],
    ) -> Result<(), Error> {
        let identifier = self.own(client, id)?;
        let room = if identifier.is_datagram() { words::SERVICE_REPLY_DATA } else { words::REJECT_DATA };
        check_data(private_data, room)?;
        match identifier.state {
            CmState::RequestReceived | CmState::ServiceRequestReceived => {
                self.release_backlog(id);
                self.refuse(card, ctx, id, reason, private_data);
            }
            CmState::ReplyReceived => self.refuse(card, ctx, id, reason, private_data),
            state => return Err(Error::CmState { id, state, call: "reject" }),
        }
        Ok(())
    }

    fn disconnect(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        client: ClientId,
        id: CmId,
    ) -> Result<(), Error> {
        match self.own(client, id)?.state {
            CmState::Established | CmState::ReplySent | CmState::ReplyReceived => {
                self.send_disconnect(card, ctx, id);
            }
            CmState::DisconnectReceived => {
                self.send_disconnect_reply(card, ctx, id);
                self.enter_time_wait(card, ctx, id);
            }
            CmState::DisconnectSent | CmState::TimeWait => {}
            state => return Err(Error::CmState { id, state, call: "disconnect" }),
        }
        Ok(())
    }

    fn join(
        &mut self,
        card: &Card,
        ctx: &mut Context<'_>,
        client: ClientId,
        id: CmId,
        group: IpAddr,
    ) -> Result<(), Error> {
        let identifier = self.own(client, id)?;
        check_group(group)?;
        if !identifier.is_datagram() {
            let why = "only identifiers of the UDP and IPoIB port spaces join groups";
            return Err(Error::Invalid { what: "multicast", why });
        }
        if !matches!(identifier.state, CmState::Bound | CmState::AddressResolved | CmState::RouteResolved) {
            return Err(Error::CmState { id, state: identifier.state, call: "join" });
        }
        let fits = |gid: &Gid| gid.ip().is_ipv4() == group.is_ipv4();
        let index = card.gids.iter().position(fits).ok_or(Error::NetworkUnreachable { address: group })?;
        let path = AddressVector {
            source_index: index as u8,
            traffic_class: identifier.traffic_class,
            ..AddressVector::to(Gid::from(group))
        };
        let queue_key = identifier.queue_key;
        let detail = Detail::Datagram(DatagramTarget { path, queue_pair: Qpn::MULTICAST, queue_key });
        let (kind, private_data) = (EventKind::MulticastJoin, Vec::new());
        self.raise(ctx, words::Event { id, listener: None, kind, status: 0, private_data, detail });
        Ok(())
    }
}

impl Identifier {
    /// Takes over what the application offers and asks for.
    fn take(&mut self, parameters: &Parameters) {
        let most = Limits::CARD.reads;
        self.queue_pair = parameters.queue_pair;
        self.queue_key = parameters.queue_key.unwrap_or(self.queue_key);
        self.responder_resources = parameters.responder_resources.min(most);
        self.initiator_depth = parameters.initiator_depth.min(most);
        self.retry_count = parameters.retry_count.min(7);
        self.rnr_retry_count = parameters.rnr_retry_count.min(7);
    }
}

/// The transaction of the messages that begin with this name, as Linux forms it.
pub(super) fn transaction(name: softhca_wire::cm::CommunicationId) -> u64 {
    const AGENT: u64 = 2;
    AGENT << 32 | u64::from(name.0.swap_bytes())
}

fn check_data(data: &[u8], room: usize) -> Result<(), Error> {
    if data.len() > room {
        let (value, limit) = (data.len() as u64, room as u64);
        return Err(Error::TooLarge { what: "private data", value, limit });
    }
    Ok(())
}

fn check_queue_pair(datagram: bool, parameters: &Parameters) -> Result<(), Error> {
    let number = parameters.queue_pair;
    if number.value() < 2 && !datagram {
        let why = "a connection needs the queue pair that it connects";
        return Err(Error::Invalid { what: "queue pair", why });
    }
    Ok(())
}

fn check_group(group: IpAddr) -> Result<(), Error> {
    if !group.is_multicast() {
        return Err(Error::Invalid { what: "multicast", why: "the address is not one of a group" });
    }
    Ok(())
}
