//! The events of a daemon as they happen.

use crate::Error;
use crate::backend::Result;
use softhca_trace::{EventStreamReader, StreamItem};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// The events of all hosts of a daemon, from [`DaemonControl::start_recording_events`](crate::DaemonControl) on.
///
/// The daemon keeps a bounded number of events for a reader that does not read. [`StreamItem::Missed`] counts the others.
pub struct EventStream {
    reader: EventStreamReader<UnixStream>,
    /// The items that were read while the recording ended.
    rest: VecDeque<io::Result<StreamItem>>,
    is_complete: bool,
}

impl EventStream {
    /// A stream, and the end that the daemon writes to.
    pub(super) fn pair() -> Result<(EventStream, UnixStream)> {
        let failed = |source| Error::System { what: "creating the socket for the events", source };
        let (here, daemon) = UnixStream::pair().map_err(failed)?;
        here.set_nonblocking(true).map_err(failed)?;
        let reader = EventStreamReader::new(here);
        Ok((EventStream { reader, rest: VecDeque::new(), is_complete: false }, daemon))
    }

    /// The next item, if the daemon has sent one. `None` at the end of the stream too.
    pub fn next_item(&mut self) -> io::Result<Option<StreamItem>> {
        if let Some(item) = self.rest.pop_front() {
            return item.map(Some);
        }
        if self.is_complete {
            return Ok(None);
        }
        match self.reader.read() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            result => {
                self.is_complete = !matches!(result, Ok(Some(_)));
                result
            }
        }
    }

    /// Whether the daemon sends no more items.
    pub const fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Waits for everything up to the end of the stream.
    pub(super) fn read_rest(&mut self) {
        let mut blocking = self.reader.input().set_nonblocking(false).and_then(|()| self.reader.read());
        while let Some(item) = blocking.transpose() {
            let failed = item.is_err();
            self.rest.push_back(item);
            blocking = if failed { Ok(None) } else { self.reader.read() };
        }
        self.is_complete = true;
    }
}

impl AsFd for EventStream {
    /// Readable when items have arrived, and at the end of the stream.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.reader.input().as_fd()
    }
}
