//! Transport headers and transport packets, from the BTH to the pad bytes.

use crate::header_set::in_wire_order;
use crate::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, ExtendedHeaders, Feth, Ieth, Immediate, Malformed, Opcode,
    Operation, Reth, XrcEth,
};
use core::fmt;

/// The BTH and the extended headers that its opcode requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each field is the header of its type")]
pub struct TransportHeader {
    pub bth: Bth,
    pub deth: Option<Deth>,
    pub xrceth: Option<XrcEth>,
    pub feth: Option<Feth>,
    pub reth: Option<Reth>,
    pub atomic: Option<AtomicEth>,
    pub aeth: Option<Aeth>,
    pub atomic_ack: Option<AtomicAckEth>,
    pub immediate: Option<Immediate>,
    pub ieth: Option<Ieth>,
}

impl TransportHeader {
    /// The longest header: an XRC atomic.
    pub const MAX_LEN: usize = Bth::LEN + XrcEth::LEN + AtomicEth::LEN;

    /// A header without extended headers; set those that the opcode requires before
    /// [`TransportHeader::emit`].
    #[inline]
    pub const fn new(bth: Bth) -> TransportHeader {
        TransportHeader {
            bth,
            deth: None,
            xrceth: None,
            feth: None,
            reth: None,
            atomic: None,
            aeth: None,
            atomic_ack: None,
            immediate: None,
            ieth: None,
        }
    }

    /// Parses a header at the start of `bytes`. Returns it with its length.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<(TransportHeader, usize), Malformed> {
        let mut header = TransportHeader::new(Bth::parse(bytes)?);
        let opcode = header.bth.opcode;
        let length = opcode.header_length();
        let Some(mut rest) = bytes.get(Bth::LEN..length) else {
            let what = "BTH and extended headers";
            return Err(Malformed::Truncated { what, needed: length, available: bytes.len() });
        };
        if rest.is_empty() {
            return Ok((header, length));
        }
        let wanted = opcode.headers();
        macro_rules! parse {
            ($field:ident, $flag:ident, $kind:ty) => {
                if wanted.contains(ExtendedHeaders::$flag) {
                    header.$field = Some(<$kind>::parse(rest)?);
                    rest = &rest[<$kind>::LEN..];
                }
            };
        }
        in_wire_order!(parse);
        debug_assert!(rest.is_empty());
        Ok((header, length))
    }

    /// Writes the header to the start of `bytes`, which must have room; returns its length.
    ///
    /// # Panics
    /// If the extended headers differ from those that the opcode requires: only a bug builds such a packet.
    #[inline]
    pub fn emit(&self, bytes: &mut [u8]) -> usize {
        let wanted = self.bth.opcode.headers();
        self.bth.emit(bytes);
        let mut at = Bth::LEN;
        macro_rules! emit {
            ($field:ident, $flag:ident, $kind:ty) => {
                debug_assert_eq!(
                    wanted.contains(ExtendedHeaders::$flag),
                    self.$field.is_some(),
                    concat!(stringify!($field), " does not fit {}"),
                    self.bth.opcode
                );
                if let Some(header) = &self.$field {
                    header.emit(&mut bytes[at..]);
                    at += <$kind>::LEN;
                }
            };
        }
        in_wire_order!(emit);
        at
    }
}

impl fmt::Display for TransportHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bth.fmt(f)?;
        if let (Operation::FetchAdd, Some(AtomicEth { virtual_address, rkey, swap_or_add, .. })) =
            (self.bth.opcode.operation(), self.atomic)
        {
            if let Some(xrceth) = self.xrceth {
                write!(f, " {xrceth}")?;
            }
            return write!(f, " va={virtual_address:#x} rkey={rkey} add={swap_or_add:#x}");
        }
        macro_rules! show {
            ($field:ident, $flag:ident, $kind:ty) => {
                if let Some(header) = &self.$field {
                    write!(f, " {header}")?;
                }
            };
        }
        in_wire_order!(show);
        Ok(())
    }
}

/// A transport packet without the ICRC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransportPacket<'a> {
    /// The headers.
    pub header: TransportHeader,
    /// The payload, without pad bytes.
    pub payload: &'a [u8],
    /// The pad bytes. All known senders set them to zero; the ICRC covers them.
    pub padding: &'a [u8],
}

impl<'a> TransportPacket<'a> {
    /// Parses the bytes between the UDP header and the ICRC.
    #[inline]
    pub fn parse(bytes: &'a [u8]) -> Result<TransportPacket<'a>, Malformed> {
        let (header, at) = TransportHeader::parse(bytes)?;
        let rest = &bytes[at..];
        let bth = &header.bth;
        let opcode = bth.opcode;
        let wrong_padding = Malformed::Padding { pad: bth.pad, payload: rest.len() };
        let payload = rest.len().checked_sub(usize::from(bth.pad)).ok_or(wrong_padding)?;
        // A CNP carries 16 reserved bytes in place of payload.
        if !rest.is_empty() && !opcode.has_payload() && opcode != Opcode::CNP {
            return Err(Malformed::Length {
                what: "a packet without payload",
                stated: 0,
                actual: rest.len(),
            });
        }
        if opcode.operation() == Operation::AtomicWrite && payload != 8 {
            return Err(Malformed::Length { what: "ATOMIC_WRITE payload", stated: 8, actual: payload });
        }
        if !rest.len().is_multiple_of(4) {
            return Err(wrong_padding);
        }
        let (payload, padding) = rest.split_at(payload);
        Ok(TransportPacket { header, payload, padding })
    }

    /// Bytes that [`TransportPacket::emit`] writes.
    pub fn len(&self) -> usize {
        self.header.bth.opcode.header_length() + self.payload.len() + self.padding.len()
    }

    /// Whether the payload is empty.
    pub fn is_empty(&self) -> bool {
        self.payload.is_empty()
    }

    /// Writes headers, payload and pad bytes. Returns the number of bytes.
    pub fn emit(&self, bytes: &mut [u8]) -> usize {
        let mut at = self.header.emit(bytes);
        for part in [self.payload, self.padding] {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        at
    }
}

impl fmt::Display for TransportPacket<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.header.fmt(f)?;
        if self.header.bth.opcode.has_payload() {
            write!(f, " payload={}", self.payload.len())?;
        }
        Ok(())
    }
}
