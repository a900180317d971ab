//! The pcapng format: sections of blocks, of which those about interfaces and packets are read.

use super::error::{CaptureError, CaptureErrorKind};
use super::link_type::LinkType;
use super::record::Record;
use super::source::{ByteOrder, OffsetReader};
use super::writer::PacketDirection;
use std::io::Read;

/// The type of a section header block, the same in both byte orders.
pub(super) const SECTION_HEADER: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];

const INTERFACE_DESCRIPTION: u32 = 1;
const OBSOLETE_PACKET: u32 = 2;
const SIMPLE_PACKET: u32 = 3;
const ENHANCED_PACKET: u32 = 6;

const OPTION_END: u16 = 0;
const OPTION_FLAGS: u16 = 2;
const OPTION_RESOLUTION: u16 = 9;
const OPTION_TIME_OFFSET: u16 = 14;

struct Interface {
    link_type: LinkType,
    snap_length: u32,
    /// How many units of its clock make a second.
    ticks_per_second: u64,
    offset_seconds: i64,
}

impl Interface {
    fn time_ns(&self, time: u64) -> u64 {
        let ns = u128::from(time) * 1_000_000_000 / u128::from(self.ticks_per_second);
        let ns = ns as i128 + i128::from(self.offset_seconds) * 1_000_000_000;
        u64::try_from(ns.max(0)).unwrap_or(u64::MAX)
    }
}

pub(super) struct Reader {
    order: ByteOrder,
    interfaces: Vec<Interface>,
    /// The time of the last packet that had one.
    time_ns: u64,
}

impl Reader {
    /// Reads the rest of the first section header; its type is read already.
    pub(super) fn new<R: Read>(source: &mut OffsetReader<R>) -> Result<Reader, CaptureError> {
        let order = read_section_header(source)?;
        Ok(Reader { order, interfaces: Vec::new(), time_ns: 0 })
    }

    pub(super) fn next<R: Read>(
        &mut self,
        source: &mut OffsetReader<R>,
    ) -> Result<Option<Record>, CaptureError> {
        loop {
            let offset = source.offset();
            let Some(kind) = source.read_array_or_eof::<4>("a block header")? else { return Ok(None) };
            if kind == SECTION_HEADER {
                self.order = read_section_header(source)?;
                self.interfaces.clear();
                continue;
            }
            let length: [u8; 4] = source.read_array("a block header")?;
            let body = read_block_body(self.order, length, 8, source, offset)?;
            let body = &body[..];
            let cut = |cause| CaptureError { offset, cause };
            let record = match self.order.u32(kind) {
                INTERFACE_DESCRIPTION => {
                    self.interfaces.push(self.interface(body).map_err(cut)?);
                    continue;
                }
                ENHANCED_PACKET => self.packet(offset, body, 4).map_err(cut)?,
                OBSOLETE_PACKET => self.packet(offset, body, 2).map_err(cut)?,
                SIMPLE_PACKET => self.simple_packet(offset, body).map_err(cut)?,
                _ => continue,
            };
            self.time_ns = record.time_ns;
            return Ok(Some(record));
        }
    }

    fn interface(&self, body: &[u8]) -> Result<Interface, CaptureErrorKind> {
        let (fixed, mut options) = split_at(body, 8, "an interface description")?;
        let number = self.order.u16([fixed[0], fixed[1]]);
        let mut interface = Interface {
            link_type: LinkType::from_number(number).ok_or(CaptureErrorKind::UnsupportedLinkType(number))?,
            snap_length: self.order.u32_array::<2>(fixed)[1],
            ticks_per_second: 1_000_000,
            offset_seconds: 0,
        };
        while let Some((head, rest)) = options.split_first_chunk::<4>() {
            let code = self.order.u16([head[0], head[1]]);
            let length = usize::from(self.order.u16([head[2], head[3]]));
            if code == OPTION_END {
                break;
            }
            let (value, rest) = split_at(rest, length, "an option")?;
            match (code, value) {
                (OPTION_RESOLUTION, [exponent]) => interface.ticks_per_second = ticks_per_second(*exponent)?,
                (OPTION_TIME_OFFSET, value) => {
                    if let Ok(seconds) = value.try_into() {
                        interface.offset_seconds = self.order.u64(seconds) as i64;
                    }
                }
                _ => {}
            }
            options = rest.get(length.next_multiple_of(4) - length..).unwrap_or_default();
        }
        Ok(interface)
    }

    /// A packet block whose interface number takes `width` bytes.
    fn packet(&self, offset: u64, body: &[u8], width: usize) -> Result<Record, CaptureErrorKind> {
        let (fixed, rest) = split_at(body, 20, "a packet block")?;
        let [first, high, low, kept, original] = self.order.u32_array(fixed);
        let number = if width == 4 { first } else { self.order.u16([fixed[0], fixed[1]]).into() };
        let interface =
            self.interfaces.get(number as usize).ok_or(CaptureErrorKind::UnknownInterface(number))?;
        let (data, options) = split_at(rest, kept as usize, "a packet")?;
        let options = options.get((kept as usize).next_multiple_of(4) - kept as usize..).unwrap_or_default();
        Ok(Record {
            offset,
            time_ns: interface.time_ns(u64::from(high) << 32 | u64::from(low)),
            link_type: interface.link_type,
            data: data.to_vec(),
            original_len: original as usize,
            direction: self.direction(options),
        })
    }

    /// A packet block without interface and time: the first interface, and no later than the last packet.
    fn simple_packet(&self, offset: u64, body: &[u8]) -> Result<Record, CaptureErrorKind> {
        let (fixed, rest) = split_at(body, 4, "a packet block")?;
        let [original] = self.order.u32_array(fixed);
        let interface = self.interfaces.first().ok_or(CaptureErrorKind::UnknownInterface(0))?;
        let kept = if interface.snap_length == 0 { original } else { original.min(interface.snap_length) };
        let (data, _) = split_at(rest, kept as usize, "a packet")?;
        Ok(Record {
            offset,
            time_ns: self.time_ns,
            link_type: interface.link_type,
            data: data.to_vec(),
            original_len: original as usize,
            direction: None,
        })
    }

    /// The direction in the options of a packet block. Damaged options are ignored: the packet itself is whole.
    fn direction(&self, mut options: &[u8]) -> Option<PacketDirection> {
        while let Some((head, rest)) = options.split_first_chunk::<4>() {
            let code = self.order.u16([head[0], head[1]]);
            let length = usize::from(self.order.u16([head[2], head[3]]));
            if code == OPTION_FLAGS {
                return match self.order.u32(*rest.first_chunk::<4>()?) & 3 {
                    1 => Some(PacketDirection::Inbound),
                    2 => Some(PacketDirection::Outbound),
                    _ => None,
                };
            }
            options = rest.get(length.next_multiple_of(4)..).filter(|_| code != OPTION_END)?;
        }
        None
    }
}

/// Reads a section header block behind its type.
fn read_section_header<R: Read>(source: &mut OffsetReader<R>) -> Result<ByteOrder, CaptureError> {
    let offset = source.offset() - 4;
    let fixed: [u8; 8] = source.read_array("a section header")?;
    let (length, magic) = (fixed.first_chunk::<4>().expect("four"), fixed.last_chunk::<4>().expect("four"));
    let order = match u32::from_be_bytes(*magic) {
        0x1a2b_3c4d => ByteOrder::Big,
        0x4d3c_2b1a => ByteOrder::Little,
        other => return Err(CaptureError { offset, cause: CaptureErrorKind::BadMagic(other) }),
    };
    let body = read_block_body(order, *length, 12, source, offset)?;
    match body.first_chunk() {
        Some(version) if order.u16(*version) == 1 => Ok(order),
        version => {
            let version = version.map_or(0, |version| order.u16(*version));
            Err(CaptureError {
                offset,
                cause: CaptureErrorKind::UnsupportedVersion { format: "pcapng", version },
            })
        }
    }
}

/// The rest of a block of which `read` bytes are read, without the length at its end.
fn read_block_body<R: Read>(
    order: ByteOrder,
    length: [u8; 4],
    read: usize,
    source: &mut OffsetReader<R>,
    offset: u64,
) -> Result<Vec<u8>, CaptureError> {
    let length = order.u32(length);
    let wrong = |length: u32| {
        let cause = CaptureErrorKind::BadLength { what: "a block", length: length.into() };
        CaptureError { offset, cause }
    };
    let rest = (length as usize).checked_sub(read + 4).ok_or(wrong(length))?;
    // Some writers count the padding of the last option and some do not; the block is padded either way.
    let body = source.read_vec(rest.next_multiple_of(4), "a block")?;
    let again = order.u32(source.read_array("the end of a block")?);
    if again != length {
        return Err(wrong(again));
    }
    Ok(body)
}

fn split_at<'a>(
    bytes: &'a [u8],
    length: usize,
    what: &'static str,
) -> Result<(&'a [u8], &'a [u8]), CaptureErrorKind> {
    bytes.split_at_checked(length).ok_or(CaptureErrorKind::Truncated {
        what,
        needed: length,
        available: bytes.len(),
    })
}

/// How many units of a clock make a second: a power of ten, or of two if the upper bit says so.
fn ticks_per_second(exponent: u8) -> Result<u64, CaptureErrorKind> {
    let (base, power) = if exponent & 0x80 == 0 { (10u64, exponent) } else { (2, exponent & 0x7f) };
    let length = exponent.into();
    base.checked_pow(power.into())
        .ok_or(CaptureErrorKind::BadLength { what: "a clock resolution exponent", length })
}
