//! A log or capture in the JSON format of Chrome's trace viewer, which the Perfetto UI opens.
//!
//! A host is a process and a queue pair a thread of it. Posting and completing a work request are slices with an arrow
//! (flow) between them, and packets are slices between these. Times are microseconds.

use crate::log::LogEvent;
use crate::parsed_log::{ParsedLog, QueuePairId, WorkRequest};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The shortest slice that the UI shows and flows can attach to.
const SLICE_US: f64 = 0.001;

/// The thread of what concerns a host as a whole.
const HOST_THREAD: u32 = 0;

fn microseconds(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

/// The object of a trace file.
pub(crate) fn trace(log: &ParsedLog) -> Value {
    let mut events = Vec::new();
    for (host, (name, _)) in log.hosts.iter().enumerate() {
        events.push(metadata("process_name", host, HOST_THREAD, name));
    }
    for end in &log.queue_pairs {
        events.push(metadata("thread_name", end.host, end.qp, &log.name(*end)));
    }
    let mut by_entry: BTreeMap<usize, Vec<(usize, &WorkRequest)>> = BTreeMap::new();
    for (number, work) in log.work_requests.iter().enumerate() {
        for entry in [work.started, work.completed].into_iter().flatten() {
            by_entry.entry(entry).or_default().push((number, work));
        }
    }
    for (index, entry) in log.entries.iter().enumerate() {
        let host = log.entry_hosts[index];
        let track = Track { host, qp: entry.event.queue_pair().unwrap_or(HOST_THREAD), time_ns: entry.time };
        for (number, work) in by_entry.get(&index).into_iter().flatten() {
            work_events(log, index, *number, work, &mut events);
        }
        match &entry.event {
            LogEvent::PacketSent { packet, retransmission, .. } => {
                let name = packet.opcode.rsplit(' ').next().unwrap_or(&packet.opcode).to_owned();
                let name = format!("{name} PSN {}", packet.psn);
                let args = json!({ "psn": packet.psn, "payload": packet.payload, "to": packet.peer.to_string(),
                    "dest_qp": packet.dest_qp, "syndrome": packet.syndrome, "retransmission": retransmission });
                events.push(track.slice("packet", &name, args));
            }
            LogEvent::RateChanged { qp, bits_per_second, .. } => {
                let name = format!("rate of {}", log.name(QueuePairId { host, qp: *qp }));
                events
                    .push(json!({ "ph": "C", "name": name, "cat": "congestion", "pid": host + 1, "tid": qp,
                    "ts": microseconds(entry.time), "args": { "Gb/s": *bits_per_second as f64 / 1e9 } }));
            }
            LogEvent::Fault { .. }
            | LogEvent::AckTimedOut { .. }
            | LogEvent::RnrWaitStarted { .. }
            | LogEvent::Retransmitted { .. }
            | LogEvent::RequestRejected { .. }
            | LogEvent::PacketDropped { .. }
            | LogEvent::QpStateChanged { .. }
            | LogEvent::CmSent { .. } => {
                let args = json!({ "why": entry.trigger, "certainty": entry.certainty });
                events.push(track.instant(entry.event.name(), args));
            }
            _ => {}
        }
    }
    json!({ "displayTimeUnit": "ns", "traceEvents": events })
}

fn metadata(name: &str, host: usize, thread: u32, value: &str) -> Value {
    json!({ "ph": "M", "name": name, "pid": host + 1, "tid": thread, "ts": 0.0, "args": { "name": value } })
}

struct Track {
    host: usize,
    qp: u32,
    time_ns: u64,
}

impl Track {
    fn event(&self, phase: &str, category: &str, name: &str) -> Value {
        json!({ "ph": phase, "cat": category, "name": name, "pid": self.host + 1, "tid": self.qp,
            "ts": microseconds(self.time_ns) })
    }

    fn slice(&self, category: &str, name: &str, args: Value) -> Value {
        let mut event = self.event("X", category, name);
        (event["dur"], event["args"]) = (SLICE_US.into(), args);
        event
    }

    fn instant(&self, name: &str, args: Value) -> Value {
        let category = name.split(':').next().unwrap_or(name);
        let mut event = self.event("i", category, name);
        // The scope is the thread.
        (event["s"], event["args"]) = ("t".into(), args);
        event
    }

    fn flow(&self, phase: &str, id: usize) -> Value {
        let mut event = self.event(phase, "work", "work request");
        event["id"] = (id + 1).into();
        if phase == "f" {
            // The arrow ends at the slice around it, not at the next one.
            event["bp"] = "e".into();
        }
        event
    }
}

/// The slice of a post or a completion, and its end of the arrow.
fn work_events(log: &ParsedLog, index: usize, number: usize, work: &WorkRequest, events: &mut Vec<Value>) {
    let QueuePairId { host, qp } = work.queue_pair;
    let track = Track { host, qp, time_ns: log.time_of(index) };
    let is_start = work.started == Some(index);
    let has_arrow = work.started.is_some() && work.completed.is_some();
    let (name, args) = match is_start {
        true => {
            (work.title(), json!({ "wr_id": work.wr_id, "first_psn": work.psns.map(|(first, _)| first) }))
        }
        false => {
            let status = work.status.as_deref().unwrap_or("done");
            (format!("{} {status}", work.title()), json!({ "wr_id": work.wr_id, "status": work.status }))
        }
    };
    events.push(track.slice("work", &name, args));
    if has_arrow {
        events.push(track.flow(if is_start { "s" } else { "f" }, number));
    }
    // A work request is also a span, in a track of its own below the host.
    if let (Some(_), Some(_)) = (work.started, work.completed) {
        let mut span = track.event(if is_start { "b" } else { "e" }, "work", &work.title());
        span["id"] = (number + 1).into();
        events.push(span);
    }
}
