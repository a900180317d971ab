//! The ack timer.

use softhca_engine::{Recovery, Settings};
use softhca_fabric::InclusiveRange;
use softhca_tests::pair::{Setup, requests, responses};
use std::time::Duration;

fn silent_peer(recovery: Recovery, timeout: u8, retry_count: u8) -> Setup {
    Setup::default().recovery(recovery).connection(|c| (c.timeout, c.retry_count) = (timeout, retry_count))
}

#[test]
fn every_timeout_takes_its_time_for_each_try() {
    for timeout in 1..32 {
        let mut pair = silent_peer(Recovery::GoBackN, timeout, 1).build();
        let a = pair.a;
        pair.drop_packets(requests(InclusiveRange::at_least(0)), u64::MAX);
        pair.post_write(1, 0, 0, 8);
        pair.run();
        assert_eq!(pair.completion_statuses(a), [(1, "retry-exceeded")]);
        assert_eq!(pair.world.now().nanos(), (4096 << timeout) * 2, "timeout {timeout}");
        assert_eq!(pair.packets().len(), 2);
    }
}

#[test]
fn a_timeout_of_zero_waits_for_ever() {
    for recovery in [Recovery::Fatal, Recovery::GoBackN] {
        let mut pair = silent_peer(recovery, 0, 7).build();
        let a = pair.a;
        pair.drop_packets(requests(InclusiveRange::at_least(0)), u64::MAX);
        pair.post_write(1, 0, 0, 8);
        pair.run();
        assert_eq!(pair.completion_statuses(a), []);
        assert_eq!(pair.states(), ["RTS", "RTS"]);
    }
}

#[test]
fn the_timer_starts_again_with_each_acknowledgement() {
    let mut pair = silent_peer(Recovery::Fatal, 1, 0).build();
    let a = pair.a;
    // 8.192 µs of patience, an answer every 5 µs.
    for id in 0..10 {
        pair.post_write(id, 0, 0, 8);
        pair.world.run_for(Duration::from_micros(5));
    }
    pair.run();
    assert!(pair.completion_statuses(a).iter().all(|(_, status)| *status == "success"));
}

#[test]
fn the_timer_stops_when_everything_is_acknowledged() {
    let mut pair = silent_peer(Recovery::Fatal, 1, 0).build();
    let a = pair.a;
    pair.post_write(1, 0, 0, 8);
    pair.world.run_for(Duration::from_secs(1));
    pair.post_write(2, 0, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "success"), (2, "success")]);
}

#[test]
fn the_least_timeout_of_the_device_holds_in_fatal_recovery() {
    let least_ack_timeout = Duration::from_millis(500);
    let mut setup = silent_peer(Recovery::Fatal, 1, 0);
    setup.settings = Settings { min_ack_timeout: least_ack_timeout, ..setup.settings };
    let mut pair = setup.build();
    pair.drop_packets(requests(InclusiveRange::exactly(0)), 1);
    pair.post_write(1, 0, 0, 8);
    pair.run();
    assert_eq!(pair.world.now().nanos(), 500_000_000);
}

#[test]
fn a_late_answer_after_a_timeout_is_taken() {
    let mut pair = silent_peer(Recovery::GoBackN, 1, 7).build();
    let a = pair.a;
    let late = softhca_fabric::Action::Delay { ns: 10_000 };
    pair.add_rule(responses(InclusiveRange::exactly(0)), softhca_fabric::Repeat::times(1), late);
    pair.post_write(1, 0, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "success")]);
    assert_eq!(pair.counters(a).local_ack_timeout_err, 1);
}
