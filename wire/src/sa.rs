//! Subnet administration (IBA 15): queries for records about the subnet, as plain values.

use crate::layout::{BitSpan, Field, START, bit_span, layout, read_bits};
use crate::smp::Lid;
use crate::{Gid, MadHeader};

crate::named_enum! {
    /// Records by the IDs of their attributes.
    #[repr(u16)]
    pub enum RecordId {
        /// The abilities of the administration itself.
        ClassPortInfo = 0x01 => "ClassPortInfo",
        /// A node.
        Node = 0x11 => "NodeRecord",
        /// A port.
        PortInfo = 0x12 => "PortInfoRecord",
        /// The virtual lanes of service levels between two ports of a switch.
        SlToVl = 0x13 => "SLtoVLMappingTableRecord",
        /// A switch.
        SwitchInfo = 0x14 => "SwitchInfoRecord",
        /// A block of a linear forwarding table.
        LinearForwardingTable = 0x15 => "LinearForwardingTableRecord",
        /// A subnet manager.
        SmInfo = 0x18 => "SMInfoRecord",
        /// A link, seen from one of its ends.
        Link = 0x20 => "LinkRecord",
        /// A block of the GUIDs of a port.
        GuidInfo = 0x30 => "GUIDInfoRecord",
        /// A block of the partition keys of a port.
        PKeyTable = 0x33 => "P_KeyTableRecord",
        /// The way between two ports.
        Path = 0x35 => "PathRecord",
        /// A block of the weights of virtual lanes of a port.
        VlArbitration = 0x36 => "VLArbitrationTableRecord",
    }
}

impl RecordId {
    /// The record with this attribute ID.
    pub fn from_number(number: u16) -> Option<RecordId> {
        RecordId::ALL.into_iter().find(|id| *id as u16 == number)
    }

    /// The fields that a query can ask for: bit in the component mask, first byte, first bit, width.
    const fn components(self) -> &'static [(u32, usize, usize, usize)] {
        const LID: (u32, usize, usize, usize) = (0, 0, 0, 16);
        match self {
            RecordId::ClassPortInfo | RecordId::Path => &[],
            RecordId::Node => &[
                LID,
                (2, 4, 0, 8),
                (3, 5, 0, 8),
                (4, 6, 0, 8),
                (5, 7, 0, 8),
                (6, 8, 0, 64),
                (7, 16, 0, 64),
                (8, 24, 0, 64),
                (9, 32, 0, 16),
                (10, 34, 0, 16),
                (11, 36, 0, 32),
                (12, 40, 0, 8),
                (13, 41, 0, 24),
                (14, 44, 0, 512),
            ],
            RecordId::PortInfo => &[
                LID,
                (1, 2, 0, 8),
                (3, 4, 0, 64),
                (4, 12, 0, 64),
                (5, 20, 0, 16),
                (6, 22, 0, 16),
                (7, 24, 0, 32),
                (10, 32, 0, 8),
            ],
            RecordId::SwitchInfo => &[LID],
            RecordId::LinearForwardingTable => &[LID, (1, 2, 0, 16)],
            RecordId::SlToVl => &[LID, (1, 2, 0, 8), (2, 3, 0, 8)],
            RecordId::SmInfo => {
                &[LID, (2, 4, 0, 64), (3, 12, 0, 64), (4, 20, 0, 32), (5, 24, 0, 4), (6, 24, 4, 4)]
            }
            RecordId::Link => &[LID, (1, 2, 0, 8), (2, 3, 0, 8), (3, 4, 0, 16)],
            RecordId::GuidInfo => &[LID, (1, 2, 0, 8)],
            RecordId::PKeyTable => &[LID, (1, 2, 0, 16), (2, 4, 0, 8)],
            RecordId::VlArbitration => &[LID, (1, 2, 0, 8), (2, 3, 0, 8)],
        }
    }
}

/// The bits of a path's fields in the component mask.
mod path_bit {
    pub const DGID: u32 = 2;
    pub const SGID: u32 = 3;
    pub const DLID: u32 = 4;
    pub const SLID: u32 = 5;
    pub const COUNT: u32 = 12;
    pub const P_KEY: u32 = 13;
    pub const SL: u32 = 15;
    pub const MTU: u32 = 17;
    pub const RATE: u32 = 19;
    pub const LIFETIME: u32 = 21;
}

layout! {
    /// The header of the class, which follows the RMPP header.
    pub struct SaHeader: 20 bytes {
        /// The key of the subnet manager.
        sm_key: u64 = 0,
        /// Words of eight bytes from a record to the next.
        attribute_offset: u16 = 8,
        /// The fields that a query asks for.
        component_mask: u64 = 12,
    }
}

impl SaHeader {
    /// Where the header begins in a MAD.
    const START: usize = 36;
    /// Where the records begin in a MAD.
    pub const RECORDS: usize = 56;

    /// Reads the header of a MAD.
    pub fn of(mad: &[u8; MadHeader::DATAGRAM_LEN]) -> SaHeader {
        SaHeader::read(&mad[Self::START..], START)
    }

    /// Writes the header into the start of a MAD, which must have room.
    pub fn write_to(&self, mad: &mut [u8]) {
        self.write(&mut mad[Self::START..], START);
    }
}

/// A query: which records it asks for.
pub struct Query<'a> {
    /// The kind of the records.
    pub id: RecordId,
    mask: u64,
    modifier: u32,
    template: &'a [u8],
}

impl<'a> Query<'a> {
    /// The component of the capability mask of a port.
    const CAPABILITIES: u32 = 7;
    /// The bit of the attribute modifier with which only the capabilities that the query names must match.
    const MATCH_SET_BITS: u32 = 1 << 31;

    /// Reads a query; `None` if it asks for a field that a record of this kind does not have.
    pub fn of(id: RecordId, modifier: u32, mad: &'a [u8; MadHeader::DATAGRAM_LEN]) -> Option<Query<'a>> {
        let query = Query {
            id,
            mask: SaHeader::of(mad).component_mask,
            modifier,
            template: &mad[SaHeader::RECORDS..],
        };
        let known = id.components().iter().fold(0, |known, (bit, ..)| known | 1 << bit);
        (id == RecordId::Path || query.mask & !known == 0).then_some(query)
    }

    /// Whether the query asks for the field with this bit.
    fn asks(&self, bit: u32) -> bool {
        self.mask >> bit & 1 != 0
    }

    /// The LID that the records must have.
    pub fn lid(&self) -> Option<Lid> {
        self.asks(0).then(|| Lid::read(self.template, bit_span!(Lid, 0)))
    }

    /// Whether a query for paths wants those from this port.
    pub fn names_source(&self, lid: Lid, gid: Gid) -> bool {
        let asked = PathRecord::read(self.template, START);
        (!self.asks(path_bit::SLID) || asked.slid == lid) && (!self.asks(path_bit::SGID) || asked.sgid == gid)
    }

    /// Whether a query for paths wants those to this port.
    pub fn names_destination(&self, lid: Lid, gid: Gid) -> bool {
        let asked = PathRecord::read(self.template, START);
        (!self.asks(path_bit::DLID) || asked.dlid == lid) && (!self.asks(path_bit::DGID) || asked.dgid == gid)
    }

    /// Whether a path between such ports has the values that the query asks for.
    pub fn accepts_path(&self, path: &PathRecord) -> bool {
        let asked = PathRecord::read(self.template, START);
        // The bit before that of a value says whether the query has a selector; without one, values are equal.
        let accepts = |bit: u32, selector: u8, asked: u8, value: u8| match selector {
            _ if !self.asks(bit) => true,
            _ if !self.asks(bit - 1) => value == asked,
            0 => value > asked,
            1 => value < asked,
            2 => value == asked,
            _ => true,
        };
        (!self.asks(path_bit::P_KEY) || asked.p_key & 0x7fff == path.p_key & 0x7fff)
            && (!self.asks(path_bit::SL) || asked.sl == path.sl)
            && (!self.asks(path_bit::COUNT) || asked.count > 0)
            && accepts(path_bit::MTU, asked.mtu_selector, asked.mtu, path.mtu)
            && accepts(path_bit::RATE, asked.rate_selector, asked.rate, path.rate)
            && accepts(path_bit::LIFETIME, asked.lifetime_selector, asked.lifetime, path.lifetime)
    }

    /// Whether a record has the values that the query asks for.
    pub fn matches(&self, record: &[u8]) -> bool {
        self.id.components().iter().filter(|(bit, ..)| self.asks(*bit)).all(|&(bit, byte, first, width)| {
            if width > 64 {
                let bytes = byte..byte + width / 8;
                return record[bytes.clone()] == self.template[bytes];
            }
            let span = BitSpan { byte, bit: first, width };
            let (has, asked) = (read_bits(record, span), read_bits(self.template, span));
            let names_capabilities = self.id == RecordId::PortInfo && bit == Self::CAPABILITIES;
            match names_capabilities && self.modifier & Self::MATCH_SET_BITS != 0 {
                true => has & asked == asked,
                false => has == asked,
            }
        })
    }
}

layout! {
    /// The way between two ports.
    pub struct PathRecord: 64 bytes {
        /// The destination's GID.
        dgid: Gid = 8,
        /// The source's GID.
        sgid: Gid = 24,
        /// The destination's LID.
        dlid: Lid = 40,
        /// The source's LID.
        slid: Lid = 42,
        /// The highest number of routers.
        hop_limit: u8 = 47,
        /// Whether packets may return on the path.
        is_reversible: bool = 49 [0..1],
        /// The most paths that a query wants.
        count: u8 = 49 [1..8],
        /// The partition key.
        p_key: u16 = 50,
        /// The service level.
        sl: u8 = 52 [12..16],
        /// How a query compares the MTU: 0 greater, 1 less, 2 equal, 3 the largest.
        mtu_selector: u8 = 54 [0..2],
        /// The MTU: 1 for 256 bytes to 5 for 4096.
        mtu: u8 = 54 [2..8],
        /// How a query compares the rate.
        rate_selector: u8 = 55 [0..2],
        /// The rate, by the number that the specification gives it.
        rate: u8 = 55 [2..8],
        /// How a query compares the lifetime.
        lifetime_selector: u8 = 56 [0..2],
        /// The time a packet may take: 4.096 µs · 2^n.
        lifetime: u8 = 56 [2..8],
    }
}

impl PathRecord {
    /// The bytes of the record.
    pub fn to_bytes(&self) -> [u8; 64] {
        let mut bytes = [0; 64];
        self.write(&mut bytes, START);
        bytes
    }

    /// The number of a rate in Gb/s, without fractions.
    pub const fn rate_number(gigabits: u32) -> u8 {
        match gigabits {
            0..=4 => 2,
            5..=9 => 5,
            10..=13 => 3,
            14..=19 => 11,
            20..=24 => 6,
            25..=29 => 15,
            30..=39 => 4,
            40..=49 => 7,
            50..=55 => 20,
            56..=59 => 12,
            60..=79 => 8,
            80..=99 => 9,
            100..=111 => 16,
            112..=119 => 13,
            120..=167 => 10,
            168..=199 => 14,
            200..=299 => 17,
            300..=399 => 18,
            400..=599 => 21,
            _ => 22,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_where_the_specification_has_it() {
        let path = PathRecord {
            dlid: Lid(0x102),
            slid: Lid(3),
            is_reversible: true,
            count: 1,
            sl: 5,
            mtu_selector: 2,
            mtu: 5,
            ..PathRecord::default()
        };
        let bytes = path.to_bytes();
        assert_eq!(bytes[40..44], [1, 2, 0, 3]);
        assert_eq!(bytes[49..55], [0x81, 0, 0, 0, 5, 0x85]);
        assert_eq!(PathRecord::read(&bytes, START), path);
    }

    #[test]
    fn a_query_for_a_field_that_records_lack_is_refused() {
        let mut mad = [0; MadHeader::DATAGRAM_LEN];
        SaHeader { component_mask: 1 << 3, ..SaHeader::default() }.write_to(&mut mad);
        assert!(Query::of(RecordId::Link, 0, &mad).is_some());
        assert!(Query::of(RecordId::GuidInfo, 0, &mad).is_none());
    }

    #[test]
    fn capabilities_match_as_the_modifier_says() {
        let mut mad = [0; MadHeader::DATAGRAM_LEN];
        SaHeader { component_mask: 1 << 7, ..SaHeader::default() }.write_to(&mut mad);
        mad[SaHeader::RECORDS + 24 + 3] = 2;
        let mut record = [0; 68];
        record[24 + 3] = 6;
        let matches = |modifier| {
            Query::of(RecordId::PortInfo, modifier, &mad).is_some_and(|query| query.matches(&record))
        };
        assert!(matches(1 << 31) && !matches(0));
    }
}
