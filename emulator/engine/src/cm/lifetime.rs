//! Creation, options and destruction of identifiers.

use super::identifier::CmIdentifier;
use super::{
    CmCall, CmState, ConnectionManager, MAX_IDENTIFIERS, MAX_IDENTIFIERS_PER_CLIENT, api, time_wait_duration,
};
use crate::{ClientId, CmChannelId, CmId, Event, QpType, Resource, VerbsError, VerbsResult};
use alloc::vec::Vec;
use api::CmOption;
use softhca_wire::cm::{PortSpace, RejectReason};

impl ConnectionManager {
    /// Creates an identifier. It has no events if there is no such channel.
    pub(super) fn create(
        &mut self,
        client: ClientId,
        channel: CmChannelId,
        space: PortSpace,
        kind: QpType,
    ) -> VerbsResult<CmId> {
        let kind = match (space, kind) {
            (PortSpace::Udp | PortSpace::IpOverIb, _) => QpType::Ud,
            (PortSpace::Tcp, QpType::Rc) => QpType::Rc,
            (PortSpace::Ib, QpType::Rc | QpType::Uc | QpType::Ud) => kind,
            (PortSpace::Tcp, _) => {
                let why = "the TCP port space supports RC only; use the IB port space for other transports";
                return Err(VerbsError::Invalid { what: "transport of a connection identifier", why });
            }
            (PortSpace::Ib, _) => {
                let why = "the connection manager supports RC, UC and UD queue pairs";
                return Err(VerbsError::Invalid { what: "transport of a connection identifier", why });
            }
        };
        let identifier = CmIdentifier::new(client, channel, space, kind);
        self.insert(identifier)
    }

    /// Adds an identifier, if the limits allow it.
    pub(super) fn insert(&mut self, identifier: CmIdentifier) -> VerbsResult<CmId> {
        let of_client =
            || self.identifiers.values().filter(|other| other.client == identifier.client).count();
        // Counting is expensive and unnecessary below the limit.
        let limit = match self.identifiers.len() {
            count if count >= MAX_IDENTIFIERS => Some(MAX_IDENTIFIERS as u32),
            count if count >= MAX_IDENTIFIERS_PER_CLIENT && of_client() >= MAX_IDENTIFIERS_PER_CLIENT => {
                Some(MAX_IDENTIFIERS_PER_CLIENT as u32)
            }
            _ => None,
        };
        if let Some(limit) = limit {
            return Err(VerbsError::Exhausted { resource: Resource::CmIdentifier, limit });
        }
        let id = self.allocate_identifier();
        if let Some(channel) = self.channels.get_mut(&identifier.channel) {
            channel.users += 1;
        }
        self.identifiers.insert(id, identifier);
        Ok(id)
    }

    pub(super) fn set_option(&mut self, client: ClientId, id: CmId, option: CmOption) -> VerbsResult {
        let identifier = self.identifier(client, id)?;
        match option {
            CmOption::TypeOfService(class) => identifier.traffic_class = class,
            CmOption::AckTimeout(exponent) if exponent < 32 => identifier.ack_timeout = exponent,
            CmOption::AckTimeout(exponent) => {
                return Err(VerbsError::LimitExceeded {
                    what: "ack timeout",
                    value: exponent.into(),
                    limit: 31,
                });
            }
            CmOption::ReuseAddress(_) | CmOption::AfOnly(_) if identifier.is_bound => {
                let why = "it must be set before the address is bound";
                return Err(VerbsError::Invalid { what: "option of a connection identifier", why });
            }
            CmOption::ReuseAddress(reuse) => identifier.reuse_address = reuse,
            CmOption::AfOnly(only) => identifier.only_ipv6 = only,
        }
        Ok(())
    }

    /// Removes a request from the backlog of its listener.
    pub(super) fn release_backlog(&mut self, id: CmId) {
        let listener = self.identifiers.get_mut(&id).and_then(|identifier| identifier.listener.take());
        let listener = listener.and_then(|listener| self.identifiers.get_mut(&listener));
        if let Some(listening) = listener.and_then(|listener| listener.backlog.as_mut()) {
            listening.pending = listening.pending.saturating_sub(1);
        }
    }
}

impl CmCall<'_, '_> {
    /// Ends the connection of an identifier, notifies the peer, and removes the identifier.
    pub(super) fn destroy(&mut self, id: CmId) {
        let Some(identifier) = self.cm.identifiers.get(&id) else { return };
        let wait = self.ctx.now.plus(time_wait_duration(identifier.ack_timeout));
        match identifier.state {
            CmState::ReqSent | CmState::RepReceived | CmState::RepSent => {
                self.send_rej(id, RejectReason::TIMEOUT, &[]);
                self.remember_time_wait(id, wait);
            }
            CmState::ReqReceived | CmState::SidrReqReceived => {
                self.reject_and_close(id, RejectReason::CONSUMER, &[]);
            }
            CmState::Established => {
                self.send_dreq(id);
                self.remember_time_wait(id, wait);
            }
            CmState::DreqReceived => {
                self.send_drep(id);
                self.remember_time_wait(id, wait);
            }
            CmState::DreqSent => self.remember_time_wait(id, wait),
            CmState::TimeWait => {
                let until = identifier.deadline.unwrap_or(wait);
                self.remember_time_wait(id, until);
            }
            _ => {}
        }
        self.set_deadline(id, None);
        self.cm.release_backlog(id);
        self.cm.remove_connection(id);
        let Some(mut identifier) = self.cm.identifiers.remove(&id) else { return };
        self.hca.processes.clear_connection(id);
        if let (true, Some(local)) = (identifier.is_bound, identifier.local) {
            self.cm.ports.release(id, identifier.port_space, local.port());
        }
        for (addressing, datagram) in core::mem::take(&mut identifier.early_requests) {
            self.dispatch(&addressing, &datagram);
        }
        let mut orphans = Vec::new();
        if let Some(channel) = self.cm.channels.get_mut(&identifier.channel) {
            channel.users -= 1;
            // A request whose event was not read cannot be answered.
            channel.events.retain(|event| {
                if event.listener == Some(id) {
                    orphans.push(event.id);
                }
                event.id != id && event.listener != Some(id)
            });
        }
        let state = identifier.state;
        let is_reservation = self.hca.processes.slot(identifier.client).is_some();
        if state != CmState::Closed && state != CmState::Idle && !is_reservation {
            self.ctx.emit(Event::CmStateChanged { id, from: state, to: CmState::Closed });
        }
        for orphan in orphans {
            self.destroy(orphan);
        }
    }

    /// Destroys all identifiers and channels of a client. Peers see the same messages as from any process that exits.
    pub fn close_client(&mut self, client: ClientId) {
        let own = |(_, identifier): &(&CmId, &CmIdentifier)| identifier.client == client;
        let all: Vec<CmId> = self.cm.identifiers.iter().filter(own).map(|(id, _)| *id).collect();
        for id in all {
            self.destroy(id);
        }
        self.cm.channels.retain(|_, channel| channel.client != client);
    }
}
