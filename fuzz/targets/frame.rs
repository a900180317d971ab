//! Frames with every first header: the first byte selects it, the rest is the frame.
//!
//! A parsed frame must emit the same bytes and print as one line. InfiniBand packets are tried too, with a VCRC that is made correct.

#![no_main]

use libfuzzer_sys::fuzz_target;
use softhca_wire::{EtherType, FirstHeader, Icrc, LocalPacket, Pfc, RoceFrame, TransportPacket, Vcrc};

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, bytes)) = bytes.split_first() else { return };
    let first = match choice % 3 {
        0 => FirstHeader::Ethernet,
        1 => FirstHeader::Ip,
        _ => FirstHeader::Payload(EtherType::ROCE),
    };
    if let Ok(pause) = Pfc::parse(bytes) {
        assert_eq!(Pfc::parse(&pause.emit()), Ok(pause));
    }
    let local = [bytes, &Vcrc::compute(bytes).0].concat();
    if let Ok(local) = LocalPacket::parse(&local) {
        assert!(!local.to_string().contains('\n'));
        let (transport, _) = Icrc::split(local.packet).expect("it was checked");
        let mut written = Vec::new();
        LocalPacket::emit(&local.lrh, local.grh.as_ref(), transport, &mut written).expect("it was as long");
        let again = LocalPacket::parse(&written).expect("it was just written");
        assert!(again.icrc_is_valid() && (again.lrh, again.grh) == (local.lrh, local.grh));
    }
    let Ok(frame) = RoceFrame::parse(first, bytes) else { return };
    assert_eq!(frame.to_vec(), bytes);
    assert!(!frame.to_string().contains('\n'));
    let valid = frame.icrc_is_valid();
    if let Some(addressing) = frame.network.addressing() {
        let found = Icrc::recover_identification(&addressing, frame.packet, 1 << 16);
        assert!(!valid || found.is_some() || addressing.source.is_ipv4());
    }
    if let Ok(transport) = frame.transport() {
        let mut written = vec![0; transport.len()];
        assert_eq!(transport.emit(&mut written), written.len());
        assert_eq!(TransportPacket::parse(&written), Ok(transport));
    }
});
