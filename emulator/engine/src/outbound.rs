//! The sending half of a queue pair: work requests that were taken and how far they got.
//!
//! A packet is a function of (work request, PSN): what is stored is where each request's PSNs begin and
//! three PSNs of progress. Going back is one assignment.

use crate::{Instant, Reason};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use softhca_queue::{
    CompletionOperation, Datagram, Operation, SendConsumer, SendFlags, SendTrailer, Sge, Status,
};
use softhca_wire::Psn;

/// A send work request in the card's private copy. What every packet touches stands first.
#[derive(Default)]
#[repr(C)]
pub(crate) struct Work {
    pub first: Psn,
    /// PSNs that it takes; none for local operations.
    pub packets: u32,
    pub length: u32,
    pub flags: SendFlags,
    pub id: u64,
    pub operation: WorkOperation,
    /// Decided by this side alone; reported when every earlier request has completed.
    pub outcome: Option<(Status, Reason)>,
    /// Its place among all messages of the queue pair, modulo 2^24, from 1.
    pub sequence: u32,
    pub shared_receive_queue: u32,
    pub entries: Vec<Sge>,
    pub inline: Vec<u8>,
    pub datagram: Datagram,
}

/// [`Operation`] with a default, for recycled slots.
#[derive(Clone, Copy)]
pub(crate) struct WorkOperation(pub Operation);

impl Default for WorkOperation {
    fn default() -> Self {
        WorkOperation(Operation::Send(SendTrailer::None))
    }
}

impl Work {
    /// Whether the peer answers with more than an acknowledgement.
    #[inline]
    pub fn is_read_or_atomic(&self) -> bool {
        matches!(
            self.operation.0,
            Operation::Read { .. } | Operation::CompareSwap { .. } | Operation::FetchAdd { .. }
        )
    }

    #[inline]
    pub fn is_local(&self) -> bool {
        matches!(self.operation.0, Operation::BindWindow(_) | Operation::LocalInvalidate { .. })
    }

    #[inline]
    pub fn is_inline(&self) -> bool {
        self.flags.contains(SendFlags::INLINE)
    }

    /// The PSN behind its last.
    #[inline]
    pub fn end(&self) -> Psn {
        self.first.plus(self.packets)
    }

    pub fn completion_operation(&self) -> CompletionOperation {
        match self.operation.0 {
            Operation::Send(_) => CompletionOperation::Send,
            Operation::Write { .. } => CompletionOperation::Write,
            Operation::Read { .. } => CompletionOperation::Read,
            Operation::CompareSwap { .. } => CompletionOperation::CompareSwap,
            Operation::FetchAdd { .. } => CompletionOperation::FetchAdd,
            Operation::BindWindow(_) => CompletionOperation::BindWindow,
            Operation::LocalInvalidate { .. } => CompletionOperation::LocalInvalidate,
        }
    }
}

/// What every packet touches stands first.
#[repr(C)]
pub(crate) struct Outbound {
    /// The work whose packets are sent next: an index into `works`, its length if none.
    pub cursor: usize,
    /// Taken and not completed, oldest first.
    pub works: VecDeque<Work>,
    /// The next PSN to send.
    pub next: Psn,
    /// The first PSN that was never sent.
    pub fresh: Psn,
    /// The oldest PSN that nobody acknowledged.
    pub unacked: Psn,
    /// Packets since the last acknowledgement request.
    pub unrequested: u32,
    /// Reads and atomics that were sent and are not answered.
    pub reads: u32,
    pub retries: u8,
    pub rnr_retries: u8,
    /// What a gap in the responses skipped was asked for again; the responses that were under way before show
    /// the same gap.
    pub gap_answered: bool,
    /// The drained event was raised.
    pub drained: bool,
    /// The last message that the peer's receives cover; none if the peer does not tell.
    pub limit: Option<u32>,
    /// The requester waits for the receiver until then.
    pub rnr_until: Option<Instant>,
    /// When the peer's silence becomes an error.
    pub ack_deadline: Option<Instant>,
    pub ring: Option<SendConsumer>,
    /// The PSN that the next work to be taken gets.
    pub assigned: Psn,
    /// The sequence of the last message taken.
    pub sequence: u32,
    pub spare: Vec<Work>,
}

impl Outbound {
    pub fn new(ring: Option<SendConsumer>) -> Outbound {
        let zero = Psn::new(0);
        Outbound {
            ring,
            works: VecDeque::new(),
            spare: Vec::new(),
            cursor: 0,
            next: zero,
            fresh: zero,
            assigned: zero,
            unacked: zero,
            reads: 0,
            sequence: 0,
            limit: Some(0),
            unrequested: 0,
            retries: 0,
            rnr_retries: 0,
            gap_answered: false,
            rnr_until: None,
            ack_deadline: None,
            drained: false,
        }
    }

    /// Forgets all work; PSNs begin at `psn`.
    pub fn start(&mut self, psn: Psn) {
        self.next = psn;
        self.fresh = psn;
        self.assigned = psn;
        self.unacked = psn;
        self.reads = 0;
        self.sequence = 0;
        self.limit = Some(0);
        self.unrequested = 0;
        self.gap_answered = false;
        self.rnr_until = None;
        self.ack_deadline = None;
        self.drained = false;
    }

    /// Whether something was sent that the peer has not acknowledged.
    #[inline]
    pub fn is_outstanding(&self) -> bool {
        self.unacked != self.fresh
    }

    /// Whether `psn` was sent and is not acknowledged.
    #[inline]
    pub fn is_sent(&self, psn: Psn) -> bool {
        psn.is_within(self.unacked, self.fresh.since(self.unacked))
    }

    /// Whether a response to `psn` passes a read or atomic whose own response is still to come.
    pub fn leaves_unanswered(&self, psn: Psn) -> bool {
        let asked = |work: &&Work| work.is_read_or_atomic() && work.packets > 0;
        let due = |work: &Work| match self.unacked.is_before(work.first) {
            true => work.first,
            false => self.unacked,
        };
        self.is_sent(psn)
            && self
                .works
                .iter()
                .take_while(|work| work.packets == 0 || !psn.is_before(work.first))
                .find(asked)
                .is_some_and(|work| due(work).is_before(psn))
    }

    /// Whether a packet of this work has ever been sent.
    #[inline]
    pub fn is_started(&self, work: &Work) -> bool {
        work.first.is_before(self.fresh)
    }

    /// The index of the work that `psn` belongs to.
    #[inline]
    pub fn find(&self, psn: Psn) -> Option<usize> {
        self.works.iter().position(|work| psn.is_within(work.first, work.packets))
    }

    /// Sends from `psn` on again.
    pub fn rewind(&mut self, psn: Psn) {
        self.next = psn;
        self.cursor = self.find(psn).expect("only what was sent is sent again");
        if psn.is_before(self.unacked) {
            self.unacked = psn;
        }
        let sent = self.works.iter().take(self.cursor);
        self.reads = sent.filter(|work| work.is_read_or_atomic() && work.outcome.is_none()).count() as u32;
        self.unrequested = 0;
    }

    /// Whether the peer may have no receive for `work`: only its first packet is sent until that is answered.
    pub fn is_limited(&self, work: &Work) -> bool {
        let takes_receive =
            matches!(work.operation.0, Operation::Send(_) | Operation::Write { immediate: Some(_), .. });
        let beyond = |limit: u32| (work.sequence.wrapping_sub(limit) << 8) as i32 > 0;
        takes_receive && self.limit.is_some_and(beyond) && !work.first.is_before(self.unacked)
    }

    /// Takes the oldest work out and gives its slot back to the application.
    pub fn pop(&mut self) -> Option<Work> {
        let work = self.works.pop_front()?;
        self.cursor = self.cursor.saturating_sub(1);
        if let Some(ring) = &mut self.ring {
            ring.retire();
        }
        Some(work)
    }
}
