//! The opcode table: service, operation, position, immediate data or invalidate key, and extended headers.
//!
//! All properties of an opcode come from this table; no other code compares opcode numbers.

use crate::header_set::ExtendedHeaders;
use core::fmt;

crate::named_enum! {
    /// The transport service, the upper three bits of an opcode.
    #[repr(u8)]
    pub enum Service {
        /// Reliable connection.
        Rc = 0x00 => "RC",
        /// Unreliable connection.
        Uc = 0x20 => "UC",
        /// Unreliable datagram.
        Ud = 0x60 => "UD",
        /// RoCEv2 congestion notification: a service with one opcode.
        Cnp = 0x80 => "CNP",
        /// Extended reliable connection.
        Xrc = 0xa0 => "XRC",
    }
}

/// The operation that a packet requests or answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operation {
    /// SEND.
    Send,
    /// RDMA WRITE.
    Write,
    /// RDMA READ request.
    ReadRequest,
    /// RDMA READ response.
    ReadResponse,
    /// ACK, NAK or RNR NAK.
    Acknowledge,
    /// Atomic ACK with the original value.
    AtomicAcknowledge,
    /// Compare and swap of eight bytes.
    CompareSwap,
    /// Fetch and add of eight bytes.
    FetchAdd,
    /// FLUSH: makes written data visible or persistent. Decoded, never executed.
    Flush,
    /// Atomic write of eight bytes. Decoded, never executed.
    AtomicWrite,
    /// A congestion notification packet.
    Cnp,
}

impl Operation {
    /// Whether the requester sends this operation.
    pub const fn is_request(self) -> bool {
        !matches!(
            self,
            Operation::ReadResponse | Operation::Acknowledge | Operation::AtomicAcknowledge | Operation::Cnp
        )
    }

    /// Whether the response carries data.
    #[inline]
    pub const fn is_read_or_atomic(self) -> bool {
        matches!(self, Operation::ReadRequest | Operation::CompareSwap | Operation::FetchAdd)
    }

    /// Whether this is one of the two atomic requests that return a value.
    pub const fn is_atomic(self) -> bool {
        matches!(self, Operation::CompareSwap | Operation::FetchAdd)
    }
}

/// The position of a packet in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Position {
    /// The first of several packets.
    First,
    /// Neither the first nor the last packet.
    Middle,
    /// The last of several packets.
    Last,
    /// The only packet of the message.
    Only,
}

impl Position {
    /// The position of packet `index` of `count`.
    #[inline]
    pub const fn of(index: u32, count: u32) -> Position {
        match (index == 0, index + 1 == count) {
            (true, true) => Position::Only,
            (true, false) => Position::First,
            (false, true) => Position::Last,
            (false, false) => Position::Middle,
        }
    }

    /// Whether a message starts here.
    #[inline]
    pub const fn starts_message(self) -> bool {
        matches!(self, Position::First | Position::Only)
    }

    /// Whether a message ends here.
    #[inline]
    pub const fn ends_message(self) -> bool {
        matches!(self, Position::Last | Position::Only)
    }
}

/// Immediate data or invalidate key in the last packet of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ImmOrInvalidate {
    /// Neither.
    None,
    /// Immediate data: four bytes for the receiver's CQE.
    Immediate,
    /// The rkey that the receiver invalidates.
    Invalidate,
}

/// Bytes of a BTH.
pub(crate) const BTH_LEN: usize = 12;

/// One row of the table.
#[derive(Clone, Copy)]
struct OpcodeRow {
    operation: Operation,
    position: Position,
    imm_or_invalidate: ImmOrInvalidate,
    headers: ExtendedHeaders,
    name: &'static str,
}

/// Indexed by the lower five bits of the opcode. [`Service::defines`] lists the rows of each service.
const TABLE: [Option<OpcodeRow>; 32] = {
    use ImmOrInvalidate as T;
    use Operation as O;
    use Position::*;
    const NONE: ExtendedHeaders = ExtendedHeaders::empty();
    const RETH: ExtendedHeaders = ExtendedHeaders::RETH;
    const AETH: ExtendedHeaders = ExtendedHeaders::AETH;
    const IMM: ExtendedHeaders = ExtendedHeaders::IMMEDIATE;
    const fn row(
        name: &'static str,
        operation: Operation,
        position: Position,
        imm_or_invalidate: ImmOrInvalidate,
        headers: ExtendedHeaders,
    ) -> Option<OpcodeRow> {
        Some(OpcodeRow { operation, position, imm_or_invalidate, headers, name })
    }
    let mut t = [None; 32];
    t[0x00] = row("SEND_FIRST", O::Send, First, T::None, NONE);
    t[0x01] = row("SEND_MIDDLE", O::Send, Middle, T::None, NONE);
    t[0x02] = row("SEND_LAST", O::Send, Last, T::None, NONE);
    t[0x03] = row("SEND_LAST_IMM", O::Send, Last, T::Immediate, IMM);
    t[0x04] = row("SEND_ONLY", O::Send, Only, T::None, NONE);
    t[0x05] = row("SEND_ONLY_IMM", O::Send, Only, T::Immediate, IMM);
    t[0x06] = row("WRITE_FIRST", O::Write, First, T::None, RETH);
    t[0x07] = row("WRITE_MIDDLE", O::Write, Middle, T::None, NONE);
    t[0x08] = row("WRITE_LAST", O::Write, Last, T::None, NONE);
    t[0x09] = row("WRITE_LAST_IMM", O::Write, Last, T::Immediate, IMM);
    t[0x0a] = row("WRITE_ONLY", O::Write, Only, T::None, RETH);
    t[0x0b] = row("WRITE_ONLY_IMM", O::Write, Only, T::Immediate, RETH.union(IMM));
    t[0x0c] = row("READ_REQUEST", O::ReadRequest, Only, T::None, RETH);
    t[0x0d] = row("READ_RESPONSE_FIRST", O::ReadResponse, First, T::None, AETH);
    t[0x0e] = row("READ_RESPONSE_MIDDLE", O::ReadResponse, Middle, T::None, NONE);
    t[0x0f] = row("READ_RESPONSE_LAST", O::ReadResponse, Last, T::None, AETH);
    t[0x10] = row("READ_RESPONSE_ONLY", O::ReadResponse, Only, T::None, AETH);
    t[0x11] = row("ACKNOWLEDGE", O::Acknowledge, Only, T::None, AETH);
    t[0x12] = row(
        "ATOMIC_ACKNOWLEDGE",
        O::AtomicAcknowledge,
        Only,
        T::None,
        AETH.union(ExtendedHeaders::ATOMIC_ACK),
    );
    t[0x13] = row("COMPARE_SWAP", O::CompareSwap, Only, T::None, ExtendedHeaders::ATOMIC);
    t[0x14] = row("FETCH_ADD", O::FetchAdd, Only, T::None, ExtendedHeaders::ATOMIC);
    t[0x16] = row("SEND_LAST_INV", O::Send, Last, T::Invalidate, ExtendedHeaders::IETH);
    t[0x17] = row("SEND_ONLY_INV", O::Send, Only, T::Invalidate, ExtendedHeaders::IETH);
    t[0x1c] = row("FLUSH", O::Flush, Only, T::None, ExtendedHeaders::FETH.union(RETH));
    t[0x1d] = row("ATOMIC_WRITE", O::AtomicWrite, Only, T::None, RETH);
    t
};

impl Service {
    /// Whether the service defines the opcode with these lower five bits.
    const fn defines(self, low: usize) -> bool {
        match self {
            Service::Rc | Service::Xrc => TABLE[low].is_some(),
            Service::Uc => low <= 0x0b,
            Service::Ud => low == 0x04 || low == 0x05,
            Service::Cnp => low == 0x01,
        }
    }

    /// Headers that the service adds to those of the table.
    const fn headers(self, operation: Operation) -> ExtendedHeaders {
        match self {
            Service::Ud => ExtendedHeaders::DETH,
            Service::Xrc if operation.is_request() => ExtendedHeaders::XRCETH,
            _ => ExtendedHeaders::empty(),
        }
    }

    /// Whether the service acknowledges requests.
    pub const fn is_reliable(self) -> bool {
        matches!(self, Service::Rc | Service::Xrc)
    }
}

const CNP: OpcodeRow = OpcodeRow {
    operation: Operation::Cnp,
    position: Position::Only,
    imm_or_invalidate: ImmOrInvalidate::None,
    headers: ExtendedHeaders::empty(),
    name: "CNP",
};

/// The properties of an opcode.
#[derive(Clone, Copy)]
struct OpcodeEntry {
    defined: bool,
    service: Service,
    operation: Operation,
    position: Position,
    imm_or_invalidate: ImmOrInvalidate,
    headers: ExtendedHeaders,
    /// Bytes from the BTH to the last extended header.
    length: u8,
}

/// The expanded table, indexed by opcode number: the data path does one lookup.
static OPCODES: [OpcodeEntry; 256] = {
    const UNDEFINED: OpcodeEntry = OpcodeEntry {
        defined: false,
        service: Service::Cnp,
        operation: CNP.operation,
        position: CNP.position,
        imm_or_invalidate: CNP.imm_or_invalidate,
        headers: CNP.headers,
        length: 0,
    };
    let mut entries = [UNDEFINED; 256];
    let mut index = 0;
    while index < Service::ALL.len() {
        let service = Service::ALL[index];
        let mut low = 0;
        while low < 32 {
            let row = if matches!(service, Service::Cnp) { Some(CNP) } else { TABLE[low] };
            if let Some(row) = row
                && service.defines(low)
            {
                let headers = row.headers.union(service.headers(row.operation));
                entries[service as usize | low] = OpcodeEntry {
                    defined: true,
                    service,
                    operation: row.operation,
                    position: row.position,
                    imm_or_invalidate: row.imm_or_invalidate,
                    headers,
                    length: (BTH_LEN + headers.length()) as u8,
                };
            }
            low += 1;
        }
        index += 1;
    }
    entries
};

const UNDEFINED_LOW_BITS: u8 = 0xff;

/// The index of a combination in [`LOW_BITS_BY_PARTS`].
const fn parts_index(operation: Operation, position: Position, imm_or_invalidate: ImmOrInvalidate) -> usize {
    (operation as usize * 4 + position as usize) * 3 + imm_or_invalidate as usize
}

/// The inverse table: the lower five opcode bits of each combination.
static LOW_BITS_BY_PARTS: [u8; 11 * 4 * 3] = {
    let mut low = [UNDEFINED_LOW_BITS; 11 * 4 * 3];
    let mut index = 0;
    while index < TABLE.len() {
        if let Some(row) = &TABLE[index] {
            low[parts_index(row.operation, row.position, row.imm_or_invalidate)] = index as u8;
        }
        index += 1;
    }
    low
};

/// A defined opcode.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(try_from = "u8", into = "u8")
)]
pub struct Opcode(u8);

#[cfg(feature = "serde")]
impl TryFrom<u8> for Opcode {
    type Error = &'static str;

    fn try_from(byte: u8) -> Result<Opcode, &'static str> {
        Opcode::from_byte(byte).ok_or("undefined opcode")
    }
}

#[cfg(feature = "serde")]
impl From<Opcode> for u8 {
    fn from(opcode: Opcode) -> u8 {
        opcode.0
    }
}

impl Opcode {
    /// The congestion notification packet.
    pub const CNP: Opcode = Opcode(0x81);

    /// The opcode with this number, if it is defined.
    #[inline]
    pub fn from_byte(byte: u8) -> Option<Opcode> {
        OPCODES[usize::from(byte)].defined.then_some(Opcode(byte))
    }

    /// The opcode for this combination, if defined.
    pub fn new(
        service: Service,
        operation: Operation,
        position: Position,
        imm_or_invalidate: ImmOrInvalidate,
    ) -> Option<Opcode> {
        if operation == Operation::Cnp {
            return (service == Service::Cnp).then_some(Opcode::CNP);
        }
        // Only the last packet of a message carries immediate data or an invalidate key.
        let imm_or_invalidate =
            if position.ends_message() { imm_or_invalidate } else { ImmOrInvalidate::None };
        match LOW_BITS_BY_PARTS[parts_index(operation, position, imm_or_invalidate)] {
            UNDEFINED_LOW_BITS => None,
            low => Opcode::from_byte(service as u8 | low),
        }
    }

    /// Every defined opcode, in numerical order.
    pub fn all() -> impl Iterator<Item = Opcode> {
        (0..=u8::MAX).filter_map(Opcode::from_byte)
    }

    /// The number on the wire.
    #[inline]
    pub const fn byte(self) -> u8 {
        self.0
    }

    #[inline]
    fn entry(self) -> &'static OpcodeEntry {
        &OPCODES[usize::from(self.0)]
    }

    /// The transport service.
    #[inline]
    pub fn service(self) -> Service {
        self.entry().service
    }

    /// The operation.
    #[inline]
    pub fn operation(self) -> Operation {
        self.entry().operation
    }

    /// The position in the message.
    #[inline]
    pub fn position(self) -> Position {
        self.entry().position
    }

    /// The immediate data or invalidate key.
    #[inline]
    pub fn imm_or_invalidate(self) -> ImmOrInvalidate {
        self.entry().imm_or_invalidate
    }

    /// The extended headers that follow the BTH.
    #[inline]
    pub fn headers(self) -> ExtendedHeaders {
        self.entry().headers
    }

    /// Bytes of the BTH and the extended headers: the offset of the payload.
    #[inline]
    pub fn header_length(self) -> usize {
        usize::from(self.entry().length)
    }

    /// Whether the packet can carry payload.
    #[inline]
    pub fn has_payload(self) -> bool {
        matches!(
            self.operation(),
            Operation::Send | Operation::Write | Operation::ReadResponse | Operation::AtomicWrite
        )
    }

    /// The name without the service, such as `WRITE_FIRST`.
    pub fn name(self) -> &'static str {
        match TABLE[usize::from(self.0 & 0x1f)] {
            Some(row) if self != Opcode::CNP => row.name,
            _ => CNP.name,
        }
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Opcode::CNP => f.write_str("CNP"),
            _ => write!(f, "{} {}", self.service().name(), self.name()),
        }
    }
}

impl fmt::Debug for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The opcodes of a service by name.
macro_rules! named_opcodes {
    ($($service:ident { $($name:ident $byte:literal)* })*) => {
        impl Opcode {$($(
            #[doc = concat!("Number ", stringify!($byte), ".")]
            pub const $name: Opcode = Opcode($byte);
        )*)*}

        #[cfg(test)]
        const NAMED: &[(Service, &str, Opcode)] =
            &[$($((Service::$service, stringify!($name), Opcode::$name)),*),*];
    };
}

named_opcodes! {
    Rc {
        RC_SEND_FIRST 0x00 RC_SEND_MIDDLE 0x01 RC_SEND_LAST 0x02 RC_SEND_LAST_IMM 0x03 RC_SEND_ONLY 0x04
        RC_SEND_ONLY_IMM 0x05 RC_WRITE_FIRST 0x06 RC_WRITE_MIDDLE 0x07 RC_WRITE_LAST 0x08
        RC_WRITE_LAST_IMM 0x09 RC_WRITE_ONLY 0x0a RC_WRITE_ONLY_IMM 0x0b RC_READ_REQUEST 0x0c
        RC_READ_RESPONSE_FIRST 0x0d RC_READ_RESPONSE_MIDDLE 0x0e RC_READ_RESPONSE_LAST 0x0f
        RC_READ_RESPONSE_ONLY 0x10 RC_ACKNOWLEDGE 0x11 RC_ATOMIC_ACKNOWLEDGE 0x12 RC_COMPARE_SWAP 0x13
        RC_FETCH_ADD 0x14 RC_SEND_LAST_INV 0x16 RC_SEND_ONLY_INV 0x17 RC_FLUSH 0x1c RC_ATOMIC_WRITE 0x1d
    }
    Uc {
        UC_SEND_FIRST 0x20 UC_SEND_MIDDLE 0x21 UC_SEND_LAST 0x22 UC_SEND_LAST_IMM 0x23 UC_SEND_ONLY 0x24
        UC_SEND_ONLY_IMM 0x25 UC_WRITE_FIRST 0x26 UC_WRITE_MIDDLE 0x27 UC_WRITE_LAST 0x28
        UC_WRITE_LAST_IMM 0x29 UC_WRITE_ONLY 0x2a UC_WRITE_ONLY_IMM 0x2b
    }
    Ud {
        UD_SEND_ONLY 0x64 UD_SEND_ONLY_IMM 0x65
    }
    Xrc {
        XRC_SEND_FIRST 0xa0 XRC_SEND_MIDDLE 0xa1 XRC_SEND_LAST 0xa2 XRC_SEND_LAST_IMM 0xa3 XRC_SEND_ONLY 0xa4
        XRC_SEND_ONLY_IMM 0xa5 XRC_WRITE_FIRST 0xa6 XRC_WRITE_MIDDLE 0xa7 XRC_WRITE_LAST 0xa8
        XRC_WRITE_LAST_IMM 0xa9 XRC_WRITE_ONLY 0xaa XRC_WRITE_ONLY_IMM 0xab XRC_READ_REQUEST 0xac
        XRC_READ_RESPONSE_FIRST 0xad XRC_READ_RESPONSE_MIDDLE 0xae XRC_READ_RESPONSE_LAST 0xaf
        XRC_READ_RESPONSE_ONLY 0xb0 XRC_ACKNOWLEDGE 0xb1 XRC_ATOMIC_ACKNOWLEDGE 0xb2 XRC_COMPARE_SWAP 0xb3
        XRC_FETCH_ADD 0xb4 XRC_SEND_LAST_INV 0xb6 XRC_SEND_ONLY_INV 0xb7 XRC_FLUSH 0xbc XRC_ATOMIC_WRITE 0xbd
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_opcode_round_trips_through_its_parts() {
        for opcode in Opcode::all() {
            let found = Opcode::new(
                opcode.service(),
                opcode.operation(),
                opcode.position(),
                opcode.imm_or_invalidate(),
            );
            assert_eq!(found, Some(opcode));
        }
    }

    #[test]
    fn opcode_count_per_service_matches_the_specification() {
        let count = |service| Opcode::all().filter(|o| o.service() == service).count();
        assert_eq!(count(Service::Rc), 25);
        assert_eq!(count(Service::Xrc), 25);
        assert_eq!(count(Service::Uc), 12);
        assert_eq!(count(Service::Ud), 2);
        assert_eq!(count(Service::Cnp), 1);
    }

    #[test]
    fn every_opcode_has_a_constant_with_its_name() {
        for (service, name, opcode) in NAMED {
            assert_eq!(name.split_once('_'), Some((service.name(), opcode.name())));
            assert_eq!(opcode.service(), *service);
        }
        let is_named = |opcode| NAMED.iter().filter(|(.., named)| *named == opcode).count() == 1;
        assert!(Opcode::all().all(|opcode| opcode == Opcode::CNP || is_named(opcode)));
    }
}
