//! The output of a link: frames and faults.

use super::action::FaultEffect;
use super::flow_history::ObservedPacket;
use super::rule::RuleId;
use crate::{Direction, Frame};

/// Receives the output of a link.
pub trait LinkOutput {
    /// A frame arrives at the end of `direction`. Arrival times may be in the future, and are not in order if
    /// rules delay frames. Frames with equal times arrive in the order of calls.
    fn deliver(&mut self, at_ns: u64, direction: Direction, frame: Frame);

    /// A fault occurred. Called before the frame is delivered.
    fn report(&mut self, fault: Fault);
}

/// A fault on one packet.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub at_ns: u64,
    /// The direction of the packet.
    pub direction: Direction,
    pub cause: FaultCause,
    pub effect: FaultEffect,
    /// The packet, as it was admitted.
    pub packet: ObservedPacket,
}

#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultCause {
    Rule(RuleId),
    /// The link was down.
    LinkDown,
    /// The packet exceeded the link MTU.
    ExceedsMtu,
}
