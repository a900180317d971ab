//! READs from a peer that grants no buffer: the window limits the responses that are asked for, and a lost tail is
//! asked for again before the ACK timeout.

use softhca_engine::{Event, Recovery, RetransmitCause};
use softhca_fabric::{Direction, InclusiveRange};
use softhca_tests::pair::{Pair, PairEnd, Setup, pattern, responses};
use softhca_wire::{Mtu, Opcode, TransportPacket};
use std::time::Duration;

const LENGTH: u32 = 64 * 1024;

/// A pair whose first end knows that the second is foreign.
fn pair(setup: Setup) -> Pair {
    let mut setup = setup.mtu(Mtu::B1024);
    setup.settings.foreign_window = 32;
    let mut pair = setup.build();
    let peer = pair.world.host(pair.b.host).address();
    pair.world.with_hca(pair.a.host, |hca, ctx| hca.set_foreign(ctx, peer, true));
    pair
}

/// The PSN and the length of each READ request of the first end.
fn read_requests(pair: &Pair) -> Vec<(u32, u32)> {
    let record = pair.recording.borrow();
    let parsed = record.sent.iter().filter(|(direction, _)| *direction == Direction::Forward);
    let requests = parsed.filter_map(|(_, frame)| {
        let packet = TransportPacket::parse(&frame.bytes[..frame.bytes.len() - 4]).unwrap();
        let is_read = packet.header.bth.opcode == Opcode::RC_READ_REQUEST;
        is_read.then(|| (packet.header.bth.psn.value(), packet.header.reth.unwrap().dma_length))
    });
    requests.collect()
}

fn read(pair: &mut Pair, at: u64) -> Vec<u8> {
    let PairEnd { rkey, .. } = pair.a;
    assert_ne!(rkey, pair.b.rkey);
    pair.post_read(at + 1, at, at, LENGTH);
    pair.run();
    assert_eq!(pair.completion_statuses(pair.a), [(at + 1, "SUCCESS")]);
    pair.read_memory(pair.a, at, LENGTH as usize)
}

#[test]
fn a_read_asks_for_what_the_window_admits() {
    let mut pair = pair(Setup::default());
    let data = pattern(3, LENGTH as usize);
    pair.write_memory(pair.b, 0, &data);
    assert_eq!(read(&mut pair, 0), data);
    let requests = read_requests(&pair);
    assert_eq!(requests[0], (0, 16 * 1024), "the first size of the window");
    assert!(requests.iter().all(|(_, length)| *length <= 32 * 1024), "{requests:?}");
    assert_eq!(requests.iter().map(|(_, length)| length).sum::<u32>(), LENGTH, "nothing was asked for twice");
    // The PSNs of the responses follow each other.
    let ends = requests.iter().map(|(psn, length)| psn + length / 1024);
    assert!(ends.zip(&requests[1..]).all(|(end, (psn, _))| end == *psn), "{requests:?}");
}

#[test]
fn parts_count_as_requests_that_the_peer_must_remember() {
    let mut pair = pair(Setup::default().connection(|connection| connection.max_rd_atomic = 1));
    let data = pattern(4, LENGTH as usize);
    pair.write_memory(pair.b, 0, &data);
    assert_eq!(read(&mut pair, 0), data);
    assert_eq!(pair.counters(pair.b).resp_remote_invalid_request, 0);
}

#[test]
fn every_lost_response_of_parts_is_recovered() {
    for lost in 0..64 {
        let mut pair = pair(Setup::default());
        let data = pattern(lost, LENGTH as usize);
        pair.write_memory(pair.b, 0, &data);
        pair.drop_packets(responses(InclusiveRange::exactly(lost)), 1);
        assert_eq!(read(&mut pair, 0), data, "{lost}");
    }
}

#[test]
fn the_tail_of_a_read_is_asked_for_before_the_ack_timeout() {
    let setup = Setup::default().connection(|connection| connection.timeout = 18);
    let mut pair = pair(setup);
    let data = pattern(5, LENGTH as usize);
    pair.write_memory(pair.b, 0, &data);
    pair.drop_packets(responses(InclusiveRange::exactly(63)), 1);
    assert_eq!(read(&mut pair, 0), data);
    let record = pair.recording.borrow();
    let ended = record.events.iter().find(|(.., event)| matches!(event, Event::Completed { .. })).unwrap().0;
    assert!(ended.nanos() < Duration::from_millis(400).as_nanos() as u64, "{ended:?}");
    let causes = record.events.iter().filter_map(|(.., event)| match event {
        Event::Retransmitted { cause, retries_left, .. } => Some((*cause, *retries_left)),
        _ => None,
    });
    assert_eq!(causes.collect::<Vec<_>>(), [(RetransmitCause::TailProbe, Some(7))], "a probe takes no retry");
    assert_eq!(pair.counters(pair.a).local_ack_timeout_err, 0);
}

#[test]
fn a_peer_that_is_gone_fails_the_read_after_all_retries() {
    let mut pair = pair(Setup::default());
    pair.drop_packets(responses(InclusiveRange::at_least(1)), u64::MAX);
    pair.post_read(1, 0, 0, LENGTH);
    pair.run();
    assert_eq!(pair.completion_statuses(pair.a), [(1, "RETRY_EXC_ERR")]);
    assert_eq!(pair.counters(pair.a).local_ack_timeout_err, 8, "the probe is no timeout");
}

#[test]
fn a_mode_without_retransmission_does_not_probe() {
    let mut setup = Setup::default();
    setup.settings.foreign_recovery = Recovery::Fatal;
    let mut pair = pair(setup);
    pair.drop_packets(responses(InclusiveRange::exactly(63)), 1);
    pair.post_read(1, 0, 0, LENGTH);
    pair.run();
    assert_eq!(pair.completion_statuses(pair.a), [(1, "RETRY_EXC_ERR")]);
    assert_eq!(read_requests(&pair).iter().map(|(_, length)| length).sum::<u32>(), LENGTH);
}
