//! What comes out of a cable: frames, and facts about what happened to them.

use crate::{Direction, DownDirections, Frame, HeaderField, IcrcPolicy, ObservedPacket, RuleId};
use core::num::NonZeroU32;

/// Where a cable puts what comes out of it.
pub trait LinkOutput {
    /// This frame arrives at the end that `direction` leads to. Times of arrival may lie in the future and
    /// are not in order when rules delay frames; frames of one time arrive in the order of these calls.
    fn deliver(&mut self, at_ns: u64, direction: Direction, frame: Frame);

    /// This happened to a frame. Comes before the frame is delivered.
    fn report(&mut self, fault: Fault);
}

/// A fault, as it happened to one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// When.
    pub at_ns: u64,
    /// Which way the packet went.
    pub direction: Direction,
    /// Who did it.
    pub cause: FaultCause,
    /// What was done.
    pub effect: FaultEffect,
    /// The packet, as it was admitted.
    pub packet: ObservedPacket,
}

/// Who caused a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultCause {
    /// This rule.
    Rule(RuleId),
    /// The link was down.
    LinkDown,
    /// The packet was larger than the line's MTU.
    ExceedsMtu,
}

/// What was done to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultEffect {
    /// It was lost.
    Dropped {
        /// And with it so many duplicates that another rule had made of it.
        copies: u64,
    },
    /// Others were made of it.
    Duplicated {
        /// How many.
        copies: u32,
    },
    /// It was held back.
    Reordered {
        /// Behind how many others.
        by: NonZeroU32,
    },
    /// It takes longer.
    Delayed {
        /// How much longer.
        ns: u64,
    },
    /// One bit was flipped.
    Corrupted {
        /// Counted from the highest bit of the BTH's first byte.
        bit: u32,
        /// What became of the ICRC.
        icrc: IcrcPolicy,
    },
    /// It carries a congestion mark now.
    MarkedCe,
    /// A field has another value now.
    Rewritten {
        /// The field.
        field: HeaderField,
        /// Its old value.
        from: u64,
        /// Its new value.
        to: u64,
    },
    /// It took the link down.
    LinkTakenDown {
        /// In which direction.
        directions: DownDirections,
        /// Until when.
        until_ns: u64,
    },
}
