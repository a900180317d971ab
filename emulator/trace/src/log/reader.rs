//! Reads an event log again.

use super::{Entry, FORMAT, Header, VERSION};
use std::io::{self, BufRead};
use thiserror::Error;

/// Why a log cannot be read on, and where.
#[derive(Debug, Error)]
#[error("line {line}: {cause}")]
pub struct LogError {
    /// The line, counted from 1.
    pub line: u64,
    /// What the trouble is.
    #[source]
    pub cause: LogCause,
}

/// What is wrong with a log.
#[derive(Debug, Error)]
pub enum LogCause {
    /// The operating system says no.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Not JSON, or not what the format has there.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// No log at all.
    #[error("this is no event log; `softhca run --out` writes them as events.jsonl")]
    Format,
    /// A log of another time.
    #[error("the log has version {found}, this program reads version {VERSION}")]
    Version {
        /// What the log says.
        found: u32,
    },
}

/// A log being read: an iterator of entries that ends at the first error.
pub struct EventLogReader<R> {
    header: Header,
    lines: io::Lines<R>,
    line: u64,
    failed: bool,
}

impl<R: BufRead> EventLogReader<R> {
    /// Reads the first line.
    pub fn new(input: R) -> Result<EventLogReader<R>, LogError> {
        let wrong = |cause| LogError { line: 1, cause };
        let mut lines = input.lines();
        let first = lines.next().ok_or(wrong(LogCause::Format))?.map_err(|error| wrong(error.into()))?;
        let header: Header = serde_json::from_str(&first).map_err(|_| wrong(LogCause::Format))?;
        if header.format != FORMAT {
            return Err(wrong(LogCause::Format));
        }
        if header.version != VERSION {
            return Err(wrong(LogCause::Version { found: header.version }));
        }
        Ok(EventLogReader { header, lines, line: 1, failed: false })
    }

    /// The first line.
    pub fn header(&self) -> &Header {
        &self.header
    }
}

impl<R: BufRead> Iterator for EventLogReader<R> {
    type Item = Result<Entry, LogError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        self.line += 1;
        let text = self.lines.next()?;
        let entry = text
            .map_err(LogCause::from)
            .and_then(|text| serde_json::from_str(&text).map_err(LogCause::from))
            .map_err(|cause| LogError { line: self.line, cause });
        self.failed = entry.is_err();
        Some(entry)
    }
}
