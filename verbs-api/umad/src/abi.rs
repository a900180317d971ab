//! The structures of `infiniband/umad.h`. Releases of libibumad.so.3 have the same ones; 1.4 adds `umad_ca_pair`.

use core::ffi::{c_char, c_int, c_uint};

pub const NAME_LEN: usize = 20;
/// The most ports of a CA, with the unused port 0.
pub const MAX_PORTS: usize = 10;

/// `struct ib_mad_addr`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MadAddress {
    pub qpn: u32,
    pub qkey: u32,
    pub lid: u16,
    pub sl: u8,
    pub path_bits: u8,
    pub grh_present: u8,
    pub gid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
    pub gid: [u8; 16],
    pub flow_label: u32,
    pub pkey_index: u16,
    pub reserved: [u8; 6],
}

/// `struct ib_user_mad`, which the MAD follows.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UserMad {
    pub agent_id: u32,
    pub status: u32,
    pub timeout_ms: u32,
    pub retries: u32,
    pub length: u32,
    pub addr: MadAddress,
}

impl UserMad {
    pub const LEN: usize = size_of::<UserMad>();
}

/// `struct umad_port`
#[repr(C)]
pub struct Port {
    pub ca_name: [c_char; NAME_LEN],
    pub portnum: c_int,
    pub base_lid: c_uint,
    pub lmc: c_uint,
    pub sm_lid: c_uint,
    pub sm_sl: c_uint,
    pub state: c_uint,
    pub phys_state: c_uint,
    pub rate: c_uint,
    pub capmask: u32,
    pub gid_prefix: u64,
    pub port_guid: u64,
    pub pkeys_size: c_uint,
    pub pkeys: *mut u16,
    pub link_layer: [c_char; NAME_LEN],
}

/// `struct umad_ca`
#[repr(C)]
pub struct Ca {
    pub ca_name: [c_char; NAME_LEN],
    pub node_type: c_uint,
    pub numports: c_int,
    pub fw_ver: [c_char; 20],
    pub ca_type: [c_char; 40],
    pub hw_ver: [c_char; 20],
    pub node_guid: u64,
    pub system_guid: u64,
    pub ports: [*mut Port; MAX_PORTS],
}

/// `struct umad_ca_pair`
#[repr(C)]
pub struct CaPair {
    pub smi_name: [c_char; NAME_LEN],
    pub smi_preferred_port: u32,
    pub gsi_name: [c_char; NAME_LEN],
    pub gsi_preferred_port: u32,
}

/// `struct umad_device_node`
#[repr(C)]
pub struct DeviceNode {
    pub next: *mut DeviceNode,
    pub ca_name: *const c_char,
}

/// `struct umad_reg_attr`
#[repr(C)]
pub struct RegistrationAttributes {
    pub mgmt_class: u8,
    pub mgmt_class_version: u8,
    pub flags: u32,
    pub method_mask: [u64; 2],
    pub oui: u32,
    pub rmpp_version: u8,
}

// The sizes and offsets that a C compiler finds in the headers.
const _: () = assert!(size_of::<MadAddress>() == 44 && size_of::<UserMad>() == 64);
const _: () = assert!(size_of::<Port>() == 112 && core::mem::offset_of!(Port, gid_prefix) == 56);
const _: () =
    assert!(core::mem::offset_of!(Port, pkeys) == 80 && core::mem::offset_of!(Port, link_layer) == 88);
const _: () = assert!(size_of::<Ca>() == 208 && core::mem::offset_of!(Ca, node_guid) == 112);
const _: () = assert!(size_of::<CaPair>() == 48 && size_of::<RegistrationAttributes>() == 32);

/// Copies a text into an array of C characters, which always ends with a zero.
pub fn set_text<const N: usize>(to: &mut [c_char; N], text: &str) {
    *to = [0; N];
    for (to, byte) in to[..N - 1].iter_mut().zip(text.bytes()) {
        *to = byte as c_char;
    }
}
