//! SQD: what was begun is finished, what was not waits. SQE: see the datagrams and UC.

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
fn the_message_that_was_begun_is_finished_and_the_next_waits() {
    let mut pair = Setup::default().one_gigabit().build();
    let a = pair.a;
    pair.post_write(1, 0, 0, 50_000);
    pair.post_write(2, 0, 0, 50_000);
    pair.world.run_for(Duration::from_micros(100));
    drain(&mut pair, a);
    assert!(pair.on(a).query_queue_pair(a.qp).unwrap().sq_draining);
    assert_eq!(pair.async_events(a), Vec::<&str>::new());
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "success")]);
    assert_eq!(pair.async_events(a), ["SQ_DRAINED"]);
    assert!(!pair.on(a).query_queue_pair(a.qp).unwrap().sq_draining);
    pair.post_write(3, 0, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), []);
    resume(&mut pair, a);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(2, "success"), (3, "success")]);
}

#[test]
fn a_read_that_was_asked_for_is_waited_for() {
    let mut pair = Setup::default().one_gigabit().build();
    let a = pair.a;
    pair.post_read(1, 0, 0, 50_000);
    pair.world.run_for(Duration::from_micros(100));
    drain(&mut pair, a);
    assert_eq!(pair.async_events(a), Vec::<&str>::new());
    pair.run();
    assert_eq!(
        (pair.completion_statuses(a), pair.async_events(a)),
        (vec![(1, "success")], vec!["SQ_DRAINED"])
    );
}

#[test]
fn an_idle_queue_is_drained_at_once_and_the_event_comes_once() {
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
fn no_event_is_raised_for_who_did_not_ask() {
    let mut pair = Pair::new();
    let a = pair.a;
    pair.on(a).modify_queue_pair(a.qp, ModifyQp::default().state(QpState::SendQueueDrained)).unwrap();
    assert_eq!(pair.async_events(a), Vec::<&str>::new());
}

#[test]
fn a_drained_queue_pair_still_receives_and_answers() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    drain(&mut pair, b);
    pair.post_receive(100, 0, 8);
    pair.post_send(1, 0, 8);
    pair.post_read(2, 0, 0, 3000);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "success"), (2, "success")]);
    assert_eq!(pair.completion_statuses(b), [(100, "success")]);
}

#[test]
fn attributes_change_while_drained() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    drain(&mut pair, a);
    pair.on(a).modify_queue_pair(a.qp, ModifyQp::default().timeout(1).retry_count(0)).unwrap();
    resume(&mut pair, a);
    pair.on(b).modify_queue_pair(b.qp, ModifyQp::default().state(QpState::Reset)).unwrap();
    pair.post_write(1, 0, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "retry-exceeded")]);
    assert_eq!(pair.world.now().nanos(), 8192);
}

#[test]
fn a_receiver_that_is_not_ready_delays_the_drain() {
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
