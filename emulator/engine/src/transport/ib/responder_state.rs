//! The responder's state: the expected PSN, the message in progress and the pending responses.

use crate::{Instant, PdId};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use softhca_queue::ReceiveConsumer;
use softhca_types::{ReceivedRoute, Sge};
use softhca_wire::{Operation, Psn, Qpn, Reth, Syndrome};

/// How far a request may be ahead of the expected PSN: about the packets that the grants of a receive buffer cover. A burst
/// of lost packets is shorter, so that a packet beyond is forged, stale, or behind the lost request of a READ that is
/// longer; the ACK timeout covers the last case. Without this limit one packet with a random PSN would end every second
/// connection.
pub(crate) const PEER_WINDOW: i32 = 2048;

/// A receive WQE that was fetched from its queue.
#[derive(Default)]
pub(crate) struct ReceiveWqe {
    pub wr_id: u64,
    pub sges: Vec<Sge>,
    pub capacity: u64,
}

/// The sender of a datagram; zero for messages of connections.
#[derive(Clone, Copy, Default)]
pub(crate) struct ReceivedFrom {
    pub qpn: Qpn,
    pub service_level: u8,
    pub route: ReceivedRoute,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PendingResponse {
    Ack { psn: Psn, syndrome: Syndrome, msn: u32 },
    ReadResponse { first: Psn, next: Psn, packets: u32, reth: Reth, pd: PdId, msn: u32, is_duplicate: bool },
    AtomicResponse { psn: Psn, original: u64, msn: u32, is_duplicate: bool },
}

/// A READ reads memory over a time, and each cache line at some moment of it.
#[derive(Clone, Copy)]
pub(crate) struct ReadInProgress {
    /// The result of [`Memory::start_read`](crate::Memory::start_read).
    pub since: u64,
    /// When the first response is sent.
    pub ready_at: Instant,
}

/// Fields that every packet touches come first.
#[repr(C)]
pub struct ResponderState {
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
    /// The time of its last CNP.
    pub last_cnp_at: Option<Instant>,
    pub spare_receive_wqes: Vec<ReceiveWqe>,
    /// Results of atomics, to answer duplicates.
    pub atomic_results: VecDeque<(Psn, u64)>,
    /// The READ that is being executed, on a device whose placement is not in order.
    pub read_in_progress: Option<ReadInProgress>,
}

impl ResponderState {
    pub fn new(ring: Option<ReceiveConsumer>) -> ResponderState {
        ResponderState {
            ring,
            last_cnp_at: None,
            expected_psn: Psn::new(0),
            msn: 0,
            in_progress_message: None,
            receive_wqe: None,
            spare_receive_wqes: Vec::new(),
            pending_responses: VecDeque::new(),
            atomic_results: VecDeque::new(),
            nak_sent: false,
            communication_established: false,
            read_in_progress: None,
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
        self.read_in_progress = None;
    }

    /// READs and atomics that wait for their first response.
    pub fn pending_rd_atomic(&self) -> usize {
        let is_first = |response: &&PendingResponse| match response {
            PendingResponse::Ack { .. } => false,
            PendingResponse::ReadResponse { is_duplicate, .. }
            | PendingResponse::AtomicResponse { is_duplicate, .. } => !is_duplicate,
        };
        self.pending_responses.iter().filter(is_first).count()
    }

    /// Queues an ACK or a NAK.
    pub fn queue_ack(&mut self, psn: Psn, syndrome: Syndrome) {
        self.pending_responses.push_back(PendingResponse::Ack { psn, syndrome, msn: self.msn });
    }

    /// Extends the last pending response to `psn`, if it is an ACK.
    pub fn coalesce_ack(&mut self, psn: Psn) -> bool {
        match self.pending_responses.back_mut() {
            Some(PendingResponse::Ack { psn: last, syndrome: Syndrome::Ack(_), msn }) => {
                (*last, *msn) = (psn, self.msn);
                true
            }
            _ => false,
        }
    }

    /// Queues the READ responses from `psn` on again: rewinds responses that are in progress, or queues new ones.
    pub fn replay_read_response(&mut self, psn: Psn, count: u32, requested: Reth, pd: PdId) {
        for response in &mut self.pending_responses {
            if let PendingResponse::ReadResponse { first, next, packets, reth, .. } = response
                && psn.is_within(*first, *packets)
            {
                // The response to a request starts with a FIRST or ONLY packet, independent of earlier responses.
                if psn.is_before(*next) {
                    (*first, *next, *packets, *reth) = (psn, psn, count, requested);
                }
                return;
            }
        }
        self.pending_responses.push_back(PendingResponse::ReadResponse {
            first: psn,
            next: psn,
            packets: count,
            reth: requested,
            pd,
            msn: self.msn,
            is_duplicate: true,
        });
    }

    pub fn increment_msn(&mut self) {
        self.msn = (self.msn + 1) & 0xff_ffff;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use softhca_wire::{NakCode, RemoteKey};

    const RETH: Reth = Reth { virtual_address: 0x1000, rkey: RemoteKey(1), dma_length: 4096 };
    const NAK: Syndrome = Syndrome::Nak(NakCode::PsnSequenceError);

    fn read(first: u32, next: u32, packets: u32, is_duplicate: bool) -> PendingResponse {
        let (first, next, pd, msn) = (Psn::new(first), Psn::new(next), PdId(1), 0);
        PendingResponse::ReadResponse { first, next, packets, reth: RETH, pd, msn, is_duplicate }
    }

    #[test]
    fn an_ack_is_coalesced_only_with_an_ack_at_the_end_of_the_queue() {
        let mut responder = ResponderState::new(None);
        assert!(!responder.coalesce_ack(Psn::new(1)));
        responder.queue_ack(Psn::new(1), Syndrome::ACK);
        responder.increment_msn();
        assert!(responder.coalesce_ack(Psn::new(5)));
        let ack = PendingResponse::Ack { psn: Psn::new(5), syndrome: Syndrome::ACK, msn: 1 };
        assert_eq!(responder.pending_responses, [ack]);
        responder.queue_ack(Psn::new(6), NAK);
        assert!(!responder.coalesce_ack(Psn::new(7)), "an ACK must not replace a NAK");
        responder.pending_responses.push_back(read(8, 8, 1, false));
        assert!(!responder.coalesce_ack(Psn::new(9)), "an ACK must not overtake a READ response");
    }

    #[test]
    fn duplicates_do_not_count_against_the_rd_atomic_limit() {
        let mut responder = ResponderState::new(None);
        responder.queue_ack(Psn::new(0), Syndrome::ACK);
        responder.pending_responses.push_back(read(1, 1, 1, false));
        responder.pending_responses.push_back(read(2, 2, 1, true));
        let (psn, original, msn) = (Psn::new(3), 9, 0);
        responder.pending_responses.push_back(PendingResponse::AtomicResponse {
            psn,
            original,
            msn,
            is_duplicate: false,
        });
        assert_eq!(responder.pending_rd_atomic(), 2);
    }

    #[test]
    fn a_duplicate_read_rewinds_the_response_in_progress() {
        let mut responder = ResponderState::new(None);
        responder.pending_responses.push_back(read(10, 13, 8, false));
        responder.replay_read_response(Psn::new(15), 3, RETH, PdId(1));
        assert_eq!(responder.pending_responses, [read(10, 13, 8, false)], "PSN 15 is still to be sent");
        responder.replay_read_response(Psn::new(11), 7, RETH, PdId(1));
        assert_eq!(responder.pending_responses, [read(11, 11, 7, false)]);
        responder.replay_read_response(Psn::new(4), 2, RETH, PdId(1));
        assert_eq!(responder.pending_responses, [read(11, 11, 7, false), read(4, 4, 2, true)]);
    }

    #[test]
    fn the_msn_wraps_after_24_bits() {
        let mut responder = ResponderState::new(None);
        responder.msn = 0xff_ffff;
        responder.increment_msn();
        assert_eq!(responder.msn, 0);
    }
}
