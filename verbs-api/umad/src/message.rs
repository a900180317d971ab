//! The fields of a MAD buffer: the header of the user MAD interface, then the MAD.

use crate::abi::{MadAddress, UserMad};
use core::ffi::{c_int, c_void};

/// `umad_size`
pub extern "C" fn size() -> usize {
    UserMad::LEN
}

/// `umad_get_mad`
pub unsafe extern "C" fn get_mad(umad: *mut UserMad) -> *mut c_void {
    umad.wrapping_add(1).cast()
}

/// `umad_get_mad_addr`
pub unsafe extern "C" fn get_mad_addr(umad: *mut UserMad) -> *mut MadAddress {
    // SAFETY: the caller passes a buffer with a header.
    unsafe { &raw mut (*umad).addr }
}

/// `umad_status`
pub unsafe extern "C" fn status(umad: *const UserMad) -> c_int {
    // SAFETY: the caller passes a buffer with a header.
    unsafe { (*umad).status as c_int }
}

/// `umad_set_grh`: the flow label of `address` has the host's byte order.
pub unsafe extern "C" fn set_grh(umad: *mut UserMad, address: *const MadAddress) -> c_int {
    // SAFETY: the caller passes a buffer with a header, and an address or null.
    let (to, from) = unsafe { (&mut (*umad).addr, address.as_ref()) };
    to.grh_present = from.is_some().into();
    if let Some(from) = from {
        to.gid = from.gid;
        to.flow_label = from.flow_label.to_be();
        (to.hop_limit, to.traffic_class) = (from.hop_limit, from.traffic_class);
    }
    0
}

/// `umad_set_pkey`
pub unsafe extern "C" fn set_pkey(umad: *mut UserMad, index: c_int) -> c_int {
    // SAFETY: the caller passes a buffer with a header.
    unsafe { (*umad).addr.pkey_index = index as u16 };
    0
}

/// `umad_get_pkey`
pub unsafe extern "C" fn get_pkey(umad: *const UserMad) -> c_int {
    // SAFETY: the caller passes a buffer with a header.
    unsafe { (*umad).addr.pkey_index.into() }
}

/// `umad_set_addr`
pub unsafe extern "C" fn set_addr(
    umad: *mut UserMad,
    lid: c_int,
    qpn: c_int,
    sl: c_int,
    qkey: c_int,
) -> c_int {
    // SAFETY: the caller promises what this call needs.
    unsafe { set_addr_net(umad, (lid as u16).to_be(), (qpn as u32).to_be(), sl, (qkey as u32).to_be()) }
}

/// `umad_set_addr_net`: as [`set_addr`], in network byte order.
pub unsafe extern "C" fn set_addr_net(umad: *mut UserMad, lid: u16, qpn: u32, sl: c_int, qkey: u32) -> c_int {
    // SAFETY: the caller passes a buffer with a header.
    let to = unsafe { &mut (*umad).addr };
    (to.lid, to.qpn, to.sl, to.qkey) = (lid, qpn, sl as u8, qkey);
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_in_network_byte_order() {
        let mut buffer = [0u64; 8];
        let umad = buffer.as_mut_ptr().cast::<UserMad>();
        // SAFETY: the buffer has the size and alignment of a header.
        let bytes = unsafe {
            assert_eq!(set_addr(umad, 0x1234, 1, 3, 0x8001_0000_u32 as c_int), 0);
            assert_eq!((set_pkey(umad, 7), get_pkey(umad)), (0, 7));
            let flow = MadAddress { flow_label: 0x12345, gid: [9; 16], hop_limit: 64, ..*get_mad_addr(umad) };
            set_grh(umad, &flow);
            assert_eq!(get_mad(umad).byte_offset_from(umad), 64);
            core::slice::from_raw_parts(umad.cast::<u8>(), 64)
        };
        assert_eq!(bytes[20..32], [0, 0, 0, 1, 0x80, 1, 0, 0, 0x12, 0x34, 3, 0]);
        assert_eq!(
            (bytes[32], bytes[34], &bytes[36..52], &bytes[52..56]),
            (1, 64, &[9; 16][..], &[0, 1, 0x23, 0x45][..])
        );
    }
}
