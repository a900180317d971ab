//! Questions to the daemon about the HCAs of the host, and the port that a program means.

use crate::abi::MAX_PORTS;
use core::ffi::{CStr, c_char, c_int};
use softhca::{DaemonControl, HOST_VARIABLE};
use softhca_control::{SubnetHca, SubnetPort, SubnetRequest, SubnetResponse};
use std::sync::Once;

const ACTIVE: u8 = 4;
const LINK_UP: u8 = 5;
const DISABLED: u8 = 3;

/// The host that this process runs on; the daemon's first one by default.
pub fn host() -> Option<String> {
    std::env::var(HOST_VARIABLE).ok()
}

/// Connects to the daemon. The first failure is reported, because callers see an errno only.
pub fn connect() -> Option<DaemonControl> {
    static REPORTED: Once = Once::new();
    let report = |error: &softhca::Error| REPORTED.call_once(|| eprintln!("softhca: libibumad: {error}"));
    DaemonControl::connect(None).inspect_err(report).ok()
}

/// The HCAs of the host, in the order of their names. Without a daemon or a subnet, none.
pub fn hcas() -> Vec<SubnetHca> {
    let response = connect().and_then(|mut daemon| daemon.subnet(SubnetRequest::Hcas { host: host() }).ok());
    match response {
        Some((SubnetResponse::Hcas { hcas, .. }, _)) => hcas,
        _ => Vec::new(),
    }
}

/// The ports of an HCA that the interface can name, with their numbers.
pub fn ports(hca: &SubnetHca) -> impl Iterator<Item = (usize, &SubnetPort)> {
    (1..MAX_PORTS).zip(&hca.ports)
}

/// A name that a program passes; `None` for a null pointer.
///
/// # Safety
///
/// The pointer is null or points to a C string.
pub unsafe fn text<'a>(name: *const c_char) -> Option<&'a str> {
    // SAFETY: the caller promises it.
    (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_str().unwrap_or_default())
}

/// The index of the HCA with a name.
pub fn index_of(hcas: &[SubnetHca], name: &str) -> Option<usize> {
    (0..hcas.len()).find(|index| SubnetHca::device_name(*index) == name)
}

/// The HCA and port that a program means. Without a name or with port 0, it is the first active port, or else the first
/// with a link, or else the first that is not disabled.
pub fn resolve(hcas: &[SubnetHca], name: Option<&str>, port: c_int) -> Option<(usize, usize)> {
    let candidates = || {
        let named = name.map(|name| index_of(hcas, name));
        let all =
            hcas.iter().enumerate().filter(move |(index, _)| named.is_none_or(|named| named == Some(*index)));
        let all = all.flat_map(|(index, hca)| ports(hca).map(move |(number, port)| (index, number, port)));
        all.filter(move |(_, number, _)| port <= 0 || *number as c_int == port)
    };
    let find = |is_good: fn(&SubnetPort) -> bool| {
        candidates().find(|(_, _, port)| is_good(port)).map(|(index, number, _)| (index, number))
    };
    if name.is_some() && port > 0 {
        return find(|_| true);
    }
    find(|port| port.state == ACTIVE)
        .or_else(|| find(|port| port.physical_state == LINK_UP))
        .or_else(|| find(|port| port.physical_state != DISABLED))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(state: u8, physical_state: u8) -> SubnetPort {
        SubnetPort {
            lid: 0,
            lmc: 0,
            sm_lid: 0,
            sm_sl: 0,
            state,
            physical_state,
            rate: 100,
            capabilities: 0,
            gid_prefix: 0,
            guid: 0,
            p_keys: Vec::new(),
        }
    }

    #[test]
    fn the_best_port_is_chosen_unless_one_is_named() {
        let down = || SubnetHca { node_guid: 1, ports: vec![port(1, 2), port(2, 5)] };
        let active = SubnetHca { node_guid: 2, ports: vec![port(1, 3), port(4, 5)] };
        let hcas = [down(), active];
        assert_eq!(resolve(&hcas, None, 0), Some((1, 2)));
        assert_eq!(resolve(&hcas, Some("softhca0"), 0), Some((0, 2)), "a link is better than none");
        assert_eq!(resolve(&hcas, Some("softhca1"), 1), Some((1, 1)), "named, though disabled");
        assert_eq!(resolve(&hcas, None, 1), Some((0, 1)), "not disabled");
        assert_eq!(resolve(&hcas, Some("softhca1"), 3), None);
        assert_eq!(resolve(&hcas, Some("mlx5_0"), 0), None);
        assert_eq!(resolve(&hcas[..1], Some("softhca1"), 0), None);
    }
}
