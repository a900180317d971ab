//! Duplicate requests and responses.

use softhca_engine::{QpType, Recovery};
use softhca_fabric::{Action, InclusiveRange, Repeat, Selector};
use softhca_tests::pair::{Pair, Setup, pattern, requests, responses};
use softhca_types::Operation;

#[test]
fn every_packet_may_be_duplicated() {
    for kind in [QpType::Rc, QpType::XrcInitiator] {
        let mut pair = Setup::with_kind(kind).build();
        let (a, b) = (pair.a, pair.b);
        let data = pattern(2, 3000);
        pair.write_memory(a, 0, &data);
        pair.write_memory(b, 20_000, &data);
        pair.post_receive(100, 10_000, 3000);
        pair.add_rule(Selector::default(), Repeat::default(), Action::Duplicate { copies: 1 });
        pair.post_write(1, 0, 0, 3000);
        pair.post_send(2, 0, 3000);
        pair.post_read(3, 20_000, 20_000, 3000);
        let remote = b.remote(40_000);
        pair.post(4, Operation::FetchAdd { remote, add: 7 }, &[a.sge(40_000, 8)]);
        pair.run();
        let done: Vec<_> = (1..=4).map(|id| (id, "SUCCESS")).collect();
        assert_eq!(pair.completion_statuses(a), done);
        assert_eq!(pair.completion_statuses(b), [(100, "SUCCESS")]);
        assert_eq!(pair.read_memory(b, 10_000, 3000), data);
        assert_eq!(pair.read_memory(a, 20_000, 3000), data);
        assert_eq!(pair.read_memory(b, 40_000, 8), 7u64.to_ne_bytes());
        assert_eq!(pair.states(), ["RTS", "RTS"]);
    }
}

#[test]
fn a_duplicate_write_is_acknowledged_but_not_executed() {
    let mut pair = Pair::new();
    let (a, b) = (pair.a, pair.b);
    pair.write_memory(a, 0, b"new");
    let late = Action::Duplicate { copies: 1 };
    pair.add_rule(requests(InclusiveRange::exactly(0)), Repeat::times(1), late);
    pair.post_write(1, 0, 0, 3);
    pair.run();
    let written = pair
        .recording
        .borrow()
        .events
        .iter()
        .filter(|(.., event)| matches!(event, softhca_engine::Event::MemoryWritten { .. }))
        .count();
    assert_eq!(written, 1);
    assert_eq!(pair.read_memory(b, 0, 3), b"new");
    assert_eq!(
        pair.packets(),
        ["-> WRITE_ONLY 0 3B", "<- ACKNOWLEDGE 0 ack msn=1", "<- ACKNOWLEDGE 0 ack msn=1",]
    );
}

#[test]
fn a_duplicate_atomic_gets_the_first_response_again() {
    let mut pair = Setup::default().recovery(Recovery::GoBackN).build();
    let (a, b) = (pair.a, pair.b);
    pair.write_memory(b, 0, &40u64.to_ne_bytes());
    pair.drop_packets(responses(InclusiveRange::exactly(0)), 1);
    let remote = b.remote(0);
    pair.post(1, Operation::FetchAdd { remote, add: 2 }, &[a.sge(0, 8)]);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
    assert_eq!(pair.read_memory(a, 0, 8), 40u64.to_ne_bytes());
    assert_eq!(pair.read_memory(b, 0, 8), 42u64.to_ne_bytes());
    assert_eq!(pair.counters(b).duplicate_request, 1);
}

#[test]
fn the_responder_remembers_as_many_atomics_as_may_be_outstanding() {
    let mut pair = Setup::default().recovery(Recovery::GoBackN).connection(|c| c.max_rd_atomic = 4).build();
    let (a, b) = (pair.a, pair.b);
    pair.drop_packets(responses(InclusiveRange { first: 0, last: 3 }), 4);
    for id in 0..4 {
        pair.post(id, Operation::FetchAdd { remote: b.remote(0), add: 1 }, &[a.sge(id * 8, 8)]);
    }
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(0, "SUCCESS"), (1, "SUCCESS"), (2, "SUCCESS"), (3, "SUCCESS")]);
    let found: Vec<u64> =
        (0..4).map(|i| u64::from_ne_bytes(pair.read_memory(a, i * 8, 8).try_into().unwrap())).collect();
    assert_eq!(found, [0, 1, 2, 3]);
    assert_eq!(pair.read_memory(b, 0, 8), 4u64.to_ne_bytes());
}

#[test]
fn a_repeated_read_restarts_with_a_first_packet() {
    let mut pair = Setup::default().recovery(Recovery::GoBackN).one_gigabit().build();
    let (a, b) = (pair.a, pair.b);
    let data = pattern(1, 50_000);
    pair.write_memory(b, 0, &data);
    pair.drop_packets(responses(InclusiveRange::exactly(3)), 1);
    pair.post_read(1, 0, 0, 50_000);
    pair.run();
    assert_eq!(pair.completion_statuses(a), [(1, "SUCCESS")]);
    assert_eq!(pair.read_memory(a, 0, 50_000), data);
    let resumed =
        pair.packets().into_iter().filter(|packet| packet.starts_with("<-") && packet.contains(" 3 "));
    let resumed: Vec<String> = resumed.map(|packet| packet.split(' ').nth(1).unwrap().to_owned()).collect();
    assert_eq!(resumed, ["READ_RESPONSE_MIDDLE", "READ_RESPONSE_FIRST"]);
}
