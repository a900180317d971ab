//! The contents of a log or capture in numbers: hosts, connections, messages, causes of trouble, sizes and latencies.

use crate::describe::duration;
use crate::log::{Certainty, LogEvent, ObservedCause};
use crate::parsed_log::{ParsedLog, QueuePairId, WorkRequest};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::{self, Write};

/// Number of slowest work requests to list.
const MAX_SLOWEST: usize = 10;
/// The time is divided into so many intervals for the throughput.
const THROUGHPUT_BINS: u64 = 100;

/// The summary of a log or capture.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// `log` or `capture`.
    pub source: &'static str,
    /// Time from the first to the last event, in nanoseconds.
    pub duration_ns: u64,
    /// Packets that were sent.
    pub packets: u64,
    /// Messages: work requests that were sent.
    pub messages: u64,
    pub bytes: u64,
    pub hosts: Vec<HostSummary>,
    /// The connections, in the order in which they appear.
    pub connections: Vec<ConnectionSummary>,
    /// Causes of trouble on the way, and how often each occurred.
    pub causes: Vec<CauseCount>,
    /// Messages by operation.
    pub operations: Vec<OperationSummary>,
    /// The slowest work requests, slowest first.
    pub slowest: Vec<SlowRequest>,
    /// Payload sent in each interval of the time.
    pub throughput: Vec<ThroughputBin>,
}

#[derive(Clone, Debug, Serialize)]
pub struct HostSummary {
    pub name: String,
    /// Packets that it sent.
    pub packets: u64,
    pub payload: u64,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct ConnectionSummary {
    /// Its two ends.
    pub name: String,
    /// The transport: `RC`, `UC`, ….
    pub service: String,
    /// Packets sent by both ends.
    pub packets: u64,
    pub payload: u64,
    /// Messages of both ends.
    pub messages: u64,
    /// Messages that failed, without those that were flushed.
    pub failed: u64,
    /// Packets that were sent again.
    pub retransmissions: u64,
    /// Packets that were lost.
    pub lost: u64,
    /// Packets that arrived but are not in the capture.
    pub not_captured: u64,
    /// NAKs, RNR NAKs among them.
    pub naks: u64,
    pub cnps: u64,
}

/// How often a cause was observed, by its certainty.
#[derive(Clone, Debug, Serialize)]
pub struct CauseCount {
    /// The cause.
    pub code: String,
    /// How often it is known.
    pub known: u64,
    /// How often it is inferred.
    pub inferred: u64,
    /// How often it is one of several possible causes.
    pub ambiguous: u64,
}

/// Messages of one operation.
#[derive(Clone, Debug, Serialize)]
pub struct OperationSummary {
    pub operation: String,
    /// How many.
    pub messages: u64,
    pub bytes: u64,
    /// Latency from the start of the work request to its end: the shortest, in nanoseconds.
    pub min_ns: u64,
    /// Half of them took no longer.
    pub median_ns: u64,
    /// 99 of 100 took no longer.
    pub p99_ns: u64,
    /// The longest.
    pub max_ns: u64,
    /// Sizes: powers of two of bytes.
    pub sizes: Vec<Bucket>,
    /// Latencies: powers of two of nanoseconds.
    pub latencies: Vec<Bucket>,
}

/// A bar of a histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Bucket {
    /// The lowest value; the next bucket starts at twice that.
    pub from: u64,
    /// How many values.
    pub count: u64,
}

/// A slow work request.
#[derive(Clone, Debug, Serialize)]
pub struct SlowRequest {
    /// Its name.
    pub request: String,
    pub queue_pair: String,
    /// How long it took, in nanoseconds.
    pub took_ns: u64,
    /// Number of the entry that ends it, from 0.
    pub entry: usize,
}

/// Payload in an interval.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ThroughputBin {
    /// The start, in nanoseconds.
    pub time_ns: u64,
    /// The length, in nanoseconds.
    pub length_ns: u64,
    /// Packets sent.
    pub packets: u64,
    pub payload: u64,
}

/// The value that so many per cent of the sorted values do not exceed.
pub(crate) fn percentile<T: Copy + Default>(sorted: &[T], share: usize) -> T {
    let index = (sorted.len() * share / 100).min(sorted.len().saturating_sub(1));
    sorted.get(index).copied().unwrap_or_default()
}

fn histogram(values: impl Iterator<Item = u64>) -> Vec<Bucket> {
    let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
    for value in values {
        *counts.entry(value.checked_ilog2().map_or(0, |power| 1 << power)).or_default() += 1;
    }
    counts.into_iter().map(|(from, count)| Bucket { from, count }).collect()
}

impl Summary {
    pub(crate) fn new(log: &ParsedLog) -> Summary {
        let mut hosts: Vec<HostSummary> = log
            .hosts
            .iter()
            .map(|(name, _)| HostSummary { name: name.clone(), packets: 0, payload: 0 })
            .collect();
        let mut connections = ConnectionCounter { log, numbers: BTreeMap::new(), connections: Vec::new() };
        let mut causes: BTreeMap<String, CauseCount> = BTreeMap::new();
        let (first, last) = match (log.entries.first(), log.entries.last()) {
            (Some(first), Some(last)) => (first.time, last.time.max(first.time)),
            _ => (0, 0),
        };
        let length_ns = (last - first).div_ceil(THROUGHPUT_BINS).max(1);
        let mut throughput: Vec<ThroughputBin> = Vec::new();
        for (index, entry) in log.entries.iter().enumerate() {
            if let Some(cause) = ObservedCause::of(entry) {
                let count = causes.entry(cause.code.clone()).or_insert_with(|| CauseCount {
                    code: cause.code,
                    known: 0,
                    inferred: 0,
                    ambiguous: 0,
                });
                match cause.certainty {
                    Certainty::Known => count.known += 1,
                    Certainty::Inferred => count.inferred += 1,
                    Certainty::Ambiguous => count.ambiguous += 1,
                }
            }
            connections.count(index);
            let LogEvent::PacketSent { packet, .. } = &entry.event else { continue };
            let payload = u64::from(packet.payload);
            let host = &mut hosts[log.entry_hosts[index]];
            (host.packets, host.payload) = (host.packets + 1, host.payload + payload);
            let bin = ((entry.time - first.min(entry.time)) / length_ns) as usize;
            while throughput.len() <= bin {
                let time_ns = first + throughput.len() as u64 * length_ns;
                throughput.push(ThroughputBin { time_ns, length_ns, packets: 0, payload: 0 });
            }
            throughput[bin].packets += 1;
            throughput[bin].payload += payload;
        }
        let sent: Vec<&WorkRequest> = log.work_requests.iter().filter(|work| work.psns.is_some()).collect();
        for work in &sent {
            connections.count_message(work);
        }
        let took = |work: &WorkRequest| {
            Some((log.time_of(work.completed?) - log.time_of(work.started?), work.completed?))
        };
        let mut slowest: Vec<SlowRequest> = sent
            .iter()
            .filter_map(|work| {
                let (took_ns, entry) = took(work)?;
                Some(SlowRequest {
                    request: work.title(),
                    queue_pair: log.name(work.queue_pair),
                    took_ns,
                    entry,
                })
            })
            .collect();
        slowest.sort_by_key(|slow| std::cmp::Reverse(slow.took_ns));
        slowest.truncate(MAX_SLOWEST);
        let size = |work: &WorkRequest| match work.started.map(|started| &log.entries[started].event) {
            Some(LogEvent::WqeFetched { bytes, .. }) => u64::from(*bytes),
            _ => 0,
        };
        let mut by_operation: BTreeMap<&str, Vec<&WorkRequest>> = BTreeMap::new();
        for work in &sent {
            by_operation.entry(&work.operation).or_default().push(work);
        }
        let operations = by_operation.into_iter().map(|(operation, works)| {
            let mut latencies: Vec<u64> =
                works.iter().filter_map(|work| took(work)).map(|(ns, _)| ns).collect();
            latencies.sort_unstable();
            OperationSummary {
                operation: operation.into(),
                messages: works.len() as u64,
                bytes: works.iter().map(|work| size(work)).sum(),
                min_ns: latencies.first().copied().unwrap_or(0),
                median_ns: percentile(&latencies, 50),
                p99_ns: percentile(&latencies, 99),
                max_ns: latencies.last().copied().unwrap_or(0),
                sizes: histogram(works.iter().map(|work| size(work))),
                latencies: histogram(latencies.iter().copied()),
            }
        });
        Summary {
            source: if log.is_capture { "capture" } else { "log" },
            duration_ns: last - first,
            packets: hosts.iter().map(|host| host.packets).sum(),
            messages: sent.len() as u64,
            bytes: sent.iter().map(|work| size(work)).sum(),
            operations: operations.collect(),
            hosts,
            connections: connections.connections,
            causes: causes.into_values().collect(),
            slowest,
            throughput,
        }
    }

    /// The statistics as comma-separated values: a row for each number, `table,name,key,value`.
    pub fn csv(&self) -> String {
        let mut text = String::from("table,name,key,value\n");
        let mut row = |table: &str, name: &str, key: &dyn fmt::Display, value: u64| {
            let name = if name.contains([',', '"']) {
                format!("\"{}\"", name.replace('"', "\"\""))
            } else {
                name.into()
            };
            let _ = writeln!(text, "{table},{name},{key},{value}");
        };
        for (key, value) in [
            ("duration_ns", self.duration_ns),
            ("packets", self.packets),
            ("messages", self.messages),
            ("bytes", self.bytes),
        ] {
            row("total", "", &key, value);
        }
        for HostSummary { name, packets, payload } in &self.hosts {
            row("host", name, &"packets", *packets);
            row("host", name, &"payload", *payload);
        }
        for connection in &self.connections {
            for (key, value) in connection.numbers() {
                row("connection", &connection.name, &key, value);
            }
        }
        for cause in &self.causes {
            for (key, value) in
                [("known", cause.known), ("inferred", cause.inferred), ("ambiguous", cause.ambiguous)]
            {
                row("cause", &cause.code, &key, value);
            }
        }
        for operation in &self.operations {
            let name = &operation.operation;
            for (key, value) in [
                ("messages", operation.messages),
                ("bytes", operation.bytes),
                ("min_ns", operation.min_ns),
                ("median_ns", operation.median_ns),
                ("p99_ns", operation.p99_ns),
                ("max_ns", operation.max_ns),
            ] {
                row("operation", name, &key, value);
            }
            for Bucket { from, count } in &operation.sizes {
                row("size", name, from, *count);
            }
            for Bucket { from, count } in &operation.latencies {
                row("latency_ns", name, from, *count);
            }
        }
        for bin in &self.throughput {
            row("throughput", &bin.length_ns.to_string(), &bin.time_ns, bin.payload);
        }
        for slow in &self.slowest {
            row("slowest", &format!("{} of {}", slow.request, slow.queue_pair), &slow.entry, slow.took_ns);
        }
        text
    }
}

impl ConnectionSummary {
    fn numbers(&self) -> [(&'static str, u64); 9] {
        [
            ("packets", self.packets),
            ("payload", self.payload),
            ("messages", self.messages),
            ("failed", self.failed),
            ("retransmissions", self.retransmissions),
            ("lost", self.lost),
            ("not_captured", self.not_captured),
            ("naks", self.naks),
            ("cnps", self.cnps),
        ]
    }
}

/// Counts what concerns connections.
struct ConnectionCounter<'a> {
    log: &'a ParsedLog,
    numbers: BTreeMap<QueuePairId, usize>,
    connections: Vec<ConnectionSummary>,
}

impl ConnectionCounter<'_> {
    fn of(&mut self, end: QueuePairId) -> &mut ConnectionSummary {
        let number = *self.numbers.entry(end).or_insert_with(|| {
            let name = format!("{} - {}", self.log.name(end), self.log.peer_name(end));
            self.connections.push(ConnectionSummary { name, ..ConnectionSummary::default() });
            self.connections.len() - 1
        });
        &mut self.connections[number]
    }

    fn connection(&mut self, end: QueuePairId) -> &mut ConnectionSummary {
        if !self.numbers.contains_key(&end)
            && let Some(peer) = self.log.peer(end)
            && let Some(number) = self.numbers.get(&peer).copied()
        {
            self.numbers.insert(end, number);
        }
        self.of(end)
    }

    fn count(&mut self, index: usize) {
        let entry = &self.log.entries[index];
        let host = self.log.entry_hosts[index];
        match &entry.event {
            LogEvent::PacketSent { qp, packet, retransmission, .. } => {
                let connection = self.connection(QueuePairId { host, qp: *qp });
                connection.packets += 1;
                connection.payload += u64::from(packet.payload);
                connection.retransmissions += u64::from(*retransmission);
                connection.naks +=
                    u64::from(packet.syndrome.as_deref().is_some_and(|syndrome| syndrome != "ack"));
                connection.cnps += u64::from(packet.opcode.ends_with("CNP"));
                if connection.service.is_empty() {
                    connection.service = packet.opcode.split(' ').next().unwrap_or_default().into();
                }
            }
            LogEvent::Fault { effect, dest_qp, psn, .. } => {
                let sender = self.log.queue_pairs.iter().copied().find(|end| {
                    end.host == host
                        && match dest_qp {
                            Some(dest_qp) => {
                                self.log.peer_address(*end).is_some_and(|(_, qp)| qp == *dest_qp)
                            }
                            None => psn.is_some() && self.numbers.contains_key(end),
                        }
                });
                let Some(sender) = sender else { return };
                match effect {
                    crate::log::EffectData::Dropped { .. } | crate::log::EffectData::LinkTakenDown { .. } => {
                        self.connection(sender).lost += 1;
                    }
                    crate::log::EffectData::NotCaptured { packets } => {
                        self.connection(sender).not_captured += u64::from(*packets);
                    }
                    _ => {}
                }
            }
            _ => {}
        }
    }

    fn count_message(&mut self, work: &WorkRequest) {
        let connection = self.connection(work.queue_pair);
        connection.messages += 1;
        connection.failed += u64::from(work.failed() && work.status.as_deref() != Some("WR_FLUSH_ERR"));
    }
}

/// Bytes in the largest unit that leaves them readable.
fn bytes_text(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
        _ => format!("{:.1} GiB", bytes as f64 / 1_073_741_824.0),
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} hosts, {} connections, {} messages, {}, {} packets in {}",
            self.hosts.len(),
            self.connections.len(),
            self.messages,
            bytes_text(self.bytes),
            self.packets,
            duration(self.duration_ns)
        )?;
        writeln!(f, "\nConnections")?;
        for connection in &self.connections {
            write!(
                f,
                "  {}: {}, {} packets, {}",
                connection.name,
                connection.service,
                connection.packets,
                bytes_text(connection.payload)
            )?;
            for (key, value) in &connection.numbers()[2..] {
                if *value > 0 {
                    write!(f, ", {value} {}", key.replace('_', " "))?;
                }
            }
            writeln!(f)?;
        }
        if !self.causes.is_empty() {
            writeln!(f, "\nTrouble")?;
            for cause in &self.causes {
                write!(f, "  {}:", cause.code)?;
                let counts =
                    [(cause.known, "known"), (cause.inferred, "inferred"), (cause.ambiguous, "ambiguous")];
                let words: Vec<String> = counts
                    .iter()
                    .filter(|(count, _)| *count > 0)
                    .map(|(count, name)| format!(" {count} {name}"))
                    .collect();
                writeln!(f, "{}", words.join(","))?;
            }
        }
        if !self.operations.is_empty() {
            writeln!(f, "\nOperations")?;
            for operation in &self.operations {
                writeln!(
                    f,
                    "  {}: {} messages, {}, latency {} min, {} median, {} p99, {} max",
                    operation.operation,
                    operation.messages,
                    bytes_text(operation.bytes),
                    duration(operation.min_ns),
                    duration(operation.median_ns),
                    duration(operation.p99_ns),
                    duration(operation.max_ns)
                )?;
            }
        }
        if !self.slowest.is_empty() {
            writeln!(f, "\nSlowest")?;
            for slow in self.slowest.iter().take(5) {
                writeln!(f, "  {} of {}: {}", slow.request, slow.queue_pair, duration(slow.took_ns))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_has_a_bucket_for_each_power_of_two() {
        let buckets = histogram([0, 1, 2, 3, 1024, 2047].into_iter());
        let expected = [(0, 1), (1, 1), (2, 2), (1024, 2)].map(|(from, count)| Bucket { from, count });
        assert_eq!(buckets, expected);
    }
}
