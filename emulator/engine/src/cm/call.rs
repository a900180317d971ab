//! The calls of applications.

use super::identifier::{Identifier, Listening};
use super::{
    CmState, Detail, EventKind, MOST_CHANNELS, MOST_IDENTIFIERS, MOST_OF_CLIENT, Manager, own_gid, time_wait,
    words,
};
use crate::card::Card;
use crate::{
    AddressVector, ClientId, CmChannelId, CmId, Context, Error, Event, Hca, Limits, QpKind, Resource,
};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use softhca_wire::cm::{PortSpace, RejectReason, ServiceId};
use softhca_wire::{Gid, Mtu, Qpn};
use words::{Call, CmOption, DatagramTarget, Parameters, Reply};

/// Requests that may wait at a listener.
const MOST_BACKLOG: u32 = 1024;

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

    fn create_channel(&mut self, client: ClientId) -> Result<CmChannelId, Error> {
        let limit = MOST_CHANNELS;
        if self.channels.values().filter(|channel| channel.client == client).count() >= limit {
            return Err(Error::Exhausted { resource: Resource::CmChannel, limit });
        }
        let number = CmChannelId(self.next_channel);
        self.next_channel = self.next_channel.wrapping_add(1);
        self.channels.insert(number, super::Channel { client, events: VecDeque::new(), users: 0 });
        Ok(number)
    }

    fn channel(&mut self, client: ClientId, channel: CmChannelId) -> Result<&mut super::Channel, Error> {
        let found = self.channels.get_mut(&channel).filter(|channel| channel.client == client);
        found.ok_or(Error::NotFound { resource: Resource::CmChannel, number: channel.0 })
    }

    fn destroy_channel(&mut self, client: ClientId, number: CmChannelId) -> Result<(), Error> {
        if self.channel(client, number)?.users > 0 {
            let (resource, user) = (Resource::CmChannel, Resource::CmIdentifier);
            return Err(Error::Busy { resource, number: number.0, user });
        }
        self.channels.remove(&number);
        Ok(())
    }

    fn take(&mut self, client: ClientId, channel: CmChannelId) -> Result<Reply, Error> {
        let channel = self.channel(client, channel)?;
        let event = channel.events.pop_front();
        let left = channel.events.len() as u32;
        Ok(Reply::Event(event, left))
    }

    fn create(
        &mut self,
        client: ClientId,
        channel: CmChannelId,
        space: PortSpace,
        kind: QpKind,
    ) -> Result<CmId, Error> {
        self.channel(client, channel)?;
        let kind = match (space, kind) {
            (PortSpace::Udp | PortSpace::IpOverIb, _) => QpKind::Ud,
            (PortSpace::Tcp, QpKind::Rc) => QpKind::Rc,
            (PortSpace::Ib, QpKind::Rc | QpKind::Uc | QpKind::Ud) => kind,
            (PortSpace::Tcp, _) => {
                let why = "the TCP port space is of RC; take the IB port space for another transport";
                return Err(Error::Invalid { what: "transport of an identifier", why });
            }
            (PortSpace::Ib, _) => {
                let why = "the connection manager connects RC, UC and UD queue pairs";
                return Err(Error::Invalid { what: "transport of an identifier", why });
            }
        };
        let identifier = Identifier::new(client, channel, space, kind);
        self.insert(identifier)
    }

    /// Adds an identifier, if there is room.
    pub(super) fn insert(&mut self, identifier: Identifier) -> Result<CmId, Error> {
        let of_client =
            || self.identifiers.values().filter(|other| other.client == identifier.client).count();
        // Counting is dear: a card without that many cannot have a client with that many.
        let limit = match self.identifiers.len() {
            count if count >= MOST_IDENTIFIERS => Some(MOST_IDENTIFIERS),
            count if count >= MOST_OF_CLIENT && of_client() >= MOST_OF_CLIENT => Some(MOST_OF_CLIENT),
            _ => None,
        };
        if let Some(limit) = limit {
            return Err(Error::Exhausted { resource: Resource::CmIdentifier, limit });
        }
        let id = CmId(self.next_identifier);
        self.next_identifier = self.next_identifier.wrapping_add(1);
        if let Some(channel) = self.channels.get_mut(&identifier.channel) {
            channel.users += 1;
        }
        self.identifiers.insert(id, identifier);
        Ok(id)
    }

    /// Ends whatever an identifier is doing, tells the peer, and removes it.
    pub(super) fn destroy(&mut self, card: &mut Card, ctx: &mut Context<'_>, id: CmId) {
        let Some(identifier) = self.identifiers.get(&id) else { return };
        let wait = ctx.now.plus(time_wait(identifier.ack_timeout));
        match identifier.state {
            CmState::RequestSent | CmState::ReplyReceived | CmState::ReplySent => {
                self.send_reject(card, ctx, id, RejectReason::TIMEOUT, &[]);
                self.haunt(card, id, wait);
            }
            CmState::RequestReceived | CmState::ServiceRequestReceived => {
                self.refuse(card, ctx, id, RejectReason::CONSUMER, &[]);
            }
            CmState::Established => {
                self.send_disconnect(card, ctx, id);
                self.haunt(card, id, wait);
            }
            CmState::DisconnectReceived => {
                self.send_disconnect_reply(card, ctx, id);
                self.haunt(card, id, wait);
            }
            CmState::DisconnectSent => self.haunt(card, id, wait),
            CmState::TimeWait => {
                let until = identifier.deadline.unwrap_or(wait);
                self.haunt(card, id, until);
            }
            _ => {}
        }
        self.arm(card, id, None);
        self.release_backlog(id);
        self.forget_connection(id);
        let Some(identifier) = self.identifiers.remove(&id) else { return };
        if let (true, Some(local)) = (identifier.is_bound, identifier.local) {
            self.ports.release(id, identifier.space, local.port());
        }
        let mut orphans = Vec::new();
        if let Some(channel) = self.channels.get_mut(&identifier.channel) {
            channel.users -= 1;
            // A request that nobody took has nobody to answer it.
            channel.events.retain(|event| {
                if event.listener == Some(id) {
                    orphans.push(event.id);
                }
                event.id != id && event.listener != Some(id)
            });
        }
        let state = identifier.state;
        if state != CmState::Closed && state != CmState::Idle {
            ctx.tell(Event::CmStateChanged { id, from: state, to: CmState::Closed });
        }
        for orphan in orphans {
            self.destroy(card, ctx, orphan);
        }
    }

    /// Ends everything that a client has: its peers meet what they would with any dead process.
    pub fn close_client(&mut self, card: &mut Card, ctx: &mut Context<'_>, client: ClientId) {
        let own = |(_, identifier): &(&CmId, &Identifier)| identifier.client == client;
        let all: Vec<CmId> = self.identifiers.iter().filter(own).map(|(id, _)| *id).collect();
        for id in all {
            self.destroy(card, ctx, id);
        }
        self.channels.retain(|_, channel| channel.client != client);
    }

    fn migrate(
        &mut self,
        ctx: &mut Context<'_>,
        client: ClientId,
        id: CmId,
        channel: CmChannelId,
    ) -> Result<(), Error> {
        self.channel(client, channel)?;
        let identifier = self.own(client, id)?;
        let old = core::mem::replace(&mut identifier.channel, channel);
        if old == channel {
            return Ok(());
        }
        let mut moved = VecDeque::new();
        if let Some(old) = self.channels.get_mut(&old) {
            old.users -= 1;
            let (of_id, rest) = old.events.drain(..).partition(|event| event.id == id);
            (moved, old.events) = (of_id, rest);
        }
        let new = self.channel(client, channel)?;
        new.users += 1;
        for event in moved {
            let (kind, status) = (event.kind, event.status);
            self.channel(client, channel)?.events.push_back(event);
            ctx.tell(Event::CmRaised { client, channel, id, kind, status });
        }
        Ok(())
    }

    fn set_option(&mut self, client: ClientId, id: CmId, option: CmOption) -> Result<(), Error> {
        let identifier = self.own(client, id)?;
        match option {
            CmOption::TypeOfService(class) => identifier.traffic_class = class,
            CmOption::AckTimeout(exponent) if exponent < 32 => identifier.ack_timeout = exponent,
            CmOption::AckTimeout(exponent) => {
                return Err(Error::TooLarge { what: "ack timeout", value: exponent.into(), limit: 31 });
            }
            CmOption::ReuseAddress(_) | CmOption::OnlyIpv6(_) if identifier.is_bound => {
                let why = "it has to be set before the address is bound";
                return Err(Error::Invalid { what: "option of an identifier", why });
            }
            CmOption::ReuseAddress(reuse) => identifier.reuse_address = reuse,
            CmOption::OnlyIpv6(only) => identifier.only_ipv6 = only,
        }
        Ok(())
    }

    fn bind(
        &mut self,
        card: &Card,
        ctx: &mut Context<'_>,
        client: ClientId,
        id: CmId,
        address: SocketAddr,
    ) -> Result<(), Error> {
        let draw = self.draw();
        let identifier = self.own(client, id)?;
        if identifier.state != CmState::Idle {
            return Err(Error::CmState { id, state: identifier.state, call: "bind" });
        }
        let ip = here(card, address.ip());
        if !ip.is_unspecified() && own_gid(card, ip).is_none() {
            return Err(Error::AddressNotAvailable { address: ip });
        }
        let (space, reuse, scope) = (identifier.space, identifier.reuse_address, identifier.scope(ip));
        let port = self.ports.bind(id, space, address.port(), scope, reuse, draw)?;
        let identifier = self.own(client, id)?;
        identifier.is_bound = true;
        identifier.local = Some(SocketAddr::new(ip, port));
        identifier.source_index = own_gid(card, ip).map_or(0, |(_, index)| index);
        self.enter(ctx, id, CmState::Bound);
        Ok(())
    }

    fn resolve_address(
        &mut self,
        card: &Card,
        ctx: &mut Context<'_>,
        client: ClientId,
        id: CmId,
        source: Option<SocketAddr>,
        destination: SocketAddr,
    ) -> Result<(), Error> {
        let state = self.own(client, id)?.state;
        if !matches!(state, CmState::Idle | CmState::Bound) {
            return Err(Error::CmState { id, state, call: "resolve address" });
        }
        let target = match here(card, destination.ip()) {
            ip if ip.is_unspecified() => here(card, loopback(ip)),
            ip => ip,
        };
        // The port's address of the same IP version is the one to send from.
        let wanted = source.map(|source| here(card, source.ip())).filter(|ip| !ip.is_unspecified());
        let own = match wanted {
            Some(ip) => own_gid(card, ip).ok_or(Error::AddressNotAvailable { address: ip })?,
            None => {
                let fits = |gid: &Gid| gid.ip().is_ipv4() == target.is_ipv4();
                let index = card.gids.iter().position(fits);
                let index = index.ok_or(Error::NetworkUnreachable { address: target })?;
                (card.gids[index], index as u8)
            }
        };
        if own.0.ip().is_ipv4() != target.is_ipv4() {
            return Err(Error::NetworkUnreachable { address: target });
        }
        if state == CmState::Idle {
            let port = source.map_or(0, |source| source.port());
            self.bind(card, ctx, client, id, SocketAddr::new(own.0.ip(), port))?;
        }
        let identifier = self.own(client, id)?;
        let space = identifier.space;
        let bound = identifier.local.expect("it is bound");
        let local = match bound.ip().is_unspecified() {
            true => own.0.ip(),
            false if bound.ip().is_ipv4() == target.is_ipv4() => bound.ip(),
            false => return Err(Error::NetworkUnreachable { address: target }),
        };
        identifier.local = Some(SocketAddr::new(local, bound.port()));
        identifier.source_index = own_gid(card, local).map_or(own.1, |(_, index)| index);
        identifier.peer = Some(SocketAddr::new(target, destination.port()));
        self.ports.narrow(id, space, bound.port(), local);
        self.enter(ctx, id, CmState::AddressResolved);
        self.raise_plain(ctx, id, EventKind::AddressResolved, 0);
        Ok(())
    }

    fn resolve_route(
        &mut self,
        card: &Card,
        ctx: &mut Context<'_>,
        client: ClientId,
        id: CmId,
        mtu: Mtu,
    ) -> Result<(), Error> {
        let label = self.draw() as u32 & 0xf_ffff;
        let identifier = self.own(client, id)?;
        if identifier.state != CmState::AddressResolved {
            return Err(Error::CmState { id, state: identifier.state, call: "resolve route" });
        }
        identifier.mtu = mtu.min(card.settings.mtu);
        // Zero would leave the choice of the flow to the queue pair numbers.
        identifier.flow_label = label.max(1);
        self.enter(ctx, id, CmState::RouteResolved);
        self.raise_plain(ctx, id, EventKind::RouteResolved, 0);
        Ok(())
    }

    fn listen(
        &mut self,
        card: &Card,
        ctx: &mut Context<'_>,
        client: ClientId,
        id: CmId,
        backlog: u32,
    ) -> Result<(), Error> {
        let state = self.own(client, id)?.state;
        match state {
            CmState::Idle => {
                let any = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);
                self.bind(card, ctx, client, id, any)?;
            }
            CmState::Bound | CmState::Listening => {}
            state => return Err(Error::CmState { id, state, call: "listen" }),
        }
        let identifier = self.own(client, id)?;
        let backlog = if backlog == 0 { MOST_BACKLOG } else { backlog.min(MOST_BACKLOG) };
        match &mut identifier.listening {
            Some(listening) => listening.backlog = backlog,
            None => identifier.listening = Some(Listening { backlog, waiting: 0 }),
        }
        let (space, port) = (identifier.space, identifier.local.map_or(0, |local| local.port()));
        self.ports.listen(id, space, port)?;
        self.enter(ctx, id, CmState::Listening);
        Ok(())
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

    /// A request no longer waits at its listener.
    pub(super) fn release_backlog(&mut self, id: CmId) {
        let listener = self.identifiers.get_mut(&id).and_then(|identifier| identifier.listener.take());
        let listener = listener.and_then(|listener| self.identifiers.get_mut(&listener));
        if let Some(listening) = listener.and_then(|listener| listener.listening.as_mut()) {
            listening.waiting = listening.waiting.saturating_sub(1);
        }
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

/// 127.0.0.1 and ::1 are the host itself, whatever its address is.
fn here(card: &Card, address: IpAddr) -> IpAddr {
    let is_own = own_gid(card, address).is_some();
    let is_self = address == IpAddr::V4(Ipv4Addr::LOCALHOST) || address == IpAddr::V6(Ipv6Addr::LOCALHOST);
    if is_own || !is_self {
        return address;
    }
    let own = card.gids.iter().map(|gid| gid.ip()).find(|ip| ip.is_ipv4() == address.is_ipv4());
    own.unwrap_or(address)
}

/// The loopback address of the same IP version.
fn loopback(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    }
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
