//! What is left when the daemon is gone: the rings. Everything that was posted and did not complete is flushed
//! from here, in the card's place, so that nobody waits for ever.

use parking_lot::Mutex;
use softhca_queue::control::Sizes;
use softhca_queue::{
    Completion, CompletionFlags, CompletionOperation, CompletionProducer, CqId, Operation, ReceiveConsumer,
    SendConsumer, Status, Words,
};
use softhca_wire::Qpn;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

/// What completions of a card that is gone say as their vendor error.
const DEVICE_GONE: u32 = 50;

/// The rings of a queue pair, and where they complete.
pub(super) struct Ends {
    pub sizes: Sizes,
    pub send: Option<Words>,
    pub receive: Option<Words>,
    pub send_cq: Option<CqId>,
    pub receive_cq: Option<CqId>,
}

/// All rings of a client.
#[derive(Default)]
pub(super) struct Estate {
    /// The daemon is gone: the card's ends are ours.
    ours: AtomicBool,
    rings: Mutex<Rings>,
}

#[derive(Default)]
struct Rings {
    queues: BTreeMap<CqId, (Words, u32)>,
    queue_pairs: BTreeMap<Qpn, Ends>,
}

impl Estate {
    pub fn is_ours(&self) -> bool {
        self.ours.load(Ordering::Acquire)
    }

    pub fn add_queue(&self, cq: CqId, words: Words, slots: u32) {
        self.rings.lock().queues.insert(cq, (words, slots));
    }

    pub fn remove_queue(&self, cq: CqId) {
        self.rings.lock().queues.remove(&cq);
    }

    pub fn add_queue_pair(&self, number: Qpn, ends: Ends) {
        self.rings.lock().queue_pairs.insert(number, ends);
    }

    pub fn remove_queue_pair(&self, number: Qpn) {
        self.rings.lock().queue_pairs.remove(&number);
    }

    /// Takes the card's place and flushes everything.
    pub fn wind_up(&self) {
        let rings = self.rings.lock();
        self.ours.store(true, Ordering::Release);
        for number in rings.queue_pairs.keys() {
            rings.flush(*number);
        }
    }

    /// Flushes what was posted to one queue pair since.
    pub fn flush(&self, number: Qpn) {
        self.rings.lock().flush(number);
    }
}

impl Rings {
    fn flush(&self, number: Qpn) {
        let Some(ends) = self.queue_pairs.get(&number) else { return };
        let Sizes { sends, receives, entries, inline } = ends.sizes;
        let (entries, inline) = (entries as usize, inline as usize);
        let (mut gathered, mut bytes) = (Vec::new(), Vec::new());
        if let Some(words) = &ends.send {
            let mut ring = SendConsumer::resume(words.clone(), sends, entries, inline);
            ring.hear();
            while let Ok(Some(request)) = ring.take(&mut gathered, &mut bytes) {
                let (id, operation) = match request {
                    Ok(request) => (request.id, reported(&request.operation)),
                    Err(_) => (0, CompletionOperation::Send),
                };
                ring.retire();
                self.complete(ends.send_cq, flushed(number, id, operation));
            }
        }
        if let Some(words) = &ends.receive {
            let mut ring = ReceiveConsumer::resume(words.clone(), receives, entries);
            // Whatever is posted from now on rings, and is flushed at once.
            ring.want_doorbell(true);
            while let Ok(Some(id)) = ring.take(&mut gathered) {
                self.complete(ends.receive_cq, flushed(number, id, CompletionOperation::Receive));
            }
        }
    }

    fn complete(&self, cq: Option<CqId>, completion: Completion) {
        if let Some((words, slots)) = cq.and_then(|cq| self.queues.get(&cq)) {
            // A queue that is full has overflowed, as with any card.
            let _ = CompletionProducer::resume(words.clone(), *slots).push(&completion);
        }
    }
}

fn flushed(queue_pair: Qpn, id: u64, operation: CompletionOperation) -> Completion {
    Completion {
        id,
        status: Status::Flushed,
        operation,
        flags: CompletionFlags::empty(),
        bytes: 0,
        immediate: 0,
        queue_pair,
        source: Qpn::default(),
        service_level: 0,
        vendor_error: DEVICE_GONE,
        timestamp: 0,
    }
}

fn reported(operation: &Operation) -> CompletionOperation {
    match operation {
        Operation::Send(_) => CompletionOperation::Send,
        Operation::Write { .. } => CompletionOperation::Write,
        Operation::Read { .. } => CompletionOperation::Read,
        Operation::CompareSwap { .. } => CompletionOperation::CompareSwap,
        Operation::FetchAdd { .. } => CompletionOperation::FetchAdd,
        Operation::BindWindow(_) => CompletionOperation::BindWindow,
        Operation::LocalInvalidate { .. } => CompletionOperation::LocalInvalidate,
    }
}
