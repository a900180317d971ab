//! The ACK timer.

use softhca_engine::{Recovery, Settings};
use softhca_fabric::InclusiveRange;
use softhca_tests::pair::{Pair, Setup, requests, responses};
use std::time::Duration;

fn silent_peer(recovery: Recovery, timeout: u8, retry_count: u8) -> Setup {
    Setup::default().recovery(recovery).connection(|c| (c.timeout, c.retry_count) = (timeout, retry_count))
}

#[test]
fn every_timeout_value_waits_its_time_per_retry() {
    for timeout in 1..32 {
        let mut pair = silent_peer(Recovery::GoBackN, timeout, 1).build();
        let a = pair.a;
        pair.drop_packets(requests(InclusiveRange::at_least(0)), u64::MAX);
        pair.post_write(1, 0, 0, 8);
        pair.run();
        assert_eq!(pair.completion_statuses(a), [(1, "RETRY_EXC_ERR")]);
        assert_eq!(pair.world.now().nanos(), (4096 << timeout) * 2, "timeout {timeout}");
        assert_eq!(pair.packets().len(), 2);
    }
}

#[test]
fn a_timer_is_pending_while_a_request_waits_for_its_ack() {
    // Without an answer, and with one: a timer that was armed for an ACK that came has no effect.
    for (dropped, after) in [(u64::MAX, true), (0, false)] {
        let mut pair = silent_peer(Recovery::GoBackN, 20, 1).build();
        let a = pair.a;
        pair.drop_packets(requests(InclusiveRange::at_least(0)), dropped);
        let is_pending = |pair: &Pair| pair.world.host(a.host).hca().has_pending_timer();
        assert!(!is_pending(&pair));
        pair.post_write(1, 0, 0, 8);
        assert!(is_pending(&pair));
        pair.world.run_for(Duration::from_secs(1));
        assert_eq!(is_pending(&pair), after);
        pair.run();
        assert!(!is_pending(&pair));
    }
}

#[test]
fn a_timeout_of_0_never_expires() {
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

/// A process that was not scheduled has not read the ACKs that arrived meanwhile.
#[test]
fn an_overdue_timer_of_a_real_device_starts_again() {
    let least = Duration::from_millis(500);
    for (min_ack_timeout, expected) in [(Duration::ZERO, "ERR"), (least, "RTS")] {
        let mut setup = silent_peer(Recovery::Fatal, 1, 0);
        setup.settings.min_ack_timeout = min_ack_timeout;
        let mut pair = setup.build();
        let a = pair.a;
        pair.drop_packets(requests(InclusiveRange::at_least(0)), u64::MAX);
        pair.post_write(1, 0, 0, 8);
        let overdue = pair.world.with_hca(a.host, |hca, ctx| {
            ctx.now = hca.next_timeout().unwrap().plus(Duration::from_millis(21));
            hca.expire(ctx);
            ctx.now
        });
        assert_eq!(pair.states()[0], expected);
        if expected == "RTS" {
            pair.run();
            assert_eq!(pair.completion_statuses(a), [(1, "RETRY_EXC_ERR")]);
            assert_eq!(pair.world.now(), overdue.plus(least));
        }
    }
}

#[test]
fn each_ack_restarts_the_timer() {
    let mut pair = silent_peer(Recovery::Fatal, 1, 0).build();
    let a = pair.a;
    // An ACK timeout of 8.192 µs, and a response every 5 µs.
    for id in 0..10 {
        pair.post_write(id, 0, 0, 8);
        pair.world.run_for(Duration::from_micros(5));
    }
    pair.run();
    assert!(pair.completion_statuses(a).iter().all(|(_, status)| *status == "SUCCESS"));
}

#[test]
fn the_timer_stops_when_all_requests_are_acknowledged() {
    let mut pair = silent_peer(Recovery::Fatal, 1, 0).build();
    let a = pair.a;
    pair.post_write(1, 0, 0, 8);
    pair.world.run_for(Duration::from_secs(1));
    pair.post_write(2, 0, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS"), (2, "SUCCESS")]);
}

#[test]
fn the_minimum_timeout_of_the_device_applies_in_fatal_recovery() {
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
fn a_late_response_after_a_timeout_is_accepted() {
    let mut pair = silent_peer(Recovery::GoBackN, 1, 7).build();
    let a = pair.a;
    let late = softhca_fabric::Action::Delay { ns: 10_000 };
    pair.add_rule(responses(InclusiveRange::exactly(0)), softhca_fabric::Repeat::times(1), late);
    pair.post_write(1, 0, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
    assert_eq!(pair.counters(a).local_ack_timeout_err, 1);
}
