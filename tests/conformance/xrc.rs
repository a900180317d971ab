//! XRC: each request carries the SRQ number of the receiver.

use softhca_engine::{
    ClientId, Context, DeviceLimits, Hca, Instant, MemoryObjects, QpInitAttributes, QpRings, QpType,
    Settings, SrqInitAttributes,
};
use softhca_queue::{DoorbellConsumer, DoorbellProducer, SharedWords};
use softhca_tests::pair::{Pair, Setup, pattern};
use softhca_types::{Operation, ReceiveWorkRequest, SendImmOrInvalidate};
use softhca_wire::Gid;
use std::net::IpAddr;

fn xrc() -> Pair {
    Setup::with_kind(QpType::XrcInitiator).build()
}

#[test]
fn every_operation_works() {
    let mut pair = xrc();
    let (a, b) = (pair.a, pair.b);
    let data = pattern(1, 3000);
    pair.write_memory(a, 0, &data);
    pair.write_memory(b, 50_000, &data);
    pair.post_receive(100, 0, 3000);
    pair.post_receive(101, 0, 0);
    pair.post_send(1, 0, 3000);
    pair.post_write(2, 0, 10_000, 3000);
    pair.post_read(3, 50_000, 50_000, 3000);
    pair.post(4, Operation::FetchAdd { remote: b.remote(60_000), add: 3 }, &[a.sge(60_000, 8)]);
    pair.post(
        5,
        Operation::CompareSwap { remote: b.remote(60_000), compare: 3, swap: 9 },
        &[a.sge(60_008, 8)],
    );
    pair.post(6, Operation::Write { remote: b.remote(20_000), imm_data: Some(8) }, &[a.sge(0, 2000)]);
    pair.run();
    let done: Vec<_> = (1..=6).map(|id| (id, "SUCCESS")).collect();
    assert_eq!(pair.completion_statuses(a), done);
    assert_eq!(pair.completion_statuses(b), [(100, "SUCCESS"), (101, "SUCCESS")]);
    for (end, place) in [(b, 0), (b, 10_000), (a, 50_000)] {
        assert_eq!(pair.read_memory(end, place, 3000), data);
    }
    assert_eq!(pair.read_memory(b, 60_000, 8), 9u64.to_ne_bytes());
}

#[test]
fn one_connection_serves_several_srqs() {
    let mut pair = xrc();
    let (a, b) = (pair.a, pair.b);
    let attributes = pair.on(b).create_completion_queue(8).unwrap();
    let domain = softhca_engine::XrcdId(1);
    let init = SrqInitAttributes { pd: b.domain, srq_limit: 0, xrc: Some((attributes, domain)) };
    let other = pair.on(b).create_shared_receive_queue(init, 8, 1).unwrap();
    let scatter = [b.sge(5000, 100)];
    pair.on(b).post_srq_receive(other, &ReceiveWorkRequest { wr_id: 200, sg_list: &scatter }).unwrap();
    pair.post_receive(100, 0, 100);
    pair.post_send(1, 0, 10);
    let gather = [a.sge(0, 20)];
    pair.post_with(2, Operation::Send(SendImmOrInvalidate::None), &gather, |r| r.remote_srqn = other.0);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS"), (2, "SUCCESS")]);
    assert_eq!(pair.completions(b).iter().map(|c| (c.wr_id, c.byte_len)).collect::<Vec<_>>(), [(100, 10)]);
    let second = pair.on(b).poll_all(attributes);
    assert_eq!(second.iter().map(|c| (c.wr_id, c.byte_len)).collect::<Vec<_>>(), [(200, 20)]);
}

#[test]
fn an_srq_of_another_xrc_domain_is_rejected() {
    let mut pair = xrc();
    let (a, b) = (pair.a, pair.b);
    let foreign = pair.on(b).open_xrc_domain().unwrap();
    let init = SrqInitAttributes { pd: b.domain, srq_limit: 0, xrc: Some((b.cq, foreign)) };
    let other = pair.on(b).create_shared_receive_queue(init, 8, 1).unwrap();
    let gather = [a.sge(0, 20)];
    pair.post_with(1, Operation::Send(SendImmOrInvalidate::None), &gather, |r| r.remote_srqn = other.0);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "REM_INV_REQ_ERR")]);
    assert_eq!(pair.states(), ["ERR", "ERR"]);
}

#[test]
fn an_error_does_not_affect_the_srq() {
    let mut pair = xrc();
    let (a, b) = (pair.a, pair.b);
    pair.post_receive(100, 0, 10);
    pair.post_receive(101, 0, 10);
    pair.post_send(1, 0, 11);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "REM_INV_REQ_ERR")]);
    assert_eq!(pair.completion_statuses(b), [(100, "LOC_LEN_ERR")]);
    assert_eq!(pair.async_events(b), Vec::<&str>::new());
}

#[test]
fn an_xrc_domain_is_freed_with_its_last_user() {
    let mut hca = Hca::new(Settings::default(), vec![Gid::from(IpAddr::from([10, 0, 0, 1]))]);
    let mut store = MemoryObjects::default();
    let mut ctx = Context { now: Instant::ZERO, memory: &mut store, events: &mut |_, _| {} };
    let user = open_client(&mut hca);
    // More iterations than the maximum number of domains: none leaks.
    for round in 0..2 * DeviceLimits::HCA.max_xrcd {
        let owner = open_client(&mut hca);
        let domain = hca.open_xrc_domain(owner).unwrap_or_else(|error| panic!("round {round}: {error}"));
        let init = QpInitAttributes {
            qp_type: QpType::XrcTarget,
            pd: None,
            send_cq: None,
            recv_cq: None,
            srq: None,
            xrcd: Some(domain),
            sq_sig_all: false,
        };
        let target = hca.create_queue_pair(user, init, QpRings::default()).unwrap();
        hca.close_client(&mut ctx, owner);
        hca.destroy_queue_pair(&mut ctx, user, target).unwrap();
    }
}

fn open_client(hca: &mut Hca) -> ClientId {
    let doorbell = SharedWords::heap(DoorbellProducer::words(8));
    hca.open_client(DoorbellConsumer::new(doorbell, 8)).unwrap()
}
