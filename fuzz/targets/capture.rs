//! Capture files: parsing, text and JSON output of `softhca trace`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use softhca_trace::{CaptureReader, Packet, PacketCounts};

fuzz_target!(|bytes: &[u8]| {
    let Ok(capture) = CaptureReader::new(bytes) else { return };
    let mut counts = PacketCounts::default();
    for record in capture.map_while(Result::ok) {
        let packet = Packet::new(&record, 0);
        counts.add(&packet);
        assert!(!packet.to_string().contains('\n'));
        serde_json::to_string(&packet).expect("a packet serializes");
    }
    assert!(counts.roce() <= counts.packets);
});
