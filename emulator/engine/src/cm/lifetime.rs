//! Identifiers from their creation to their end.

use super::identifier::Identifier;
use super::{CmState, MOST_IDENTIFIERS, MOST_OF_CLIENT, Manager, time_wait, words};
use crate::card::Card;
use crate::{ClientId, CmChannelId, CmId, Context, Error, Event, QpKind, Resource};
use alloc::vec::Vec;
use softhca_wire::cm::{PortSpace, RejectReason};
use words::CmOption;

impl Manager {
    pub(super) fn create(
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

    pub(super) fn set_option(&mut self, client: ClientId, id: CmId, option: CmOption) -> Result<(), Error> {
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

    /// A request no longer waits at its listener.
    pub(super) fn release_backlog(&mut self, id: CmId) {
        let listener = self.identifiers.get_mut(&id).and_then(|identifier| identifier.listener.take());
        let listener = listener.and_then(|listener| self.identifiers.get_mut(&listener));
        if let Some(listening) = listener.and_then(|listener| listener.listening.as_mut()) {
            listening.waiting = listening.waiting.saturating_sub(1);
        }
    }
}
