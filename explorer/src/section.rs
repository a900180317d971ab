//! Data inside a page: deflated, in base64, in an element that no browser executes.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::DeflateEncoder;
use std::io::{self, BufWriter, Write};

/// The size of the buffer before the encoder, which is slow for small writes.
const BUFFER_BYTES: usize = 64 << 10;

/// Bytes for a page. Writes to memory do not fail.
pub(crate) struct Section(BufWriter<DeflateEncoder<Vec<u8>>>);

impl Section {
    pub fn new() -> Section {
        Section(BufWriter::with_capacity(BUFFER_BYTES, DeflateEncoder::new(Vec::new(), Compression::new(4))))
    }

    /// A section with these bytes.
    pub fn of(bytes: &[u8]) -> Section {
        let mut section = Section::new();
        section.write_all(bytes).expect("a vector grows");
        section
    }

    /// The text of the element: letters, digits, `+`, `/` and `=` only.
    pub fn into_base64(self) -> String {
        let encoder = self.0.into_inner().unwrap_or_else(|_| unreachable!("a vector grows"));
        STANDARD.encode(encoder.finish().expect("a vector grows"))
    }
}

impl Write for Section {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
