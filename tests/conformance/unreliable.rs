//! UC: incomplete messages are dropped, the next message is received.

use softhca_engine::{DropReason, Event, QpType};
use softhca_fabric::{Action, InclusiveRange, Repeat};
use softhca_tests::pair::{Pair, Setup, pattern, requests};
use softhca_types::{Operation, SendImmOrInvalidate};
use softhca_wire::Psn;

fn uc() -> Pair {
    Setup::with_kind(QpType::Uc).build()
}

#[test]
fn sends_and_writes_with_and_without_immediate_arrive() {
    let mut pair = uc();
    let (a, b) = (pair.a, pair.b);
    let data = pattern(1, 3000);
    pair.write_memory(a, 0, &data);
    for id in 100..103 {
        pair.post_receive(id, (id - 100) * 4000, 4000);
    }
    pair.post_send(1, 0, 3000);
    pair.post(2, Operation::Send(SendImmOrInvalidate::Immediate(77)), &[a.sge(0, 3000)]);
    pair.post(3, Operation::Write { remote: b.remote(20_000), imm_data: None }, &[a.sge(0, 3000)]);
    pair.post(4, Operation::Write { remote: b.remote(30_000), imm_data: Some(88) }, &[a.sge(0, 3000)]);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS"), (2, "SUCCESS"), (3, "SUCCESS"), (4, "SUCCESS")]);
    let received: Vec<_> = pair.completions(b).iter().map(|c| (c.wr_id, c.byte_len, c.imm_data)).collect();
    assert_eq!(received, [(100, 3000, 0), (101, 3000, 77), (102, 3000, 88)]);
    for place in [0, 4000, 20_000, 30_000] {
        assert_eq!(pair.read_memory(b, place, 3000), data, "at {place}");
    }
    assert!(pair.packets().iter().all(|packet| packet.starts_with("->")), "nothing is acknowledged");
}

#[test]
fn a_message_with_a_lost_packet_is_dropped_and_its_receive_is_reused() {
    for lost in 0..3 {
        let mut pair = uc();
        let (a, b) = (pair.a, pair.b);
        let data = pattern(2, 3000);
        pair.write_memory(a, 0, &data);
        pair.drop_packets(requests(InclusiveRange::exactly(lost)), 1);
        pair.post_receive(100, 0, 4000);
        pair.post_send(1, 50_000, 3000);
        pair.post_send(2, 0, 2500);
        pair.run();
        assert_eq!(
            pair.completion_statuses(a),
            [(1, "SUCCESS"), (2, "SUCCESS")],
            "the sender does not detect the loss"
        );
        let received: Vec<_> = pair.completions(b).iter().map(|c| (c.wr_id, c.byte_len)).collect();
        assert_eq!(received, [(100, 2500)], "packet {lost} was lost");
        assert_eq!(pair.read_memory(b, 0, 2500), data[..2500]);
        assert_eq!(pair.states(), ["RTS", "RTS"]);
        let reported = pair.recording.borrow().events.iter().any(|(.., event)| {
            let gap = DropReason::UcSequenceGap { expected: Psn::new(lost as u32) };
            matches!(event, Event::PacketDropped { reason, .. } if *reason == gap)
        });
        assert!(reported || lost == 0, "the event contains the missing PSN");
        assert_eq!(pair.counters(b).rx_dropped, [2, 1, 0][lost as usize], "dropped packets");
    }
}

#[test]
fn the_loss_of_a_whole_message_is_not_detected() {
    let mut pair = uc();
    let b = pair.b;
    pair.drop_packets(requests(InclusiveRange::exactly(0)), 1);
    pair.post_receive(100, 0, 100);
    pair.post_send(1, 0, 8);
    pair.post_send(2, 0, 9);
    pair.run();
    assert_eq!(pair.completions(b).iter().map(|c| c.byte_len).collect::<Vec<_>>(), [9]);
    assert_eq!(pair.counters(b).rx_dropped, 0);
}

#[test]
fn a_duplicate_middle_packet_drops_its_message() {
    let mut pair = uc();
    let b = pair.b;
    pair.add_rule(requests(InclusiveRange::exactly(1)), Repeat::times(1), Action::Duplicate { copies: 1 });
    pair.post_receive(100, 0, 4000);
    pair.post_send(1, 0, 3000);
    pair.post_send(2, 0, 10);
    pair.run();
    assert_eq!(pair.completions(b).iter().map(|c| (c.wr_id, c.byte_len)).collect::<Vec<_>>(), [(100, 10)]);
}

#[test]
fn a_duplicate_message_is_received_twice() {
    let mut pair = uc();
    let b = pair.b;
    pair.add_rule(requests(InclusiveRange::exactly(0)), Repeat::times(1), Action::Duplicate { copies: 1 });
    pair.post_receive(100, 0, 100);
    pair.post_receive(101, 0, 100);
    pair.post_send(1, 0, 10);
    pair.run();
    assert_eq!(
        pair.completions(b).iter().map(|c| (c.wr_id, c.byte_len)).collect::<Vec<_>>(),
        [(100, 10), (101, 10)]
    );
}

#[test]
fn an_incomplete_write_with_immediate_consumes_no_receive() {
    let mut pair = uc();
    let (a, b) = (pair.a, pair.b);
    pair.post_receive(100, 0, 4000);
    pair.drop_packets(requests(InclusiveRange::exactly(1)), 1);
    pair.post(1, Operation::Write { remote: b.remote(0), imm_data: Some(1) }, &[a.sge(0, 3000)]);
    pair.post(2, Operation::Write { remote: b.remote(0), imm_data: Some(2) }, &[a.sge(0, 3000)]);
    pair.run();
    assert_eq!(pair.completions(b).iter().map(|c| c.imm_data).collect::<Vec<_>>(), [2]);
}

#[test]
fn a_message_without_a_receive_is_dropped_and_the_next_is_received() {
    let mut pair = uc();
    let b = pair.b;
    pair.post_send(1, 0, 3000);
    pair.run();
    pair.post_receive(100, 0, 4000);
    pair.post_send(2, 0, 2000);
    pair.run();
    assert_eq!(pair.completions(b).iter().map(|c| (c.wr_id, c.byte_len)).collect::<Vec<_>>(), [(100, 2000)]);
}
