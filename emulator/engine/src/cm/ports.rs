//! The port spaces of a host: bindings and listeners.

use crate::{CmId, VerbsError, VerbsResult};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::net::IpAddr;
use softhca_wire::cm::PortSpace;

/// The first and the last ephemeral port.
const EPHEMERAL_PORTS: [u16; 2] = [32_768, 60_999];

/// The addresses that a binding covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// One address.
    Only(IpAddr),
    /// All IPv4 addresses.
    Ipv4,
    /// All IPv6 addresses.
    Ipv6,
    /// All addresses.
    Every,
}

impl Scope {
    pub fn contains(self, address: IpAddr) -> bool {
        match self {
            Scope::Only(own) => own == address,
            Scope::Ipv4 => address.is_ipv4(),
            Scope::Ipv6 => address.is_ipv6(),
            Scope::Every => true,
        }
    }

    fn overlaps(self, other: Scope) -> bool {
        match (self, other) {
            (Scope::Only(address), other) | (other, Scope::Only(address)) => other.contains(address),
            (Scope::Ipv4, Scope::Ipv6) | (Scope::Ipv6, Scope::Ipv4) => false,
            _ => true,
        }
    }
}

struct Binding {
    id: CmId,
    scope: Scope,
    reuse: bool,
    is_listening: bool,
}

#[derive(Default)]
pub(super) struct Ports {
    bindings: BTreeMap<(PortSpace, u16), Vec<Binding>>,
}

impl Ports {
    fn is_free(&self, space: PortSpace, port: u16, scope: Scope, reuse: bool) -> bool {
        let conflicts =
            |other: &Binding| other.scope.overlaps(scope) && !(reuse && other.reuse && !other.is_listening);
        !self.bindings.get(&(space, port)).is_some_and(|all| all.iter().any(conflicts))
    }

    /// Binds a port. Port 0 selects an ephemeral port; the search starts at `draw`.
    pub fn bind(
        &mut self,
        id: CmId,
        space: PortSpace,
        port: u16,
        scope: Scope,
        reuse: bool,
        draw: u64,
    ) -> VerbsResult<u16> {
        let port = match port {
            0 => {
                let count = u64::from(EPHEMERAL_PORTS[1] - EPHEMERAL_PORTS[0]) + 1;
                let candidates =
                    (0..count).map(|offset| EPHEMERAL_PORTS[0] + ((draw % count + offset) % count) as u16);
                let free = |port: &u16| self.is_free(space, *port, scope, false);
                let limit = count as u32;
                candidates
                    .into_iter()
                    .find(free)
                    .ok_or(VerbsError::Exhausted { resource: crate::Resource::CmPort, limit })?
            }
            port if self.is_free(space, port, scope, reuse) => port,
            port => return Err(VerbsError::PortInUse { space: space.name(), port }),
        };
        self.bindings.entry((space, port)).or_default().push(Binding {
            id,
            scope,
            reuse,
            is_listening: false,
        });
        Ok(port)
    }

    /// Lets a binding accept requests, unless another one does already.
    pub fn listen(&mut self, id: CmId, space: PortSpace, port: u16) -> VerbsResult {
        let Some(all) = self.bindings.get_mut(&(space, port)) else {
            return Err(VerbsError::PortInUse { space: space.name(), port });
        };
        let Some(own) = all.iter().position(|binding| binding.id == id) else {
            return Err(VerbsError::PortInUse { space: space.name(), port });
        };
        let scope = all[own].scope;
        if all.iter().any(|other| other.id != id && other.is_listening && other.scope.overlaps(scope)) {
            return Err(VerbsError::PortInUse { space: space.name(), port });
        }
        all[own].is_listening = true;
        Ok(())
    }

    /// Narrows a binding to the address of its connection.
    pub fn narrow_scope(&mut self, id: CmId, space: PortSpace, port: u16, address: IpAddr) {
        let all = self.bindings.get_mut(&(space, port));
        if let Some(own) = all.and_then(|all| all.iter_mut().find(|binding| binding.id == id)) {
            own.scope = Scope::Only(address);
        }
    }

    pub fn release(&mut self, id: CmId, space: PortSpace, port: u16) {
        if let Some(all) = self.bindings.get_mut(&(space, port)) {
            all.retain(|binding| binding.id != id);
            if all.is_empty() {
                self.bindings.remove(&(space, port));
            }
        }
    }

    /// The ports with a listener.
    pub fn listening_ports(&self) -> impl Iterator<Item = u16> {
        let listens = |all: &[Binding]| all.iter().any(|binding| binding.is_listening);
        self.bindings.iter().filter(move |(_, all)| listens(all)).map(|((_, port), _)| *port)
    }

    /// The binding that covers an address: the listener if there is one.
    pub fn binding(&self, space: PortSpace, port: u16, address: IpAddr) -> Option<CmId> {
        let covering =
            self.bindings.get(&(space, port))?.iter().filter(|binding| binding.scope.contains(address));
        covering.max_by_key(|binding| binding.is_listening).map(|binding| binding.id)
    }

    /// The listener for an address.
    pub fn listener(&self, space: PortSpace, port: u16, address: IpAddr) -> Option<CmId> {
        let all = self.bindings.get(&(space, port))?;
        let takes = |binding: &&Binding| binding.is_listening && binding.scope.contains(address);
        all.iter().find(takes).map(|binding| binding.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: IpAddr = IpAddr::V4(core::net::Ipv4Addr::new(10, 0, 0, 1));

    fn bind(ports: &mut Ports, id: u32, port: u16, scope: Scope, reuse: bool) -> VerbsResult<u16> {
        ports.bind(CmId(id), PortSpace::Tcp, port, scope, reuse, 7)
    }

    #[test]
    fn a_port_has_one_binding_unless_all_bindings_allow_reuse() {
        let mut ports = Ports::default();
        assert_eq!(bind(&mut ports, 1, 7174, Scope::Ipv4, true), Ok(7174));
        assert!(bind(&mut ports, 2, 7174, Scope::Only(HOST), false).is_err());
        assert_eq!(bind(&mut ports, 2, 7174, Scope::Ipv6, false), Ok(7174));
        assert_eq!(bind(&mut ports, 3, 7174, Scope::Only(HOST), true), Ok(7174));
        assert_eq!(ports.listen(CmId(1), PortSpace::Tcp, 7174), Ok(()));
        assert!(ports.listen(CmId(3), PortSpace::Tcp, 7174).is_err());
        assert!(bind(&mut ports, 4, 7174, Scope::Only(HOST), true).is_err(), "another binding listens");
        ports.release(CmId(1), PortSpace::Tcp, 7174);
        assert_eq!(ports.listen(CmId(3), PortSpace::Tcp, 7174), Ok(()));
    }

    #[test]
    fn port_spaces_are_independent() {
        let mut ports = Ports::default();
        assert_eq!(bind(&mut ports, 1, 7174, Scope::Every, false), Ok(7174));
        assert_eq!(ports.bind(CmId(2), PortSpace::Udp, 7174, Scope::Every, false, 0), Ok(7174));
        assert_eq!(ports.bind(CmId(3), PortSpace::Ib, 7174, Scope::Every, false, 0), Ok(7174));
    }

    #[test]
    fn a_request_reaches_the_listener_of_its_address() {
        let mut ports = Ports::default();
        let other = IpAddr::from([10, 0, 0, 2]);
        for (id, scope) in [(1, Scope::Only(other)), (2, Scope::Only(HOST))] {
            bind(&mut ports, id, 9, scope, false).unwrap();
            ports.listen(CmId(id), PortSpace::Tcp, 9).unwrap();
        }
        assert_eq!(ports.listener(PortSpace::Tcp, 9, HOST), Some(CmId(2)));
        assert_eq!(ports.listener(PortSpace::Tcp, 9, other), Some(CmId(1)));
        assert_eq!(ports.listener(PortSpace::Tcp, 9, IpAddr::from([10, 0, 0, 3])), None);
    }

    #[test]
    fn port_0_selects_a_free_ephemeral_port() {
        let mut ports = Ports::default();
        let mut seen = alloc::collections::BTreeSet::new();
        for id in 0..(EPHEMERAL_PORTS[1] - EPHEMERAL_PORTS[0]) as u32 + 1 {
            let port = ports.bind(CmId(id), PortSpace::Tcp, 0, Scope::Ipv4, false, u64::from(id)).unwrap();
            assert!((EPHEMERAL_PORTS[0]..=EPHEMERAL_PORTS[1]).contains(&port) && seen.insert(port));
        }
        assert!(matches!(bind(&mut ports, 99_999, 0, Scope::Ipv4, false), Err(VerbsError::Exhausted { .. })));
    }
}
