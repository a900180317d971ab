//! RMPP: MADs that are longer than a datagram, in segments (IBA 13.6).

use crate::code::code;
use crate::layout::{Field, START, layout};
use crate::mad::MadHeader;

code! {
    /// The kind of an RMPP packet.
    RmppKind(u8), 8 {
        /// A segment.
        DATA = 1 "data",
        /// Segments up to a number have arrived.
        ACK = 2 "ack",
        /// The receiver has no resources.
        STOP = 3 "stop",
        /// The transfer has failed.
        ABORT = 4 "abort",
    }
}

layout! {
    /// The RMPP header, which follows the MAD header.
    pub struct RmppHeader: 12 bytes,
        "rmpp {kind} segment={segment} length={length}"
    {
        /// The version: 1 if the class uses RMPP.
        version: u8 = 0,
        /// The kind of the packet.
        kind: RmppKind = 1,
        /// The response time: 4.096 µs · 2^n.
        response_time: u8 = 2 [0..5],
        /// The last segment.
        is_last: bool = 2 [5..6],
        /// The first segment.
        is_first: bool = 2 [6..7],
        /// The MAD is part of a transfer.
        is_active: bool = 2 [7..8],
        /// Why a transfer was stopped or aborted.
        status: u8 = 3,
        /// The number of the segment, from 1.
        segment: u32 = 4,
        /// Of the first segment: the bytes of all segments. Of the last one: its bytes. Of an ACK: the last segment that
        /// may be sent.
        length: u32 = 8,
    }
}

impl RmppHeader {
    /// The bytes after the MAD header.
    pub const LEN: usize = 12;
    /// The bytes of a segment that lengths count: those after the RMPP header.
    pub const SEGMENT_LEN: usize = MadHeader::DATAGRAM_LEN - MadHeader::LEN - Self::LEN;

    /// Reads the header of a MAD.
    pub fn of(mad: &[u8; MadHeader::DATAGRAM_LEN]) -> RmppHeader {
        RmppHeader::read(&mad[MadHeader::LEN..], START)
    }

    /// Writes the header into a MAD.
    pub fn write_to(&self, mad: &mut [u8; MadHeader::DATAGRAM_LEN]) {
        self.write(&mut mad[MadHeader::LEN..], START);
    }

    /// Where the data of a segment begins, in a class that can use RMPP.
    pub const fn data_offset(mgmt_class: u8) -> Option<usize> {
        match mgmt_class {
            // The class of subnet administration has a key, an attribute offset and a component mask.
            MadHeader::CLASS_SA => Some(56),
            0x06 | 0x10 | 0x12 => Some(64),
            0x30..=0x4f => Some(40),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_where_the_specification_has_it() {
        let mut mad = [0xff; MadHeader::DATAGRAM_LEN];
        let header = RmppHeader {
            version: 1,
            kind: RmppKind::DATA,
            response_time: 18,
            is_last: true,
            is_first: false,
            is_active: true,
            status: 0,
            segment: 7,
            length: 220,
        };
        header.write_to(&mut mad);
        assert_eq!(mad[24..36], [1, 1, 18 << 3 | 5, 0, 0, 0, 0, 7, 0, 0, 0, 220]);
        assert_eq!(RmppHeader::of(&mad), header);
        assert_eq!(RmppHeader::SEGMENT_LEN, 220);
    }
}
