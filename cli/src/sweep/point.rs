//! Points of injection: what a run without faults did, and the faults that are plausible there.

use super::target::Target;
use softhca::fault::{FaultPoint, InjectedEvent, ProgramAction, ProgramFault, Repeat};
use softhca::{CompletionStatus, Errno, Verb};
use softhca_trace::log::{Entry, LogEvent};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

/// Where a fault is injected: the program, what it does, the object in order of creation, and the n-th time on this object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Point {
    /// The name of the program.
    pub role: String,
    /// A call, or `None` for a completion.
    pub verb: Option<Verb>,
    /// The object; `None` for calls on the device.
    pub object: Option<u32>,
    /// From 1.
    pub nth: u64,
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
        self.verb.map_or("completion", Verb::name)
    }
}

impl fmt::Display for SweepFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SweepFault::Errno(errno) => write!(f, "{errno}"),
            SweepFault::ErrnoFromNowOn(errno) => write!(f, "{errno}+"),
            SweepFault::Status(status) => f.write_str(status.status().name()),
            SweepFault::LostNotification => f.write_str("lost-notification"),
            SweepFault::Event(event) => f.write_str(EVENTS[event.0].name()),
        }
    }
}

impl FromStr for SweepFault {
    type Err = String;

    fn from_str(text: &str) -> Result<SweepFault, String> {
        if text == "lost-notification" {
            return Ok(SweepFault::LostNotification);
        }
        if let Some(index) = EVENTS.iter().position(|event| event.name() == text) {
            return Ok(SweepFault::Event(EventName(index)));
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
        let verb = match verb {
            "completion" => None,
            name => Some(
                Verb::from_name(name).ok_or_else(|| format!("{text:?}: no verb has the name {name:?}"))?,
            ),
        };
        let (object, nth): (u32, u64) =
            (object.parse().map_err(|_| wrong())?, nth.parse().map_err(|_| wrong())?);
        let object = Some(object).filter(|object| *object > 0);
        Ok(Injection {
            point: Point { role: role.into(), verb, object, nth: nth.max(1) },
            fault: fault.parse()?,
        })
    }
}

impl Injection {
    /// The rule of this fault.
    pub fn rule(&self) -> ProgramFault {
        let Point { verb, object, nth, .. } = self.point;
        let action = match self.fault {
            SweepFault::Errno(errno) | SweepFault::ErrnoFromNowOn(errno) => ProgramAction::Fail(errno),
            SweepFault::Status(status) => ProgramAction::SetStatus(status.status(), None),
            SweepFault::LostNotification => ProgramAction::DropNotification,
            SweepFault::Event(event) => ProgramAction::Raise(EVENTS[event.0]),
        };
        let point = verb.map_or(FaultPoint::Completion, FaultPoint::Call);
        let times = (!matches!(self.fault, SweepFault::ErrnoFromNowOn(_))).then_some(1);
        let repeat = Repeat { skip: nth - 1, times, ..Repeat::default() };
        ProgramFault { id: 1, process: None, point, object, repeat, after: None, until: None, action }
    }
}

/// What a run did.
#[derive(Debug, Default)]
pub struct Recording {
    /// The calls and completions, in order.
    pub points: Vec<Point>,
    /// How many objects of each kind the processes of each program created, and tried to release.
    pub balance: BTreeMap<(usize, &'static str), i64>,
    /// How often the fault fired.
    pub fired: u64,
    /// Calls that release something after the fault fired, by program.
    pub released_after_fault: BTreeMap<usize, u64>,
    /// Calls that start work or a connection after the fault fired, by program.
    pub posted_after_fault: BTreeMap<usize, u64>,
    /// Whether a program waits for completion events.
    pub waits_for_events: BTreeSet<usize>,
    qp_of: BTreeMap<(String, u32), (usize, u32)>,
    completions: BTreeMap<(usize, u32), u64>,
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
    /// Whether an entry of the log is of interest.
    pub fn wants(name: &str) -> bool {
        matches!(name, "verb:called" | "fault:injected" | "work:completed")
    }

    /// Adds an entry of the log.
    pub fn add(&mut self, target: &Target, entry: &Entry) {
        match &entry.event {
            LogEvent::VerbCalled { verb, object, nth, qp, role, .. } => {
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
                self.points.push(Point { role, verb: Some(verb), object: *object, nth: *nth });
            }
            LogEvent::FaultInjected { point, effect, .. } => {
                self.fired += 1;
                // A call that failed created nothing.
                let failed = Verb::from_name(point).filter(|_| effect.starts_with("fails"));
                let last = self.points.last().and_then(|point| role_of(target, &point.role));
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
                    self.points.push(Point { role, verb: None, object: Some(object), nth });
                }
            }
            _ => {}
        }
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
}

/// Points that are equivalent: the calls of one verb on one object, and the completions of one queue pair.
#[derive(Debug)]
pub struct Group {
    /// The program, the name and the object.
    pub key: (String, &'static str, Option<u32>),
    /// How many points it has.
    pub found: usize,
    /// How many of them the sweep runs.
    pub chosen: usize,
}

/// The runs of a sweep, and the groups that they come from.
pub fn plan(
    target: &Target,
    clean: &Recording,
    coverage: Coverage,
    per_group: usize,
) -> (Vec<Injection>, Vec<Group>) {
    let mut groups: BTreeMap<(String, &'static str, Option<u32>), Vec<&Point>> = BTreeMap::new();
    for point in &clean.points {
        groups.entry((point.role.clone(), point.name(), point.object)).or_default().push(point);
    }
    let (mut injections, mut summary) = (Vec::new(), Vec::new());
    for (key, points) in groups {
        let chosen = spread(points.len(), per_group);
        let covered = match points[0].verb {
            Some(_) => coverage.verbs || coverage.events,
            None => coverage.events,
        };
        summary.push(Group { key, found: points.len(), chosen: if covered { chosen.len() } else { 0 } });
        for (place, index) in chosen.into_iter().enumerate() {
            let point = points[index];
            for fault in faults_at(target, clean, point, coverage, place == 0) {
                injections.push(Injection { point: point.clone(), fault });
            }
        }
    }
    (injections, summary)
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
    match point.verb {
        Some(verb) => {
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
            }
        }
        None if !coverage.events => {}
        None => {
            faults.extend((0..STATUSES.len()).map(|n| SweepFault::Status(CompletionStatusName(n as u32))));
            if role_of(target, &point.role).is_some_and(|role| clean.waits_for_events.contains(&role)) {
                faults.push(SweepFault::LostNotification);
            }
        }
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
        ] {
            let injection: Injection = text.parse().expect(text);
            assert_eq!(injection.to_string(), text);
        }
        for text in ["client", "client:no_verb:0:1:EIO", "c:post_send:x:1:EIO", "c:post_send:1:1:EWHAT"] {
            assert!(text.parse::<Injection>().is_err(), "{text}");
        }
    }

    #[test]
    fn points_of_a_group_are_spread_and_include_both_ends() {
        assert_eq!(spread(3, 8), [0, 1, 2]);
        assert_eq!(spread(100, 4), [0, 33, 66, 99]);
        assert_eq!(spread(5, 1), [0]);
    }

    #[test]
    fn a_fault_from_now_on_has_no_limit() {
        let once: Injection = "c:post_send:1:3:ENOMEM".parse().expect("an address");
        let later: Injection = "c:post_send:1:3:ENOMEM+".parse().expect("an address");
        assert_eq!((once.rule().repeat.skip, once.rule().repeat.times), (2, Some(1)));
        assert_eq!((later.rule().repeat.skip, later.rule().repeat.times), (2, None));
    }
}
