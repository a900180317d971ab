//! The base transport header.

use crate::malformed::header_bytes;
use crate::opcode::BTH_LEN;
use crate::{Malformed, Opcode, PartitionKey, Psn, Qpn};
use core::fmt;

/// The base transport header (BTH), present in every packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bth {
    /// The opcode.
    pub opcode: Opcode,
    /// Solicited event: requests a completion event at the receiver.
    pub solicited_event: bool,
    /// MigReq: automatic path migration state. SoftHCA always sends 0; decoded for captures.
    pub migration_request: bool,
    /// Pad count: 0 to 3 bytes that extend the payload to a multiple of four.
    pub pad: u8,
    /// The P_Key.
    pub pkey: PartitionKey,
    /// Reserved bits 32 to 39, which carry FECN and BECN on InfiniBand. The ICRC does not cover them.
    pub reserved_byte: u8,
    /// The destination queue pair.
    pub destination_qp: Qpn,
    /// AckReq: requests an acknowledgement of this packet.
    pub ack_request: bool,
    /// Reserved bits between AckReq and the PSN. All known senders set them to zero.
    pub reserved_bits: u8,
    /// The packet sequence number.
    pub psn: Psn,
}

impl Bth {
    /// Bytes on the wire.
    pub const LEN: usize = BTH_LEN;

    /// A header with all optional bits clear.
    pub const fn new(opcode: Opcode, destination: Qpn, psn: Psn) -> Bth {
        Bth {
            opcode,
            solicited_event: false,
            migration_request: false,
            pad: 0,
            pkey: PartitionKey::DEFAULT,
            reserved_byte: 0,
            destination_qp: destination,
            ack_request: false,
            reserved_bits: 0,
            psn,
        }
    }

    /// Parses the header at the start of `bytes`.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Bth, Malformed> {
        let b = header_bytes::<{ Self::LEN }>(bytes, "BTH")?;
        let opcode = Opcode::from_byte(b[0]).ok_or(Malformed::Opcode(b[0]))?;
        let version = b[1] & 0x0f;
        if version != 0 {
            return Err(Malformed::Version { what: "BTH transport", version });
        }
        Ok(Bth {
            opcode,
            solicited_event: b[1] & 0x80 != 0,
            migration_request: b[1] & 0x40 != 0,
            pad: (b[1] >> 4) & 3,
            pkey: PartitionKey(u16::from_be_bytes([b[2], b[3]])),
            reserved_byte: b[4],
            destination_qp: Qpn::new(u32::from_be_bytes([0, b[5], b[6], b[7]])),
            ack_request: b[8] & 0x80 != 0,
            reserved_bits: b[8] & 0x7f,
            psn: Psn::new(u32::from_be_bytes([0, b[9], b[10], b[11]])),
        })
    }

    /// Writes the header to the start of `bytes`, which must have room.
    #[inline]
    pub fn emit(&self, bytes: &mut [u8]) {
        let b: &mut [u8; Self::LEN] = bytes.first_chunk_mut().expect("room for a BTH");
        b[0] = self.opcode.byte();
        b[1] =
            u8::from(self.solicited_event) << 7 | u8::from(self.migration_request) << 6 | (self.pad & 3) << 4;
        b[2..4].copy_from_slice(&self.pkey.0.to_be_bytes());
        b[4..8].copy_from_slice(&self.destination_qp.value().to_be_bytes());
        b[4] = self.reserved_byte;
        b[8..12].copy_from_slice(&self.psn.value().to_be_bytes());
        b[8] = u8::from(self.ack_request) << 7 | self.reserved_bits & 0x7f;
    }
}

impl fmt::Display for Bth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} qp={} psn={}", self.opcode, self.destination_qp, self.psn)?;
        if self.ack_request {
            f.write_str(" ackreq")?;
        }
        if self.solicited_event {
            f.write_str(" solicited")?;
        }
        Ok(())
    }
}
