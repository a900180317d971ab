//! Packets that a driver sends at once, and the gate that admits them.

use softhca_wire::{AddressHeaders, Qpn};

/// Decides whether the driver may send to a destination now. A queue pair that may not send is blocked until
/// [`crate::Hca::unblock`].
pub trait TransmitGate {
    /// The number of packets of up to `size` bytes, without IP headers, that may be sent with this addressing now.
    /// Zero blocks the queue pair. A peer acknowledges the packets unless `is_unacknowledged`.
    fn allowed_packets(&mut self, addressing: &AddressHeaders, size: usize, is_unacknowledged: bool)
    -> usize;
}

/// Admits everything.
impl TransmitGate for () {
    fn allowed_packets(&mut self, _: &AddressHeaders, _: usize, _: bool) -> usize {
        usize::MAX
    }
}

/// Consecutive packets in the caller's buffer with one destination and one size; the last may be shorter. Each ends
/// with four bytes for the ICRC, which the driver computes once it knows the IP identification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketBatch {
    /// The addressing headers, including the ECN field.
    pub addressing: AddressHeaders,
    /// The bytes of each packet.
    pub segment_size: usize,
    /// The number of packets.
    pub packets: usize,
    /// The bytes of all packets.
    pub bytes: usize,
    /// Whether no ACK says that the packets arrived: datagrams, unreliable connections and READ responses.
    pub is_unacknowledged: bool,
    /// The sending queue pair.
    pub qpn: Qpn,
    /// The service level of its path: the priority if the DSCP is zero.
    pub service_level: u8,
    /// The bytes of payload and pad of each packet that are not in the buffer, if payloads are elided.
    pub elided_payload: usize,
}
