//! Addresses of identifiers: binding, resolving, listening.

use super::identifier::Listening;
use super::{CmState, EventKind, Manager, own_gid};
use crate::card::Card;
use crate::{ClientId, CmId, Context, Error};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use softhca_wire::{Gid, Mtu};

/// Requests that may wait at a listener.
const MOST_BACKLOG: u32 = 1024;

impl Manager {
    pub(super) fn bind(
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

    pub(super) fn resolve_address(
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

    pub(super) fn resolve_route(
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

    pub(super) fn listen(
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
