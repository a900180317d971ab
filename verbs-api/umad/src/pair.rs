//! Pairs of devices for subnet management and general services. Here one device serves both.

use crate::abi::{CaPair, NAME_LEN, set_text};
use crate::subnet::{hcas, resolve, text};
use core::ffi::{c_char, c_int, c_uint};
use softhca_control::SubnetHca;

/// The first port of each HCA is preferred unless another one is active.
fn pair(hcas: &[SubnetHca], index: usize, port: c_int) -> Option<CaPair> {
    let name = SubnetHca::device_name(index);
    let (_, port) = resolve(hcas, Some(&name), port)?;
    let mut pair = CaPair {
        smi_name: [0; NAME_LEN],
        smi_preferred_port: port as u32,
        gsi_name: [0; NAME_LEN],
        gsi_preferred_port: port as u32,
    };
    set_text(&mut pair.smi_name, &name);
    set_text(&mut pair.gsi_name, &name);
    Some(pair)
}

/// `umad_get_smi_gsi_pairs`
pub unsafe extern "C" fn get_smi_gsi_pairs(pairs: *mut CaPair, max: usize) -> c_int {
    if pairs.is_null() {
        return -1;
    }
    let hcas = hcas();
    let found = (0..hcas.len()).filter_map(|index| pair(&hcas, index, 0)).take(max);
    let mut count = 0;
    for pair in found {
        // SAFETY: the caller has room for `max` pairs.
        unsafe { pairs.add(count).write(pair) };
        count += 1;
    }
    count as c_int
}

/// `umad_get_smi_gsi_pair_by_ca_name`
pub unsafe extern "C" fn get_smi_gsi_pair_by_ca_name(
    name: *const c_char,
    port: u8,
    to: *mut CaPair,
    _enforce_smi: c_uint,
) -> c_int {
    if to.is_null() {
        return -1;
    }
    let hcas = hcas();
    // SAFETY: the caller passes a C string or null.
    let found = resolve(&hcas, unsafe { text(name) }, port.into());
    match found.and_then(|(index, port)| pair(&hcas, index, port as c_int)) {
        Some(pair) => {
            // SAFETY: the caller passes a structure to fill.
            unsafe { to.write(pair) };
            0
        }
        None => {
            crate::port::set_errno(libc::ENODEV);
            -libc::ENODEV
        }
    }
}
