//! Management datagrams (MADs): the 24-byte header of every message between QP1s.

use crate::Malformed;
use crate::layout::{Field, START, layout};
use crate::malformed::header_bytes;

layout! {
    /// The MAD header.
    pub struct MadHeader: 24 bytes,
        "mad class={mgmt_class:#x} method={method:#x} attr={attribute_id:#x} tid={transaction_id:#x}"
    {
        /// The version of this header; always 1.
        base_version: u8 = 0,
        /// The management class: 7 for the connection manager, 3 for subnet administration.
        mgmt_class: u8 = 1,
        /// The version of the class.
        class_version: u8 = 2,
        /// The method; the most significant bit marks a response.
        method: u8 = 3,
        /// Zero, or an error code.
        status: u16 = 4,
        /// Defined by the class.
        class_specific: u16 = 6,
        /// Matches responses to requests.
        transaction_id: u64 = 8,
        /// The attribute ID: the message type.
        attribute_id: u16 = 16,
        /// The attribute modifier.
        attribute_modifier: u32 = 20,
    }
}

impl MadHeader {
    /// Bytes on the wire.
    pub const LEN: usize = 24;
    /// Bytes of every MAD, including this header.
    pub const DATAGRAM_LEN: usize = 256;
    /// The management class of subnet administration.
    pub const CLASS_SA: u8 = 0x03;
    /// The management class of performance management.
    pub const CLASS_PERFORMANCE: u8 = 0x04;
    /// The management class of the connection manager.
    pub const CLASS_CM: u8 = 0x07;
    /// The Send method, which expects no response.
    pub const METHOD_SEND: u8 = 0x03;

    /// Parses the header at the start of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<MadHeader, Malformed> {
        let bytes = header_bytes::<{ Self::LEN }>(bytes, "MAD header")?;
        let header = MadHeader::read(bytes, START);
        match header.base_version {
            1 => Ok(header),
            version => Err(Malformed::Version { what: "MAD", version }),
        }
    }

    /// Writes the header to the start of `bytes`, which must have room.
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..Self::LEN].fill(0);
        self.write(bytes, START);
    }
}
