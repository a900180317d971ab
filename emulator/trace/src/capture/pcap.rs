//! The classic pcap format.

use super::error::{CaptureError, CaptureErrorKind};
use super::link_type::LinkType;
use super::record::Record;
use super::source::{ByteOrder, OffsetReader};
use std::io::Read;

pub(super) struct Reader {
    order: ByteOrder,
    /// Nanoseconds in the unit of the second half of a time.
    fraction_ns: u64,
    link_type: LinkType,
}

impl Reader {
    /// Reads the rest of the file header, unless `magic` is another format's.
    pub(super) fn new<R: Read>(
        magic: [u8; 4],
        source: &mut OffsetReader<R>,
    ) -> Result<Option<Reader>, CaptureError> {
        let (order, fraction_ns) = match u32::from_be_bytes(magic) {
            0xa1b2_c3d4 => (ByteOrder::Big, 1000),
            0xa1b2_3c4d => (ByteOrder::Big, 1),
            0xd4c3_b2a1 => (ByteOrder::Little, 1000),
            0x4d3c_b2a1 => (ByteOrder::Little, 1),
            _ => return Ok(None),
        };
        let header: [u8; 20] = source.read_array("the pcap file header")?;
        let version = order.u16([header[0], header[1]]);
        if version != 2 {
            return Err(CaptureError {
                offset: 4,
                cause: CaptureErrorKind::UnsupportedVersion { format: "pcap", version },
            });
        }
        // The upper half of the last word is the length of a frame check sequence.
        let [.., link] = order.u32_array::<5>(&header);
        let link = LinkType::from_number(link as u16)
            .ok_or(CaptureError { offset: 20, cause: CaptureErrorKind::UnsupportedLinkType(link as u16) })?;
        Ok(Some(Reader { order, fraction_ns, link_type: link }))
    }

    pub(super) fn next<R: Read>(
        &mut self,
        source: &mut OffsetReader<R>,
    ) -> Result<Option<Record>, CaptureError> {
        let offset = source.offset();
        let Some(header) = source.read_array_or_eof::<16>("a record header")? else { return Ok(None) };
        let [seconds, fraction, kept, original] = self.order.u32_array(&header);
        Ok(Some(Record {
            offset,
            time_ns: u64::from(seconds) * 1_000_000_000 + u64::from(fraction) * self.fraction_ns,
            link_type: self.link_type,
            data: source.read_vec(kept as usize, "a record")?,
            original_len: original as usize,
            direction: None,
        }))
    }
}
