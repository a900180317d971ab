//! Completion queues: overflow, resize, notification.

use softhca_engine::{Event, QpType, VerbsError};
use softhca_tests::pair::{Pair, PairEnd, Setup};
use softhca_tests::verbs::{ConnectOptions, QpOptions};
use softhca_types::{CqNotify, Operation, SendFlags, SendImmOrInvalidate, SendWorkRequest};

fn notifications(pair: &Pair, end: PairEnd) -> usize {
    let record = pair.recording.borrow();
    let here = record.events.iter().filter(|(_, host, _)| *host == end.host);
    here.filter(|(.., event)| matches!(event, Event::CompletionNotified { .. })).count()
}

#[test]
fn cq_overflow_stops_all_its_queue_pairs_and_no_others() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    let other_cq = pair.on(a).create_completion_queue(8).unwrap();
    let mut others = Vec::new();
    for cq in [a.cq, other_cq] {
        let qa = pair.on(a).create_queue_pair(QpType::Rc, a.domain, cq, QpOptions::default()).unwrap();
        let qb = pair.on(b).create_queue_pair(QpType::Rc, b.domain, b.cq, QpOptions::default()).unwrap();
        pair.world.connect((a.host, qa), (b.host, qb), &ConnectOptions::default()).unwrap();
        others.push(qa);
    }
    pair.on(a).resize_completion_queue(a.cq, 2).unwrap();
    for id in 0..3 {
        pair.post_write(id, 0, 0, 8);
    }
    pair.run();
    assert_eq!(pair.async_events(a), ["CQ_ERR", "QP_FATAL", "QP_FATAL"]);
    assert_eq!(pair.state(a).name(), "ERR");
    let states: Vec<_> =
        others.iter().map(|qp| pair.on(a).query_queue_pair(*qp).unwrap().state.name()).collect();
    assert_eq!(states, ["ERR", "RTS"]);
    assert_eq!(
        pair.completion_statuses(a),
        [(0, "SUCCESS"), (1, "SUCCESS")],
        "what fitted can still be polled"
    );
    assert_eq!(pair.counters(a).cq_overflow, 1);
}

#[test]
fn a_cq_that_is_polled_in_time_does_not_overflow() {
    let mut pair = Pair::new();
    let a = pair.a;
    pair.on(a).resize_completion_queue(a.cq, 2).unwrap();
    for id in 0..50 {
        pair.post_write(id, 0, 0, 8);
        pair.run();
        assert_eq!(pair.completion_statuses(a), [(id, "SUCCESS")]);
    }
}

#[test]
fn resize_keeps_completions_and_the_armed_notification() {
    let mut pair = Pair::new();
    let a = pair.a;
    for id in 0..3 {
        pair.post_write(id, 0, 0, 8);
    }
    pair.run();
    assert!(matches!(pair.on(a).resize_completion_queue(a.cq, 2), Err(VerbsError::Invalid { .. })));
    pair.on(a).request_notification(a.cq, CqNotify::NextCompletion);
    pair.on(a).resize_completion_queue(a.cq, 4).unwrap();
    pair.post_write(3, 0, 0, 8);
    pair.run();
    assert_eq!(notifications(&pair, a), 1);
    assert_eq!(pair.completion_statuses(a).iter().map(|(id, _)| *id).collect::<Vec<_>>(), [0, 1, 2, 3]);
    let rejected = pair.on(a).resize_completion_queue(a.cq, softhca_engine::DeviceLimits::HCA.max_cqe + 1);
    assert!(matches!(rejected, Err(VerbsError::LimitExceeded { .. })));
}

#[test]
fn a_notification_request_notifies_once() {
    let mut pair = Pair::new();
    let a = pair.a;
    pair.on(a).request_notification(a.cq, CqNotify::NextCompletion);
    for id in 0..3 {
        pair.post_write(id, 0, 0, 8);
    }
    pair.run();
    assert_eq!(notifications(&pair, a), 1);
}

#[test]
fn solicited_notification_ignores_unsolicited_successes() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    for id in 100..103 {
        pair.post_receive(id, 0, 8);
    }
    pair.on(b).request_notification(b.cq, CqNotify::SolicitedOnly);
    let gather = [a.sge(0, 8)];
    pair.post(1, Operation::Send(SendImmOrInvalidate::None), &gather);
    pair.run();
    assert_eq!(notifications(&pair, b), 0);
    let solicited = |request: &mut SendWorkRequest<'_>| request.flags |= SendFlags::SOLICITED;
    pair.post_with(2, Operation::Send(SendImmOrInvalidate::None), &gather, solicited);
    pair.run();
    assert_eq!(notifications(&pair, b), 1);
    pair.on(b).request_notification(b.cq, CqNotify::SolicitedOnly);
    let gather = [a.sge(0, 9)];
    pair.post(3, Operation::Send(SendImmOrInvalidate::None), &gather);
    pair.run();
    assert_eq!(notifications(&pair, b), 2, "the receive was too small");
}

#[test]
fn a_solicited_write_notifies_only_with_immediate_data() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    pair.post_receive(100, 0, 8);
    pair.on(b).request_notification(b.cq, CqNotify::SolicitedOnly);
    let solicited = |request: &mut SendWorkRequest<'_>| request.flags |= SendFlags::SOLICITED;
    let (remote, gather) = (b.remote(0), [a.sge(0, 2000)]);
    pair.post_with(1, Operation::Write { remote, imm_data: None }, &gather, solicited);
    pair.post_with(2, Operation::Write { remote, imm_data: Some(1) }, &gather, solicited);
    pair.run();
    assert_eq!(notifications(&pair, b), 1);
    let record = pair.recording.borrow();
    let marked = record
        .sent
        .iter()
        .filter(|(_, frame)| softhca_wire::Bth::parse(&frame.bytes).unwrap().solicited_event);
    assert_eq!(marked.count(), 1, "the last packet of the second message");
}

#[test]
fn an_unsignaled_request_completes_only_on_failure() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    let quiet = |request: &mut SendWorkRequest<'_>| request.flags -= SendFlags::SIGNALED;
    let gather = [a.sge(0, 8)];
    pair.post_with(1, Operation::Write { remote: b.remote(0), imm_data: None }, &gather, quiet);
    pair.post_write(2, 0, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(2, "SUCCESS")]);
    let outside = b.remote(1 << 20);
    pair.post_with(3, Operation::Write { remote: outside, imm_data: None }, &gather, quiet);
    pair.post_with(4, Operation::Write { remote: b.remote(0), imm_data: None }, &gather, quiet);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(3, "REM_ACCESS_ERR"), (4, "WR_FLUSH_ERR")]);
}

#[test]
fn sq_sig_all_signals_every_request() {
    let mut setup = Setup::default();
    setup.options.sq_sig_all = true;
    let mut pair = setup.build();
    let (a, b) = (pair.a, pair.b);
    let quiet = |request: &mut SendWorkRequest<'_>| request.flags -= SendFlags::SIGNALED;
    pair.post_with(1, Operation::Write { remote: b.remote(0), imm_data: None }, &[a.sge(0, 8)], quiet);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
}

#[test]
fn a_cq_in_use_cannot_be_destroyed() {
    let mut pair = Pair::new();
    let a = pair.a;
    assert!(matches!(pair.on(a).destroy_completion_queue(a.cq), Err(VerbsError::Busy { .. })));
    pair.on(a).destroy_queue_pair(a.qp).unwrap();
    pair.on(a).destroy_completion_queue(a.cq).unwrap();
}

#[test]
fn send_cq_and_recv_cq_may_differ() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    let [sends, receives] = [0; 2].map(|_| pair.on(b).create_completion_queue(8).unwrap());
    let options = QpOptions::default();
    let qb =
        pair.on(b).create_queue_pair_with(QpType::Rc, b.domain, [sends, receives], options, None).unwrap();
    let qa = pair.on(a).create_queue_pair(QpType::Rc, a.domain, a.cq, options).unwrap();
    pair.world.connect((a.host, qa), (b.host, qb), &ConnectOptions::default()).unwrap();
    let scatter = [b.sge(0, 8)];
    pair.on(b).post_receive(qb, &softhca_types::ReceiveWorkRequest { wr_id: 7, sg_list: &scatter }).unwrap();
    let gather = [a.sge(0, 8)];
    let send = |id| SendWorkRequest::new(id, Operation::Send(SendImmOrInvalidate::None), &gather);
    pair.on(a).post_send(qa, &send(1)).unwrap();
    let back = [b.sge(0, 8)];
    let write = Operation::Write { remote: a.remote(0), imm_data: None };
    pair.on(b).post_send(qb, &SendWorkRequest::new(8, write, &back)).unwrap();
    pair.run();
    let ids = |pair: &mut Pair, cq| pair.on(b).poll_all(cq).iter().map(|c| c.wr_id).collect::<Vec<_>>();
    assert_eq!((ids(&mut pair, sends), ids(&mut pair, receives)), (vec![8], vec![7]));
}
