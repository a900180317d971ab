//! Points of injection: what a run without faults did, and the faults that are plausible there.

use super::target::Target;
use softhca::fault::{
    Action, BitPosition, FaultPoint, FlowId, IcrcPolicy, InclusiveRange, InjectedEvent, PacketType,
    ProgramAction, ProgramFault, Repeat, Rule, RuleId, Selector,
};
use softhca::{CompletionStatus, Errno, QpType, Verb};
use softhca_scenarios::{ParameterValues, Plan, Scenario};
use softhca_trace::log::{Entry, LogEvent};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

/// Where a fault is injected: the program, what it does, the object in order of creation, and the n-th time on this object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Point {
    /// The name of the program.
    pub role: String,
    /// What the program does.
    pub kind: PointKind,
    /// The object; `None` for calls on the device. For packets, the queue pair of the requester, in the order in which
    /// queue pairs of its host become ready to receive.
    pub object: Option<u32>,
    /// From 1. For packets, the PSN relative to the first, plus 1.
    pub nth: u64,
}

/// What a program does at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PointKind {
    /// It calls a verb.
    Call(Verb),
    /// A work request completes.
    Completion,
    /// Its queue pair sends a request packet.
    Request,
    /// Its queue pair receives a response packet.
    Response,
}

/// What is injected at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SweepFault {
    /// The call fails once.
    Errno(Errno),
    /// This call and all later ones fail.
    ErrnoFromNowOn(Errno),
    /// The completion has this status.
    Status(CompletionStatusName),
    /// The notification of the completion is lost.
    LostNotification,
    /// The device raises this event in the call.
    Event(EventName),
    /// The link goes down in the call, and up [`FLAP_TIME`] later.
    LinkFlap,
    /// The packet is lost, duplicated, delayed or corrupted, by the place in [`PACKET_FAULTS`].
    Packet(usize),
}

/// A status by its number, so that faults have an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CompletionStatusName(u32);

/// An event by its place in [`EVENTS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EventName(usize);

/// The events that a sweep raises.
const EVENTS: [InjectedEvent; 3] =
    [InjectedEvent::PortErr, InjectedEvent::QpFatal, InjectedEvent::DeviceFatal];
/// How long a link is down.
const FLAP_TIME: &str = "50ms";
/// What a sweep does to packets, as scenario files name it. The delay is longer than the clean run has between packets.
const PACKET_FAULTS: [(&str, Action); 4] = [
    ("drop", Action::Drop),
    ("duplicate", Action::Duplicate { copies: 1 }),
    ("delay", Action::Delay { ns: 20_000_000 }),
    ("corrupt", Action::Corrupt { bit: BitPosition::Random, icrc: IcrcPolicy::Stale }),
];
/// The flows of one host that packet rules can select.
const FLOWS_PER_HOST: u32 = 64;
/// The statuses that a sweep injects: a lost peer, a rejected request.
const STATUSES: [CompletionStatus; 2] =
    [CompletionStatus::RetryExceededError, CompletionStatus::RemoteAccessError];

impl CompletionStatusName {
    fn status(self) -> CompletionStatus {
        STATUSES[self.0 as usize]
    }
}

/// A point and the fault there.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Injection {
    /// Where.
    pub point: Point,
    /// What.
    pub fault: SweepFault,
}

impl Point {
    /// The name in tables: the verb, or `completion`.
    pub fn name(&self) -> &'static str {
        match self.kind {
            PointKind::Call(verb) => verb.name(),
            PointKind::Completion => "completion",
            PointKind::Request => "request",
            PointKind::Response => "response",
        }
    }

    /// The call, if it is one.
    pub fn verb(&self) -> Option<Verb> {
        if let PointKind::Call(verb) = self.kind { Some(verb) } else { None }
    }
}

/// The flow of a queue pair: those of each host have numbers of their own.
fn flow_id(host: usize, ordinal: u32) -> FlowId {
    FlowId(1 + host as u32 * FLOWS_PER_HOST + ordinal - 1)
}

/// The flows of a host, in the order in which its queue pairs become ready to receive.
pub fn flows_of_host(host: usize) -> Vec<(QpType, FlowId)> {
    (1..=FLOWS_PER_HOST).map(|ordinal| (QpType::Rc, flow_id(host, ordinal))).collect()
}

impl fmt::Display for SweepFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SweepFault::Errno(errno) => write!(f, "{errno}"),
            SweepFault::ErrnoFromNowOn(errno) => write!(f, "{errno}+"),
            SweepFault::Status(status) => f.write_str(status.status().name()),
            SweepFault::LostNotification => f.write_str("lost-notification"),
            SweepFault::Event(event) => f.write_str(EVENTS[event.0].name()),
            SweepFault::LinkFlap => f.write_str("link-flap"),
            SweepFault::Packet(index) => f.write_str(PACKET_FAULTS[*index].0),
        }
    }
}

impl FromStr for SweepFault {
    type Err = String;

    fn from_str(text: &str) -> Result<SweepFault, String> {
        if text == "lost-notification" {
            return Ok(SweepFault::LostNotification);
        }
        if text == "link-flap" {
            return Ok(SweepFault::LinkFlap);
        }
        if let Some(index) = EVENTS.iter().position(|event| event.name() == text) {
            return Ok(SweepFault::Event(EventName(index)));
        }
        if let Some(index) = PACKET_FAULTS.iter().position(|(name, _)| *name == text) {
            return Ok(SweepFault::Packet(index));
        }
        if let Some(index) = STATUSES.iter().position(|status| status.name() == text) {
            return Ok(SweepFault::Status(CompletionStatusName(index as u32)));
        }
        let (name, later) = text.strip_suffix('+').map_or((text, false), |name| (name, true));
        let errno = Errno::from_name(name).ok_or_else(|| format!("{text:?} is not a fault of a sweep"))?;
        Ok(if later { SweepFault::ErrnoFromNowOn(errno) } else { SweepFault::Errno(errno) })
    }
}

/// `client:post_send:1:3:ENOMEM`: program, verb, object (0 for the device), call, fault.
impl fmt::Display for Injection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Point { role, object, nth, .. } = &self.point;
        write!(f, "{role}:{}:{}:{nth}:{}", self.point.name(), object.unwrap_or(0), self.fault)
    }
}

impl FromStr for Injection {
    type Err = String;

    fn from_str(text: &str) -> Result<Injection, String> {
        let wrong = || format!("{text:?} is not PROGRAM:VERB:OBJECT:NTH:FAULT");
        let words: Vec<&str> = text.split(':').collect();
        let [role, verb, object, nth, fault] = words[..] else { return Err(wrong()) };
        let kind = match verb {
            "completion" => PointKind::Completion,
            "request" => PointKind::Request,
            "response" => PointKind::Response,
            name => PointKind::Call(
                Verb::from_name(name).ok_or_else(|| format!("{text:?}: no verb has the name {name:?}"))?,
            ),
        };
        let fault: SweepFault = fault.parse()?;
        let fits = match fault {
            SweepFault::Packet(_) => matches!(kind, PointKind::Request | PointKind::Response),
            SweepFault::Status(_) | SweepFault::LostNotification => kind == PointKind::Completion,
            _ => matches!(kind, PointKind::Call(_)),
        };
        if !fits {
            return Err(format!("{text:?}: {fault} is not a fault of {verb}"));
        }
        let (object, nth): (u32, u64) =
            (object.parse().map_err(|_| wrong())?, nth.parse().map_err(|_| wrong())?);
        let object = Some(object).filter(|object| *object > 0);
        Ok(Injection { point: Point { role: role.into(), kind, object, nth: nth.max(1) }, fault })
    }
}

impl Injection {
    /// The rule of a packet fault.
    pub fn packet_rule(&self, target: &Target) -> Option<Rule> {
        let SweepFault::Packet(index) = self.fault else { return None };
        let program = role_of(target, &self.point.role)?;
        let host = target.hosts().iter().position(|host| *host == target.program[program].host)?;
        let is_request = self.point.kind == PointKind::Request;
        let selector = Selector {
            flow_id: Some(flow_id(host, self.point.object.unwrap_or(1))),
            packet_type: Some(if is_request { PacketType::Request } else { PacketType::Response }),
            psn: Some(InclusiveRange::exactly(self.point.nth - 1)),
            transmission: Some(InclusiveRange::exactly(1)),
            ..Selector::default()
        };
        Some(Rule { id: RuleId(1), selector, repeat: Repeat::times(1), action: PACKET_FAULTS[index].1 })
    }

    /// The fault as a scenario file for `softhca exec --scenario`.
    pub fn scenario(&self, target: &Target) -> String {
        let Point { kind, object, nth, role } = &self.point;
        let host = role_of(target, role).map_or("alice", |program| target.program[program].host.as_str());
        let hosts: Vec<String> = target.hosts().iter().map(|host| format!("{host} = {{}}")).collect();
        let qp = format!("{host}.{}", object.unwrap_or(1));
        let times = match self.fault {
            SweepFault::ErrnoFromNowOn(_) => format!("skip = {}", nth - 1),
            _ => format!("nth = {nth}"),
        };
        let action = match self.fault {
            SweepFault::Errno(errno) | SweepFault::ErrnoFromNowOn(errno) => {
                format!("{{ fail = \"{errno}\" }}")
            }
            SweepFault::Status(status) => format!("{{ set-status = \"{}\" }}", status.status().name()),
            SweepFault::LostNotification => "\"drop-notification\"".into(),
            SweepFault::Event(event) => {
                let name = EVENTS[event.0].name().to_lowercase().replace('_', "-");
                format!("{{ raise-event = \"{name}\" }}")
            }
            SweepFault::LinkFlap => "{ raise-event = \"port-err\" }".into(),
            SweepFault::Packet(index) => match PACKET_FAULTS[index] {
                (name, Action::Duplicate { copies }) => format!("{{ {name} = {copies} }}"),
                (name, Action::Delay { ns }) => format!("{{ {name} = \"{ns}ns\" }}"),
                (name, Action::Corrupt { .. }) => format!("{{ {name} = {{}} }}"),
                (name, _) => format!("\"{name}\""),
            },
        };
        let place = match kind {
            PointKind::Call(verb) => {
                let object = object.map_or(String::new(), |object| format!("object = {object}\n"));
                format!("host = \"{host}\"\nverb = \"{}\"\n{object}{times}", verb.name())
            }
            PointKind::Completion => format!("qp = \"{qp}\"\n{times}"),
            PointKind::Request | PointKind::Response => {
                let (class, psn) = (self.point.name(), nth - 1);
                format!(
                    "match = {{ class = \"{class}\", qp = \"{qp}\", psn = \"+{psn}\", transmission = 1 }}\ntimes = 1"
                )
            }
        };
        let hosts = hosts.join("\n");
        let up = match self.fault {
            SweepFault::LinkFlap => format!(
                "name = \"down\"\n\n[[fault]]\nhost = \"{host}\"\nafter = {{ fault = \"down\" }}\nat = \"{FLAP_TIME}\"\n\
                 action = {{ raise-event = \"port-active\" }}\n"
            ),
            _ => String::new(),
        };
        format!("title = \"{self}\"\n\n[hosts]\n{hosts}\n\n[[fault]]\n{place}\naction = {action}\n{up}")
    }

    /// The plan of a fault that is more than one rule.
    pub fn plan(&self, target: &Target) -> Result<Option<Plan>, String> {
        if self.fault != SweepFault::LinkFlap {
            return Ok(None);
        }
        let scenario = Scenario::parse(&self.to_string(), &self.scenario(target));
        let plan = scenario.and_then(|scenario| scenario.plan(&ParameterValues::new(), scenario.seed));
        plan.map(Some).map_err(|problem| problem.to_string())
    }

    /// The rule of a fault of the program; `None` for packets and [`Injection::plan`].
    pub fn rule(&self) -> Option<ProgramFault> {
        let Point { kind, object, nth, .. } = self.point;
        let action = match self.fault {
            SweepFault::Packet(_) | SweepFault::LinkFlap => return None,
            SweepFault::Errno(errno) | SweepFault::ErrnoFromNowOn(errno) => ProgramAction::Fail(errno),
            SweepFault::Status(status) => ProgramAction::SetStatus(status.status(), None),
            SweepFault::LostNotification => ProgramAction::DropNotification,
            SweepFault::Event(event) => ProgramAction::Raise(EVENTS[event.0]),
        };
        let point = match kind {
            PointKind::Call(verb) => FaultPoint::Call(verb),
            _ => FaultPoint::Completion,
        };
        let times = (!matches!(self.fault, SweepFault::ErrnoFromNowOn(_))).then_some(1);
        let repeat = Repeat { skip: nth - 1, times, ..Repeat::default() };
        Some(ProgramFault { id: 1, process: None, point, object, repeat, after: None, until: None, action })
    }
}

/// What a run did.
#[derive(Debug, Default)]
pub struct Recording {
    /// The calls and completions, in order.
    pub points: Vec<Point>,
    /// Where the programs make their calls.
    sites: BTreeMap<Point, CallContext>,
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
    qp_of: BTreeMap<(String, u32), (usize, u32)>,
    completions: BTreeMap<(usize, u32), u64>,
    flows: BTreeMap<(String, u32), FlowSeen>,
    packets: BTreeSet<Point>,
    /// Whether packets are points.
    has_packets: bool,
}

/// Where a program makes a call, and the state of the queue pair.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct CallContext {
    call_site: String,
    state: Option<String>,
}

/// A queue pair that is ready to receive.
#[derive(Clone, Debug)]
struct FlowSeen {
    /// Its place among those of its host.
    ordinal: u32,
    sq_psn: u32,
    dest_qp: Option<u32>,
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
            LogEvent::FaultInjected { point, effect, .. } => {
                self.fired += 1;
                self.has_failed_completion |= effect.starts_with("has status") && !effect.contains("SUCCESS");
                // The program whose call is the last one of the host: hosts have their own threads in the daemon.
                let is_of_host = |role: &usize| target.program[*role].host == entry.host;
                let calls = self.points.iter().rev().filter(|point| point.verb().is_some());
                let last = calls.filter_map(|point| role_of(target, &point.role)).find(is_of_host);
                self.faulted = self.faulted.or(last);
                // A call that failed created nothing.
                let failed = Verb::from_name(point).filter(|_| effect.starts_with("fails"));
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
                let point = self.packet_point(target, entry, *qp, packet.psn, &packet.opcode);
                if let Some(point) = point.filter(|point| self.packets.insert(point.clone())) {
                    self.points.push(point);
                }
            }
            LogEvent::Fault { rule: Some(_), .. } => self.fired += 1,
            _ => {}
        }
    }
}

impl Recording {
    /// The point of a packet that a queue pair sends.
    fn packet_point(&self, target: &Target, entry: &Entry, qp: u32, psn: u32, opcode: &str) -> Option<Point> {
        let own = self.flows.get(&(entry.host.clone(), qp)).filter(|_| !opcode.contains("CNP"))?;
        let is_response = ["ACKNOWLEDGE", "RESPONSE"].iter().any(|part| opcode.contains(part));
        let (kind, host, flow) = if is_response {
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

/// The index of a program.
pub fn role_of(target: &Target, name: &str) -> Option<usize> {
    target.program.iter().position(|program| program.name == name)
}

/// Which kinds of points a sweep covers.
#[derive(Clone, Copy, Debug)]
pub struct Coverage {
    /// Calls that fail.
    pub verbs: bool,
    /// Failed completions, lost notifications and asynchronous events.
    pub events: bool,
    /// Packets that are lost, duplicated, delayed or corrupted.
    pub packets: bool,
}

/// What equivalent points have in common: the calls of one verb from one place of the program in one state of the queue
/// pair; the completions and packets of one queue pair. Calls whose place is unknown are grouped by object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GroupKey {
    /// The program.
    pub role: String,
    /// The verb, or what it is a point of.
    pub name: &'static str,
    context: Option<CallContext>,
    object: Option<u32>,
}

impl fmt::Display for GroupKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GroupKey { role, name, context, object } = self;
        write!(f, "{role}: {name}")?;
        match (context, object) {
            (Some(CallContext { call_site, state }), _) => {
                write!(f, " at {call_site}")?;
                state.as_ref().map_or(Ok(()), |state| write!(f, " in {state}"))
            }
            (None, Some(object)) => write!(f, " of object {object}"),
            (None, None) => Ok(()),
        }
    }
}

/// Points that are equivalent.
#[derive(Debug)]
pub struct Group {
    /// What they have in common.
    pub key: GroupKey,
    /// The points, in the order of the run without faults.
    pub points: Vec<Point>,
    /// The faults of the points that the sweep chooses.
    injections: Vec<Injection>,
}

impl Group {
    /// Whether the sweep has faults for its points.
    pub fn is_covered(&self) -> bool {
        !self.injections.is_empty()
    }
}

/// The groups of points of a run without faults, each with the faults of at most `per_group` points.
pub fn plan(target: &Target, clean: &Recording, coverage: Coverage, per_group: usize) -> Vec<Group> {
    let mut groups: BTreeMap<GroupKey, Vec<Point>> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    // Processes of one program have the same points.
    for point in clean.points.iter().filter(|point| seen.insert(*point)) {
        let context = clean.sites.get(point).cloned();
        let object = point.object.filter(|_| context.is_none());
        let key = GroupKey { role: point.role.clone(), name: point.name(), context, object };
        groups.entry(key).or_default().push(point.clone());
    }
    let with_faults = |(key, points): (GroupKey, Vec<Point>)| {
        let mut injections = Vec::new();
        for (place, index) in spread(points.len(), per_group).into_iter().enumerate() {
            for fault in faults_at(target, clean, &points[index], coverage, place == 0) {
                injections.push(Injection { point: points[index].clone(), fault });
            }
        }
        Group { key, points, injections }
    };
    groups.into_iter().map(with_faults).collect()
}

/// The runs of a sweep. A limit takes one of each group before it takes a second one of any.
pub fn choose(groups: &[Group], limit: Option<usize>) -> Vec<Injection> {
    let all = groups.iter().flat_map(|group| &group.injections);
    let Some(limit) = limit else { return all.cloned().collect() };
    let mut chosen: Vec<Injection> = Vec::new();
    for round in 0.. {
        let next: Vec<&Injection> = groups.iter().filter_map(|group| group.injections.get(round)).collect();
        let room = next.len().min(limit - chosen.len());
        if room == 0 {
            break;
        }
        chosen.extend((0..room).map(|n| next[n * next.len() / room].clone()));
    }
    chosen
}

/// The places of at most `most` points: the first, the last, and others evenly between.
fn spread(count: usize, most: usize) -> Vec<usize> {
    if count <= most.max(1) {
        return (0..count).collect();
    }
    if most <= 1 {
        return vec![0];
    }
    let mut places: Vec<usize> = (0..most).map(|n| n * (count - 1) / (most - 1)).collect();
    places.dedup();
    places
}

fn faults_at(
    target: &Target,
    clean: &Recording,
    point: &Point,
    coverage: Coverage,
    is_first: bool,
) -> Vec<SweepFault> {
    let mut faults = Vec::new();
    match point.kind {
        PointKind::Call(verb) => {
            if coverage.verbs {
                faults.extend(verb.errors().iter().map(|errno| SweepFault::Errno(*errno)));
                if is_first && let Some(errno) = verb.errors().first() {
                    faults.push(SweepFault::ErrnoFromNowOn(*errno));
                }
            }
            if coverage.events && is_first && matches!(verb, Verb::PostSend | Verb::RdmaConnect) {
                let usable = |index: &usize| verb == Verb::PostSend || EVENTS[*index].object().is_none();
                faults.extend(
                    (0..EVENTS.len()).filter(usable).map(|index| SweepFault::Event(EventName(index))),
                );
                faults.push(SweepFault::LinkFlap);
            }
        }
        PointKind::Request | PointKind::Response if coverage.packets => {
            faults.extend((0..PACKET_FAULTS.len()).map(SweepFault::Packet));
        }
        PointKind::Completion if coverage.events => {
            faults.extend((0..STATUSES.len()).map(|n| SweepFault::Status(CompletionStatusName(n as u32))));
            if role_of(target, &point.role).is_some_and(|role| clean.waits_for_events.contains(&role)) {
                faults.push(SweepFault::LostNotification);
            }
        }
        PointKind::Completion | PointKind::Request | PointKind::Response => {}
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_survives_its_text() {
        for text in [
            "client:post_send:1:3:ENOMEM",
            "server:reg_mr:0:2:ENOMEM+",
            "server:completion:2:7:RETRY_EXC_ERR",
            "client:completion:1:1:lost-notification",
            "client:post_send:1:1:DEVICE_FATAL",
            "client:rdma_connect:1:1:link-flap",
            "client:request:1:4:drop",
            "server:response:2:1:corrupt",
        ] {
            let injection: Injection = text.parse().expect(text);
            assert_eq!(injection.to_string(), text);
            // The file with the fault can be used.
            let program = ["client", "server"]
                .map(|name| format!("[[program]]\nname = \"{name}\"\ncommand = [\"x\"]\n"));
            let target: Target = toml::from_str(&program.concat()).expect("a target");
            let file = injection.scenario(&target);
            softhca_scenarios::Scenario::parse("fault.toml", &file).expect(&file);
        }
        for text in [
            "client:request:1:1:ENOMEM",
            "client:post_send:1:1:drop",
            "client",
            "client:no_verb:0:1:EIO",
            "c:post_send:x:1:EIO",
            "c:post_send:1:1:EWHAT",
        ] {
            assert!(text.parse::<Injection>().is_err(), "{text}");
        }
    }

    #[test]
    fn points_of_a_group_are_spread_and_include_both_ends() {
        assert_eq!(spread(3, 8), [0, 1, 2]);
        assert_eq!(spread(100, 4), [0, 33, 66, 99]);
        assert_eq!(spread(5, 1), [0]);
    }

    /// A call that the run without faults made at a place of the program.
    fn call(nth: u64, call_site: &str, state: &str) -> (Point, CallContext) {
        let kind = PointKind::Call(Verb::ModifyQp);
        let point = Point { role: "c".into(), kind, object: Some(nth as u32), nth: 1 };
        (point, CallContext { call_site: call_site.into(), state: Some(state.into()) })
    }

    #[test]
    fn equivalent_calls_are_one_group_and_a_limit_takes_one_of_each_group_first() {
        let program = "[[program]]\nname = \"c\"\ncommand = [\"x\"]\n";
        let target: Target = toml::from_str(program).expect("a target");
        let mut clean = Recording::default();
        let calls = (1..=6).map(|nth| call(nth, "c+0x10", "RESET"));
        let calls = calls.chain([call(7, "c+0x10", "INIT"), call(8, "c+0x20", "INIT")]);
        for (point, context) in calls {
            clean.points.extend([point.clone(), point.clone()]);
            clean.sites.insert(point, context);
        }
        let coverage = Coverage { verbs: true, events: false, packets: false };
        let groups = plan(&target, &clean, coverage, 4);
        let found: Vec<(String, usize)> =
            groups.iter().map(|group| (group.key.to_string(), group.points.len())).collect();
        let expected = [
            ("c: modify_qp at c+0x10 in INIT", 1),
            ("c: modify_qp at c+0x10 in RESET", 6),
            ("c: modify_qp at c+0x20 in INIT", 1),
        ];
        assert_eq!(found, expected.map(|(key, count)| (key.to_owned(), count)));
        let errors = Verb::ModifyQp.errors().len();
        // The first point of each group has a fault more, which persists.
        assert_eq!(choose(&groups, None).len(), (1 + 4 + 1) * errors + 3);
        let chosen = choose(&groups, Some(4));
        let objects: Vec<Option<u32>> = chosen.iter().map(|chosen| chosen.point.object).collect();
        assert_eq!(objects, [Some(7), Some(1), Some(8), Some(7)]);
        assert_ne!(chosen[0], chosen[3]);
        assert_eq!(choose(&groups, Some(1)).len(), 1);
        assert_eq!(choose(&groups, Some(1000)).len(), choose(&groups, None).len());
    }

    #[test]
    fn a_fault_from_now_on_has_no_limit() {
        let once: Injection = "c:post_send:1:3:ENOMEM".parse().expect("an address");
        let later: Injection = "c:post_send:1:3:ENOMEM+".parse().expect("an address");
        let repeat = |injection: Injection| injection.rule().expect("a call").repeat;
        assert_eq!((repeat(once.clone()).skip, repeat(once).times), (2, Some(1)));
        assert_eq!((repeat(later.clone()).skip, repeat(later).times), (2, None));
    }
}
