//! SQD: started messages finish, later ones wait. For SQE see the UD and UC tests.

use softhca_engine::{ModifyQp, QpState, QpType};
use softhca_tests::pair::{Pair, PairEnd, Setup};
use std::time::Duration;

fn drain(pair: &mut Pair, end: PairEnd) {
    let modify = ModifyQp::default().state(QpState::SendQueueDrained).sqd_async_notify(true);
    pair.on(end).modify_queue_pair(end.qp, modify).unwrap();
}

fn resume(pair: &mut Pair, end: PairEnd) {
    pair.on(end).modify_queue_pair(end.qp, ModifyQp::default().state(QpState::ReadyToSend)).unwrap();
}

#[test]
fn a_started_message_finishes_and_the_next_one_waits() {
    let mut pair = Setup::default().one_gigabit().build();
    let a = pair.a;
    pair.post_write(1, 0, 0, 50_000);
    pair.post_write(2, 0, 0, 50_000);
    pair.world.run_for(Duration::from_micros(100));
    drain(&mut pair, a);
    assert!(pair.on(a).query_queue_pair(a.qp).unwrap().sq_draining);
    assert_eq!(pair.async_events(a), Vec::<&str>::new());
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
    assert_eq!(pair.async_events(a), ["SQ_DRAINED"]);
    assert!(!pair.on(a).query_queue_pair(a.qp).unwrap().sq_draining);
    pair.post_write(3, 0, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), []);
    resume(&mut pair, a);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(2, "SUCCESS"), (3, "SUCCESS")]);
}

#[test]
fn an_outstanding_read_delays_the_drain() {
    let mut pair = Setup::default().one_gigabit().build();
    let a = pair.a;
    pair.post_read(1, 0, 0, 50_000);
    pair.world.run_for(Duration::from_micros(100));
    drain(&mut pair, a);
    assert_eq!(pair.async_events(a), Vec::<&str>::new());
    pair.run();
    assert_eq!(
        (pair.completion_statuses(a), pair.async_events(a)),
        (vec![(1, "SUCCESS")], vec!["SQ_DRAINED"])
    );
}

#[test]
fn an_idle_send_queue_drains_at_once_with_one_event() {
    for kind in [QpType::Rc, QpType::Uc, QpType::Ud, QpType::XrcInitiator] {
        let mut pair = Setup::with_kind(kind).build();
        let a = pair.a;
        drain(&mut pair, a);
        assert_eq!(pair.async_events(a), ["SQ_DRAINED"], "{kind:?}");
        pair.on(a).modify_queue_pair(a.qp, ModifyQp::default().pkey_index(0)).unwrap();
        assert_eq!(pair.async_events(a), ["SQ_DRAINED"], "{kind:?}: a change of attributes drains nothing");
        resume(&mut pair, a);
        drain(&mut pair, a);
        assert_eq!(pair.async_events(a), ["SQ_DRAINED"; 2], "{kind:?}");
    }
}

#[test]
fn sq_drained_is_raised_only_on_request() {
    let mut pair = Pair::new();
    let a = pair.a;
    pair.on(a).modify_queue_pair(a.qp, ModifyQp::default().state(QpState::SendQueueDrained)).unwrap();
    assert_eq!(pair.async_events(a), Vec::<&str>::new());
}

#[test]
fn a_drained_queue_pair_still_receives_and_responds() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    drain(&mut pair, b);
    pair.post_receive(100, 0, 8);
    pair.post_send(1, 0, 8);
    pair.post_read(2, 0, 0, 3000);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS"), (2, "SUCCESS")]);
    assert_eq!(pair.completion_statuses(b), [(100, "SUCCESS")]);
}

#[test]
fn attributes_can_change_in_sqd() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    drain(&mut pair, a);
    pair.on(a).modify_queue_pair(a.qp, ModifyQp::default().timeout(1).retry_count(0)).unwrap();
    resume(&mut pair, a);
    pair.on(b).modify_queue_pair(b.qp, ModifyQp::default().state(QpState::Reset)).unwrap();
    pair.post_write(1, 0, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "RETRY_EXC_ERR")]);
    assert_eq!(pair.world.now().nanos(), 8192);
}

#[test]
fn an_rnr_wait_delays_the_drain() {
    let mut pair = Pair::new();
    let a = pair.a;
    pair.post_send(1, 0, 8);
    pair.world.run_for(Duration::from_micros(100));
    drain(&mut pair, a);
    pair.world.run_for(Duration::from_millis(2));
    assert_eq!(pair.async_events(a), Vec::<&str>::new());
    pair.post_receive(100, 0, 8);
    pair.run();
    assert_eq!(pair.async_events(a), ["SQ_DRAINED"]);
}
