//! Parse errors.

use thiserror::Error;

/// The first reason why bytes are not a valid instance of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Malformed {
    /// The input is shorter than the header.
    #[error("{what} needs {needed} bytes, got {available}")]
    Truncated {
        /// The truncated header.
        what: &'static str,
        /// The header's length.
        needed: usize,
        /// The input's length.
        available: usize,
    },
    /// A length field disagrees with the input or with another field.
    #[error("{what}: stated {stated} bytes, found {actual}")]
    Length {
        /// The field.
        what: &'static str,
        /// The field's value.
        stated: usize,
        /// The actual length.
        actual: usize,
    },
    /// A version field has an undefined or unsupported value.
    #[error("{what} version {version} is not supported")]
    Version {
        /// The header.
        what: &'static str,
        /// The version.
        version: u8,
    },
    /// The opcode is undefined.
    #[error("opcode {0:#04x} is not defined")]
    Opcode(u8),
    /// The pad count exceeds the bytes after the headers, or the opcode carries no payload.
    #[error("pad count {pad} with {payload} bytes of payload")]
    Padding {
        /// The pad count of the BTH.
        pad: u8,
        /// The bytes after the headers, without the ICRC.
        payload: usize,
    },
    /// The AETH syndrome is reserved.
    #[error("AETH syndrome {0:#04x} is reserved")]
    Syndrome(u8),
    /// A header checksum is wrong.
    #[error("{what} checksum is wrong")]
    Checksum {
        /// The header.
        what: &'static str,
    },
    /// A field is out of range.
    #[error("{what} has invalid value {value:#x}")]
    Field {
        /// The field.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// The bytes belong to another protocol or port.
    #[error("not RoCE: {what} {value:#x}")]
    NotRoce {
        /// The field that identifies the protocol.
        what: &'static str,
        /// Its value.
        value: u64,
    },
}

/// The first `N` bytes, or a truncation error.
pub(crate) fn header_bytes<'a, const N: usize>(
    bytes: &'a [u8],
    what: &'static str,
) -> Result<&'a [u8; N], Malformed> {
    bytes.first_chunk().ok_or(Malformed::Truncated { what, needed: N, available: bytes.len() })
}
