//! Where datagrams hold their slot.

/// The field of a datagram that holds its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotField {
    /// The high bits of the destination QPN of a RoCE packet.
    DestinationQp,
    /// The destination slot of a link control message.
    LinkControl,
}
