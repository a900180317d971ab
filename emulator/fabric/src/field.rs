//! Fields of transport headers as ranges of bits, so that a rule can rewrite any of them.

use softhca_wire::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Feth, Headers, ICRC_LEN, Ieth, Immediate, Opcode, Reth, XrcEth,
};

/// A field of a BTH or of an extended header.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Field {
    /// BTH: the opcode.
    Opcode,
    /// BTH: the solicited event bit.
    Solicited,
    /// BTH: the path migration bit.
    Migration,
    /// BTH: the number of pad bytes.
    Pad,
    /// BTH: the transport header version.
    Version,
    /// BTH: the partition key.
    PartitionKey,
    /// BTH: the reserved byte, which the ICRC does not cover.
    Reserved,
    /// BTH: the destination queue pair.
    DestinationQp,
    /// BTH: the acknowledge request bit.
    AckRequest,
    /// BTH: the packet sequence number.
    Psn,
    /// DETH: the Q_Key.
    QueueKey,
    /// DETH: the source queue pair.
    SourceQp,
    /// XRCETH: the shared receive queue.
    SharedReceiveQueue,
    /// FETH: the kind of flush.
    Flush,
    /// RETH: the virtual address.
    Address,
    /// RETH: the remote key.
    RemoteKey,
    /// RETH: the length of the message.
    Length,
    /// AtomicETH: the virtual address.
    AtomicAddress,
    /// AtomicETH: the remote key.
    AtomicKey,
    /// AtomicETH: the value to swap in or to add.
    SwapOrAdd,
    /// AtomicETH: the value to compare with.
    Compare,
    /// AETH: the syndrome.
    Syndrome,
    /// AETH: the message sequence number.
    Msn,
    /// AtomicAckETH: the value before the atomic.
    Original,
    /// ImmDt: the immediate data.
    Immediate,
    /// IETH: the key to invalidate.
    InvalidatedKey,
}

/// What a field becomes.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// This.
    To(u64),
    /// What it was and so much more, modulo its width.
    Plus(i64),
}

/// A range of bits in a packet, counted from the highest bit of the first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    first: usize,
    width: usize,
}

impl Field {
    /// The extended header that has the field (none for the BTH), its first bit there, and its width.
    const fn place(self) -> (Headers, usize, usize) {
        const BTH: Headers = Headers::empty();
        match self {
            Field::Opcode => (BTH, 0, 8),
            Field::Solicited => (BTH, 8, 1),
            Field::Migration => (BTH, 9, 1),
            Field::Pad => (BTH, 10, 2),
            Field::Version => (BTH, 12, 4),
            Field::PartitionKey => (BTH, 16, 16),
            Field::Reserved => (BTH, 32, 8),
            Field::DestinationQp => (BTH, 40, 24),
            Field::AckRequest => (BTH, 64, 1),
            Field::Psn => (BTH, 72, 24),
            Field::QueueKey => (Headers::DETH, 0, 32),
            Field::SourceQp => (Headers::DETH, 40, 24),
            Field::SharedReceiveQueue => (Headers::XRCETH, 8, 24),
            Field::Flush => (Headers::FETH, 0, 32),
            Field::Address => (Headers::RETH, 0, 64),
            Field::RemoteKey => (Headers::RETH, 64, 32),
            Field::Length => (Headers::RETH, 96, 32),
            Field::AtomicAddress => (Headers::ATOMIC, 0, 64),
            Field::AtomicKey => (Headers::ATOMIC, 64, 32),
            Field::SwapOrAdd => (Headers::ATOMIC, 96, 64),
            Field::Compare => (Headers::ATOMIC, 160, 64),
            Field::Syndrome => (Headers::AETH, 0, 8),
            Field::Msn => (Headers::AETH, 8, 24),
            Field::Original => (Headers::ATOMIC_ACK, 0, 64),
            Field::Immediate => (Headers::IMMEDIATE, 0, 32),
            Field::InvalidatedKey => (Headers::IETH, 0, 32),
        }
    }

    /// How many bits it has.
    pub const fn width(self) -> usize {
        self.place().2
    }

    /// Whether packets with this opcode have the field.
    pub fn is_in(self, opcode: Opcode) -> bool {
        opcode.headers().contains(self.place().0)
    }

    fn slot(self, opcode: Opcode) -> Slot {
        let (header, first, width) = self.place();
        let start = if header.is_empty() { 0 } else { header_end(opcode, header) };
        Slot { first: start * 8 + first, width }
    }

    /// Changes the field in a packet with this opcode, which must have it; returns what it was and is.
    pub(crate) fn rewrite(self, opcode: Opcode, bytes: &mut [u8], value: Value) -> (u64, u64) {
        let slot = self.slot(opcode);
        let from = slot.read(bytes);
        let to = match value {
            Value::To(to) => to,
            Value::Plus(more) => from.wrapping_add_signed(more),
        } & slot.mask();
        slot.write(bytes, to);
        (from, to)
    }
}

/// The extended headers in wire order.
const LENGTHS: [(Headers, usize); 9] = [
    (Headers::DETH, Deth::LEN),
    (Headers::XRCETH, XrcEth::LEN),
    (Headers::FETH, Feth::LEN),
    (Headers::RETH, Reth::LEN),
    (Headers::ATOMIC, AtomicEth::LEN),
    (Headers::AETH, Aeth::LEN),
    (Headers::ATOMIC_ACK, AtomicAckEth::LEN),
    (Headers::IMMEDIATE, Immediate::LEN),
    (Headers::IETH, Ieth::LEN),
];

/// Where the headers before `stop` end; with none to stop at, where the payload starts.
fn header_end(opcode: Opcode, stop: Headers) -> usize {
    let before = LENGTHS.iter().take_while(|(header, _)| *header != stop);
    let present = before.filter(|(header, _)| opcode.headers().contains(*header));
    Bth::LEN + present.map(|(_, length)| length).sum::<usize>()
}

/// The payload of a packet with this opcode, as a range of its bytes: no headers, pad bytes or ICRC.
pub(crate) fn payload(opcode: Opcode, bytes: &[u8]) -> core::ops::Range<usize> {
    let pad = Field::Pad.slot(opcode).read(bytes) as usize;
    header_end(opcode, Headers::empty())..bytes.len() - ICRC_LEN - pad
}

impl Slot {
    const fn mask(self) -> u64 {
        u64::MAX >> (64 - self.width)
    }

    /// The bytes that hold it, at most eight, and how many bits they have behind it.
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
    use softhca_wire::{Header, Icrc, Operation, Transport};

    const ALL: [Field; 26] = [
        Field::Opcode,
        Field::Solicited,
        Field::Migration,
        Field::Pad,
        Field::Version,
        Field::PartitionKey,
        Field::Reserved,
        Field::DestinationQp,
        Field::AckRequest,
        Field::Psn,
        Field::QueueKey,
        Field::SourceQp,
        Field::SharedReceiveQueue,
        Field::Flush,
        Field::Address,
        Field::RemoteKey,
        Field::Length,
        Field::AtomicAddress,
        Field::AtomicKey,
        Field::SwapOrAdd,
        Field::Compare,
        Field::Syndrome,
        Field::Msn,
        Field::Original,
        Field::Immediate,
        Field::InvalidatedKey,
    ];

    /// The field as the parser of headers reads it.
    fn parsed(field: Field, header: &Header) -> Option<u64> {
        let bth = &header.bth;
        Some(match field {
            Field::Opcode => bth.opcode.byte().into(),
            Field::Solicited => bth.solicited.into(),
            Field::Migration => bth.migration.into(),
            Field::Pad => bth.pad.into(),
            Field::Version => 0,
            Field::PartitionKey => bth.partition.0.into(),
            Field::Reserved => bth.reserved.into(),
            Field::DestinationQp => bth.destination.value().into(),
            Field::AckRequest => bth.ack_request.into(),
            Field::Psn => bth.psn.value().into(),
            Field::QueueKey => header.deth?.queue_key.0.into(),
            Field::SourceQp => header.deth?.source.value().into(),
            Field::SharedReceiveQueue => header.xrceth?.0.into(),
            Field::Flush => header.feth?.0.into(),
            Field::Address => header.reth?.address,
            Field::RemoteKey => header.reth?.key.0.into(),
            Field::Length => header.reth?.length.into(),
            Field::AtomicAddress => header.atomic?.address,
            Field::AtomicKey => header.atomic?.key.0.into(),
            Field::SwapOrAdd => header.atomic?.swap_or_add,
            Field::Compare => header.atomic?.compare,
            Field::Syndrome => header.aeth?.syndrome.byte().into(),
            Field::Msn => header.aeth?.msn.into(),
            Field::Original => header.atomic_ack?.0,
            Field::Immediate => header.immediate?.0.into(),
            Field::InvalidatedKey => header.ieth?.0.into(),
        })
    }

    #[test]
    fn every_field_of_every_opcode_is_where_the_parser_finds_it() {
        for opcode in Opcode::all() {
            let frame = Packet::new(opcode, 0x12_3456).frame();
            let (header, _) = Header::parse(&frame.bytes).expect("a header");
            for field in ALL {
                let found = field.is_in(opcode).then(|| field.slot(opcode).read(&frame.bytes));
                assert_eq!(found, parsed(field, &header), "{field:?} of {opcode}");
            }
        }
    }

    #[test]
    fn a_rewrite_changes_its_field_and_nothing_else() {
        for opcode in Opcode::all() {
            for field in ALL.into_iter().filter(|field| field.is_in(opcode)) {
                let before = Packet::new(opcode, 0x12_3456).frame().bytes;
                let mut after = before.clone();
                let (from, to) = field.rewrite(opcode, &mut after, Value::Plus(-1));
                let mask = field.slot(opcode).mask();
                assert_eq!(to, from.wrapping_sub(1) & mask);
                assert_eq!(field.slot(opcode).read(&after), to);
                field.slot(opcode).write(&mut after, from);
                assert_eq!(after, before, "{field:?} of {opcode}");
            }
        }
    }

    #[test]
    fn a_value_too_wide_is_cut_to_the_width_of_its_field() {
        let opcode = Packet::rc(Operation::Write, 0).opcode;
        let mut bytes = Packet::rc(Operation::Write, 0).frame().bytes;
        assert_eq!(Field::Psn.rewrite(opcode, &mut bytes, Value::To(0x1ff_ffff)), (0, 0xff_ffff));
    }

    #[test]
    fn the_payload_is_what_the_parser_says() {
        for opcode in Opcode::all() {
            for length in [0, 1, 5, 8] {
                let bytes = Packet::new(opcode, 0).payload(length).frame().bytes;
                let (transport, _) = Icrc::split(&bytes).expect("an ICRC");
                let packet = Transport::parse(transport).expect("a packet");
                assert_eq!(&bytes[payload(opcode, &bytes)], packet.payload, "{opcode}");
            }
        }
    }
}
