//! Capture files, up to the lines and objects that `softhca trace` prints.

#![no_main]

use libfuzzer_sys::fuzz_target;
use softhca_trace::{Capture, Packet, Tally};

fuzz_target!(|bytes: &[u8]| {
    let Ok(capture) = Capture::new(bytes) else { return };
    let mut tally = Tally::default();
    for record in capture.map_while(Result::ok) {
        let packet = Packet::new(&record, 0);
        tally.count(&packet);
        assert!(!packet.to_string().contains('\n'));
        serde_json::to_string(&packet).expect("every packet has an object");
    }
    assert!(tally.roce() <= tally.packets);
});
