//! Packets that a driver sends at once, and the gate that admits them.

use softhca_wire::{AddressHeaders, Qpn};

/// Says whether the driver may send to a destination now. A queue pair that may not is parked until
/// [`crate::Hca::unpark`].
pub trait TransmitGate {
    /// How many packets of up to `size` bytes, IP headers excluded, may go in this envelope now; zero parks.
    fn allowed_packets(&mut self, envelope: &AddressHeaders, size: usize) -> usize;
}

/// Lets everything through.
impl TransmitGate for () {
    fn allowed_packets(&mut self, _: &AddressHeaders, _: usize) -> usize {
        usize::MAX
    }
}

/// Packets of one destination and one size (the last may be shorter), one behind the other in the lent
/// buffer. Each ends with four bytes of room for its ICRC, which whoever knows the IP identification seals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketBatch {
    /// Where they go, and how they are marked.
    pub addressing: AddressHeaders,
    /// Bytes of each packet.
    pub segment_size: usize,
    /// How many packets.
    pub packets: usize,
    /// Bytes of all packets.
    pub bytes: usize,
    /// The queue pair that sends them.
    pub qpn: Qpn,
    /// The service level of its path: their priority where their DSCP is zero.
    pub service_level: u8,
    /// Bytes of payload and pad of each packet that are not in the buffer, if payloads are elided.
    pub elided_payload: usize,
}
