//! Ladders of every operation and of every kind of failure.

use softhca_engine::{QpType, Recovery};
use softhca_fabric::{
    Action, BitPosition, Direction, Endpoint, Flow, FlowId, IcrcPolicy, InclusiveRange, PacketClass,
    PacketClasses, Repeat, RuleId, Selector,
};
use softhca_tests::captures_folder;
use softhca_tests::pair::{Pair, Setup};
use softhca_trace::{
    CaptureReader, ColorMode, LadderBuilder, LadderStyle, NameTable, Packet, PacketContents, Step,
    StepContent,
};
use softhca_types::{
    Operation, ReceiveWorkRequest, SendFlags, SendImmOrInvalidate, SendWorkRequest, UdDestination,
};
use softhca_wire::{Mtu, Psn, QueueKey, RnrTimer};
use std::cell::RefCell;
use std::rc::Rc;

const NARROW: LadderStyle = LadderStyle { width: 72, color: ColorMode::Plain };
const WIDE: LadderStyle = LadderStyle { width: 100, color: ColorMode::Plain };

/// A pair whose PSNs do not start at 0, so that ladders must show relative ones.
fn setup() -> Setup {
    let mut setup = Setup::default();
    setup.connection.first_psns = [Psn::new(0xff_fffe), Psn::new(5000)];
    setup
}

/// What happens to the pair from now on.
fn with_ladders(pair: &mut Pair) -> Rc<RefCell<LadderBuilder>> {
    let mut names = NameTable::from_world(&pair.world);
    names.add_rule(RuleId(1), "lose one");
    let ladders = Rc::new(RefCell::new(LadderBuilder::new(names)));
    pair.world.set_sink(ladders.clone());
    ladders
}

fn draw(ladders: &RefCell<LadderBuilder>, style: LadderStyle) -> String {
    let ladders = ladders.borrow_mut().ladders();
    ladders.iter().map(|ladder| ladder.draw(style)).collect::<Vec<_>>().join("\n")
}

fn drop_packet(pair: &mut Pair, direction: Direction, psn: u64) {
    let selector = Selector {
        direction: Some(direction),
        psn: Some(InclusiveRange::exactly(psn)),
        ..Selector::default()
    };
    pair.add_rule(selector, Repeat::times(1), Action::Drop);
}

#[test]
fn a_write_has_four_packets_and_one_ack() {
    let mut pair = setup().build();
    let ladders = with_ladders(&mut pair);
    pair.post_write(7, 0, 0, 4000);
    pair.run();
    insta::assert_snapshot!(draw(&ladders, WIDE));
    insta::assert_snapshot!("a_write_in_a_narrow_terminal", draw(&ladders, NARROW));
}

#[test]
fn sends_with_and_without_immediate_consume_receives() {
    let mut pair = setup().build();
    let ladders = with_ladders(&mut pair);
    pair.post_receive(1, 0, 4096);
    pair.post_receive(2, 0, 4096);
    pair.post_send(7, 0, 1500);
    let gather = [pair.a.sge(0, 5)];
    pair.post(8, Operation::Send(SendImmOrInvalidate::Immediate(0xcafe)), &gather);
    pair.run();
    insta::assert_snapshot!(draw(&ladders, WIDE));
}

#[test]
fn an_unsignaled_request_has_no_completion() {
    let mut pair = setup().build();
    let ladders = with_ladders(&mut pair);
    let gather = [pair.a.sge(0, 8)];
    let remote = pair.b.remote(0);
    let mut request = SendWorkRequest::new(1, Operation::Write { remote, imm_data: None }, &gather);
    request.flags = SendFlags::empty();
    let (host, qp) = (pair.a.host, pair.a.qp);
    pair.world.verbs(host).post_send(qp, &request).unwrap();
    pair.run();
    insta::assert_snapshot!(draw(&ladders, WIDE));
}

#[test]
fn a_read_has_a_request_and_a_response() {
    let mut pair = setup().build();
    let ladders = with_ladders(&mut pair);
    pair.post_read(7, 0, 0, 2500);
    pair.run();
    insta::assert_snapshot!(draw(&ladders, WIDE));
}

#[test]
fn atomics_return_the_original_value() {
    let mut pair = setup().build();
    let (a, b) = (pair.a, pair.b);
    pair.write_memory(b, 0, &5u64.to_le_bytes());
    let ladders = with_ladders(&mut pair);
    pair.post(1, Operation::FetchAdd { remote: b.remote(0), add: 3 }, &[a.sge(0, 8)]);
    pair.post(2, Operation::CompareSwap { remote: b.remote(0), compare: 8, swap: 1 }, &[a.sge(8, 8)]);
    pair.run();
    insta::assert_snapshot!(draw(&ladders, WIDE));
}

#[test]
fn similar_packets_share_one_arrow() {
    let mut pair = setup().mtu(Mtu::B256).build();
    let ladders = with_ladders(&mut pair);
    pair.post_write(7, 0, 0, 10_000);
    pair.run();
    insta::assert_snapshot!(draw(&ladders, WIDE));
}

#[test]
fn a_lost_packet_is_fatal() {
    let mut pair = setup().build();
    let ladders = with_ladders(&mut pair);
    drop_packet(&mut pair, Direction::Forward, 1);
    pair.post_write(7, 0, 0, 4000);
    pair.post_write(8, 0, 0, 10);
    pair.run();
    insta::assert_snapshot!(draw(&ladders, WIDE));
    insta::assert_snapshot!("a_lost_packet_is_fatal_in_a_narrow_terminal", draw(&ladders, NARROW));
}

#[test]
fn go_back_n_retransmits_a_lost_packet() {
    let mut pair = setup().recovery(Recovery::GoBackN).build();
    let ladders = with_ladders(&mut pair);
    drop_packet(&mut pair, Direction::Forward, 1);
    pair.post_write(7, 0, 0, 4000);
    pair.run();
    insta::assert_snapshot!(draw(&ladders, WIDE));
}

#[test]
fn a_lost_ack_is_detected_by_the_ack_timeout() {
    let mut pair = setup().recovery(Recovery::GoBackN).build();
    let ladders = with_ladders(&mut pair);
    let selector = Selector { classes: Some(PacketClasses::Only(PacketClass::Ack)), ..Selector::default() };
    pair.add_rule(selector, Repeat::times(1), Action::Drop);
    pair.post_write(7, 0, 0, 100);
    pair.run();
    insta::assert_snapshot!(draw(&ladders, WIDE));
}

#[test]
fn an_rnr_nak_is_followed_by_a_retry() {
    let mut setup = setup();
    setup.connection.rnr_retry = 1;
    setup.connection.min_rnr_timer = RnrTimer::new(12);
    let mut pair = setup.build();
    let ladders = with_ladders(&mut pair);
    pair.post_send(7, 0, 100);
    pair.run();
    insta::assert_snapshot!(draw(&ladders, WIDE));
}

#[test]
fn a_nak_shows_its_reason() {
    let mut pair = setup().build();
    let ladders = with_ladders(&mut pair);
    pair.post_write(7, 0, (1 << 20) - 10, 100);
    pair.run();
    insta::assert_snapshot!(draw(&ladders, WIDE));
}

#[test]
fn datagrams_have_no_acks() {
    let mut pair = Setup::default().build();
    let hosts = [pair.a, pair.b];
    let key = QueueKey(0x1234);
    let qps = hosts.map(|end| {
        let mut verbs = pair.world.verbs(end.host);
        let options = Setup::default().options;
        let qp = verbs.create_queue_pair(QpType::Ud, end.domain, end.cq, options).unwrap();
        verbs.start_datagrams(qp, key, Psn::new(77)).unwrap();
        qp
    });
    let to = pair.world.host(pair.b.host).address();
    let vector = softhca_engine::AddressVector::to(to.into());
    let handle = pair.world.verbs(pair.a.host).create_address_handle(pair.a.domain, vector).unwrap();
    for (role, end, qpn) in [(3, pair.a, qps[0]), (4, pair.b, qps[1])] {
        let requester = Endpoint { address: pair.world.host(end.host).address(), qpn };
        let flow = Flow { id: FlowId(role), requester, responder: None, first_psn: Psn::new(77) };
        pair.world.flows_mut().insert(flow);
    }
    let ladders = with_ladders(&mut pair);
    let scatter = [pair.b.sge(0, 200)];
    pair.world
        .verbs(pair.b.host)
        .post_receive(qps[1], &ReceiveWorkRequest { wr_id: 1, sg_list: &scatter })
        .unwrap();
    for id in [1, 2] {
        let gather = [pair.a.sge(0, 100)];
        let mut request = SendWorkRequest::new(id, Operation::Send(SendImmOrInvalidate::None), &gather);
        request.ud = UdDestination { ah: handle.0, remote_qpn: qps[1], remote_qkey: key };
        pair.world.verbs(pair.a.host).post_send(qps[0], &request).unwrap();
    }
    pair.run();
    insta::assert_snapshot!(draw(&ladders, WIDE));
}

#[test]
fn fault_rules_on_received_packets_are_shown_below_them() {
    let mut pair = setup().recovery(Recovery::GoBackN).build();
    let ladders = with_ladders(&mut pair);
    let nth = |psn| Selector {
        direction: Some(Direction::Forward),
        psn: Some(InclusiveRange::exactly(psn)),
        ..Selector::default()
    };
    pair.add_rule(nth(0), Repeat::times(1), Action::MarkCe);
    pair.add_rule(nth(1), Repeat::times(1), Action::Duplicate { copies: 1 });
    let corrupt = Action::Corrupt { bit: BitPosition::PayloadBit(3), icrc: IcrcPolicy::Stale };
    pair.add_rule(nth(2), Repeat::times(1), corrupt);
    pair.add_rule(nth(3), Repeat::times(1), Action::Delay { ns: 500 });
    pair.post_write(7, 0, 0, 4000);
    pair.run();
    insta::assert_snapshot!(draw(&ladders, WIDE));
}

#[test]
fn connection_setup_is_one_line_per_side() {
    let mut pair = Setup::default().build();
    let ladders = with_ladders(&mut pair);
    let (a, b) = (pair.a, pair.b);
    let (options, connection) = (Setup::default().options, Setup::default().connection);
    let [one, other] = [a, b].map(|end| {
        let mut verbs = pair.world.verbs(end.host);
        verbs.create_queue_pair(QpType::Rc, end.domain, end.cq, options).unwrap()
    });
    pair.world.connect((a.host, one), (b.host, other), &connection).unwrap();
    let request = SendWorkRequest::new(1, Operation::Send(SendImmOrInvalidate::None), &[]);
    pair.world.verbs(b.host).post_receive(other, &ReceiveWorkRequest { wr_id: 1, sg_list: &[] }).unwrap();
    pair.world.verbs(a.host).post_send(one, &request).unwrap();
    pair.run();
    insta::assert_snapshot!(draw(&ladders, NARROW));
}

#[test]
fn ladders_of_every_rxe_capture_fit_every_width() {
    for file in std::fs::read_dir(captures_folder()).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_none_or(|end| end != "pcap") {
            continue;
        }
        let mut ladders = LadderBuilder::new(NameTable::new());
        let (mut start, mut connected) = (None, 0);
        for record in CaptureReader::open(&path).unwrap() {
            let record = record.unwrap();
            let packet = Packet::new(&record, *start.get_or_insert(record.time_ns));
            connected += usize::from(matches!(packet.contents, PacketContents::Roce(_)));
            ladders.record_packet(&packet);
        }
        let ladders = ladders.ladders();
        // Notes mark packets that the capture does not have.
        let is_packet = |step: &&Step| !matches!(step.content, StepContent::Note(_));
        let steps: usize = ladders.iter().map(|ladder| ladder.steps.iter().filter(is_packet).count()).sum();
        assert!(steps <= connected && (steps > 0) == (connected > 0), "{}", path.display());
        for width in [60, 100] {
            for ladder in &ladders {
                let text = ladder.draw(LadderStyle { width, color: ColorMode::Plain });
                let fits = |line: &str| line.chars().count() == width;
                // A narrow heading takes two lines.
                assert!(text.lines().skip(2).all(fits), "{}\n{text}", path.display());
            }
        }
    }
}
