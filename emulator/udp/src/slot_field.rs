//! Where datagrams hold their slot.

/// The field of a datagram that holds its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotField {
    /// The high bits of the destination QPN of a RoCE packet, or those of the number that leads to the target of a CM
    /// message.
    Target,
    /// The destination slot of a link control message.
    LinkControl,
}
