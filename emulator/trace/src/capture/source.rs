//! A reader that knows where it is, and the byte order of what it reads.

use super::error::{CaptureError, CaptureErrorKind};
use std::io::Read;

/// The byte order of the machine that wrote a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ByteOrder {
    Big,
    Little,
}

impl ByteOrder {
    pub(super) fn u16(self, bytes: [u8; 2]) -> u16 {
        match self {
            ByteOrder::Big => u16::from_be_bytes(bytes),
            ByteOrder::Little => u16::from_le_bytes(bytes),
        }
    }

    pub(super) fn u32(self, bytes: [u8; 4]) -> u32 {
        match self {
            ByteOrder::Big => u32::from_be_bytes(bytes),
            ByteOrder::Little => u32::from_le_bytes(bytes),
        }
    }

    pub(super) fn u64(self, bytes: [u8; 8]) -> u64 {
        match self {
            ByteOrder::Big => u64::from_be_bytes(bytes),
            ByteOrder::Little => u64::from_le_bytes(bytes),
        }
    }

    /// The words that make up `bytes`.
    pub(super) fn u32_array<const N: usize>(self, bytes: &[u8]) -> [u32; N] {
        std::array::from_fn(|i| self.u32(bytes[4 * i..4 * i + 4].try_into().expect("four bytes")))
    }
}

pub(super) struct OffsetReader<R> {
    reader: R,
    offset: u64,
}

impl<R: Read> OffsetReader<R> {
    pub(super) fn new(reader: R) -> OffsetReader<R> {
        OffsetReader { reader, offset: 0 }
    }

    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// Fills `bytes`; returns false if the file ends right here.
    fn fill(&mut self, bytes: &mut [u8], what: &'static str) -> Result<bool, CaptureError> {
        let start = self.offset;
        let mut filled = 0;
        while filled < bytes.len() {
            match self.reader.read(&mut bytes[filled..]) {
                Ok(0) if filled == 0 => return Ok(false),
                Ok(0) => {
                    let cause = CaptureErrorKind::Truncated { what, needed: bytes.len(), available: filled };
                    return Err(CaptureError { offset: start, cause });
                }
                Ok(count) => {
                    filled += count;
                    self.offset += count as u64;
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(CaptureError { offset: self.offset, cause: error.into() }),
            }
        }
        Ok(true)
    }

    /// The next bytes, or nothing if the file ends right here.
    pub(super) fn read_array_or_eof<const N: usize>(
        &mut self,
        what: &'static str,
    ) -> Result<Option<[u8; N]>, CaptureError> {
        let mut bytes = [0; N];
        Ok(self.fill(&mut bytes, what)?.then_some(bytes))
    }

    /// The next bytes, which must be there.
    pub(super) fn read_array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], CaptureError> {
        let offset = self.offset;
        let cut =
            CaptureError { offset, cause: CaptureErrorKind::Truncated { what, needed: N, available: 0 } };
        self.read_array_or_eof(what)?.ok_or(cut)
    }

    /// The next `length` bytes, which must be there. Takes no more memory than the file has bytes.
    pub(super) fn read_vec(&mut self, length: usize, what: &'static str) -> Result<Vec<u8>, CaptureError> {
        const LIMIT: usize = 16 << 20;
        let offset = self.offset;
        if length > LIMIT {
            return Err(CaptureError {
                offset,
                cause: CaptureErrorKind::BadLength { what, length: length as u64 },
            });
        }
        let mut bytes = Vec::with_capacity(length.min(64 << 10));
        let read = self.reader.by_ref().take(length as u64).read_to_end(&mut bytes);
        self.offset += bytes.len() as u64;
        read.map_err(|error| CaptureError { offset: self.offset, cause: error.into() })?;
        if bytes.len() < length {
            let cause = CaptureErrorKind::Truncated { what, needed: length, available: bytes.len() };
            return Err(CaptureError { offset, cause });
        }
        Ok(bytes)
    }
}
