//! Management datagrams: the 24 bytes in front of every message between general services interfaces.

use crate::Malformed;
use crate::layout::{Field, START, layout};
use crate::malformed::header_bytes;
use core::fmt;

layout! {
    /// The header of a management datagram.
    pub struct MadHeader: 24 bytes {
        /// The version of this header; 1 is the only one.
        base_version: u8 = 0,
        /// Who the datagram is for: 7 is the connection manager, 3 the subnet administrator.
        mgmt_class: u8 = 1,
        /// The version of the class.
        class_version: u8 = 2,
        /// What is asked for; the upper bit marks an answer.
        method: u8 = 3,
        /// Zero, or what went wrong.
        status: u16 = 4,
        /// The class's own.
        class_specific: u16 = 6,
        /// Pairs questions with answers.
        transaction_id: u64 = 8,
        /// The kind of message.
        attribute_id: u16 = 16,
        /// A parameter of the attribute.
        attribute_modifier: u32 = 20,
    }
}

impl MadHeader {
    /// Bytes on the wire.
    pub const LEN: usize = 24;
    /// Bytes of every management datagram, this header included.
    pub const DATAGRAM_LEN: usize = 256;
    /// The connection manager's class.
    pub const CLASS_CM: u8 = 0x07;
    /// The method of a message that stands for itself.
    pub const METHOD_SEND: u8 = 0x03;

    /// Reads the header from the start of `bytes`.
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

impl fmt::Display for MadHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MadHeader { mgmt_class, method, attribute_id, transaction_id, .. } = self;
        write!(
            f,
            "mad class={mgmt_class:#x} method={method:#x} attr={attribute_id:#x} tid={transaction_id:#x}"
        )
    }
}
