//! What comes out of a cable: frames, and facts about what happened to them.

use super::action::FaultEffect;
use super::flow_history::ObservedPacket;
use super::rule::RuleId;
use crate::{Direction, Frame};

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
