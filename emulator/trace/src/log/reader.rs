//! Reads an event log again.

use super::{Entry, FORMAT, Header, VERSION};
use std::io::{self, BufRead, Read};
use thiserror::Error;

/// The most bytes of a line. No line of ours is as long; a file that is no log may have a longer one.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// Why a log cannot be read on, and where.
#[derive(Debug, Error)]
#[error("line {line}: {cause}")]
pub struct LogError {
    /// The line, counted from 1.
    pub line: u64,
    /// The kind of the error.
    #[source]
    pub cause: LogErrorKind,
}

/// The error of a log that cannot be read.
#[derive(Debug, Error)]
pub enum LogErrorKind {
    /// The operating system reports an error.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Not JSON, or not what the format has there.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// No log at all.
    #[error("this is no event log; `softhca run --out` writes them as events.jsonl")]
    NotAnEventLog,
    /// A log of another time.
    #[error("the log has version {found}, this program reads version {VERSION}")]
    UnsupportedVersion { found: u32 },
}

/// A log being read: an iterator of entries that ends at the first error.
pub struct EventLogReader<R> {
    header: Header,
    input: R,
    line: u64,
    failed: bool,
}

impl<R: BufRead> EventLogReader<R> {
    /// Reads the first line.
    pub fn new(mut input: R) -> Result<EventLogReader<R>, LogError> {
        let wrong = |cause| LogError { line: 1, cause };
        let first = match next_line(&mut input) {
            Ok(line) => line.ok_or(wrong(LogErrorKind::NotAnEventLog))?,
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return Err(wrong(LogErrorKind::NotAnEventLog));
            }
            Err(error) => return Err(wrong(error.into())),
        };
        let header: Header = serde_json::from_str(&first).map_err(|_| wrong(LogErrorKind::NotAnEventLog))?;
        if header.format != FORMAT {
            return Err(wrong(LogErrorKind::NotAnEventLog));
        }
        if header.version != VERSION {
            return Err(wrong(LogErrorKind::UnsupportedVersion { found: header.version }));
        }
        Ok(EventLogReader { header, input, line: 1, failed: false })
    }

    /// The first line.
    pub fn header(&self) -> &Header {
        &self.header
    }
}

/// The next line, or none at the end. A line that is not UTF-8, or longer than any line of a log, is invalid data.
fn next_line(input: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut line = String::new();
    match input.take(MAX_LINE_BYTES).read_line(&mut line)? {
        0 => Ok(None),
        read if read as u64 == MAX_LINE_BYTES && !line.ends_with('\n') => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a line of more than {MAX_LINE_BYTES} bytes"),
        )),
        _ => Ok(Some(line)),
    }
}

impl<R: BufRead> Iterator for EventLogReader<R> {
    type Item = Result<Entry, LogError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        self.line += 1;
        let entry = next_line(&mut self.input)
            .transpose()?
            .map_err(LogErrorKind::from)
            .and_then(|text| serde_json::from_str(&text).map_err(LogErrorKind::from))
            .map_err(|cause| LogError { line: self.line, cause });
        self.failed = entry.is_err();
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_without_an_end_is_no_log() {
        let endless = io::BufReader::new(io::repeat(b'{'));
        let error = EventLogReader::new(endless).err().expect("it is refused");
        assert!(matches!(error, LogError { line: 1, cause: LogErrorKind::NotAnEventLog }), "{error}");
    }
}
