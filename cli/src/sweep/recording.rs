//! The recording of a run: what its programs did, from the event log.

use super::point::{FLOWS_PER_HOST, Point, PointKind};
use super::target::Target;
use softhca::Verb;
use softhca::fault::{ProgramAction, ProgramFault};
use softhca_trace::log::{Entry, LogEvent};
use softhca_wire::Opcode;
use std::collections::{BTreeMap, BTreeSet};

/// The actions of a run.
#[derive(Debug, Default)]
pub struct Recording {
    /// The calls and completions, in order.
    pub points: Vec<Point>,
    /// The places at which the programs make their calls.
    pub sites: BTreeMap<Point, CallContext>,
    /// How many objects of each kind the processes of each program created, and tried to release.
    pub balance: BTreeMap<(usize, &'static str), i64>,
    /// How often a fault fired.
    pub fired: u64,
    /// The program that met the first fault of a call or completion.
    pub faulted: Option<usize>,
    /// Whether a fault made a completion fail.
    pub has_failed_completion: bool,
    /// Calls that release something after the fault fired, by program.
    pub released_after_fault: BTreeMap<usize, u64>,
    /// Calls that start work or a connection after the fault fired, by program.
    pub posted_after_fault: BTreeMap<usize, u64>,
    /// Whether a program waits for completion events.
    pub waits_for_events: BTreeSet<usize>,
    /// The action of each fault of a program, by its number.
    actions: BTreeMap<u32, ProgramAction>,
    qp_of: BTreeMap<(String, u32), (usize, u32)>,
    completions: BTreeMap<(usize, u32), u64>,
    flows: BTreeMap<(String, u32), FlowSeen>,
    packets: BTreeSet<Point>,
    /// Whether packets are points.
    has_packets: bool,
}

/// The place at which a program makes a call, and the state of the queue pair.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallContext {
    pub call_site: String,
    pub state: Option<String>,
}

/// A queue pair that is ready to receive.
#[derive(Clone, Debug)]
struct FlowSeen {
    /// Its place among those of its host.
    ordinal: u32,
    sq_psn: u32,
    dest_qp: Option<u32>,
}

/// The opcode with this name in the log.
fn opcode(name: &str) -> Option<Opcode> {
    let is_it = |opcode: &Opcode| name.split_once(' ') == Some((opcode.service().name(), opcode.name()));
    Opcode::all().find(is_it)
}

/// The calls that create an object, those that release it, and its name.
const PAIRS: [(&[Verb], Verb, &str); 10] = [
    (&[Verb::OpenDevice], Verb::CloseDevice, "device"),
    (&[Verb::AllocPd], Verb::DeallocPd, "protection domain"),
    (&[Verb::RegMr], Verb::DeregMr, "memory region"),
    (&[Verb::AllocMw], Verb::DeallocMw, "memory window"),
    (&[Verb::CreateCq], Verb::DestroyCq, "completion queue"),
    (&[Verb::CreateQp], Verb::DestroyQp, "queue pair"),
    (&[Verb::CreateSrq], Verb::DestroySrq, "shared receive queue"),
    (&[Verb::CreateAh], Verb::DestroyAh, "address handle"),
    (&[Verb::OpenXrcd], Verb::CloseXrcd, "XRC domain"),
    (&[Verb::RdmaCreateId], Verb::RdmaDestroyId, "connection identifier"),
];

impl Recording {
    /// An empty recording, with or without packets as points.
    pub fn new(has_packets: bool) -> Recording {
        Recording { has_packets, ..Recording::default() }
    }

    /// The faults of a program of the run.
    pub fn add_faults(&mut self, faults: &[ProgramFault]) {
        self.actions.extend(faults.iter().map(|fault| (fault.id, fault.action)));
    }

    /// Whether an entry of the log is of interest.
    pub fn wants(&self, name: &str) -> bool {
        match name {
            "verb:called" | "fault:injected" | "work:completed" | "fabric:fault" => true,
            "qp:configured" | "transport:packet_sent" => self.has_packets,
            _ => false,
        }
    }

    /// Adds an entry of the log.
    pub fn add(&mut self, target: &Target, entry: &Entry) {
        match &entry.event {
            LogEvent::VerbCalled { verb, object, nth, qp, role, call_site, state, .. } => {
                let (Some(verb), role) = (Verb::from_name(verb), *role as usize) else { return };
                let Some(program) = target.program.get(role) else { return };
                if *qp != 0
                    && let Some(object) = object
                {
                    self.qp_of.insert((entry.host.clone(), *qp), (role, *object));
                }
                for (creates, releases, kind) in PAIRS {
                    if creates.contains(&verb) {
                        *self.balance.entry((role, kind)).or_default() += 1;
                    } else if verb == releases {
                        *self.balance.entry((role, kind)).or_default() -= 1;
                        if self.fired > 0 {
                            *self.released_after_fault.entry(role).or_default() += 1;
                        }
                    }
                }
                if verb == Verb::GetCqEvent {
                    self.waits_for_events.insert(role);
                }
                let posts =
                    matches!(verb, Verb::PostSend | Verb::RdmaConnect | Verb::CreateQp | Verb::PostRecv);
                if posts && self.fired > 0 {
                    *self.posted_after_fault.entry(role).or_default() += 1;
                }
                let role = program.name.clone();
                let point = Point { role, kind: PointKind::Call(verb), object: *object, nth: *nth };
                if let Some(call_site) = call_site.clone() {
                    let state = state.as_ref().map(ToString::to_string);
                    self.sites.entry(point.clone()).or_insert(CallContext { call_site, state });
                }
                self.points.push(point);
            }
            LogEvent::FaultInjected { point, rule, .. } => {
                self.fired += 1;
                let action = self.actions.get(rule).copied();
                self.has_failed_completion |=
                    matches!(action, Some(ProgramAction::SetStatus(status, _)) if !status.is_success());
                // The program whose call is the last one of the host: hosts have their own threads in the daemon.
                let is_of_host = |role: &usize| target.program[*role].host == entry.host;
                let calls = self.points.iter().rev().filter(|point| point.verb().is_some());
                let last = calls.filter_map(|point| target.role_of(&point.role)).find(is_of_host);
                self.faulted = self.faulted.or(last);
                // A call that failed created nothing.
                let failed =
                    Verb::from_name(point).filter(|_| matches!(action, Some(ProgramAction::Fail(_))));
                for (creates, _, kind) in PAIRS {
                    if let (Some(verb), Some(role)) = (failed, last)
                        && creates.contains(&verb)
                    {
                        *self.balance.entry((role, kind)).or_default() -= 1;
                    }
                }
            }
            LogEvent::Completed { completion, .. } if completion.status == "SUCCESS" => {
                if let Some((role, object)) = self.qp_of.get(&(entry.host.clone(), completion.qp)).copied() {
                    let nth = self.completions.entry((role, object)).or_default();
                    *nth += 1;
                    let (nth, role) = (*nth, target.program[role].name.clone());
                    self.points.push(Point { role, kind: PointKind::Completion, object: Some(object), nth });
                }
            }
            LogEvent::QpConfigured { qp, configuration } if configuration.qp_type == "rc" => {
                let count = self.flows.keys().filter(|(host, _)| *host == entry.host).count() as u32;
                let key = (entry.host.clone(), *qp);
                let ordinal = self.flows.get(&key).map_or(count + 1, |seen| seen.ordinal);
                let (sq_psn, dest_qp) = (configuration.sq_psn, configuration.dest_qp);
                self.flows.insert(key, FlowSeen { ordinal, sq_psn, dest_qp });
            }
            LogEvent::PacketSent { qp, packet, retransmission: false, .. } => {
                let point = opcode(&packet.opcode)
                    .and_then(|opcode| self.packet_point(target, entry, *qp, packet.psn, opcode));
                if let Some(point) = point.filter(|point| self.packets.insert(point.clone())) {
                    self.points.push(point);
                }
            }
            LogEvent::Fault { rule: Some(_), .. } => self.fired += 1,
            _ => {}
        }
    }

    /// The point of a packet that a queue pair sends.
    fn packet_point(
        &self,
        target: &Target,
        entry: &Entry,
        qp: u32,
        psn: u32,
        opcode: Opcode,
    ) -> Option<Point> {
        let own = self.flows.get(&(entry.host.clone(), qp)).filter(|_| opcode != Opcode::CNP)?;
        let (kind, host, flow) = if !opcode.operation().is_request() {
            let is_peer = |((_, number), flow): &(&(String, u32), &FlowSeen)| {
                Some(*number) == own.dest_qp && flow.dest_qp == Some(qp)
            };
            let ((host, _), flow) = self.flows.iter().find(is_peer)?;
            (PointKind::Response, host, flow)
        } else {
            (PointKind::Request, &entry.host, own)
        };
        let program = target.program.iter().find(|program| program.host == *host)?;
        let nth = u64::from(psn.wrapping_sub(flow.sq_psn) & 0xff_ffff) + 1;
        let (role, object) = (program.name.clone(), Some(flow.ordinal));
        let point = Point { role, kind, object, nth };
        (nth < 1 << 23 && flow.ordinal <= FLOWS_PER_HOST).then_some(point)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use softhca::{CompletionStatus, Errno};

    fn injected(rule: u32, point: &str, effect: &str) -> Entry {
        let event = LogEvent::FaultInjected {
            rule,
            point: point.to_owned().into(),
            object: None,
            qp: 0,
            effect: effect.into(),
        };
        Entry { time: 0, host: "alice".into(), event, trigger: None, certainty: None }
    }

    fn fault(id: u32, action: ProgramAction) -> ProgramFault {
        ProgramFault { id, ..softhca::fault::completions().act(action) }
    }

    #[test]
    fn the_effect_of_a_fault_does_not_depend_on_its_text() {
        let target = Target::of_command(&["true".into()]);
        for (status, has_failed) in
            [(CompletionStatus::RetryExceededError, true), (CompletionStatus::Success, false)]
        {
            let mut recording = Recording::new(false);
            recording.add_faults(&[fault(7, ProgramAction::SetStatus(status, None))]);
            recording.add(&target, &injected(7, "completion", "other words"));
            assert_eq!((recording.fired, recording.has_failed_completion), (1, has_failed));
        }
        let mut recording = Recording::new(false);
        recording.add_faults(&[fault(1, ProgramAction::Fail(Errno::ENOMEM))]);
        recording.add(&target, &injected(1, "completion", "has status"));
        assert!(!recording.has_failed_completion);
    }

    #[test]
    fn every_opcode_is_found_by_its_name() {
        for expected in Opcode::all().filter(|opcode| *opcode != Opcode::CNP) {
            assert_eq!(opcode(&expected.to_string()), Some(expected));
        }
        assert_eq!(opcode("CNP"), None);
    }
}
