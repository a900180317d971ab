//! The captures that could have been taken of a run: at each host, at each switch, and where each packet is sent.

use super::statements::false_statements;
use super::truth::{Connection, Place, Truth};
use softhca_trace::log::{CaptureConverter, Entry, Header, LogEvent};
use softhca_trace::{CaptureReader, Packet, PacketDirection, Record};
use std::collections::BTreeMap;

const INTERFACE_DESCRIPTION: u32 = 1;
const INTERFACE_NAME: u16 = 2;

/// Every record of a run, by the host or switch that it was captured at.
pub struct Captures {
    records: Vec<(String, Record)>,
}

/// The names of the interfaces of a pcapng file.
fn interfaces(capture: &[u8]) -> Vec<String> {
    let word = |at: usize| u32::from_le_bytes(capture[at..at + 4].try_into().expect("four bytes"));
    let half = |at: usize| u16::from_le_bytes(capture[at..at + 2].try_into().expect("two bytes"));
    let (mut names, mut at) = (Vec::new(), 0);
    while at < capture.len() {
        if word(at) == INTERFACE_DESCRIPTION {
            // The name is the first option, after two words of the block and two of the interface.
            assert_eq!(half(at + 16), INTERFACE_NAME, "the order of the options");
            let name = &capture[at + 20..at + 20 + usize::from(half(at + 18))];
            names.push(String::from_utf8(name.to_vec()).expect("UTF-8"));
        }
        at += word(at + 4) as usize;
    }
    names
}

impl Captures {
    pub fn new(capture: &[u8]) -> Captures {
        let interfaces = interfaces(capture);
        let node_of = |record: &Record| {
            let at = record.offset as usize + 8;
            let interface = u32::from_le_bytes(capture[at..at + 4].try_into().expect("four bytes"));
            interfaces[interface as usize].clone()
        };
        let records = CaptureReader::new(capture).expect("a capture");
        let records = records.map(|record| record.expect("a whole record"));
        Captures { records: records.map(|record| (node_of(&record), record)).collect() }
    }

    /// The records where hosts send them.
    pub fn at_senders(&self, header: &Header) -> Vec<&Record> {
        let is_host = |node: &str| header.vantage_points.iter().any(|point| point.host == node);
        let sent = |(node, record): &&(String, Record)| {
            is_host(node) && record.direction == Some(PacketDirection::Outbound)
        };
        self.records.iter().filter(sent).map(|(_, record)| record).collect()
    }

    /// The statements about captures of the run that its log contradicts.
    pub fn false_statements(&self, header: &Header, log: &[Entry]) -> Vec<String> {
        let truths: Vec<Truth> =
            Connection::all(header, log).into_iter().map(|connection| Truth::new(connection, log)).collect();
        let has_requests = log.iter().any(|entry| {
            matches!(&entry.event, LogEvent::PacketSent { packet, .. } if packet.opcode.starts_with("RC "))
        });
        assert_eq!(has_requests, !truths.is_empty(), "statements about every connection are compared");
        let mut of_node: BTreeMap<&str, Vec<&Record>> = BTreeMap::new();
        for (node, record) in &self.records {
            of_node.entry(node).or_default().push(record);
        }
        let nodes = of_node.into_iter().map(|(node, records)| (Place::Node(node.into()), records));
        let mut wrong = Vec::new();
        for (place, records) in nodes.chain([(Place::Senders, self.at_senders(header))]) {
            // A switch does not know which of its ports is nearer to the sender.
            let is_switch = matches!(&place, Place::Node(node)
                if !header.vantage_points.iter().any(|point| point.host == *node));
            for knows_direction in [true, false] {
                if !(is_switch && knows_direction) {
                    wrong.extend(false_statements(
                        &truths,
                        (&place, knows_direction),
                        &infer(&records, knows_direction),
                    ));
                }
            }
        }
        wrong
    }
}

/// The entries that are inferred from records, with the times of the run.
fn infer(records: &[&Record], knows_direction: bool) -> Vec<Entry> {
    let mut converter = CaptureConverter::default();
    for record in records {
        let direction = record.direction.filter(|_| knows_direction);
        converter.push(&Packet::new(&Record { direction, ..(*record).clone() }, 0));
    }
    // The log counts from the start of the run, the converter from the first packet.
    let start_ns = records.iter().map(|record| record.time_ns).min().unwrap_or_default();
    let entries = converter.finish("a capture").1;
    entries.map(|(_, entry)| Entry { time: entry.time + start_ns, ..entry }).collect()
}
