//! The event log: JSON lines in the manner of qlog, one object per event, the same bytes in every run.
//!
//! [`EVENT_SCHEMAS`] lists every name with its fields; the reference page is checked against it.

mod attribution;
mod cause;
mod convert;
mod entry;
mod event;
mod format;
mod inference;
mod reader;
mod text;
mod value;

pub use cause::ObservedCause;
pub(crate) use cause::expects_reply;
pub use convert::{CaptureConverter, ConvertedEntry};
pub use entry::{Certainty, Entry, FORMAT, Header, VERSION, VantagePoint};
pub use event::{ConfigurationData, EVENT_SCHEMAS, Emphasis, EventSchema, LogEvent};
pub use format::EntryFormatter;
pub use reader::{EventLogReader, LogError, LogErrorKind};
pub(crate) use text::TextContext;
pub use text::event_text;
pub use value::{
    CompletionData, CompletionQueueData, EffectData, FabricPacketData, FieldSchema, Keyword, LogField,
    LogValue, PacketData, SgeData,
};

use crate::NameTable;
use crate::describe::{self, kebab_case};
use serde::Serialize;
use softhca_engine::{Event, Instant, RequestError};
use softhca_fabric::{EventSink, FabricEvent, Fault, FaultCause, HostId, LinkId, NetworkEvent};
use std::io::{self, Write};

/// Turns events and faults into entries of a log, with the names of a run.
#[derive(Debug, Default)]
pub struct EntryBuilder {
    names: NameTable,
    attribution: attribution::PacketAttribution,
}

impl EntryBuilder {
    /// A builder without history.
    pub fn new(names: NameTable) -> EntryBuilder {
        EntryBuilder { names, attribution: Default::default() }
    }

    /// The names of the run.
    pub const fn names(&self) -> &NameTable {
        &self.names
    }

    /// Replaces the names, for later entries.
    pub fn set_names(&mut self, names: NameTable) {
        self.names = names;
    }

    /// The first line of a log. The vantage points are the hosts that have a name by now.
    pub fn header(&self, title: &str) -> Header {
        let hosts = self.names.hosts();
        let vantage_points =
            hosts.map(|(host, address)| VantagePoint { host: host.into(), address }).collect();
        Header {
            format: FORMAT.into(),
            version: VERSION,
            title: title.into(),
            vantage_points,
            source: None,
            cut_packets: 0,
        }
    }

    /// The entry of an event, if the log has one for it.
    pub fn entry(&mut self, now: Instant, event: &NetworkEvent<'_>) -> Option<Entry> {
        match event {
            NetworkEvent::Hca { host, event } => Some(self.hca_event(now, *host, event)),
            NetworkEvent::Fault { link, fault } => Some(self.fault(now, *link, fault)),
            NetworkEvent::Fabric(event) => Some(self.fabric_event(now, event)),
            _ => None,
        }
    }

    /// The entry of an HCA event.
    fn hca_event(&mut self, now: Instant, host: HostId, event: &Event) -> Entry {
        self.attribution.before_entry(self.names.address(host), event);
        let (mut log_event, trigger) = LogEvent::from_event(event);
        self.fill_log_fields(event, &mut log_event);
        self.attribution.after_entry(event);
        Entry {
            time: now.nanos(),
            host: self.names.host_name(host),
            event: log_event,
            trigger,
            certainty: None,
        }
    }

    /// Fills the fields that only the log has.
    fn fill_log_fields(&self, event: &Event, log_event: &mut LogEvent) {
        let attribution = &self.attribution;
        match (event, log_event) {
            (
                Event::PacketSent { qp, packet, retransmission, .. },
                LogEvent::PacketSent { wr_id, cause, .. },
            ) => {
                *wr_id = wr_id.or_else(|| attribution.request_of_response(packet));
                *cause = attribution.cause(*qp, packet, *retransmission);
            }
            (Event::PacketReceived { qp, packet }, LogEvent::PacketReceived { wr_id, .. })
            | (
                Event::PacketDropped { qp, packet: Some(packet), .. },
                LogEvent::PacketDropped { wr_id, .. },
            ) => *wr_id = attribution.request_of_received(*qp, packet),
            (
                Event::RequestRejected { error: RequestError::PsnOutOfSequence { expected, .. }, .. },
                LogEvent::RequestRejected { expected_psn, .. },
            ) => *expected_psn = Some(expected.value()),
            (Event::AsyncEventRaised { event, .. }, LogEvent::AsyncEventRaised { element, .. }) => {
                *element = value::element(event);
            }
            _ => {}
        }
    }

    /// The entry of a fault. Its host is the sender of the packet.
    fn fault(&self, now: Instant, link: LinkId, fault: &Fault) -> Entry {
        let ends = self.names.link_ends(link, fault.direction);
        let host = ends.map_or(String::new(), |[sender, _]| self.names.node_name(sender));
        let (cause, rule) = match fault.cause {
            FaultCause::Rule(id) => ("rule", Some(id.0)),
            FaultCause::LinkDown => ("link-down", None),
            FaultCause::ExceedsMtu => ("exceeds-mtu", None),
        };
        let packet = &fault.packet;
        let event = LogEvent::Fault {
            link: Some(link.0),
            direction: kebab_case(&fault.direction).into(),
            cause: cause.into(),
            rule,
            effect: fault.effect.log(),
            class: kebab_case(&packet.class).into(),
            opcode: packet.opcode.log(),
            psn: packet.psn.log(),
            relative_psn: packet.relative_psn,
            flow: packet.flow_id.map(|flow| flow.0),
            dest_qp: None,
            transmission: packet.transmission,
        };
        Entry {
            time: now.nanos(),
            host,
            event,
            trigger: Some(describe::fault(fault, &self.names)),
            certainty: None,
        }
    }

    /// The entry of an event of a switch or a host port.
    fn fabric_event(&self, now: Instant, event: &FabricEvent) -> Entry {
        let (log_event, trigger) = LogEvent::from_fabric_event(event);
        Entry {
            time: now.nanos(),
            host: self.names.node_name(event.node()),
            event: log_event,
            trigger,
            certainty: None,
        }
    }
}

/// Writes an event log. It is an event sink.
///
/// Call [`EventLog::finish`] at the end: it returns the first write error.
#[derive(Debug)]
pub struct EventLog<W> {
    output: W,
    entries: EntryBuilder,
    error: Option<io::Error>,
}

impl<W: Write> EventLog<W> {
    /// Starts a log with its first line. The vantage points are the hosts that have a name by now.
    pub fn new(output: W, title: &str, names: NameTable) -> EventLog<W> {
        let entries = EntryBuilder::new(names);
        let header = entries.header(title);
        let mut log = EventLog { output, entries, error: None };
        log.write_line(&header);
        log
    }

    pub(crate) fn names_mut(&mut self) -> &mut NameTable {
        &mut self.entries.names
    }

    /// Flushes the output. Returns the first write error.
    pub fn finish(&mut self) -> io::Result<()> {
        match &self.error {
            Some(error) => Err(io::Error::new(error.kind(), error.to_string())),
            None => self.output.flush(),
        }
    }

    /// Returns the writer.
    pub fn into_inner(self) -> W {
        self.output
    }

    fn write_line(&mut self, object: &impl Serialize) {
        if self.error.is_none() {
            let written = serde_json::to_writer(&mut self.output, object).map_err(io::Error::from);
            self.error = written.and_then(|()| self.output.write_all(b"\n")).err();
        }
    }
}

impl<W: Write> EventSink for EventLog<W> {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        if self.error.is_none()
            && let Some(entry) = self.entries.entry(now, event)
        {
            self.write_line(&entry);
        }
    }
}
