//! An entry of a log as one line for people.

use super::{CulpritData, Entry, Header, PacketData, What};
use crate::account::{Place, Roster};
use crate::words::duration;

/// Tells a log line by line. Queue pairs are called by their hosts and a number, in the order in which they
/// are heard of.
#[derive(Debug)]
pub struct Teller {
    roster: Roster,
}

impl Teller {
    /// A log that begins with this line.
    pub fn new(header: &Header) -> Teller {
        Teller { roster: Roster::new(header) }
    }

    /// The next entry as a line: time in seconds, who, what, and why where the log says so.
    pub fn tell(&mut self, entry: &Entry) -> String {
        let host = self.roster.hear(entry);
        let known = |qp: &u32| *qp != 0 && self.roster.places.contains(&Place { host, qp: *qp });
        let who = match entry.what.queue_pair().filter(known) {
            Some(qp) => self.roster.name(Place { host, qp }),
            None if entry.host.is_empty() => "somebody".into(),
            None => entry.host.clone(),
        };
        let time = format!("{}.{:09}", entry.time / 1_000_000_000, entry.time % 1_000_000_000);
        let why = entry.trigger.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
        format!("{time} {who} {}{why}", what(&entry.what, entry.time))
    }
}

fn packet(packet: &PacketData) -> String {
    let syndrome = packet.syndrome.as_ref().map(|word| format!(" {word}")).unwrap_or_default();
    format!("{} psn={}{syndrome} {} B", packet.opcode, packet.psn, packet.payload)
}

fn culprit(packet: &CulpritData) -> String {
    let psn = packet.psn.map(|psn| format!(" psn={psn}")).unwrap_or_default();
    format!("a packet {} -> {}{psn}", packet.source, packet.destination)
}

fn what(what: &What, now: u64) -> String {
    match what {
        What::Configured { kind, mtu, recovery, .. } => {
            format!("is ready: {kind}, path MTU {mtu}, recovery {recovery}")
        }
        What::WorkStarted { id, operation, bytes, first_psn, packets, .. } => {
            let packets = if *packets == 1 { "1 packet".into() } else { format!("{packets} packets") };
            format!("starts {operation} {id}: {bytes} B in {packets} from psn={first_psn} on")
        }
        What::WorkCompleted { id, operation, status, bytes, .. } => {
            format!("completes {operation} {id} with {status}, {bytes} B")
        }
        What::WorkRetired { id, .. } => format!("is done with request {id}, no completion wanted"),
        What::PacketSent { packet: sent, again, cause, .. } => {
            let again = if *again { format!(", again ({cause})") } else { String::new() };
            format!("-> {} {}{again}", sent.peer, packet(sent))
        }
        What::PacketReceived { packet: received, .. } => {
            format!("<- {} {}", received.peer, packet(received))
        }
        What::PacketDropped { packet: Some(dropped), .. } => format!("does not take {}", packet(dropped)),
        What::PacketDropped { packet: None, .. } => "does not take a packet".into(),
        What::DuplicateAnswered { psn, .. } => format!("answers the duplicate psn={psn} again"),
        What::RequestRefused { psn, .. } => format!("refuses psn={psn}"),
        What::WentBack { to_psn, cause, retries_left, .. } => {
            format!("goes back to psn={to_psn} ({cause}), {retries_left} tries left")
        }
        What::RnrWaitStarted { psn, until, .. } => {
            format!("waits {} before psn={psn} is sent again", duration(until.saturating_sub(now)))
        }
        What::AckTimedOut { oldest_psn, .. } => format!("got no answer to psn={oldest_psn} in time"),
        What::MemoryWritten { key, address, length, .. } => {
            format!("has {length} B written at {address:#x} (key {key:#x})")
        }
        What::StateChanged { from, to, .. } => format!("{from} -> {to}"),
        What::AsyncEvent { event, .. } => format!("raises {event}"),
        What::Fault { class, psn, .. } => {
            let psn = psn.map(|psn| format!(" psn={psn}")).unwrap_or_default();
            format!("has a packet on the cable ({class}{psn})")
        }
        What::CmSent { message, peer, again, .. } => {
            format!("-> {peer} CM {message}{}", if *again { ", again" } else { "" })
        }
        What::CmReceived { message, peer } => format!("<- {peer} CM {message}"),
        What::CmIgnored { message, peer, .. } => format!("does not take CM {message} of {peer}"),
        What::MarkSeen { psn, notified, .. } => {
            let answer = if *notified { "a CNP follows" } else { "the last CNP was too short ago" };
            format!("gets psn={psn} with a congestion mark, {answer}")
        }
        What::RateChanged { rate, alpha, cause, .. } => {
            let (whole, part) = (rate / 1_000_000_000, rate / 1_000_000 % 1000);
            let (one, rest) = (alpha / 1_000_000, alpha / 1000 % 1000);
            format!("sends at {whole}.{part:03} Gb/s from now on ({cause}), alpha {one}.{rest:03}")
        }
        What::EcnMarked { cable, depth, packet, .. } => {
            format!("marks {}: {depth} B wait for cable {cable}", culprit(packet))
        }
        What::FrameLost { cable, cause, packet, .. } => {
            format!("loses {} at cable {cable}: {cause}", culprit(packet))
        }
        What::PauseSent { cable, priority, quanta: 0, held } => {
            format!("lets priority {priority} go on over cable {cable}, {held} B of it are left")
        }
        What::PauseSent { cable, priority, quanta, held } => {
            format!("pauses priority {priority} on cable {cable} for {quanta} quanta, {held} B of it wait")
        }
        What::PauseReceived { cable, priority, quanta: 0, .. } => {
            format!("may go on with priority {priority} over cable {cable}")
        }
        What::PauseReceived { cable, priority, until, .. } => {
            let wait = duration(until.saturating_sub(now));
            format!("is paused: nothing of priority {priority} over cable {cable} for {wait}")
        }
        What::PauseEnded { cable, priority, how } => {
            format!("goes on with priority {priority} over cable {cable} ({how})")
        }
        What::QueueSampled { cable, priority, depth } => {
            format!("has {depth} B of priority {priority} waiting for cable {cable}")
        }
        // The others say it with their fields.
        other => {
            let object = serde_json::to_value(other).unwrap_or_default();
            format!("{} {}", other.name(), object.get("data").unwrap_or(&serde_json::Value::Null))
        }
    }
}
