//! Capture files: which format, which link, and one record after the other.
//!
//! The formats are read here rather than by the pcap-file crate: that one refuses records cut by their
//! snap length, takes every pcapng time for nanoseconds and does not say where in the file it stopped.

mod link_type;
mod pcap;
mod pcapng;
mod source;
mod writer;

pub use link_type::LinkType;
pub use writer::{CaptureWriter, InterfaceId, PacketDirection, RoceVersion};

use crate::capture::source::OffsetReader;
use softhca_wire::{Malformed, RoceFrame};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;
use thiserror::Error;

/// One captured frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Where in the file the record starts.
    pub offset: u64,
    /// When it was captured, in nanoseconds since 1970.
    pub time_ns: u64,
    /// What `data` starts with.
    pub link_type: LinkType,
    /// The bytes that were kept.
    pub data: Vec<u8>,
    /// How many bytes the frame had.
    pub original_len: usize,
    /// Whether it left or entered the host where it was captured, if the file says so.
    pub direction: Option<PacketDirection>,
}

impl Record {
    /// The direction in the file, or in the cooked header of Linux.
    pub fn direction(&self) -> Option<PacketDirection> {
        let kind = match self.link_type {
            LinkType::LinuxSll => u16::from_be_bytes([*self.data.first()?, *self.data.get(1)?]),
            LinkType::LinuxSll2 => u16::from(*self.data.get(10)?),
            _ => return self.direction,
        };
        Some(if kind == 4 { PacketDirection::Outbound } else { PacketDirection::Inbound })
    }

    /// The RoCE frame in this record.
    ///
    /// A record that the snap length truncated is malformed, unless its headers show another protocol.
    pub fn frame(&self) -> Result<RoceFrame<'_>, Malformed> {
        let frame = self
            .link_type
            .strip_link_header(&self.data)
            .and_then(|(link, bytes)| RoceFrame::parse(link, bytes));
        let available = self.data.len();
        match frame {
            Err(other @ Malformed::NotRoce { .. }) => Err(other),
            _ if available < self.original_len => {
                Err(Malformed::Truncated { what: "captured record", needed: self.original_len, available })
            }
            frame => frame,
        }
    }
}

/// Why a capture cannot be read on, and where.
#[derive(Debug, Error)]
#[error("offset {offset}: {cause}")]
pub struct CaptureError {
    /// Where in the file the trouble starts.
    pub offset: u64,
    /// What the trouble is.
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
    /// A length that cannot be.
    #[error("{what} of {length} bytes cannot be; the file is damaged from here on")]
    BadLength { what: &'static str, length: u64 },
    /// A packet of an interface that was not described.
    #[error(
        "the packet belongs to interface {0}, which the file does not describe; it is damaged from here on"
    )]
    UnknownInterface(u32),
}

enum Format {
    Pcap(pcap::Reader),
    PcapNg(pcapng::Reader),
}

/// A capture being read: an iterator of records that ends at the first error.
pub struct CaptureReader<R> {
    source: OffsetReader<R>,
    format: Format,
    failed: bool,
}

impl CaptureReader<BufReader<File>> {
    /// Opens a file.
    pub fn open(path: &Path) -> Result<Self, CaptureError> {
        let file = File::open(path).map_err(|error| CaptureError { offset: 0, cause: error.into() })?;
        CaptureReader::new(BufReader::new(file))
    }
}

impl<R: Read> CaptureReader<R> {
    /// Reads the start of a capture, which determines the format.
    pub fn new(reader: R) -> Result<Self, CaptureError> {
        let mut source = OffsetReader::new(reader);
        let magic: [u8; 4] = source.read_array("its first four bytes")?;
        let format = if magic == pcapng::SECTION_HEADER {
            Format::PcapNg(pcapng::Reader::new(&mut source)?)
        } else if let Some(reader) = pcap::Reader::new(magic, &mut source)? {
            Format::Pcap(reader)
        } else if magic.starts_with(&[0x1f, 0x8b]) || magic == [0x28, 0xb5, 0x2f, 0xfd] {
            return Err(CaptureError { offset: 0, cause: CaptureErrorKind::Compressed });
        } else {
            return Err(CaptureError {
                offset: 0,
                cause: CaptureErrorKind::BadMagic(u32::from_be_bytes(magic)),
            });
        };
        Ok(CaptureReader { source, format, failed: false })
    }
}

impl<R: Read> Iterator for CaptureReader<R> {
    type Item = Result<Record, CaptureError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let record = match &mut self.format {
            Format::Pcap(reader) => reader.next(&mut self.source),
            Format::PcapNg(reader) => reader.next(&mut self.source),
        };
        self.failed = record.is_err();
        record.transpose()
    }
}

#[cfg(test)]
mod tests;
