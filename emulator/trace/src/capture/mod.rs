//! Capture files: which format, which link, and one record after the other.
//!
//! The formats are read here rather than by the pcap-file crate: that one refuses records cut by their
//! snap length, takes every pcapng time for nanoseconds and does not say where in the file it stopped.

mod link;
mod pcap;
mod pcapng;
mod source;
mod writer;

pub use link::LinkType;
pub use writer::{CaptureWriter, Framing, Heading, InterfaceId};

use crate::capture::source::Source;
use softhca_wire::{Frame, Malformed};
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
    pub link: LinkType,
    /// The bytes that were kept.
    pub data: Vec<u8>,
    /// How many bytes the frame had.
    pub original_length: usize,
}

impl Record {
    /// The RoCE frame in this record.
    ///
    /// A record that its snap length cut is malformed, unless what is left proves another protocol.
    pub fn frame(&self) -> Result<Frame<'_>, Malformed> {
        let frame = self.link.strip(&self.data).and_then(|(link, bytes)| Frame::parse(link, bytes));
        let available = self.data.len();
        match frame {
            Err(other @ Malformed::NotRoce { .. }) => Err(other),
            _ if available < self.original_length => {
                Err(Malformed::Truncated { what: "captured record", needed: self.original_length, available })
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
    pub cause: Cause,
}

/// What is wrong with a capture.
#[derive(Debug, Error)]
pub enum Cause {
    /// The operating system says no.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Not a capture.
    #[error(
        "this is neither pcap nor pcapng (it starts with {0:#010x}); save the capture in one of these formats"
    )]
    Magic(u32),
    /// A capture, but compressed.
    #[error("the file is compressed; unpack it first (gzip -d, zstd -d)")]
    Compressed,
    /// A version that nobody writes.
    #[error("{format} version {version} is not known; save the capture again with a current Wireshark")]
    Version {
        /// The format.
        format: &'static str,
        /// Its major version.
        version: u16,
    },
    /// A link type without Ethernet or IP.
    #[error("link type {0} carries no Ethernet or IP frames; capture on an Ethernet or IP interface")]
    LinkType(u16),
    /// The file ends inside of something.
    #[error(
        "the file ends inside of {what}: {needed} bytes wanted, {available} left; was the capture cut off?"
    )]
    Cut {
        /// What was being read.
        what: &'static str,
        /// How many bytes it takes.
        needed: usize,
        /// How many there are.
        available: usize,
    },
    /// A length that cannot be.
    #[error("{what} of {length} bytes cannot be; the file is damaged from here on")]
    Length {
        /// What has that length.
        what: &'static str,
        /// The length.
        length: u64,
    },
    /// A packet of an interface that was not described.
    #[error(
        "the packet belongs to interface {0}, which the file does not describe; it is damaged from here on"
    )]
    Interface(u32),
}

enum Format {
    Pcap(pcap::Reader),
    PcapNg(pcapng::Reader),
}

/// A capture being read: an iterator of records that ends at the first error.
pub struct Capture<R> {
    source: Source<R>,
    format: Format,
    failed: bool,
}

impl Capture<BufReader<File>> {
    /// Opens a file.
    pub fn open(path: &Path) -> Result<Self, CaptureError> {
        let file = File::open(path).map_err(|error| CaptureError { offset: 0, cause: error.into() })?;
        Capture::new(BufReader::new(file))
    }
}

impl<R: Read> Capture<R> {
    /// Reads the start of a capture, which tells the format.
    pub fn new(reader: R) -> Result<Self, CaptureError> {
        let mut source = Source::new(reader);
        let magic: [u8; 4] = source.array("its first four bytes")?;
        let format = if magic == pcapng::SECTION_HEADER {
            Format::PcapNg(pcapng::Reader::new(&mut source)?)
        } else if let Some(reader) = pcap::Reader::new(magic, &mut source)? {
            Format::Pcap(reader)
        } else if magic.starts_with(&[0x1f, 0x8b]) || magic == [0x28, 0xb5, 0x2f, 0xfd] {
            return Err(CaptureError { offset: 0, cause: Cause::Compressed });
        } else {
            return Err(CaptureError { offset: 0, cause: Cause::Magic(u32::from_be_bytes(magic)) });
        };
        Ok(Capture { source, format, failed: false })
    }
}

impl<R: Read> Iterator for Capture<R> {
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
