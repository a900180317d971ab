//! Addresses and names.

use super::PortSpace;
use crate::{Context, Error};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};

/// The search criteria of [`address_info`]: the hints of `rdma_getaddrinfo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hints {
    /// The address is for a listener (`RAI_PASSIVE`).
    pub passive: bool,
    /// The port space.
    pub space: PortSpace,
    /// `Some(true)`: IPv4 only; `Some(false)`: IPv6 only; `None`: either.
    pub ipv4: Option<bool>,
}

impl Default for Hints {
    fn default() -> Hints {
        Hints { passive: false, space: PortSpace::Tcp, ipv4: None }
    }
}

/// The addresses of an endpoint to create: `struct rdma_addrinfo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressInfo {
    /// The port space.
    pub space: PortSpace,
    /// The address that a listener binds.
    pub source: Option<SocketAddr>,
    /// The address that the active side connects to.
    pub destination: Option<SocketAddr>,
}

/// Looks up the address of a host and a port: `rdma_getaddrinfo`. Without a node, the active side gets the host itself,
/// and a listener all addresses of its host.
///
/// ```
/// use softhca::cm::{self, Hints};
/// use softhca::sim::World;
///
/// let context = World::new(1).device("alice").open();
/// let info = cm::address_info(&context, None, "7174", &Hints { passive: true, ..Hints::default() })?;
/// let listener = cm::create_endpoint(&context, &info, 16)?;
/// listener.id.listen(0)?;
/// # Ok::<(), softhca::Error>(())
/// ```
pub fn address_info(
    context: &Context,
    node: Option<&str>,
    service: &str,
    hints: &Hints,
) -> Result<AddressInfo, Error> {
    let port = service.parse().map_err(|_| Error::UnknownHost {
        name: service.into(),
        why: "the service has to be a port number".into(),
    })?;
    let wants_ipv4 = hints.ipv4.unwrap_or(true);
    let ip = match (node, hints.passive, wants_ipv4) {
        (Some(node), ..) => resolve_host(context, node, hints.ipv4)?,
        (None, true, true) => Ipv4Addr::UNSPECIFIED.into(),
        (None, true, false) => Ipv6Addr::UNSPECIFIED.into(),
        (None, false, true) => Ipv4Addr::LOCALHOST.into(),
        (None, false, false) => Ipv6Addr::LOCALHOST.into(),
    };
    let address = SocketAddr::new(ip, port);
    Ok(AddressInfo {
        space: hints.space,
        source: hints.passive.then_some(address),
        destination: (!hints.passive).then_some(address),
    })
}

/// Looks up `host:port`, where the host is an address, a name that the device's host knows, or one that the system knows.
pub fn resolve(context: &Context, peer: &str) -> Result<SocketAddr, Error> {
    if let Ok(address) = peer.parse() {
        return Ok(address);
    }
    let found = peer.rsplit_once(':').and_then(|(node, port)| Some((node, port.parse().ok()?)));
    let (node, port): (&str, u16) = found.ok_or_else(|| Error::UnknownHost {
        name: peer.into(),
        why: "it has to be a host and a port, separated by a colon".into(),
    })?;
    Ok(SocketAddr::new(
        resolve_host(context, node.trim_start_matches('[').trim_end_matches(']'), None)?,
        port,
    ))
}

/// The address of a host: a number, a name that the card's host knows, or one that the system knows.
fn resolve_host(context: &Context, node: &str, ipv4: Option<bool>) -> Result<IpAddr, Error> {
    let fits = |ip: &IpAddr| ipv4.is_none_or(|ipv4| ip.is_ipv4() == ipv4);
    let unknown = |why: String| Error::UnknownHost { name: node.into(), why };
    if let Ok(ip) = node.parse() {
        return Some(ip).filter(fits).ok_or_else(|| unknown("it is of the other IP version".into()));
    }
    if node == "localhost" {
        return Ok(context.address());
    }
    if let Some(ip) = context.backend.resolve_host(node) {
        return Ok(ip);
    }
    let found = (node, 0).to_socket_addrs().map_err(|error| unknown(error.to_string()))?;
    let mut all = found.map(|address| address.ip()).filter(fits);
    all.next().ok_or_else(|| unknown("it has no address of that IP version".into()))
}
