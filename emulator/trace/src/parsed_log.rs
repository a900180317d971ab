//! An event log that was read whole: who is who in it, and which work request ended how.
//!
//! Explanations and lints ask it; it draws no conclusions of its own.

use crate::log::{CompletionQueueData, Entry, Header, LogEvent};
use softhca_wire::Psn;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::{Deref, Range};

/// A queue pair: the host by its index, and the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueuePairId {
    pub host: usize,
    pub qp: u32,
}

/// What a queue pair was told.
#[derive(Clone, Debug)]
pub(crate) struct QpAttributes {
    pub qp_type: String,
    pub recovery: String,
    pub peer: Option<(IpAddr, u32)>,
    pub path_mtu: u32,
    pub psns: [u32; 2],
    pub timeout: u8,
    pub ack_timeout: Option<u64>,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub rd_atomic: [u8; 2],
    pub max_wr: [u32; 2],
    pub completion_queues: [Option<CompletionQueueData>; 2],
}

/// A work request.
#[derive(Clone, Debug)]
pub(crate) struct WorkRequest {
    pub queue_pair: QueuePairId,
    pub wr_id: u64,
    pub operation: String,
    /// First PSN and number of PSNs; none for receives and local operations.
    pub psns: Option<(u32, u32)>,
    /// Where in the log it starts; none for a receive, which is first heard of when it completes.
    pub started: Option<usize>,
    /// Where in the log it ends.
    pub completed: Option<usize>,
    /// How it ended: the status of its completion, or none if nobody wanted one.
    pub status: Option<String>,
}

impl WorkRequest {
    /// What to call it: `WRITE 7`.
    pub fn title(&self) -> String {
        format!("{} {}", self.operation.to_uppercase().replace('-', " "), self.wr_id)
    }

    pub fn is_receive(&self) -> bool {
        self.operation.starts_with("receive")
    }

    pub fn has_psn(&self, psn: u32) -> bool {
        self.psns.is_some_and(|(first, count)| Psn::new(psn).is_within(Psn::new(first), count))
    }

    pub fn failed(&self) -> bool {
        self.status.as_deref().is_some_and(|status| status != "success")
    }
}

/// Who is who in a log.
#[derive(Debug, Default)]
pub(crate) struct QueuePairTable {
    pub hosts: Vec<(String, Option<IpAddr>)>,
    pub queue_pairs: Vec<QueuePairId>,
    attributes: BTreeMap<QueuePairId, QpAttributes>,
    peers: BTreeMap<QueuePairId, (IpAddr, u32)>,
    first_psns: BTreeMap<QueuePairId, u32>,
}

/// A log, read whole.
#[derive(Debug, Default)]
pub(crate) struct ParsedLog {
    queue_pair_table: QueuePairTable,
    pub entries: Vec<Entry>,
    /// The host of each entry, by its index.
    pub entry_hosts: Vec<usize>,
    pub work_requests: Vec<WorkRequest>,
    /// The work requests under way, by queue pair, oldest first.
    outstanding: BTreeMap<QueuePairId, Vec<usize>>,
}

/// An account knows who is who in it.
impl Deref for ParsedLog {
    type Target = QueuePairTable;

    fn deref(&self) -> &QueuePairTable {
        &self.queue_pair_table
    }
}

impl ParsedLog {
    pub fn new(header: &Header) -> ParsedLog {
        ParsedLog { queue_pair_table: QueuePairTable::new(header), ..ParsedLog::default() }
    }

    /// Takes the next entry of the log.
    pub fn push(&mut self, entry: Entry) {
        let index = self.entries.len();
        let host = self.queue_pair_table.observe(&entry);
        let place = |qp: u32| QueuePairId { host, qp };
        match &entry.event {
            LogEvent::WqeFetched { qp, wr_id: id, operation, first_psn, packets, .. } => {
                self.outstanding.entry(place(*qp)).or_default().push(self.work_requests.len());
                self.work_requests.push(WorkRequest {
                    queue_pair: place(*qp),
                    wr_id: *id,
                    operation: operation.to_string(),
                    psns: (*packets > 0).then_some((*first_psn, *packets)),
                    started: Some(index),
                    completed: None,
                    status: None,
                });
            }
            LogEvent::WorkCompleted { qp, wr_id: id, operation, status, .. } => {
                self.complete(place(*qp), *id, operation, index, Some(status.to_string()));
            }
            LogEvent::UnsignaledCompleted { qp, wr_id: id } => {
                self.complete(place(*qp), *id, "send", index, None)
            }
            _ => {}
        }
        self.entry_hosts.push(host);
        self.entries.push(entry);
    }

    fn complete(
        &mut self,
        place: QueuePairId,
        id: u64,
        operation: &str,
        index: usize,
        status: Option<String>,
    ) {
        let open = self.outstanding.entry(place).or_default();
        let receives = operation.starts_with("receive");
        let found = open.iter().position(|work| self.work_requests[*work].wr_id == id && !receives);
        if let Some(found) = found {
            let work = &mut self.work_requests[open.remove(found)];
            (work.completed, work.status) = (Some(index), status);
            return;
        }
        // A receive, or a request that was flushed before it was started.
        self.work_requests.push(WorkRequest {
            queue_pair: place,
            wr_id: id,
            operation: operation.to_owned(),
            psns: None,
            started: None,
            completed: Some(index),
            status,
        });
    }

    pub fn time_of(&self, index: usize) -> u64 {
        self.entries[index].time
    }

    /// The span of a work request in the log: from its start to its end, or to the end of the log.
    pub fn span(&self, work: &WorkRequest) -> Range<usize> {
        let end = work.completed.map_or(self.entries.len(), |end| end + 1);
        work.started.unwrap_or_else(|| end.saturating_sub(1))..end
    }
}

impl QueuePairTable {
    pub fn new(header: &Header) -> QueuePairTable {
        let hosts = header.vantage_points.iter().map(|point| (point.host.clone(), Some(point.address)));
        QueuePairTable { hosts: hosts.collect(), ..QueuePairTable::default() }
    }

    fn host_index(&mut self, name: &str) -> usize {
        if let Some(index) = self.hosts.iter().position(|(host, _)| host == name) {
            return index;
        }
        self.hosts.push((name.to_owned(), None));
        self.hosts.len() - 1
    }

    fn insert(&mut self, place: QueuePairId) {
        // Queue pair 1 is the connection manager's, and is not counted among those of programs.
        if place.qp > 1 && !self.queue_pairs.contains(&place) {
            self.queue_pairs.push(place);
        }
    }

    /// Takes note of whom an entry is about; tells the host.
    pub fn observe(&mut self, entry: &Entry) -> usize {
        let host = self.host_index(&entry.host);
        // A packet that was dropped may name a queue pair that does not exist.
        let Some(qp) =
            entry.event.queue_pair().filter(|_| !matches!(entry.event, LogEvent::PacketDropped { .. }))
        else {
            return host;
        };
        let place = QueuePairId { host, qp };
        self.insert(place);
        match &entry.event {
            LogEvent::QpConfigured { .. } => {
                if let Some(profile) = profile(&entry.event) {
                    self.first_psns.insert(place, profile.psns[0]);
                    if let Some(peer) = profile.peer {
                        self.peers.insert(place, peer);
                    }
                    self.attributes.insert(place, profile);
                }
            }
            LogEvent::WqeFetched { first_psn, .. } => {
                self.first_psns.entry(place).or_insert(*first_psn);
            }
            LogEvent::PacketSent { packet, .. } => {
                self.peers.entry(place).or_insert((packet.peer, packet.dest_qp));
            }
            _ => {}
        }
        host
    }

    pub fn attributes(&self, place: QueuePairId) -> Option<&QpAttributes> {
        self.attributes.get(&place)
    }

    /// What to call a queue pair: its host's name and its number among the queue pairs of that host, in the
    /// order in which they are heard of.
    pub fn name(&self, place: QueuePairId) -> String {
        let same = self.queue_pairs.iter().filter(|other| other.host == place.host);
        let number = same.take_while(|other| **other != place).count() + 1;
        format!("{}.{number}", self.hosts[place.host].0)
    }

    pub fn host_name(&self, host: usize) -> &str {
        &self.hosts[host].0
    }

    /// The queue pair that somebody means: `alice.1`, or a number, decimal or with `0x`.
    pub fn find(&self, text: &str) -> Vec<QueuePairId> {
        let number = match text.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16).ok(),
            None => text.parse().ok(),
        };
        let is_it = |place: &&QueuePairId| Some(place.qp) == number || self.name(**place) == text;
        self.queue_pairs.iter().filter(is_it).copied().collect()
    }

    /// The address and number at the other end of a connection.
    pub fn peer_address(&self, place: QueuePairId) -> Option<(IpAddr, u32)> {
        self.peers.get(&place).copied()
    }

    /// The queue pair at the other end of a connection, if its card is heard.
    pub fn peer(&self, place: QueuePairId) -> Option<QueuePairId> {
        let (address, qp) = self.peer_address(place)?;
        let host = self.hosts.iter().position(|(_, known)| *known == Some(address))?;
        let peer = QueuePairId { host, qp };
        self.queue_pairs.contains(&peer).then_some(peer)
    }

    /// What to call the other end.
    pub fn peer_name(&self, place: QueuePairId) -> String {
        match (self.peer(place), self.peer_address(place)) {
            (Some(peer), _) => self.name(peer),
            (None, Some((address, qp))) => format!("queue pair {qp:#x} at {address}"),
            (None, None) => "its peer".into(),
        }
    }

    /// A PSN of the requests of `place`: `+1 (PSN 5001)`.
    pub fn psn(&self, place: QueuePairId, psn: u32) -> String {
        match self.first_psns.get(&place) {
            Some(zero) => format!("{:+} (PSN {psn})", Psn::new(psn).distance(Psn::new(*zero))),
            None => format!("PSN {psn}"),
        }
    }
}

fn profile(what: &LogEvent) -> Option<QpAttributes> {
    let LogEvent::QpConfigured {
        qp_type: kind,
        recovery,
        peer,
        dest_qp,
        path_mtu: mtu,
        sq_psn: first_psn,
        rq_psn: expected_psn,
        timeout,
        ack_timeout: patience,
        retry_cnt,
        rnr_retry,
        max_rd_atomic,
        max_dest_rd_atomic,
        max_send_wr: send_slots,
        max_recv_wr: receive_slots,
        send_cq,
        recv_cq: receive_cq,
        ..
    } = what
    else {
        return None;
    };
    Some(QpAttributes {
        qp_type: kind.to_string(),
        recovery: recovery.to_string(),
        peer: peer.zip(*dest_qp),
        path_mtu: *mtu,
        psns: [*first_psn, *expected_psn],
        timeout: *timeout,
        ack_timeout: *patience,
        retry_cnt: *retry_cnt,
        rnr_retry: *rnr_retry,
        rd_atomic: [*max_rd_atomic, *max_dest_rd_atomic],
        max_wr: [*send_slots, *receive_slots],
        completion_queues: [*send_cq, *receive_cq],
    })
}
