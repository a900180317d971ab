//! The ladder of every operation, and of everything that can go wrong with one.

use softhca_engine::{QpKind, Recovery};
use softhca_fabric::{
    Action, Class, Classes, Direction, Endpoint, Flow, Repeat, Role, RuleId, Selector, Span,
};
use softhca_queue::{Datagram, Operation, Receive, SendFlags, SendRequest, SendTrailer};
use softhca_tests::pair::{Pair, Setup};
use softhca_trace::{Cast, Ladders, Paint, Style};
use softhca_wire::{Mtu, Psn, QueueKey, RnrTimer};
use std::cell::RefCell;
use std::rc::Rc;

const NARROW: Style = Style { width: 72, paint: Paint::None };
const WIDE: Style = Style { width: 100, paint: Paint::None };

/// A pair whose PSNs do not start at zero, so that only relative ones can be read.
fn setup() -> Setup {
    let mut setup = Setup::default();
    setup.connection.psns = [Psn::new(0xff_fffe), Psn::new(5000)];
    setup
}

/// What happens to the pair from now on.
fn watch(pair: &mut Pair) -> Rc<RefCell<Ladders>> {
    let mut cast = Cast::of(&pair.world);
    cast.name_rule(RuleId(1), "lose one");
    let ladders = Rc::new(RefCell::new(Ladders::new(cast)));
    pair.world.observe(ladders.clone());
    ladders
}

fn drawn(ladders: &RefCell<Ladders>, style: Style) -> String {
    let ladders = ladders.borrow_mut().ladders();
    ladders.iter().map(|ladder| ladder.draw(style)).collect::<Vec<_>>().join("\n")
}

fn drop_packet(pair: &mut Pair, direction: Direction, psn: u64) {
    let selector =
        Selector { direction: Some(direction), psn: Some(Span::exactly(psn)), ..Selector::default() };
    pair.rule(selector, Repeat::times(1), Action::Drop);
}

#[test]
fn a_write_is_four_packets_and_one_acknowledgement() {
    let mut pair = setup().build();
    let ladders = watch(&mut pair);
    pair.post_write(7, 0, 0, 4000);
    pair.run();
    insta::assert_snapshot!(drawn(&ladders, WIDE));
    insta::assert_snapshot!("a_write_in_a_narrow_window", drawn(&ladders, NARROW));
}

#[test]
fn sends_with_and_without_immediate_land_in_receives() {
    let mut pair = setup().build();
    let ladders = watch(&mut pair);
    pair.post_receive(1, 0, 4096);
    pair.post_receive(2, 0, 4096);
    pair.post_send(7, 0, 1500);
    let gather = [pair.a.sge(0, 5)];
    pair.post(8, Operation::Send(SendTrailer::Immediate(0xcafe)), &gather);
    pair.run();
    insta::assert_snapshot!(drawn(&ladders, WIDE));
}

#[test]
fn an_unsignalled_request_ends_without_a_completion() {
    let mut pair = setup().build();
    let ladders = watch(&mut pair);
    let gather = [pair.a.sge(0, 8)];
    let remote = pair.b.remote(0);
    let mut request = SendRequest::new(1, Operation::Write { remote, immediate: None }, &gather);
    request.flags = SendFlags::empty();
    let (host, qp) = (pair.a.host, pair.a.qp);
    pair.world.on(host).post_send(qp, &request).unwrap();
    pair.run();
    insta::assert_snapshot!(drawn(&ladders, WIDE));
}

#[test]
fn a_read_is_asked_for_and_brought() {
    let mut pair = setup().build();
    let ladders = watch(&mut pair);
    pair.post_read(7, 0, 0, 2500);
    pair.run();
    insta::assert_snapshot!(drawn(&ladders, WIDE));
}

#[test]
fn atomics_bring_the_old_value() {
    let mut pair = setup().build();
    let (a, b) = (pair.a, pair.b);
    pair.fill(b, 0, &5u64.to_le_bytes());
    let ladders = watch(&mut pair);
    pair.post(1, Operation::FetchAdd { remote: b.remote(0), add: 3 }, &[a.sge(0, 8)]);
    pair.post(2, Operation::CompareSwap { remote: b.remote(0), compare: 8, swap: 1 }, &[a.sge(8, 8)]);
    pair.run();
    insta::assert_snapshot!(drawn(&ladders, WIDE));
}

#[test]
fn many_packets_alike_are_one_arrow() {
    let mut pair = setup().mtu(Mtu::B256).build();
    let ladders = watch(&mut pair);
    pair.post_write(7, 0, 0, 10_000);
    pair.run();
    insta::assert_snapshot!(drawn(&ladders, WIDE));
}

#[test]
fn a_lost_packet_is_fatal() {
    let mut pair = setup().build();
    let ladders = watch(&mut pair);
    drop_packet(&mut pair, Direction::Forward, 1);
    pair.post_write(7, 0, 0, 4000);
    pair.post_write(8, 0, 0, 10);
    pair.run();
    insta::assert_snapshot!(drawn(&ladders, WIDE));
    insta::assert_snapshot!("a_lost_packet_is_fatal_in_a_narrow_window", drawn(&ladders, NARROW));
}

#[test]
fn a_lost_packet_is_sent_again_by_go_back_n() {
    let mut pair = setup().recovery(Recovery::GoBackN).build();
    let ladders = watch(&mut pair);
    drop_packet(&mut pair, Direction::Forward, 1);
    pair.post_write(7, 0, 0, 4000);
    pair.run();
    insta::assert_snapshot!(drawn(&ladders, WIDE));
}

#[test]
fn a_lost_acknowledgement_is_found_by_the_timer() {
    let mut pair = setup().recovery(Recovery::GoBackN).build();
    let ladders = watch(&mut pair);
    let selector = Selector { classes: Some(Classes::Only(Class::Ack)), ..Selector::default() };
    pair.rule(selector, Repeat::times(1), Action::Drop);
    pair.post_write(7, 0, 0, 100);
    pair.run();
    insta::assert_snapshot!(drawn(&ladders, WIDE));
}

#[test]
fn a_receiver_that_is_not_ready_is_tried_again() {
    let mut setup = setup();
    setup.connection.rnr_retry = 1;
    setup.connection.min_rnr_timer = RnrTimer::new(12);
    let mut pair = setup.build();
    let ladders = watch(&mut pair);
    pair.post_send(7, 0, 100);
    pair.run();
    insta::assert_snapshot!(drawn(&ladders, WIDE));
}

#[test]
fn a_request_that_is_refused_names_the_reason() {
    let mut pair = setup().build();
    let ladders = watch(&mut pair);
    pair.post_write(7, 0, (1 << 20) - 10, 100);
    pair.run();
    insta::assert_snapshot!(drawn(&ladders, WIDE));
}

#[test]
fn datagrams_are_not_answered() {
    let mut pair = Setup::default().build();
    let hosts = [pair.a, pair.b];
    let key = QueueKey(0x1234);
    let qps = hosts.map(|end| {
        let mut verbs = pair.world.on(end.host);
        let options = Setup::default().options;
        let qp = verbs.create_queue_pair(QpKind::Ud, end.domain, end.cq, options).unwrap();
        verbs.start_datagrams(qp, key, Psn::new(77)).unwrap();
        qp
    });
    let to = pair.world.host(pair.b.host).address();
    let vector = softhca_engine::AddressVector::to(to.into());
    let handle = pair.world.on(pair.a.host).create_address_handle(pair.a.domain, vector).unwrap();
    for (role, end, qpn) in [(3, pair.a, qps[0]), (4, pair.b, qps[1])] {
        let requester = Endpoint { address: pair.world.host(end.host).address(), qpn };
        let flow = Flow { role: Role(role), requester, responder: None, first_psn: Psn::new(77) };
        pair.world.flows_mut().insert(flow);
    }
    let ladders = watch(&mut pair);
    let scatter = [pair.b.sge(0, 200)];
    pair.world.on(pair.b.host).post_receive(qps[1], &Receive { id: 1, scatter: &scatter }).unwrap();
    for id in [1, 2] {
        let gather = [pair.a.sge(0, 100)];
        let mut request = SendRequest::new(id, Operation::Send(SendTrailer::None), &gather);
        request.datagram = Datagram { address_handle: handle.0, queue_pair: qps[1], queue_key: key };
        pair.world.on(pair.a.host).post_send(qps[0], &request).unwrap();
    }
    pair.run();
    insta::assert_snapshot!(drawn(&ladders, WIDE));
}
