//! A hostile client of the shared rings: it writes arbitrary words between any two accesses of the HCA.

#![no_main]

use libfuzzer_sys::fuzz_target;
use softhca_queue::{CompletionProducer, DoorbellConsumer, DoorbellProducer, ReceiveConsumer, ReceiveProducer, SendConsumer, SendProducer, SharedWords};
use std::sync::atomic::Ordering;

fuzz_target!(|steps: Vec<(u8, u8, u64)>| {
    let words = SharedWords::heap(256);
    let mut send = SendConsumer::new(words.clone(), 4, 2, 16);
    let mut receive = ReceiveConsumer::new(words.clone(), 4, 2);
    let mut doorbell = DoorbellConsumer::new(words.clone(), 8);
    let completions = CompletionProducer::new(words.clone(), 4);
    assert!(SendProducer::layout(4, 2, 16).words() <= 256 && ReceiveProducer::layout(4, 2).words() <= 256);
    assert!(DoorbellProducer::words(8) <= 256);
    let (mut entries, mut inline, mut rung) = (Vec::new(), Vec::new(), Vec::new());
    for (action, index, value) in steps {
        words[usize::from(index)].store(value, Ordering::Relaxed);
        match action % 7 {
            0 => {
                if let Ok(Some(_)) = send.dequeue(&mut entries, &mut inline) {
                    send.retire();
                }
            }
            1 => drop(receive.dequeue(&mut entries)),
            2 => rung.extend(doorbell.drain()),
            3 => send.reset(),
            4 => receive.reset(),
            5 => assert_eq!(completions.pending(), 0),
            _ => send.clear_doorbell(),
        }
        rung.clear();
    }
});
