//! The sending half of a queue pair: work requests that were taken and how far they got.
//!
//! A packet is a function of (work request, PSN): what is stored is where each request's PSNs begin and
//! three PSNs of progress. Going back is one assignment.

use crate::{Instant, Reason};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use softhca_queue::{
    CompletionOpcode, CompletionStatus, Operation, SendConsumer, SendFlags, SendImmOrInvalidate, Sge,
    UdDestination,
};
use softhca_wire::Psn;

/// A send work request in the card's private copy. What every packet touches stands first.
#[derive(Default)]
#[repr(C)]
pub(crate) struct SendWqe {
    pub first_psn: Psn,
    /// PSNs that it takes; none for local operations.
    pub packets: u32,
    pub length: u32,
    pub flags: SendFlags,
    pub wr_id: u64,
    pub operation: WqeOperation,
    /// Decided by this side alone; reported when every earlier request has completed.
    pub outcome: Option<(CompletionStatus, Reason)>,
    /// Its place among all messages of the queue pair, modulo 2^24, from 1.
    pub ssn: u32,
    pub srqn: u32,
    pub sges: Vec<Sge>,
    pub inline_data: Vec<u8>,
    pub datagram: UdDestination,
}

/// [`Operation`] with a default, for recycled slots.
#[derive(Clone, Copy)]
pub(crate) struct WqeOperation(pub Operation);

impl Default for WqeOperation {
    fn default() -> Self {
        WqeOperation(Operation::Send(SendImmOrInvalidate::None))
    }
}

impl SendWqe {
    /// Whether the peer answers with more than an acknowledgement.
    #[inline]
    pub fn is_read_or_atomic(&self) -> bool {
        matches!(
            self.operation.0,
            Operation::Read { .. } | Operation::CompareSwap { .. } | Operation::FetchAdd { .. }
        )
    }

    #[inline]
    pub fn is_local_operation(&self) -> bool {
        matches!(self.operation.0, Operation::BindMemoryWindow(_) | Operation::LocalInvalidate { .. })
    }

    #[inline]
    pub fn is_inline(&self) -> bool {
        self.flags.contains(SendFlags::INLINE)
    }

    /// The PSN behind its last.
    #[inline]
    pub fn end_psn(&self) -> Psn {
        self.first_psn.plus(self.packets)
    }

    pub fn completion_operation(&self) -> CompletionOpcode {
        match self.operation.0 {
            Operation::Send(_) => CompletionOpcode::Send,
            Operation::Write { .. } => CompletionOpcode::Write,
            Operation::Read { .. } => CompletionOpcode::Read,
            Operation::CompareSwap { .. } => CompletionOpcode::CompareSwap,
            Operation::FetchAdd { .. } => CompletionOpcode::FetchAdd,
            Operation::BindMemoryWindow(_) => CompletionOpcode::BindMemoryWindow,
            Operation::LocalInvalidate { .. } => CompletionOpcode::LocalInvalidate,
        }
    }
}

/// What every packet touches stands first.
#[repr(C)]
pub(crate) struct RequesterState {
    /// The work whose packets are sent next: an index into `works`, its length if none.
    pub wqe_index: usize,
    /// Taken and not completed, oldest first.
    pub wqes: VecDeque<SendWqe>,
    /// The next PSN to send.
    pub next_psn: Psn,
    /// The first PSN that was never sent.
    pub next_new_psn: Psn,
    /// The oldest PSN that nobody acknowledged.
    pub unacked_psn: Psn,
    /// Packets since the last acknowledgement request.
    pub packets_since_ack_request: u32,
    /// Reads and atomics that were sent and are not answered.
    pub outstanding_rd_atomic: u32,
    pub retries_left: u8,
    pub rnr_retries_left: u8,
    /// What a gap in the responses skipped was asked for again; the responses that were under way before show
    /// the same gap.
    pub implied_nak_handled: bool,
    /// The drained event was raised.
    pub is_drained: bool,
    /// The last message that the peer's receives cover; none if the peer does not tell.
    pub lsn: Option<u32>,
    /// The requester waits for the receiver until then.
    pub rnr_wait_until: Option<Instant>,
    /// When the peer's silence becomes an error.
    pub ack_deadline: Option<Instant>,
    pub ring: Option<SendConsumer>,
    /// The PSN that the next work to be taken gets.
    pub next_wqe_psn: Psn,
    /// The sequence of the last message taken.
    pub ssn: u32,
    pub spare_wqes: Vec<SendWqe>,
}

impl RequesterState {
    pub fn new(ring: Option<SendConsumer>) -> RequesterState {
        let zero = Psn::new(0);
        RequesterState {
            ring,
            wqes: VecDeque::new(),
            spare_wqes: Vec::new(),
            wqe_index: 0,
            next_psn: zero,
            next_new_psn: zero,
            next_wqe_psn: zero,
            unacked_psn: zero,
            outstanding_rd_atomic: 0,
            ssn: 0,
            lsn: Some(0),
            packets_since_ack_request: 0,
            retries_left: 0,
            rnr_retries_left: 0,
            implied_nak_handled: false,
            rnr_wait_until: None,
            ack_deadline: None,
            is_drained: false,
        }
    }

    /// Forgets all work; PSNs begin at `psn`.
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
        self.rnr_wait_until = None;
        self.ack_deadline = None;
        self.is_drained = false;
    }

    /// Whether something was sent that the peer has not acknowledged.
    #[inline]
    pub fn has_outstanding(&self) -> bool {
        self.unacked_psn != self.next_new_psn
    }

    /// Whether `psn` was sent and is not acknowledged.
    #[inline]
    pub fn is_outstanding_psn(&self, psn: Psn) -> bool {
        psn.is_within(self.unacked_psn, self.next_new_psn.since(self.unacked_psn))
    }

    /// Whether a response to `psn` passes a read or atomic whose own response is still to come.
    pub fn skips_rd_atomic_response(&self, psn: Psn) -> bool {
        let asked = |work: &&SendWqe| work.is_read_or_atomic() && work.packets > 0;
        let due = |work: &SendWqe| match self.unacked_psn.is_before(work.first_psn) {
            true => work.first_psn,
            false => self.unacked_psn,
        };
        self.is_outstanding_psn(psn)
            && self
                .wqes
                .iter()
                .take_while(|work| work.packets == 0 || !psn.is_before(work.first_psn))
                .find(asked)
                .is_some_and(|work| due(work).is_before(psn))
    }

    /// Whether a packet of this work has ever been sent.
    #[inline]
    pub fn is_started(&self, work: &SendWqe) -> bool {
        work.first_psn.is_before(self.next_new_psn)
    }

    /// The index of the work that `psn` belongs to.
    #[inline]
    pub fn find_wqe(&self, psn: Psn) -> Option<usize> {
        self.wqes.iter().position(|work| psn.is_within(work.first_psn, work.packets))
    }

    /// Sends from `psn` on again.
    pub fn rewind_to(&mut self, psn: Psn) {
        self.next_psn = psn;
        self.wqe_index = self.find_wqe(psn).expect("only what was sent is sent again");
        if psn.is_before(self.unacked_psn) {
            self.unacked_psn = psn;
        }
        let sent = self.wqes.iter().take(self.wqe_index);
        self.outstanding_rd_atomic =
            sent.filter(|work| work.is_read_or_atomic() && work.outcome.is_none()).count() as u32;
        self.packets_since_ack_request = 0;
    }

    /// Whether the peer may have no receive for `work`: only its first packet is sent until that is answered.
    pub fn exceeds_lsn(&self, work: &SendWqe) -> bool {
        let takes_receive =
            matches!(work.operation.0, Operation::Send(_) | Operation::Write { imm_data: Some(_), .. });
        let beyond = |limit: u32| (work.ssn.wrapping_sub(limit) << 8) as i32 > 0;
        takes_receive && self.lsn.is_some_and(beyond) && !work.first_psn.is_before(self.unacked_psn)
    }

    /// Takes the oldest work out and gives its slot back to the application.
    pub fn pop_wqe(&mut self) -> Option<SendWqe> {
        let work = self.wqes.pop_front()?;
        self.wqe_index = self.wqe_index.saturating_sub(1);
        if let Some(ring) = &mut self.ring {
            ring.retire();
        }
        Some(work)
    }
}
