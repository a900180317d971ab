//! Two captures of the same traffic, taken at both ends.

use softhca_trace::join::{Fate, JoinError, join};
use softhca_trace::{CaptureReader, Packet, PacketContents, Record};
use std::net::IpAddr;
use std::path::Path;

fn records(name: &str) -> Vec<Record> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/captures").join(name).with_extension("pcap");
    CaptureReader::open(&path).expect("a capture").map(|record| record.expect("a whole record")).collect()
}

fn source(record: &Record) -> Option<IpAddr> {
    match Packet::new(record, 0).contents {
        PacketContents::Roce(roce) => Some(roce.frame.network.source()),
        _ => None,
    }
}

const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
/// How far the clock of the server is ahead.
const AHEAD_NS: u64 = 1_234_567_000;
const DELAY_NS: u64 = 30_000;

/// The capture as the client takes it, and as the server with another clock takes it.
fn both_ends() -> (Vec<Record>, Vec<Record>) {
    let client: Vec<Record> =
        records("rc_pp").into_iter().filter(|record| source(record).is_some()).collect();
    let at_server = client.iter().map(|record| {
        let mut record = record.clone();
        // What the client sends reaches the server later; what it receives left the server earlier.
        let own = source(&record) == Some(CLIENT);
        record.time_ns = if own { record.time_ns + DELAY_NS } else { record.time_ns - DELAY_NS } + AHEAD_NS;
        record
    });
    let mut server: Vec<Record> = at_server.collect();
    server.sort_by_key(|record| record.time_ns);
    (client, server)
}

#[test]
fn clocks_are_aligned_and_delays_measured() {
    let (client, server) = both_ends();
    let joined = join(&client, &server).expect("common packets");
    assert!(joined.is_symmetric);
    // Times count from the first packet of each capture.
    let starts = server[0].time_ns as i64 - client[0].time_ns as i64;
    assert_eq!(joined.offset_ns, starts - AHEAD_NS as i64);
    assert_eq!(joined.packets.len(), client.len());
    let delay_ns = DELAY_NS as i64;
    assert!(joined.packets.iter().all(|packet| packet.fate == Fate::Arrived { delay_ns }));
    for direction in &joined.directions {
        assert_eq!((direction.min_ns, direction.max_ns, direction.lost), (delay_ns, delay_ns, 0));
    }
    // The order of the files does not matter but for the clock that counts.
    let swapped = join(&server, &client).expect("common packets");
    assert_eq!(swapped.offset_ns, -joined.offset_ns);
    assert!(swapped.packets.iter().all(|packet| packet.fate == Fate::Arrived { delay_ns }));
}

#[test]
fn what_one_end_did_not_get_was_lost_in_between() {
    let (client, mut server) = both_ends();
    let lost = client.iter().position(|record| source(record) == Some(CLIENT)).expect("a request") + 8;
    let lost = (lost..).find(|at| source(&client[*at]) == Some(CLIENT)).expect("a request");
    let gone = Packet::new(&client[lost], 0).to_string();
    server.retain(|record| {
        Packet { time_ns: 0, ..Packet::new(record, 0) }.to_string()
            != Packet { time_ns: 0, ..Packet::new(&client[lost], 0) }.to_string()
    });
    assert_eq!(server.len() + 1, client.len(), "{gone}");
    let joined = join(&client, &server).expect("common packets");
    let odd: Vec<(usize, Fate)> = joined
        .packets
        .iter()
        .filter(|packet| !matches!(packet.fate, Fate::Arrived { .. }))
        .map(|packet| (packet.index, packet.fate))
        .collect();
    // The other end acknowledged it: its capture is incomplete. Without an ACK it would be lost.
    assert!(odd == [(lost, Fate::NotCapturedAtReceiver)] || odd == [(lost, Fate::Lost)], "{odd:?}");
    let text = joined.to_string();
    assert!(text.contains("assume that the shortest delay is the same in both directions"), "{text}");
}

#[test]
fn captures_of_different_traffic_are_rejected() {
    let (client, _) = both_ends();
    assert_eq!(
        join(&client, &records("vt_badrkey")).expect_err("nothing in common"),
        JoinError::NothingInCommon
    );
    assert_eq!(join(&[], &client).expect_err("no packets"), JoinError::NoPackets("first"));
}
