//! What a capture shows of whole connections: packets that it does not contain, packets that do not add up, losses
//! without an acknowledgement, damage, congestion, and how the connection manager connected and disconnected.

use super::{Evidence, Explanation, LogAnalyzer};
use crate::describe::{duration, times};
use crate::log::{Certainty, EffectData, Entry, LogEvent, expects_reply};
use crate::parsed_log::{ParsedLog, QueuePairId};
use softhca_wire::cm::RejectReason;
use std::collections::{BTreeMap, BTreeSet};

/// The most steps of evidence for a finding.
const MAX_EVIDENCE: usize = 8;

/// What is gathered for one finding.
#[derive(Default)]
struct Gathered {
    count: u64,
    evidence: Vec<(usize, String)>,
    certainty: Option<Certainty>,
}

impl Gathered {
    fn add(&mut self, entry: usize, count: u64, text: String, certainty: Certainty) {
        self.count += count;
        self.certainty = self.certainty.max(Some(certainty));
        if self.evidence.len() < MAX_EVIDENCE {
            self.evidence.push((entry, text));
        }
    }
}

/// The connection of a flow and the code of a finding.
type FindingKey = (String, &'static str);

/// The findings about connections, and only about those of these queue pairs if some are given.
pub(super) fn findings(analyzer: &LogAnalyzer, only: Option<&[QueuePairId]>) -> Vec<Explanation> {
    let log = &analyzer.log;
    let acknowledged: BTreeSet<QueuePairId> = log.work_requests.iter().map(|work| work.queue_pair).collect();
    let mut gathered: BTreeMap<FindingKey, Gathered> = BTreeMap::new();
    for (index, entry) in log.entries.iter().enumerate() {
        let Some((ends, code, count, text, certainty)) = examine(log, index, entry, &acknowledged) else {
            continue;
        };
        if only.is_some_and(|only| !ends.iter().any(|end| only.contains(end))) {
            continue;
        }
        let connection = ends.map(|end| log.name(end));
        let key = (format!("{} - {}", connection[0], connection[1]), code);
        gathered.entry(key).or_default().add(index, count, text, certainty);
    }
    let mut findings: Vec<Explanation> = gathered
        .into_iter()
        .map(|((connection, code), gathered)| finding(analyzer, connection, code, gathered))
        .collect();
    findings.extend(connection_manager(analyzer, only));
    findings.sort_by_key(|finding| finding.evidence.first().map_or(0, |step| step.time_ns));
    findings
}

/// What an entry shows: the two ends, sender first, the code, how often, a sentence and the certainty.
fn examine(
    log: &ParsedLog,
    index: usize,
    entry: &Entry,
    acknowledged: &BTreeSet<QueuePairId>,
) -> Option<([QueuePairId; 2], &'static str, u64, String, Certainty)> {
    let host = log.entry_hosts[index];
    let why = entry.trigger.as_deref().unwrap_or_default();
    match &entry.event {
        LogEvent::Fault { effect, class, opcode, psn: Some(psn), dest_qp: Some(dest_qp), .. } => {
            let ends = ends_of(log, host, *dest_qp)?;
            let certainty = entry.certainty.unwrap_or(Certainty::Known);
            let requester = if class == "request" { ends[0] } else { ends[1] };
            let psn = log.psn(requester, *psn);
            let name =
                opcode.as_deref().map_or("a packet", |opcode| opcode.rsplit(' ').next().unwrap_or(opcode));
            // A reliable connection's losses are explained with their work requests.
            let is_explained = acknowledged.contains(&requester);
            let (code, count, what) = match effect {
                EffectData::NotCaptured { packets } => {
                    ("not-captured", u64::from(*packets), format!("{packets} packets from {psn} on: {why}."))
                }
                EffectData::Irregular { code } => {
                    let code = match code.as_ref() {
                        "path-mtu" => "path-mtu",
                        "psn-mismatch" => "psn-mismatch",
                        _ => "message-boundary",
                    };
                    (code, 1, format!("{name} {psn}: {why}."))
                }
                EffectData::Dropped { .. } if !is_explained => {
                    ("request-lost", 1, format!("{name} {psn}: {why}."))
                }
                EffectData::Reordered { .. } if !is_explained => {
                    ("reordered", 1, format!("{name} {psn}: {why}."))
                }
                EffectData::Duplicated { .. } => ("duplicated", 1, format!("{name} {psn}: {why}.")),
                EffectData::MarkedCe => ("congestion", 0, format!("{name} {psn} carries an ECN mark (CE).")),
                _ => return None,
            };
            Some((ends, code, count, what, certainty))
        }
        LogEvent::PacketDropped { qp, packet: Some(packet), reason, .. } if reason == "bad-icrc" => {
            let ends = ends_of(log, log.host_at(packet.peer)?, *qp)?;
            let text =
                format!("{} PSN {} has a wrong ICRC; the receiver drops it.", packet.opcode, packet.psn);
            Some((ends, "damaged", 1, text, Certainty::Known))
        }
        LogEvent::PacketSent { packet, .. } if packet.opcode.ends_with("CNP") => {
            let ends = ends_of(log, host, packet.dest_qp)?;
            let text = format!("{} sends a CNP to {}.", log.name(ends[0]), log.name(ends[1]));
            Some(([ends[1], ends[0]], "congestion", 1, text, Certainty::Known))
        }
        _ => None,
    }
}

/// The queue pairs of a flow: that of the sending host which is connected to `dest_qp`, and its peer.
fn ends_of(log: &ParsedLog, host: usize, dest_qp: u32) -> Option<[QueuePairId; 2]> {
    let sender = log
        .queue_pairs
        .iter()
        .copied()
        .find(|end| end.host == host && log.peer_address(*end).is_some_and(|(_, qp)| qp == dest_qp))?;
    let (address, qp) = log.peer_address(sender)?;
    Some([sender, QueuePairId { host: log.host_at(address)?, qp }])
}

fn finding(
    analyzer: &LogAnalyzer,
    connection: String,
    code: &'static str,
    gathered: Gathered,
) -> Explanation {
    let count = gathered.count;
    let (what, cause, advice) = match code {
        "not-captured" => (
            format!("{count} packets are missing from the capture"),
            format!("The receiver acknowledged {count} packets that are not in the capture. The network delivered them; the capture missed them."),
            "Findings about these packets are incomplete. Capture with a larger buffer (tcpdump -B), a shorter snap length (-s 128) or to a faster disk, and on every port that carries the connection.",
        ),
        "path-mtu" => (
            "packets do not fit one path MTU".into(),
            "Every packet of a message but the last carries exactly the path MTU, and both ends of a connection must use the same.".into(),
            "Exchange the path MTU when connecting, and set the smaller one at both ends before going to RTR.",
        ),
        "psn-mismatch" => (
            "the ends disagree about the first PSN".into(),
            "The responder counts from another PSN than the requester: rq_psn of one end must be sq_psn of the other. If its first requests were lost before the capture point, it asks for them in the same way.".into(),
            "Compare the PSNs that were exchanged with those that both ends set (sq_psn at RTS, rq_psn at RTR).",
        ),
        "message-boundary" => (
            "messages do not add up".into(),
            "The opcodes or lengths of consecutive packets contradict each other; a responder rejects them as an invalid request.".into(),
            "Look at the requester: it does not follow the specification, or two senders use one queue pair number.",
        ),
        "request-lost" => (
            format!("{count} packets were not seen"),
            format!("{count} PSNs are missing from a flow without acknowledgements. They were lost before the capture point, or the capture missed them."),
            "On an unreliable transport only the receiver's program notices. Capture at both ends and join the captures (`softhca trace A B`) to see what is lost between them.",
        ),
        "reordered" => (
            format!("{count} packets were reordered"),
            "Packets of one flow overtook each other; nothing was lost by it.".into(),
            "Keep a flow on one path: hash on the UDP source port, without packet spraying or adaptive routing.",
        ),
        "duplicated" => (
            format!("{count} packets were captured twice"),
            "The copy follows the original sooner than its sender could have reacted. The network duplicated it, or the capture saw it on two interfaces.".into(),
            "A responder ignores duplicates. If the capture was taken on several interfaces, capture on one.",
        ),
        "damaged" => (
            format!("{count} packets are damaged"),
            "Their ICRC is wrong. A receiver drops them without an answer, so that they count as lost.".into(),
            "Look for a cable, port or middlebox that changes packets (see its error counters), or for a rule that corrupts.",
        ),
        _ => congestion(analyzer, count, &gathered),
    };
    let log = &analyzer.log;
    let evidence: Vec<Evidence> = gathered
        .evidence
        .into_iter()
        .map(|(entry, text)| Evidence {
            entry,
            packet: analyzer.packet_of(entry),
            time_ns: log.time_of(entry),
            text,
        })
        .collect();
    Explanation {
        title: format!("{connection}: {what}"),
        connection,
        request: None,
        posted_at: None,
        status: None,
        code: code.into(),
        certainty: gathered.certainty.unwrap_or(Certainty::Known),
        evidence,
        cause,
        advice: advice.into(),
    }
}

/// CNPs and ECN marks, and how the rate of the sender changed.
fn congestion(analyzer: &LogAnalyzer, cnps: u64, gathered: &Gathered) -> (String, String, &'static str) {
    let log = &analyzer.log;
    let advice = "A queue on the way fills up: look for the port that marks (its ECN counter), for incast, and for paths of different speed. With DCQCN the sender's rate falls at each CNP and recovers without them.";
    if cnps == 0 {
        let cause = "Switches marked packets (CE), and the receiver sent no CNP in the capture.".to_owned();
        return ("congestion was marked".into(), cause, advice);
    }
    let mut reaction = String::new();
    let first = gathered.evidence.iter().find_map(|(entry, _)| match &log.entries[*entry].event {
        LogEvent::PacketSent { packet, .. } => Some((log.time_of(*entry), (packet.peer, packet.dest_qp))),
        _ => None,
    });
    if let Some((first, (address, qp))) = first
        && let Some(host) = log.host_at(address)
    {
        let sender = QueuePairId { host, qp };
        let (mut before, mut after) = (0u64, 0u64);
        let (mut start, mut end) = (None, first);
        for (index, entry) in log.entries.iter().enumerate() {
            let LogEvent::PacketSent { qp, packet, .. } = &entry.event else { continue };
            if (QueuePairId { host: log.entry_hosts[index], qp: *qp }) != sender || packet.payload == 0 {
                continue;
            }
            start.get_or_insert(entry.time);
            let bytes = if entry.time <= first { &mut before } else { &mut after };
            *bytes += u64::from(packet.payload);
            end = entry.time;
        }
        let rate = |bytes: u64, ns: u64| bytes as f64 * 8.0 / ns as f64;
        let start = start.unwrap_or(first);
        if first > start && end > first && after > 0 {
            reaction = format!(
                " {} sent {:.3} Gb/s before the first CNP and {:.3} Gb/s after it.",
                log.name(sender),
                rate(before, first - start),
                rate(after, end - first)
            );
        }
    }
    let count = if cnps == 1 { "one CNP".to_owned() } else { format!("{cnps} CNPs") };
    let cause = format!("The network is congested: the receiver saw ECN marks and sent {count}.{reaction}");
    ("congestion was notified".into(), cause, advice)
}

/// A message of the connection manager: entry, sender, receiver, name, whether it was sent before, its text.
struct CmMessage<'a> {
    entry: usize,
    from: String,
    to: String,
    name: &'a str,
    is_repeated: bool,
    text: &'a str,
}

fn cm_messages(log: &ParsedLog) -> Vec<CmMessage<'_>> {
    let messages = log.entries.iter().enumerate().filter_map(|(index, entry)| {
        let LogEvent::CmSent { message, peer, retransmission, .. } = &entry.event else { return None };
        Some(CmMessage {
            entry: index,
            from: entry.host.clone(),
            to: peer.to_string(),
            name: message.as_ref(),
            is_repeated: *retransmission,
            text: entry.trigger.as_deref().unwrap_or_default(),
        })
    });
    messages.collect()
}

/// Rejected, repeated and unanswered messages of the connection manager.
fn connection_manager(analyzer: &LogAnalyzer, only: Option<&[QueuePairId]>) -> Vec<Explanation> {
    let log = &analyzer.log;
    if only.is_some() {
        return Vec::new();
    }
    let messages = cm_messages(log);
    let mut findings = Vec::new();
    let mut push =
        |message: &CmMessage<'_>, code: &str, certainty, title: String, cause: String, advice: &str| {
            let step = Evidence {
                entry: message.entry,
                packet: analyzer.packet_of(message.entry),
                time_ns: log.time_of(message.entry),
                text: format!("{} sends {} to {}.", message.from, message.text, message.to),
            };
            findings.push(Explanation {
                connection: format!("{} - {}", message.from, message.to),
                request: None,
                posted_at: None,
                status: None,
                code: code.into(),
                certainty,
                title,
                evidence: vec![step],
                cause,
                advice: advice.into(),
            });
        };
    for (at, message) in messages.iter().enumerate() {
        let CmMessage { from, to, name, .. } = message;
        if *name == "REJ" {
            let reason = message.text.split_once("reason=").map_or("", |(_, reason)| reason);
            let reason = reason.split(' ').next().and_then(|reason| reason.parse().ok()).unwrap_or_default();
            push(
                message,
                "cm-rejected",
                Certainty::Known,
                format!("{from} rejected a connection with {to}"),
                format!("{from} answered {}.", message.text),
                rejection_advice(RejectReason(reason)),
            );
        }
        let is_last_try = message.is_repeated
            && expects_reply(name)
            && !messages[at + 1..].iter().any(|later| {
                later.is_repeated && (&later.from, later.name, later.text) == (from, *name, message.text)
            });
        if !is_last_try {
            continue;
        }
        let tries = messages[..=at]
            .iter()
            .filter(|earlier| (&earlier.from, earlier.name, earlier.text) == (from, *name, message.text))
            .count() as u32;
        let replies = messages[at + 1..].iter().any(|later| later.from == *to && later.to == *from);
        let tried = times(tries);
        if replies {
            push(
                message,
                "cm-retransmission",
                Certainty::Inferred,
                format!("{from} sent {name} {tried} to {to}"),
                format!("{name} was sent {tried}: it or the reply to it was lost, or the reply was late."),
                "Connecting over a lossy network takes a CM timeout for each loss.",
            );
        } else {
            push(
                message,
                "cm-no-response",
                Certainty::Ambiguous,
                format!("{name} of {from} to {to} has no reply in the capture"),
                format!(
                    "{name} was sent {tried}, and no reply was captured: it does not arrive, the peer does not run, or the reply is lost before the capture point."
                ),
                "See that the peer runs and that UDP port 4791 is open both ways. A capture at the other end shows whether the request arrives.",
            );
        }
    }
    findings
}

fn rejection_advice(reason: RejectReason) -> &'static str {
    match reason {
        RejectReason::INVALID_SERVICE_ID => {
            "Nothing listens on that port (service ID) of the card with that address. Start the server first, and compare its address and port with those that the client resolves: 127.0.0.1 is the client's own card."
        }
        RejectReason::CONSUMER => {
            "The program at the other end refused (rdma_reject): its private data or its own output says why."
        }
        RejectReason::STALE_CONNECTION => {
            "The peer has an earlier connection with this queue pair number: destroy the identifier at both ends and connect anew."
        }
        RejectReason::TIMEOUT => {
            "The side that gave up did not receive the next message of the handshake in time: look for a lost message, or for a program that accepts late."
        }
        _ => {
            "Compare the parameters that both ends connect with: the reason names the one that does not fit."
        }
    }
}

/// Failed connections in the event log of one or both ends, and only those of these queue pairs' hosts if some are given.
pub(super) fn log_findings(analyzer: &LogAnalyzer, only: Option<&[QueuePairId]>) -> Vec<Explanation> {
    let log = &analyzer.log;
    let failures = log.entries.iter().enumerate().filter_map(|(index, entry)| match &entry.event {
        LogEvent::CmEventRaised { id, event, status, .. } => Some((index, entry, *id, event, *status)),
        _ => None,
    });
    let is_asked =
        |index: usize| only.is_none_or(|only| only.iter().any(|end| end.host == log.entry_hosts[index]));
    failures
        .filter(|(index, ..)| is_asked(*index))
        .filter_map(|(index, entry, id, event, status)| {
            failed_connection(log, (index, entry), id, event, status)
        })
        .collect()
}

fn failed_connection(
    log: &ParsedLog,
    (index, entry): (usize, &Entry),
    id: u32,
    event: &str,
    status: i32,
) -> Option<Explanation> {
    let host = &entry.host;
    let mut evidence = Vec::new();
    let mut step = |entry: usize, text: String| {
        evidence.push(Evidence { entry, packet: None, time_ns: log.time_of(entry), text });
    };
    let (mut peer, mut sent, mut failure) = (None, (0, 0, ""), "");
    for (at, earlier) in log.entries[..index].iter().enumerate().filter(|(_, earlier)| earlier.host == *host)
    {
        match &earlier.event {
            LogEvent::CmSent { id: Some(of), message, peer: to, .. } if *of == id => {
                peer = Some(log.host_at(*to).map_or(to.to_string(), |host| log.host_name(host).to_owned()));
                let tries = if sent.2 == message.as_ref() { sent.1 + 1 } else { 1 };
                sent = (at, tries, message.as_ref());
            }
            LogEvent::CmFailed { id: of, reason } if *of == id => failure = reason.as_ref(),
            _ => {}
        }
    }
    let other = peer.as_deref().unwrap_or("the other end");
    if sent.1 > 0 {
        let tries = if sent.1 > 1 { format!(", {} in all", times(sent.1)) } else { String::new() };
        step(sent.0, format!("{host} sends {} to {other}{tries}.", sent.2));
    }
    step(index, format!("{host} gets {event}, status {status}."));
    let message = sent.2;
    let (code, cause, advice) = match event {
        "RDMA_CM_EVENT_REJECTED" => {
            let reason = RejectReason(status.try_into().unwrap_or_default());
            let cause = format!("{other} rejected the connection: reason {reason}.");
            ("cm-rejected", cause, rejection_advice(reason))
        }
        _ if failure == "peer-unreachable" => (
            "peer-unreachable",
            format!("No card answers at the address of {other}: its port is closed."),
            "Start the program of the other end first, and compare the address that the client resolves with that of the server's card: `softhca status` lists the cards that run.",
        ),
        "RDMA_CM_EVENT_UNREACHABLE" | "RDMA_CM_EVENT_CONNECT_ERROR" => (
            "cm-no-response",
            format!("{other} did not answer {message}, which was sent {}.", times(sent.1.max(1))),
            "See that the peer runs and that UDP port 4791 is open both ways. A capture at the other end shows whether the message arrives.",
        ),
        "RDMA_CM_EVENT_ADDR_ERROR" | "RDMA_CM_EVENT_ROUTE_ERROR" => (
            "cm-no-address",
            format!("No card of {host} reaches the address that the program asked for."),
            "Resolve the address of a card: `softhca devinfo` lists them.",
        ),
        _ => return None,
    };
    Some(Explanation {
        connection: format!("{host} - {other}"),
        request: None,
        posted_at: None,
        status: None,
        code: code.into(),
        certainty: Certainty::Known,
        title: format!("{host} could not connect to {other}"),
        evidence,
        cause,
        advice: advice.into(),
    })
}

/// A sentence for each connection that the connection manager set up or tore down in the capture.
pub(super) fn lifetimes(analyzer: &LogAnalyzer) -> Vec<String> {
    let log = &analyzer.log;
    let mut sentences = Vec::new();
    for message in cm_messages(log).iter().filter(|message| !message.is_repeated) {
        let CmMessage { from, to, name, entry, .. } = message;
        let time = duration(log.time_of(*entry));
        match *name {
            "RTU" => sentences.push(format!("{from} connected to {to} at {time}.")),
            "DREQ" => sentences.push(format!("{from} closed its connection with {to} at {time}.")),
            _ => {}
        }
    }
    const MAX_SENTENCES: usize = 8;
    let more = sentences.len().saturating_sub(MAX_SENTENCES);
    sentences.truncate(MAX_SENTENCES);
    if more > 0 {
        sentences.push(format!("{more} more connections were set up or closed."));
    }
    sentences
}
