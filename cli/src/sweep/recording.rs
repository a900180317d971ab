//! The recording of a run: the actions of its programs, from the events of their hosts.

use super::point::{FLOWS_PER_HOST, Point, PointKind};
use super::target::Target;
use softhca::fault::ProgramAction;
use softhca::trace::{Event, HostId, InjectedPoint, NetworkEvent, PacketSummary};
use softhca::{QpType, Verb};
use softhca_fabric::FaultCause;
use softhca_trace::NameTable;
use softhca_wire::{Opcode, Psn, Qpn};
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
    qp_of: BTreeMap<(HostId, Qpn), (usize, u32)>,
    completions: BTreeMap<(usize, u32), u64>,
    flows: BTreeMap<(HostId, Qpn), FlowSeen>,
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
    sq_psn: Psn,
    dest_qp: Option<Qpn>,
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

    /// Adds an event of the hosts, whose names are in `names`.
    pub fn add(&mut self, target: &Target, names: &NameTable, event: &NetworkEvent<'_>) {
        match event {
            NetworkEvent::Hca { host, event } => self.add_host_event(target, *host, names, event),
            NetworkEvent::Fault { fault, .. } if matches!(fault.cause, FaultCause::Rule(_)) => {
                self.fired += 1;
            }
            _ => {}
        }
    }

    fn add_host_event(&mut self, target: &Target, host: HostId, names: &NameTable, event: &Event) {
        match *event {
            Event::VerbCalled { verb, object, nth, qp, role, call_site, state, .. } => {
                let role = role as usize;
                let Some(program) = target.program.get(role) else { return };
                if qp != Qpn::default()
                    && let Some(object) = object
                {
                    self.qp_of.insert((host, qp), (role, object));
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
                let point = Point { role, kind: PointKind::Call(verb), object, nth };
                if let Some(call_site) = call_site {
                    let call_site = call_site.to_string();
                    let state = state.map(|state| state.name().to_owned());
                    self.sites.entry(point.clone()).or_insert(CallContext { call_site, state });
                }
                self.points.push(point);
            }
            Event::FaultInjected { point, effect, .. } => {
                self.fired += 1;
                self.has_failed_completion |=
                    matches!(effect, ProgramAction::SetStatus(status, _) if !status.is_success());
                // The program whose call is the last one of the host: hosts have their own threads in the daemon.
                let name = names.host_name(host);
                let is_of_host = |role: &usize| target.program[*role].host == name;
                let calls = self.points.iter().rev().filter(|point| point.verb().is_some());
                let last = calls.filter_map(|point| target.role_of(&point.role)).find(is_of_host);
                self.faulted = self.faulted.or(last);
                // A call that failed created nothing.
                if let (ProgramAction::Fail(_), InjectedPoint::Call(verb), Some(role)) = (effect, point, last)
                    && let Some((.., kind)) = PAIRS.iter().find(|(creates, ..)| creates.contains(&verb))
                {
                    *self.balance.entry((role, kind)).or_default() -= 1;
                }
            }
            Event::Completed { completion, .. } if completion.status.is_success() => {
                if let Some((role, object)) = self.qp_of.get(&(host, completion.qpn)).copied() {
                    let nth = self.completions.entry((role, object)).or_default();
                    *nth += 1;
                    let (nth, role) = (*nth, target.program[role].name.clone());
                    self.points.push(Point { role, kind: PointKind::Completion, object: Some(object), nth });
                }
            }
            Event::QpConfigured { qp, configuration }
                if self.has_packets && configuration.qp_type == QpType::Rc =>
            {
                let count = self.flows.keys().filter(|(other, _)| *other == host).count() as u32;
                let ordinal = self.flows.get(&(host, qp)).map_or(count + 1, |seen| seen.ordinal);
                let (sq_psn, dest_qp) = (configuration.sq_psn, configuration.dest_qp);
                self.flows.insert((host, qp), FlowSeen { ordinal, sq_psn, dest_qp });
            }
            Event::PacketSent { qp, packet, retransmission: false, .. } if self.has_packets => {
                let point = self.packet_point(target, (host, qp), names, &packet);
                if let Some(point) = point.filter(|point| self.packets.insert(point.clone())) {
                    self.points.push(point);
                }
            }
            _ => {}
        }
    }

    /// The point of a packet that a queue pair sends.
    fn packet_point(
        &self,
        target: &Target,
        (host, qp): (HostId, Qpn),
        names: &NameTable,
        packet: &PacketSummary,
    ) -> Option<Point> {
        let own = self.flows.get(&(host, qp)).filter(|_| packet.opcode != Opcode::CNP)?;
        let (kind, host, flow) = if !packet.opcode.operation().is_request() {
            let is_peer = |((_, number), flow): &(&(HostId, Qpn), &FlowSeen)| {
                Some(*number) == own.dest_qp && flow.dest_qp == Some(qp)
            };
            let ((host, _), flow) = self.flows.iter().find(is_peer)?;
            (PointKind::Response, *host, flow)
        } else {
            (PointKind::Request, host, own)
        };
        let host = names.host_name(host);
        let program = target.program.iter().find(|program| program.host == host)?;
        let nth = u64::from(packet.psn.value().wrapping_sub(flow.sq_psn.value()) & 0xff_ffff) + 1;
        let (role, object) = (program.name.clone(), Some(flow.ordinal));
        let point = Point { role, kind, object, nth };
        (nth < 1 << 23 && flow.ordinal <= FLOWS_PER_HOST).then_some(point)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use softhca::{CompletionStatus, Errno};

    #[test]
    fn a_completion_fails_only_by_a_status_of_failure() {
        let failed = ProgramAction::SetStatus(CompletionStatus::RetryExceededError, None);
        let success = ProgramAction::SetStatus(CompletionStatus::Success, None);
        let call = ProgramAction::Fail(Errno::ENOMEM);
        for (effect, has_failed) in [(failed, true), (success, false), (call, false)] {
            let (point, object, qp) = (InjectedPoint::Completion, None, Qpn::default());
            let event = Event::FaultInjected { rule: 7, point, object, qp, effect };
            let event = NetworkEvent::Hca { host: HostId(0), event: &event };
            let mut recording = Recording::new(false);
            recording.add(&Target::of_command(&["true".into()]), &NameTable::new(), &event);
            assert_eq!((recording.fired, recording.has_failed_completion), (1, has_failed));
        }
    }
}
