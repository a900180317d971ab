//! Where datagrams hold their slot, and the slots that get theirs.

use softhca_wire::QpnSlot;

/// The field of a datagram that holds its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotField {
    /// The high bits of the destination QPN of a RoCE packet, or those of the number that leads to the target of a CM
    /// message.
    Target,
    /// The destination slot of a link control message.
    LinkControl,
}

/// A set of slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlotSet {
    pub words: [u32; 1 << (QpnSlot::BITS - 5)],
}

impl SlotSet {
    /// Adds or removes a slot. Returns whether this changes the set.
    pub fn set(&mut self, slot: u16, is_member: bool) -> bool {
        let (word, bit) = (&mut self.words[usize::from(slot >> 5)], 1 << (slot & 31));
        let before = *word;
        *word = if is_member { before | bit } else { before & !bit };
        *word != before
    }
}
