//! The error state flushes all work requests in order, including later ones.

use softhca_engine::{ModifyQp, QpState, QpType, Reason};
use softhca_tests::pair::{Pair, PairEnd, Setup};
use softhca_types::{Operation, ReceiveWorkRequest, RemoteAddress};
use softhca_wire::RemoteKey;

fn stop(pair: &mut Pair, end: PairEnd) {
    pair.on(end).modify_queue_pair(end.qp, ModifyQp::default().state(QpState::Error)).unwrap();
}

#[test]
fn sent_and_queued_requests_are_flushed_in_order() {
    let mut pair = Setup::default().one_gigabit().connection(|c| c.max_rd_atomic = 1).build();
    let (a, b) = (pair.a, pair.b);
    pair.post_write(0, 0, 0, 10_000);
    pair.post_read(1, 0, 0, 10_000);
    pair.post_read(2, 0, 0, 10_000);
    pair.post(3, Operation::LocalInvalidate { rkey: RemoteKey(1) }, &[]);
    for id in 4..40 {
        pair.post(id, Operation::FetchAdd { remote: b.remote(0), add: 1 }, &[a.sge(0, 8)]);
    }
    stop(&mut pair, a);
    let expected: Vec<_> = (0..40).map(|id| (id, "WR_FLUSH_ERR")).collect();
    assert_eq!(pair.completion_statuses(a), expected);
    pair.world.run();
}

#[test]
fn the_failed_request_completes_before_the_flushed_ones() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    let nowhere = RemoteAddress { address: 0, rkey: RemoteKey(0x5555_5555) };
    pair.post_write(0, 0, 0, 3000);
    pair.post_read(1, 0, 0, 3000);
    pair.post(2, Operation::Write { remote: nowhere, imm_data: None }, &[a.sge(0, 8)]);
    pair.post_read(3, 0, 0, 8);
    pair.post_write(4, 0, 0, 8);
    pair.run();
    let expected =
        [(0, "SUCCESS"), (1, "SUCCESS"), (2, "REM_ACCESS_ERR"), (3, "WR_FLUSH_ERR"), (4, "WR_FLUSH_ERR")];
    assert_eq!(pair.completion_statuses(a), expected);
    assert_eq!(pair.completion_reason(a, 3), Reason::Flushed);
    assert_eq!(pair.state(b).name(), "ERR");
}

#[test]
fn a_local_error_completes_after_earlier_requests() {
    let mut pair = Pair::new();
    let a = pair.a;
    pair.post_write(0, 0, 0, 3000);
    pair.post_read(1, 0, 0, 3000);
    let outside = [a.sge(1 << 20, 8)];
    pair.post(2, Operation::Send(softhca_types::SendImmOrInvalidate::None), &outside);
    pair.post_write(3, 0, 0, 8);
    pair.run();
    let expected = [(0, "SUCCESS"), (1, "SUCCESS"), (2, "LOC_PROT_ERR"), (3, "WR_FLUSH_ERR")];
    assert_eq!(pair.completion_statuses(a), expected);
    assert_eq!(pair.packets().iter().filter(|packet| packet.starts_with("->")).count(), 4);
}

#[test]
fn receives_are_flushed_in_order_starting_with_the_one_in_use() {
    let mut pair = Setup::default().one_gigabit().build();
    let b = pair.b;
    for id in 100..105 {
        pair.post_receive(id, 0, 100_000);
    }
    pair.post_send(1, 0, 100_000);
    pair.world.run_for(std::time::Duration::from_micros(100));
    stop(&mut pair, b);
    let expected: Vec<_> = (100..105).map(|id| (id, "WR_FLUSH_ERR")).collect();
    assert_eq!(pair.completion_statuses(b), expected);
}

#[test]
fn requests_posted_in_the_error_state_are_flushed() {
    for kind in [QpType::Rc, QpType::Uc, QpType::Ud] {
        let mut pair = Setup::with_kind(kind).build();
        let a = pair.a;
        stop(&mut pair, a);
        for id in 0..200 {
            pair.post_send(id, 0, 8);
            let scatter = [a.sge(0, 100)];
            pair.on(a)
                .post_receive(a.qp, &ReceiveWorkRequest { wr_id: 1000 + id, sg_list: &scatter })
                .unwrap();
            assert_eq!(
                pair.completion_statuses(a),
                [(id, "WR_FLUSH_ERR"), (1000 + id, "WR_FLUSH_ERR")],
                "{kind:?}"
            );
        }
        assert_eq!(pair.counters(a).wr_flushed, 400);
        assert_eq!(pair.packets(), Vec::<String>::new());
    }
}

#[test]
fn a_queue_pair_in_error_does_not_respond() {
    let mut pair = Setup::default().one_gigabit().connection(|c| c.timeout = 0).build();
    let b = pair.b;
    pair.post_read(1, 0, 0, 100_000);
    pair.world.run_for(std::time::Duration::from_micros(50));
    stop(&mut pair, b);
    let before = pair.packets().len();
    pair.post_write(2, 0, 0, 8);
    pair.run();
    assert_eq!(pair.packets().len(), before + 1, "only the WRITE");
    assert_eq!(pair.states(), ["RTS", "ERR"]);
}

#[test]
fn pending_responses_are_sent_before_the_nak() {
    let mut pair = Setup::default().one_gigabit().build();
    let a = pair.a;
    let nowhere = RemoteAddress { address: 0, rkey: RemoteKey(0x5555_5555) };
    pair.post_read(1, 0, 0, 50_000);
    pair.post(2, Operation::Write { remote: nowhere, imm_data: None }, &[a.sge(0, 8)]);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS"), (2, "REM_ACCESS_ERR")]);
}

#[test]
fn an_error_on_one_queue_pair_does_not_affect_others() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    let options = softhca_tests::verbs::QpOptions::default();
    let qa = pair.on(a).create_queue_pair(QpType::Rc, a.domain, a.cq, options).unwrap();
    let qb = pair.on(b).create_queue_pair(QpType::Rc, b.domain, b.cq, options).unwrap();
    pair.world.connect((a.host, qa), (b.host, qb), &softhca_tests::verbs::ConnectOptions::default()).unwrap();
    stop(&mut pair, a);
    let gather = [a.sge(0, 8)];
    let write = Operation::Write { remote: b.remote(0), imm_data: None };
    pair.on(a).post_send(qa, &softhca_types::SendWorkRequest::new(5, write, &gather)).unwrap();
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(5, "SUCCESS")]);
}
