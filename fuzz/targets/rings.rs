//! What a hostile client can do to the rings that it shares with a card: any words, changed between any two
//! looks of the card.

#![no_main]

use libfuzzer_sys::fuzz_target;
use softhca_queue::{
    CompletionProducer, DoorbellConsumer, DoorbellProducer, ReceiveConsumer, ReceiveProducer, SendConsumer,
    SendProducer, Words,
};
use std::sync::atomic::Ordering;

fuzz_target!(|steps: Vec<(u8, u8, u64)>| {
    let words = Words::heap(256);
    let mut send = SendConsumer::new(words.clone(), 4, 2, 16);
    let mut receive = ReceiveConsumer::new(words.clone(), 4, 2);
    let mut doorbell = DoorbellConsumer::new(words.clone(), 8);
    let completions = CompletionProducer::new(words.clone(), 4);
    assert!(SendProducer::shape(4, 2, 16).words() <= 256 && ReceiveProducer::shape(4, 2).words() <= 256);
    assert!(DoorbellProducer::words(8) <= 256);
    let (mut entries, mut inline, mut heard) = (Vec::new(), Vec::new(), Vec::new());
    for (action, index, value) in steps {
        words[usize::from(index)].store(value, Ordering::Relaxed);
        match action % 7 {
            0 => {
                if let Ok(Some(_)) = send.take(&mut entries, &mut inline) {
                    send.retire();
                }
            }
            1 => drop(receive.take(&mut entries)),
            2 => doorbell.drain(&mut heard),
            3 => send.reset(),
            4 => receive.reset(),
            5 => assert_eq!(completions.waiting(), 0),
            _ => send.hear(),
        }
        heard.clear();
    }
});
