//! Addresses of identifiers: bind, resolve, listen.

use super::identifier::ListenBacklog;
use super::{CmCall, CmState, EventType, find_gid};
use crate::core::hca_state::HcaState;
use crate::{ClientId, CmId, VerbsError, VerbsResult};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use softhca_wire::{Gid, Mtu};

/// The maximum backlog of a listener.
const MAX_BACKLOG: u32 = 1024;

impl CmCall<'_, '_> {
    pub(super) fn bind(&mut self, client: ClientId, id: CmId, address: SocketAddr) -> VerbsResult {
        let draw = self.cm.next_random();
        let identifier = self.cm.identifier(client, id)?;
        if identifier.state != CmState::Idle {
            return Err(VerbsError::InvalidCmState { id, state: identifier.state, call: "bind" });
        }
        let ip = resolve_loopback(self.hca, address.ip());
        if !ip.is_unspecified() && find_gid(self.hca, ip).is_none() {
            return Err(VerbsError::AddressNotAvailable { address: ip });
        }
        let (space, reuse, scope) = (identifier.port_space, identifier.reuse_address, identifier.scope(ip));
        let port = self.cm.ports.bind(id, space, address.port(), scope, reuse, draw)?;
        let identifier = self.cm.identifier(client, id)?;
        identifier.is_bound = true;
        identifier.local = Some(SocketAddr::new(ip, port));
        identifier.source_index = find_gid(self.hca, ip).map_or(0, |(_, index)| index);
        self.set_state(id, CmState::Bound);
        Ok(())
    }

    pub(super) fn resolve_address(
        &mut self,
        client: ClientId,
        id: CmId,
        source: Option<SocketAddr>,
        destination: SocketAddr,
    ) -> VerbsResult {
        let state = self.cm.identifier(client, id)?.state;
        if !matches!(state, CmState::Idle | CmState::Bound) {
            return Err(VerbsError::InvalidCmState { id, state, call: "resolve address" });
        }
        let target = match resolve_loopback(self.hca, destination.ip()) {
            ip if ip.is_unspecified() => resolve_loopback(self.hca, loopback(ip)),
            ip => ip,
        };
        // The source is the port's address of the same IP version.
        let wanted =
            source.map(|source| resolve_loopback(self.hca, source.ip())).filter(|ip| !ip.is_unspecified());
        let own = match wanted {
            Some(ip) => find_gid(self.hca, ip).ok_or(VerbsError::AddressNotAvailable { address: ip })?,
            None => {
                let fits = |gid: &Gid| gid.ip().is_ipv4() == target.is_ipv4();
                let index = self.hca.gids.iter().position(fits);
                let index = index.ok_or(VerbsError::NetworkUnreachable { address: target })?;
                (self.hca.gids[index], index as u8)
            }
        };
        if own.0.ip().is_ipv4() != target.is_ipv4() {
            return Err(VerbsError::NetworkUnreachable { address: target });
        }
        if state == CmState::Idle {
            let port = source.map_or(0, |source| source.port());
            self.bind(client, id, SocketAddr::new(own.0.ip(), port))?;
        }
        let identifier = self.cm.identifier(client, id)?;
        let space = identifier.port_space;
        let bound = identifier.local.expect("the identifier is bound");
        let local = match bound.ip().is_unspecified() {
            true => own.0.ip(),
            false if bound.ip().is_ipv4() == target.is_ipv4() => bound.ip(),
            false => return Err(VerbsError::NetworkUnreachable { address: target }),
        };
        identifier.local = Some(SocketAddr::new(local, bound.port()));
        identifier.source_index = find_gid(self.hca, local).map_or(own.1, |(_, index)| index);
        identifier.peer = Some(SocketAddr::new(target, destination.port()));
        self.cm.ports.narrow_scope(id, space, bound.port(), local);
        self.set_state(id, CmState::AddressResolved);
        self.raise_simple_event(id, EventType::AddressResolved, 0);
        Ok(())
    }

    pub(super) fn resolve_route(&mut self, client: ClientId, id: CmId, mtu: Mtu) -> VerbsResult {
        let label = self.cm.next_random() as u32 & 0xf_ffff;
        let identifier = self.cm.identifier(client, id)?;
        if identifier.state != CmState::AddressResolved {
            return Err(VerbsError::InvalidCmState { id, state: identifier.state, call: "resolve route" });
        }
        identifier.mtu = mtu.min(self.hca.settings.mtu);
        // A flow label of zero would derive the UDP source port from the queue pair numbers.
        identifier.flow_label = label.max(1);
        self.set_state(id, CmState::RouteResolved);
        self.raise_simple_event(id, EventType::RouteResolved, 0);
        Ok(())
    }

    pub(super) fn listen(&mut self, client: ClientId, id: CmId, backlog: u32) -> VerbsResult {
        let state = self.cm.identifier(client, id)?.state;
        match state {
            CmState::Idle => {
                let any = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);
                self.bind(client, id, any)?;
            }
            CmState::Bound | CmState::Listening => {}
            state => return Err(VerbsError::InvalidCmState { id, state, call: "listen" }),
        }
        // The process that reserves a port has the backlog.
        let is_reservation = self.hca.processes.slot(client).is_some();
        let identifier = self.cm.identifier(client, id)?;
        let backlog = match backlog {
            _ if is_reservation => 0,
            0 => MAX_BACKLOG,
            backlog => backlog.min(MAX_BACKLOG),
        };
        match &mut identifier.backlog {
            Some(listening) => listening.limit = backlog,
            None => identifier.backlog = Some(ListenBacklog { limit: backlog, pending: 0 }),
        }
        let (space, port) = (identifier.port_space, identifier.local.map_or(0, |local| local.port()));
        self.cm.ports.listen(id, space, port)?;
        self.set_state(id, CmState::Listening);
        Ok(())
    }
}

/// Maps 127.0.0.1 and ::1 to the address of the host.
fn resolve_loopback(hca: &HcaState, address: IpAddr) -> IpAddr {
    let is_own = find_gid(hca, address).is_some();
    let is_self = address == IpAddr::V4(Ipv4Addr::LOCALHOST) || address == IpAddr::V6(Ipv6Addr::LOCALHOST);
    if is_own || !is_self {
        return address;
    }
    let own = hca.gids.iter().map(|gid| gid.ip()).find(|ip| ip.is_ipv4() == address.is_ipv4());
    own.unwrap_or(address)
}

/// The loopback address of the same IP version.
fn loopback(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    }
}
