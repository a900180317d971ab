//! The UDP header.

use crate::display::display;
use crate::malformed::header_bytes;
use crate::{AddressHeaders, Malformed, ROCE_PORT};

/// The UDP header. RoCE senders set the checksum to zero, also over IPv6: the ICRC replaces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Udp {
    /// Identifies the flow for ECMP.
    pub source_port: u16,
    /// 4791 for RoCEv2.
    pub destination_port: u16,
    /// Bytes of header and payload.
    pub length: u16,
    /// The checksum. Not verified: captures show it before the NIC fills it in (checksum offload).
    pub checksum: u16,
}

impl Udp {
    /// Bytes on the wire.
    pub const LEN: usize = 8;
    /// The IP protocol number of UDP.
    pub const PROTOCOL: u8 = 17;

    /// The header before `payload` bytes.
    pub const fn new(addressing: &AddressHeaders, payload: usize) -> Udp {
        Udp {
            source_port: addressing.source_port,
            destination_port: ROCE_PORT,
            length: (Self::LEN + payload) as u16,
            checksum: 0,
        }
    }

    /// Parses the header. Returns it with the payload, which must be all that follows.
    pub fn parse(bytes: &[u8]) -> Result<(Udp, &[u8]), Malformed> {
        let [s0, s1, d0, d1, l0, l1, c0, c1] = *header_bytes::<{ Self::LEN }>(bytes, "UDP header")?;
        let header = Udp {
            source_port: u16::from_be_bytes([s0, s1]),
            destination_port: u16::from_be_bytes([d0, d1]),
            length: u16::from_be_bytes([l0, l1]),
            checksum: u16::from_be_bytes([c0, c1]),
        };
        if usize::from(header.length) != bytes.len() {
            let stated = usize::from(header.length);
            return Err(Malformed::Length { what: "UDP length", stated, actual: bytes.len() });
        }
        Ok((header, &bytes[Self::LEN..]))
    }

    /// Writes the header to the start of `bytes`, which must have room.
    pub fn emit(&self, bytes: &mut [u8]) {
        let fields = [self.source_port, self.destination_port, self.length, self.checksum];
        for (chunk, field) in bytes[..Self::LEN].chunks_exact_mut(2).zip(fields) {
            chunk.copy_from_slice(&field.to_be_bytes());
        }
    }
}

display!(Udp { source_port, destination_port, length } "{source_port} > {destination_port} len={length}");
