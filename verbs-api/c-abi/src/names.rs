//! Strings for enumeration values, and rate conversions.

use core::ffi::{CStr, c_char, c_int};

fn nth(names: &[&'static CStr], index: c_int) -> *const c_char {
    let name = usize::try_from(index).ok().and_then(|index| names.get(index));
    name.unwrap_or(&c"unknown").as_ptr()
}

pub extern "C" fn wc_status_str(status: c_int) -> *const c_char {
    const NAMES: [&CStr; 24] = [
        c"success",
        c"local length error",
        c"local QP operation error",
        c"local EE context operation error",
        c"local protection error",
        c"Work Request Flushed Error",
        c"memory window bind error",
        c"bad response error",
        c"local access error",
        c"remote invalid request error",
        c"remote access error",
        c"remote operation error",
        c"transport retry counter exceeded",
        c"RNR retry counter exceeded",
        c"local RDD violation error",
        c"remote invalid RD request",
        c"aborted error",
        c"invalid EE context number",
        c"invalid EE context state",
        c"fatal error",
        c"response timeout error",
        c"general error",
        c"TM error",
        c"TM software rendezvous",
    ];
    nth(&NAMES, status)
}

pub extern "C" fn event_type_str(event: c_int) -> *const c_char {
    const NAMES: [&CStr; 20] = [
        c"CQ error",
        c"local work queue catastrophic error",
        c"invalid request local work queue error",
        c"local access violation work queue error",
        c"communication established",
        c"send queue drained",
        c"path migrated",
        c"path migration request error",
        c"local catastrophic error",
        c"port active",
        c"port error",
        c"LID change",
        c"P_Key change",
        c"SM change",
        c"SRQ catastrophic error",
        c"SRQ limit reached",
        c"last WQE reached",
        c"client reregistration",
        c"GID table change",
        c"WQ fatal",
    ];
    nth(&NAMES, event)
}

pub extern "C" fn node_type_str(kind: c_int) -> *const c_char {
    const NAMES: [&CStr; 8] = [
        c"unknown",
        c"InfiniBand channel adapter",
        c"InfiniBand switch",
        c"InfiniBand router",
        c"iWARP NIC",
        c"usNIC",
        c"usNIC UDP",
        c"unspecified",
    ];
    nth(&NAMES, kind)
}

pub extern "C" fn port_state_str(state: c_int) -> *const c_char {
    const NAMES: [&CStr; 6] =
        [c"no state change (NOP)", c"down", c"init", c"armed", c"active", c"active defer"];
    nth(&NAMES, state)
}

/// An `ibv_rate` value, its multiple of 2.5 Gbit/s if it is one, and its Mbit/s.
const RATES: [(c_int, Option<c_int>, c_int); 23] = [
    (2, Some(1), 2_500),
    (5, Some(2), 5_000),
    (3, Some(4), 10_000),
    (6, Some(8), 20_000),
    (4, Some(12), 30_000),
    (7, Some(16), 40_000),
    (8, Some(24), 60_000),
    (9, Some(32), 80_000),
    (10, Some(48), 120_000),
    (11, None, 14_062),
    (12, None, 56_250),
    (13, None, 112_500),
    (14, None, 168_750),
    (15, None, 25_781),
    (16, None, 103_125),
    (17, None, 206_250),
    (18, None, 309_375),
    (19, Some(11), 28_125),
    (20, Some(20), 53_125),
    (21, Some(160), 425_000),
    (22, Some(240), 637_500),
    (23, Some(320), 850_000),
    (24, Some(480), 1_275_000),
];

pub extern "C" fn rate_to_mult(rate: c_int) -> c_int {
    RATES.iter().find(|known| known.0 == rate).and_then(|known| known.1).unwrap_or(-1)
}

pub extern "C" fn mult_to_rate(multiple: c_int) -> c_int {
    RATES.iter().find(|known| known.1 == Some(multiple)).map_or(0, |known| known.0)
}

pub extern "C" fn rate_to_mbps(rate: c_int) -> c_int {
    RATES.iter().find(|known| known.0 == rate).map_or(-1, |known| known.2)
}

pub extern "C" fn mbps_to_rate(mbps: c_int) -> c_int {
    RATES.iter().find(|known| known.2 == mbps).map_or(0, |known| known.0)
}
