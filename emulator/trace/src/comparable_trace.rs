//! The actions of a run without their times. They are the facts by which a run in virtual time and one on real sockets
//! are compared.
//!
//! Per queue pair, by topic: work posted, the first transmission of each request PSN, rejections, state changes,
//! completions, asynchronous events, faults. Facts that only time decides are left out: acknowledgements,
//! retransmissions and repeated rejections; the order of two topics or two queue pairs. So is a requester's progress
//! beyond the packet that ended its connection. Keys, addresses and absolute PSNs are left out too.

use crate::{NameTable, describe};
use sha2::{Digest, Sha256};
use softhca_engine::{Event, PacketSummary, QpState, Reason};
use softhca_fabric::{Endpoint, Fault, HostId, PacketClass};
use softhca_types::{Completion, CompletionFlags};
use softhca_wire::{Psn, Qpn, Syndrome};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

softhca_wire::named_enum! {
    /// The topic of a fact. Facts of one topic have an order, those of two have none.
    pub enum FactKind {
        /// Work that was posted to the send queue.
        Posted => "posted",
        /// Requests that were sent, each PSN once.
        Sent => "sent",
        /// Requests of the peer that were refused, for a sequence error, a missing receive or anything else.
        Nak => "refused",
        /// Changes of the state.
        State => "state",
        /// Completions of the send queue.
        SendCompleted => "send-completed",
        /// Completions of the receive queue.
        ReceiveCompleted => "receive-completed",
        /// Asynchronous events.
        AsyncEvent => "raised",
        /// Faults that packets of the queue pair, or the answers to them, met.
        Fault => "fault",
    }
}

pub type QueuePairFacts = BTreeMap<FactKind, Vec<String>>;

/// The facts of a run. Two runs are equivalent if their facts are equal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ComparableTrace {
    queue_pairs: BTreeMap<String, QueuePairFacts>,
}

impl ComparableTrace {
    /// The trace of these events and faults. `names` has hosts, queue pairs, roles, rules and first PSNs. Events of a
    /// queue pair without a name belong to its host.
    pub fn from_events<'a>(
        names: &NameTable,
        events: impl IntoIterator<Item = (HostId, &'a Event)>,
        faults: impl IntoIterator<Item = &'a Fault>,
    ) -> ComparableTrace {
        let mut builder =
            TraceBuilder { names, trace: ComparableTrace::default(), progress: BTreeMap::new() };
        for (host, event) in events {
            builder.event(host, event);
        }
        for fault in faults {
            builder.fault(fault);
        }
        builder.finish()
    }

    /// The queue pairs, by name.
    pub fn queue_pairs(&self) -> impl Iterator<Item = (&str, &QueuePairFacts)> {
        self.queue_pairs.iter().map(|(name, facts_of_qp)| (name.as_str(), facts_of_qp))
    }

    /// The SHA-256 of the trace as it is displayed, in hexadecimal.
    pub fn order_sha256(&self) -> String {
        Sha256::digest(self.to_string()).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The differences between this trace and another: queue pair, topic and the two facts, of which one may be
    /// missing.
    pub fn differences(&self, other: &ComparableTrace) -> Vec<String> {
        let mut found = Vec::new();
        let names: BTreeSet<&String> = self.queue_pairs.keys().chain(other.queue_pairs.keys()).collect();
        for name in names {
            let [ours, theirs] = [self, other].map(|trace| trace.queue_pairs.get(name));
            let topics: BTreeSet<FactKind> = [ours, theirs]
                .into_iter()
                .flatten()
                .flat_map(|facts_of_qp| facts_of_qp.keys().copied())
                .collect();
            for topic in topics {
                let facts = |facts_of_qp: Option<&QueuePairFacts>| {
                    facts_of_qp.and_then(|facts_of_qp| facts_of_qp.get(&topic)).cloned().unwrap_or_default()
                };
                let [ours, theirs] = [facts(ours), facts(theirs)];
                let same = ours.iter().zip(&theirs).take_while(|(ours, theirs)| ours == theirs).count();
                if same < ours.len().max(theirs.len()) {
                    let fact =
                        |facts: &[String]| facts.get(same).map_or("nothing", String::as_str).to_owned();
                    let (topic, ours, theirs) = (topic.name(), fact(&ours), fact(&theirs));
                    found.push(format!("{name}, {topic} {}: {ours:?} and {theirs:?}", same + 1));
                }
            }
        }
        found
    }
}

impl fmt::Display for ComparableTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, facts_of_qp) in &self.queue_pairs {
            writeln!(f, "{name}")?;
            for (topic, facts) in facts_of_qp {
                for fact in facts {
                    writeln!(f, "  {} {fact}", topic.name())?;
                }
            }
        }
        Ok(())
    }
}

/// The state of a queue pair until the end of the log.
#[derive(Default)]
struct QueuePairProgress {
    posted: BTreeSet<u64>,
    /// First transmissions, by PSN in the order of sending.
    sent: Vec<(Psn, String)>,
    /// The request that ended the connection.
    failed_psn: Option<Psn>,
}

struct TraceBuilder<'a> {
    names: &'a NameTable,
    trace: ComparableTrace,
    progress: BTreeMap<Endpoint, QueuePairProgress>,
}

impl TraceBuilder<'_> {
    fn event(&mut self, host: HostId, event: &Event) {
        let Some(address) = self.names.address(host) else { return };
        let at = |qpn: Qpn| Endpoint { address, qpn };
        match *event {
            Event::WqeFetched { qp, wr_id: id, operation, .. } => {
                self.work_posted(at(qp), id, operation.name())
            }
            Event::PacketSent { qp, packet, wr_id: work, retransmission: again } => {
                if work.is_some() && !again {
                    let fact = format!("{} {} B", packet.opcode, packet.payload_length);
                    self.progress.entry(at(qp)).or_default().sent.push((packet.psn, fact));
                }
                self.nak_sent(at(qp), &packet);
            }
            Event::QpStateChanged { qp, from, to, reason } => {
                let why = match reason {
                    Reason::None | Reason::Requested => String::new(),
                    reason => format!(" ({})", describe::kebab_case(&reason)),
                };
                self.add_fact(at(qp), FactKind::State, format!("{} -> {}{why}", from.name(), to.name()));
                if to == QpState::Error {
                    self.connection_failed(at(qp), reason);
                }
            }
            Event::Completed { completion, reason, .. } => {
                self.work_completed(at(completion.qpn), &completion, reason)
            }
            Event::AsyncEventRaised { event, .. } => {
                let name = event.name().to_owned();
                match event.qpn() {
                    Some(qp) => self.add_fact(at(qp), FactKind::AsyncEvent, name),
                    None => self.add_named_fact(self.names.host_name(host), FactKind::AsyncEvent, name),
                }
            }
            _ => {}
        }
    }

    /// A request was taken up, or flushed before that.
    fn work_posted(&mut self, at: Endpoint, id: u64, operation: &str) {
        if self.progress.entry(at).or_default().posted.insert(id) {
            self.add_fact(at, FactKind::Posted, format!("{operation} #{id}"));
        }
    }

    fn nak_sent(&mut self, at: Endpoint, packet: &PacketSummary) {
        let what = match packet.syndrome {
            Some(Syndrome::Nak(code)) => code.name(),
            Some(Syndrome::RnrNak(_)) => "receiver not ready",
            _ => return,
        };
        let fact = format!("{}: {what}", self.relative_psn(self.names.peer(at), packet.psn));
        let known = self
            .trace
            .queue_pairs
            .get(&self.queue_pair_name(at))
            .and_then(|facts_of_qp| facts_of_qp.get(&FactKind::Nak));
        if known.and_then(|facts| facts.last()) != Some(&fact) {
            self.add_fact(at, FactKind::Nak, fact);
        }
    }

    fn work_completed(&mut self, at: Endpoint, completion: &Completion, reason: Reason) {
        let Completion { wr_id: id, opcode: operation, status, byte_len: bytes, flags, .. } = *completion;
        let mut fact = format!("{} #{id} {}", operation.name(), status.name());
        if operation.is_receive() {
            if status.is_success() {
                fact += &format!(" {bytes} B");
            }
            if flags.contains(CompletionFlags::IMMEDIATE) {
                fact += &format!(" immediate {:#x}", completion.imm_data);
            }
            if flags.contains(CompletionFlags::INVALIDATED) {
                fact += " invalidated";
            }
            return self.add_fact(at, FactKind::ReceiveCompleted, fact);
        }
        self.work_posted(at, id, operation.name());
        self.add_fact(at, FactKind::SendCompleted, fact);
        if !status.is_success() {
            self.connection_failed(at, reason);
        }
    }

    /// Takes note of the request that the peer refused or missed. (A timeout needs none: all had been sent.)
    fn connection_failed(&mut self, at: Endpoint, reason: Reason) {
        let psn = match reason {
            Reason::Nak { psn, .. }
            | Reason::SequenceNak { psn }
            | Reason::RnrRetryExceeded { psn }
            | Reason::BadResponse { psn }
            | Reason::ResponseGap { expected: psn, .. } => psn,
            _ => return,
        };
        self.progress.entry(at).or_default().failed_psn.get_or_insert(psn);
    }

    fn fault(&mut self, fault: &Fault) {
        let packet = &fault.packet;
        let mut fact =
            format!("{}: {}", describe::cause(fault, self.names), describe::effect_without_time(fault));
        if let Some(opcode) = packet.opcode {
            fact += &format!(" {opcode}");
        }
        if let Some(psn) = packet.relative_psn {
            fact += &format!(" {psn:+}");
        }
        let name =
            packet.flow_id.and_then(|role| self.names.role_endpoint(role)).map(|at| self.queue_pair_name(at));
        let name = name.unwrap_or_else(|| "nobody".into());
        // How often a message of the connection manager is sent again is a matter of time.
        if let PacketClass::Cm(message) = packet.class {
            fact += &format!(" CM {}", message.name());
            let known =
                self.trace.queue_pairs.get(&name).and_then(|facts_of_qp| facts_of_qp.get(&FactKind::Fault));
            if known.is_some_and(|facts| facts.contains(&fact)) {
                return;
            }
        }
        self.add_named_fact(name, FactKind::Fault, fact);
    }

    fn relative_psn(&self, whose: Option<Endpoint>, psn: Psn) -> String {
        match whose.and_then(|at| self.names.first_psn(at)) {
            Some(first) => format!("{:+}", psn.distance(first)),
            None => "?".into(),
        }
    }

    fn queue_pair_name(&self, at: Endpoint) -> String {
        self.names.queue_pair_name(at).map_or_else(|| self.names.host_name_at(at.address), str::to_owned)
    }

    fn add_fact(&mut self, at: Endpoint, topic: FactKind, fact: String) {
        self.add_named_fact(self.queue_pair_name(at), topic, fact);
    }

    fn add_named_fact(&mut self, name: String, topic: FactKind, fact: String) {
        self.trace.queue_pairs.entry(name).or_default().entry(topic).or_default().push(fact);
    }

    fn finish(mut self) -> ComparableTrace {
        for (at, pages) in std::mem::take(&mut self.progress) {
            let beyond = |psn: &Psn| pages.failed_psn.is_some_and(|broken| broken.is_before(*psn));
            for (psn, fact) in pages.sent.iter().filter(|(psn, _)| !beyond(psn)) {
                let fact = format!("{} {fact}", self.relative_psn(Some(at), *psn));
                self.add_fact(at, FactKind::Sent, fact);
            }
        }
        self.trace
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use softhca_engine::CqId;
    use softhca_types::{CompletionOpcode, CompletionStatus};
    use softhca_wire::{NakCode, Opcode};
    use std::net::IpAddr;

    const HOST: HostId = HostId(0);

    /// One queue pair, 5, whose PSNs and those of its peer start at 100.
    fn names() -> NameTable {
        let [ours, theirs]: [IpAddr; 2] = ["10.0.0.1", "10.0.0.2"].map(|text| text.parse().unwrap());
        let [at, peer] =
            [(ours, 5), (theirs, 6)].map(|(address, qpn)| Endpoint { address, qpn: Qpn::new(qpn) });
        let mut names = NameTable::new();
        names.add_host(HOST, "alice", ours);
        names.add_queue_pair(at, "alice.1");
        names.connect(at, peer);
        names.set_first_psn(at, Psn::new(100));
        names.set_first_psn(peer, Psn::new(100));
        names
    }

    fn sent(psn: u32, opcode: &str, work: Option<u64>, again: bool, syndrome: Option<Syndrome>) -> Event {
        let opcode = Opcode::all().find(|known| known.to_string() == opcode).unwrap();
        let peer = "10.0.0.2".parse().unwrap();
        let (psn, destination) = (Psn::new(psn), Qpn::new(6));
        let packet = PacketSummary { opcode, psn, dest_qp: destination, payload_length: 8, syndrome, peer };
        Event::PacketSent { qp: Qpn::new(5), packet, wr_id: work, retransmission: again }
    }

    fn request(psn: u32, again: bool) -> Event {
        sent(psn, "RC WRITE_ONLY", Some(1), again, None)
    }

    fn answer(psn: u32, syndrome: Syndrome) -> Event {
        sent(psn, "RC ACKNOWLEDGE", None, false, Some(syndrome))
    }

    fn completed(id: u64, status: CompletionStatus, reason: Reason) -> Event {
        let completion = Completion {
            wr_id: id,
            status,
            opcode: CompletionOpcode::Write,
            flags: CompletionFlags::empty(),
            byte_len: 8,
            imm_data: 0,
            qpn: Qpn::new(5),
            src_qp: Qpn::default(),
            service_level: 0,
            route: Default::default(),
            vendor_error: 0,
            timestamp: 0,
        };
        Event::Completed { cq: CqId(1), completion, reason }
    }

    fn trace(events: &[Event]) -> ComparableTrace {
        ComparableTrace::from_events(&names(), events.iter().map(|event| (HOST, event)), [])
    }

    #[test]
    fn acknowledgements_and_retransmissions_are_left_out() {
        let once = trace(&[request(100, false), request(101, false)]);
        let again =
            [request(100, false), answer(100, Syndrome::ACK), request(100, true), request(101, false)];
        assert_eq!(trace(&again), once);
        assert_eq!(once.to_string(), "alice.1\n  sent +0 RC WRITE_ONLY 8 B\n  sent +1 RC WRITE_ONLY 8 B\n");
    }

    #[test]
    fn a_repeated_refusal_counts_once_and_another_does_not() {
        let nak = |psn| answer(psn, Syndrome::Nak(NakCode::PsnSequenceError));
        assert_eq!(trace(&[nak(101), nak(101)]), trace(&[nak(101)]));
        let differences = trace(&[nak(101), nak(102)]).differences(&trace(&[nak(101)]));
        assert_eq!(differences, ["alice.1, refused 2: \"+2: sequence error\" and \"nothing\""]);
    }

    #[test]
    fn how_far_a_requester_ran_ahead_of_a_refusal_does_not_count() {
        let broken =
            completed(1, CompletionStatus::RetryExceededError, Reason::SequenceNak { psn: Psn::new(101) });
        let far = [request(100, false), request(101, false), request(102, false), broken];
        let near = [request(100, false), request(101, false), broken];
        assert_eq!(trace(&far), trace(&near));
        assert_ne!(trace(&far), trace(&far[..3]));
    }

    #[test]
    fn work_counts_whether_it_was_started_or_flushed_before() {
        let flushed = completed(2, CompletionStatus::WrFlushError, Reason::Flushed);
        let qp = Qpn::new(5);
        let operation = CompletionOpcode::Write;
        let started = Event::WqeFetched {
            qp,
            wr_id: 2,
            operation,
            bytes: 8,
            first_psn: Psn::new(102),
            packets: 1,
            first_sge: None,
            call_site: None,
        };
        assert_eq!(trace(&[started, flushed]), trace(&[flushed]));
    }

    #[test]
    fn the_order_within_a_topic_counts() {
        let done = |id| completed(id, CompletionStatus::Success, Reason::None);
        let [forth, back] = [trace(&[done(1), done(2)]), trace(&[done(2), done(1)])];
        assert_ne!(forth.order_sha256(), back.order_sha256());
        assert_eq!(forth.order_sha256().len(), 64);
    }
}
