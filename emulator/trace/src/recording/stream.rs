//! A stream of events for another process, which receives them as values.

use crate::NameTable;
use serde::{Deserialize, Serialize};
use softhca_engine::Instant;
use softhca_fabric::{NetworkEvent, OwnedEvent};
use std::io::{self, Read, Write};

/// The bytes before an item: its length.
const HEADER: usize = size_of::<u32>();
/// The most bytes of an item. A table with more names than that is not sent.
const MAX_ITEM: usize = 16 << 20;
/// The bytes of one read.
const READ_CHUNK: usize = 64 << 10;

/// An item of a stream of events.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum StreamItem {
    /// The names that apply to later events.
    Names(NameTable),
    /// An event, without the packets of the network.
    Event(Instant, OwnedEvent),
    /// The reader did not keep up: this number of events is missing here.
    Missed(u64),
}

/// Writes a stream of events. An output that is full returns [`io::ErrorKind::WouldBlock`]: events are then counted
/// instead of written.
#[derive(Debug)]
pub(super) struct EventStreamWriter<W> {
    output: W,
    /// The names that were not written yet.
    names: Option<NameTable>,
    missed: u64,
    error: Option<io::Error>,
}

impl<W: Write> EventStreamWriter<W> {
    pub fn new(output: W, names: NameTable) -> EventStreamWriter<W> {
        EventStreamWriter { output, names: Some(names), missed: 0, error: None }
    }

    pub fn set_names(&mut self, names: NameTable) {
        self.names = Some(names);
    }

    /// Whether the output accepted the item.
    fn write(&mut self, item: &StreamItem) -> bool {
        if self.error.is_some() {
            return false;
        }
        let encoded = postcard::to_extend(item, vec![0; HEADER]);
        let mut bytes = encoded.expect("every item can be encoded");
        let length = bytes.len() - HEADER;
        if length > MAX_ITEM {
            return true;
        }
        bytes[..HEADER].copy_from_slice(&(length as u32).to_le_bytes());
        match self.output.write_all(&bytes) {
            Ok(()) => true,
            Err(error) => {
                if error.kind() != io::ErrorKind::WouldBlock {
                    self.error = Some(error);
                }
                false
            }
        }
    }

    /// Writes what precedes the next event. Returns whether the output accepted it.
    fn write_pending(&mut self) -> bool {
        if self.missed > 0 && self.write(&StreamItem::Missed(self.missed)) {
            self.missed = 0;
        }
        if self.missed == 0
            && let Some(names) = self.names.take()
        {
            let item = StreamItem::Names(names);
            if !self.write(&item)
                && let StreamItem::Names(names) = item
            {
                self.names = Some(names);
            }
        }
        self.missed == 0 && self.names.is_none()
    }

    /// Flushes the output. Returns the first write error.
    pub fn flush(&mut self) -> io::Result<()> {
        self.write_pending();
        match &self.error {
            Some(error) => Err(io::Error::new(error.kind(), error.to_string())),
            None => match self.output.flush() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
                flushed => flushed,
            },
        }
    }

    /// Writes the rest. The error says how many events the reader will not learn of.
    pub fn finish(&mut self) -> io::Result<()> {
        self.flush()?;
        match self.missed {
            0 => Ok(()),
            missed => {
                Err(io::Error::other(format!("its reader does not keep up: {missed} events are missing")))
            }
        }
    }

    pub fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        let event = match event {
            NetworkEvent::Frame { .. } | NetworkEvent::PauseFrame { .. } => None,
            event => OwnedEvent::new(event),
        };
        let Some(event) = event else { return };
        if !(self.write_pending() && self.write(&StreamItem::Event(now, event))) {
            self.missed += 1;
        }
    }
}

/// Reads a stream of events.
#[derive(Debug)]
pub struct EventStreamReader<R> {
    input: R,
    bytes: Vec<u8>,
    /// The bytes that were decoded.
    start: usize,
}

impl<R: Read> EventStreamReader<R> {
    /// Reads from an input, which may be non-blocking.
    pub const fn new(input: R) -> EventStreamReader<R> {
        EventStreamReader { input, bytes: Vec::new(), start: 0 }
    }

    /// The input.
    pub const fn input(&self) -> &R {
        &self.input
    }

    /// The next item; `None` at the end. An input that has nothing now returns [`io::ErrorKind::WouldBlock`].
    pub fn read(&mut self) -> io::Result<Option<StreamItem>> {
        loop {
            if let Some(item) = self.pop()? {
                return Ok(Some(item));
            }
            self.bytes.drain(..self.start);
            self.start = 0;
            let length = self.bytes.len();
            self.bytes.resize(length + READ_CHUNK, 0);
            let read = self.input.read(&mut self.bytes[length..]);
            self.bytes.truncate(length + *read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) if length == 0 => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn pop(&mut self) -> io::Result<Option<StreamItem>> {
        let Some((header, rest)) = self.bytes[self.start..].split_first_chunk() else { return Ok(None) };
        let length = u32::from_le_bytes(*header) as usize;
        if length > MAX_ITEM {
            let text = format!("an item of {length} bytes in a stream of events");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let Some(item) = rest.get(..length) else { return Ok(None) };
        let item = postcard::from_bytes(item);
        self.start += HEADER + length;
        item.map(Some).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use softhca_engine::{CqId, Event};
    use softhca_fabric::{HostId, RuleId};

    /// Accepts this number of writes.
    #[derive(Default)]
    struct Bounded {
        bytes: Vec<u8>,
        room: usize,
    }

    impl Write for Bounded {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.room = self.room.checked_sub(1).ok_or(io::ErrorKind::WouldBlock)?;
            self.bytes.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn emit(stream: &mut EventStreamWriter<Bounded>, number: u32) {
        let event = &Event::CompletionNotified { cq: CqId(number) };
        stream.on_event(Instant::from_nanos(number.into()), &NetworkEvent::Hca { host: HostId(1), event });
    }

    /// The times of events, the names of rule 7, and the numbers of missing events.
    fn read_all(bytes: &[u8]) -> Vec<String> {
        let mut reader = EventStreamReader::new(bytes);
        let text = |item| match item {
            StreamItem::Names(names) => names.rule_name(RuleId(7)),
            StreamItem::Event(at, OwnedEvent::Hca { host: HostId(1), .. }) => at.nanos().to_string(),
            StreamItem::Event(..) => panic!("an event of the HCA"),
            StreamItem::Missed(count) => format!("{count} missed"),
        };
        std::iter::from_fn(|| reader.read().unwrap()).map(text).collect()
    }

    #[test]
    fn a_reader_learns_how_many_events_are_missing_and_where() {
        let mut stream = EventStreamWriter::new(Bounded { room: 2, ..Bounded::default() }, NameTable::new());
        (1..=4).for_each(|number| emit(&mut stream, number));
        let mut names = NameTable::new();
        names.add_rule(RuleId(7), "lose");
        stream.set_names(names);
        emit(&mut stream, 5);
        stream.output.room = 3;
        emit(&mut stream, 6);
        emit(&mut stream, 7);
        let expected = ["rule 7", "1", "4 missed", "\"lose\"", "6"];
        assert_eq!(read_all(&stream.output.bytes), expected);
        assert!(stream.finish().unwrap_err().to_string().contains("1 events are missing"));
        stream.output.room = 1;
        stream.finish().unwrap();
        assert_eq!(read_all(&stream.output.bytes).last().unwrap(), "1 missed");
    }

    #[test]
    fn items_that_are_too_long_or_cut_are_errors() {
        let error = |bytes: &[u8]| EventStreamReader::new(bytes).read().unwrap_err().kind();
        assert_eq!(error(&[0xff; 9]), io::ErrorKind::InvalidData);
        assert_eq!(error(&[4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]), io::ErrorKind::InvalidData);
        assert_eq!(error(&[9, 0, 0, 0, 1]), io::ErrorKind::UnexpectedEof);
    }
}
