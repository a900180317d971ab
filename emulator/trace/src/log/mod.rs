//! The event log: JSON lines in the manner of qlog, one object per event, the same bytes in every run.
//!
//! [`VOCABULARY`] lists every name with its fields; the reference page is checked against it.

mod convert;
mod data;
mod entry;
mod provenance;
mod reader;
mod tell;
mod vocabulary;

pub use convert::{Conversion, Converted};
pub use data::{BufferData, Change, CulpritData, PacketData, QueueData};
pub use reader::{EventLogReader, LogCause, LogError};
pub use tell::Teller;
pub use vocabulary::{Name, VOCABULARY, What};

use crate::Cast;
use serde::{Deserialize, Serialize};
use softhca_engine::{Event, Instant};
use softhca_fabric::{CableId, FabricEvent, Fault, HostId, Observer};
use std::io::{self, Write};
use std::net::IpAddr;

/// What the first line of a log calls itself.
pub const FORMAT: &str = "softhca-events";
/// The version of the format: a release in which a name or a field is new, gone or of another meaning has the
/// next one.
pub const VERSION: u32 = 1;

/// The first line of a log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`].
    pub version: u32,
    /// What the run was about.
    pub title: String,
    /// The hosts whose cards tell.
    pub vantage_points: Vec<VantagePoint>,
}

/// A host whose card tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VantagePoint {
    /// Its name.
    pub host: String,
    /// Its address.
    pub address: IpAddr,
}

/// Every other line of a log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// When, in nanoseconds since the start.
    pub time: u64,
    /// Where: the name of the host or switch; for a fault that of the sender.
    pub host: String,
    /// What: the keys `name` and `data`.
    #[serde(flatten)]
    pub what: What,
    /// Why, as a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trigger: Option<String>,
}

/// Tells events and faults as entries of a log, with the names of a cast.
#[derive(Debug, Default)]
pub struct Narrator {
    cast: Cast,
    provenance: provenance::Provenance,
}

impl Narrator {
    /// Nothing was told yet.
    pub fn new(cast: Cast) -> Narrator {
        Narrator { cast, provenance: Default::default() }
    }

    /// The first line of a log. The vantage points are the hosts that have a name by now.
    pub fn header(&self, title: &str) -> Header {
        let hosts = self.cast.hosts();
        let vantage_points =
            hosts.map(|(host, address)| VantagePoint { host: host.into(), address }).collect();
        Header { format: FORMAT.into(), version: VERSION, title: title.into(), vantage_points }
    }

    /// A card told an event.
    pub fn card(&mut self, now: Instant, host: HostId, event: &Event) -> Entry {
        self.provenance.hear(self.cast.address(host), event);
        let (what, trigger) = entry::of_event(event, &self.provenance);
        self.provenance.told(event);
        Entry { time: now.nanos(), host: self.cast.host(host), what, trigger }
    }

    /// A fault happened to a frame on a cable.
    pub fn fault(&self, now: Instant, cable: CableId, fault: &Fault) -> Entry {
        let ends = self.cast.nodes(cable, fault.direction);
        let host = ends.map_or(String::new(), |[sender, _]| self.cast.node(sender));
        let (what, trigger) = entry::of_fault(cable, fault, &self.cast);
        Entry { time: now.nanos(), host, what, trigger }
    }

    /// A switch, or the port of a host, told an event.
    pub fn fabric(&self, now: Instant, event: &FabricEvent) -> Entry {
        let (node, what, trigger) = entry::of_fabric(event);
        Entry { time: now.nanos(), host: self.cast.node(node), what, trigger }
    }
}

/// Writes an event log. As an [`Observer`] it watches a world; anybody else calls [`EventLog::card`] and
/// [`EventLog::fault`].
///
/// Call [`EventLog::finish`] at the end: it tells whether all could be written.
#[derive(Debug)]
pub struct EventLog<W> {
    output: W,
    narrator: Narrator,
    failure: Option<io::Error>,
}

impl<W: Write> EventLog<W> {
    /// Starts a log with its first line. The vantage points are the hosts that have a name by now.
    pub fn new(output: W, title: &str, cast: Cast) -> EventLog<W> {
        let narrator = Narrator::new(cast);
        let header = narrator.header(title);
        let mut log = EventLog { output, narrator, failure: None };
        log.line(&header);
        log
    }

    /// The names that lines are written with, to add to.
    pub fn cast_mut(&mut self) -> &mut Cast {
        &mut self.narrator.cast
    }

    /// Hands what was written so far on to whoever stores it.
    pub fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }

    /// A card told an event.
    pub fn card(&mut self, now: Instant, host: HostId, event: &Event) {
        let entry = self.narrator.card(now, host, event);
        self.line(&entry);
    }

    /// A fault happened to a frame on a cable.
    pub fn fault(&mut self, now: Instant, cable: CableId, fault: &Fault) {
        let entry = self.narrator.fault(now, cable, fault);
        self.line(&entry);
    }

    /// A switch, or the port of a host, told an event.
    pub fn fabric(&mut self, now: Instant, event: &FabricEvent) {
        let entry = self.narrator.fabric(now, event);
        self.line(&entry);
    }

    /// Hands everything on. The first thing that could not be written is the error.
    pub fn finish(&mut self) -> io::Result<()> {
        match self.failure.take() {
            Some(failure) => Err(failure),
            None => self.output.flush(),
        }
    }

    /// What was written to.
    pub fn into_inner(self) -> W {
        self.output
    }

    fn line(&mut self, object: &impl Serialize) {
        if self.failure.is_none() {
            let written = serde_json::to_writer(&mut self.output, object).map_err(io::Error::from);
            self.failure = written.and_then(|()| self.output.write_all(b"\n")).err();
        }
    }
}

impl<W: Write> Observer for EventLog<W> {
    fn card(&mut self, now: Instant, host: HostId, event: &Event) {
        EventLog::card(self, now, host, event);
    }

    fn fault(&mut self, now: Instant, cable: CableId, fault: &Fault) {
        EventLog::fault(self, now, cable, fault);
    }

    fn fabric(&mut self, now: Instant, event: &FabricEvent) {
        EventLog::fabric(self, now, event);
    }
}
