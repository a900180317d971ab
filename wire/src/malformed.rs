//! Why bytes are not a packet.

use thiserror::Error;

/// The first reason found why bytes cannot be taken for the format they claim to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Malformed {
    /// Fewer bytes than the header needs.
    #[error("{what} needs {needed} bytes, {available} are there")]
    Truncated {
        /// The header that was cut.
        what: &'static str,
        /// How many bytes it takes.
        needed: usize,
        /// How many there were.
        available: usize,
    },
    /// A length field that disagrees with the bytes that are there, or with another field.
    #[error("{what} says {stated} bytes, {actual} are there")]
    Length {
        /// The field.
        what: &'static str,
        /// What it says.
        stated: usize,
        /// What was found.
        actual: usize,
    },
    /// A version field with a value that no specification defines or that this build does not speak.
    #[error("{what} version {version} is not supported")]
    Version {
        /// The header.
        what: &'static str,
        /// The version it has.
        version: u8,
    },
    /// An opcode that the table does not have.
    #[error("opcode {0:#04x} is not defined")]
    Opcode(u8),
    /// A pad count larger than the bytes behind the headers, or on an opcode that carries no payload.
    #[error("pad count {pad} with {payload} bytes of payload")]
    Padding {
        /// The pad count of the BTH.
        pad: u8,
        /// The bytes behind the headers, the ICRC excluded.
        payload: usize,
    },
    /// An AETH syndrome that is reserved.
    #[error("AETH syndrome {0:#04x} is reserved")]
    Syndrome(u8),
    /// A header checksum that is wrong.
    #[error("{what} checksum is wrong")]
    Checksum {
        /// The header.
        what: &'static str,
    },
    /// A field with a value outside of its range.
    #[error("{what} has the invalid value {value:#x}")]
    Field {
        /// The field.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// Not RoCE at all: another protocol or port.
    #[error("not RoCE: {what} {value:#x}")]
    NotRoce {
        /// The field that tells.
        what: &'static str,
        /// Its value.
        value: u64,
    },
}

/// The first `N` bytes, or why they are not there.
pub(crate) fn header_bytes<'a, const N: usize>(
    bytes: &'a [u8],
    what: &'static str,
) -> Result<&'a [u8; N], Malformed> {
    bytes.first_chunk().ok_or(Malformed::Truncated { what, needed: N, available: bytes.len() })
}
