//! Receiver not ready: RNR NAKs, waits and retries.

use softhca_engine::{QpType, Recovery};
use softhca_fabric::InclusiveRange;
use softhca_queue::Operation;
use softhca_tests::pair::{Pair, Setup, pattern, responses};
use softhca_wire::RnrTimer;
use std::time::Duration;

#[test]
fn the_requester_waits_for_the_rnr_timer_and_retries() {
    for recovery in [Recovery::Fatal, Recovery::GoBackN, Recovery::GoBack0] {
        for kind in [QpType::Rc, QpType::XrcInitiator] {
            let setup = Setup::with_kind(kind).recovery(recovery);
            let mut pair = setup.connection(|c| c.min_rnr_timer = RnrTimer::new(20)).build();
            let (a, b) = (pair.a, pair.b);
            let data = pattern(4, 3000);
            pair.write_memory(a, 0, &data);
            pair.post_send(1, 0, 3000);
            pair.world.run_for(Duration::from_millis(1));
            pair.post_receive(100, 0, 3000);
            pair.run();
            assert_eq!(
                (pair.completion_statuses(a), pair.completion_statuses(b)),
                (vec![(1, "SUCCESS")], vec![(100, "SUCCESS")])
            );
            assert_eq!(pair.read_memory(b, 0, 3000), data);
            // Code 20 is 10.24 ms: one wait, and three one-way delays of 1 µs.
            assert_eq!(pair.counters(a).rcvd_rnr_err, 1);
            let completed = pair.recording.borrow().events.iter().find_map(|(at, _, event)| match event {
                softhca_engine::Event::Completed { completion, .. } if completion.wr_id == 1 => {
                    Some(at.nanos())
                }
                _ => None,
            });
            assert_eq!(completed, Some(10_240_000 + 4_000));
        }
    }
}

#[test]
fn rnr_retry_7_retries_forever() {
    let mut pair = Pair::new();
    let a = pair.a;
    pair.post_send(1, 0, 8);
    pair.world.run_for(Duration::from_millis(100));
    assert!(pair.counters(a).rcvd_rnr_err > 100);
    assert_eq!(pair.states(), ["RTS", "RTS"]);
    pair.post_receive(100, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
}

#[test]
fn rnr_retries_are_limited_and_reset_by_progress() {
    let mut pair = Setup::default().connection(|c| c.rnr_retry = 2).build();
    let a = pair.a;
    for id in 0..3 {
        pair.post_send(id, 0, 8);
    }
    for _ in 0..3 {
        // Two RNR NAKs of 640 µs each, then a receive: one retry is left each time.
        pair.world.run_for(Duration::from_micros(1000));
        pair.post_receive(100, 0, 8);
    }
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(0, "SUCCESS"), (1, "SUCCESS"), (2, "SUCCESS")]);
    pair.post_send(9, 0, 8);
    pair.post_send(10, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(9, "RNR_RETRY_EXC_ERR"), (10, "WR_FLUSH_ERR")]);
    assert_eq!(pair.counters(a).rnr_nak_retry_err, 1);
    assert_eq!(pair.states(), ["ERR", "RTS"]);
}

#[test]
fn only_the_last_packet_of_a_write_with_immediate_gets_an_rnr_nak() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    let data = pattern(8, 3000);
    pair.write_memory(a, 0, &data);
    let remote = b.remote(0);
    pair.post(1, Operation::Write { remote, imm_data: Some(5) }, &[a.sge(0, 3000)]);
    pair.world.run_for(Duration::from_micros(100));
    assert_eq!(pair.read_memory(b, 0, 2048), data[..2048]);
    assert_eq!(pair.read_memory(b, 2048, 952), [0; 952]);
    pair.post_receive(100, 0, 0);
    pair.run();
    insta::assert_snapshot!(pair.packets().join("\n"));
    assert_eq!(pair.read_memory(b, 0, 3000), data);
}

#[test]
fn a_lost_rnr_nak_is_an_ack_timeout() {
    let mut pair = Setup::default().recovery(Recovery::GoBackN).build();
    let a = pair.a;
    pair.drop_packets(responses(InclusiveRange::exactly(0)), 1);
    pair.post_send(1, 0, 8);
    pair.world.run_for(Duration::from_millis(1));
    pair.post_receive(100, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
    assert_eq!(pair.counters(a).local_ack_timeout_err, 1);
}

#[test]
fn every_rnr_timer_code_waits_its_time() {
    for code in 0..32 {
        let timer = RnrTimer::new(code);
        let mut pair = Setup::default().connection(|c| c.min_rnr_timer = timer).build();
        pair.post_send(1, 0, 8);
        pair.world.run_for(Duration::from_nanos(2000 + timer.nanoseconds() - 1));
        assert_eq!(pair.packets().len(), 2, "code {code}");
        pair.world.run_for(Duration::from_nanos(1));
        assert_eq!(pair.packets().len(), 3, "code {code}");
    }
}
