//! The responder's state: the expected PSN, the message in progress and the pending responses.

use crate::PdId;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use softhca_queue::{ReceiveConsumer, Sge};
use softhca_wire::{Operation, Psn, Reth, Syndrome};

/// A receive WQE that was fetched from its queue.
#[derive(Default)]
pub(crate) struct ReceiveWqe {
    pub wr_id: u64,
    pub sges: Vec<Sge>,
    pub capacity: u64,
}

/// A message that is not complete.
#[derive(Clone, Copy)]
pub(crate) struct InProgressMessage {
    pub operation: Operation,
    pub first_psn: Psn,
    pub bytes_received: u64,
    /// The RETH of a WRITE.
    pub reth: Option<Reth>,
}

/// A response that waits for transmission.
#[derive(Clone, Copy)]
pub(crate) enum PendingResponse {
    Ack { psn: Psn, syndrome: Syndrome, msn: u32 },
    ReadResponse { first: Psn, next: Psn, packets: u32, reth: Reth, pd: PdId, msn: u32, is_duplicate: bool },
    AtomicResponse { psn: Psn, original: u64, msn: u32, is_duplicate: bool },
}

/// Fields that every packet touches come first.
#[repr(C)]
pub(crate) struct ResponderState {
    pub expected_psn: Psn,
    /// The number of completed messages modulo 2^24.
    pub msn: u32,
    /// A NAK for the expected PSN was sent; the responder accepts only that PSN.
    pub nak_sent: bool,
    /// The communication established event was raised.
    pub communication_established: bool,
    pub pending_responses: VecDeque<PendingResponse>,
    pub in_progress_message: Option<InProgressMessage>,
    /// The receive WQE of the message in progress, or of an aborted one.
    pub receive_wqe: Option<ReceiveWqe>,
    pub ring: Option<ReceiveConsumer>,
    pub spare_receive_wqes: Vec<ReceiveWqe>,
    /// Results of atomics, to answer duplicates.
    pub atomic_results: VecDeque<(Psn, u64)>,
}

impl ResponderState {
    pub fn new(ring: Option<ReceiveConsumer>) -> ResponderState {
        ResponderState {
            ring,
            expected_psn: Psn::new(0),
            msn: 0,
            in_progress_message: None,
            receive_wqe: None,
            spare_receive_wqes: Vec::new(),
            pending_responses: VecDeque::new(),
            atomic_results: VecDeque::new(),
            nak_sent: false,
            communication_established: false,
        }
    }

    pub fn start_at(&mut self, psn: Psn) {
        self.expected_psn = psn;
        self.msn = 0;
        self.in_progress_message = None;
        self.pending_responses.clear();
        self.atomic_results.clear();
        self.nak_sent = false;
        self.communication_established = false;
    }

    /// READs and atomics that wait for their first response.
    pub fn pending_rd_atomic(&self) -> usize {
        self.pending_responses
            .iter()
            .filter(|o| {
                matches!(
                    o,
                    PendingResponse::ReadResponse { is_duplicate: false, .. }
                        | PendingResponse::AtomicResponse { is_duplicate: false, .. }
                )
            })
            .count()
    }

    pub fn increment_msn(&mut self) {
        self.msn = (self.msn + 1) & 0xff_ffff;
    }
}
