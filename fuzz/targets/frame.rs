//! Frames of every link type: the first byte chooses it, the rest is the frame.
//!
//! What is read must be written again the same, and must have a line to print.

#![no_main]

use libfuzzer_sys::fuzz_target;
use softhca_wire::{EtherType, Frame, Icrc, Link, Pfc, Transport};

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, bytes)) = bytes.split_first() else { return };
    let link = match choice % 3 {
        0 => Link::Ethernet,
        1 => Link::Ip,
        _ => Link::Payload(EtherType::ROCE),
    };
    if let Ok(pause) = Pfc::parse(bytes) {
        assert_eq!(Pfc::parse(&pause.emit()), Ok(pause));
    }
    let Ok(frame) = Frame::parse(link, bytes) else { return };
    assert_eq!(frame.to_vec(), bytes);
    assert!(!frame.to_string().contains('\n'));
    let intact = frame.is_intact();
    if let Some(envelope) = frame.network.envelope() {
        let found = Icrc::identify(&envelope, frame.packet, 1 << 16);
        assert!(!intact || found.is_some() || envelope.source.is_ipv4());
    }
    if let Ok(transport) = frame.transport() {
        let mut written = vec![0; transport.len()];
        assert_eq!(transport.emit(&mut written), written.len());
        assert_eq!(Transport::parse(&written), Ok(transport));
    }
});
