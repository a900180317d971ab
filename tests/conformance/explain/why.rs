//! `softhca why`: one log per cause, and its explanation.

use super::{reader, run_and_log};
use softhca_engine::{ModifyQp, QpState, QpType, Recovery};
use softhca_fabric::{
    Action, BitPosition, Direction, DownDirections, Frame, IcrcPolicy, InclusiveRange, PacketClass,
    PacketClasses, Repeat, Selector,
};
use softhca_tests::pair::{Pair, Setup, requests, responses};
use softhca_tests::verbs::ConnectOptions;
use softhca_trace::why::{LogAnalyzer, Query};
use softhca_types::{AccessFlags, Operation, RemoteAddress, SendImmOrInvalidate, Sge};
use softhca_wire::{
    AddressHeaders, Aeth, Bth, ICRC_LEN, Icrc, LocalKey, Mtu, NakCode, Opcode, Psn, RemoteKey, Syndrome,
    TransportHeader,
};
use std::time::Duration;

fn setup() -> Setup {
    Setup::default().connection(|connection| connection.first_psns = [Psn::new(5000), Psn::new(0xff_fffe)])
}

fn explain(log: &[u8], question: &Query) -> String {
    let reader = reader(log);
    let mut inquiry = LogAnalyzer::new(reader.header());
    reader.for_each(|entry| inquiry.push(entry.expect("an entry")));
    match inquiry.diagnose(question) {
        Ok(answer) => answer.text(100),
        Err(why) => why.to_string(),
    }
}

/// The explanation of a run without a query.
fn why(setup: Setup, act: impl FnOnce(&mut Pair)) -> String {
    explain(&run_and_log(setup, act), &Query::default())
}

fn explain_request(id: u64) -> Query {
    Query { wr_id: Some(id), ..Query::default() }
}

fn acks() -> Selector {
    Selector { classes: Some(PacketClasses::Only(PacketClass::Ack)), ..Selector::default() }
}

#[test]
fn a_lost_middle_packet_is_fatal() {
    let log = run_and_log(setup(), |pair| {
        pair.drop_packets(requests(InclusiveRange::exactly(1)), 1);
        pair.post_write(7, 0, 0, 4000);
        pair.post_write(8, 0, 0, 10);
        pair.run();
    });
    insta::assert_snapshot!(explain(&log, &Query::default()));
    insta::assert_snapshot!("requests_flushed_after_a_loss", explain(&log, &explain_request(8)));
}

#[test]
fn a_lost_middle_packet_is_retransmitted() {
    insta::assert_snapshot!(why(setup().recovery(Recovery::GoBackN), |pair| {
        pair.drop_packets(requests(InclusiveRange::exactly(1)), 1);
        pair.post_write(7, 0, 0, 4000);
        pair.run();
    }));
}

#[test]
fn a_lost_middle_packet_restarts_the_message() {
    insta::assert_snapshot!(why(setup().recovery(Recovery::GoBack0), |pair| {
        pair.drop_packets(requests(InclusiveRange::exactly(1)), 1);
        pair.post_write(7, 0, 0, 4000);
        pair.run();
    }));
}

#[test]
fn a_packet_that_is_always_lost_exhausts_the_retries() {
    let setup = setup().recovery(Recovery::GoBackN).connection(|connection| connection.retry_count = 2);
    insta::assert_snapshot!(why(setup, |pair| {
        pair.drop_packets(requests(InclusiveRange::exactly(0)), 100);
        pair.post_write(7, 0, 0, 100);
        pair.run();
    }));
}

#[test]
fn a_lost_last_packet_is_detected_by_the_ack_timeout() {
    insta::assert_snapshot!(why(setup(), |pair| {
        pair.drop_packets(requests(InclusiveRange::exactly(3)), 1);
        pair.post_write(7, 0, 0, 4000);
        pair.run();
    }));
}

#[test]
fn a_lost_ack_is_fatal_although_the_request_was_executed() {
    insta::assert_snapshot!(why(setup(), |pair| {
        pair.drop_packets(acks(), 1);
        pair.post_write(7, 0, 0, 100);
        pair.run();
    }));
}

#[test]
fn a_lost_ack_costs_a_timeout() {
    insta::assert_snapshot!(why(setup().recovery(Recovery::GoBackN), |pair| {
        pair.drop_packets(acks(), 1);
        pair.post_write(7, 0, 0, 100);
        pair.run();
    }));
}

#[test]
fn a_lost_read_response() {
    insta::assert_snapshot!(why(setup(), |pair| {
        pair.drop_packets(responses(InclusiveRange::exactly(1)), 1);
        pair.post_read(7, 0, 0, 4000);
        pair.run();
    }));
}

#[test]
fn a_packet_with_a_bad_icrc() {
    insta::assert_snapshot!(why(setup(), |pair| {
        let action = Action::Corrupt { bit: BitPosition::PayloadBit(3), icrc: IcrcPolicy::Stale };
        pair.add_rule(requests(InclusiveRange::exactly(0)), Repeat::times(1), action);
        pair.post_write(7, 0, 0, 100);
        pair.run();
    }));
}

#[test]
fn a_receiver_that_never_posts() {
    insta::assert_snapshot!(why(setup().connection(|connection| connection.rnr_retry = 3), |pair| {
        pair.post_send(7, 0, 100);
        pair.run();
    }));
}

#[test]
fn a_receiver_that_posts_late() {
    insta::assert_snapshot!(why(setup(), |pair| {
        pair.post_send(7, 0, 100);
        pair.world.run_for(Duration::from_micros(1500));
        pair.post_receive(1, 0, 100);
        pair.run();
    }));
}

#[test]
fn an_infinite_rnr_retry() {
    insta::assert_snapshot!(why(setup(), |pair| {
        pair.post_send(7, 0, 100);
        pair.world.run_for(Duration::from_millis(10));
    }));
}

#[test]
fn a_sequence_nak_after_an_rnr_nak() {
    insta::assert_snapshot!(why(setup(), |pair| {
        pair.post_send(7, 0, 3000);
        pair.world.run_for(Duration::from_micros(642));
        // What rxe sends once, twice: the retry was lost.
        for _ in 0..2 {
            let frame = sequence_nak(pair, Psn::new(5000));
            pair.world.inject(pair.a.host, frame);
        }
    }));
}

fn sequence_nak(pair: &Pair, psn: Psn) -> Frame {
    let acknowledge = Opcode::all().find(|opcode| opcode.name() == "ACKNOWLEDGE").unwrap();
    let mut header = TransportHeader::new(Bth::new(acknowledge, pair.a.qp, psn));
    header.aeth = Some(Aeth { syndrome: Syndrome::Nak(NakCode::PsnSequenceError), msn: 0 });
    let mut bytes = vec![0; TransportHeader::MAX_LEN + ICRC_LEN];
    let length = header.emit(&mut bytes);
    bytes.truncate(length + ICRC_LEN);
    let [source, destination] = [pair.b, pair.a].map(|end| pair.world.host(end.host).address());
    let addressing = AddressHeaders::between(source, destination);
    Icrc::write(&addressing, &mut bytes);
    Frame::new(addressing, bytes)
}

#[test]
fn a_peer_in_err_and_timeout_0() {
    insta::assert_snapshot!(why(setup().connection(|c| c.timeout = 0), |pair| {
        let b = pair.b;
        pair.on(b).modify_queue_pair(b.qp, ModifyQp::default().state(QpState::Error)).unwrap();
        pair.post_write(7, 0, 0, 100);
        pair.run();
    }));
}

/// A WRITE of 200 packets whose last one is lost. The peer acknowledges every 64th.
fn last_packet_lost(timeout: u8) -> Vec<u8> {
    run_and_log(setup().connection(|c| c.timeout = timeout), |pair| {
        pair.drop_packets(requests(InclusiveRange::exactly(199)), 1);
        pair.post_write(7, 0, 0, 200 * 1024);
        pair.run();
    })
}

/// The log without the peer's side and without the faults: what a card knows whose peer is not SoftHCA.
fn one_sided(log: &[u8]) -> Vec<u8> {
    let text = std::str::from_utf8(log).unwrap();
    let mut lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let mut header = lines.next().unwrap();
    header["vantage_points"].as_array_mut().unwrap().retain(|point| point["host"] != "bob");
    let is_known = |entry: &serde_json::Value| {
        entry["host"] == "alice" && !entry["name"].as_str().is_some_and(|name| name.ends_with("fault"))
    };
    let kept = std::iter::once(header).chain(lines.filter(is_known));
    kept.map(|line| format!("{line}\n")).collect::<String>().into_bytes()
}

#[test]
fn an_answer_to_a_part_of_the_request_is_not_silence() {
    for timeout in [0, 14] {
        let answer = explain(&one_sided(&last_packet_lost(timeout)), &Query::default());
        assert!(answer.contains("is alive: it answered"), "{answer}");
        assert!(!answer.contains("obody"), "{answer}");
    }
    insta::assert_snapshot!(explain(&last_packet_lost(0), &Query::default()));
}

#[test]
fn an_unknown_rkey() {
    insta::assert_snapshot!(why(setup(), |pair| {
        let gather = [pair.a.sge(0, 8)];
        let remote = RemoteAddress { address: 0, rkey: RemoteKey(0x1234_5678) };
        pair.post(7, Operation::Write { remote, imm_data: None }, &gather);
        pair.run();
    }));
}

#[test]
fn an_access_outside_the_region() {
    insta::assert_snapshot!(why(setup(), |pair| {
        pair.post_write(7, 0, (1 << 20) - 4, 8);
        pair.run();
    }));
}

#[test]
fn a_missing_access_flag() {
    insta::assert_snapshot!(why(setup(), |pair| {
        let (b, gather) = (pair.b, [pair.a.sge(0, 8)]);
        let (key, address) = pair.on(b).register_memory(b.domain, 4096, AccessFlags::LOCAL_WRITE).unwrap();
        pair.post(7, Operation::Read { remote: RemoteAddress { address, rkey: key } }, &gather);
        pair.run();
    }));
}

#[test]
fn a_misaligned_atomic() {
    insta::assert_snapshot!(why(setup(), |pair| {
        let (remote, gather) = (pair.b.remote(4), [pair.a.sge(0, 8)]);
        pair.post(7, Operation::FetchAdd { remote, add: 1 }, &gather);
        pair.run();
    }));
}

#[test]
fn a_message_longer_than_the_receive() {
    let log = run_and_log(setup(), |pair| {
        pair.post_receive(70, 0, 50);
        pair.post_receive(71, 0, 50);
        pair.post_send(7, 0, 100);
        pair.run();
    });
    insta::assert_snapshot!(explain(&log, &Query::default()));
    insta::assert_snapshot!("a_receive_flushed_after_a_nak", explain(&log, &explain_request(71)));
}

/// Nothing is lost: a shorter timer would only send more.
#[test]
fn an_answer_later_than_the_timer() {
    insta::assert_snapshot!(why(setup().recovery(Recovery::GoBackN), |pair| {
        let answer = responses(InclusiveRange::exactly(0));
        pair.add_rule(answer, Repeat::times(1), Action::Delay { ns: 100_000_000 });
        let (remote, gather) = (pair.b.remote(8), [pair.a.sge(0, 8)]);
        pair.post(7, Operation::FetchAdd { remote, add: 1 }, &gather);
        pair.run();
    }));
}

#[test]
fn memory_that_is_gone_when_a_packet_is_sent_again() {
    let setup = setup().recovery(Recovery::GoBackN);
    insta::assert_snapshot!(why(setup, |pair| {
        let a = pair.a;
        pair.drop_packets(requests(InclusiveRange::exactly(0)), 1);
        pair.post_write(7, 0, 0, 100);
        pair.world.run_for(Duration::from_micros(100));
        pair.on(a).deregister_memory(a.rkey).unwrap();
        pair.run();
    }));
}

#[test]
fn memory_that_is_gone_when_the_answer_arrives() {
    insta::assert_snapshot!(why(setup(), |pair| {
        let a = pair.a;
        let answer = responses(InclusiveRange::exactly(0));
        pair.add_rule(answer, Repeat::times(1), Action::Delay { ns: 200_000 });
        pair.post_read(7, 0, 0, 100);
        pair.world.run_for(Duration::from_micros(100));
        pair.on(a).deregister_memory(a.rkey).unwrap();
        pair.run();
    }));
}

/// Its requester learns nothing: the responder has flushed both requests before the NAK arrives.
#[test]
fn a_queue_pair_that_is_connected_to_itself() {
    let log = run_and_log(setup(), |pair| {
        let a = pair.a;
        pair.on(a).modify_queue_pair(a.qp, ModifyQp::default().state(QpState::Reset)).unwrap();
        let psns = [Psn::new(7); 2];
        pair.on(a).connect(a.qp, (a.host, a.qp), &ConnectOptions::default(), psns).unwrap();
        let remote = RemoteAddress { address: 0, rkey: RemoteKey(0x1234_5678) };
        for id in [7, 8] {
            pair.post(id, Operation::Write { remote, imm_data: None }, &[a.sge(0, 8)]);
        }
        pair.run();
    });
    insta::assert_snapshot!(explain(&log, &Query::default()));
    let mut analyzer = LogAnalyzer::new(reader(&log).header());
    reader(&log).for_each(|entry| analyzer.push(entry.expect("an entry")));
    let problems = analyzer.problems().expect("a program that runs with `--why` is told");
    assert_eq!(problems.explanations[0].code, "nak/remote-access-error");
}

#[test]
fn a_peer_whose_queue_pair_was_destroyed() {
    insta::assert_snapshot!(why(setup(), |pair| {
        let b = pair.b;
        pair.on(b).destroy_queue_pair(b.qp).unwrap();
        pair.post_write(7, 0, 0, 100);
        pair.run();
    }));
}

#[test]
fn a_peer_before_rtr() {
    insta::assert_snapshot!(why(setup(), |pair| {
        let b = pair.b;
        pair.on(b).modify_queue_pair(b.qp, ModifyQp::default().state(QpState::Reset)).unwrap();
        pair.post_write(7, 0, 0, 100);
        pair.run();
    }));
}

#[test]
fn a_link_that_goes_down() {
    insta::assert_snapshot!(why(setup().recovery(Recovery::GoBackN), |pair| {
        let selector = Selector { direction: Some(Direction::Forward), ..Selector::default() };
        let action = Action::LinkDown { directions: DownDirections::BothWays, for_ns: 10_000_000_000 };
        pair.add_rule(selector, Repeat::times(1), action);
        pair.post_write(7, 0, 0, 2000);
        pair.run();
    }));
}

#[test]
fn an_unknown_lkey() {
    insta::assert_snapshot!(why(setup(), |pair| {
        let gather = [Sge { address: 0, length: 8, lkey: LocalKey(0x7777_7777) }];
        pair.post(7, Operation::Send(SendImmOrInvalidate::None), &gather);
        pair.run();
    }));
}

#[test]
fn a_datagram_over_the_path_mtu() {
    insta::assert_snapshot!(why(Setup::with_kind(QpType::Ud), |pair| {
        pair.post_send(7, 0, 4097);
        pair.run();
    }));
}

#[test]
fn a_read_without_max_rd_atomic() {
    insta::assert_snapshot!(why(setup().connection(|connection| connection.max_rd_atomic = 0), |pair| {
        pair.post_read(7, 0, 0, 8);
        pair.run();
    }));
}

#[test]
fn a_path_mtu_mismatch() {
    insta::assert_snapshot!(why(setup(), |pair| {
        let (a, b, connection) = (pair.a, pair.b, setup().connection);
        pair.on(b).modify_queue_pair(b.qp, ModifyQp::default().state(QpState::Reset)).unwrap();
        let smaller = softhca_tests::verbs::ConnectOptions { path_mtu: Mtu::B512, ..connection };
        let [first, second] = connection.first_psns;
        pair.on(b).connect(b.qp, (a.host, a.qp), &smaller, [second, first]).unwrap();
        pair.post_write(7, 0, 0, 3000);
        pair.run();
    }));
}

#[test]
fn a_cq_overflow() {
    let log = run_and_log(setup(), |pair| {
        let (a, cq) = (pair.a, pair.a.cq);
        pair.on(a).resize_completion_queue(cq, 1).unwrap();
        for id in 7..10 {
            pair.post_write(id, 0, 0, 8);
        }
        pair.run();
    });
    insta::assert_snapshot!(explain(&log, &Query::default()));
}

#[test]
fn requests_flushed_by_the_program() {
    insta::assert_snapshot!(why(setup(), |pair| {
        let a = pair.a;
        pair.post_send(7, 0, 8);
        pair.on(a).modify_queue_pair(a.qp, ModifyQp::default().state(QpState::Error)).unwrap();
        pair.run();
    }));
}

#[test]
fn a_log_without_problems() {
    let log = run_and_log(setup(), |pair| {
        pair.post_receive(1, 0, 4096);
        pair.post_send(7, 0, 2000);
        pair.post_write(8, 0, 0, 4000);
        pair.run();
    });
    let on = |queue_pair: &str| Query { queue_pair: Some(queue_pair.into()), ..Query::default() };
    let answers = [
        explain(&log, &Query::default()),
        explain(&log, &explain_request(8)),
        explain(&log, &on("bob.1")),
        explain(&log, &on("carol.1")),
        explain(&log, &explain_request(99)),
    ];
    insta::assert_snapshot!(answers.join("\n---\n"));
}

#[test]
fn every_packet_carries_its_work_request_and_its_cause() {
    use softhca_trace::log::LogEvent;
    let log = run_and_log(setup().recovery(Recovery::GoBackN), |pair| {
        pair.drop_packets(requests(InclusiveRange::exactly(1)), 1);
        pair.post_write(7, 0, 0, 4000);
        pair.post_send(8, 0, 10);
        pair.world.run_for(Duration::from_micros(100));
        pair.post_receive(1, 0, 100);
        pair.post_read(9, 0, 0, 3000);
        pair.run();
    });
    let (mut causes, mut works) = (std::collections::BTreeSet::new(), std::collections::BTreeSet::new());
    for entry in reader(&log) {
        match entry.expect("an entry").event {
            LogEvent::PacketSent { wr_id: work, cause, .. } => {
                works.insert(work.expect("both HCAs are logged"));
                causes.insert(cause.into_owned());
            }
            LogEvent::PacketReceived { wr_id: work, .. } => assert!(work.is_some()),
            LogEvent::PacketDropped { wr_id: work, packet, .. } => {
                assert_eq!(work.is_some(), packet.is_some())
            }
            _ => {}
        }
    }
    assert_eq!(works.into_iter().collect::<Vec<_>>(), [7, 8, 9]);
    let expected = ["psn-out-of-sequence", "receiver-not-ready", "request", "sequence-nak", "work"];
    assert_eq!(causes.into_iter().collect::<Vec<_>>(), expected);
}
