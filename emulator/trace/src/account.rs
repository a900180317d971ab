//! An event log that was read whole: who is who in it, and which work request ended how.
//!
//! Explanations and lints ask it; it draws no conclusions of its own.

use crate::log::{Entry, Header, QueueData, What};
use softhca_wire::Psn;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::{Deref, Range};

/// A queue pair: the host by its index, and the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub host: usize,
    pub qp: u32,
}

/// What a queue pair was told.
#[derive(Clone, Debug)]
pub(crate) struct Profile {
    pub kind: String,
    pub recovery: String,
    pub peer: Option<(IpAddr, u32)>,
    pub mtu: u32,
    pub psns: [u32; 2],
    pub timeout: u8,
    pub patience: Option<u64>,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub reads: [u8; 2],
    pub slots: [u32; 2],
    pub completion_queues: [Option<QueueData>; 2],
}

/// A work request.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    pub place: Place,
    pub id: u64,
    pub operation: String,
    /// First PSN and number of PSNs; none for receives and local operations.
    pub psns: Option<(u32, u32)>,
    /// Where in the log it starts; none for a receive, which is first heard of when it completes.
    pub started: Option<usize>,
    /// Where in the log it ends.
    pub ended: Option<usize>,
    /// How it ended: the status of its completion, or none if nobody wanted one.
    pub status: Option<String>,
}

impl Work {
    /// What to call it: `WRITE 7`.
    pub fn name(&self) -> String {
        format!("{} {}", self.operation.to_uppercase().replace('-', " "), self.id)
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
pub(crate) struct Roster {
    pub hosts: Vec<(String, Option<IpAddr>)>,
    pub places: Vec<Place>,
    profiles: BTreeMap<Place, Profile>,
    peers: BTreeMap<Place, (IpAddr, u32)>,
    zeros: BTreeMap<Place, u32>,
}

/// A log, read whole.
#[derive(Debug, Default)]
pub(crate) struct Account {
    roster: Roster,
    pub entries: Vec<Entry>,
    /// The host of each entry, by its index.
    pub at: Vec<usize>,
    pub works: Vec<Work>,
    /// The work requests under way, by queue pair, oldest first.
    open: BTreeMap<Place, Vec<usize>>,
}

/// An account knows who is who in it.
impl Deref for Account {
    type Target = Roster;

    fn deref(&self) -> &Roster {
        &self.roster
    }
}

impl Account {
    pub fn new(header: &Header) -> Account {
        Account { roster: Roster::new(header), ..Account::default() }
    }

    /// Takes the next entry of the log.
    pub fn push(&mut self, entry: Entry) {
        let index = self.entries.len();
        let host = self.roster.hear(&entry);
        let place = |qp: u32| Place { host, qp };
        match &entry.what {
            What::WorkStarted { qp, id, operation, first_psn, packets, .. } => {
                self.open.entry(place(*qp)).or_default().push(self.works.len());
                self.works.push(Work {
                    place: place(*qp),
                    id: *id,
                    operation: operation.to_string(),
                    psns: (*packets > 0).then_some((*first_psn, *packets)),
                    started: Some(index),
                    ended: None,
                    status: None,
                });
            }
            What::WorkCompleted { qp, id, operation, status, .. } => {
                self.end(place(*qp), *id, operation, index, Some(status.to_string()));
            }
            What::WorkRetired { qp, id } => self.end(place(*qp), *id, "send", index, None),
            _ => {}
        }
        self.at.push(host);
        self.entries.push(entry);
    }

    fn end(&mut self, place: Place, id: u64, operation: &str, index: usize, status: Option<String>) {
        let open = self.open.entry(place).or_default();
        let receives = operation.starts_with("receive");
        let found = open.iter().position(|work| self.works[*work].id == id && !receives);
        if let Some(found) = found {
            let work = &mut self.works[open.remove(found)];
            (work.ended, work.status) = (Some(index), status);
            return;
        }
        // A receive, or a request that was flushed before it was started.
        self.works.push(Work {
            place,
            id,
            operation: operation.to_owned(),
            psns: None,
            started: None,
            ended: Some(index),
            status,
        });
    }

    pub fn time(&self, index: usize) -> u64 {
        self.entries[index].time
    }

    /// The span of a work request in the log: from its start to its end, or to the end of the log.
    pub fn span(&self, work: &Work) -> Range<usize> {
        let end = work.ended.map_or(self.entries.len(), |end| end + 1);
        work.started.unwrap_or_else(|| end.saturating_sub(1))..end
    }
}

impl Roster {
    pub fn new(header: &Header) -> Roster {
        let hosts = header.vantage_points.iter().map(|point| (point.host.clone(), Some(point.address)));
        Roster { hosts: hosts.collect(), ..Roster::default() }
    }

    fn host(&mut self, name: &str) -> usize {
        if let Some(index) = self.hosts.iter().position(|(host, _)| host == name) {
            return index;
        }
        self.hosts.push((name.to_owned(), None));
        self.hosts.len() - 1
    }

    fn note(&mut self, place: Place) {
        // Queue pair 1 is the connection manager's, and is not counted among those of programs.
        if place.qp > 1 && !self.places.contains(&place) {
            self.places.push(place);
        }
    }

    /// Takes note of whom an entry is about; tells the host.
    pub fn hear(&mut self, entry: &Entry) -> usize {
        let host = self.host(&entry.host);
        // A packet that was dropped may name a queue pair that does not exist.
        let Some(qp) = entry.what.queue_pair().filter(|_| !matches!(entry.what, What::PacketDropped { .. }))
        else {
            return host;
        };
        let place = Place { host, qp };
        self.note(place);
        match &entry.what {
            What::Configured { .. } => {
                if let Some(profile) = profile(&entry.what) {
                    self.zeros.insert(place, profile.psns[0]);
                    if let Some(peer) = profile.peer {
                        self.peers.insert(place, peer);
                    }
                    self.profiles.insert(place, profile);
                }
            }
            What::WorkStarted { first_psn, .. } => {
                self.zeros.entry(place).or_insert(*first_psn);
            }
            What::PacketSent { packet, .. } => {
                self.peers.entry(place).or_insert((packet.peer, packet.dest_qp));
            }
            _ => {}
        }
        host
    }

    pub fn profile(&self, place: Place) -> Option<&Profile> {
        self.profiles.get(&place)
    }

    /// What to call a queue pair: its host's name and its number among the queue pairs of that host, in the
    /// order in which they are heard of.
    pub fn name(&self, place: Place) -> String {
        let same = self.places.iter().filter(|other| other.host == place.host);
        let number = same.take_while(|other| **other != place).count() + 1;
        format!("{}.{number}", self.hosts[place.host].0)
    }

    pub fn host_name(&self, host: usize) -> &str {
        &self.hosts[host].0
    }

    /// The queue pair that somebody means: `alice.1`, or a number, decimal or with `0x`.
    pub fn find(&self, text: &str) -> Vec<Place> {
        let number = match text.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16).ok(),
            None => text.parse().ok(),
        };
        let is_it = |place: &&Place| Some(place.qp) == number || self.name(**place) == text;
        self.places.iter().filter(is_it).copied().collect()
    }

    /// The address and number at the other end of a connection.
    pub fn peer_address(&self, place: Place) -> Option<(IpAddr, u32)> {
        self.peers.get(&place).copied()
    }

    /// The queue pair at the other end of a connection, if its card is heard.
    pub fn peer(&self, place: Place) -> Option<Place> {
        let (address, qp) = self.peer_address(place)?;
        let host = self.hosts.iter().position(|(_, known)| *known == Some(address))?;
        let peer = Place { host, qp };
        self.places.contains(&peer).then_some(peer)
    }

    /// What to call the other end.
    pub fn peer_name(&self, place: Place) -> String {
        match (self.peer(place), self.peer_address(place)) {
            (Some(peer), _) => self.name(peer),
            (None, Some((address, qp))) => format!("queue pair {qp:#x} at {address}"),
            (None, None) => "its peer".into(),
        }
    }

    /// A PSN of the requests of `place`: `+1 (PSN 5001)`.
    pub fn psn(&self, place: Place, psn: u32) -> String {
        match self.zeros.get(&place) {
            Some(zero) => format!("{:+} (PSN {psn})", Psn::new(psn).distance(Psn::new(*zero))),
            None => format!("PSN {psn}"),
        }
    }
}

fn profile(what: &What) -> Option<Profile> {
    let What::Configured {
        kind,
        recovery,
        peer,
        dest_qp,
        mtu,
        first_psn,
        expected_psn,
        timeout,
        patience,
        retry_cnt,
        rnr_retry,
        max_rd_atomic,
        max_dest_rd_atomic,
        send_slots,
        receive_slots,
        send_cq,
        receive_cq,
        ..
    } = what
    else {
        return None;
    };
    Some(Profile {
        kind: kind.to_string(),
        recovery: recovery.to_string(),
        peer: peer.zip(*dest_qp),
        mtu: *mtu,
        psns: [*first_psn, *expected_psn],
        timeout: *timeout,
        patience: *patience,
        retry_cnt: *retry_cnt,
        rnr_retry: *rnr_retry,
        reads: [*max_rd_atomic, *max_dest_rd_atomic],
        slots: [*send_slots, *receive_slots],
        completion_queues: [*send_cq, *receive_cq],
    })
}
