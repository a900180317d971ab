//! An event log that was read whole: the names in it, and the outcome of each work request.
//!
//! Explanations and lints ask it; it draws no conclusions of its own.

use crate::log::{CompletionData, ConfigurationData, Entry, Header, LogEvent};
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

#[derive(Clone, Debug)]
pub(crate) struct WorkRequest {
    pub queue_pair: QueuePairId,
    pub wr_id: u64,
    pub operation: String,
    /// First PSN and number of PSNs; none for receives and local operations.
    pub psns: Option<(u32, u32)>,
    /// The entry at which it starts; none for a receive, whose first entry is its completion.
    pub started: Option<usize>,
    /// Index of the entry that ends it.
    pub completed: Option<usize>,
    /// How it ended: the status of its completion, or none if none was asked for.
    pub status: Option<String>,
    /// The call that posted it.
    pub call_site: Option<String>,
}

impl WorkRequest {
    /// Its name: `WRITE 7`.
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
        self.status.as_deref().is_some_and(|status| status != "SUCCESS")
    }
}

/// The names in a log.
#[derive(Debug, Default)]
pub(crate) struct QueuePairTable {
    pub hosts: Vec<(String, Option<IpAddr>)>,
    pub queue_pairs: Vec<QueuePairId>,
    attributes: BTreeMap<QueuePairId, ConfigurationData>,
    peers: BTreeMap<QueuePairId, (IpAddr, u32)>,
    first_psns: BTreeMap<QueuePairId, u32>,
    /// The entries are inferred from a capture.
    pub is_capture: bool,
    /// The packets that the snap length of the capture cut.
    pub cut_packets: u64,
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

/// Names and peers of the queue pairs in the log.
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
        let id_of = |qp: u32| QueuePairId { host, qp };
        match &entry.event {
            LogEvent::WqeFetched { qp, wr_id, operation, first_psn, packets, call_site, .. } => {
                self.outstanding.entry(id_of(*qp)).or_default().push(self.work_requests.len());
                self.work_requests.push(WorkRequest {
                    queue_pair: id_of(*qp),
                    wr_id: *wr_id,
                    operation: operation.to_string(),
                    psns: (*packets > 0).then_some((*first_psn, *packets)),
                    started: Some(index),
                    completed: None,
                    status: None,
                    call_site: call_site.clone(),
                });
            }
            LogEvent::Completed { completion, .. } => {
                let CompletionData { qp, wr_id, operation, status, .. } = completion;
                self.complete(id_of(*qp), *wr_id, operation, index, Some(status.to_string()));
            }
            LogEvent::UnsignaledCompleted { qp, wr_id } => {
                self.complete(id_of(*qp), *wr_id, "send", index, None)
            }
            _ => {}
        }
        self.entry_hosts.push(host);
        self.entries.push(entry);
    }

    fn complete(
        &mut self,
        queue_pair: QueuePairId,
        wr_id: u64,
        operation: &str,
        index: usize,
        status: Option<String>,
    ) {
        let open = self.outstanding.entry(queue_pair).or_default();
        let receives = operation.starts_with("receive");
        let found = open.iter().position(|work| self.work_requests[*work].wr_id == wr_id && !receives);
        if let Some(found) = found {
            let work = &mut self.work_requests[open.remove(found)];
            (work.completed, work.status) = (Some(index), status);
            return;
        }
        // A receive, or a request that was flushed before it was started.
        self.work_requests.push(WorkRequest {
            queue_pair,
            wr_id,
            operation: operation.to_owned(),
            psns: None,
            started: None,
            completed: Some(index),
            status,
            call_site: None,
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
        let is_capture = header.source.as_deref() == Some("capture");
        let cut_packets = header.cut_packets;
        QueuePairTable { hosts: hosts.collect(), is_capture, cut_packets, ..QueuePairTable::default() }
    }

    fn host_index(&mut self, name: &str) -> usize {
        if let Some(index) = self.hosts.iter().position(|(host, _)| host == name) {
            return index;
        }
        // Embedded devices join a log at any time, by their addresses.
        self.hosts.push((name.to_owned(), name.parse().ok()));
        self.hosts.len() - 1
    }

    fn insert(&mut self, id: QueuePairId) {
        // Queue pair 1 is the connection manager's, and is not counted among those of programs.
        // A capture may not show the number of a sender.
        if (id.qp > 1 || (self.is_capture && id.qp == 0)) && !self.queue_pairs.contains(&id) {
            self.queue_pairs.push(id);
        }
    }

    /// Records the queue pair of an entry. Returns the host.
    pub fn observe(&mut self, entry: &Entry) -> usize {
        let host = self.host_index(&entry.host);
        // A packet that was dropped may name a queue pair that does not exist.
        let Some(qp) =
            entry.event.queue_pair().filter(|_| !matches!(entry.event, LogEvent::PacketDropped { .. }))
        else {
            return host;
        };
        let id = QueuePairId { host, qp };
        self.insert(id);
        match &entry.event {
            LogEvent::QpConfigured { configuration, .. } => {
                self.first_psns.insert(id, configuration.sq_psn);
                if let Some(peer) = configuration.peer.zip(configuration.dest_qp) {
                    self.peers.insert(id, peer);
                }
                self.attributes.insert(id, configuration.clone());
            }
            LogEvent::WqeFetched { first_psn, .. } => {
                self.first_psns.entry(id).or_insert(*first_psn);
            }
            LogEvent::PacketSent { packet, .. } => {
                self.peers.entry(id).or_insert((packet.peer, packet.dest_qp));
            }
            _ => {}
        }
        host
    }

    pub fn contains(&self, id: QueuePairId) -> bool {
        self.queue_pairs.contains(&id)
    }

    pub fn attributes(&self, id: QueuePairId) -> Option<&ConfigurationData> {
        self.attributes.get(&id)
    }

    /// The name of a queue pair: its host's name, and its number among the queue pairs of that host in the order of
    /// their first entries.
    pub fn name(&self, id: QueuePairId) -> String {
        match id.qp {
            0 if self.is_capture => return self.hosts[id.host].0.clone(),
            qp if self.is_capture => return format!("{} qp {qp:#x}", self.hosts[id.host].0),
            _ => {}
        }
        let same = self.queue_pairs.iter().filter(|other| other.host == id.host);
        let number = same.take_while(|other| **other != id).count() + 1;
        format!("{}.{number}", self.hosts[id.host].0)
    }

    pub fn host_name(&self, host: usize) -> &str {
        &self.hosts[host].0
    }

    pub fn host_at(&self, address: IpAddr) -> Option<usize> {
        self.hosts.iter().position(|(_, known)| *known == Some(address))
    }

    /// The queue pair with this name (`alice.1`) or number, decimal or with `0x`.
    pub fn find(&self, text: &str) -> Vec<QueuePairId> {
        let number = match text.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16).ok(),
            None => text.parse().ok(),
        };
        let is_it = |id: &&QueuePairId| Some(id.qp) == number || self.name(**id) == text;
        self.queue_pairs.iter().filter(is_it).copied().collect()
    }

    /// The first PSN of a requester and the PSN that its peer expects first, if they differ.
    pub fn psn_mismatch(&self, id: QueuePairId) -> Option<(u32, u32)> {
        let (own, other) = (self.attributes(id)?, self.attributes(self.peer(id)?)?);
        let is_connected = other.dest_qp == Some(id.qp) && other.qp_type != "ud";
        (is_connected && own.sq_psn != other.rq_psn).then_some((own.sq_psn, other.rq_psn))
    }

    /// The address and number at the other end of a connection.
    pub fn peer_address(&self, id: QueuePairId) -> Option<(IpAddr, u32)> {
        self.peers.get(&id).copied()
    }

    /// The peer of a queue pair, if its card reports events.
    pub fn peer(&self, id: QueuePairId) -> Option<QueuePairId> {
        let (address, qp) = self.peer_address(id)?;
        let host = self.hosts.iter().position(|(_, known)| *known == Some(address))?;
        let peer = QueuePairId { host, qp };
        self.queue_pairs.contains(&peer).then_some(peer)
    }

    /// The name of the other end.
    pub fn peer_name(&self, id: QueuePairId) -> String {
        match (self.peer(id), self.peer_address(id)) {
            (Some(peer), _) => self.name(peer),
            (None, Some((address, qp))) if self.is_capture => format!("{address} qp {qp:#x}"),
            (None, Some((address, qp))) => format!("queue pair {qp:#x} at {address}"),
            (None, None) => "its peer".into(),
        }
    }

    /// A PSN of the requests of `id`: `+1 (PSN 5001)`.
    pub fn psn(&self, id: QueuePairId, psn: u32) -> String {
        match self.first_psns.get(&id) {
            Some(zero) => format!("{:+} (PSN {psn})", Psn::new(psn).distance(Psn::new(*zero))),
            None => format!("PSN {psn}"),
        }
    }
}
