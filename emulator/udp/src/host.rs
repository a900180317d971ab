//! The sockets of a host, and which address it binds.

use crate::socket::{RoceSocket, SocketOptions};
use crate::{ADDRESS_VARIABLE, BindError, Interface, interface_of};
use softhca_wire::link_control::LINK_PORT;
use softhca_wire::{Gid, Mtu, ROCE_PORT};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::OnceLock;

/// The receive buffer of the link control socket: the kernel's default limit for unprivileged processes.
pub(crate) const LINK_CONTROL_RECEIVE_BUFFER: usize = 212_992;

/// The two sockets of a host, or four if it has an IPv4 and an IPv6 address.
#[derive(Debug)]
pub struct HostSockets {
    /// Carries RoCE, on port 4791.
    pub roce: RoceSocket,
    /// Carries link control, on port 4792.
    pub link: RoceSocket,
    /// Found when it is needed, if another process has opened the sockets.
    interface: OnceLock<Option<Interface>>,
    /// The sockets of the IPv6 address, if the first address is an IPv4 address.
    ipv6: Option<Box<HostSockets>>,
}

impl HostSockets {
    /// Binds both ports of `address`. The options apply to the RoCE socket.
    pub fn bind(address: IpAddr, options: SocketOptions) -> Result<HostSockets, BindError> {
        let bind = |port, options| RoceSocket::bind(SocketAddr::new(address, port), options);
        // Link control first: a peer that finds it missing takes the port for a foreign one.
        let link = bind(LINK_PORT, SocketOptions { receive_buffer: LINK_CONTROL_RECEIVE_BUFFER, ..options })?;
        let roce = bind(ROCE_PORT, options)?;
        Ok(HostSockets::from_parts(roce, link, None).with_interface(interface_of(address)))
    }

    /// Sockets that nobody can send to, for a host whose packets travel another way.
    pub fn unreachable() -> Result<HostSockets, BindError> {
        let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0);
        let bind = || {
            let options = SocketOptions { receive_buffer: 0, ..SocketOptions::default() };
            let socket = RoceSocket::bind(address, options)?;
            socket.close_to_others().map_err(|source| BindError::Other { address, source })?;
            Ok(socket)
        };
        Ok(HostSockets::from_parts(bind()?, bind()?, None))
    }

    pub(crate) fn from_parts(roce: RoceSocket, link: RoceSocket, ipv6: Option<HostSockets>) -> HostSockets {
        HostSockets { roce, link, interface: OnceLock::new(), ipv6: ipv6.map(Box::new) }
    }

    /// Has multicast leave from the interface of new sockets.
    pub(crate) fn with_interface(self, interface: Option<Interface>) -> HostSockets {
        if let Some(interface) = &interface {
            // If this fails, joining a group fails too, and the caller gets that error.
            let _ = self.roce.set_multicast_interface(interface);
        }
        HostSockets { interface: interface.into(), ..self }
    }

    /// Gives up the link control port: peers take this host for a foreign one, such as rxe.
    pub fn without_link_control(mut self, options: SocketOptions) -> Result<HostSockets, BindError> {
        self.link = RoceSocket::bind(SocketAddr::new(self.address(), 0), options)?;
        self.ipv6 = self.ipv6.map(|ipv6| ipv6.without_link_control(options).map(Box::new)).transpose()?;
        Ok(self)
    }

    /// Whether the host has a link control port.
    pub(crate) fn has_link_control(&self) -> bool {
        self.link.local_address().port() == LINK_PORT
    }

    /// Binds both ports of an IPv4 address and of a second, IPv6 address: the second GID. Without `ipv6`, a host on a
    /// network uses the IPv6 address of its interface, if that has one and it is free.
    pub fn bind_dual_stack(
        address: IpAddr,
        ipv6: Option<Ipv6Addr>,
        options: SocketOptions,
    ) -> Result<HostSockets, BindError> {
        HostSockets::bind(address, options)?.with_ipv6(ipv6, options)
    }

    /// Adds an IPv6 address to a host whose IPv4 address is already bound.
    pub fn with_ipv6(
        mut self,
        ipv6: Option<Ipv6Addr>,
        options: SocketOptions,
    ) -> Result<HostSockets, BindError> {
        if self.address().is_ipv6() {
            return Ok(self);
        }
        self.ipv6 = match ipv6 {
            Some(asked) => Some(Box::new(HostSockets::bind(asked.into(), options)?)),
            None if self.address().is_loopback() => None,
            None => {
                let found = self.interface().and_then(|interface| interface.ipv6);
                found.and_then(|found| HostSockets::bind(found.into(), options).ok()).map(Box::new)
            }
        };
        Ok(self)
    }

    /// The host's address, the first if it has two.
    pub fn address(&self) -> IpAddr {
        self.roce.local_address().ip()
    }

    /// The GID table: one entry per address, then a link-local alias of the IPv4 address.
    pub fn gids(&self) -> Vec<Gid> {
        let mut gids: Vec<Gid> = self.by_address().map(|sockets| Gid::from(sockets.address())).collect();
        if let IpAddr::V4(address) = self.address() {
            gids.push(Gid::link_local(address));
        }
        gids
    }

    /// The interface with the address.
    pub fn interface(&self) -> Option<&Interface> {
        self.interface.get_or_init(|| interface_of(self.address())).as_ref()
    }

    /// The largest path MTU that fits the interfaces together with every header. Loopback fits all.
    pub fn active_mtu(&self) -> Mtu {
        let carried = |sockets: &HostSockets| match sockets.address().is_loopback() {
            true => Mtu::B4096,
            false => sockets
                .interface()
                .map_or(Mtu::B1024, |interface| Mtu::fitting(interface.mtu).unwrap_or(Mtu::B256)),
        };
        self.by_address().map(carried).min().unwrap_or(Mtu::B1024)
    }

    /// Gives the ports of all addresses up.
    pub(crate) fn release_ports(&self) -> std::io::Result<()> {
        self.roce.release_port()?;
        self.link.release_port()?;
        self.ipv6.as_ref().map_or(Ok(()), |sockets| sockets.release_ports())
    }

    /// The sockets of each address.
    pub(crate) fn by_address(&self) -> impl Iterator<Item = &HostSockets> {
        std::iter::once(self).chain(self.ipv6.as_deref())
    }

    /// The sockets of the address with the same IP version as `other`.
    pub(crate) fn with_ip_version(&self, other: IpAddr) -> Option<&HostSockets> {
        self.by_address().find(|sockets| sockets.address().is_ipv4() == other.is_ipv4())
    }

    /// The sockets that send to `destination`.
    pub(crate) fn for_destination(&self, destination: IpAddr) -> &HostSockets {
        self.with_ip_version(destination).unwrap_or(self)
    }

    /// The sockets that send to `destination`, mutable.
    pub(crate) fn for_destination_mut(&mut self, destination: IpAddr) -> &mut HostSockets {
        if self.address().is_ipv4() == destination.is_ipv4() || self.ipv6.is_none() {
            return self;
        }
        self.ipv6.as_mut().expect("it was just checked")
    }
}

/// Binds the address in `SOFTHCA_ADDRESS`, or the first free address of 127.0.0.2 … 127.0.0.254.
pub fn bind_host(options: SocketOptions) -> Result<HostSockets, BindError> {
    if let Ok(value) = std::env::var(ADDRESS_VARIABLE) {
        let (address, ipv6) = parse_addresses(&value).ok_or(BindError::BadVariable { value })?;
        return HostSockets::bind_dual_stack(address, ipv6, options);
    }
    bind_free_host(options)
}

/// Binds the first free address of 127.0.0.2 … 127.0.0.254.
pub fn bind_free_host(options: SocketOptions) -> Result<HostSockets, BindError> {
    // Finding the owner of an address takes longer than trying the next address.
    let free =
        |ip: &Ipv4Addr| [ROCE_PORT, LINK_PORT].iter().all(|port| UdpSocket::bind((*ip, *port)).is_ok());
    for address in (2..=254).map(|last| Ipv4Addr::new(127, 0, 0, last)).filter(free) {
        match HostSockets::bind(address.into(), options) {
            Err(BindError::InUse { .. }) => {}
            result => return result,
        }
    }
    HostSockets::bind(Ipv4Addr::new(127, 0, 0, 2).into(), options)
}

/// Parses one address, or an IPv4 address and an IPv6 address separated by a comma.
pub fn parse_addresses(text: &str) -> Option<(IpAddr, Option<Ipv6Addr>)> {
    match text.split_once(',') {
        None => Some((text.trim().parse().ok()?, None)),
        Some((ipv4, ipv6)) => {
            let ipv4: Ipv4Addr = ipv4.trim().parse().ok()?;
            Some((ipv4.into(), Some(ipv6.trim().parse().ok()?)))
        }
    }
}
