//! Packets of Linux rxe are parsed and emitted again byte for byte.

use softhca_tests::captures_folder;
use softhca_trace::{CaptureReader, Record};
use softhca_wire::cm::{Datagram, Message};
use softhca_wire::{Icrc, Malformed, Qpn, RoceFrame, TransportPacket};
use std::path::PathBuf;

fn files() -> Vec<PathBuf> {
    let folder = std::fs::read_dir(captures_folder()).expect("the folder of captures");
    let paths = folder.map(|entry| entry.expect("a directory entry").path());
    let mut files: Vec<_> = paths.filter(|path| path.extension().is_some_and(|end| end == "pcap")).collect();
    files.sort();
    files
}

fn records() -> impl Iterator<Item = (String, Record)> {
    files().into_iter().flat_map(|path| {
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let capture = CaptureReader::open(&path).expect("a capture");
        capture.map(move |record| (name.clone(), record.expect("a whole record")))
    })
}

/// The frame emitted from the parsed values alone.
fn rebuilt(frame: &RoceFrame<'_>, transport: &TransportPacket<'_>) -> Vec<u8> {
    let mut packet = vec![0; transport.len()];
    transport.emit(&mut packet);
    let icrc = RoceFrame { packet: &[&packet[..], &[0; 4]].concat(), ..*frame }.expected_icrc();
    packet.extend(icrc.0);
    RoceFrame { packet: &packet, ..*frame }.to_vec()
}

#[test]
fn every_rxe_frame_round_trips_byte_for_byte() {
    let (mut roce, mut other) = (0, 0);
    for (name, record) in records() {
        let frame = match record.frame() {
            Ok(frame) => frame,
            Err(Malformed::NotRoce { .. }) => {
                other += 1;
                continue;
            }
            Err(reason) => panic!("{name} at {}: {reason}", record.offset),
        };
        let transport = frame.transport().unwrap_or_else(|reason| panic!("{name}: {reason}: {frame:?}"));
        assert!(frame.icrc_is_valid(), "{name}: {frame}");
        assert_eq!(rebuilt(&frame, &transport), record.data, "{name}: {frame}");
        roce += 1;
    }
    assert_eq!((files().len(), roce, other), (54, 2937, 60));
}

#[test]
fn the_ipv4_identification_is_recovered_from_the_icrc() {
    let mut found = 0;
    for (_, record) in records() {
        let Ok(frame) = record.frame() else { continue };
        let addressing = frame.network.addressing().expect("RoCEv2");
        let blind = softhca_wire::AddressHeaders { identification: 0, ..addressing };
        let identified = Icrc::recover_identification(&blind, frame.packet, 1 << 16);
        assert_eq!(identified, Some(addressing.identification), "{frame}");
        found += 1;
    }
    assert_eq!(found, 2937);
}

#[test]
fn every_rxe_cm_message_round_trips_byte_for_byte() {
    let mut seen = std::collections::BTreeMap::new();
    for (name, record) in records() {
        let Ok(frame) = record.frame() else { continue };
        let transport = frame.transport().expect("a transport packet");
        if transport.header.bth.destination_qp != Qpn::GSI {
            continue;
        }
        let datagram = Datagram::parse(transport.payload).unwrap_or_else(|reason| panic!("{name}: {reason}"));
        assert_eq!(datagram.emit(), transport.payload, "{name}: {datagram}");
        let addresses = match &datagram.message {
            Message::Req(req) => req.rdma_cm_header().map(|header| (header, req.private_data.0.to_vec())),
            Message::SidrReq(req) => req.rdma_cm_header().map(|header| (header, req.private_data.0.to_vec())),
            _ => None,
        };
        if let Some((header, private_data)) = addresses {
            let header = header.unwrap_or_else(|reason| panic!("{name}: {reason}"));
            assert_eq!(header.emit(), private_data[..36]);
            assert_eq!(header.source, frame.network.source());
            assert_eq!(header.destination, frame.network.destination());
        }
        *seen.entry(datagram.message.name()).or_insert(0) += 1;
    }
    let expected = [
        ("DREP", 8),
        ("DREQ", 9),
        ("REJ", 1),
        ("REP", 8),
        ("REQ", 13),
        ("RTU", 8),
        ("SIDR_REP", 2),
        ("SIDR_REQ", 2),
    ];
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), expected);
}
