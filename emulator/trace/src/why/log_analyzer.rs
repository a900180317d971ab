//! A log that questions are asked about.

use crate::log::{ConvertedEntry, Entry, Header};
use crate::parsed_log::ParsedLog;
use crate::summary::Summary;
use std::collections::BTreeMap;

/// A log that questions are asked about.
#[derive(Debug)]
pub struct LogAnalyzer {
    pub(super) log: ParsedLog,
    /// The packet of each entry of a capture that is one, by its number in the file from 1.
    packets: BTreeMap<usize, u64>,
}

impl LogAnalyzer {
    /// A log with no entries yet.
    pub fn new(header: &Header) -> LogAnalyzer {
        LogAnalyzer { log: ParsedLog::new(header), packets: BTreeMap::new() }
    }

    /// Takes the next entry that is inferred from a capture: with the number of its packet, from 0, if it is one.
    pub fn push_converted(&mut self, (packet, entry): ConvertedEntry) {
        self.packets.extend(packet.map(|packet| (self.log.entries.len(), packet + 1)));
        self.push(entry);
    }

    /// Hosts, connections, messages and causes.
    pub fn summary(&self) -> Summary {
        Summary::new(&self.log)
    }

    /// The same as tracks of the Perfetto UI.
    pub fn perfetto(&self) -> serde_json::Value {
        crate::perfetto::trace(&self.log)
    }

    /// Takes the next entry of the log.
    pub fn push(&mut self, entry: Entry) {
        self.log.push(entry);
    }

    /// The packet that an entry is about: itself, the next or the one before.
    pub(super) fn packet_of(&self, entry: usize) -> Option<u64> {
        let time = self.log.time_of(entry);
        let at = |found: Option<(&usize, &u64)>| {
            found.filter(|(at, _)| self.log.time_of(**at) == time).map(|(_, packet)| *packet)
        };
        at(self.packets.range(entry..).next()).or_else(|| at(self.packets.range(..entry).next_back()))
    }
}
