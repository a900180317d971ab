//! `recovery = go-back-n` and `go-back-0`.

use softhca_engine::{Reason, Recovery};
use softhca_fabric::{Action, InclusiveRange, Repeat};
use softhca_tests::pair::{Pair, Setup, pattern, requests, responses};
use softhca_types::Operation;
use softhca_wire::Psn;

fn pair(recovery: Recovery) -> Pair {
    Setup::default().recovery(recovery).build()
}

const BOTH: [Recovery; 2] = [Recovery::GoBackN, Recovery::GoBack0];

#[test]
fn go_back_n_retransmits_from_the_lost_packet() {
    let mut pair = pair(Recovery::GoBackN);
    pair.drop_packets(requests(InclusiveRange::exactly(2)), 1);
    pair.post_write(1, 0, 0, 4000);
    pair.run();
    insta::assert_snapshot!(pair.packets().join("\n"));
}

#[test]
fn go_back_0_retransmits_the_whole_message() {
    let mut pair = pair(Recovery::GoBack0);
    pair.drop_packets(requests(InclusiveRange::exactly(2)), 1);
    pair.post_write(1, 0, 0, 4000);
    pair.run();
    insta::assert_snapshot!(pair.packets().join("\n"));
}

#[test]
fn go_back_n_requests_the_rest_of_a_read() {
    let mut pair = pair(Recovery::GoBackN);
    pair.drop_packets(responses(InclusiveRange::exactly(2)), 1);
    pair.post_read(1, 0, 0, 4000);
    pair.run();
    insta::assert_snapshot!(pair.packets().join("\n"));
}

#[test]
fn go_back_0_requests_the_whole_read() {
    let mut pair = pair(Recovery::GoBack0);
    pair.drop_packets(responses(InclusiveRange::exactly(2)), 1);
    pair.post_read(1, 0, 0, 4000);
    pair.run();
    insta::assert_snapshot!(pair.packets().join("\n"));
}

/// Drops each packet of mixed traffic once, one per run, and checks data and completions.
#[test]
fn every_single_loss_is_recovered() {
    for recovery in BOTH {
        for lost in 0..12 {
            for of_answers in [false, true] {
                let mut pair = pair(recovery);
                let (a, b) = (pair.a, pair.b);
                let data = pattern(lost, 3000);
                pair.write_memory(a, 0, &data);
                pair.write_memory(b, 20_000, &data);
                pair.post_receive(100, 10_000, 3000);
                let span = InclusiveRange::exactly(lost);
                pair.drop_packets(if of_answers { responses(span) } else { requests(span) }, 1);
                pair.post_write(1, 0, 0, 3000);
                pair.post_send(2, 0, 3000);
                pair.post_read(3, 20_000, 20_000, 3000);
                let remote = b.remote(40_000);
                pair.post(4, Operation::FetchAdd { remote, add: 7 }, &[a.sge(40_000, 8)]);
                pair.post(5, Operation::Write { remote: b.remote(8), imm_data: None }, &[a.sge(0, 1025)]);
                pair.run();
                let context = format!("{} loses {lost}, answers: {of_answers}", recovery.name());
                let done: Vec<_> = (1..=5).map(|id| (id, "SUCCESS")).collect();
                assert_eq!(pair.completion_statuses(a), done, "{context}");
                assert_eq!(pair.completion_statuses(b), [(100, "SUCCESS")], "{context}");
                assert_eq!(pair.read_memory(b, 10_000, 3000), data, "{context}");
                assert_eq!(pair.read_memory(a, 20_000, 3000), data, "{context}");
                assert_eq!(pair.read_memory(b, 40_000, 8), 7u64.to_ne_bytes(), "{context}");
                assert_eq!(pair.read_memory(a, 40_000, 8), [0; 8], "{context}");
                assert_eq!(pair.read_memory(b, 8, 1025), data[..1025], "{context}");
            }
        }
    }
}

#[test]
fn a_gap_in_responses_consumes_one_retry() {
    for recovery in BOTH {
        let mut pair =
            Setup::default().recovery(recovery).one_gigabit().connection(|c| c.retry_count = 1).build();
        let (a, b) = (pair.a, pair.b);
        let data = pattern(5, 100_000);
        pair.write_memory(b, 0, &data);
        pair.drop_packets(responses(InclusiveRange::exactly(1)), 1);
        pair.post_read(1, 0, 0, 100_000);
        pair.run();
        assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")], "{}", recovery.name());
        assert_eq!(pair.read_memory(a, 0, 100_000), data);
        assert_eq!(pair.counters(a).local_ack_timeout_err, 0);
        assert_eq!(pair.counters(b).duplicate_request, 1);
    }
}

#[test]
fn go_back_0_restarts_a_partially_acknowledged_message_without_a_timeout() {
    let mut pair = pair(Recovery::GoBack0);
    let (a, b) = (pair.a, pair.b);
    let data = pattern(9, 200_000);
    pair.write_memory(a, 0, &data);
    // Packet 63 requests an ACK; the lost packet comes later.
    pair.drop_packets(requests(InclusiveRange::exactly(150)), 1);
    pair.post_write(1, 0, 0, 200_000);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
    assert_eq!(pair.read_memory(b, 0, 200_000), data);
    assert_eq!(pair.counters(a).local_ack_timeout_err, 0);
    assert_eq!(pair.counters(a).retransmitted_pkts, 196);
}

#[test]
fn retries_are_limited_and_reset_by_progress() {
    for recovery in BOTH {
        let losing = |times| {
            let setup =
                Setup::default().recovery(recovery).connection(|c| (c.retry_count, c.timeout) = (2, 8));
            let mut pair = setup.build();
            pair.drop_packets(requests(InclusiveRange::exactly(0)), times);
            pair.drop_packets(requests(InclusiveRange::exactly(1)), times);
            pair.post_write(1, 0, 0, 8);
            pair.post_write(2, 0, 0, 8);
            pair.run();
            pair
        };
        let mut enough = losing(2);
        let a = enough.a;
        assert_eq!(enough.completion_statuses(a), [(1, "SUCCESS"), (2, "SUCCESS")]);
        let mut few = losing(3);
        assert_eq!(few.completion_statuses(a), [(1, "RETRY_EXC_ERR"), (2, "WR_FLUSH_ERR")]);
        assert_eq!(few.completion_reason(a, 1), Reason::AckTimeout { psn: Psn::new(0) });
        assert_eq!(few.counters(a).local_ack_timeout_err, 3);
        assert_eq!(few.states(), ["ERR", "RTS"]);
    }
}

#[test]
fn a_lost_nak_is_recovered_by_the_ack_timeout() {
    for recovery in BOTH {
        let mut pair = pair(recovery);
        let (a, b) = (pair.a, pair.b);
        let data = pattern(3, 4000);
        pair.write_memory(a, 0, &data);
        pair.drop_packets(requests(InclusiveRange::exactly(1)), 1);
        let nak = softhca_fabric::Selector {
            classes: Some(softhca_fabric::PacketClasses::Naks),
            ..softhca_fabric::Selector::default()
        };
        pair.drop_packets(nak, 1);
        pair.post_write(1, 0, 0, 4000);
        pair.run();
        assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")], "{}", recovery.name());
        assert_eq!(pair.read_memory(b, 0, 4000), data);
        assert_eq!(pair.counters(a).local_ack_timeout_err, 1);
    }
}

#[test]
fn one_gap_causes_one_nak() {
    let mut pair = pair(Recovery::GoBackN);
    let b = pair.b;
    pair.drop_packets(requests(InclusiveRange::exactly(1)), 1);
    pair.post_write(1, 0, 0, 20_000);
    pair.run();
    assert_eq!(pair.packets().iter().filter(|packet| packet.contains("nak")).count(), 1);
    assert_eq!(pair.counters(b).out_of_sequence, 18);
}

#[test]
fn reordered_packets_are_retransmitted() {
    let mut pair = pair(Recovery::GoBackN);
    let (a, b) = (pair.a, pair.b);
    let data = pattern(4, 6000);
    pair.write_memory(a, 0, &data);
    let action = Action::Reorder { by: std::num::NonZeroU32::new(2).unwrap(), within_ns: 1_000_000 };
    pair.add_rule(requests(InclusiveRange::exactly(1)), Repeat::times(1), action);
    pair.post_write(1, 0, 0, 6000);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
    assert_eq!(pair.read_memory(b, 0, 6000), data);
}
