//! A packet that the requester or the responder sends next.

use softhca_wire::{AddressHeaders, TransportHeader};

/// The headers of the next packet, and the position of its payload.
pub(crate) struct PlannedPacket {
    pub header: TransportHeader,
    pub payload_length: u32,
    pub addressing: AddressHeaders,
    pub service_level: u8,
    /// The offset of the payload in its message.
    pub offset: u64,
    pub is_response: bool,
}
