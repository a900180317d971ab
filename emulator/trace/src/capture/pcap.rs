//! The classic pcap format.

use super::source::{Order, Source};
use super::{CaptureError, Cause, LinkType, Record};
use std::io::Read;

pub(super) struct Reader {
    order: Order,
    /// Nanoseconds in the unit of the second half of a time.
    fraction_ns: u64,
    link: LinkType,
}

impl Reader {
    /// Reads the rest of the file header, unless `magic` is another format's.
    pub(super) fn new<R: Read>(
        magic: [u8; 4],
        source: &mut Source<R>,
    ) -> Result<Option<Reader>, CaptureError> {
        let (order, fraction_ns) = match u32::from_be_bytes(magic) {
            0xa1b2_c3d4 => (Order::Big, 1000),
            0xa1b2_3c4d => (Order::Big, 1),
            0xd4c3_b2a1 => (Order::Little, 1000),
            0x4d3c_b2a1 => (Order::Little, 1),
            _ => return Ok(None),
        };
        let header: [u8; 20] = source.array("the pcap file header")?;
        let version = order.u16([header[0], header[1]]);
        if version != 2 {
            return Err(CaptureError { offset: 4, cause: Cause::Version { format: "pcap", version } });
        }
        // The upper half of the last word tells the length of a frame check sequence.
        let [.., link] = order.words::<5>(&header);
        let link = LinkType::from_number(link as u16)
            .ok_or(CaptureError { offset: 20, cause: Cause::LinkType(link as u16) })?;
        Ok(Some(Reader { order, fraction_ns, link }))
    }

    pub(super) fn next<R: Read>(&mut self, source: &mut Source<R>) -> Result<Option<Record>, CaptureError> {
        let offset = source.offset();
        let Some(header) = source.array_or_end::<16>("a record header")? else { return Ok(None) };
        let [seconds, fraction, kept, original] = self.order.words(&header);
        Ok(Some(Record {
            offset,
            time_ns: u64::from(seconds) * 1_000_000_000 + u64::from(fraction) * self.fraction_ns,
            link: self.link,
            data: source.vec(kept as usize, "a record")?,
            original_length: original as usize,
        }))
    }
}
