//! Our card in the place of each rxe host of the captures, compared from the BTH on, byte for byte.
//!
//! Where it is the responder, it is primed with the numbers, keys, addresses and memory that the capture
//! tells, is fed the requests, and its replies have to be rxe's. Where it is the requester, it is given the
//! work requests and fed the replies, and the first transmission of each request has to be rxe's. Every
//! difference is in [`DIFFERENCES`] with its reason; one that no longer occurs has to leave the list.

mod captured_flow;
mod replay;

use captured_flow::{Packet, flows, names};
use replay::{FlowAssumptions, request, respond};
use softhca_wire::Mtu;
use std::collections::BTreeMap;

/// Where we and rxe differ: capture, what, how often, why.
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
        "a duplicate before anything was acknowledged: rxe answers with PSN 0 - 1, whatever it expects",
    ),
    (
        "vt_bad_psn2",
        "only we: ACKNOWLEDGE ack",
        3,
        "the same: we answer with the PSN before the expected one",
    ),
    ("vt_loss_ack", "only we: ACKNOWLEDGE ack", 1, "rxe's was lost before it was captured"),
    ("vt_loss_atomic", "only we: ATOMIC_ACKNOWLEDGE ack", 2, "rxe's were lost before they were captured"),
    ("vt_loss_write", "only rxe: ACKNOWLEDGE ack", 10, EAGER),
    (
        "vt_rnr_ok",
        "only rxe: ACKNOWLEDGE nak sequence error",
        27,
        "the rest of a burst behind an RNR NAK: rxe refuses its sequence too, we discard it in silence",
    ),
    (
        "vt_toobig",
        "only rxe: ACKNOWLEDGE nak remote operational error",
        1,
        "a SEND longer than the receive is an invalid request by the specification (IBA 9.7.4.1.6)",
    ),
    ("vt_toobig", "only we: ACKNOWLEDGE nak invalid request", 1, "the same"),
];

const EAGER: &str = "rxe acknowledges every duplicate packet of a SEND or WRITE, we those that ask for it";
const LOST_READ: &str = "the end of rxe's answer was lost before it was captured, and we answer the whole; \
    asked for the rest, rxe goes on with MIDDLE, we begin with FIRST";

/// How the work requests of a capture end, where not all succeed: statuses in order, once each.
const FAILURES: &[(&str, &[&str])] = &[
    ("vt_bad_psn", &["retry-exceeded"]),
    ("vt_bad_psn2", &["retry-exceeded"]),
    ("vt_badrkey", &["remote-access", "flushed"]),
    ("vt_badrkey_big", &["remote-access"]),
    ("vt_badrkey_read", &["remote-access"]),
    ("vt_dead", &["retry-exceeded"]),
    ("vt_mtu_mismatch", &["remote-invalid-request"]),
    ("vt_noperm", &["remote-access"]),
    ("vt_oob", &["remote-access"]),
    ("vt_rnr_fail", &["rnr-retry-exceeded"]),
    ("vt_send_inv", &["success", "remote-access"]),
    ("vt_toobig", &["remote-operation"]),
];

/// What the captures do not tell about their queue pairs.
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

/// What stands in one list and not in the other when as much as possible is matched in order.
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
fn our_replies_are_those_of_rxe_except_for_the_listed_differences() {
    let found = count(|dialogue| {
        let rxe: Vec<Packet> = dialogue.responses().cloned().collect();
        differences(&rxe, &respond(dialogue, flow_assumptions(&dialogue.name)))
    });
    assert_eq!(found, listed(DIFFERENCES), "left: found, right: listed");
}

#[test]
fn our_requests_are_those_of_rxe() {
    let found = count(|dialogue| {
        let rxe: Vec<Packet> = dialogue.without_retransmissions().into_iter().cloned().collect();
        differences(&rxe, &request(dialogue, flow_assumptions(&dialogue.name)).0)
    });
    assert_eq!(found, BTreeMap::new());
}

#[test]
fn the_replies_of_rxe_end_our_work_requests_as_they_ended_its_own() {
    let mut failures = BTreeMap::new();
    for dialogue in names().iter().flat_map(|name| flows(name)) {
        let mut statuses = request(&dialogue, flow_assumptions(&dialogue.name)).1;
        statuses.dedup();
        if statuses != ["success"] {
            failures.insert(dialogue.name, statuses);
        }
    }
    let listed = FAILURES.iter().map(|(name, statuses)| (name.to_string(), statuses.to_vec())).collect();
    assert_eq!(failures, listed, "left: found, right: listed");
}

#[test]
fn every_capture_is_replayed_in_every_direction_in_which_something_is_asked_for() {
    let names = names();
    let all: Vec<_> = names.iter().flat_map(|name| flows(name)).collect();
    let requests: usize = all.iter().map(|dialogue| dialogue.requests().count()).sum();
    let replies: usize = all.iter().map(|dialogue| dialogue.responses().count()).sum();
    assert_eq!((names.len(), all.len(), requests, replies), (43, 54, 2047, 549));
}
