//! The requester's state: the fetched WQEs and their progress.
//!
//! A packet is a function of (WQE, PSN). The state stores the first PSN of each WQE and three PSNs of progress, so
//! that retransmission is one assignment.

use super::rate_control::RateControl;
use super::wqe_queue::WqeQueue;
use crate::{Instant, Reason};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::time::Duration;
use softhca_queue::SendConsumer;
use softhca_types::{
    CompletionOpcode, CompletionStatus, Operation, SendFlags, SendImmOrInvalidate, Sge, UdDestination,
};
use softhca_wire::{Operation as PacketOperation, Psn};

/// The HCA's copy of a send work request. Fields that every packet touches come first.
#[derive(Default)]
#[repr(C)]
pub(crate) struct SendWqe {
    pub first_psn: Psn,
    /// The number of PSNs; zero for local operations.
    pub packets: u32,
    pub length: u32,
    pub flags: SendFlags,
    pub wr_id: u64,
    pub operation: WqeOperation,
    /// A result that this side determined alone. It is reported after all earlier requests.
    pub outcome: Option<(CompletionStatus, Reason)>,
    /// It is a READ of which a request has asked for a part.
    pub has_parts: bool,
    /// The send sequence number: the index of the message modulo 2^24, from 1.
    pub ssn: u32,
    pub srqn: u32,
    pub sges: Vec<Sge>,
    pub inline_data: Vec<u8>,
    pub datagram: UdDestination,
}

/// The part of a WQE that its completion needs.
#[derive(Clone, Copy)]
pub(crate) struct CompletedWqe {
    pub wr_id: u64,
    pub opcode: CompletionOpcode,
    pub length: u32,
    pub is_signaled: bool,
}

/// [`Operation`] with a default, for recycled WQEs.
#[derive(Clone, Copy)]
pub(crate) struct WqeOperation(pub Operation);

impl Default for WqeOperation {
    fn default() -> Self {
        WqeOperation(Operation::Send(SendImmOrInvalidate::None))
    }
}

impl SendWqe {
    /// Whether the peer responds with more than an ACK.
    #[inline]
    pub fn is_read_or_atomic(&self) -> bool {
        self.operation.0.packet_operation().is_some_and(PacketOperation::is_read_or_atomic)
    }

    #[inline]
    pub fn is_local_operation(&self) -> bool {
        self.operation.0.packet_operation().is_none()
    }

    #[inline]
    pub fn to_completed(&self) -> CompletedWqe {
        CompletedWqe {
            wr_id: self.wr_id,
            opcode: self.operation.0.completion_opcode(),
            length: self.length,
            is_signaled: self.flags.contains(SendFlags::SIGNALED),
        }
    }

    #[inline]
    pub fn is_inline(&self) -> bool {
        self.flags.contains(SendFlags::INLINE)
    }

    /// The PSN after its last.
    #[inline]
    pub fn end_psn(&self) -> Psn {
        self.first_psn.plus(self.packets)
    }
}

/// Fields that every packet touches come first.
#[repr(C)]
pub struct RequesterState {
    /// The WQE to send next: an index into `wqes`, or its length.
    pub wqe_index: usize,
    /// Fetched and not completed, oldest first.
    pub wqes: WqeQueue,
    pub next_psn: Psn,
    /// The first PSN that was never sent.
    pub next_new_psn: Psn,
    /// The oldest unacknowledged PSN.
    pub unacked_psn: Psn,
    /// The packets since the last one with the AckReq bit.
    pub packets_since_ack_request: u32,
    /// The unacknowledged packets that the window of a foreign peer counts.
    pub windowed: u32,
    /// READs and atomics without a response.
    pub outstanding_rd_atomic: u32,
    pub retries_left: u8,
    pub rnr_retries_left: u8,
    /// The requester has retransmitted because of a gap in the responses. Responses that were in flight show the same
    /// gap.
    pub implied_nak_handled: bool,
    /// The process that the queue pair is connected to has ended: the request fails when the ACK timer expires.
    pub peer_gone: bool,
    /// The adaptive retransmissions since the peer's last response.
    pub adaptive_retransmissions: u8,
    /// The PSN of the last RNR retry, until a sequence NAK for it arrives. For the packets that followed the rejected
    /// one, rxe sends a sequence NAK that may arrive after the wait.
    pub rnr_retried_psn: Option<Psn>,
    /// The send queue drained event was raised.
    pub is_drained: bool,
    /// The limit sequence number: the last message for which the peer has a receive; `None` if it sends no credits.
    pub lsn: Option<u32>,
    /// The end of the RNR wait.
    pub rnr_wait_until: Option<Instant>,
    /// The present ACK timeout, which follows from attributes, settings and the peer. Every message uses it.
    pub ack_timeout: Option<Duration>,
    /// The expiry of the ACK timer.
    pub ack_deadline: Option<Instant>,
    /// The ACK timer expires early, to ask for the tail of a READ.
    pub is_tail_probe_due: bool,
    /// The tail was asked for since the last progress.
    pub is_tail_probed: bool,
    /// Present from the first CNP on.
    pub rate_control: Option<Box<dyn RateControl>>,
    pub ring: Option<SendConsumer>,
    /// The PSN of the next WQE to fetch.
    pub next_wqe_psn: Psn,
    /// The SSN of the last fetched message.
    pub ssn: u32,
}

impl RequesterState {
    pub fn new(ring: Option<SendConsumer>) -> RequesterState {
        let zero = Psn::new(0);
        RequesterState {
            ring,
            rate_control: None,
            wqes: WqeQueue::default(),
            wqe_index: 0,
            next_psn: zero,
            next_new_psn: zero,
            next_wqe_psn: zero,
            unacked_psn: zero,
            outstanding_rd_atomic: 0,
            ssn: 0,
            lsn: Some(0),
            packets_since_ack_request: 0,
            windowed: 0,
            retries_left: 0,
            rnr_retries_left: 0,
            implied_nak_handled: false,
            peer_gone: false,
            adaptive_retransmissions: 0,
            rnr_retried_psn: None,
            rnr_wait_until: None,
            ack_deadline: None,
            is_tail_probe_due: false,
            is_tail_probed: false,
            ack_timeout: None,
            is_drained: false,
        }
    }

    /// Discards the progress; PSNs start at `psn`.
    pub fn start_at(&mut self, psn: Psn) {
        self.next_psn = psn;
        self.next_new_psn = psn;
        self.next_wqe_psn = psn;
        self.unacked_psn = psn;
        self.outstanding_rd_atomic = 0;
        self.ssn = 0;
        self.lsn = Some(0);
        self.packets_since_ack_request = 0;
        self.implied_nak_handled = false;
        self.peer_gone = false;
        self.adaptive_retransmissions = 0;
        self.rnr_retried_psn = None;
        self.rnr_wait_until = None;
        self.ack_deadline = None;
        self.is_drained = false;
    }

    /// Whether unacknowledged packets exist.
    #[inline]
    pub fn has_outstanding(&self) -> bool {
        self.unacked_psn != self.next_new_psn
    }

    /// Whether `psn` was sent and is not acknowledged.
    #[inline]
    pub fn is_outstanding_psn(&self, psn: Psn) -> bool {
        psn.is_within(self.unacked_psn, self.next_new_psn.since(self.unacked_psn))
    }

    /// Whether a response to `psn` skips a READ or atomic without a response.
    pub fn skips_rd_atomic_response(&self, psn: Psn) -> bool {
        let is_rd_atomic = |wqe: &&SendWqe| wqe.is_read_or_atomic() && wqe.packets > 0;
        let due = |wqe: &SendWqe| match self.unacked_psn.is_before(wqe.first_psn) {
            true => wqe.first_psn,
            false => self.unacked_psn,
        };
        self.is_outstanding_psn(psn)
            && self
                .wqes
                .iter()
                .take_while(|wqe| wqe.packets == 0 || !psn.is_before(wqe.first_psn))
                .find(is_rd_atomic)
                .is_some_and(|wqe| due(wqe).is_before(psn))
    }

    /// Whether a packet of this WQE was ever sent.
    #[inline]
    pub fn is_started(&self, wqe: &SendWqe) -> bool {
        wqe.first_psn.is_before(self.next_new_psn)
    }

    /// The index of the WQE that contains `psn`.
    #[inline]
    pub fn find_wqe(&self, psn: Psn) -> Option<usize> {
        self.wqes.iter().position(|wqe| psn.is_within(wqe.first_psn, wqe.packets))
    }

    /// Continues to send at `psn`.
    pub fn rewind_to(&mut self, psn: Psn) {
        self.next_psn = psn;
        self.wqe_index = self.find_wqe(psn).expect("only sent packets are retransmitted");
        if psn.is_before(self.unacked_psn) {
            self.unacked_psn = psn;
        }
        let sent = self.wqes.iter().take(self.wqe_index);
        self.outstanding_rd_atomic =
            sent.filter(|wqe| wqe.is_read_or_atomic() && wqe.outcome.is_none()).count() as u32;
        self.packets_since_ack_request = 0;
    }

    /// Whether the peer may lack a receive for `wqe`: the requester sends only its first packet until that is
    /// acknowledged.
    pub fn exceeds_lsn(&self, wqe: &SendWqe) -> bool {
        let beyond = |limit: u32| (wqe.ssn.wrapping_sub(limit) << 8) as i32 > 0;
        wqe.operation.0.takes_receive()
            && self.lsn.is_some_and(beyond)
            && !wqe.first_psn.is_before(self.unacked_psn)
    }

    /// Removes the oldest WQE and returns its slot to the application.
    pub fn pop_wqe(&mut self) -> Option<CompletedWqe> {
        let completed = self.wqes.front()?.to_completed();
        self.wqes.pop_front();
        self.wqe_index = self.wqe_index.saturating_sub(1);
        if let Some(ring) = &mut self.ring {
            ring.retire();
        }
        Some(completed)
    }
}
