//! What an event log says about a run, to judge statements about captures of it.

use softhca_trace::log::{CompletionData, EffectData, Entry, Header, LogEvent, VantagePoint};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Where a capture was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// At a host, or between hosts at a switch: its name.
    Node(String),
    /// Where each packet was sent: at every host.
    Senders,
}

/// A queue pair: the name of its host, its address, and the number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    pub host: String,
    pub address: String,
    pub qp: u32,
}

/// The requests of one queue pair to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    pub requester: End,
    pub responder: End,
}

impl Connection {
    /// Every reliable connection of a log on which packets were sent, in both directions.
    pub fn all(header: &Header, log: &[Entry]) -> Vec<Connection> {
        let mut ends = BTreeSet::new();
        for entry in log {
            if let LogEvent::PacketSent { qp, packet, .. } = &entry.event
                && packet.opcode.starts_with("RC ")
            {
                ends.insert((entry.host.clone(), *qp, packet.peer, packet.dest_qp));
            }
        }
        let mut found = Vec::new();
        for (host, qp, peer, dest_qp) in ends {
            let own = header.vantage_points.iter().find(|point| point.host == host);
            let other = header.vantage_points.iter().find(|point| point.address == peer);
            let (Some(own), Some(other)) = (own, other) else { continue };
            let end = |point: &VantagePoint, qp| End {
                host: point.host.clone(),
                address: point.address.to_string(),
                qp,
            };
            let [one, two] = [end(own, qp), end(other, dest_qp)];
            for (requester, responder) in [(one.clone(), two.clone()), (two, one)] {
                let connection = Connection { requester, responder };
                if !found.contains(&connection) {
                    found.push(connection);
                }
            }
        }
        found
    }
}

/// The effect of a fault on a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Harm {
    Lost,
    Damaged,
    Late,
    Copied,
}

/// A packet that a fault changed.
#[derive(Clone, Debug)]
pub struct HarmedPacket {
    pub is_response: bool,
    pub psn: u32,
    pub harm: Harm,
    /// The host or switch that sent it on the link with the fault, and the hosts at the ends of its way.
    pub node: String,
    pub sender: String,
    pub receiver: String,
    pub time: u64,
    /// Lost in a queue of a switch, which it did not leave.
    pub is_in_switch: bool,
}

impl HarmedPacket {
    /// Whether the packet had passed the place of the capture before; none if the log does not say.
    pub fn is_behind(&self, place: &Place) -> Option<bool> {
        let Place::Node(node) = place else { return Some(true) };
        match () {
            () if *node == self.receiver || self.is_in_switch && *node == self.node => Some(false),
            () if *node == self.sender || *node == self.node => Some(true),
            () if self.node == self.sender => Some(false),
            () => None,
        }
    }
}

/// A request that the requester sent.
#[derive(Debug)]
pub struct SentRequest {
    pub psn: u32,
    pub time: u64,
    pub is_retransmission: bool,
    pub cause: String,
}

/// A work request of the requester.
#[derive(Debug)]
pub struct Work {
    pub first_psn: u32,
    pub packets: u32,
    pub end: Option<(u64, String)>,
    wr_id: u64,
}

impl Work {
    pub fn has(&self, psn: u32) -> bool {
        (psn.wrapping_sub(self.first_psn) & 0xff_ffff) < self.packets
    }
}

/// The truth about the requests of one queue pair to another.
#[derive(Debug)]
pub struct Truth {
    pub connection: Connection,
    pub harmed: Vec<HarmedPacket>,
    pub requests: Vec<SentRequest>,
    pub works: Vec<Work>,
    /// PSN and time of each expiry of the ACK timer.
    pub timeouts: Vec<(u32, u64)>,
    pub rnr_waits: Vec<(u32, u64)>,
    pub duplicates: Vec<u32>,
    /// Faults of the program held completions back.
    pub holds_completions: bool,
    /// The longest time that a packet, and a request, was under way.
    pub flight_ns: u64,
    pub request_flight_ns: u64,
    /// When packets were sent last: whether they are answers, and their PSN.
    last_sent: BTreeMap<(bool, u32), u64>,
}

fn is_response(opcode: &str) -> bool {
    ["RESPONSE", "ACKNOWLEDGE"].iter().any(|word| opcode.contains(word))
}

/// Longer than a packet takes from end to end without a fault.
const MIN_FLIGHT_NS: u64 = 20_000;

impl Truth {
    pub fn new(connection: Connection, log: &[Entry]) -> Truth {
        let mut truth = Truth {
            connection,
            harmed: Vec::new(),
            requests: Vec::new(),
            works: Vec::new(),
            timeouts: Vec::new(),
            rnr_waits: Vec::new(),
            duplicates: Vec::new(),
            flight_ns: MIN_FLIGHT_NS,
            request_flight_ns: MIN_FLIGHT_NS,
            holds_completions: false,
            last_sent: BTreeMap::new(),
        };
        log.iter().for_each(|entry| truth.add(entry));
        truth
    }

    fn end(&mut self, wr_id: u64, time: u64, status: &str) {
        let open = self.works.iter_mut().find(|work| work.wr_id == wr_id && work.end.is_none());
        open.into_iter().for_each(|work| work.end = Some((time, status.to_owned())));
    }

    fn harm(&mut self, entry: &Entry, dest_qp: Option<u32>, is_response: bool, psn: u32, harm: Harm) {
        let Connection { requester, responder } = &self.connection;
        let (from, to) = if is_response { (responder, requester) } else { (requester, responder) };
        // A log names the flow of a faulty packet and not its queue pair, and PSNs of flows may be equal.
        if dest_qp.is_some_and(|qp| qp != to.qp) || !self.last_sent.contains_key(&(is_response, psn)) {
            return;
        }
        let (node, sender, receiver) = (entry.host.clone(), from.host.clone(), to.host.clone());
        let is_in_switch = matches!(entry.event, LogEvent::FrameDropped { .. });
        let time = entry.time;
        self.harmed.push(HarmedPacket { is_response, psn, harm, node, sender, receiver, time, is_in_switch });
    }

    fn add(&mut self, entry: &Entry) {
        let time = entry.time;
        let is_of = |end: &End| entry.host == end.host && entry.event.queue_pair() == Some(end.qp);
        let (is_requester, is_responder) =
            (is_of(&self.connection.requester), is_of(&self.connection.responder));
        match &entry.event {
            LogEvent::Fault { effect, opcode: Some(opcode), psn: Some(psn), dest_qp, .. } => {
                let harm = match effect {
                    EffectData::Dropped { .. } | EffectData::LinkTakenDown { .. } => Harm::Lost,
                    EffectData::Corrupted { .. } => Harm::Damaged,
                    EffectData::Delayed { .. } | EffectData::Reordered { .. } => Harm::Late,
                    EffectData::Duplicated { .. } => Harm::Copied,
                    _ => return,
                };
                self.harm(entry, *dest_qp, is_response(opcode), *psn, harm);
            }
            LogEvent::FrameDropped { packet, .. } => {
                let is_response = packet.source.to_string() == self.connection.responder.address;
                packet.psn.into_iter().for_each(|psn| {
                    self.harm(entry, packet.dest_qp, is_response, psn, Harm::Lost);
                });
            }
            LogEvent::PacketSent { packet, retransmission, cause, .. } if is_requester || is_responder => {
                let is_response = is_response(&packet.opcode);
                if is_requester != is_response {
                    self.last_sent.insert((is_response, packet.psn), time);
                }
                if is_requester && !is_response {
                    self.requests.push(SentRequest {
                        psn: packet.psn,
                        time,
                        is_retransmission: *retransmission,
                        cause: cause.to_string(),
                    });
                }
            }
            LogEvent::PacketReceived { packet, .. } if is_requester || is_responder => {
                let is_response = is_response(&packet.opcode);
                let sent =
                    self.last_sent.get(&(is_response, packet.psn)).filter(|_| is_requester == is_response);
                let flight_ns = sent.map_or(0, |sent| time - sent);
                self.flight_ns = self.flight_ns.max(flight_ns);
                if is_responder {
                    self.request_flight_ns = self.request_flight_ns.max(flight_ns);
                }
            }
            LogEvent::WqeFetched { wr_id, first_psn, packets, .. } if is_requester => {
                let (first_psn, packets, wr_id) = (*first_psn, *packets, *wr_id);
                self.works.push(Work { first_psn, packets, end: None, wr_id });
            }
            LogEvent::Completed { completion: CompletionData { wr_id, status, operation, .. }, .. }
                if is_requester && !operation.starts_with("receive") =>
            {
                self.end(*wr_id, time, status);
            }
            LogEvent::UnsignaledCompleted { wr_id, .. } if is_requester => self.end(*wr_id, time, "SUCCESS"),
            LogEvent::AckTimedOut { oldest_psn, .. } if is_requester => {
                self.timeouts.push((*oldest_psn, time))
            }
            LogEvent::RnrWaitStarted { psn, .. } if is_requester => self.rnr_waits.push((*psn, time)),
            LogEvent::DuplicateRequestHandled { psn, .. } if is_responder => self.duplicates.push(*psn),
            LogEvent::FaultInjected { point, .. } => self.holds_completions |= point == "completion",
            _ => {}
        }
    }

    /// Packets with this PSN that one of these faults hit.
    pub fn harmed(&self, is_response: bool, psn: u32) -> impl Iterator<Item = &HarmedPacket> {
        self.harmed.iter().filter(move |packet| packet.is_response == is_response && packet.psn == psn)
    }

    /// The story, for a message of a failed test.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for harmed in &self.harmed {
            let _ = writeln!(text, "  {harmed:?}");
        }
        for (psn, time) in &self.timeouts {
            let _ = writeln!(text, "  timeout of {psn} at {time}");
        }
        for request in self.requests.iter().filter(|request| request.is_retransmission) {
            let _ = writeln!(text, "  {request:?}");
        }
        for work in &self.works {
            let _ = writeln!(text, "  {work:?}");
        }
        text
    }
}
