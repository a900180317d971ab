//! What is left when the daemon is gone: the rings. Everything that was posted and did not complete is flushed
//! from here, in the card's place, so that nobody waits for ever.

use parking_lot::Mutex;
use softhca_queue::control::QpCapabilities;
use softhca_queue::{
    Completion, CompletionFlags, CompletionOpcode, CompletionProducer, CompletionStatus, CqId, Operation,
    ReceiveConsumer, SendConsumer, SharedWords,
};
use softhca_wire::Qpn;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

/// What completions of a card that is gone say as their vendor error.
const VENDOR_ERROR_DEVICE_GONE: u32 = 50;

/// The rings of a queue pair, and where they complete.
pub(super) struct QueuePairRings {
    pub capabilities: QpCapabilities,
    pub send_queue: Option<SharedWords>,
    pub recv_queue: Option<SharedWords>,
    pub send_cq: Option<CqId>,
    pub recv_cq: Option<CqId>,
}

/// All rings of a client.
#[derive(Default)]
pub(super) struct OrphanedRings {
    /// The daemon is gone: the card's ends are ours.
    daemon_gone: AtomicBool,
    rings: Mutex<RingTable>,
}

#[derive(Default)]
struct RingTable {
    completion_queues: BTreeMap<CqId, (SharedWords, u32)>,
    queue_pairs: BTreeMap<Qpn, QueuePairRings>,
}

impl OrphanedRings {
    pub fn is_daemon_gone(&self) -> bool {
        self.daemon_gone.load(Ordering::Acquire)
    }

    pub fn add_completion_queue(&self, cq: CqId, words: SharedWords, slots: u32) {
        self.rings.lock().completion_queues.insert(cq, (words, slots));
    }

    pub fn remove_completion_queue(&self, cq: CqId) {
        self.rings.lock().completion_queues.remove(&cq);
    }

    pub fn add_queue_pair(&self, number: Qpn, ends: QueuePairRings) {
        self.rings.lock().queue_pairs.insert(number, ends);
    }

    pub fn remove_queue_pair(&self, number: Qpn) {
        self.rings.lock().queue_pairs.remove(&number);
    }

    /// Takes the card's place and flushes everything.
    pub fn flush_all(&self) {
        let rings = self.rings.lock();
        self.daemon_gone.store(true, Ordering::Release);
        for number in rings.queue_pairs.keys() {
            rings.flush(*number);
        }
    }

    /// Flushes what was posted to one queue pair since.
    pub fn flush(&self, number: Qpn) {
        self.rings.lock().flush(number);
    }
}

impl RingTable {
    fn flush(&self, number: Qpn) {
        let Some(ends) = self.queue_pairs.get(&number) else { return };
        let QpCapabilities {
            max_send_wr: sends,
            max_recv_wr: receives,
            max_sge: entries,
            max_inline_data: inline,
        } = ends.capabilities;
        let (entries, inline) = (entries as usize, inline as usize);
        let (mut gathered, mut bytes) = (Vec::new(), Vec::new());
        if let Some(words) = &ends.send_queue {
            let mut ring = SendConsumer::resume(words.clone(), sends, entries, inline);
            ring.clear_doorbell();
            while let Ok(Some(request)) = ring.dequeue(&mut gathered, &mut bytes) {
                let (id, operation) = match request {
                    Ok(request) => (request.wr_id, completion_operation(&request.operation)),
                    Err(_) => (0, CompletionOpcode::Send),
                };
                ring.retire();
                self.complete(ends.send_cq, flush_completion(number, id, operation));
            }
        }
        if let Some(words) = &ends.recv_queue {
            let mut ring = ReceiveConsumer::resume(words.clone(), receives, entries);
            // Whatever is posted from now on rings, and is flushed at once.
            ring.request_doorbell(true);
            while let Ok(Some(id)) = ring.dequeue(&mut gathered) {
                self.complete(ends.recv_cq, flush_completion(number, id, CompletionOpcode::Receive));
            }
        }
    }

    fn complete(&self, cq: Option<CqId>, completion: Completion) {
        if let Some((words, slots)) = cq.and_then(|cq| self.completion_queues.get(&cq)) {
            // A queue that is full has overflowed, as with any card.
            let _ = CompletionProducer::resume(words.clone(), *slots).push(&completion);
        }
    }
}

fn flush_completion(queue_pair: Qpn, id: u64, operation: CompletionOpcode) -> Completion {
    Completion {
        wr_id: id,
        status: CompletionStatus::WrFlushError,
        opcode: operation,
        flags: CompletionFlags::empty(),
        byte_len: 0,
        imm_data: 0,
        qpn: queue_pair,
        src_qp: Qpn::default(),
        service_level: 0,
        vendor_error: VENDOR_ERROR_DEVICE_GONE,
        timestamp: 0,
    }
}

fn completion_operation(operation: &Operation) -> CompletionOpcode {
    match operation {
        Operation::Send(_) => CompletionOpcode::Send,
        Operation::Write { .. } => CompletionOpcode::Write,
        Operation::Read { .. } => CompletionOpcode::Read,
        Operation::CompareSwap { .. } => CompletionOpcode::CompareSwap,
        Operation::FetchAdd { .. } => CompletionOpcode::FetchAdd,
        Operation::BindMemoryWindow(_) => CompletionOpcode::BindMemoryWindow,
        Operation::LocalInvalidate { .. } => CompletionOpcode::LocalInvalidate,
    }
}
