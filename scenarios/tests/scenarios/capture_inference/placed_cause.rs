//! The causes in an event log, each at its place, and which of them no capture can show.

use softhca_trace::log::{Certainty, Entry, Header, LogEvent, ObservedCause};
use std::collections::{BTreeMap, BTreeSet};

/// A cause, and the packet that it is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PlacedCause {
    /// The code of the cause.
    pub code: String,
    /// The address of the host that sent the packet.
    pub sender: String,
    /// The queue pair that the packet is for; 0 where the cause is about the sender itself.
    pub dest_qp: u32,
    pub psn: Option<u32>,
}

/// The addresses of the hosts of a log by their names.
pub struct Addresses(BTreeMap<String, String>);

impl Addresses {
    pub fn new(header: &Header) -> Addresses {
        let points = header.vantage_points.iter();
        Addresses(points.map(|point| (point.host.clone(), point.address.to_string())).collect())
    }

    fn of(&self, host: &str) -> String {
        self.0.get(host).cloned().unwrap_or_else(|| host.to_owned())
    }
}

/// The causes that are inferred from a capture, and how sure each is.
pub fn inferred_causes(addresses: &Addresses, entries: &[Entry]) -> BTreeMap<PlacedCause, Certainty> {
    let mut causes = BTreeMap::new();
    for entry in entries {
        let Some(cause) = ObservedCause::of(entry) else { continue };
        let dest_qp = match &entry.event {
            LogEvent::Fault { dest_qp, .. } => dest_qp.unwrap_or(0),
            event => dest_qp_of(event),
        };
        let sender = match &entry.event {
            LogEvent::PacketDropped { packet: Some(packet), .. } => packet.peer.to_string(),
            _ => addresses.of(&entry.host),
        };
        let placed = PlacedCause { code: cause.code, sender, dest_qp, psn: cause.psn };
        let certainty = causes.entry(placed).or_insert(cause.certainty);
        *certainty = cause.certainty.min(*certainty);
    }
    causes
}

fn dest_qp_of(event: &LogEvent) -> u32 {
    match event {
        LogEvent::PacketSent { packet, .. } => packet.dest_qp,
        LogEvent::PacketDropped { qp, .. } => *qp,
        _ => 0,
    }
}

/// A cause that the log knows. Packets of a flow that are lost before the first of them is sent again are one loss.
#[derive(Debug)]
pub struct LogCause {
    /// The first place is where it starts.
    pub places: Vec<PlacedCause>,
    /// Why no capture can show it, if none can.
    pub exclusion: Option<Exclusion>,
}

impl LogCause {
    pub fn code(&self) -> &str {
        &self.places[0].code
    }
}

/// Why no capture can show a cause that the log knows.
pub type Exclusion = &'static str;

pub const CONNECTION_MANAGER: Exclusion = "message of the connection manager: counted as `cm-retransmission`";
pub const UNACKNOWLEDGED: Exclusion = "no acknowledgement (UC, UD)";
pub const DUPLICATE: Exclusion = "copy of a packet that had arrived";
pub const COVERED: Exclusion = "ACK that a later answer covered";
pub const NO_REACTION: Exclusion = "no reaction before the run ended";
pub const GO_BACK_0: Exclusion = "go-back-0: a NAK and a repeated READ name the first packet of the message";
pub const WITH_LOST_ACK: Exclusion =
    "no NAK, and an ACK of the connection was lost at the same time: one timeout repairs both";
pub const SILENT_FAILURE: Exclusion = "the requester failed and sent nothing afterwards";

/// A packet that the log knows was sent.
struct SentPacket {
    sender: String,
    qp: u32,
    receiver: String,
    dest_qp: u32,
    opcode: String,
    psn: u32,
    is_lost: bool,
}

impl SentPacket {
    fn is_response(&self) -> bool {
        ["RESPONSE", "ACKNOWLEDGE", "CNP"].iter().any(|word| self.opcode.contains(word))
    }

    /// The requester of the connection.
    fn requester(&self) -> (String, u32) {
        match self.is_response() {
            true => (self.receiver.clone(), self.dest_qp),
            false => (self.sender.clone(), self.qp),
        }
    }
}

/// What the packets of one flow did at their receiver.
#[derive(Default)]
struct FlowState {
    /// Lost, and not received since.
    missing: BTreeSet<u32>,
    /// The last PSN that was received with none missing before it.
    accepted: Option<u32>,
    /// The loss that is not repaired yet.
    open_loss: Option<usize>,
}

/// What a lost packet is among the losses of its flow.
enum Loss {
    First,
    Another(usize),
    Duplicate,
}

/// Whether a PSN is before another, counted with the wrap.
fn is_before(one: u32, other: u32) -> bool {
    one != other && (other.wrapping_sub(one) & 0xff_ffff) < 0x80_0000
}

impl FlowState {
    fn is_missing_before(&self, psn: u32) -> bool {
        self.missing.iter().any(|missing| is_before(*missing, psn))
    }

    fn lose(&mut self, psn: u32) -> Loss {
        if self.accepted.is_some_and(|accepted| !is_before(accepted, psn)) {
            return Loss::Duplicate;
        }
        let is_behind = self.is_missing_before(psn);
        self.missing.insert(psn);
        self.open_loss.filter(|_| is_behind).map_or(Loss::First, Loss::Another)
    }

    fn receive(&mut self, psn: u32) {
        self.missing.remove(&psn);
        if !self.is_missing_before(psn) && self.accepted.is_none_or(|accepted| is_before(accepted, psn)) {
            self.accepted = Some(psn);
        }
    }

    /// A NAK: the receiver has everything before this PSN, and not this one.
    fn reject(&mut self, psn: u32) {
        self.accepted = Some(psn.wrapping_sub(1) & 0xff_ffff);
    }
}

/// What a requester does and gets after a loss.
#[derive(Clone, Copy)]
enum RequesterEvent {
    /// It retransmits, or fails a work request.
    Reaction,
    /// It receives an answer.
    Answer { psn: u32 },
}

/// Everything in a log that its causes are classified by.
struct LogCauses<'a> {
    addresses: &'a Addresses,
    packets: Vec<SentPacket>,
    by_psn: BTreeMap<u32, Vec<usize>>,
    /// Requests, and responses with data.
    flows: BTreeMap<(String, u32), FlowState>,
    /// The ACKs that a requester missed since it last received an answer or reacted.
    lost_acks: BTreeMap<(String, u32), usize>,
    requesters: BTreeMap<(String, u32), Vec<(usize, RequesterEvent)>>,
    /// The last entry with a packet that a queue pair sent.
    last_sent: BTreeMap<(String, u32), usize>,
    /// NAKs: the requester, and the entry.
    naks: Vec<((String, u32), usize)>,
    /// Lost answers: the requester, and the entry.
    lost_answers: Vec<((String, u32), usize)>,
    /// The queue pairs use go-back-0.
    goes_back_to_0: bool,
    /// The last entry and packet, and the cause.
    causes: Vec<(usize, Option<usize>, LogCause)>,
}

/// The causes of a log, and why a capture cannot show them if it cannot.
pub fn log_causes(addresses: &Addresses, entries: &[Entry], goes_back_to_0: bool) -> Vec<LogCause> {
    let mut log = LogCauses {
        addresses,
        packets: Vec::new(),
        by_psn: BTreeMap::new(),
        flows: BTreeMap::new(),
        lost_acks: BTreeMap::new(),
        requesters: BTreeMap::new(),
        last_sent: BTreeMap::new(),
        naks: Vec::new(),
        lost_answers: Vec::new(),
        goes_back_to_0,
        causes: Vec::new(),
    };
    for (index, entry) in entries.iter().enumerate() {
        log.follow(index, entry);
        log.place(index, entry);
    }
    log.finish()
}

impl LogCauses<'_> {
    /// Follows what is sent, received and done again.
    fn follow(&mut self, index: usize, entry: &Entry) {
        let host = self.addresses.of(&entry.host);
        let add = |this: &mut Self, host: String, qp: u32, event: RequesterEvent| {
            this.lost_acks.remove(&(host.clone(), qp));
            this.requesters.entry((host, qp)).or_default().push((index, event));
        };
        match &entry.event {
            LogEvent::PacketSent { qp, packet, .. } => {
                let is_nak = packet.syndrome.as_deref().is_some_and(|syndrome| syndrome.contains("nak"));
                if is_nak {
                    let flow = (packet.peer.to_string(), *qp);
                    self.flows.entry(flow).or_default().reject(packet.psn);
                    self.naks.push(((packet.peer.to_string(), packet.dest_qp), index));
                }
                self.last_sent.insert((host.clone(), *qp), index);
                self.by_psn.entry(packet.psn).or_default().push(self.packets.len());
                self.packets.push(SentPacket {
                    sender: host,
                    qp: *qp,
                    receiver: packet.peer.to_string(),
                    dest_qp: packet.dest_qp,
                    opcode: packet.opcode.to_string(),
                    psn: packet.psn,
                    is_lost: false,
                });
            }
            LogEvent::PacketReceived { qp, packet, .. } => {
                let is_ack = packet.opcode.ends_with(" ACKNOWLEDGE");
                let is_nak = packet.syndrome.as_deref().is_some_and(|syndrome| syndrome.contains("nak"));
                if !is_nak && (is_ack || packet.opcode.contains("RESPONSE")) {
                    add(self, host, *qp, RequesterEvent::Answer { psn: packet.psn });
                }
                if !is_ack {
                    let flow = (packet.peer.to_string(), *qp);
                    self.flows.entry(flow).or_default().receive(packet.psn);
                }
            }
            LogEvent::Retransmitted { qp, .. } | LogEvent::AckTimedOut { qp, .. } => {
                add(self, host, *qp, RequesterEvent::Reaction);
            }
            LogEvent::Completed { completion, .. } if completion.status != "SUCCESS" => {
                add(self, host, completion.qp, RequesterEvent::Reaction);
            }
            _ => {}
        }
    }

    /// Places the cause that an entry shows.
    fn place(&mut self, index: usize, entry: &Entry) {
        let Some(cause) = ObservedCause::of(entry) else { return };
        let is_of_packet = matches!(entry.event, LogEvent::Fault { .. } | LogEvent::FrameDropped { .. });
        if !is_of_packet {
            let (sender, dest_qp) = match &entry.event {
                // The fault that damaged the packet is counted.
                LogEvent::PacketDropped { .. } => return,
                event => (self.addresses.of(&entry.host), dest_qp_of(event)),
            };
            let place = PlacedCause { code: cause.code, sender, dest_qp, psn: cause.psn };
            self.causes.push((index, None, LogCause { places: vec![place], exclusion: None }));
            return;
        }
        let Some(packet) = self.packet_of(&entry.event, cause.psn) else { return };
        let is_loss = cause.code.ends_with("-lost");
        let sent = &mut self.packets[packet];
        sent.is_lost |= is_loss;
        let code = match () {
            () if !is_loss => cause.code,
            () if sent.is_response() => "response-lost".into(),
            () if sent.opcode.starts_with("UD ") => "datagram-lost".into(),
            () => "request-lost".into(),
        };
        let place = PlacedCause { code, sender: sent.sender.clone(), dest_qp: sent.dest_qp, psn: cause.psn };
        let (flow, psn) = ((sent.sender.clone(), sent.dest_qp), sent.psn);
        let is_ack = sent.opcode.ends_with(" ACKNOWLEDGE") || sent.opcode.ends_with("CNP");
        let next = self.causes.len();
        if is_loss && sent.is_response() {
            self.lost_answers.push((sent.requester(), index));
        }
        let mut exclusion = None;
        let loss = match () {
            () if sent.dest_qp == 1 => {
                exclusion = Some(CONNECTION_MANAGER);
                next
            }
            () if sent.opcode.starts_with("UD ") || sent.opcode.starts_with("UC ") => {
                exclusion = Some(UNACKNOWLEDGED);
                next
            }
            () if !is_loss => next,
            () if is_ack => *self.lost_acks.entry(sent.requester()).or_insert(next),
            // Requests and responses with data have to arrive, each by itself.
            () => match self.flows.entry(flow.clone()).or_default().lose(psn) {
                Loss::First => {
                    self.flows.entry(flow).or_default().open_loss = Some(next);
                    next
                }
                Loss::Another(loss) => loss,
                Loss::Duplicate => {
                    exclusion = Some(DUPLICATE);
                    next
                }
            },
        };
        match self.causes.get_mut(loss) {
            Some((last, last_packet, cause)) => {
                (*last, *last_packet) = (index, Some(packet));
                cause.places.push(place);
            }
            None => self.causes.push((index, Some(packet), LogCause { places: vec![place], exclusion })),
        }
    }

    /// The packet that a fault is about: the last one with its PSN, opcode and destination that was not lost.
    fn packet_of(&self, event: &LogEvent, psn: Option<u32>) -> Option<usize> {
        let candidates = self.by_psn.get(&psn?)?;
        candidates.iter().rev().copied().find(|at| {
            let sent = &self.packets[*at];
            !sent.is_lost
                && match event {
                    LogEvent::Fault { opcode, .. } => opcode.as_ref().is_none_or(|name| *name == sent.opcode),
                    LogEvent::FrameDropped { packet, .. } => {
                        packet.source.to_string() == sent.sender && packet.dest_qp == Some(sent.dest_qp)
                    }
                    _ => false,
                }
        })
    }

    fn finish(mut self) -> Vec<LogCause> {
        let causes = std::mem::take(&mut self.causes);
        let finished = causes.into_iter().map(|(index, packet, mut cause)| {
            if cause.code().ends_with("-lost") {
                let later = packet.and_then(|packet| self.later_exclusion(index, packet));
                cause.exclusion = cause.exclusion.or(later);
            } else if cause.code() == "timeout" {
                // The log names the queue pair of a timeout only in its entry: see `follow`.
                let sender = &cause.places[0].sender;
                let reaction = self
                    .requesters
                    .iter()
                    .find(|((host, _), events)| host == sender && events.iter().any(|(at, _)| *at == index));
                let is_silent = reaction.is_some_and(|(end, _)| self.is_silent_after(end, index));
                cause.exclusion = is_silent.then_some(SILENT_FAILURE);
            }
            cause
        });
        finished.collect()
    }

    fn is_silent_after(&self, end: &(String, u32), index: usize) -> bool {
        self.last_sent.get(end).is_none_or(|last| *last < index)
    }

    /// Why a loss had no consequence that anybody sent.
    fn later_exclusion(&self, index: usize, packet: usize) -> Option<Exclusion> {
        let sent = &self.packets[packet];
        let requester = sent.requester();
        if self.goes_back_to_0 {
            return Some(GO_BACK_0);
        }
        let events = self.requesters.get(&requester).map_or(&[][..], Vec::as_slice);
        let is_reaction = |event: &RequesterEvent| matches!(event, RequesterEvent::Reaction);
        let reaction = events.iter().find(|(at, event)| *at > index && is_reaction(event)).map(|(at, _)| *at);
        let is_between = |entries: &[((String, u32), usize)], from: usize| {
            let until = reaction.unwrap_or(usize::MAX);
            entries.iter().any(|(end, at)| *end == requester && (from..=until).contains(at))
        };
        if !sent.is_response() && is_between(&self.naks, index) {
            return None;
        }
        let earlier = events.iter().rev().find(|(at, event)| *at < index && is_reaction(event));
        if !sent.is_response() && is_between(&self.lost_answers, earlier.map_or(0, |(at, _)| *at)) {
            return Some(WITH_LOST_ACK);
        }
        let is_ack = sent.opcode.ends_with(" ACKNOWLEDGE");
        for (at, event) in events.iter().filter(|(at, _)| *at > index) {
            match event {
                RequesterEvent::Reaction if self.is_silent_after(&requester, *at) => {
                    return Some(SILENT_FAILURE);
                }
                RequesterEvent::Reaction => return None,
                RequesterEvent::Answer { psn } if is_ack && !is_before(*psn, sent.psn) => {
                    return Some(COVERED);
                }
                RequesterEvent::Answer { .. } => {}
            }
        }
        Some(NO_REACTION)
    }
}
