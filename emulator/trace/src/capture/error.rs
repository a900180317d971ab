//! Why a capture cannot be read.

use std::io;
use thiserror::Error;

/// Why a capture cannot be read on, and where.
#[derive(Debug, Error)]
#[error("offset {offset}: {cause}")]
pub struct CaptureError {
    /// The offset in the file from which on it cannot be read.
    pub offset: u64,
    /// The cause.
    #[source]
    pub cause: CaptureErrorKind,
}

/// The error of a capture that cannot be read.
#[derive(Debug, Error)]
pub enum CaptureErrorKind {
    /// The operating system reports an error.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Not a capture.
    #[error(
        "this is neither pcap nor pcapng (it starts with {0:#010x}); save the capture in one of these formats"
    )]
    BadMagic(u32),
    /// A capture, but compressed.
    #[error("the file is compressed; unpack it first (gzip -d, zstd -d)")]
    Compressed,
    /// A version that is not known.
    #[error("{format} version {version} is not known; save the capture again with a current Wireshark")]
    UnsupportedVersion { format: &'static str, version: u16 },
    /// A link type without Ethernet or IP.
    #[error("link type {0} carries no Ethernet or IP frames; capture on an Ethernet or IP interface")]
    UnsupportedLinkType(u16),
    /// The file ends inside of something.
    #[error(
        "the file ends inside of {what}: {needed} bytes wanted, {available} left; was the capture cut off?"
    )]
    Truncated { what: &'static str, needed: usize, available: usize },
    /// An impossible length.
    #[error("{what} has an impossible length of {length} bytes; the file is damaged from here on")]
    BadLength { what: &'static str, length: u64 },
    /// A packet of an interface that was not described.
    #[error(
        "the packet belongs to interface {0}, which the file does not describe; it is damaged from here on"
    )]
    UnknownInterface(u32),
}
