//! A log entry as one line of text.

use super::{Entry, Header, TextContext};
use crate::parsed_log::{QueuePairId, QueuePairTable};

/// Formats a log line by line. A queue pair is named after its host and numbered in order of appearance.
#[derive(Debug)]
pub struct EntryFormatter {
    queue_pairs: QueuePairTable,
}

impl EntryFormatter {
    /// A formatter for a log with this header.
    pub fn new(header: &Header) -> EntryFormatter {
        EntryFormatter { queue_pairs: QueuePairTable::new(header) }
    }

    /// The next entry as a line: the time in seconds, the queue pair or node, the event, and its reason if known.
    pub fn format(&mut self, entry: &Entry) -> String {
        let host = self.queue_pairs.observe(entry);
        let is_known = |qp: &u32| *qp != 0 && self.queue_pairs.contains(QueuePairId { host, qp: *qp });
        let node = match entry.event.queue_pair().filter(is_known) {
            Some(qp) => self.queue_pairs.name(QueuePairId { host, qp }),
            None if entry.host.is_empty() => "unknown".into(),
            None => entry.host.clone(),
        };
        let time = format!("{}.{:09}", entry.time / 1_000_000_000, entry.time % 1_000_000_000);
        let context = TextContext {
            now_ns: entry.time,
            trigger: entry.trigger.as_deref(),
            psn: &|_, psn| format!("PSN {psn}"),
        };
        format!("{time} {node} {}", entry.event.text(&context))
    }
}
