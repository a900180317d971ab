//! Pitfalls of verbs programming that can be seen in an event stream.
//!
//! [`Linter`] takes entries as they come, keeps little of them, and collects one [`Finding`] per pitfall and
//! place. It warns of what went well this time as well: what is wrong on every card, not only on this one.

use crate::Cast;
use crate::account::{Place, Profile, Roster};
use crate::log::{BufferData, Entry, Header, Narrator, QueueData, What};
use softhca_engine::{Event, Instant};
use softhca_fabric::{CableId, Fault, HostId, Observer};
use softhca_wire::Psn;
use std::collections::BTreeMap;
use std::fmt;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// It may go wrong some day, or on another card.
    Note,
    /// It cost time, or will go wrong.
    Warning,
    /// It made something fail.
    Error,
}

impl Severity {
    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Severity::Note => "note",
            Severity::Warning => "warning",
            Severity::Error => "error",
        }
    }
}

/// A pitfall that the linter knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pitfall {
    /// Its code.
    pub code: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// What it is.
    pub meaning: &'static str,
    /// What to do about it.
    pub fix: &'static str,
}

macro_rules! pitfalls {
    ($($name:ident $code:literal $severity:ident $meaning:literal $fix:literal)*) => {
        $(const $name: Pitfall =
            Pitfall { code: $code, severity: Severity::$severity, meaning: $meaning, fix: $fix };)*

        /// Every pitfall that the linter knows.
        pub const PITFALLS: &[Pitfall] = &[$($name),*];
    };
}

pitfalls! {
    RECEIVE_NOT_POSTED "receive-not-posted" Warning
        "A message came and no receive was posted."
        "Post receives before the peer may send, and keep one posted for each message that can be under way."
    RECEIVE_TOO_SMALL "receive-too-small" Error
        "A message was longer than the receive that it came to."
        "Post receives as large as the largest message; on UD add 40 bytes for the routing header."
    CQ_OVERFLOW "cq-overflow" Error
        "A completion queue had no room for a completion, and every queue pair that uses it was stopped."
        "Make it larger, or poll it more often."
    CQ_TOO_SMALL "cq-too-small" Note
        "A completion queue has less room than the queues that complete to it."
        "Make it at least as large as the send and receive queues of all its queue pairs together, or never have more work outstanding than it has room."
    UNSIGNALLED_FILLS_QUEUE "unsignalled-fills-queue" Warning
        "More unsignalled work requests in a row than the send queue holds."
        "Signal at least one request per queue length and poll its completion: a real card gives places back only then, and posting fails with ENOMEM."
    BUFFER_IN_USE "buffer-in-use" Warning
        "Memory was written while a work request that uses it was under way."
        "Leave a buffer alone until the completion of its request came: what the peer gets, or finds after a retransmission, is undefined before."
    MISSING_RIGHT "missing-right" Error
        "A peer asked for something that the region or the queue pair does not allow."
        "Give the right both to the region (at registration) and to the queue pair (qp_access_flags)."
    BAD_KEY "bad-key" Error
        "A peer used a key that names nothing, or nothing any more."
        "Exchange the key after each registration, and deregister only when nobody uses it."
    MTU_MISMATCH "mtu-mismatch" Error
        "The two ends of a connection have different path MTUs."
        "Exchange the smaller one before going to RTR."
    PSN_MISMATCH "psn-mismatch" Error
        "One end starts at another PSN than the other expects."
        "Exchange the PSN with the queue pair number: sq_psn here is rq_psn there."
    READS_MISMATCH "reads-mismatch" Warning
        "One end may have more reads and atomics outstanding than the other answers."
        "max_rd_atomic must not be larger than max_dest_rd_atomic at the peer."
    RETRIES_HIDE_FAULTS "retries-hide-faults" Warning
        "A queue pair was told to try for ever or as often as it can, and needed that."
        "Set rnr_retry and retry_cnt to what a healthy run needs, so that a fault becomes visible, and cure the fault."
    TIMEOUT_ZERO "timeout-zero" Warning
        "A reliable queue pair has timeout 0: it waits for a dead peer for ever."
        "Set timeout to something like 14 (67 ms)."
    WRONG_QUEUE_KEY "wrong-queue-key" Error
        "A datagram was dropped because its Q_Key is not that of the queue pair."
        "Send with the Q_Key that the receiving queue pair was given."
    SENT_BEFORE_READY "sent-before-ready" Error
        "A packet came to a queue pair that was not in RTR yet."
        "Take the receiver to RTR before the sender may send: exchange a message of your own, or use the connection manager."
}

/// A pitfall that was met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Which.
    pub pitfall: Pitfall,
    /// When first, in nanoseconds since the start.
    pub time_ns: u64,
    /// How often.
    pub times: u64,
    /// What happened, in a sentence.
    pub text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Pitfall { code, severity, fix, .. } = self.pitfall;
        let times = if self.times > 1 { format!(" ({} times)", self.times) } else { String::new() };
        let time = crate::words::duration(self.time_ns);
        write!(f, "{}[{code}]: {}{times}\n  first at {time}\n  fix: {fix}", severity.name(), self.text)
    }
}

/// A request that uses local memory, under way.
#[derive(Debug)]
struct Use {
    id: u64,
    operation: String,
    buffer: BufferData,
    /// First PSN and number of PSNs.
    psns: (u32, u32),
}

impl Use {
    /// Whether the answer is put into its buffer.
    fn writes(&self) -> bool {
        matches!(self.operation.as_str(), "read" | "compare-swap" | "fetch-add")
    }
}

#[derive(Debug, Default)]
struct Watch {
    uses: Vec<Use>,
    unsignalled: u32,
    waits: u32,
    backs: u32,
    went_down: bool,
}

/// How often a queue pair may try again before that is a finding.
const TOLERATED: u32 = 2;

/// Looks for pitfalls.
#[derive(Debug)]
pub struct Linter {
    roster: Roster,
    watches: BTreeMap<Place, Watch>,
    findings: Vec<(String, Finding)>,
}

impl Linter {
    /// A linter for a log that begins with this line.
    pub fn new(header: &Header) -> Linter {
        Linter { roster: Roster::new(header), watches: BTreeMap::new(), findings: Vec::new() }
    }

    /// Everything that was found, in the order in which it was found.
    pub fn findings(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().map(|(_, finding)| finding)
    }

    /// Takes the next entry of the log.
    pub fn push(&mut self, entry: &Entry) {
        let host = self.roster.hear(entry);
        let at = |qp: u32| Place { host, qp };
        let now = entry.time;
        match &entry.what {
            What::Configured { qp, .. } => self.configured(now, at(*qp)),
            What::WorkStarted { qp, id, operation, first_psn, packets, buffer: Some(buffer), .. } => {
                let work = Use {
                    id: *id,
                    operation: operation.to_string(),
                    buffer: *buffer,
                    psns: (*first_psn, *packets),
                };
                self.started(now, at(*qp), work);
            }
            What::WorkCompleted { qp, id, operation, .. } if !operation.starts_with("receive") => {
                self.ended(at(*qp), *id);
                self.watch(at(*qp)).unsignalled = 0;
            }
            What::WorkRetired { qp, id } => {
                self.ended(at(*qp), *id);
                self.unsignalled(now, at(*qp));
            }
            What::MemoryWritten { qp, address, length, psn, .. } => {
                self.written(now, at(*qp), *address, *length, *psn);
            }
            What::RequestRefused { qp, reason, .. } => self.refused(now, at(*qp), reason, entry),
            What::PacketDropped { qp, reason, .. } => self.dropped(now, at(*qp), reason, entry),
            What::RnrWaitStarted { qp, .. } => self.waited(now, at(*qp)),
            What::WentBack { qp, cause, .. } if cause != "receiver-not-ready" => self.went_back(now, at(*qp)),
            What::StateChanged { qp, to, .. } => {
                let watch = self.watch(at(*qp));
                watch.went_down = to == "ERR" || to == "SQE";
                if to == "RESET" {
                    *watch = Watch::default();
                }
            }
            What::AsyncEvent { event, number, .. } if event == "CQ_ERR" => {
                let name = self.roster.host_name(host).to_owned();
                let text = format!("completion queue {:#x} of {name} overflowed", number.unwrap_or(0));
                self.find(now, CQ_OVERFLOW, text);
            }
            _ => {}
        }
    }

    fn watch(&mut self, place: Place) -> &mut Watch {
        self.watches.entry(place).or_default()
    }

    /// Notes a pitfall at a place, or that it was met again.
    fn find(&mut self, time_ns: u64, pitfall: Pitfall, text: String) {
        let key = format!("{} {text}", pitfall.code);
        match self.findings.iter_mut().find(|(known, _)| *known == key) {
            Some((_, finding)) => finding.times += 1,
            None => self.findings.push((key, Finding { pitfall, time_ns, times: 1, text })),
        }
    }

    /// Notes a pitfall that stays as it is, once.
    fn find_once(&mut self, time_ns: u64, pitfall: Pitfall, text: String) {
        let key = format!("{} {text}", pitfall.code);
        if !self.findings.iter().any(|(known, _)| *known == key) {
            self.findings.push((key, Finding { pitfall, time_ns, times: 1, text }));
        }
    }

    fn name(&self, place: Place) -> String {
        self.roster.name(place)
    }

    fn configured(&mut self, now: u64, place: Place) {
        let Some(profile) = self.roster.profile(place).cloned() else { return };
        let name = self.name(place);
        let is_requester = profile.kind == "rc" || profile.kind == "xrc-initiator";
        // What RTS sets is known only then; a first PSN of zero may be a real one.
        if is_requester && profile.patience.is_none() && profile.reads[0] > 0 {
            self.find_once(now, TIMEOUT_ZERO, format!("{name} has timeout 0"));
        }
        self.check_queues(now, place);
        let Some(peer) = self.roster.peer(place) else { return };
        let Some(other) = self.roster.profile(peer).cloned() else { return };
        if other.peer.is_none_or(|(_, qp)| qp != place.qp) {
            return;
        }
        self.compare(now, (place, &profile), (peer, &other));
        self.compare(now, (peer, &other), (place, &profile));
    }

    fn compare(&mut self, now: u64, (a, mine): (Place, &Profile), (b, theirs): (Place, &Profile)) {
        let (name, other) = (self.name(a), self.name(b));
        if a < b && mine.mtu != theirs.mtu {
            let text = format!("{name} has path MTU {}, {other} has {}", mine.mtu, theirs.mtu);
            self.find_once(now, MTU_MISMATCH, text);
        }
        // Of a queue pair that is not in RTS yet, nobody knows what it will send.
        let sends = mine.patience.is_some() || mine.reads[0] > 0 || mine.psns[0] != 0;
        if sends && mine.psns[0] != theirs.psns[1] {
            let text = format!("{name} starts at PSN {}, {other} expects {}", mine.psns[0], theirs.psns[1]);
            self.find_once(now, PSN_MISMATCH, text);
        }
        if mine.reads[0] > theirs.reads[1] && theirs.kind != "xrc-initiator" {
            let text = format!(
                "{name} may have {} reads and atomics outstanding, {other} answers {}",
                mine.reads[0], theirs.reads[1]
            );
            self.find_once(now, READS_MISMATCH, text);
        }
    }

    /// Adds up what can complete to the completion queues of a queue pair.
    fn check_queues(&mut self, now: u64, place: Place) {
        let mut wanted: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
        for other in self.roster.places.iter().filter(|other| other.host == place.host) {
            let Some(profile) = self.roster.profile(*other) else { continue };
            for (queue, slots) in profile.completion_queues.iter().zip(profile.slots) {
                let Some(QueueData { cq, slots: room }) = queue else { continue };
                let entry = wanted.entry(*cq).or_insert((*room, 0));
                entry.1 += slots;
            }
        }
        let Some(profile) = self.roster.profile(place) else { return };
        let mut mine: Vec<u32> = profile.completion_queues.iter().flatten().map(|queue| queue.cq).collect();
        mine.dedup();
        let host = self.roster.host_name(place.host).to_owned();
        for cq in mine {
            let Some((room, needed)) = wanted.get(&cq).copied() else { continue };
            if room < needed {
                let prefix = format!("completion queue {cq:#x} of {host} has room for {room} completions,");
                let text = format!("{prefix} its queues hold {needed} work requests");
                // A queue pair more makes the same finding larger.
                let known = self.findings.iter_mut().find(|(_, finding)| finding.text.starts_with(&prefix));
                match known {
                    Some((_, finding)) => finding.text = text,
                    None => self.find_once(now, CQ_TOO_SMALL, text),
                }
            }
        }
    }

    fn started(&mut self, now: u64, place: Place, work: Use) {
        if work.buffer.length > 0 && work.psns.1 > 0 {
            // A request that writes its buffer clashes with every other use of it.
            let clash = self.uses_at(place.host).find(|(_, other)| {
                overlaps(&other.buffer, work.buffer.address, work.buffer.length)
                    && (other.writes() || work.writes())
            });
            if let Some((other_place, other)) = clash {
                let text = format!(
                    "{} of {} uses memory that {} of {} still uses",
                    title(&work),
                    self.name(place),
                    title(other),
                    self.name(other_place)
                );
                self.find(now, BUFFER_IN_USE, text);
            }
            self.watch(place).uses.push(work);
        }
    }

    fn uses_at(&self, host: usize) -> impl Iterator<Item = (Place, &Use)> {
        let here = self.watches.iter().filter(move |(place, _)| place.host == host);
        here.flat_map(|(place, watch)| watch.uses.iter().map(|used| (*place, used)))
    }

    fn ended(&mut self, place: Place, id: u64) {
        let uses = &mut self.watch(place).uses;
        if let Some(index) = uses.iter().position(|used| used.id == id) {
            uses.remove(index);
        }
    }

    fn unsignalled(&mut self, now: u64, place: Place) {
        let slots = self.roster.profile(place).map_or(u32::MAX, |profile| profile.slots[0]);
        let watch = self.watch(place);
        watch.unsignalled += 1;
        if watch.unsignalled == slots.saturating_add(1) {
            let text = format!(
                "{} was given more than {slots} unsignalled requests in a row, its send queue holds {slots}",
                self.name(place)
            );
            self.find(now, UNSIGNALLED_FILLS_QUEUE, text);
        }
    }

    fn written(&mut self, now: u64, writer: Place, address: u64, length: u32, psn: u32) {
        let clash = self.uses_at(writer.host).find(|(place, used)| {
            // Its own answer is what a READ waits for.
            let own = *place == writer
                && used.writes()
                && Psn::new(psn).is_within(Psn::new(used.psns.0), used.psns.1);
            overlaps(&used.buffer, address, length) && !own
        });
        if let Some((place, used)) = clash {
            let text = format!(
                "the buffer of {} of {} was written by what came to {} before it completed",
                title(used),
                self.name(place),
                self.name(writer)
            );
            self.find(now, BUFFER_IN_USE, text);
        }
    }

    fn refused(&mut self, now: u64, place: Place, reason: &str, entry: &Entry) {
        let (name, why) = (self.name(place), entry.trigger.clone().unwrap_or_default());
        match reason {
            "not-ready" => {
                self.find(
                    now,
                    RECEIVE_NOT_POSTED,
                    format!("{name} had no receive posted when a message came"),
                );
            }
            "receive-too-small" => self.find(now, RECEIVE_TOO_SMALL, format!("{name}: {why}")),
            "payload-length" => self.find(now, MTU_MISMATCH, format!("{name}: {why}")),
            "too-many-reads" => self.find(now, READS_MISMATCH, format!("{name}: {why}")),
            _ => self.denied(now, &name, reason, &why),
        }
    }

    fn dropped(&mut self, now: u64, place: Place, reason: &str, entry: &Entry) {
        let (name, why) = (self.name(place), entry.trigger.clone().unwrap_or_default());
        match reason {
            "no-receive-posted" => {
                let text = format!("{name} had no receive posted when a message came, which is lost");
                self.find(now, RECEIVE_NOT_POSTED, text);
            }
            "wrong-queue-key" => {
                self.find(now, WRONG_QUEUE_KEY, format!("{name} dropped a datagram with another Q_Key"));
            }
            "state-does-not-receive/reset" | "state-does-not-receive/init"
                if !self.watch(place).went_down =>
            {
                self.find(now, SENT_BEFORE_READY, format!("a packet came to {name}, but {why}"));
            }
            _ => self.denied(now, &name, reason, &why),
        }
    }

    fn denied(&mut self, now: u64, name: &str, reason: &str, why: &str) {
        let Some(case) = reason.strip_prefix("access/").or(reason.strip_prefix("unreliable-access/")) else {
            return;
        };
        match case {
            "right" => self.find(now, MISSING_RIGHT, format!("{name}: {why}")),
            "unknown-key" | "stale-key" | "invalidated" => {
                self.find(now, BAD_KEY, format!("{name}: {why}"));
            }
            _ => {}
        }
    }

    fn waited(&mut self, now: u64, place: Place) {
        self.watch(place).waits += 1;
        let waits = self.watch(place).waits;
        let for_ever = self.roster.profile(place).is_some_and(|profile| profile.rnr_retry == 7);
        if for_ever && waits > TOLERATED {
            let text = format!(
                "{} has rnr_retry 7 (for ever) and waited for a receiver again and again",
                self.name(place)
            );
            self.find(now, RETRIES_HIDE_FAULTS, text);
        }
    }

    fn went_back(&mut self, now: u64, place: Place) {
        self.watch(place).backs += 1;
        let backs = self.watch(place).backs;
        let most = self.roster.profile(place).is_some_and(|profile| profile.retry_cnt == 7);
        if most && backs > TOLERATED {
            let text = format!("{} has retry_cnt 7, the most, and sent again and again", self.name(place));
            self.find(now, RETRIES_HIDE_FAULTS, text);
        }
    }
}

fn title(work: &Use) -> String {
    format!("{} {}", work.operation.to_uppercase().replace('-', " "), work.id)
}

fn overlaps(buffer: &BufferData, address: u64, length: u32) -> bool {
    let end = |address: u64, length: u32| address.saturating_add(u64::from(length));
    buffer.address < end(address, length) && address < end(buffer.address, buffer.length)
}

/// A linter that hears a world itself.
#[derive(Debug)]
pub struct LiveLinter {
    narrator: Narrator,
    linter: Linter,
}

impl LiveLinter {
    /// A linter for the hosts of this cast.
    pub fn new(cast: Cast) -> LiveLinter {
        let narrator = Narrator::new(cast);
        let linter = Linter::new(&narrator.header(""));
        LiveLinter { narrator, linter }
    }

    /// A card told an event.
    pub fn card(&mut self, now: Instant, host: HostId, event: &Event) {
        self.linter.push(&self.narrator.card(now, host, event));
    }

    /// What was found so far.
    pub fn linter(&self) -> &Linter {
        &self.linter
    }
}

impl Observer for LiveLinter {
    fn card(&mut self, now: Instant, host: HostId, event: &Event) {
        LiveLinter::card(self, now, host, event);
    }

    fn fault(&mut self, now: Instant, cable: CableId, fault: &Fault) {
        self.linter.push(&self.narrator.fault(now, cable, fault));
    }
}
