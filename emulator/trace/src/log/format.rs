//! An entry of a log as one line for people.

use super::{Entry, FabricPacketData, Header, LogEvent, PacketData};
use crate::describe::duration;
use crate::parsed_log::{QueuePairId, QueuePairTable};

/// Tells a log line by line. Queue pairs are called by their hosts and a number, in the order in which they
/// are heard of.
#[derive(Debug)]
pub struct EntryFormatter {
    queue_pairs: QueuePairTable,
}

impl EntryFormatter {
    /// A log that begins with this line.
    pub fn new(header: &Header) -> EntryFormatter {
        EntryFormatter { queue_pairs: QueuePairTable::new(header) }
    }

    /// The next entry as a line: time in seconds, who, what, and why where the log says so.
    pub fn format(&mut self, entry: &Entry) -> String {
        let host = self.queue_pairs.observe(entry);
        let known =
            |qp: &u32| *qp != 0 && self.queue_pairs.queue_pairs.contains(&QueuePairId { host, qp: *qp });
        let who = match entry.event.queue_pair().filter(known) {
            Some(qp) => self.queue_pairs.name(QueuePairId { host, qp }),
            None if entry.host.is_empty() => "somebody".into(),
            None => entry.host.clone(),
        };
        let time = format!("{}.{:09}", entry.time / 1_000_000_000, entry.time % 1_000_000_000);
        let why = entry.trigger.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
        format!("{time} {who} {}{why}", event_text(&entry.event, entry.time))
    }
}

fn packet_text(packet_text: &PacketData) -> String {
    let syndrome = packet_text.syndrome.as_ref().map(|word| format!(" {word}")).unwrap_or_default();
    format!("{} psn={}{syndrome} {} B", packet_text.opcode, packet_text.psn, packet_text.payload)
}

fn fabric_packet_text(packet: &FabricPacketData) -> String {
    let psn = packet.psn.map(|psn| format!(" psn={psn}")).unwrap_or_default();
    format!("a packet {} -> {}{psn}", packet.source, packet.destination)
}

fn event_text(event_text: &LogEvent, now: u64) -> String {
    match event_text {
        LogEvent::QpConfigured { qp_type: kind, path_mtu: mtu, recovery, .. } => {
            format!("is ready: {kind}, path MTU {mtu}, recovery {recovery}")
        }
        LogEvent::WqeFetched { wr_id: id, operation, bytes, first_psn, packets, .. } => {
            let packets = if *packets == 1 { "1 packet".into() } else { format!("{packets} packets") };
            format!("starts {operation} {id}: {bytes} B in {packets} from psn={first_psn} on")
        }
        LogEvent::WorkCompleted { wr_id: id, operation, status, bytes, .. } => {
            format!("completes {operation} {id} with {status}, {bytes} B")
        }
        LogEvent::UnsignaledCompleted { wr_id: id, .. } => {
            format!("is done with request {id}, no completion wanted")
        }
        LogEvent::PacketSent { packet: sent, retransmission: again, cause, .. } => {
            let again = if *again { format!(", again ({cause})") } else { String::new() };
            format!("-> {} {}{again}", sent.peer, packet_text(sent))
        }
        LogEvent::PacketReceived { packet: received, .. } => {
            format!("<- {} {}", received.peer, packet_text(received))
        }
        LogEvent::PacketDropped { packet: Some(dropped), .. } => {
            format!("does not take {}", packet_text(dropped))
        }
        LogEvent::PacketDropped { packet: None, .. } => "does not take a packet".into(),
        LogEvent::DuplicateRequestHandled { psn, .. } => format!("answers the duplicate psn={psn} again"),
        LogEvent::RequestRejected { psn, .. } => format!("refuses psn={psn}"),
        LogEvent::Retransmitted { from_psn: to_psn, cause, retries_left, .. } => {
            format!("goes back to psn={to_psn} ({cause}), {retries_left} tries left")
        }
        LogEvent::RnrWaitStarted { psn, until, .. } => {
            format!("waits {} before psn={psn} is sent again", duration(until.saturating_sub(now)))
        }
        LogEvent::AckTimedOut { oldest_psn, .. } => format!("got no answer to psn={oldest_psn} in time"),
        LogEvent::MemoryWritten { key, address, length, .. } => {
            format!("has {length} B written at {address:#x} (key {key:#x})")
        }
        LogEvent::QpStateChanged { from, to, .. } => format!("{from} -> {to}"),
        LogEvent::AsyncEventRaised { event, .. } => format!("raises {event}"),
        LogEvent::Fault { class, psn, .. } => {
            let psn = psn.map(|psn| format!(" psn={psn}")).unwrap_or_default();
            format!("has a packet on the cable ({class}{psn})")
        }
        LogEvent::CmSent { message, peer, retransmission: again, .. } => {
            format!("-> {peer} CM {message}{}", if *again { ", again" } else { "" })
        }
        LogEvent::CmReceived { message, peer } => format!("<- {peer} CM {message}"),
        LogEvent::CmDropped { message, peer, .. } => format!("does not take CM {message} of {peer}"),
        LogEvent::EcnMarkReceived { psn, cnp_queued: notified, .. } => {
            let answer = if *notified { "a CNP follows" } else { "the last CNP was too short ago" };
            format!("gets psn={psn} with a congestion mark, {answer}")
        }
        LogEvent::RateChanged { rate, alpha, cause, .. } => {
            let (whole, part) = (rate / 1_000_000_000, rate / 1_000_000 % 1000);
            let (one, rest) = (alpha / 1_000_000, alpha / 1000 % 1000);
            format!("sends at {whole}.{part:03} Gb/s from now on ({cause}), alpha {one}.{rest:03}")
        }
        LogEvent::EcnMarked { link: cable, queue_depth: depth, packet, .. } => {
            format!("marks {}: {depth} B wait for cable {cable}", fabric_packet_text(packet))
        }
        LogEvent::FrameDropped { link: cable, cause, packet, .. } => {
            format!("loses {} at cable {cable}: {cause}", fabric_packet_text(packet))
        }
        LogEvent::PauseSent { link: cable, priority, quanta: 0, buffered: held } => {
            format!("lets priority {priority} go on over cable {cable}, {held} B of it are left")
        }
        LogEvent::PauseSent { link: cable, priority, quanta, buffered: held } => {
            format!("pauses priority {priority} on cable {cable} for {quanta} quanta, {held} B of it wait")
        }
        LogEvent::PauseReceived { link: cable, priority, quanta: 0, .. } => {
            format!("may go on with priority {priority} over cable {cable}")
        }
        LogEvent::PauseReceived { link: cable, priority, until, .. } => {
            let wait = duration(until.saturating_sub(now));
            format!("is paused: nothing of priority {priority} over cable {cable} for {wait}")
        }
        LogEvent::PauseEnded { link: cable, priority, cause: how } => {
            format!("goes on with priority {priority} over cable {cable} ({how})")
        }
        LogEvent::QueueSampled { link: cable, priority, queue_depth: depth } => {
            format!("has {depth} B of priority {priority} waiting for cable {cable}")
        }
        // The others say it with their fields.
        other => {
            let object = serde_json::to_value(other).unwrap_or_default();
            format!("{} {}", other.name(), object.get("data").unwrap_or(&serde_json::Value::Null))
        }
    }
}
