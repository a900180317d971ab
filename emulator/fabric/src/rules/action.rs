//! Actions of fault rules.

use super::header_field::{FieldValue, HeaderField, payload};
use super::repetition::{DrawKey, DrawPurpose};
use crate::{Frame, FrameContent, Seed};
use core::num::{NonZeroU32, NonZeroU64};
use softhca_wire::{Bth, Ecn, ICRC_LEN, Icrc, Opcode};

/// The action on a packet.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Only counts.
    Count,
    /// Drops the packet.
    Drop,
    /// Delivers this many copies right after the packet.
    Duplicate { copies: u32 },
    /// Holds the packet back until `by` others in its direction have passed it, at most `within_ns`.
    Reorder { by: NonZeroU32, within_ns: u64 },
    /// Delays the packet; others may overtake it.
    Delay { ns: u64 },
    /// Sends the packets that match at this rate, in order.
    LimitRate { bits_per_second: NonZeroU64 },
    /// Sends the packets that match one after the other, each in this time, whatever its size.
    PacketTime { ns: u64 },
    /// Delays the packet by a random time up to this. None overtakes another.
    Jitter { up_to_ns: u64 },
    /// Holds the first packet that matches, and all later ones in its direction, for this time.
    Hold { ns: u64 },
    /// Flips one bit.
    Corrupt { bit: BitPosition, icrc: IcrcPolicy },
    /// Sets the CE codepoint, as a switch does. The ICRC does not cover it.
    MarkCe,
    /// Changes a header field and recomputes the ICRC.
    Rewrite { field: HeaderField, value: FieldValue },
    /// Takes the link down; the packet is the first to be dropped.
    LinkDown { directions: DownDirections, for_ns: u64 },
}

/// A bit of a packet.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitPosition {
    /// Counted from the most significant bit of the first BTH byte; includes the ICRC.
    Bit(u32),
    /// Counted from the most significant bit of the first payload byte; excludes padding.
    PayloadBit(u32),
    /// A random bit that the ICRC covers, before the ICRC.
    Random,
}

/// The ICRC of a changed packet.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IcrcPolicy {
    /// Unchanged: the receiver detects the damage.
    Stale,
    /// Recomputed: the receiver does not detect the damage.
    Recomputed,
}

/// The directions that go down.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DownDirections {
    /// The direction of the packet.
    OneWay,
    /// Both directions.
    BothWays,
}

/// The effect of an action on a packet.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultEffect {
    /// With copies that another rule made.
    Dropped { copies: u64 },
    /// With this many copies.
    Duplicated { copies: u32 },
    /// Held back until this many packets have passed it.
    Reordered { by: NonZeroU32 },
    /// By this time.
    Delayed { ns: u64 },
    /// The bit counts from the most significant bit of the first BTH byte.
    Corrupted { bit: u32, icrc: IcrcPolicy },
    /// With the CE codepoint.
    MarkedCe,
    /// A header field changed.
    Rewritten { field: HeaderField, from: u64, to: u64 },
    /// The link went down.
    LinkTakenDown { directions: DownDirections, until_ns: u64 },
}

impl Action {
    /// Whether the action applies to this packet. If not, the rule does not match.
    pub(crate) fn applies_to(&self, frame: &Frame, opcode: Option<Opcode>) -> bool {
        let alters = matches!(self, Action::Corrupt { .. } | Action::MarkCe | Action::Rewrite { .. });
        if alters && frame.content != FrameContent::Packet && *self != Action::MarkCe {
            return false;
        }
        match *self {
            Action::MarkCe => frame.content != FrameContent::Pause,
            Action::Corrupt { bit: place, .. } => match place {
                BitPosition::Bit(bit) => (bit as usize) < frame.bytes.len() * 8,
                BitPosition::PayloadBit(bit) => {
                    opcode.is_some_and(|opcode| (bit as usize) < payload(opcode, &frame.bytes).len() * 8)
                }
                BitPosition::Random => opcode.is_some(),
            },
            Action::Rewrite { field, .. } => opcode.is_some_and(|opcode| field.is_in(opcode)),
            _ => true,
        }
    }

    /// Changes a frame. Returns the effect, or `None` if the action does not change frames.
    pub(crate) fn apply(
        &self,
        frame: &mut Frame,
        opcode: Option<Opcode>,
        seed: Seed,
        draw_key: &DrawKey,
    ) -> Option<FaultEffect> {
        let Frame { addressing, bytes, .. } = frame;
        match *self {
            Action::Corrupt { bit: position, icrc } => {
                let bit = position.bit(bytes, opcode, seed, draw_key);
                bytes[bit / 8] ^= 0x80 >> (bit % 8);
                if icrc == IcrcPolicy::Recomputed {
                    Icrc::write(addressing, bytes);
                }
                Some(FaultEffect::Corrupted { bit: bit as u32, icrc })
            }
            Action::MarkCe => {
                addressing.traffic_class |= Ecn::CongestionExperienced as u8;
                Some(FaultEffect::MarkedCe)
            }
            Action::Rewrite { field, value } => {
                let (from, to) = field.rewrite(opcode?, bytes, value);
                Icrc::write(addressing, bytes);
                Some(FaultEffect::Rewritten { field, from, to })
            }
            _ => None,
        }
    }
}

impl BitPosition {
    /// The bit that [`Action::applies_to`] accepted, counted from the start of the BTH.
    pub(crate) fn bit(self, bytes: &[u8], opcode: Option<Opcode>, seed: Seed, draw_key: &DrawKey) -> usize {
        /// The byte of the BTH that the ICRC does not cover.
        const UNCOVERED: usize = 4;
        match (self, opcode) {
            (BitPosition::PayloadBit(bit), Some(opcode)) => payload(opcode, bytes).start * 8 + bit as usize,
            (BitPosition::Bit(bit) | BitPosition::PayloadBit(bit), _) => bit as usize,
            (BitPosition::Random, _) => {
                debug_assert!(bytes.len() >= Bth::LEN + ICRC_LEN, "a packet with an opcode has a BTH");
                let covered = (bytes.len() - ICRC_LEN - 1) * 8;
                let bit = seed.below(covered as u64, &draw_key.words(DrawPurpose::BitPosition)) as usize;
                if bit / 8 < UNCOVERED { bit } else { bit + 8 }
            }
        }
    }
}
