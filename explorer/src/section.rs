//! Data inside of a page: deflated, in base64, in an element that no browser executes.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::DeflateEncoder;
use std::io::{self, Write};

/// Bytes on their way into a page. Writing to memory cannot fail, so nothing here does.
pub(crate) struct Section(DeflateEncoder<Vec<u8>>);

impl Section {
    pub fn new() -> Section {
        Section(DeflateEncoder::new(Vec::new(), Compression::new(4)))
    }

    /// These bytes and nothing else.
    pub fn of(bytes: &[u8]) -> Section {
        let mut section = Section::new();
        section.write_all(bytes).expect("a vector takes everything");
        section
    }

    /// The text that goes into the element: letters, digits, `+`, `/` and `=` only.
    pub fn into_base64(self) -> String {
        STANDARD.encode(self.0.finish().expect("a vector takes everything"))
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
