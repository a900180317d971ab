//! What the log says happened to a work request and its packets, in order.

use super::Link;
use crate::account::{Account, Place, Work};
use crate::log::{Change, Entry, What};
use crate::words::{duration, times};
use std::collections::BTreeMap;

/// What was found out on the way; the verdict needs it.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub chain: Vec<Link>,
    /// A request packet that was lost: its words, and who lost it.
    pub lost_request: Option<(String, String)>,
    /// An answer that was lost.
    pub lost_answer: Option<(String, String)>,
    /// A packet that a rule changed so that it was not taken.
    pub damaged: Option<(String, String)>,
    /// A packet that was held up.
    pub held_up: Option<(String, String)>,
    /// A link was down.
    pub link_down: bool,
    /// Packets that the peer did not take: reason and sentence.
    pub not_taken: Option<(String, String)>,
    /// The peer's refusal: reason and sentence.
    pub refusal: Option<(String, String)>,
    /// How often the requester waited, went back, ran into its timer.
    pub waits: u32,
    pub wait_ns: u64,
    pub backs: u32,
    pub timeouts: u32,
    /// Whether the peer's card heard anything of it.
    pub heard: bool,
    /// A duplicate was answered.
    pub duplicates: u32,
    /// The reason and sentence of the completion.
    pub reason: (String, String),
    /// Why its queue pair went to an error state.
    pub fell: Option<(String, String)>,
}

/// Whether something held a work request up that the log tells of.
pub(super) fn is_troubled(account: &Account, work: &Work) -> bool {
    if work.psns.is_none() {
        return false;
    }
    let findings = follow(account, work);
    findings.waits + findings.backs + findings.timeouts > 0
        || findings.lost_request.is_some()
        || findings.lost_answer.is_some()
        || findings.held_up.is_some()
}

/// Follows a work request through the log.
pub(super) fn follow(account: &Account, work: &Work) -> Findings {
    let mut chain = Chain::new(account, work);
    if work.status.as_deref() == Some("flushed") || work.is_receive() {
        // What made the queue pair fail lies before, and need not concern this work request's packets.
        chain.tell_of_the_fall();
    } else {
        for index in account.span(work) {
            chain.entry(index);
        }
    }
    if let Some(ended) = work.ended {
        chain.ending(ended);
    }
    chain.finish()
}

struct Chain<'a> {
    account: &'a Account,
    work: &'a Work,
    peer: Option<Place>,
    /// The entry that is being told.
    at: usize,
    findings: Findings,
    /// Where each sentence stands in the chain, how often it was said, and when last.
    said: BTreeMap<String, (usize, u32, u64)>,
}

impl<'a> Chain<'a> {
    fn new(account: &'a Account, work: &'a Work) -> Chain<'a> {
        let peer = account.peer(work.place);
        Chain { account, work, peer, at: 0, findings: Findings::default(), said: BTreeMap::new() }
    }

    /// Says something; what was said before is only counted.
    fn say(&mut self, time_ns: u64, text: String) {
        let mut letters = text.chars();
        // Names of hosts stay as they are.
        let text = match letters.next() {
            Some('t') if text.starts_with("the ") => format!("T{}", letters.as_str()),
            _ => text,
        };
        if let Some((_, count, last)) = self.said.get_mut(&text) {
            (*count, *last) = (*count + 1, time_ns);
            return;
        }
        self.said.insert(text.clone(), (self.findings.chain.len(), 1, time_ns));
        self.findings.chain.push(Link { entry: self.at, time_ns, text });
    }

    fn finish(mut self) -> Findings {
        for (place, count, last) in self.said.values() {
            if *count > 1 {
                let link = &mut self.findings.chain[*place];
                link.text +=
                    &format!(" This happened {}, the last time at {}.", times(*count), duration(*last));
            }
        }
        self.findings
    }

    fn own(&self) -> String {
        self.account.name(self.work.place)
    }

    fn other(&self) -> String {
        self.account.peer_name(self.work.place)
    }

    fn psn(&self, psn: u32) -> String {
        self.account.psn(self.work.place, psn)
    }

    fn entry(&mut self, index: usize) {
        self.at = index;
        let account = self.account;
        let entry = &account.entries[index];
        let here = Place { host: account.at[index], qp: entry.what.queue_pair().unwrap_or(0) };
        if let What::Fault { .. } = entry.what {
            return self.fault(entry, here.host);
        }
        if here == self.work.place {
            self.at_requester(entry);
        } else if Some(here) == self.peer {
            self.at_responder(entry);
        } else if let What::PacketDropped { .. } = entry.what
            && self.peer_host() == Some(here.host)
        {
            self.dropped(entry);
        }
    }

    fn peer_host(&self) -> Option<usize> {
        let (address, _) = self.account.peer_address(self.work.place)?;
        self.account.hosts.iter().position(|(_, known)| *known == Some(address))
    }

    fn at_requester(&mut self, entry: &Entry) {
        let (own, other) = (self.own(), self.other());
        match &entry.what {
            What::WorkStarted { id, bytes, .. } if *id == self.work.id => {
                let size = match self.work.psns {
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
                let to = if self.work.psns.is_some() { format!(" to {other}") } else { String::new() };
                self.say(entry.time, format!("{own} starts {}{to}{size}.", self.work.name()));
            }
            What::RnrWaitStarted { psn, until, .. } if self.work.has_psn(*psn) => {
                let wait = until.saturating_sub(entry.time);
                self.findings.waits += 1;
                self.findings.wait_ns += wait;
                let psn = self.psn(*psn);
                let text = format!("{own} waits {} as the NAK says, then sends {psn} again.", duration(wait));
                self.say(entry.time, text);
            }
            What::AckTimedOut { oldest_psn, .. } if self.work.has_psn(*oldest_psn) => {
                self.findings.timeouts += 1;
                let psn = self.psn(*oldest_psn);
                let after = match self.account.profile(self.work.place).and_then(|profile| profile.patience) {
                    Some(patience) => format!(" in {}", duration(patience)),
                    None => String::new(),
                };
                self.say(
                    entry.time,
                    format!("The ack timer of {own} runs out: no answer to {psn} came{after}."),
                );
            }
            What::WentBack { to_psn, cause, .. } if self.work.has_psn(*to_psn) => {
                if cause == "receiver-not-ready" {
                    return;
                }
                self.findings.backs += 1;
                let psn = self.psn(*to_psn);
                let why = match cause.as_ref() {
                    "sequence-nak" => "because of the NAK",
                    "response-gap" => "because a response is missing",
                    _ => "because nobody answered",
                };
                self.say(
                    entry.time,
                    format!("{own} goes back to {psn} and sends everything from there again, {why}."),
                );
            }
            What::PacketDropped { packet: Some(packet), reason, .. } if self.work.has_psn(packet.psn) => {
                let (psn, why) = (self.psn(packet.psn), trigger(entry, reason));
                let name = short(&packet.opcode);
                self.say(entry.time, format!("{own} does not take the answer {name} {psn}: {why}."));
            }
            _ => {}
        }
    }

    fn at_responder(&mut self, entry: &Entry) {
        let other = self.other();
        match &entry.what {
            What::PacketReceived { packet, .. }
                if self.work.has_psn(packet.psn) && is_request(&packet.opcode) =>
            {
                self.findings.heard = true;
            }
            What::RequestRefused { psn, missing_psn, reason, .. }
                if self.work.has_psn(missing_psn.unwrap_or(*psn)) =>
            {
                let why = trigger(entry, reason);
                let text = match (reason.as_ref(), missing_psn) {
                    (_, Some(missing)) => {
                        let (missing, got) = (self.psn(*missing), self.psn(*psn));
                        format!(
                            "{other} gets {got} while it waits for {missing}: it knows now that a packet is missing, and answers with a NAK, \"sequence error\"."
                        )
                    }
                    ("not-ready", _) => {
                        let psn = self.psn(*psn);
                        format!(
                            "{other} has no receive posted for {psn}: it answers with an RNR NAK, \"receiver not ready\"."
                        )
                    }
                    _ => format!("{other} refuses {} with a NAK: {why}.", self.psn(*psn)),
                };
                self.findings.refusal = Some((reason.to_string(), why));
                self.say(entry.time, text);
            }
            What::PacketDropped { .. } => self.dropped(entry),
            What::DuplicateAnswered { psn, .. } if self.work.has_psn(*psn) => {
                self.findings.duplicates += 1;
                let psn = self.psn(*psn);
                self.say(
                    entry.time,
                    format!("{other} had done {psn} already: it answers again and does not do it twice."),
                );
            }
            What::StateChanged { from, to, reason, .. } if to == "ERR" && reason != "asked" => {
                self.say(
                    entry.time,
                    format!("{other} goes from {from} to {to}: it takes nothing more from this connection."),
                );
            }
            What::StateChanged { from, to, .. } if to == "ERR" || to == "RESET" => {
                self.say(
                    entry.time,
                    format!("The program at {other} takes its queue pair from {from} to {to}."),
                );
            }
            _ => {}
        }
    }

    fn dropped(&mut self, entry: &Entry) {
        let What::PacketDropped { packet, reason, .. } = &entry.what else { return };
        let host = self.peer_host().map(|host| self.account.host_name(host).to_owned()).unwrap_or_default();
        let why = trigger(entry, reason);
        match packet {
            Some(packet) if self.work.has_psn(packet.psn) && is_request(&packet.opcode) => {
                self.findings.heard = true;
                // After a refusal that is what must follow; only what comes before it is a cause.
                if self.findings.refusal.is_none() {
                    self.findings.not_taken.get_or_insert((reason.to_string(), why.clone()));
                }
                let (psn, name) = (self.psn(packet.psn), short(&packet.opcode));
                self.say(entry.time, format!("{host} does not take {name} {psn}: {why}."));
            }
            None if reason == "bad-icrc" => {
                self.findings.not_taken.get_or_insert((reason.to_string(), why.clone()));
                self.say(entry.time, format!("{host} drops a packet that it cannot trust: {why}."));
            }
            _ => {}
        }
    }

    fn fault(&mut self, entry: &Entry, sender: usize) {
        let What::Fault { cause, effect, class, opcode, psn: Some(psn), .. } = &entry.what else { return };
        let from_here = sender == self.work.place.host;
        let from_peer = self.peer_host() == Some(sender);
        let request = opcode.as_ref().is_some_and(|opcode| is_request(opcode));
        if !self.work.has_psn(*psn) || !(from_here && request || from_peer && !request) {
            return;
        }
        let name = match class.as_ref() {
            "ack" => "the ACK".to_owned(),
            "receiver-not-ready" => "the RNR NAK".to_owned(),
            class if class.starts_with("nak") => "the NAK".to_owned(),
            _ => short(opcode.as_deref().unwrap_or("the packet")),
        };
        let packet = format!("{name} {}", self.psn(*psn));
        let to = if request { self.other() } else { self.own() };
        let who = entry.trigger.clone().unwrap_or_else(|| cause.to_string());
        let lost = if request { &mut self.findings.lost_request } else { &mut self.findings.lost_answer };
        let text = match effect {
            Change::Dropped { .. } => {
                lost.get_or_insert((packet.clone(), who.clone()));
                format!("{packet} is lost on its way to {to}: {who}.")
            }
            Change::LinkCut { .. } => {
                lost.get_or_insert((packet.clone(), who.clone()));
                format!("{packet} is lost on its way to {to}, and the link with it: {who}.")
            }
            Change::Corrupted { .. } | Change::Rewritten { .. } => {
                self.findings.damaged.get_or_insert((packet.clone(), who.clone()));
                format!("{packet} is changed on its way to {to}: {who}.")
            }
            Change::Delayed { .. } | Change::HeldBack { .. } => {
                self.findings.held_up.get_or_insert((packet.clone(), who.clone()));
                format!("{packet} is held up on its way to {to}: {who}.")
            }
            Change::Duplicated { .. } | Change::MarkedCe => return,
        };
        self.findings.link_down |= cause == "link-down" || matches!(effect, Change::LinkCut { .. });
        self.say(entry.time, text);
    }

    /// The last time before its end that the queue pair fell into an error state, and what made it.
    fn tell_of_the_fall(&mut self) {
        let (account, place) = (self.account, self.work.place);
        let end = self.work.ended.unwrap_or(account.entries.len());
        // A queue pair tells its state after the completion that made it change.
        let until = (end + 16).min(account.entries.len());
        let mut fall = None;
        for index in 0..until {
            if account.at[index] != place.host || account.entries[index].what.queue_pair() != Some(place.qp) {
                continue;
            }
            if let What::StateChanged { to, reason, .. } = &account.entries[index].what {
                let is_fall = to == "ERR" || to == "SQE";
                if is_fall && (index < end || fall.is_none()) {
                    fall = Some((index, reason.to_string()));
                } else if index < end && !is_fall {
                    fall = None;
                }
            }
        }
        let Some((index, reason)) = fall else { return };
        let culprit = account.works.iter().find(|work| {
            work.place == place
                && work.failed()
                && work.status.as_deref() != Some("flushed")
                && work.ended.is_some_and(|ended| ended <= end && ended + 4 > index)
                && !std::ptr::eq(*work, self.work)
        });
        let entry = &account.entries[index];
        let why = trigger(entry, &reason);
        if let Some(culprit) = culprit
            && !culprit.is_receive()
        {
            let before = follow(account, culprit);
            for link in &before.chain {
                self.at = link.entry;
                self.say(link.time_ns, link.text.clone());
            }
        } else if let Some(refusal) = self.refusal_before(index) {
            self.at = refusal;
            let refused = &account.entries[refusal];
            let own = self.own();
            self.say(refused.time, format!("{own} cannot take a packet of {}: {why}.", self.other()));
        }
        let What::StateChanged { from, to, .. } = &entry.what else { return };
        let text = match reason.as_str() {
            "asked" => format!("The program takes {} from {from} to {to}.", self.own()),
            _ => format!("{} goes from {from} to {to}: {why}.", self.own()),
        };
        self.findings.fell = Some((reason, why));
        self.at = index;
        self.say(entry.time, text);
    }

    /// The refusal of this queue pair that stands right before a change of its state.
    fn refusal_before(&self, index: usize) -> Option<usize> {
        (index.saturating_sub(8)..index).rev().find(|at| {
            let entry = &self.account.entries[*at];
            self.account.at[*at] == self.work.place.host
                && matches!(&entry.what, What::RequestRefused { qp, .. } if *qp == self.work.place.qp)
        })
    }

    fn ending(&mut self, index: usize) {
        self.at = index;
        let entry = &self.account.entries[index];
        let name = self.work.name();
        match &entry.what {
            What::WorkCompleted { status, reason, .. } => {
                self.findings.reason = (reason.to_string(), trigger(entry, reason));
                if reason == "response-gap" || reason == "bad-response" {
                    let (own, why) = (self.own(), trigger(entry, reason));
                    self.say(entry.time, format!("{own} cannot go on with the answers that come: {why}."));
                }
                let verbs = status_of_verbs(status);
                let took = match self.work.started {
                    Some(started) => {
                        format!(
                            ", {} after it was started",
                            duration(entry.time - self.account.time(started))
                        )
                    }
                    None => String::new(),
                };
                self.say(entry.time, format!("{name} completes with {status} ({verbs}){took}."));
            }
            _ => self.say(entry.time, format!("{name} is done; no completion was wanted.")),
        }
        if self.work.status.as_deref() == Some("flushed") || !self.work.failed() {
            return;
        }
        let later = self.account.works.iter().filter(|work| {
            work.place == self.work.place
                && work.status.as_deref() == Some("flushed")
                && work.ended.is_some_and(|ended| ended > index)
        });
        let count = later.count();
        let own = self.own();
        if count > 0 {
            let what = match count {
                1 => "1 other request of it is".into(),
                _ => format!("{count} other requests of it are"),
            };
            self.say(entry.time, format!("{own} goes to an error state, and {what} flushed."));
        }
    }
}

/// The sentence of an entry, or the name of its reason.
fn trigger(entry: &Entry, reason: &str) -> String {
    entry.trigger.clone().unwrap_or_else(|| reason.replace(['-', '/'], " "))
}

/// An opcode without its service.
fn short(opcode: &str) -> String {
    opcode.split(' ').next_back().unwrap_or(opcode).to_owned()
}

fn is_request(opcode: &str) -> bool {
    !(opcode.contains("RESPONSE") || opcode.contains("ACKNOWLEDGE") || opcode.contains("CNP"))
}

/// What `enum ibv_wc_status` calls a status.
fn status_of_verbs(status: &str) -> &'static str {
    match status {
        "success" => "IBV_WC_SUCCESS",
        "local-length" => "IBV_WC_LOC_LEN_ERR",
        "local-qp-operation" => "IBV_WC_LOC_QP_OP_ERR",
        "local-protection" => "IBV_WC_LOC_PROT_ERR",
        "flushed" => "IBV_WC_WR_FLUSH_ERR",
        "window-bind" => "IBV_WC_MW_BIND_ERR",
        "bad-response" => "IBV_WC_BAD_RESP_ERR",
        "local-access" => "IBV_WC_LOC_ACCESS_ERR",
        "remote-invalid-request" => "IBV_WC_REM_INV_REQ_ERR",
        "remote-access" => "IBV_WC_REM_ACCESS_ERR",
        "remote-operation" => "IBV_WC_REM_OP_ERR",
        "retry-exceeded" => "IBV_WC_RETRY_EXC_ERR",
        "rnr-retry-exceeded" => "IBV_WC_RNR_RETRY_EXC_ERR",
        "remote-abort" => "IBV_WC_REM_ABORT_ERR",
        "fatal" => "IBV_WC_FATAL_ERR",
        _ => "IBV_WC_GENERAL_ERR",
    }
}
