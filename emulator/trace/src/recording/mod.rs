//! The recording of a run: its event log, its capture, its ladders and a stream, from the events of every back end.

mod card;
#[cfg(feature = "stream")]
mod stream;
mod tap;

pub use card::CardRecorder;
#[cfg(feature = "stream")]
pub use stream::{EventStreamReader, StreamItem};
pub use tap::{CapturePoints, Tap};

use crate::{CaptureWriter, EventLog, Ladder, LadderBuilder, NameTable};
use softhca_engine::Instant;
use softhca_fabric::{EventSink, HostId, NetworkEvent};
use std::io::{self, Write};

/// Writes events and packets, with the names and the clock of a run. It is an event sink.
///
/// A [`World`](softhca_fabric::World) is recorded directly. Cards in real time have clocks of their own and number
/// themselves from 0: a [`CardRecorder`], or [`OwnedEvent::move_to`](softhca_fabric::OwnedEvent::move_to), converts
/// their events.
///
/// Call [`Recording::finish`] at the end: it writes the last packet and returns the first write error.
#[derive(Debug)]
pub struct Recording<W> {
    names: NameTable,
    log: Option<EventLog<W>>,
    capture: Option<Tap<W>>,
    ladders: Option<LadderBuilder>,
    #[cfg(feature = "stream")]
    stream: Option<stream::EventStreamWriter<W>>,
}

impl<W: Write> Recording<W> {
    /// A recording without output.
    pub fn new(names: NameTable) -> Recording<W> {
        Recording {
            names,
            log: None,
            capture: None,
            ladders: None,
            #[cfg(feature = "stream")]
            stream: None,
        }
    }

    /// Adds an event log.
    pub fn with_log(mut self, output: W, title: &str) -> Recording<W> {
        self.log = Some(EventLog::new(output, title, self.names.clone()));
        self
    }

    /// Adds a capture.
    pub fn with_capture(mut self, output: W, points: CapturePoints) -> io::Result<Recording<W>> {
        self.capture = Some(Tap::new(CaptureWriter::new(output)?, self.names.clone(), points)?);
        Ok(self)
    }

    /// Adds a stream of events, for an [`EventStreamReader`] in another process.
    #[cfg(feature = "stream")]
    pub fn with_stream(mut self, output: W) -> Recording<W> {
        self.stream = Some(stream::EventStreamWriter::new(output, self.names.clone()));
        self
    }

    /// Starts ladders. Earlier events are not in them.
    pub fn start_ladders(&mut self) {
        self.ladders = Some(LadderBuilder::new(self.names.clone()));
    }

    /// The ladders since their start.
    pub fn ladders(&mut self) -> Vec<Ladder> {
        self.ladders.as_mut().map(LadderBuilder::ladders).unwrap_or_default()
    }

    /// The names of the run.
    pub const fn names(&self) -> &NameTable {
        &self.names
    }

    /// Changes the names. They apply to later events, and to all steps of the ladders.
    pub fn name(&mut self, change: impl Fn(&mut NameTable)) {
        change(&mut self.names);
        let log = self.log.as_mut().map(EventLog::names_mut);
        let capture = self.capture.as_mut().map(Tap::names_mut);
        let ladders = self.ladders.as_mut().map(LadderBuilder::names_mut);
        [log, capture, ladders].into_iter().flatten().for_each(change);
        #[cfg(feature = "stream")]
        if let Some(stream) = &mut self.stream {
            stream.set_names(self.names.clone());
        }
    }

    /// The card of a host has reported every fault of the packets that it has sent.
    pub fn end_turn(&mut self, host: HostId) {
        if let Some(tap) = &mut self.capture {
            tap.end_turn(host);
        }
    }

    /// Flushes the output. Returns the first write error, which ended the recording.
    pub fn flush(&mut self, now: Instant) -> io::Result<()> {
        #[cfg(feature = "stream")]
        self.stream.as_mut().map_or(Ok(()), stream::EventStreamWriter::flush)?;
        let log = self.log.as_mut().map_or(Ok(()), EventLog::finish);
        log.and(self.capture.as_mut().map_or(Ok(()), |tap| tap.flush(now)))
    }

    /// Writes the last packets. Returns the first write error.
    pub fn finish(&mut self) -> io::Result<()> {
        #[cfg(feature = "stream")]
        self.stream.as_mut().map_or(Ok(()), stream::EventStreamWriter::finish)?;
        let log = self.log.as_mut().map_or(Ok(()), EventLog::finish);
        log.and(self.capture.as_mut().map_or(Ok(()), Tap::finish))
    }

    /// The outputs of the event log and of the capture. Call [`Recording::finish`] first.
    pub fn into_outputs(self) -> [Option<W>; 2] {
        [self.log.map(EventLog::into_inner), self.capture.map(Tap::into_inner)]
    }
}

impl<W: Write> EventSink for Recording<W> {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        if let Some(log) = &mut self.log {
            log.on_event(now, event);
        }
        if let Some(tap) = &mut self.capture {
            tap.on_event(now, event);
        }
        if let Some(ladders) = &mut self.ladders {
            ladders.on_event(now, event);
        }
        #[cfg(feature = "stream")]
        if let Some(stream) = &mut self.stream {
            stream.on_event(now, event);
        }
    }
}
