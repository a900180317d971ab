//! Socket addresses and their resolution.

use super::devices::default_device;
use crate::abi::*;
use crate::address::ip_of;
use crate::errno::{self, Rejection};
use crate::faults;
use core::ffi::{CStr, c_char, c_int};
use core::mem::{MaybeUninit, zeroed};
use softhca::Verb;
use softhca::cm::{Hints, PortSpace, address_info};
use std::net::SocketAddr;

/// The IP address and port in a socket address.
///
/// # Safety
/// `address` is null or as long as its family requires.
pub unsafe fn socket_address(address: *const libc::sockaddr) -> Option<SocketAddr> {
    // SAFETY: the caller guarantees it.
    let ip = unsafe { ip_of(address) }?;
    // SAFETY: both families have the port at the same place.
    let port = unsafe { (*address.cast::<libc::sockaddr_in>()).sin_port };
    Some(SocketAddr::new(ip, u16::from_be(port)))
}

/// Writes a socket address and returns its length.
pub fn write_sockaddr(address: SocketAddr, into: &mut Storage) -> u32 {
    *into = Storage([0; 128]);
    let target = (&raw mut *into).cast::<u8>();
    match address {
        SocketAddr::V4(address) => {
            // SAFETY: zero is valid for every field.
            let mut raw: libc::sockaddr_in = unsafe { zeroed() };
            raw.sin_family = libc::AF_INET as u16;
            raw.sin_port = address.port().to_be();
            raw.sin_addr.s_addr = u32::from(*address.ip()).to_be();
            // SAFETY: the storage has space and alignment for every socket address.
            unsafe { target.cast::<libc::sockaddr_in>().write(raw) };
            size_of::<libc::sockaddr_in>() as u32
        }
        SocketAddr::V6(address) => {
            // SAFETY: zero is valid for every field.
            let mut raw: libc::sockaddr_in6 = unsafe { zeroed() };
            raw.sin6_family = libc::AF_INET6 as u16;
            raw.sin6_port = address.port().to_be();
            raw.sin6_addr.s6_addr = address.ip().octets();
            // SAFETY: as above.
            unsafe { target.cast::<libc::sockaddr_in6>().write(raw) };
            size_of::<libc::sockaddr_in6>() as u32
        }
    }
}

/// The string behind a pointer that may be null.
unsafe fn string_from_c(pointer: *const c_char) -> Option<String> {
    // SAFETY: the caller guarantees it.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

fn boxed_sockaddr(address: Option<SocketAddr>) -> (*mut libc::sockaddr, u32) {
    let Some(address) = address else { return (core::ptr::null_mut(), 0) };
    let mut storage = Box::new(Storage([0; 128]));
    let length = write_sockaddr(address, &mut storage);
    (Box::into_raw(storage).cast(), length)
}

/// A numeric service, or the port of a service name of the system.
fn port_of(service: &str) -> String {
    if service.parse::<u16>().is_ok() {
        return service.into();
    }
    let Ok(name) = std::ffi::CString::new(service) else { return service.into() };
    // SAFETY: a string; the entry is read at once.
    let entry = unsafe { libc::getservbyname(name.as_ptr(), core::ptr::null()).as_ref() };
    entry.map_or_else(|| service.into(), |entry| u16::from_be(entry.s_port as u16).to_string())
}

/// # Safety
/// The strings are null or valid, and so are the addresses of the hints.
pub unsafe extern "C" fn getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: Option<&rdma_addrinfo>,
    into: &mut MaybeUninit<Box<rdma_addrinfo>>,
) -> c_int {
    // SAFETY: the caller guarantees it.
    let (node, service) = unsafe { (string_from_c(node), string_from_c(service)) };
    errno::minus_one("rdma_getaddrinfo", || {
        into.write(Box::new(resolve(node, service, hints)?));
        Ok(())
    })
}

fn resolve(
    node: Option<String>,
    service: Option<String>,
    hints: Option<&rdma_addrinfo>,
) -> Result<rdma_addrinfo, Rejection> {
    faults::announce(Verb::RdmaGetAddrInfo, None)?;
    let open = default_device()?.context.find()?;
    let flags = hints.map_or(0, |hints| hints.ai_flags);
    let family = hints.map_or(0, |hints| hints.ai_family);
    let (mut space, mut kind) = hints.map_or((0, 0), |hints| (hints.ai_port_space, hints.ai_qp_type));
    if space == 0 {
        space = if kind == IBV_QPT_UD { RDMA_PS_UDP } else { RDMA_PS_TCP };
    }
    if kind == 0 {
        kind = if matches!(space, RDMA_PS_UDP | RDMA_PS_IPOIB) { IBV_QPT_UD } else { IBV_QPT_RC };
    }
    let is_passive = flags & RAI_PASSIVE != 0;
    let wanted = Hints {
        passive: is_passive,
        space: PortSpace::Tcp,
        ipv4: match family {
            libc::AF_INET => Some(true),
            libc::AF_INET6 => Some(false),
            _ => None,
        },
    };
    // The addresses that the caller has already resolved.
    // SAFETY: valid addresses of the caller.
    let [own, peer] = hints.map_or([None; 2], |hints| unsafe {
        [socket_address(hints.ai_src_addr), socket_address(hints.ai_dst_addr)]
    });
    let (source, destination) = if node.is_none() && service.is_none() {
        if hints.is_none() {
            return Err(Rejection::invalid("no node, no service and no hints"));
        }
        (own, peer)
    } else {
        let service = service.map_or_else(|| "0".into(), |service| port_of(&service));
        let found = address_info(&open.context, node.as_deref(), &service, &wanted)?;
        (found.source.or(own), found.destination)
    };
    let (ai_src_addr, ai_src_len) = boxed_sockaddr(source);
    let (ai_dst_addr, ai_dst_len) = boxed_sockaddr(destination);
    let is_ipv4 = source.or(destination).is_none_or(|address| address.is_ipv4());
    Ok(rdma_addrinfo {
        ai_flags: flags,
        ai_family: if is_ipv4 { libc::AF_INET } else { libc::AF_INET6 },
        ai_qp_type: kind,
        ai_port_space: space,
        ai_src_len,
        ai_dst_len,
        ai_src_addr,
        ai_dst_addr,
        ai_src_canonname: core::ptr::null_mut(),
        ai_dst_canonname: core::ptr::null_mut(),
        ai_route_len: 0,
        ai_route: core::ptr::null_mut(),
        ai_connect_len: 0,
        ai_connect: core::ptr::null_mut(),
        ai_next: core::ptr::null_mut(),
    })
}

pub extern "C" fn freeaddrinfo(info: Option<Box<rdma_addrinfo>>) {
    let Some(info) = info else { return };
    for address in [info.ai_src_addr, info.ai_dst_addr].into_iter().filter(|address| !address.is_null()) {
        // SAFETY: it came from `getaddrinfo`.
        drop(unsafe { Box::from_raw(address.cast::<Storage>()) });
    }
}
