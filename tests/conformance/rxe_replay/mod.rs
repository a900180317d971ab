//! Our HCA in the role of each rxe host of the captures, compared byte for byte from the BTH on.
//!
//! As the responder, it is configured with the QPNs, rkeys, addresses and memory of the capture and receives the requests;
//! its responses must equal those of rxe. As the requester, it gets the work requests and the responses; the first
//! transmission of each request must equal that of rxe. [`DIFFERENCES`] lists every difference with its reason; an entry
//! that no longer occurs must be removed.

mod captured_flow;
mod replay;

use captured_flow::{Packet, flows, names};
use replay::{FlowAssumptions, request, respond};
use softhca_wire::Mtu;
use std::collections::BTreeMap;

/// Differences from rxe: capture, packet, count, reason.
const DIFFERENCES: &[(&str, &str, usize, &str)] = &[
    ("j_pf_read_bw", "only we: READ_RESPONSE_FIRST ack 4096B", 1, LOST_READ),
    ("j_pf_read_bw", "only we: READ_RESPONSE_MIDDLE 4096B", 3, LOST_READ),
    ("j_pf_read_bw", "only we: READ_RESPONSE_LAST ack 4096B", 1, LOST_READ),
    ("j_rc_pp_64k", "only rxe: ACKNOWLEDGE ack", 30, EAGER),
    ("rc_pp", "only rxe: ACKNOWLEDGE ack", 3, EAGER),
    ("rc_pp_64k", "only rxe: ACKNOWLEDGE ack", 63, EAGER),
    ("rc_pp_ipv6", "only rxe: ACKNOWLEDGE ack", 2, EAGER),
    (
        "vt_bad_psn2",
        "only rxe: ACKNOWLEDGE ack",
        3,
        "a duplicate before the first ACK: rxe acknowledges PSN 0 - 1, whatever it expects",
    ),
    (
        "vt_bad_psn2",
        "only we: ACKNOWLEDGE ack",
        3,
        "the same: we acknowledge the PSN before the expected one",
    ),
    ("vt_loss_ack", "only we: ACKNOWLEDGE ack", 1, "rxe's was lost before it was captured"),
    ("vt_loss_atomic", "only we: ATOMIC_ACKNOWLEDGE ack", 2, "rxe's were lost before they were captured"),
    ("vt_loss_write", "only rxe: ACKNOWLEDGE ack", 10, EAGER),
    (
        "vt_rnr_ok",
        "only rxe: ACKNOWLEDGE nak sequence error",
        27,
        "the rest of a burst after an RNR NAK: rxe sends a sequence NAK, we drop it silently",
    ),
    (
        "vt_toobig",
        "only rxe: ACKNOWLEDGE nak remote operational error",
        1,
        "a SEND longer than the receive is an invalid request by the specification (IBA 9.7.4.1.6)",
    ),
    ("vt_toobig", "only we: ACKNOWLEDGE nak invalid request", 1, "the same"),
];

const EAGER: &str =
    "rxe acknowledges every duplicate packet of a SEND or WRITE, we only those with an ACK request";
const LOST_READ: &str = "the end of rxe's response was lost before it was captured, and we send the whole response; \
    asked for the rest, rxe continues with MIDDLE, we begin with FIRST";

/// The completion statuses of captures with failures, in order and without repetition.
const FAILURES: &[(&str, &[&str])] = &[
    ("vt_bad_psn", &["RETRY_EXC_ERR"]),
    ("vt_bad_psn2", &["RETRY_EXC_ERR"]),
    ("vt_badrkey", &["REM_ACCESS_ERR", "WR_FLUSH_ERR"]),
    ("vt_badrkey_big", &["REM_ACCESS_ERR"]),
    ("vt_badrkey_read", &["REM_ACCESS_ERR"]),
    ("vt_dead", &["RETRY_EXC_ERR"]),
    ("vt_mtu_mismatch", &["REM_INV_REQ_ERR"]),
    ("vt_noperm", &["REM_ACCESS_ERR"]),
    ("vt_oob", &["REM_ACCESS_ERR"]),
    ("vt_rnr_fail", &["RNR_RETRY_EXC_ERR"]),
    ("vt_send_inv", &["SUCCESS", "REM_ACCESS_ERR"]),
    ("vt_toobig", &["REM_OP_ERR"]),
];

/// Attributes that the captures do not contain.
fn flow_assumptions(name: &str) -> FlowAssumptions {
    match name {
        "vt_bad_psn" => FlowAssumptions { expected_psn: Some(1_048_571), ..FlowAssumptions::default() },
        "vt_bad_psn2" => FlowAssumptions { expected_psn: Some(1_048_581), ..FlowAssumptions::default() },
        "vt_mtu_mismatch" => FlowAssumptions { mtu: Some(Mtu::B512), ..FlowAssumptions::default() },
        "vt_toobig" => FlowAssumptions { receive_bytes: Some(100), ..FlowAssumptions::default() },
        "vt_oob" => FlowAssumptions {
            short_region: Some((0x34fd, 0x7fd4_42fe_f000, 0x7fd4_42ff_0000)),
            ..FlowAssumptions::default()
        },
        "vt_rnr_fail" => FlowAssumptions { rnr_retry: Some(2), ..FlowAssumptions::default() },
        "vt_send_inv" => FlowAssumptions { window: Some(0x0800_0190), ..FlowAssumptions::default() },
        "vt_dead" => FlowAssumptions { responder_absent: true, ..FlowAssumptions::default() },
        _ => FlowAssumptions::default(),
    }
}

/// The elements of one list without a match in the other, for a longest common subsequence.
fn differences(rxe: &[Packet], ours: &[Packet]) -> Vec<String> {
    let same = |i: usize, j: usize| rxe[i].bytes() == ours[j].bytes();
    let mut longest = vec![vec![0; ours.len() + 1]; rxe.len() + 1];
    for i in (0..rxe.len()).rev() {
        for j in (0..ours.len()).rev() {
            longest[i][j] = match same(i, j) {
                true => longest[i + 1][j + 1] + 1,
                false => longest[i + 1][j].max(longest[i][j + 1]),
            };
        }
    }
    let (mut i, mut j) = (0, 0);
    let mut found = Vec::new();
    while i < rxe.len() || j < ours.len() {
        if i < rxe.len() && j < ours.len() && same(i, j) {
            (i, j) = (i + 1, j + 1);
        } else if j == ours.len() || i < rxe.len() && longest[i + 1][j] >= longest[i][j + 1] {
            found.push(format!("only rxe: {}", rxe[i].describe()));
            i += 1;
        } else {
            found.push(format!("only we: {}", ours[j].describe()));
            j += 1;
        }
    }
    found
}

/// Counts the differences of all captures.
fn count(compare: impl Fn(&captured_flow::CapturedFlow) -> Vec<String>) -> BTreeMap<(String, String), usize> {
    let mut counts = BTreeMap::new();
    for dialogue in names().iter().flat_map(|name| flows(name)) {
        for line in compare(&dialogue) {
            *counts.entry((dialogue.name.clone(), line)).or_insert(0) += 1;
        }
    }
    counts
}

fn listed(differences: &[(&str, &str, usize, &str)]) -> BTreeMap<(String, String), usize> {
    differences.iter().map(|(name, line, times, _)| ((name.to_string(), line.to_string()), *times)).collect()
}

#[test]
fn our_responses_equal_those_of_rxe_except_for_the_listed_differences() {
    let found = count(|dialogue| {
        let rxe: Vec<Packet> = dialogue.responses().cloned().collect();
        differences(&rxe, &respond(dialogue, flow_assumptions(&dialogue.name)))
    });
    assert_eq!(found, listed(DIFFERENCES), "left: found, right: listed");
}

#[test]
fn our_requests_equal_those_of_rxe() {
    let found = count(|dialogue| {
        let rxe: Vec<Packet> = dialogue.without_retransmissions().into_iter().cloned().collect();
        differences(&rxe, &request(dialogue, flow_assumptions(&dialogue.name)).0)
    });
    assert_eq!(found, BTreeMap::new());
}

#[test]
fn the_responses_of_rxe_complete_our_requests_with_the_same_status() {
    let mut failures = BTreeMap::new();
    for dialogue in names().iter().flat_map(|name| flows(name)) {
        let mut statuses = request(&dialogue, flow_assumptions(&dialogue.name)).1;
        statuses.dedup();
        if statuses != ["SUCCESS"] {
            failures.insert(dialogue.name, statuses);
        }
    }
    let listed = FAILURES.iter().map(|(name, statuses)| (name.to_string(), statuses.to_vec())).collect();
    assert_eq!(failures, listed, "left: found, right: listed");
}

#[test]
fn every_direction_with_requests_is_replayed() {
    let names = names();
    let all: Vec<_> = names.iter().flat_map(|name| flows(name)).collect();
    let requests: usize = all.iter().map(|dialogue| dialogue.requests().count()).sum();
    let replies: usize = all.iter().map(|dialogue| dialogue.responses().count()).sum();
    assert_eq!((names.len(), all.len(), requests, replies), (43, 54, 2047, 549));
}
