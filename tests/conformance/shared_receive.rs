//! Shared receive queues.

use softhca_engine::{ModifyQp, QpState, QpType, VerbsError};
use softhca_tests::pair::{Pair, Setup};
use softhca_tests::verbs::{ConnectOptions, QpOptions};
use softhca_types::{Operation, SendImmOrInvalidate, SendWorkRequest};
use softhca_wire::Qpn;

fn shared() -> Pair {
    Setup::default().with_shared_receive_queue().build()
}

/// Another connection from the first host to the second's SRQ.
fn second_queue_pair(pair: &mut Pair) -> (Qpn, Qpn) {
    let (a, b) = (pair.a, pair.b);
    let options = QpOptions { shared_receive_queue: b.srq, ..QpOptions::default() };
    let qa = pair.on(a).create_queue_pair(QpType::Rc, a.domain, a.cq, QpOptions::default()).unwrap();
    let qb = pair.on(b).create_queue_pair(QpType::Rc, b.domain, b.cq, options).unwrap();
    pair.world.connect((a.host, qa), (b.host, qb), &ConnectOptions::default()).unwrap();
    (qa, qb)
}

#[test]
fn queue_pairs_consume_receives_in_order_of_arrival() {
    let mut pair = shared();
    let (a, b) = (pair.a, pair.b);
    let (qa, qb) = second_queue_pair(&mut pair);
    for id in 100..104 {
        pair.post_receive(id, 0, 100);
    }
    for id in 0..4 {
        let gather = [a.sge(0, 8)];
        let request = SendWorkRequest::new(id, Operation::Send(SendImmOrInvalidate::None), &gather);
        let qp = if id % 2 == 0 { a.qp } else { qa };
        pair.on(a).post_send(qp, &request).unwrap();
        pair.run();
    }
    let received: Vec<_> = pair.completions(b).iter().map(|c| (c.wr_id, c.qpn)).collect();
    assert_eq!(received, [(100, b.qp), (101, qb), (102, b.qp), (103, qb)]);
}

#[test]
fn an_empty_srq_causes_rnr_naks() {
    let mut pair = shared();
    let a = pair.a;
    pair.post_send(1, 0, 8);
    pair.world.run_for(std::time::Duration::from_micros(100));
    assert_eq!(pair.counters(a).rcvd_rnr_err, 1);
    pair.post_receive(100, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
}

#[test]
fn srq_limit_reached_is_raised_once_below_the_limit() {
    let mut pair = shared();
    let b = pair.b;
    for id in 100..105 {
        pair.post_receive(id, 0, 100);
    }
    pair.on(b).set_srq_limit(b.srq.unwrap(), 3).unwrap();
    pair.post_send(1, 0, 8);
    pair.post_send(2, 0, 8);
    pair.run();
    assert_eq!(pair.async_events(b), Vec::<&str>::new(), "three are posted, which is not below the limit");
    pair.post_send(3, 0, 8);
    pair.post_send(4, 0, 8);
    pair.run();
    assert_eq!(pair.async_events(b), ["SRQ_LIMIT_REACHED"]);
    pair.on(b).set_srq_limit(b.srq.unwrap(), 2).unwrap();
    assert_eq!(pair.async_events(b), ["SRQ_LIMIT_REACHED"; 2], "one is posted, which is below the new limit");
}

#[test]
fn a_resized_srq_keeps_its_receives() {
    let mut pair = shared();
    let (a, b) = (pair.a, pair.b);
    let srq = b.srq.unwrap();
    // The three receives that stay are in the last two slots and the first.
    for id in 0..62 {
        pair.post_receive(id, 0, 100);
        pair.post_send(id, 0, 8);
        pair.run();
    }
    for id in 100..103 {
        pair.post_receive(id, 0, 100);
    }
    pair.on(b).set_srq_limit(srq, 2).unwrap();
    for (size, what) in [(2, "three receives wait"), (0, "a queue has room")] {
        assert!(pair.on(b).resize_shared_receive_queue(srq, size, 32).is_err(), "{what}");
    }
    pair.on(b).resize_shared_receive_queue(srq, 4, 32).unwrap();
    pair.post_receive(103, 0, 100);
    for id in 62..66 {
        pair.post_send(id, 0, 8);
    }
    pair.run();
    assert_eq!(pair.completions(a).len(), 66);
    let received: Vec<_> = pair.completions(b).iter().map(|c| c.wr_id).collect();
    assert_eq!(received[62..], [100, 101, 102, 103]);
    assert_eq!(pair.async_events(b), ["SRQ_LIMIT_REACHED"], "the limit stays armed");
}

#[test]
fn last_wqe_reached_is_raised_and_the_srq_keeps_its_receives() {
    let mut pair = shared();
    let (a, b) = (pair.a, pair.b);
    let (qa, qb) = second_queue_pair(&mut pair);
    pair.post_receive(100, 0, 100);
    pair.post_receive(101, 0, 100);
    pair.on(b).modify_queue_pair(b.qp, ModifyQp::default().state(QpState::Error)).unwrap();
    assert_eq!(pair.async_events(b), ["QP_LAST_WQE_REACHED"]);
    assert_eq!(pair.completion_statuses(b), []);
    let gather = [a.sge(0, 8)];
    let request = SendWorkRequest::new(1, Operation::Send(SendImmOrInvalidate::None), &gather);
    pair.on(a).post_send(qa, &request).unwrap();
    pair.run();
    let received: Vec<_> = pair.completions(b).iter().map(|c| (c.wr_id, c.qpn)).collect();
    assert_eq!(received, [(100, qb)]);
    pair.on(b).modify_queue_pair(b.qp, ModifyQp::default().state(QpState::Error)).unwrap();
    assert_eq!(pair.async_events(b), ["QP_LAST_WQE_REACHED"]);
}

#[test]
fn a_receive_in_use_completes_before_last_wqe_reached() {
    let mut pair = Setup::default().with_shared_receive_queue().one_gigabit().build();
    let b = pair.b;
    pair.post_receive(100, 0, 100_000);
    pair.post_send(1, 0, 100_000);
    pair.world.run_for(std::time::Duration::from_micros(100));
    pair.on(b).modify_queue_pair(b.qp, ModifyQp::default().state(QpState::Error)).unwrap();
    assert_eq!(pair.completion_statuses(b), [(100, "WR_FLUSH_ERR")]);
    assert_eq!(pair.async_events(b), ["QP_LAST_WQE_REACHED"]);
}

#[test]
fn an_srq_in_use_cannot_be_destroyed() {
    let mut pair = shared();
    let b = pair.b;
    let result = pair.on(b).destroy_shared_receive_queue(b.srq.unwrap());
    assert!(matches!(result, Err(VerbsError::Busy { .. })), "{result:?}");
    pair.on(b).destroy_queue_pair(b.qp).unwrap();
    pair.on(b).destroy_shared_receive_queue(b.srq.unwrap()).unwrap();
}

#[test]
fn datagrams_use_an_srq() {
    let mut pair = Setup::with_kind(QpType::Ud).with_shared_receive_queue().build();
    let b = pair.b;
    pair.post_receive(100, 0, 100);
    pair.post_send(1, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(b), [(100, "SUCCESS")]);
}
