//! Pitfalls of verbs programming that can be seen in an event stream.
//!
//! [`Linter`] reads entries in order, keeps little of them, and collects one [`Finding`] per pitfall and object. It also
//! warns of pitfalls that had no effect in this run but are errors on other cards.

use crate::log::{ConfigurationData, Entry, Header, LogEvent, SgeData};
use crate::parsed_log::{QueuePairId, QueuePairTable};
use serde::ser::{Serialize, SerializeStruct, Serializer};
use softhca_wire::Psn;
use std::collections::BTreeMap;
use std::fmt;

softhca_wire::named_enum! {
    /// How bad it is.
    pub enum Severity {
        /// It may go wrong some day, or on another card.
        Note => "note",
        /// It cost time, or will go wrong.
        Warning => "warning",
        /// It made something fail.
        Error => "error",
    }
}

/// A pitfall that the linter knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pitfall {
    pub code: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// The pitfall.
    pub description: &'static str,
    /// The remedy.
    pub fix: &'static str,
}

macro_rules! pitfalls {
    ($($name:ident $code:literal $severity:ident $meaning:literal $fix:literal)*) => {
        $(const $name: Pitfall =
            Pitfall { code: $code, severity: Severity::$severity, description: $meaning, fix: $fix };)*

        /// Every pitfall that the linter knows.
        pub const PITFALLS: &[Pitfall] = &[$($name),*];
    };
}

pitfalls! {
    RECEIVE_NOT_POSTED "receive-not-posted" Warning
        "A message arrived and no receive was posted."
        "Post receives before the peer may send, and keep one posted for each message that can be in flight."
    RECEIVE_TOO_SMALL "receive-too-small" Error
        "A message was longer than its receive."
        "Post receives as large as the largest message; on UD add 40 bytes for the routing header."
    CQ_OVERFLOW "cq-overflow" Error
        "A completion queue overflowed, and every queue pair that uses it went to the error state."
        "Make it larger, or poll it more often."
    CQ_TOO_SMALL "cq-too-small" Note
        "A completion queue is smaller than the queues that complete to it."
        "Make it at least as large as the send and receive queues of all its queue pairs together, or never have more work outstanding than it can hold."
    UNSIGNALED_SEND_QUEUE_FULL "unsignaled-send-queue-full" Warning
        "More unsignaled work requests in a row than the send queue holds."
        "Signal at least one request per queue length and poll its completion: a real device frees send queue entries only then, and posting fails with ENOMEM."
    BUFFER_IN_USE "buffer-in-use" Warning
        "Memory was written while a work request that uses it was outstanding."
        "Do not use a buffer again before its request completes: until then, its contents are undefined, here and at the peer."
    DEREGISTERED_IN_USE "deregistered-in-use" Error
        "A memory region was deregistered before the completion of a work request that uses it was polled."
        "Poll the completion before ibv_dereg_mr: whether the work request succeeds otherwise depends on the moment."
    MEMORY_GONE "memory-gone" Error
        "Memory was unmapped while a region of it was registered, and then used."
        "Deregister the region before its memory is freed, and free it after the last completion."
    ADDRESS_HANDLE_GONE "address-handle-gone" Error
        "A datagram has an address handle that does not exist, or does not any more."
        "Destroy an address handle after the last work request that uses it has completed."
    MISSING_ACCESS_FLAG "missing-access-flag" Error
        "The region or the queue pair does not allow the access of a peer."
        "Set the access flag both of the region (at registration) and of the queue pair (qp_access_flags)."
    UNKNOWN_KEY "unknown-key" Error
        "A peer used a key that no memory region has, or has any more."
        "Exchange the key after each registration, and deregister only when no peer uses it."
    MTU_MISMATCH "mtu-mismatch" Error
        "The two ends of a connection have different path MTUs."
        "Exchange the smaller one before going to RTR."
    PSN_MISMATCH "psn-mismatch" Error
        "One end starts at a PSN that the other does not expect."
        "Exchange the PSN with the queue pair number: sq_psn here is rq_psn there."
    MAX_RD_ATOMIC_MISMATCH "max-rd-atomic-mismatch" Warning
        "One end may have more READs and atomics outstanding than the other accepts."
        "max_rd_atomic must not be larger than max_dest_rd_atomic at the peer."
    RETRIES_HIDE_FAULTS "retries-hide-faults" Warning
        "A queue pair with unlimited or maximum retries used them."
        "Set rnr_retry and retry_cnt to what a healthy run needs, so that a fault becomes visible, and remove the fault."
    TIMEOUT_ZERO "timeout-zero" Warning
        "A reliable queue pair has timeout 0: it waits for a dead peer without end."
        "Set timeout to something like 14 (67 ms)."
    WAITS_FOR_EVER "waits-for-ever" Error
        "A requester with timeout 0 waits for a queue pair in ERR, which does not answer."
        "Set timeout to something like 14 (67 ms): the specification demands that a queue pair in ERR drops requests silently, so only a timer ends the wait."
    WRONG_QKEY "wrong-qkey" Error
        "A datagram was dropped because its Q_Key is not that of the queue pair."
        "Send with the Q_Key of the receiving queue pair."
    SENT_BEFORE_READY "sent-before-ready" Error
        "A packet arrived at a queue pair that was not in RTR yet."
        "Take the receiver to RTR before the sender may send: exchange a message of your own, or use the connection manager."
}

/// A pitfall that was met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub pitfall: Pitfall,
    /// When first, in nanoseconds since the start.
    pub time_ns: u64,
    /// How often.
    pub count: u64,
    /// The finding in a sentence.
    pub text: String,
}

impl Serialize for Finding {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Pitfall { code, severity, fix, .. } = self.pitfall;
        let mut object = serializer.serialize_struct("Finding", 6)?;
        object.serialize_field("code", code)?;
        object.serialize_field("severity", severity.name())?;
        object.serialize_field("time_ns", &self.time_ns)?;
        object.serialize_field("times", &self.count)?;
        object.serialize_field("text", &self.text)?;
        object.serialize_field("fix", fix)?;
        object.end()
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Pitfall { code, severity, fix, .. } = self.pitfall;
        let times = if self.count > 1 { format!(" ({} times)", self.count) } else { String::new() };
        let time = crate::describe::duration(self.time_ns);
        write!(f, "{}[{code}]: {}{times}\n  first at {time}\n  fix: {fix}", severity.name(), self.text)
    }
}

/// A request that uses local memory, under way.
#[derive(Debug)]
struct BufferUse {
    wr_id: u64,
    operation: String,
    sge: SgeData,
    /// First PSN and number of PSNs.
    psns: (u32, u32),
}

impl BufferUse {
    /// Whether the answer is put into its buffer.
    fn writes(&self) -> bool {
        matches!(self.operation.as_str(), "read" | "compare-swap" | "fetch-add")
    }
}

#[derive(Debug, Default)]
struct QueuePairHistory {
    buffers_in_use: Vec<BufferUse>,
    unsignaled: u32,
    rnr_waits: u32,
    retransmissions: u32,
    entered_error: bool,
}

/// How often a queue pair may try again before that is a finding.
const TOLERATED_RETRIES: u32 = 2;

/// Looks for pitfalls.
#[derive(Debug)]
pub struct Linter {
    queue_pairs: QueuePairTable,
    histories: BTreeMap<QueuePairId, QueuePairHistory>,
    findings: Vec<Finding>,
    /// Buffers of a host that were used twice at once, and their findings.
    clashes: BTreeMap<(usize, u64), usize>,
}

impl Linter {
    /// A linter for a log that begins with this line.
    pub fn new(header: &Header) -> Linter {
        let queue_pairs = QueuePairTable::new(header);
        Linter { queue_pairs, histories: BTreeMap::new(), findings: Vec::new(), clashes: BTreeMap::new() }
    }

    /// Everything that was found, in the order in which it was found.
    pub fn findings(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter()
    }

    /// The numbers of errors, warnings and notes.
    pub fn counts(&self) -> [usize; 3] {
        [Severity::Error, Severity::Warning, Severity::Note].map(|severity| {
            self.findings.iter().filter(|finding| finding.pitfall.severity == severity).count()
        })
    }

    /// Takes the next entry of the log.
    pub fn push(&mut self, entry: &Entry) {
        let host = self.queue_pairs.observe(entry);
        let at = |qp: u32| QueuePairId { host, qp };
        let now = entry.time;
        match &entry.event {
            LogEvent::QpConfigured { qp, .. } => self.check_attributes(now, at(*qp)),
            LogEvent::WqeFetched {
                qp,
                wr_id: id,
                operation,
                first_psn,
                packets,
                first_sge: Some(buffer),
                ..
            } => {
                let work = BufferUse {
                    wr_id: *id,
                    operation: operation.to_string(),
                    sge: buffer.clone(),
                    psns: (*first_psn, *packets),
                };
                self.work_started(now, at(*qp), work);
            }
            LogEvent::DeregisteredInUse { qp, wr_id, key, completed } => {
                let name = self.name(at(*qp));
                let text = match completed {
                    true => format!(
                        "key {key:#x} was deregistered before the completion of work request {wr_id} of {name} was polled"
                    ),
                    false => {
                        format!("key {key:#x} was deregistered while work request {wr_id} of {name} uses it")
                    }
                };
                self.report(now, DEREGISTERED_IN_USE, text);
            }
            LogEvent::Completed { completion, .. } if !completion.operation.starts_with("receive") => {
                self.work_ended(at(completion.qp), completion.wr_id);
                self.history(at(completion.qp)).unsignaled = 0;
                self.completed(now, at(completion.qp), &entry.event);
            }
            LogEvent::UnsignaledCompleted { qp, wr_id: id } => {
                self.work_ended(at(*qp), *id);
                self.work_retired(now, at(*qp));
            }
            LogEvent::MemoryWritten { qp, address, length, psn, .. } => {
                self.memory_written(now, at(*qp), *address, *length, *psn);
            }
            LogEvent::RequestRejected { qp, error, .. } => self.request_rejected(now, at(*qp), error, entry),
            LogEvent::PacketDropped { qp, reason, .. } => self.packet_dropped(now, at(*qp), reason, entry),
            LogEvent::RnrWaitStarted { qp, .. } => self.rnr_wait_started(now, at(*qp)),
            LogEvent::Retransmitted { qp, cause, .. } if cause != "receiver-not-ready" => {
                self.retransmitted(now, at(*qp))
            }
            LogEvent::QpStateChanged { qp, to, .. } => {
                let watch = self.history(at(*qp));
                watch.entered_error = to == "ERR" || to == "SQE";
                if to == "RESET" {
                    *watch = QueuePairHistory::default();
                }
            }
            LogEvent::AsyncEventRaised { event, element: number, .. } if event == "CQ_ERR" => {
                let name = self.queue_pairs.host_name(host).to_owned();
                let text = format!("completion queue {:#x} of {name} overflowed", number.unwrap_or(0));
                self.report(now, CQ_OVERFLOW, text);
            }
            _ => {}
        }
    }

    fn history(&mut self, place: QueuePairId) -> &mut QueuePairHistory {
        self.histories.entry(place).or_default()
    }

    /// Adds a finding, or counts it again.
    fn report(&mut self, time_ns: u64, pitfall: Pitfall, text: String) {
        if let Some(known) = self.report_once(time_ns, pitfall, text) {
            known.count += 1;
        }
    }

    /// Adds a finding. Returns the earlier one if the same was found before.
    fn report_once(&mut self, time_ns: u64, pitfall: Pitfall, text: String) -> Option<&mut Finding> {
        let is_same = |known: &Finding| known.pitfall.code == pitfall.code && known.text == text;
        match self.findings.iter().position(is_same) {
            Some(index) => Some(&mut self.findings[index]),
            None => {
                self.findings.push(Finding { pitfall, time_ns, count: 1, text });
                None
            }
        }
    }

    fn name(&self, place: QueuePairId) -> String {
        self.queue_pairs.name(place)
    }

    fn check_attributes(&mut self, now: u64, place: QueuePairId) {
        let Some(profile) = self.queue_pairs.attributes(place).cloned() else { return };
        let name = self.name(place);
        let is_requester = profile.qp_type == "rc" || profile.qp_type == "xrc-initiator";
        // The attributes that RTS sets are known only then. A first PSN of zero may be a real one.
        if is_requester && profile.ack_timeout.is_none() && profile.max_rd_atomic > 0 {
            self.report_once(now, TIMEOUT_ZERO, format!("{name} has timeout 0"));
        }
        self.check_cq_capacity(now, place);
        let Some(peer) = self.queue_pairs.peer(place) else { return };
        let Some(other) = self.queue_pairs.attributes(peer).cloned() else { return };
        if other.dest_qp != Some(place.qp) {
            return;
        }
        self.compare_attributes(now, (place, &profile), (peer, &other));
        self.compare_attributes(now, (peer, &other), (place, &profile));
    }

    fn compare_attributes(
        &mut self,
        now: u64,
        (a, mine): (QueuePairId, &ConfigurationData),
        (b, theirs): (QueuePairId, &ConfigurationData),
    ) {
        let (name, other) = (self.name(a), self.name(b));
        if a < b && mine.path_mtu != theirs.path_mtu {
            let text = format!("{name} has path MTU {}, {other} has {}", mine.path_mtu, theirs.path_mtu);
            self.report_once(now, MTU_MISMATCH, text);
        }
        // It is not known what a queue pair that is not in RTS yet will send.
        let sends = mine.ack_timeout.is_some() || mine.max_rd_atomic > 0 || mine.sq_psn != 0;
        if let Some((own, expected)) = self.queue_pairs.psn_mismatch(a).filter(|_| sends) {
            let text = format!("{name} starts at PSN {own}, {other} expects {expected}");
            self.report_once(now, PSN_MISMATCH, text);
        }
        if mine.max_rd_atomic > theirs.max_dest_rd_atomic && theirs.qp_type != "xrc-initiator" {
            let text = format!(
                "{name} may have {} reads and atomics outstanding, {other} answers {}",
                mine.max_rd_atomic, theirs.max_dest_rd_atomic
            );
            self.report_once(now, MAX_RD_ATOMIC_MISMATCH, text);
        }
    }

    /// Adds up what can complete to the completion queues of a queue pair.
    fn check_cq_capacity(&mut self, now: u64, place: QueuePairId) {
        let mut wanted: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
        for other in self.queue_pairs.queue_pairs.iter().filter(|other| other.host == place.host) {
            let Some(profile) = self.queue_pairs.attributes(*other) else { continue };
            let queues = [(&profile.send_cq, profile.max_send_wr), (&profile.recv_cq, profile.max_recv_wr)];
            for (queue, max_wr) in queues {
                if let Some(queue) = queue {
                    wanted.entry(queue.cq).or_insert((queue.cqe, 0)).1 += max_wr;
                }
            }
        }
        let Some(profile) = self.queue_pairs.attributes(place) else { return };
        let queues = [&profile.send_cq, &profile.recv_cq];
        let mut mine: Vec<u32> = queues.into_iter().flatten().map(|queue| queue.cq).collect();
        mine.dedup();
        let host = self.queue_pairs.host_name(place.host).to_owned();
        for cq in mine {
            let Some((room, needed)) = wanted.get(&cq).copied() else { continue };
            if room < needed {
                let prefix = format!("completion queue {cq:#x} of {host} has room for {room} completions,");
                let text = format!("{prefix} its queues hold {needed} work requests");
                // A queue pair more makes the same finding larger.
                match self.findings.iter_mut().find(|finding| finding.text.starts_with(&prefix)) {
                    Some(finding) => finding.text = text,
                    None => _ = self.report_once(now, CQ_TOO_SMALL, text),
                }
            }
        }
    }

    fn work_started(&mut self, now: u64, place: QueuePairId, work: BufferUse) {
        if work.sge.length > 0 && work.psns.1 > 0 {
            // A request that writes its buffer clashes with every other use of it.
            let clash = self.buffers_in_use(place.host).find(|(_, other)| {
                overlaps(&other.sge, work.sge.address, work.sge.length) && (other.writes() || work.writes())
            });
            if let Some((other_place, other)) = clash {
                let text = format!(
                    "{} of {} uses memory that {} of {} still uses",
                    title(&work),
                    self.name(place),
                    title(other),
                    self.name(other_place)
                );
                let buffer = (place.host, other.sge.address);
                self.buffer_clashed(now, buffer, text);
            }
            self.history(place).buffers_in_use.push(work);
        }
    }

    /// Reports a buffer once, however many requests use it.
    fn buffer_clashed(&mut self, time_ns: u64, buffer: (usize, u64), text: String) {
        match self.clashes.get(&buffer) {
            Some(&known) => self.findings[known].count += 1,
            None => {
                self.clashes.insert(buffer, self.findings.len());
                self.findings.push(Finding { pitfall: BUFFER_IN_USE, time_ns, count: 1, text });
            }
        }
    }

    fn buffers_in_use(&self, host: usize) -> impl Iterator<Item = (QueuePairId, &BufferUse)> {
        let here = self.histories.iter().filter(move |(place, _)| place.host == host);
        here.flat_map(|(place, watch)| watch.buffers_in_use.iter().map(|used| (*place, used)))
    }

    fn work_ended(&mut self, place: QueuePairId, id: u64) {
        let uses = &mut self.history(place).buffers_in_use;
        if let Some(index) = uses.iter().position(|used| used.wr_id == id) {
            uses.remove(index);
        }
    }

    fn work_retired(&mut self, now: u64, place: QueuePairId) {
        let slots = self.queue_pairs.attributes(place).map_or(u32::MAX, |profile| profile.max_send_wr);
        let watch = self.history(place);
        watch.unsignaled += 1;
        if watch.unsignaled == slots.saturating_add(1) {
            let text = format!(
                "{} was given more than {slots} unsignalled requests in a row, its send queue holds {slots}",
                self.name(place)
            );
            self.report(now, UNSIGNALED_SEND_QUEUE_FULL, text);
        }
    }

    fn memory_written(&mut self, now: u64, writer: QueuePairId, address: u64, length: u32, psn: u32) {
        let in_use = self.buffers_in_use(writer.host);
        let clashes: Vec<_> = in_use.filter(|(_, used)| overlaps(&used.sge, address, length)).collect();
        // The start of a READ reported the other requests that use its buffer.
        let is_answer = clashes.iter().any(|(place, used)| {
            let psns = (Psn::new(used.psns.0), used.psns.1);
            *place == writer && used.writes() && Psn::new(psn).is_within(psns.0, psns.1)
        });
        if is_answer {
            return;
        }
        if let Some((place, used)) = clashes.first() {
            let text = format!(
                "the buffer of {} of {} was written by what came to {} before it completed",
                title(used),
                self.name(*place),
                self.name(writer)
            );
            let buffer = (writer.host, used.sge.address);
            self.buffer_clashed(now, buffer, text);
        }
    }

    fn completed(&mut self, now: u64, place: QueuePairId, event: &LogEvent) {
        let LogEvent::Completed { completion, reason, .. } = event else { return };
        let request = format!("work request {} of {}", completion.wr_id, self.name(place));
        match reason.as_ref() {
            "local-access/unreachable" => {
                self.report(now, MEMORY_GONE, format!("{request} uses memory that is not mapped any more"));
            }
            "bad-address-handle" => {
                self.report(
                    now,
                    ADDRESS_HANDLE_GONE,
                    format!("{request} uses an address handle that does not exist"),
                );
            }
            _ => {}
        }
    }

    fn request_rejected(&mut self, now: u64, place: QueuePairId, reason: &str, entry: &Entry) {
        let (name, why) = (self.name(place), entry.trigger.clone().unwrap_or_default());
        match reason {
            "receiver-not-ready" => {
                self.report(
                    now,
                    RECEIVE_NOT_POSTED,
                    format!("{name} had no receive posted when a message came"),
                );
            }
            "receive-too-small" => self.report(now, RECEIVE_TOO_SMALL, format!("{name}: {why}")),
            "payload-length" => self.report(now, MTU_MISMATCH, format!("{name}: {why}")),
            "too-many-rd-atomic" => self.report(now, MAX_RD_ATOMIC_MISMATCH, format!("{name}: {why}")),
            _ => self.access_denied(now, &name, reason, &why),
        }
    }

    fn packet_dropped(&mut self, now: u64, place: QueuePairId, reason: &str, entry: &Entry) {
        let (name, why) = (self.name(place), entry.trigger.clone().unwrap_or_default());
        match reason {
            "no-receive-posted" => {
                let text = format!("{name} had no receive posted when a message came, which is lost");
                self.report(now, RECEIVE_NOT_POSTED, text);
            }
            "qkey-mismatch" => {
                self.report(now, WRONG_QKEY, format!("{name} dropped a datagram with another Q_Key"));
            }
            "datagram-too-long" | "uc-request/receive-too-small" => {
                self.report(now, RECEIVE_TOO_SMALL, format!("{name} dropped a message: {why}"));
            }
            "invalid-qp-state/error" => self.request_in_error_state(now, place),
            "invalid-qp-state/reset" | "invalid-qp-state/init" if !self.history(place).entered_error => {
                self.report(now, SENT_BEFORE_READY, format!("a packet came to {name}, but {why}"));
            }
            _ => self.access_denied(now, &name, reason, &why),
        }
    }

    /// A request came to a queue pair in ERR: its sender learns of that only from its timer.
    fn request_in_error_state(&mut self, now: u64, place: QueuePairId) {
        let Some(peer) = self.queue_pairs.peer(place) else { return };
        let waits = self.queue_pairs.attributes(peer).is_some_and(|profile| profile.ack_timeout.is_none());
        // A completion in ERR, or a flush, ends the wait.
        if waits && !self.history(peer).entered_error {
            let text = format!(
                "{} has timeout 0 and waits for {}, which is in ERR and does not answer",
                self.name(peer),
                self.name(place)
            );
            self.report(now, WAITS_FOR_EVER, text);
        }
    }

    fn access_denied(&mut self, now: u64, name: &str, reason: &str, why: &str) {
        let prefixes = ["access/", "uc-access/", "write-with-imm-access/"];
        let Some(case) = prefixes.iter().find_map(|prefix| reason.strip_prefix(prefix)) else {
            return;
        };
        match case {
            "insufficient-access" | "queue-pair-access" => {
                self.report(now, MISSING_ACCESS_FLAG, format!("{name}: {why}"))
            }
            "unknown-key" | "stale-key" | "invalidated" => {
                self.report(now, UNKNOWN_KEY, format!("{name}: {why}"));
            }
            "unreachable" => self.report(now, MEMORY_GONE, format!("{name}: {why}")),
            _ => {}
        }
    }

    fn rnr_wait_started(&mut self, now: u64, place: QueuePairId) {
        self.history(place).rnr_waits += 1;
        let waits = self.history(place).rnr_waits;
        let for_ever = self.queue_pairs.attributes(place).is_some_and(|profile| profile.rnr_retry == 7);
        if for_ever && waits > TOLERATED_RETRIES {
            let text = format!(
                "{} has rnr_retry 7 (for ever) and waited for a receiver again and again",
                self.name(place)
            );
            self.report(now, RETRIES_HIDE_FAULTS, text);
        }
    }

    fn retransmitted(&mut self, now: u64, place: QueuePairId) {
        self.history(place).retransmissions += 1;
        let backs = self.history(place).retransmissions;
        let most = self.queue_pairs.attributes(place).is_some_and(|profile| profile.retry_cnt == 7);
        if most && backs > TOLERATED_RETRIES {
            let text = format!("{} has retry_cnt 7, the most, and sent again and again", self.name(place));
            self.report(now, RETRIES_HIDE_FAULTS, text);
        }
    }
}

fn title(work: &BufferUse) -> String {
    format!("{} {}", work.operation.to_uppercase().replace('-', " "), work.wr_id)
}

fn overlaps(buffer: &SgeData, address: u64, length: u32) -> bool {
    let end = |address: u64, length: u32| address.saturating_add(u64::from(length));
    buffer.address < end(address, length) && address < end(buffer.address, buffer.length)
}
