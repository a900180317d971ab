//! What a rule does to a packet.

use crate::field::payload;
use crate::repeat::{Draw, Question};
use crate::{Content, Effect, Field, Frame, Seed, Value};
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
        place: Place,
        /// What becomes of the ICRC.
        seal: Seal,
    },
    /// A switch's congestion mark is put on it. The ICRC does not cover that.
    MarkCe,
    /// A header field gets another value, and the ICRC is repaired.
    Rewrite {
        /// The field.
        field: Field,
        /// Its new value.
        value: Value,
    },
    /// The link goes down, and the packet is the first to be lost.
    LinkDown {
        /// In which direction.
        cut: Cut,
        /// How long.
        for_ns: u64,
    },
}

/// A bit of a packet.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Counted from the highest bit of the first byte of the BTH; the ICRC's bits count too.
    Bit(u32),
    /// Counted from the highest bit of the first byte of the payload, without pad bytes.
    PayloadBit(u32),
    /// Any bit before the ICRC that it covers, as the seed decides.
    Anywhere,
}

/// What becomes of the ICRC of a packet that is changed.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seal {
    /// It stays, so that the receiver can see the damage.
    Stale,
    /// It is computed anew, so that the receiver cannot.
    Repaired,
}

/// Which directions of a link an action takes down.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The one that the packet travels in.
    OneWay,
    /// Both.
    BothWays,
}

impl Action {
    /// Whether the action can be done to a packet like this one. If not, the rule is not about it.
    pub(crate) fn applies_to(&self, frame: &Frame, opcode: Option<Opcode>) -> bool {
        let alters = matches!(self, Action::Corrupt { .. } | Action::MarkCe | Action::Rewrite { .. });
        if alters && frame.content != Content::Packet && *self != Action::MarkCe {
            return false;
        }
        match *self {
            Action::MarkCe => frame.content != Content::Pause,
            Action::Corrupt { place, .. } => match place {
                Place::Bit(bit) => (bit as usize) < frame.bytes.len() * 8,
                Place::PayloadBit(bit) => {
                    opcode.is_some_and(|opcode| (bit as usize) < payload(opcode, &frame.bytes).len() * 8)
                }
                Place::Anywhere => opcode.is_some(),
            },
            Action::Rewrite { field, .. } => opcode.is_some_and(|opcode| field.is_in(opcode)),
            _ => true,
        }
    }

    /// Changes a frame that the action applies to, and tells what it did; nothing if the action is not of
    /// that kind.
    pub(crate) fn alter(
        &self,
        frame: &mut Frame,
        opcode: Option<Opcode>,
        seed: Seed,
        question: &Question,
    ) -> Option<Effect> {
        let Frame { envelope, bytes, .. } = frame;
        match *self {
            Action::Corrupt { place, seal } => {
                let bit = place.bit(bytes, opcode, seed, question);
                bytes[bit / 8] ^= 0x80 >> (bit % 8);
                if seal == Seal::Repaired {
                    Icrc::seal(envelope, bytes);
                }
                Some(Effect::Corrupted { bit: bit as u32, seal })
            }
            Action::MarkCe => {
                envelope.traffic_class |= Ecn::CongestionExperienced as u8;
                Some(Effect::MarkedCe)
            }
            Action::Rewrite { field, value } => {
                let (from, to) = field.rewrite(opcode?, bytes, value);
                Icrc::seal(envelope, bytes);
                Some(Effect::Rewritten { field, from, to })
            }
            _ => None,
        }
    }
}

impl Place {
    /// The bit of a packet that [`Action::applies_to`] accepted, counted from the start of the BTH.
    pub(crate) fn bit(self, bytes: &[u8], opcode: Option<Opcode>, seed: Seed, question: &Question) -> usize {
        /// The byte of the BTH that the ICRC does not cover.
        const UNCOVERED: usize = 4;
        match (self, opcode) {
            (Place::PayloadBit(bit), Some(opcode)) => payload(opcode, bytes).start * 8 + bit as usize,
            (Place::Bit(bit) | Place::PayloadBit(bit), _) => bit as usize,
            (Place::Anywhere, _) => {
                debug_assert!(bytes.len() >= Bth::LEN + ICRC_LEN, "a packet with an opcode has a BTH");
                let covered = (bytes.len() - ICRC_LEN - 1) * 8;
                let bit = seed.below(covered as u64, &question.words(Draw::Place)) as usize;
                if bit / 8 < UNCOVERED { bit } else { bit + 8 }
            }
        }
    }
}
