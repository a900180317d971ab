//! Address handles and addresses.

use crate::abi::*;
use crate::errno::{Rejection, check};
use crate::faults;
use crate::object;
use crate::protection::{self, UseCount};
use core::ffi::{c_int, c_uint};
use core::mem::zeroed;
use softhca::{AddressHandle, AddressVector, Gid};
use softhca::{Resource, Verb};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The state of an `ibv_ah`.
pub struct Ah {
    pub handle: AddressHandle,
    _domain: UseCount,
}

object::kinds! {
    Ah = ibv_ah, "address handle", |ah| Some((ah.context, ah.handle));
}

fn bytes_of(gid: [u64; 2]) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&gid[0].to_ne_bytes());
    bytes[8..].copy_from_slice(&gid[1].to_ne_bytes());
    bytes
}

pub fn words_of(bytes: [u8; 16]) -> [u64; 2] {
    [0, 8].map(|at| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes")))
}

/// The address vector of address handle attributes. RoCE requires a GRH.
pub fn address_vector(attr: &ibv_ah_attr) -> Result<AddressVector, Rejection> {
    if attr.is_global == 0 {
        return Err(Rejection::invalid(
            "ah_attr.is_global is 0: RoCE needs a GRH with the GID of the destination",
        ));
    }
    if attr.port_num > 1 {
        return Err(wrong_port(attr.port_num.into()));
    }
    Ok(AddressVector {
        dgid: Gid(bytes_of(attr.grh.dgid)),
        sgid_index: attr.grh.sgid_index,
        traffic_class: attr.grh.traffic_class,
        flow_label: attr.grh.flow_label & 0xf_ffff,
        hop_limit: attr.grh.hop_limit,
        service_level: attr.sl,
    })
}

/// A port that the device does not have.
pub fn wrong_port(port: u32) -> Rejection {
    Rejection::invalid(format!("port {port} does not exist: the device has one port, number 1"))
}

pub fn ah_attr(vector: &AddressVector) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: words_of(vector.dgid.0),
            flow_label: vector.flow_label,
            sgid_index: vector.sgid_index,
            hop_limit: vector.hop_limit,
            traffic_class: vector.traffic_class,
        },
        dlid: 0,
        sl: vector.service_level,
        src_path_bits: 0,
        static_rate: 0,
        is_global: u8::from(!vector.dgid.is_unspecified()),
        port_num: 1,
    }
}

pub unsafe extern "C" fn create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    const VERB: &str = "ibv_create_ah";
    // SAFETY: a domain of this library.
    let domain = check!(VERB, null, unsafe { protection::find(pd) });
    // SAFETY: the caller's attributes.
    let attr = unsafe { &*attr };
    if attr.port_num != 1 {
        return wrong_port(attr.port_num.into()).null(VERB);
    }
    let vector = check!(VERB, null, address_vector(attr));
    let handle = check!(VERB, null, domain.domain.create_address_handle(vector));
    // SAFETY: a domain of this library.
    let context = unsafe { (*pd).context };
    object::create(ibv_ah { context, pd, handle: handle.handle() }, Ah { handle, _domain: domain.add_user() })
}

pub unsafe extern "C" fn destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: a handle of this library.
    let state = check!("ibv_destroy_ah", code, unsafe { object::find::<Ah>(ah) });
    let object = Some((Resource::AddressHandle, state.handle.handle()));
    check!("ibv_destroy_ah", code, faults::announce(Verb::DestroyAh, object));
    // SAFETY: as above.
    drop(unsafe { object::destroy::<Ah>(ah) });
    0
}

/// The source, the destination and the traffic class of a datagram. The 40 bytes before it have an IPv6 header, or an
/// IPv4 header in their last 20 bytes.
fn parse_addresses(header: &[u8; 40]) -> Option<(IpAddr, IpAddr, u8)> {
    if header[0] >> 4 == 6 {
        let address = |at: usize| {
            let bytes: [u8; 16] = header[at..at + 16].try_into().expect("sixteen bytes");
            IpAddr::V6(Ipv6Addr::from(bytes))
        };
        let class = header[0] << 4 | header[1] >> 4;
        return Some((address(8), address(24), class));
    }
    (header[20] >> 4 == 4).then(|| {
        let address = |at: usize| {
            let bytes: [u8; 4] = header[at..at + 4].try_into().expect("four bytes");
            IpAddr::V4(Ipv4Addr::from(bytes))
        };
        (address(32), address(36), header[21])
    })
}

pub unsafe extern "C" fn init_ah_from_wc(
    context: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut [u8; 40],
    attr: *mut ibv_ah_attr,
) -> c_int {
    const VERB: &str = "ibv_init_ah_from_wc";
    // SAFETY: a context of this library.
    let open = check!(VERB, minus_one, unsafe { crate::context::find(context) });
    if port != 1 {
        return wrong_port(port.into()).minus_one(VERB);
    }
    // SAFETY: the caller's completion.
    if unsafe { (*wc).wc_flags } & IBV_WC_GRH == 0 || grh.is_null() {
        return Rejection::invalid("the completion has no GRH").minus_one(VERB);
    }
    // SAFETY: the caller's buffer.
    let Some((from, to, class)) = parse_addresses(unsafe { &*grh }) else {
        return Rejection::invalid("the 40 bytes before the datagram are no IP header").minus_one(VERB);
    };
    let own = Gid::from(to);
    // A response to a multicast datagram uses the first GID of its IP version.
    let index =
        (0..open.context.gid_table_len()).find(|index| open.context.gid(*index) == Some(own)).or_else(|| {
            (0..open.context.gid_table_len()).find(|index| {
                open.context.gid(*index).is_some_and(|gid| gid.ip().is_ipv4() == from.is_ipv4())
            })
        });
    let Some(index) = index else {
        return Rejection::new(libc::ENOENT, format!("no GID of the device has the IP version of {from}"))
            .minus_one(VERB);
    };
    let vector = AddressVector {
        sgid_index: index,
        traffic_class: class,
        hop_limit: 0xff,
        ..AddressVector::to(Gid::from(from))
    };
    // SAFETY: a valid pointer of the caller.
    unsafe { *attr = ah_attr(&vector) };
    0
}

pub unsafe extern "C" fn create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut [u8; 40],
    port: u8,
) -> *mut ibv_ah {
    // SAFETY: a domain of this library.
    check!("ibv_create_ah_from_wc", null, unsafe { protection::find(pd) });
    // SAFETY: zero is valid for every field.
    let mut attr: ibv_ah_attr = unsafe { zeroed() };
    // SAFETY: the caller guarantees it.
    unsafe {
        if init_ah_from_wc((*pd).context, port, wc, grh, &mut attr) != 0 {
            return core::ptr::null_mut();
        }
        create_ah(pd, &mut attr)
    }
}

/// The emulated port has no Ethernet layer to resolve a GID to.
pub unsafe extern "C" fn resolve_eth_l2_from_gid(
    _: *mut ibv_context,
    _: *mut ibv_ah_attr,
    mac: *mut [u8; 6],
    vlan: *mut u16,
) -> c_int {
    // SAFETY: a valid pointer of the caller, if given.
    unsafe {
        if let Some(mac) = mac.as_mut() {
            *mac = [0; 6];
        }
        if let Some(vlan) = vlan.as_mut() {
            *vlan = u16::MAX;
        }
    }
    0
}

/// The IP address in a socket address.
///
/// # Safety
/// `address` is null or a socket address as long as its family requires.
pub unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: the caller guarantees it.
    match c_uint::from(unsafe { (*address).sa_family }) as c_int {
        libc::AF_INET => {
            // SAFETY: the caller guarantees it.
            let address = unsafe { &*address.cast::<libc::sockaddr_in>() };
            Some(IpAddr::V4(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr))))
        }
        libc::AF_INET6 => {
            // SAFETY: the caller guarantees it.
            let address = unsafe { &*address.cast::<libc::sockaddr_in6>() };
            Some(IpAddr::V6(Ipv6Addr::from(address.sin6_addr.s6_addr)))
        }
        _ => None,
    }
}
