//! The receiving half of a queue pair: what is expected, what is open, what is owed.

use crate::PdId;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use softhca_queue::{ReceiveConsumer, Sge};
use softhca_wire::{Operation, Psn, Reth, Syndrome};

/// A receive that was taken from its queue.
#[derive(Default)]
pub(crate) struct Buffer {
    pub id: u64,
    pub scatter: Vec<Sge>,
    pub room: u64,
}

/// A message of which packets are still to come.
#[derive(Clone, Copy)]
pub(crate) struct Open {
    pub operation: Operation,
    pub first: Psn,
    /// Bytes that came so far.
    pub placed: u64,
    /// Of a WRITE.
    pub remote: Option<Reth>,
}

/// A reply that waits to be sent.
#[derive(Clone, Copy)]
pub(crate) enum Owed {
    Acknowledge { psn: Psn, syndrome: Syndrome, msn: u32 },
    Read { first: Psn, next: Psn, packets: u32, remote: Reth, domain: PdId, msn: u32, again: bool },
    Atomic { psn: Psn, original: u64, msn: u32, again: bool },
}

/// What every packet touches stands first.
#[repr(C)]
pub(crate) struct Inbound {
    pub expected: Psn,
    /// Messages completed, modulo 2^24.
    pub msn: u32,
    /// A NAK was sent for the expected PSN and nothing else is taken until it comes.
    pub refused: bool,
    /// Communication-established was raised.
    pub established: bool,
    pub owed: VecDeque<Owed>,
    pub open: Option<Open>,
    /// The receive that the open message uses, or that a broken one left behind.
    pub buffer: Option<Buffer>,
    pub ring: Option<ReceiveConsumer>,
    pub spare: Vec<Buffer>,
    /// Results of atomics, to answer duplicates.
    pub atomics: VecDeque<(Psn, u64)>,
}

impl Inbound {
    pub fn new(ring: Option<ReceiveConsumer>) -> Inbound {
        Inbound {
            ring,
            expected: Psn::new(0),
            msn: 0,
            open: None,
            buffer: None,
            spare: Vec::new(),
            owed: VecDeque::new(),
            atomics: VecDeque::new(),
            refused: false,
            established: false,
        }
    }

    pub fn start(&mut self, psn: Psn) {
        self.expected = psn;
        self.msn = 0;
        self.open = None;
        self.owed.clear();
        self.atomics.clear();
        self.refused = false;
        self.established = false;
    }

    /// Reads and atomics that wait to be answered for the first time.
    pub fn reads(&self) -> usize {
        self.owed
            .iter()
            .filter(|o| matches!(o, Owed::Read { again: false, .. } | Owed::Atomic { again: false, .. }))
            .count()
    }

    /// The next message sequence number.
    pub fn complete_message(&mut self) {
        self.msn = (self.msn + 1) & 0xff_ffff;
    }
}
