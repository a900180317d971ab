//! What the log says happened to a work request and its packets, in order.

use super::Evidence;
use crate::describe::{duration, times};
use crate::log::{Certainty, EffectData, Entry, LogEvent};
use crate::parsed_log::{ParsedLog, QueuePairId, WorkRequest};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// What was found out on the way; the verdict needs it.
#[derive(Debug, Default)]
pub(super) struct Symptoms {
    pub evidence: Vec<Evidence>,
    /// A request packet that was lost: its words, and where it was lost.
    pub lost_request: Option<(String, String)>,
    /// An answer that was lost.
    pub lost_response: Option<(String, String)>,
    /// A packet that a rule changed so that it was not taken.
    pub corrupted: Option<(String, String)>,
    /// A packet that was held up.
    pub delayed: Option<(String, String)>,
    /// Others overtook it.
    pub is_reordered: bool,
    /// A link was down.
    pub link_down: bool,
    /// Packets that the peer did not take: reason and sentence.
    pub dropped_by_peer: Option<(String, String)>,
    /// The peer's rejection: reason and sentence.
    pub nak: Option<(String, String)>,
    /// How often the requester waited, went back, ran into its timer.
    pub rnr_waits: u32,
    pub rnr_wait_ns: u64,
    pub retransmissions: u32,
    pub timeouts: u32,
    /// A request packet was sent since it started.
    pub has_sent: bool,
    /// One of its own packets was sent.
    pub was_sent: bool,
    /// Whether the peer's card received any of it.
    pub reached_peer: bool,
    /// The responses that its queue pair received meanwhile, and the time of the last.
    pub responses: u32,
    pub last_response_ns: u64,
    /// A duplicate was answered.
    pub duplicates: u32,
    /// The reason and sentence of the completion.
    pub completion_reason: (String, String),
    /// How sure the first loss or delay is.
    pub certainty: Option<Certainty>,
    /// The two ends count from different PSNs: why, and how sure that is.
    pub psn_mismatch: Option<(String, Certainty)>,
    /// Packets with a wrong ICRC that the own card dropped meanwhile.
    pub damaged_answers: u32,
    /// The time until the card knew that the peer is not SoftHCA, and sent the first packet.
    pub detection_ns: u64,
    /// Why its queue pair went to an error state.
    pub error_transition: Option<(String, String)>,
}

/// Whether something held a work request up that the log shows.
pub(super) fn was_delayed(log: &ParsedLog, work: &WorkRequest) -> bool {
    if work.psns.is_none() {
        return false;
    }
    let findings = collect(log, work);
    findings.rnr_waits + findings.retransmissions + findings.timeouts > 0
        || findings.lost_request.is_some()
        || findings.lost_response.is_some()
        || findings.delayed.is_some()
        || findings.detection_ns > 0
}

/// Follows a work request through the log.
pub(super) fn collect(log: &ParsedLog, work: &WorkRequest) -> Symptoms {
    let mut chain = EvidenceCollector::new(log, work);
    if work.status.as_deref() == Some("WR_FLUSH_ERR") || work.is_receive() {
        // What made the queue pair fail lies before, and need not concern this work request's packets.
        chain.explain_error_state();
    } else {
        for index in log.span(work) {
            chain.entry(index);
        }
    }
    if let Some((own, expected)) = log.psn_mismatch(work.queue_pair) {
        let (name, other) = (chain.local_name(), chain.peer_name());
        let why = format!("{name} starts at PSN {own} (sq_psn), and {other} expects {expected} (rq_psn)");
        chain.symptoms.psn_mismatch = Some((why, Certainty::Known));
    }
    if let Some(ended) = work.completed {
        chain.add_completion(ended);
    }
    chain.finish()
}

struct EvidenceCollector<'a> {
    log: &'a ParsedLog,
    work_request: &'a WorkRequest,
    peer: Option<QueuePairId>,
    /// The entry that is being described.
    entry_index: usize,
    symptoms: Symptoms,
    /// Where each sentence stands in the chain, how often it was said, and when last.
    sentences: BTreeMap<String, (usize, u32, u64)>,
}

impl<'a> EvidenceCollector<'a> {
    fn new(log: &'a ParsedLog, work: &'a WorkRequest) -> EvidenceCollector<'a> {
        let peer = log.peer(work.queue_pair);
        EvidenceCollector {
            log,
            work_request: work,
            peer,
            entry_index: 0,
            symptoms: Symptoms::default(),
            sentences: BTreeMap::new(),
        }
    }

    /// Says something; what was said before is only counted.
    fn add(&mut self, time_ns: u64, text: String) {
        let mut letters = text.chars();
        // Names of hosts stay as they are.
        let text = match letters.next() {
            Some('t') if text.starts_with("the ") => format!("T{}", letters.as_str()),
            _ => text,
        };
        if let Some((_, count, last)) = self.sentences.get_mut(&text) {
            (*count, *last) = (*count + 1, time_ns);
            return;
        }
        self.sentences.insert(text.clone(), (self.symptoms.evidence.len(), 1, time_ns));
        self.symptoms.evidence.push(Evidence { entry: self.entry_index, packet: None, time_ns, text });
    }

    fn finish(mut self) -> Symptoms {
        for (place, count, last) in self.sentences.values() {
            if *count > 1 {
                let link = &mut self.symptoms.evidence[*place];
                link.text +=
                    &format!(" This happened {}, the last time at {}.", times(*count), duration(*last));
            }
        }
        self.symptoms
    }

    fn local_name(&self) -> String {
        self.log.name(self.work_request.queue_pair)
    }

    fn peer_name(&self) -> String {
        self.log.peer_name(self.work_request.queue_pair)
    }

    fn psn(&self, psn: u32) -> String {
        self.log.psn(self.work_request.queue_pair, psn)
    }

    fn entry(&mut self, index: usize) {
        self.entry_index = index;
        let log = self.log;
        let entry = &log.entries[index];
        let here = QueuePairId { host: log.entry_hosts[index], qp: entry.event.queue_pair().unwrap_or(0) };
        if let LogEvent::Fault { .. } = entry.event {
            return self.fault(entry, here.host);
        }
        if let LogEvent::ForeignPeerDetected { peer, .. } = &entry.event {
            return self.foreign_peer_detected(entry, here.host, *peer);
        }
        if here == self.work_request.queue_pair {
            self.at_requester(entry);
        } else if Some(here) == self.peer {
            self.at_responder(entry);
        } else if let LogEvent::PacketDropped { .. } = entry.event
            && self.peer_host() == Some(here.host)
        {
            self.dropped(entry);
        } else if let LogEvent::PacketDropped { packet: None, reason, .. } = &entry.event
            && here.host == self.work_request.queue_pair.host
            && reason == "bad-icrc"
        {
            self.symptoms.damaged_answers += 1;
            let (host, why) = (self.log.host_name(here.host), trigger_text(entry, reason));
            self.add(entry.time, format!("{host} drops a packet that it cannot trust: {why}."));
        }
    }

    /// The card held back the first packets until it knew how to treat the peer.
    fn foreign_peer_detected(&mut self, entry: &Entry, host: usize, peer: IpAddr) {
        let is_peer = self.log.peer_address(self.work_request.queue_pair).is_some_and(|(at, _)| at == peer);
        let started = self.work_request.started.map_or(entry.time, |started| self.log.time_of(started));
        if host != self.work_request.queue_pair.host || !is_peer || self.symptoms.has_sent {
            return;
        }
        self.symptoms.detection_ns = entry.time - started;
        let (own, other) = (self.log.host_name(host), self.peer_name());
        let text = format!(
            "{own} has asked the port of {other} whether it is SoftHCA, and got no answer: it sends the first packet now."
        );
        self.add(entry.time, text);
    }

    fn peer_host(&self) -> Option<usize> {
        let (address, _) = self.log.peer_address(self.work_request.queue_pair)?;
        self.log.host_at(address)
    }

    fn at_requester(&mut self, entry: &Entry) {
        let (own, other) = (self.local_name(), self.peer_name());
        match &entry.event {
            LogEvent::WqeFetched { wr_id: id, bytes, .. } if *id == self.work_request.wr_id => {
                let size = match self.work_request.psns {
                    None => String::new(),
                    Some((first, 1)) => format!(": {bytes} bytes in one packet, {}", self.psn(first)),
                    Some((first, count)) => {
                        let last = first.wrapping_add(count - 1) & 0xff_ffff;
                        format!(
                            ": {bytes} bytes in {count} packets, {} to {}",
                            self.psn(first),
                            self.psn(last)
                        )
                    }
                };
                let to =
                    if self.work_request.psns.is_some() { format!(" to {other}") } else { String::new() };
                self.add(entry.time, format!("{own} starts {}{to}{size}.", self.work_request.title()));
            }
            LogEvent::PacketSent { packet, .. } if is_request(&packet.opcode) => {
                self.symptoms.has_sent = true;
                self.symptoms.was_sent |= self.work_request.has_psn(packet.psn);
            }
            LogEvent::RnrWaitStarted { psn, until, .. } if self.work_request.has_psn(*psn) => {
                let wait = until.saturating_sub(entry.time);
                self.symptoms.rnr_waits += 1;
                self.symptoms.rnr_wait_ns += wait;
                let psn = self.psn(*psn);
                let time = if wait > 0 { format!("{} ", duration(wait)) } else { String::new() };
                let text = match entry.certainty {
                    // The NAK may be lost behind the capture point.
                    Some(Certainty::Ambiguous) => format!("{own} sends {psn} again after the NAK."),
                    _ => format!("{own} waits {time}as the NAK says, then sends {psn} again."),
                };
                self.add(entry.time, text);
            }
            LogEvent::PacketReceived { packet, .. } if !is_request(&packet.opcode) => {
                self.symptoms.responses += 1;
                self.symptoms.last_response_ns = entry.time;
            }
            LogEvent::AckTimedOut { oldest_psn, .. } if self.work_request.has_psn(*oldest_psn) => {
                self.symptoms.timeouts += 1;
                let psn = self.psn(*oldest_psn);
                let after = match self
                    .log
                    .attributes(self.work_request.queue_pair)
                    .and_then(|profile| profile.ack_timeout)
                {
                    Some(ack_timeout) => format!(" in {}", duration(ack_timeout)),
                    None => String::new(),
                };
                self.add(
                    entry.time,
                    format!("The ack timer of {own} runs out: no answer to {psn} came{after}."),
                );
            }
            LogEvent::Retransmitted { from_psn: to_psn, cause, .. } if self.work_request.has_psn(*to_psn) => {
                if cause == "receiver-not-ready" {
                    return;
                }
                self.symptoms.retransmissions += 1;
                let psn = self.psn(*to_psn);
                let why = match cause.as_ref() {
                    "sequence-nak" if entry.certainty.is_some() => "after the NAK",
                    "unknown" => "and the capture does not show why",
                    "sequence-nak" => "because of the NAK",
                    "response-gap" => "because a response is missing",
                    "tail-probe" => "because the responses stopped",
                    "adaptive" => "before the ACK timeout, as the profile of the card does",
                    _ => "because no answer came",
                };
                self.add(
                    entry.time,
                    match entry.certainty {
                        None => format!("{own} goes back to {psn} and sends everything from there again, {why}."),
                        Some(Certainty::Ambiguous) => {
                            format!("{psn} is captured again: {own} sends it again, {why}, or the network delayed it.")
                        }
                        Some(_) => format!("{own} sends again from {psn} on, {why}."),
                    },
                );
            }
            LogEvent::PacketDropped { packet: Some(packet), reason, .. }
                if self.work_request.has_psn(packet.psn) =>
            {
                let (psn, why) = (self.psn(packet.psn), trigger_text(entry, reason));
                let name = opcode_without_service(&packet.opcode);
                self.add(entry.time, format!("{own} does not take the answer {name} {psn}: {why}."));
            }
            _ => {}
        }
    }

    fn at_responder(&mut self, entry: &Entry) {
        let other = self.peer_name();
        match &entry.event {
            LogEvent::PacketReceived { packet, .. }
                if self.work_request.has_psn(packet.psn) && is_request(&packet.opcode) =>
            {
                self.symptoms.reached_peer = true;
            }
            LogEvent::RequestRejected { psn, expected_psn: missing_psn, error: reason, .. }
                if self.work_request.has_psn(missing_psn.unwrap_or(*psn)) =>
            {
                let why = trigger_text(entry, reason);
                let text = match (reason.as_ref(), missing_psn) {
                    (_, Some(missing)) if self.log.is_capture => {
                        let missing = self.psn(*missing);
                        format!(
                            "{other} asks for {missing} with a NAK, \"sequence error\": it has a later packet."
                        )
                    }
                    (_, Some(missing)) => {
                        let (missing, got) = (self.psn(*missing), self.psn(*psn));
                        format!(
                            "{other} gets {got} while it waits for {missing}: it knows now that a packet is missing, and answers with a NAK, \"sequence error\"."
                        )
                    }
                    ("receiver-not-ready", _) => {
                        let psn = self.psn(*psn);
                        format!(
                            "{other} has no receive posted for {psn}: it answers with an RNR NAK, \"receiver not ready\"."
                        )
                    }
                    _ => format!("{other} refuses {} with a NAK: {why}.", self.psn(*psn)),
                };
                self.symptoms.nak = Some((reason.to_string(), why));
                self.add(entry.time, text);
            }
            LogEvent::PacketDropped { .. } => self.dropped(entry),
            LogEvent::DuplicateRequestHandled { psn, .. } if self.work_request.has_psn(*psn) => {
                self.symptoms.duplicates += 1;
                let psn = self.psn(*psn);
                self.add(
                    entry.time,
                    match entry.certainty {
                        None => format!(
                            "{other} had done {psn} already: it answers again and does not do it twice."
                        ),
                        Some(_) => format!("{psn} is acknowledged again."),
                    },
                );
            }
            LogEvent::QpStateChanged { from, to, reason, .. } if to == "ERR" && reason != "requested" => {
                self.add(
                    entry.time,
                    format!("{other} goes from {from} to {to}: it takes nothing more from this connection."),
                );
            }
            LogEvent::QpStateChanged { from, to, .. } if to == "ERR" || to == "RESET" => {
                self.add(
                    entry.time,
                    format!("The program at {other} takes its queue pair from {from} to {to}."),
                );
            }
            _ => {}
        }
    }

    fn dropped(&mut self, entry: &Entry) {
        let LogEvent::PacketDropped { packet, reason, .. } = &entry.event else { return };
        let host = self.peer_host().map(|host| self.log.host_name(host).to_owned()).unwrap_or_default();
        let why = trigger_text(entry, reason);
        match packet {
            Some(packet) if self.work_request.has_psn(packet.psn) && is_request(&packet.opcode) => {
                self.symptoms.reached_peer = true;
                // After a rejection that is what must follow; only what comes before it is a cause.
                if self.symptoms.nak.is_none() {
                    self.symptoms.dropped_by_peer.get_or_insert((reason.to_string(), why.clone()));
                }
                let (psn, name) = (self.psn(packet.psn), opcode_without_service(&packet.opcode));
                self.add(entry.time, format!("{host} does not take {name} {psn}: {why}."));
            }
            None if reason == "bad-icrc" => {
                self.symptoms.dropped_by_peer.get_or_insert((reason.to_string(), why.clone()));
                self.add(entry.time, format!("{host} drops a packet that it cannot trust: {why}."));
            }
            _ => {}
        }
    }

    fn fault(&mut self, entry: &Entry, sender: usize) {
        let LogEvent::Fault { cause, effect, class, opcode, psn: Some(psn), dest_qp, .. } = &entry.event
        else {
            return;
        };
        if let EffectData::Irregular { code } = effect
            && code == "psn-mismatch"
            && self.peer_host() == Some(sender)
            && *dest_qp == Some(self.work_request.queue_pair.qp)
        {
            let text = trigger_text(entry, code);
            let certainty = entry.certainty.unwrap_or(Certainty::Inferred);
            self.symptoms.psn_mismatch.get_or_insert_with(|| (text.clone(), certainty));
            self.add(entry.time, format!("{}: {text}.", self.psn(*psn)));
            return;
        }
        let from_here = sender == self.work_request.queue_pair.host;
        let from_peer = self.peer_host() == Some(sender);
        let request = opcode.as_ref().map_or(class == "request", |opcode| is_request(opcode));
        let to_qp = match request {
            true => self.log.peer_address(self.work_request.queue_pair).map(|(_, qp)| qp),
            false => Some(self.work_request.queue_pair.qp),
        };
        if dest_qp.is_some() && *dest_qp != to_qp {
            return;
        }
        if !self.work_request.has_psn(*psn) || !(from_here && request || from_peer && !request) {
            return;
        }
        let name = match class.as_ref() {
            "ack" => "the ACK".to_owned(),
            "receiver-not-ready" => "the RNR NAK".to_owned(),
            class if class.starts_with("nak") => "the NAK".to_owned(),
            _ => opcode.as_deref().map_or_else(
                || if request { "the request" } else { "the response" }.to_owned(),
                opcode_without_service,
            ),
        };
        let packet = format!("{name} {}", self.psn(*psn));
        let to = if request { self.peer_name() } else { self.local_name() };
        let who = entry.trigger.clone().unwrap_or_else(|| cause.to_string());
        let lost = if request { &mut self.symptoms.lost_request } else { &mut self.symptoms.lost_response };
        let text = match effect {
            EffectData::Dropped { .. } => {
                lost.get_or_insert((packet.clone(), who.clone()));
                let lost = match entry.certainty {
                    None | Some(Certainty::Known) => "is lost",
                    Some(Certainty::Inferred) => "was probably lost",
                    Some(Certainty::Ambiguous) => "may be lost",
                };
                format!("{packet} {lost} on its way to {to}: {who}.")
            }
            EffectData::LinkTakenDown { .. } => {
                lost.get_or_insert((packet.clone(), who.clone()));
                format!("{packet} is lost on its way to {to}, and the link with it: {who}.")
            }
            EffectData::Corrupted { .. } | EffectData::Rewritten { .. } => {
                self.symptoms.corrupted.get_or_insert((packet.clone(), who.clone()));
                format!("{packet} is changed on its way to {to}: {who}.")
            }
            EffectData::Delayed { .. } | EffectData::Reordered { .. } => {
                self.symptoms.delayed.get_or_insert((packet.clone(), who.clone()));
                self.symptoms.is_reordered |= matches!(effect, EffectData::Reordered { .. });
                match entry.certainty {
                    Some(_) if !self.symptoms.is_reordered => format!("{packet} is answered late: {who}."),
                    _ => format!("{packet} is held up on its way to {to}: {who}."),
                }
            }
            EffectData::NotCaptured { packets } => {
                let text = format!("{packets} packets from {} on are missing: {who}.", self.psn(*psn));
                return self.add(entry.time, text);
            }
            EffectData::Duplicated { .. } | EffectData::MarkedCe | EffectData::Irregular { .. } => return,
        };
        self.symptoms.certainty = self.symptoms.certainty.or(entry.certainty);
        self.symptoms.link_down |= cause == "link-down" || matches!(effect, EffectData::LinkTakenDown { .. });
        self.add(entry.time, text);
    }

    /// The last time before its end that the queue pair fell into an error state, and what made it.
    fn explain_error_state(&mut self) {
        let (log, place) = (self.log, self.work_request.queue_pair);
        let end = self.work_request.completed.unwrap_or(log.entries.len());
        // A queue pair reports its state after the completion that made it change.
        let until = (end + 16).min(log.entries.len());
        let mut fall = None;
        for index in 0..until {
            if log.entry_hosts[index] != place.host || log.entries[index].event.queue_pair() != Some(place.qp)
            {
                continue;
            }
            if let LogEvent::QpStateChanged { to, reason, .. } = &log.entries[index].event {
                let is_fall = to == "ERR" || to == "SQE";
                if is_fall && (index < end || fall.is_none()) {
                    fall = Some((index, reason.to_string()));
                } else if index < end && !is_fall {
                    fall = None;
                }
            }
        }
        let Some((index, reason)) = fall else { return };
        let culprit = log.work_requests.iter().find(|work| {
            work.queue_pair == place
                && work.failed()
                && work.status.as_deref() != Some("WR_FLUSH_ERR")
                && work.completed.is_some_and(|ended| ended <= end && ended + 4 > index)
                && !std::ptr::eq(*work, self.work_request)
        });
        let entry = &log.entries[index];
        let why = trigger_text(entry, &reason);
        if let Some(culprit) = culprit
            && !culprit.is_receive()
        {
            let before = collect(log, culprit);
            for link in &before.evidence {
                self.entry_index = link.entry;
                self.add(link.time_ns, link.text.clone());
            }
        } else if let Some(rejection) = self.rejection_before(index) {
            self.entry_index = rejection;
            let refused = &log.entries[rejection];
            let own = self.local_name();
            self.add(refused.time, format!("{own} cannot take a packet of {}: {why}.", self.peer_name()));
        }
        let LogEvent::QpStateChanged { from, to, .. } = &entry.event else { return };
        let text = match reason.as_str() {
            "requested" => format!("The program takes {} from {from} to {to}.", self.local_name()),
            _ => format!("{} goes from {from} to {to}: {why}.", self.local_name()),
        };
        self.symptoms.error_transition = Some((reason, why));
        self.entry_index = index;
        self.add(entry.time, text);
    }

    /// The rejection by this queue pair that stands right before a change of its state.
    fn rejection_before(&self, index: usize) -> Option<usize> {
        (index.saturating_sub(8)..index).rev().find(|at| {
            let entry = &self.log.entries[*at];
            self.log.entry_hosts[*at] == self.work_request.queue_pair.host
                && matches!(&entry.event, LogEvent::RequestRejected { qp, .. } if *qp == self.work_request.queue_pair.qp)
        })
    }

    fn add_completion(&mut self, index: usize) {
        self.entry_index = index;
        let entry = &self.log.entries[index];
        let name = self.work_request.title();
        match &entry.event {
            LogEvent::Completed { completion, reason, .. } => {
                let status = &completion.status;
                self.symptoms.completion_reason = (reason.to_string(), trigger_text(entry, reason));
                if reason == "response-gap" || reason == "bad-response" {
                    let (own, why) = (self.local_name(), trigger_text(entry, reason));
                    self.add(entry.time, format!("{own} cannot continue with the answers that come: {why}."));
                }
                let took = match self.work_request.started {
                    Some(started) => {
                        format!(", {} after it was started", duration(entry.time - self.log.time_of(started)))
                    }
                    None => String::new(),
                };
                let completes = match entry.certainty {
                    None => "completes",
                    Some(_) => "must have completed",
                };
                self.add(entry.time, format!("{name} {completes} with {status}{took}."));
            }
            _ if self.log.is_capture => self.add(entry.time, format!("The answer to {name} is captured.")),
            _ => self.add(entry.time, format!("{name} is done; no completion was wanted.")),
        }
        if self.work_request.status.as_deref() == Some("WR_FLUSH_ERR") || !self.work_request.failed() {
            return;
        }
        let later = self.log.work_requests.iter().filter(|work| {
            work.queue_pair == self.work_request.queue_pair
                && work.status.as_deref() == Some("WR_FLUSH_ERR")
                && work.completed.is_some_and(|ended| ended > index)
        });
        let count = later.count();
        let own = self.local_name();
        if count > 0 {
            let what = match count {
                1 => "1 other request of it is".into(),
                _ => format!("{count} other requests of it are"),
            };
            self.add(entry.time, format!("{own} goes to an error state, and {what} flushed."));
        }
    }
}

/// The sentence of an entry, or the name of its reason.
fn trigger_text(entry: &Entry, reason: &str) -> String {
    entry.trigger.clone().unwrap_or_else(|| reason.replace(['-', '/'], " "))
}

fn opcode_without_service(opcode: &str) -> String {
    opcode.split(' ').next_back().unwrap_or(opcode).to_owned()
}

fn is_request(opcode: &str) -> bool {
    !(opcode.contains("RESPONSE") || opcode.contains("ACKNOWLEDGE") || opcode.contains("CNP"))
}
