//! Parse errors.

use thiserror::Error;

/// A name that is a constant of the program. (Serde would take `&'static str` for a borrow.)
pub type Constant = &'static str;

/// The first reason why bytes are not a valid instance of a format.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
#[non_exhaustive]
pub enum Malformed {
    /// The input is shorter than the header.
    #[error("{what} needs {needed} bytes, got {available}")]
    Truncated {
        #[cfg_attr(feature = "serde", serde(deserialize_with = "crate::deserialize_constant"))]
        what: Constant,
        needed: usize,
        available: usize,
    },
    /// A length field disagrees with the input or with another field.
    #[error("{what}: stated {stated} bytes, found {actual}")]
    Length {
        #[cfg_attr(feature = "serde", serde(deserialize_with = "crate::deserialize_constant"))]
        what: Constant,
        stated: usize,
        actual: usize,
    },
    /// A version field has an undefined or unsupported value.
    #[error("{what} version {version} is not supported")]
    Version {
        #[cfg_attr(feature = "serde", serde(deserialize_with = "crate::deserialize_constant"))]
        what: Constant,
        version: u8,
    },
    /// The opcode is undefined.
    #[error("opcode {0:#04x} is not defined")]
    Opcode(u8),
    /// The pad count exceeds the bytes after the headers, or the opcode carries no payload.
    #[error("pad count {pad} with {payload} bytes of payload")]
    Padding { pad: u8, payload: usize },
    /// The AETH syndrome is reserved.
    #[error("AETH syndrome {0:#04x} is reserved")]
    Syndrome(u8),
    /// A header checksum is wrong.
    #[error("{what} checksum is wrong")]
    Checksum {
        #[cfg_attr(feature = "serde", serde(deserialize_with = "crate::deserialize_constant"))]
        what: Constant,
    },
    /// A field is out of range.
    #[error("{what} has invalid value {value:#x}")]
    Field {
        #[cfg_attr(feature = "serde", serde(deserialize_with = "crate::deserialize_constant"))]
        what: Constant,
        value: u64,
    },
    /// The bytes belong to another protocol or port.
    #[error("not RoCE: {what} {value:#x}")]
    NotRoce {
        #[cfg_attr(feature = "serde", serde(deserialize_with = "crate::deserialize_constant"))]
        what: Constant,
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
