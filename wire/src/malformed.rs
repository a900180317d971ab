//! Parse errors.

use thiserror::Error;

/// A name that is a constant of the program. (Serde would take `&'static str` for a borrow.)
pub type Constant = &'static str;

/// The first reason why bytes are not a valid instance of a format.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Malformed {
    /// The input is shorter than the header.
    #[error("{what} needs {needed} bytes, got {available}")]
    Truncated {
        /// The truncated header.
        #[cfg_attr(feature = "serde", serde(deserialize_with = "crate::deserialize_constant"))]
        what: Constant,
        /// The header's length.
        needed: usize,
        /// The input's length.
        available: usize,
    },
    /// A length field disagrees with the input or with another field.
    #[error("{what}: stated {stated} bytes, found {actual}")]
    Length {
        /// The field.
        #[cfg_attr(feature = "serde", serde(deserialize_with = "crate::deserialize_constant"))]
        what: Constant,
        /// The field's value.
        stated: usize,
        /// The actual length.
        actual: usize,
    },
    /// A version field has an undefined or unsupported value.
    #[error("{what} version {version} is not supported")]
    Version {
        /// The header.
        #[cfg_attr(feature = "serde", serde(deserialize_with = "crate::deserialize_constant"))]
        what: Constant,
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
        #[cfg_attr(feature = "serde", serde(deserialize_with = "crate::deserialize_constant"))]
        what: Constant,
    },
    /// A field is out of range.
    #[error("{what} has invalid value {value:#x}")]
    Field {
        /// The field.
        #[cfg_attr(feature = "serde", serde(deserialize_with = "crate::deserialize_constant"))]
        what: Constant,
        /// Its value.
        value: u64,
    },
    /// The bytes belong to another protocol or port.
    #[error("not RoCE: {what} {value:#x}")]
    NotRoce {
        /// The field that identifies the protocol.
        #[cfg_attr(feature = "serde", serde(deserialize_with = "crate::deserialize_constant"))]
        what: Constant,
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
