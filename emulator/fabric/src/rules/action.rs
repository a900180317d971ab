//! What a rule does to a packet.

use super::header_field::{FieldValue, HeaderField, payload};
use super::repetition::{DrawKey, DrawPurpose};
use crate::{Frame, FrameContent, Seed};
use core::num::NonZeroU32;
use softhca_wire::{Bth, Ecn, ICRC_LEN, Icrc, Opcode};

/// What happens to a packet that a rule hits.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing: the rule only counts.
    Count,
    /// It is lost.
    Drop,
    /// So many more of it arrive right behind it.
    Duplicate {
        /// How many more.
        copies: u32,
    },
    /// It is held back until others have passed it in its direction.
    Reorder {
        /// How many others.
        by: NonZeroU32,
        /// It goes on after this time even if fewer came.
        within_ns: u64,
    },
    /// It takes longer; others may overtake it.
    Delay {
        /// How much longer.
        ns: u64,
    },
    /// One bit of it is flipped.
    Corrupt {
        /// Which bit.
        bit: BitPosition,
        /// What becomes of the ICRC.
        icrc: IcrcPolicy,
    },
    /// A switch's congestion mark is put on it. The ICRC does not cover that.
    MarkCe,
    /// A header field gets another value, and the ICRC is repaired.
    Rewrite {
        /// The field.
        field: HeaderField,
        /// Its new value.
        value: FieldValue,
    },
    /// The link goes down, and the packet is the first to be lost.
    LinkDown {
        /// In which direction.
        directions: DownDirections,
        /// How long.
        for_ns: u64,
    },
}

/// A bit of a packet.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitPosition {
    /// Counted from the highest bit of the first byte of the BTH; the ICRC's bits count too.
    Bit(u32),
    /// Counted from the highest bit of the first byte of the payload, without pad bytes.
    PayloadBit(u32),
    /// Any bit before the ICRC that it covers, as the seed decides.
    Random,
}

/// What becomes of the ICRC of a packet that is changed.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IcrcPolicy {
    /// It stays, so that the receiver can see the damage.
    Stale,
    /// It is computed anew, so that the receiver cannot.
    Recomputed,
}

/// Which directions of a link an action takes down.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DownDirections {
    /// The one that the packet travels in.
    OneWay,
    /// Both.
    BothWays,
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

impl Action {
    /// Whether the action can be done to a packet like this one. If not, the rule is not about it.
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

    /// Changes a frame that the action applies to, and tells what it did; nothing if the action is not of
    /// that kind.
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
    /// The bit of a packet that [`Action::applies_to`] accepted, counted from the start of the BTH.
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
