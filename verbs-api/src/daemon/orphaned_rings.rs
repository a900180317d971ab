//! The rings of a client whose daemon is gone. The library completes all outstanding work requests with a flush
//! error in place of the HCA, so that no caller waits for ever.

use parking_lot::Mutex;
use softhca_engine::{QpCapabilities, QpInitAttributes};
use softhca_queue::{CompletionProducer, QpRingLayout, SharedWords};
use softhca_types::{Completion, CompletionFlags, CompletionOpcode, CompletionStatus, CqId};
use softhca_wire::Qpn;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

/// The vendor error of completions after the loss of the daemon.
const VENDOR_ERROR_DEVICE_GONE: u32 = 50;

/// The rings of a queue pair.
pub(super) struct QueuePairRings {
    pub init: QpInitAttributes,
    pub capabilities: QpCapabilities,
    pub words: SharedWords,
}

/// All rings of a client.
#[derive(Default)]
pub(super) struct OrphanedRings {
    /// The daemon is gone: the library owns the HCA's side of the rings.
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

    pub fn add_completion_queue(&self, cq: CqId, words: SharedWords, cqe: u32) {
        self.rings.lock().completion_queues.insert(cq, (words, cqe));
    }

    pub fn remove_completion_queue(&self, cq: CqId) {
        self.rings.lock().completion_queues.remove(&cq);
    }

    pub fn add_queue_pair(&self, qpn: Qpn, rings: QueuePairRings) {
        self.rings.lock().queue_pairs.insert(qpn, rings);
    }

    pub fn remove_queue_pair(&self, qpn: Qpn) {
        self.rings.lock().queue_pairs.remove(&qpn);
    }

    /// Takes over the HCA's side of the rings and flushes all queue pairs.
    pub fn flush_all(&self) {
        let rings = self.rings.lock();
        self.daemon_gone.store(true, Ordering::Release);
        for qpn in rings.queue_pairs.keys() {
            rings.flush(*qpn);
        }
    }

    /// Flushes the work requests that were posted to one queue pair since.
    pub fn flush(&self, qpn: Qpn) {
        self.rings.lock().flush(qpn);
    }
}

impl RingTable {
    fn flush(&self, qpn: Qpn) {
        let Some(QueuePairRings { init, capabilities, words }) = self.queue_pairs.get(&qpn) else { return };
        let (send, recv) = QpRingLayout { init, capabilities }.consumers(words, true);
        let (mut sge, mut inline) = (Vec::new(), Vec::new());
        if let Some(mut ring) = send {
            ring.clear_doorbell();
            while let Ok(Some(request)) = ring.dequeue(&mut sge, &mut inline) {
                let (wr_id, opcode) = match request {
                    Ok(request) => (request.wr_id, request.operation.completion_opcode()),
                    Err(_) => (0, CompletionOpcode::Send),
                };
                ring.retire();
                self.complete(init.send_cq, flush_completion(qpn, wr_id, opcode));
            }
        }
        if let Some(mut ring) = recv {
            // Receives that are posted from now on ring the doorbell, and are flushed at once.
            ring.request_doorbell(true);
            while let Ok(Some(wr_id)) = ring.dequeue(&mut sge) {
                self.complete(init.recv_cq, flush_completion(qpn, wr_id, CompletionOpcode::Receive));
            }
        }
    }

    fn complete(&self, cq: Option<CqId>, completion: Completion) {
        if let Some((words, cqe)) = cq.and_then(|cq| self.completion_queues.get(&cq)) {
            // A full queue overflows, as on any HCA.
            let _ = CompletionProducer::resume(words.clone(), *cqe).push(&completion);
        }
    }
}

fn flush_completion(qpn: Qpn, wr_id: u64, opcode: CompletionOpcode) -> Completion {
    Completion {
        wr_id,
        status: CompletionStatus::WrFlushError,
        opcode,
        flags: CompletionFlags::empty(),
        byte_len: 0,
        imm_data: 0,
        qpn,
        src_qp: Qpn::default(),
        service_level: 0,
        route: Default::default(),
        vendor_error: VENDOR_ERROR_DEVICE_GONE,
        timestamp: 0,
    }
}
