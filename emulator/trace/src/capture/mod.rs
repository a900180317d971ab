//! Capture files: which format, which link, and one record after the other.
//!
//! The formats are read here rather than by the pcap-file crate. The crate refuses records cut by their snap length and
//! takes every pcapng time for nanoseconds. It does not say at which offset of the file it stopped.

mod error;
mod link_type;
mod pcap;
mod pcapng;
mod record;
mod source;
mod writer;

pub use error::{CaptureError, CaptureErrorKind};
pub use link_type::LinkType;
pub use record::Record;
pub use writer::{CaptureWriter, InterfaceId, PacketDirection, RoceVersion};

use crate::capture::source::OffsetReader;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

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
