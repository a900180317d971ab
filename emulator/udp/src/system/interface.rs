//! The network interface behind an address.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The name.
    pub name: String,
    /// The index.
    pub index: u32,
    /// The largest IP packet.
    pub mtu: u32,
    /// The first IPv6 address with a scope beyond the link.
    pub ipv6: Option<Ipv6Addr>,
}

/// The MTU of an interface that does not report one: the Ethernet default.
const ETHERNET_MTU: u32 = 1500;

/// The interface with `address`; every address of 127.0.0.0/8 belongs to the loopback interface.
pub fn interface_of(address: IpAddr) -> Option<Interface> {
    let mut first = ptr::null_mut();
    // SAFETY: `first` outlives the call, which stores a list that the caller frees.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return None;
    }
    let mut entries = Vec::new();
    let mut at = first;
    while !at.is_null() {
        // SAFETY: an entry of the list, which is not freed yet.
        let entry = unsafe { &*at };
        // SAFETY: the name of an entry is null-terminated.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) };
        // SAFETY: null, or an address of the entry.
        if let Some(ip) = unsafe { ip_of(entry.ifa_addr) } {
            entries.push((name.to_owned(), ip));
        }
        at = entry.ifa_next;
    }
    // SAFETY: the list of getifaddrs; nothing points into it any more.
    unsafe { libc::freeifaddrs(first) };
    let matches =
        |ip: IpAddr| ip == address || address.is_ipv4() && address.is_loopback() && ip.is_loopback();
    let (name, _) = entries.iter().find(|(_, ip)| matches(*ip))?;
    let is_global = |ip: &Ipv6Addr| !ip.is_unicast_link_local() && !ip.is_loopback();
    let ipv6 = entries.iter().filter(|(other, _)| other == name).find_map(|(_, ip)| match ip {
        IpAddr::V6(ip) if is_global(ip) => Some(*ip),
        _ => None,
    });
    // SAFETY: the name is null-terminated.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    let mtu = mtu_of(name).unwrap_or(ETHERNET_MTU);
    Some(Interface { name: name.to_string_lossy().into_owned(), index, mtu, ipv6 })
}

/// # Safety
/// `address` is null, or points to a socket address of its family.
unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: as the caller guarantees; each read has the type of the family.
    unsafe {
        match i32::from((*address).sa_family) {
            libc::AF_INET => {
                let found = ptr::read_unaligned(address.cast::<libc::sockaddr_in>());
                Some(Ipv4Addr::from(found.sin_addr.s_addr.to_ne_bytes()).into())
            }
            libc::AF_INET6 => {
                let found = ptr::read_unaligned(address.cast::<libc::sockaddr_in6>());
                Some(Ipv6Addr::from(found.sin6_addr.s6_addr).into())
            }
            _ => None,
        }
    }
}

#[cfg(target_os = "linux")]
fn mtu_of(name: &CStr) -> Option<u32> {
    use std::os::fd::AsRawFd;
    // Any socket works, even if the loopback interface is down.
    let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    // SAFETY: an interface request is bytes and integers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.to_bytes()).take(libc::IFNAMSIZ - 1) {
        *to = *from as libc::c_char;
    }
    // SAFETY: `request` outlives the call, which fills in the MTU.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU as _, &mut request) };
    // SAFETY: every member of the union is integers, which the call has filled in if it succeeded.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    (result == 0).then_some(mtu as u32)
}

#[cfg(not(target_os = "linux"))]
fn mtu_of(_: &CStr) -> Option<u32> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_loopback_address_belongs_to_the_loopback_interface() {
        let first = interface_of(Ipv4Addr::LOCALHOST.into()).unwrap();
        assert!(first.index > 0);
        assert_eq!(interface_of(Ipv4Addr::new(127, 0, 0, 77).into()), Some(first.clone()));
        #[cfg(target_os = "linux")]
        assert!(first.mtu >= 16_384, "{first:?}");
        assert_eq!(first.ipv6, None);
    }

    #[test]
    fn documentation_address_has_no_interface() {
        assert_eq!(interface_of(Ipv4Addr::new(192, 0, 2, 1).into()), None);
    }
}
