//! The acknowledge header and its syndromes.

use crate::Malformed;
use crate::display::display;
use crate::malformed::header_bytes;
use crate::number::narrow;
use core::fmt;

crate::named_enum! {
    /// NAK codes (IBA table 46).
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
    #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
    #[repr(u8)]
    pub enum NakCode {
        /// The responder received a PSN beyond the expected one.
        PsnSequenceError = 0 => "sequence error",
        /// Invalid opcode or length, or more outstanding READs or atomics than negotiated.
        InvalidRequest = 1 => "invalid request",
        /// The rkey, the bounds or the access flags do not permit the access.
        RemoteAccessError = 2 => "remote access error",
        /// The responder failed for a local reason.
        RemoteOperationalError = 3 => "remote operational error",
        /// Reliable datagram service only. Decoded, never sent.
        InvalidRdRequest = 4 => "invalid RD request",
    }
}

/// The five-bit RNR NAK timer code: the delay before the requester retries (IBA table 45).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(from = "u8", into = "u8"))]
pub struct RnrTimer(u8);

narrow!(RnrTimer: u8 = code);

impl RnrTimer {
    /// Delays in units of 10 µs, by code.
    const TABLE: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
        3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];

    /// The timer with the low five bits of `code`.
    pub const fn new(code: u8) -> RnrTimer {
        RnrTimer(code & 0x1f)
    }

    /// The code on the wire.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// The delay.
    pub const fn nanoseconds(self) -> u64 {
        Self::TABLE[self.0 as usize] as u64 * 10_000
    }
}

/// The five-bit end-to-end credit count: how many receives the responder has posted (IBA table 47).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Credits;

impl Credits {
    /// The code for "credits not used".
    pub const UNUSED: u8 = 31;

    const TABLE: [u32; 31] = [
        0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
        3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768,
    ];

    /// The code of the largest count that does not exceed `receives`.
    pub fn encode(receives: u32) -> u8 {
        (Self::TABLE.partition_point(|count| *count <= receives) - 1) as u8
    }

    /// The count for a code; `None` for the unused code.
    pub fn decode(code: u8) -> Option<u32> {
        Self::TABLE.get(usize::from(code)).copied()
    }
}

/// The AETH syndrome.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Syndrome {
    /// Acknowledged. The value is the encoded credit count (0 to 31; 31 means "not used").
    Ack(u8),
    /// Receiver not ready: the requester retries after this delay.
    RnrNak(RnrTimer),
    /// Negative acknowledgement.
    Nak(NakCode),
}

impl Syndrome {
    /// An ACK without a credit count.
    pub const ACK: Syndrome = Syndrome::Ack(31);

    /// The syndrome byte.
    pub const fn byte(self) -> u8 {
        match self {
            Syndrome::Ack(credits) => credits & 0x1f,
            Syndrome::RnrNak(timer) => 0x20 | timer.code(),
            Syndrome::Nak(code) => 0x60 | code as u8,
        }
    }

    /// The syndrome with this byte, unless it is reserved.
    #[inline]
    pub fn from_byte(byte: u8) -> Result<Syndrome, Malformed> {
        let low = byte & 0x1f;
        match byte >> 5 {
            0 => Ok(Syndrome::Ack(low)),
            1 => Ok(Syndrome::RnrNak(RnrTimer::new(low))),
            3 => NakCode::ALL
                .get(usize::from(low))
                .map(|code| Syndrome::Nak(*code))
                .ok_or(Malformed::Syndrome(byte)),
            _ => Err(Malformed::Syndrome(byte)),
        }
    }
}

impl fmt::Display for Syndrome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Syndrome::Ack(31) => f.write_str("ack"),
            Syndrome::Ack(credits) => write!(f, "ack credits={credits}"),
            Syndrome::RnrNak(timer) => write!(f, "rnr wait={}us", timer.nanoseconds() / 1000),
            Syndrome::Nak(code) => write!(f, "nak {}", code.name()),
        }
    }
}

/// The acknowledge header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aeth {
    /// ACK, NAK or RNR NAK.
    pub syndrome: Syndrome,
    /// The message sequence number: completed messages modulo 2^24.
    pub msn: u32,
}

impl Aeth {
    /// Bytes on the wire.
    pub const LEN: usize = 4;

    /// Parses the header at the start of `bytes`.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Aeth, Malformed> {
        let b = header_bytes::<{ Self::LEN }>(bytes, "AETH")?;
        Ok(Aeth { syndrome: Syndrome::from_byte(b[0])?, msn: u32::from_be_bytes([0, b[1], b[2], b[3]]) })
    }

    /// Writes the header to the start of `bytes`, which must have room.
    #[inline]
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..4].copy_from_slice(&(self.msn & 0xff_ffff).to_be_bytes());
        bytes[0] = self.syndrome.byte();
    }
}

display!(Aeth { syndrome, msn } "{syndrome} msn={msn}");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_credit_count_never_exceeds_the_posted_receives() {
        for receives in 0..40_000 {
            let count = Credits::decode(Credits::encode(receives)).unwrap();
            assert!(count <= receives && (count == receives || receives > 4), "{receives}");
        }
        assert_eq!(Credits::decode(Credits::UNUSED), None);
        assert_eq!(Credits::decode(30), Some(32_768));
    }
}
