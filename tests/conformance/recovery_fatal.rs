//! `recovery = fatal`: one test per row of the detection table.

use softhca_engine::{Event, Reason, RequestError};
use softhca_fabric::{Action, InclusiveRange, Repeat};
use softhca_tests::pair::{Pair, Setup, requests, responses};
use softhca_types::Operation;
use softhca_wire::Psn;
use std::time::Duration;

#[test]
fn a_psn_gap_breaks_the_connection_at_both_ends() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    pair.post_receive(100, 0, 100);
    pair.drop_packets(requests(InclusiveRange::exactly(1)), 1);
    pair.post_write(1, 0, 0, 4000);
    pair.post_write(2, 0, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "RETRY_EXC_ERR"), (2, "WR_FLUSH_ERR")]);
    assert_eq!(pair.completion_statuses(b), [(100, "WR_FLUSH_ERR")]);
    assert_eq!(pair.states(), ["ERR", "ERR"]);
    assert_eq!((pair.async_events(a).len(), pair.async_events(b)), (0, vec!["QP_FATAL"]));
    assert_eq!(pair.completion_reason(a, 1), Reason::SequenceNak { psn: Psn::new(1) });
    let gap = RequestError::PsnOutOfSequence { expected: Psn::new(1), got: Psn::new(2) };
    let named = pair.recording.borrow().events.iter().any(|(.., event)| {
        matches!(event, Event::RequestRejected { qp, error, .. } if *qp == b.qp && *error == gap)
    });
    assert!(named, "the event contains the first missing PSN");
    let naks = pair.packets().into_iter().filter(|packet| packet.contains("nak")).collect::<Vec<_>>();
    assert_eq!(naks, ["<- ACKNOWLEDGE 1 nak sequence error msn=0"]);
}

#[test]
fn later_packets_are_dropped_while_an_rnr_nak_is_outstanding() {
    let mut pair = Setup::default().connection(|c| c.timeout = 0).build();
    let (a, b) = (pair.a, pair.b);
    pair.post_send(1, 0, 4000);
    pair.post_send(2, 0, 8);
    pair.world.run_for(Duration::from_micros(100));
    assert_eq!(pair.states(), ["RTS", "RTS"]);
    assert_eq!(pair.packets().iter().filter(|packet| packet.starts_with("<-")).count(), 1);
    pair.post_receive(100, 0, 4000);
    pair.post_receive(101, 0, 4000);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS"), (2, "SUCCESS")]);
    assert_eq!(pair.completion_statuses(b), [(100, "SUCCESS"), (101, "SUCCESS")]);
    assert_eq!(pair.counters(a).packet_seq_err, 0);
}

#[test]
fn a_duplicate_is_acknowledged_and_not_executed_again() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    pair.add_rule(requests(InclusiveRange::exactly(0)), Repeat::times(1), Action::Duplicate { copies: 1 });
    let (remote, gather) = (b.remote(0), [a.sge(0, 8)]);
    pair.post(1, Operation::FetchAdd { remote, add: 5 }, &gather);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
    assert_eq!(pair.read_memory(b, 0, 8), 5u64.to_ne_bytes());
    assert_eq!(pair.states(), ["RTS", "RTS"]);
    assert_eq!(pair.counters(b).duplicate_request, 1);
}

#[test]
fn a_sequence_nak_fails_the_request_whose_packet_is_missing() {
    let mut pair = Pair::new();
    let a = pair.a;
    pair.drop_packets(requests(InclusiveRange::exactly(1)), 1);
    for id in 0..4 {
        pair.post_write(id, 0, 0, 8);
    }
    pair.run();
    let expected = [(0, "SUCCESS"), (1, "RETRY_EXC_ERR"), (2, "WR_FLUSH_ERR"), (3, "WR_FLUSH_ERR")];
    assert_eq!(pair.completion_statuses(a), expected);
    assert_eq!(pair.packets().iter().filter(|packet| packet.starts_with("->")).count(), 4);
}

#[test]
fn a_sequence_nak_is_ignored_while_its_psn_is_in_rnr_wait() {
    let mut pair = Setup::default().connection(|c| c.timeout = 0).build();
    let (a, b) = (pair.a, pair.b);
    pair.post_send(1, 0, 8);
    pair.world.run_for(Duration::from_micros(50));
    // A copy of the RNR NAK with syndrome "sequence error".
    let mut frame = pair.recording.borrow().sent.last().unwrap().1.clone();
    frame.bytes[12] = 0x60;
    softhca_wire::Icrc::write(&frame.addressing, &mut frame.bytes);
    pair.world.inject(a.host, frame);
    assert_eq!(pair.counters(a).packet_seq_err, 1);
    pair.post_receive(100, 0, 8);
    pair.run();
    assert_eq!(
        (pair.completion_statuses(a), pair.completion_statuses(b)),
        (vec![(1, "SUCCESS")], vec![(100, "SUCCESS")])
    );
}

#[test]
fn a_gap_in_read_responses_fails_the_read() {
    let mut pair = Pair::new();
    let a = pair.a;
    pair.drop_packets(responses(InclusiveRange::exactly(1)), 1);
    pair.post_read(1, 0, 0, 4000);
    pair.post_read(2, 0, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "RETRY_EXC_ERR"), (2, "WR_FLUSH_ERR")]);
    assert_eq!(pair.completion_reason(a, 1), Reason::ResponseGap { expected: Psn::new(1), got: Psn::new(2) });
    assert_eq!(pair.states(), ["ERR", "RTS"]);
}

#[test]
fn an_ack_beyond_an_outstanding_read_fails_the_read() {
    for operation in ["read", "atomic"] {
        let mut pair = Pair::new();
        let (a, b) = (pair.a, pair.b);
        pair.drop_packets(responses(InclusiveRange::exactly(0)), 1);
        match operation {
            "read" => pair.post_read(1, 0, 0, 8),
            _ => pair.post(1, Operation::FetchAdd { remote: b.remote(0), add: 1 }, &[a.sge(0, 8)]),
        }
        pair.post_write(2, 0, 0, 8);
        pair.run();
        assert_eq!(pair.completion_statuses(a), [(1, "RETRY_EXC_ERR"), (2, "WR_FLUSH_ERR")], "{operation}");
        assert_eq!(
            pair.completion_reason(a, 1),
            Reason::ResponseGap { expected: Psn::new(0), got: Psn::new(1) }
        );
        assert_eq!(pair.states(), ["ERR", "RTS"]);
    }
}

#[test]
fn a_lost_last_packet_times_out_after_all_retries() {
    let mut pair = Setup::default().connection(|c| (c.timeout, c.retry_count) = (10, 3)).build();
    let a = pair.a;
    pair.drop_packets(requests(InclusiveRange::exactly(2)), 1);
    pair.post_write(1, 0, 0, 3000);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "RETRY_EXC_ERR")]);
    assert_eq!(pair.completion_reason(a, 1), Reason::AckTimeout { psn: Psn::new(0) });
    assert_eq!(pair.states(), ["ERR", "RTS"]);
    assert_eq!(pair.world.now().nanos(), (4096 << 10) * 4, "timeout × (retry_cnt + 1)");
    assert_eq!(pair.counters(a).retransmitted_pkts, 0);
}

#[test]
fn a_lost_ack_covered_by_a_later_one_is_not_a_loss() {
    let mut pair = Pair::new();
    let a = pair.a;
    pair.drop_packets(responses(InclusiveRange::exactly(0)), 1);
    pair.post_write(1, 0, 0, 8);
    pair.post_write(2, 0, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS"), (2, "SUCCESS")]);
    assert_eq!(pair.states(), ["RTS", "RTS"]);
}
