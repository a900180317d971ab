//! Messages for people who debug a program.

use crate::abi::{MadAddress, UserMad};
use core::ffi::c_int;
use core::sync::atomic::{AtomicI32, Ordering};

static LEVEL: AtomicI32 = AtomicI32::new(0);

/// `umad_debug`: sets the level unless it is negative, and returns it.
pub extern "C" fn debug(level: c_int) -> c_int {
    if level >= 0 {
        LEVEL.store(level, Ordering::Relaxed);
    }
    LEVEL.load(Ordering::Relaxed)
}

/// `umad_addr_dump`
pub unsafe extern "C" fn addr_dump(address: *const MadAddress) {
    // SAFETY: the caller passes an address or null.
    let Some(address) = (unsafe { address.as_ref() }) else { return };
    let gid: String = address.gid.iter().map(|byte| format!("{byte:02x}")).collect();
    eprintln!(
        "umad: qpn {} qkey {:#x} lid {} sl {} grh {} gid index {} hop limit {} traffic class {} flow label {:#x} pkey index {:#x} gid 0x{gid}",
        u32::from_be(address.qpn),
        u32::from_be(address.qkey),
        u16::from_be(address.lid),
        address.sl,
        address.grh_present,
        address.gid_index,
        address.hop_limit,
        address.traffic_class,
        u32::from_be(address.flow_label),
        address.pkey_index,
    );
}

/// `umad_dump`
pub unsafe extern "C" fn dump(umad: *const UserMad) {
    // SAFETY: the caller passes a buffer with a header, or null.
    if let Some(header) = unsafe { umad.as_ref() } {
        eprintln!(
            "umad: agent {} status {} timeout {} ms",
            header.agent_id, header.status, header.timeout_ms
        );
        // SAFETY: the address is part of the header.
        unsafe { addr_dump(&raw const header.addr) };
    }
}
