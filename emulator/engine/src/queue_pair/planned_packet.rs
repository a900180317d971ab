//! A packet that the requester or the responder sends next.

use softhca_wire::{AddressHeaders, TransportHeader};

/// A packet that may be sent next.
pub(crate) struct PlannedPacket {
    pub header: TransportHeader,
    pub payload_length: u32,
    pub addressing: AddressHeaders,
    pub service_level: u8,
    /// Where in its message the payload begins.
    pub offset: u64,
    pub is_response: bool,
}
