//! Address handles and addresses.

use crate::abi::*;
use crate::context::{ContextHandle, ContextState};
use crate::errno::{self, Rejection};
use crate::faults;
use crate::object::{self, Handle};
use crate::protection::{Pd, UseCount};
use core::ffi::{c_int, c_uint};
use core::mem::MaybeUninit;
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

/// The address vector of address handle attributes. RoCE requires a GRH, and InfiniBand a LID.
pub fn address_vector(attr: &ibv_ah_attr) -> Result<AddressVector, Rejection> {
    if attr.is_global == 0 && attr.dlid == 0 {
        return Err(Rejection::invalid(
            "ah_attr.is_global is 0: RoCE needs a GRH with the GID of the destination, and InfiniBand needs dlid",
        ));
    }
    if attr.port_num > 1 {
        return Err(wrong_port(attr.port_num.into()));
    }
    let (dlid, src_path_bits) = (attr.dlid, attr.src_path_bits);
    if attr.is_global == 0 {
        let service_level = attr.sl;
        return Ok(AddressVector { service_level, dlid, src_path_bits, ..AddressVector::default() });
    }
    Ok(AddressVector {
        dgid: Gid(bytes_of(attr.grh.dgid)),
        sgid_index: attr.grh.sgid_index,
        traffic_class: attr.grh.traffic_class,
        flow_label: attr.grh.flow_label & 0xf_ffff,
        hop_limit: attr.grh.hop_limit,
        service_level: attr.sl,
        dlid,
        src_path_bits,
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
        dlid: vector.dlid,
        sl: vector.service_level,
        src_path_bits: vector.src_path_bits,
        static_rate: 0,
        is_global: u8::from(!vector.dgid.is_unspecified()),
        port_num: 1,
    }
}

fn create(pd: Handle<Pd>, attr: &ibv_ah_attr) -> Result<Handle<Ah>, Rejection> {
    let domain = pd.find()?;
    check_port(attr.port_num)?;
    let handle = domain.domain.create_address_handle(address_vector(attr)?)?;
    let abi = ibv_ah { context: domain.abi().context, pd, handle: handle.handle() };
    Ok(object::create(abi, Ah { handle, _domain: domain.add_user() }))
}

fn check_port(port: u8) -> Result<(), Rejection> {
    if port == 1 { Ok(()) } else { Err(wrong_port(port.into())) }
}

pub extern "C" fn create_ah(pd: Handle<Pd>, attr: &ibv_ah_attr) -> Handle<Ah> {
    errno::handle("ibv_create_ah", || create(pd, attr))
}

pub extern "C" fn destroy_ah(ah: Handle<Ah>) -> c_int {
    errno::code("ibv_destroy_ah", || {
        let ah = ah.find()?;
        faults::announce(Verb::DestroyAh, Some((Resource::AddressHandle, ah.handle.handle())))?;
        ah.destroy();
        Ok(())
    })
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

/// The attributes of an address handle to the sender of a datagram.
fn attr_from_wc(
    open: &ContextState,
    port: u8,
    wc: &ibv_wc,
    grh: Option<&[u8; 40]>,
) -> Result<ibv_ah_attr, Rejection> {
    check_port(port)?;
    if open.device.is_infiniband() {
        return routed_attr_from_wc(open, wc, grh);
    }
    let Some(grh) = grh.filter(|_| wc.wc_flags & IBV_WC_GRH != 0) else {
        return Err(Rejection::invalid("the completion has no GRH"));
    };
    let Some((from, to, class)) = parse_addresses(grh) else {
        return Err(Rejection::invalid("the 40 bytes before the datagram are no IP header"));
    };
    let own = Gid::from(to);
    let gids = || (0..open.context.gid_table_len()).map(move |index| (index, open.context.gid(index)));
    // A response to a multicast datagram uses the first GID of its IP version.
    let is_alike = |gid: Option<Gid>| gid.is_some_and(|gid| gid.ip().is_ipv4() == from.is_ipv4());
    let index = gids().find(|(_, gid)| *gid == Some(own)).or_else(|| gids().find(|(_, gid)| is_alike(*gid)));
    let Some((sgid_index, _)) = index else {
        return Err(Rejection::new(
            libc::ENOENT,
            format!("no GID of the device has the IP version of {from}"),
        ));
    };
    let to = AddressVector::to(Gid::from(from));
    Ok(ah_attr(&AddressVector { sgid_index, traffic_class: class, hop_limit: 0xff, ..to }))
}

/// The attributes of an address handle to the sender of a datagram that arrived over InfiniBand.
fn routed_attr_from_wc(
    open: &ContextState,
    wc: &ibv_wc,
    grh: Option<&[u8; 40]>,
) -> Result<ibv_ah_attr, Rejection> {
    let mut vector = AddressVector {
        dlid: wc.slid,
        service_level: wc.sl,
        src_path_bits: wc.dlid_path_bits,
        ..AddressVector::default()
    };
    if let Some(grh) = grh.filter(|_| wc.wc_flags & IBV_WC_GRH != 0) {
        let gid = |at: usize| Gid(grh[at..at + 16].try_into().expect("sixteen bytes"));
        let gids = open.context.infiniband_port()?.map(|port| port.gids).unwrap_or_default();
        // A response to a multicast datagram uses the first GID.
        let index = gids.iter().position(|own| *own == gid(24)).unwrap_or(0);
        vector = AddressVector {
            dgid: gid(8),
            sgid_index: index as u8,
            traffic_class: grh[0] << 4 | grh[1] >> 4,
            flow_label: u32::from_be_bytes([0, grh[1] & 0xf, grh[2], grh[3]]),
            hop_limit: 0xff,
            ..vector
        };
    }
    Ok(ah_attr(&vector))
}

pub extern "C" fn init_ah_from_wc(
    context: ContextHandle,
    port: u8,
    wc: &ibv_wc,
    grh: Option<&[u8; 40]>,
    attr: &mut MaybeUninit<ibv_ah_attr>,
) -> c_int {
    errno::minus_one("ibv_init_ah_from_wc", || {
        let open = context.find()?;
        attr.write(attr_from_wc(&open, port, wc, grh)?);
        Ok(())
    })
}

pub extern "C" fn create_ah_from_wc(
    pd: Handle<Pd>,
    wc: &ibv_wc,
    grh: Option<&[u8; 40]>,
    port: u8,
) -> Handle<Ah> {
    errno::handle("ibv_create_ah_from_wc", || {
        let open = pd.find()?.abi().context.find()?;
        create(pd, &attr_from_wc(&open, port, wc, grh)?)
    })
}

/// The emulated port has no Ethernet layer to resolve a GID to.
pub extern "C" fn resolve_eth_l2_from_gid(
    _: ContextHandle,
    _: *const ibv_ah_attr,
    mac: Option<&mut [u8; 6]>,
    vlan: Option<&mut u16>,
) -> c_int {
    if let Some(mac) = mac {
        *mac = [0; 6];
    }
    if let Some(vlan) = vlan {
        *vlan = u16::MAX;
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
