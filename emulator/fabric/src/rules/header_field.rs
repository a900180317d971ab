//! Header fields as bit ranges that rules can rewrite.

use softhca_wire::{Bth, ExtendedHeaders, ICRC_LEN, Opcode};

/// Declares the fields with their locations: the extended header (empty for the BTH), the first bit there, and the width.
macro_rules! header_fields {
    ($( $(#[$meta:meta])* $field:ident = $location:expr, )*) => {
        /// A field of the BTH or of an extended header.
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum HeaderField { $( $(#[$meta])* $field, )* }

        impl HeaderField {
            #[cfg(test)]
            const ALL: &[HeaderField] = &[$( HeaderField::$field, )*];

            const fn location(self) -> (ExtendedHeaders, usize, usize) {
                match self { $( HeaderField::$field => $location, )* }
            }
        }
    };
}

const BTH: ExtendedHeaders = ExtendedHeaders::empty();

header_fields! {
    /// BTH: the opcode.
    Opcode = (BTH, 0, 8),
    /// BTH: the solicited event bit.
    Solicited = (BTH, 8, 1),
    /// BTH: the migration request bit.
    Migration = (BTH, 9, 1),
    /// BTH: the pad count.
    Pad = (BTH, 10, 2),
    /// BTH: the transport header version.
    Version = (BTH, 12, 4),
    /// BTH: the P_Key.
    #[cfg_attr(feature = "serde", serde(rename = "pkey"))]
    PartitionKey = (BTH, 16, 16),
    /// BTH: the reserved byte, which the ICRC does not cover.
    Reserved = (BTH, 32, 8),
    /// BTH: the destination queue pair.
    DestinationQp = (BTH, 40, 24),
    /// BTH: the acknowledge request bit.
    AckRequest = (BTH, 64, 1),
    /// BTH: the packet sequence number.
    Psn = (BTH, 72, 24),
    /// DETH: the Q_Key.
    #[cfg_attr(feature = "serde", serde(rename = "qkey"))]
    QueueKey = (ExtendedHeaders::DETH, 0, 32),
    /// DETH: the source queue pair.
    SourceQp = (ExtendedHeaders::DETH, 40, 24),
    /// XRCETH: the shared receive queue.
    #[cfg_attr(feature = "serde", serde(rename = "srqn"))]
    SharedReceiveQueue = (ExtendedHeaders::XRCETH, 8, 24),
    /// FETH: the placement type and selectivity.
    Flush = (ExtendedHeaders::FETH, 0, 32),
    /// RETH: the virtual address.
    Address = (ExtendedHeaders::RETH, 0, 64),
    /// RETH: the rkey.
    #[cfg_attr(feature = "serde", serde(rename = "rkey"))]
    RemoteKey = (ExtendedHeaders::RETH, 64, 32),
    /// RETH: the DMA length.
    Length = (ExtendedHeaders::RETH, 96, 32),
    /// AtomicETH: the virtual address.
    AtomicAddress = (ExtendedHeaders::ATOMIC, 0, 64),
    /// AtomicETH: the rkey.
    #[cfg_attr(feature = "serde", serde(rename = "atomic-rkey"))]
    AtomicKey = (ExtendedHeaders::ATOMIC, 64, 32),
    /// AtomicETH: the value to swap in or to add.
    SwapOrAdd = (ExtendedHeaders::ATOMIC, 96, 64),
    /// AtomicETH: the value to compare with.
    Compare = (ExtendedHeaders::ATOMIC, 160, 64),
    /// AETH: the syndrome.
    Syndrome = (ExtendedHeaders::AETH, 0, 8),
    /// AETH: the MSN.
    Msn = (ExtendedHeaders::AETH, 8, 24),
    /// AtomicAckETH: the original value.
    Original = (ExtendedHeaders::ATOMIC_ACK, 0, 64),
    /// ImmDt: the immediate data.
    #[cfg_attr(feature = "serde", serde(rename = "imm-data"))]
    Immediate = (ExtendedHeaders::IMMEDIATE, 0, 32),
    /// IETH: the rkey to invalidate.
    #[cfg_attr(feature = "serde", serde(rename = "invalidated-rkey"))]
    InvalidatedKey = (ExtendedHeaders::IETH, 0, 32),
}

/// The new value of a field.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldValue {
    /// This value.
    Set(u64),
    /// The old value plus this, modulo the field's width.
    Add(i64),
}

/// A range of bits, counted from the most significant bit of the first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BitRange {
    first: usize,
    width: usize,
}

impl HeaderField {
    /// The width in bits.
    pub const fn width(self) -> usize {
        self.location().2
    }

    /// Whether packets with this opcode have the field.
    pub fn is_in(self, opcode: Opcode) -> bool {
        opcode.headers().contains(self.location().0)
    }

    fn bit_range(self, opcode: Opcode) -> BitRange {
        let (header, first, width) = self.location();
        let start = if header.is_empty() { 0 } else { header_end(opcode, header) };
        BitRange { first: start * 8 + first, width }
    }

    /// Changes the field in a packet with this opcode, which must have it. Returns the old and the new value.
    pub(crate) fn rewrite(self, opcode: Opcode, bytes: &mut [u8], value: FieldValue) -> (u64, u64) {
        let slot = self.bit_range(opcode);
        let from = slot.read(bytes);
        let to = match value {
            FieldValue::Set(to) => to,
            FieldValue::Add(more) => from.wrapping_add_signed(more),
        } & slot.mask();
        slot.write(bytes, to);
        (from, to)
    }
}

/// The end of the headers before `stop`; if `stop` is empty, the start of the payload. The bits of the headers have the
/// order of the wire.
fn header_end(opcode: Opcode, stop: ExtendedHeaders) -> usize {
    let before = ExtendedHeaders::from_bits_truncate(stop.bits().wrapping_sub(1));
    Bth::LEN + opcode.headers().intersection(before).length()
}

/// The byte range of the payload, without headers, padding and ICRC.
pub(crate) fn payload(opcode: Opcode, bytes: &[u8]) -> core::ops::Range<usize> {
    let pad = HeaderField::Pad.bit_range(opcode).read(bytes) as usize;
    header_end(opcode, ExtendedHeaders::empty())..bytes.len() - ICRC_LEN - pad
}

impl BitRange {
    const fn mask(self) -> u64 {
        u64::MAX >> (64 - self.width)
    }

    /// The bytes of the range, at most eight, and the number of bits after it.
    const fn span(self) -> (core::ops::Range<usize>, usize) {
        let end = self.first + self.width;
        let bytes = self.first / 8..end.div_ceil(8);
        (bytes, end.next_multiple_of(8) - end)
    }

    fn read(self, bytes: &[u8]) -> u64 {
        let (range, shift) = self.span();
        bytes[range].iter().fold(0, |word, byte| word << 8 | u64::from(*byte)) >> shift & self.mask()
    }

    fn write(self, bytes: &mut [u8], value: u64) {
        let (range, shift) = self.span();
        let (mut keep, mut put) = (!(self.mask() << shift), value << shift);
        for byte in bytes[range].iter_mut().rev() {
            *byte = *byte & keep as u8 | put as u8;
            (keep, put) = (keep >> 8, put >> 8);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Packet;
    use softhca_wire::{Icrc, Operation, TransportHeader, TransportPacket};

    /// The field as parsed by the wire crate.
    fn parsed(field: HeaderField, header: &TransportHeader) -> Option<u64> {
        let bth = &header.bth;
        Some(match field {
            HeaderField::Opcode => bth.opcode.byte().into(),
            HeaderField::Solicited => bth.solicited_event.into(),
            HeaderField::Migration => bth.migration_request.into(),
            HeaderField::Pad => bth.pad.into(),
            HeaderField::Version => 0,
            HeaderField::PartitionKey => bth.pkey.0.into(),
            HeaderField::Reserved => bth.reserved_byte.into(),
            HeaderField::DestinationQp => bth.destination_qp.value().into(),
            HeaderField::AckRequest => bth.ack_request.into(),
            HeaderField::Psn => bth.psn.value().into(),
            HeaderField::QueueKey => header.deth?.qkey.0.into(),
            HeaderField::SourceQp => header.deth?.source_qp.value().into(),
            HeaderField::SharedReceiveQueue => header.xrceth?.0.into(),
            HeaderField::Flush => header.feth?.0.into(),
            HeaderField::Address => header.reth?.virtual_address,
            HeaderField::RemoteKey => header.reth?.rkey.0.into(),
            HeaderField::Length => header.reth?.dma_length.into(),
            HeaderField::AtomicAddress => header.atomic?.virtual_address,
            HeaderField::AtomicKey => header.atomic?.rkey.0.into(),
            HeaderField::SwapOrAdd => header.atomic?.swap_or_add,
            HeaderField::Compare => header.atomic?.compare,
            HeaderField::Syndrome => header.aeth?.syndrome.byte().into(),
            HeaderField::Msn => header.aeth?.msn.into(),
            HeaderField::Original => header.atomic_ack?.0,
            HeaderField::Immediate => header.immediate?.0.into(),
            HeaderField::InvalidatedKey => header.ieth?.0.into(),
        })
    }

    #[test]
    fn every_field_of_every_opcode_matches_the_parser() {
        for opcode in Opcode::all() {
            let frame = Packet::new(opcode, 0x12_3456).frame();
            let (header, _) = TransportHeader::parse(&frame.bytes).expect("a header");
            for &field in HeaderField::ALL {
                let found = field.is_in(opcode).then(|| field.bit_range(opcode).read(&frame.bytes));
                assert_eq!(found, parsed(field, &header), "{field:?} of {opcode}");
            }
        }
    }

    #[test]
    fn rewrite_changes_only_its_field() {
        for opcode in Opcode::all() {
            for &field in HeaderField::ALL.iter().filter(|field| field.is_in(opcode)) {
                let before = Packet::new(opcode, 0x12_3456).frame().bytes;
                let mut after = before.clone();
                let (from, to) = field.rewrite(opcode, &mut after, FieldValue::Add(-1));
                let mask = field.bit_range(opcode).mask();
                assert_eq!(to, from.wrapping_sub(1) & mask);
                assert_eq!(field.bit_range(opcode).read(&after), to);
                field.bit_range(opcode).write(&mut after, from);
                assert_eq!(after, before, "{field:?} of {opcode}");
            }
        }
    }

    #[test]
    fn value_is_truncated_to_the_width_of_its_field() {
        let opcode = Packet::rc(Operation::Write, 0).opcode;
        let mut bytes = Packet::rc(Operation::Write, 0).frame().bytes;
        assert_eq!(HeaderField::Psn.rewrite(opcode, &mut bytes, FieldValue::Set(0x1ff_ffff)), (0, 0xff_ffff));
    }

    #[test]
    fn payload_range_matches_the_parser() {
        for opcode in Opcode::all() {
            for length in [0, 1, 5, 8] {
                let bytes = Packet::new(opcode, 0).payload(length).frame().bytes;
                let (transport, _) = Icrc::split(&bytes).expect("an ICRC");
                let packet = TransportPacket::parse(transport).expect("a packet");
                assert_eq!(&bytes[payload(opcode, &bytes)], packet.payload, "{opcode}");
            }
        }
    }
}
