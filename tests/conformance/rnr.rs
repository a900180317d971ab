//! Receiver not ready: RNR NAKs, waits and retries.

use softhca_engine::{Event, QpType, Recovery, RetransmitCause};
use softhca_fabric::{Frame, InclusiveRange};
use softhca_tests::pair::{Pair, Setup, pattern, responses};
use softhca_types::Operation;
use softhca_wire::{
    AddressHeaders, Aeth, Bth, ICRC_LEN, Icrc, NakCode, Opcode, Psn, RnrTimer, Syndrome, TransportHeader,
};
use std::time::Duration;

#[test]
fn the_requester_waits_for_the_rnr_timer_and_retries() {
    for recovery in RECOVERIES {
        for kind in [QpType::Rc, QpType::XrcInitiator] {
            let setup = Setup::with_kind(kind).recovery(recovery);
            let mut pair = setup.connection(|c| c.min_rnr_timer = RnrTimer::new(20)).build();
            let (a, b) = (pair.a, pair.b);
            let data = pattern(4, 3000);
            pair.write_memory(a, 0, &data);
            pair.post_send(1, 0, 3000);
            pair.world.run_for(Duration::from_millis(1));
            pair.post_receive(100, 0, 3000);
            pair.run();
            assert_eq!(
                (pair.completion_statuses(a), pair.completion_statuses(b)),
                (vec![(1, "SUCCESS")], vec![(100, "SUCCESS")])
            );
            assert_eq!(pair.read_memory(b, 0, 3000), data);
            // Code 20 is 10.24 ms: one wait, and three one-way delays of 1 µs.
            assert_eq!(pair.counters(a).rcvd_rnr_err, 1);
            let completed = pair.recording.borrow().events.iter().find_map(|(at, _, event)| match event {
                softhca_engine::Event::Completed { completion, .. } if completion.wr_id == 1 => {
                    Some(at.nanos())
                }
                _ => None,
            });
            assert_eq!(completed, Some(10_240_000 + 4_000));
        }
    }
}

#[test]
fn rnr_retry_7_retries_forever() {
    let mut pair = Pair::new();
    let a = pair.a;
    pair.post_send(1, 0, 8);
    pair.world.run_for(Duration::from_millis(100));
    assert!(pair.counters(a).rcvd_rnr_err > 100);
    assert_eq!(pair.states(), ["RTS", "RTS"]);
    pair.post_receive(100, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
}

#[test]
fn rnr_retries_are_limited_and_reset_by_progress() {
    let mut pair = Setup::default().connection(|c| c.rnr_retry = 2).build();
    let a = pair.a;
    for id in 0..3 {
        pair.post_send(id, 0, 8);
    }
    for _ in 0..3 {
        // Two RNR NAKs of 640 µs each, then a receive: one retry is left each time.
        pair.world.run_for(Duration::from_micros(1000));
        pair.post_receive(100, 0, 8);
    }
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(0, "SUCCESS"), (1, "SUCCESS"), (2, "SUCCESS")]);
    pair.post_send(9, 0, 8);
    pair.post_send(10, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(9, "RNR_RETRY_EXC_ERR"), (10, "WR_FLUSH_ERR")]);
    assert_eq!(pair.counters(a).rnr_nak_retry_err, 1);
    assert_eq!(pair.states(), ["ERR", "RTS"]);
}

#[test]
fn only_the_last_packet_of_a_write_with_immediate_gets_an_rnr_nak() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    let data = pattern(8, 3000);
    pair.write_memory(a, 0, &data);
    let remote = b.remote(0);
    pair.post(1, Operation::Write { remote, imm_data: Some(5) }, &[a.sge(0, 3000)]);
    pair.world.run_for(Duration::from_micros(100));
    assert_eq!(pair.read_memory(b, 0, 2048), data[..2048]);
    assert_eq!(pair.read_memory(b, 2048, 952), [0; 952]);
    pair.post_receive(100, 0, 0);
    pair.run();
    insta::assert_snapshot!(pair.packets().join("\n"));
    assert_eq!(pair.read_memory(b, 0, 3000), data);
}

#[test]
fn a_lost_rnr_nak_is_an_ack_timeout() {
    let mut pair = Setup::default().recovery(Recovery::GoBackN).build();
    let a = pair.a;
    pair.drop_packets(responses(InclusiveRange::exactly(0)), 1);
    pair.post_send(1, 0, 8);
    pair.world.run_for(Duration::from_millis(1));
    pair.post_receive(100, 0, 8);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
    assert_eq!(pair.counters(a).local_ack_timeout_err, 1);
}

/// rxe rejects a packet with an RNR NAK, and the packet after it with a sequence NAK for the same PSN.
fn deliver_sequence_nak(pair: &mut Pair, psn: u32) {
    let (a, b) = (pair.a, pair.b);
    let acknowledge = Opcode::all().find(|opcode| opcode.name() == "ACKNOWLEDGE").unwrap();
    let mut header = TransportHeader::new(Bth::new(acknowledge, a.qp, Psn::new(psn)));
    header.aeth = Some(Aeth { syndrome: Syndrome::Nak(NakCode::PsnSequenceError), msn: 0 });
    let mut bytes = vec![0; TransportHeader::MAX_LEN + ICRC_LEN];
    let length = header.emit(&mut bytes);
    bytes.truncate(length + ICRC_LEN);
    let [source, destination] = [b, a].map(|end| pair.world.host(end.host).address());
    let addressing = AddressHeaders::between(source, destination);
    Icrc::write(&addressing, &mut bytes);
    pair.world.inject(a.host, Frame::new(addressing, bytes));
}

/// A pair whose first end has a SEND of three packets in RNR wait. The wait takes 640 µs.
fn pair_in_rnr_wait(recovery: Recovery) -> Pair {
    let mut pair = Setup::default().recovery(recovery).build();
    pair.post_send(1, 0, 3000);
    pair.world.run_for(Duration::from_micros(2));
    assert_eq!(pair.counters(pair.a).rcvd_rnr_err, 1);
    pair
}

const RECOVERIES: [Recovery; 3] = [Recovery::Fatal, Recovery::GoBackN, Recovery::GoBack0];

#[test]
fn the_sequence_nak_that_rxe_sends_after_an_rnr_nak_is_no_loss() {
    for recovery in RECOVERIES {
        let mut pair = pair_in_rnr_wait(recovery);
        let (a, b) = (pair.a, pair.b);
        for round in 1..=20 {
            // In time every other round, and late in all.
            if round % 2 == 0 {
                deliver_sequence_nak(&mut pair, 0);
            }
            pair.world.run_for(Duration::from_micros(640));
            deliver_sequence_nak(&mut pair, 0);
            assert_eq!(pair.states(), ["RTS", "RTS"], "{recovery:?}, round {round}");
            pair.world.run_for(Duration::from_micros(2));
            assert_eq!(pair.counters(a).rcvd_rnr_err, round + 1);
        }
        pair.post_receive(100, 0, 3000);
        pair.run();
        assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")], "{recovery:?}");
        assert_eq!(pair.completion_statuses(b), [(100, "SUCCESS")]);
        assert_eq!(pair.counters(a).local_ack_timeout_err, 0);
        let retransmissions = pair.recording.borrow().events.iter().any(|(.., event)| {
            matches!(event, Event::Retransmitted { cause: RetransmitCause::SequenceNak, .. })
        });
        assert!(!retransmissions, "{recovery:?}: no retry is spent on it");
    }
}

#[test]
fn the_second_sequence_nak_after_an_rnr_retry_is_a_loss() {
    for recovery in RECOVERIES {
        let mut pair = pair_in_rnr_wait(recovery);
        pair.world.run_for(Duration::from_micros(640));
        deliver_sequence_nak(&mut pair, 0);
        deliver_sequence_nak(&mut pair, 0);
        let state = if recovery == Recovery::Fatal { "ERR" } else { "RTS" };
        assert_eq!(pair.states()[0], state, "{recovery:?}");
    }
}

#[test]
fn every_rnr_timer_code_waits_its_time() {
    for code in 0..32 {
        let timer = RnrTimer::new(code);
        let mut pair = Setup::default().connection(|c| c.min_rnr_timer = timer).build();
        pair.post_send(1, 0, 8);
        pair.world.run_for(Duration::from_nanos(2000 + timer.nanoseconds() - 1));
        assert_eq!(pair.packets().len(), 2, "code {code}");
        pair.world.run_for(Duration::from_nanos(1));
        assert_eq!(pair.packets().len(), 3, "code {code}");
    }
}
