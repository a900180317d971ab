//! Faults of programs: calls of verbs that fail, completions that are changed or held, notifications that are lost,
//! asynchronous events.
//!
//! The rules are data. The HCA matches them for the calls and completions of each process. A file thus has the same
//! effect in a simulation, on an embedded device and on a daemon's. A point is addressed by verb, object in order of
//! creation, and call on that object: never by a count over everything, which timing changes.

use crate::cm::EventType;
use crate::{CompletionStatus, Errno, HitCounter, Repeat, Resource, Seed, Verb, VerbSet};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

/// The faults of a process.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProgramFaults {
    /// Identifies the process: the devices that it opens on a host share all counts.
    pub process: u32,
    /// The program that the process belongs to, for recordings.
    pub role: u32,
    /// The seed of probabilities.
    pub seed: u64,
    /// The rules.
    pub faults: Vec<ProgramFault>,
    /// Every call is an event.
    pub record: bool,
}

/// A fault of a process.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramFault {
    /// Its number in the file, which probabilities depend on.
    pub id: u32,
    /// The name of the processes that it applies to (`/proc/PID/comm`); all by default.
    pub process: Option<String>,
    /// The point that it applies to.
    pub point: FaultPoint,
    /// The object in order of creation, from 1: that of the verb, or the queue pair of the completion. All by default.
    pub object: Option<u32>,
    /// Which of the calls or completions it hits.
    pub repeat: Repeat,
    /// It applies only after this.
    pub after: Option<FaultTrigger>,
    /// It applies only until this.
    pub until: Option<FaultTrigger>,
    /// Its effect.
    pub action: ProgramAction,
}

impl ProgramFault {
    /// The object whose calls it hits. The object of an event can be of another kind than the verb's; any call then
    /// hits.
    fn selected_object(&self) -> Option<u32> {
        match (self.point, self.action) {
            (FaultPoint::Call(verb), ProgramAction::Raise(event))
                if event.object().is_some() && event.object() != verb.object() =>
            {
                None
            }
            _ => self.object,
        }
    }
}

/// The point to which a fault of a process applies.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultPoint {
    /// Calls of a verb. A call of `poll_cq` is a completion that it would return.
    Call(Verb),
    /// Completions.
    Completion,
}

/// An occurrence that begins or ends the time in which a fault applies.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultTrigger {
    /// The n-th call of a verb, from 1, on any object.
    Call(Verb, u64),
    /// An asynchronous event, by its name: `PORT_ERR`.
    Event(String),
    /// Another fault fired, by its number.
    Fault(u32),
    /// A time since the process opened the device, in nanoseconds.
    Time(u64),
    /// A step of a scenario is complete, by its place in the file. Its executor reports it.
    Step(u32),
}

/// The effect of a fault on a call, a completion or a device.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramAction {
    /// The call fails without effect.
    Fail(Errno),
    /// The call succeeds without effect, and its result is this event of the connection manager with this status.
    CmEvent(EventType, i32),
    /// The completion has this status and vendor error. A queue pair whose completion fails enters ERR.
    SetStatus(CompletionStatus, Option<u32>),
    /// The completion, and all later ones of its queue, come this many nanoseconds later.
    Hold(u64),
    /// The completion waits until so many have gathered in its queue, or for a second, and all come at once.
    Burst(u32),
    /// The completion queue overflows.
    OverflowCq,
    /// The completion is there, and its notification never comes.
    DropNotification,
    /// The device raises this event, with its consequences.
    Raise(InjectedEvent),
    /// The process ends as if by SIGKILL, before the call has an effect.
    Kill,
    /// The memory of this region, in order of creation, becomes inaccessible, as if the process had unmapped it.
    Unmap(u32),
    /// Nothing: other faults wait for it.
    Count,
}

impl fmt::Display for ProgramAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProgramAction::Fail(errno) => write!(f, "fails with {errno}"),
            ProgramAction::CmEvent(event, status) => write!(f, "ends with {event}, status {status}"),
            ProgramAction::SetStatus(status, None) => write!(f, "has status {}", status.name()),
            ProgramAction::SetStatus(status, Some(vendor)) => {
                write!(f, "has status {}, vendor error {vendor}", status.name())
            }
            ProgramAction::Hold(ns) => write!(f, "is held for {ns} ns"),
            ProgramAction::Burst(count) => write!(f, "waits for a burst of {count}"),
            ProgramAction::OverflowCq => f.write_str("overflows the completion queue"),
            ProgramAction::DropNotification => f.write_str("is not notified"),
            ProgramAction::Raise(event) => write!(f, "raises {}", event.name()),
            ProgramAction::Kill => f.write_str("ends the process"),
            ProgramAction::Unmap(region) => write!(f, "makes the memory of region {region} inaccessible"),
            ProgramAction::Count => f.write_str("is counted"),
        }
    }
}

softhca_wire::named_enum! {
    /// An asynchronous event that a fault raises, with the consequences that it has on a card.
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
    #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
    // The names are those of `enum ibv_event_type` without the prefix, if it has one.
    pub enum InjectedEvent {
        /// The port goes down: it neither sends nor receives.
        PortErr => "PORT_ERR",
        /// The port comes up.
        PortActive => "PORT_ACTIVE",
        /// The GID table changed.
        GidChange => "GID_CHANGE",
        /// The LID changed.
        LidChange => "LID_CHANGE",
        /// The P_Key table changed.
        PkeyChange => "PKEY_CHANGE",
        /// The device fails: all work requests are flushed, and every later control verb fails with EIO.
        DeviceFatal => "DEVICE_FATAL",
        /// The device is removed: it fails, those that have it open lose it, and it cannot be opened.
        DeviceRemoved => "DEVICE_REMOVED",
        /// The device returns, and can be opened.
        DeviceReturned => "DEVICE_RETURNED",
        /// A queue pair fails: it enters ERR, and its work requests are flushed.
        QpFatal => "QP_FATAL",
        /// A completion queue fails, and every queue pair that uses it.
        CqErr => "CQ_ERR",
        /// The limit of a shared receive queue is reached.
        SrqLimitReached => "SRQ_LIMIT_REACHED",
    }
}

impl InjectedEvent {
    /// The kind of object that fails.
    pub const fn object(self) -> Option<Resource> {
        match self {
            InjectedEvent::QpFatal => Some(Resource::QueuePair),
            InjectedEvent::CqErr => Some(Resource::CompletionQueue),
            InjectedEvent::SrqLimitReached => Some(Resource::SharedReceiveQueue),
            _ => None,
        }
    }
}

impl ProgramFaults {
    /// Keeps the faults of a process with this name.
    pub fn retain_process(&mut self, name: &str) {
        self.faults.retain(|fault| fault.process.as_ref().is_none_or(|wanted| wanted == name));
    }

    /// The verbs whose calls the HCA must see even if it does not execute them.
    pub fn announced(&self) -> VerbSet {
        if self.record {
            return VerbSet::ALL;
        }
        let mut set = VerbSet::EMPTY;
        for fault in &self.faults {
            if let FaultPoint::Call(verb) = fault.point {
                set.insert(verb);
            }
            for trigger in [&fault.after, &fault.until].into_iter().flatten() {
                if let FaultTrigger::Call(verb, _) = trigger {
                    set.insert(*verb);
                }
            }
        }
        set
    }
}

/// A fault that hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultHit {
    /// The number of the fault.
    pub rule: u32,
    /// Its effect.
    pub action: ProgramAction,
    /// The object that it names, in order of creation.
    pub object: Option<u32>,
}

/// A call as a point of injection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallPoint {
    /// The object, in order of creation; `None` for calls on the device.
    pub object: Option<u32>,
    /// The call of this verb on this object, from 1.
    pub nth: u64,
    /// The fault that hits it.
    pub hit: Option<FaultHit>,
}

#[derive(Debug)]
struct ActiveFault {
    fault: ProgramFault,
    counter: HitCounter,
}

/// Matches the calls and completions of a process with its faults.
#[derive(Debug, Default)]
pub struct FaultMatcher {
    role: u32,
    seed: u64,
    record: bool,
    faults: Vec<ActiveFault>,
    /// When the process opened the device first.
    opened_ns: u64,
    /// The order of creation, by kind and number.
    ordinals: BTreeMap<(Resource, u32), u32>,
    created: BTreeMap<Resource, u32>,
    calls: BTreeMap<(Verb, Option<u32>), u64>,
    verb_calls: BTreeMap<Verb, u64>,
    fired: BTreeSet<u32>,
    raised: BTreeSet<&'static str>,
    steps: BTreeSet<u32>,
}

impl FaultMatcher {
    /// A process that made no calls yet.
    pub fn new(faults: ProgramFaults, now_ns: u64) -> FaultMatcher {
        let ProgramFaults { role, seed, faults, record, .. } = faults;
        let faults = faults.into_iter().map(|fault| ActiveFault { fault, counter: HitCounter::default() });
        let (faults, opened_ns) = (faults.collect(), now_ns);
        FaultMatcher { role, seed, record, faults, opened_ns, ..FaultMatcher::default() }
    }

    /// The role of a process whose every call is an event.
    pub fn recorded_role(&self) -> Option<u32> {
        self.record.then_some(self.role)
    }

    /// Notes a new object.
    pub fn on_created(&mut self, kind: Resource, number: u32) {
        let count = self.created.entry(kind).or_default();
        *count += 1;
        self.ordinals.insert((kind, number), *count);
    }

    /// The place of an object in order of creation, from 1.
    pub fn ordinal(&self, kind: Resource, number: u32) -> Option<u32> {
        self.ordinals.get(&(kind, number)).copied()
    }

    /// The number of the object that was created last under this place.
    pub fn number(&self, kind: Resource, ordinal: u32) -> Option<u32> {
        let found = self.ordinals.iter().find(|((of, _), place)| *of == kind && **place == ordinal);
        found.map(|((_, number), _)| *number)
    }

    /// Notes what happened outside of the process: a step of a scenario, or another fault.
    pub fn on_trigger(&mut self, trigger: &FaultTrigger) {
        match trigger {
            FaultTrigger::Fault(id) => self.fired.insert(*id),
            FaultTrigger::Step(step) => self.steps.insert(*step),
            FaultTrigger::Call(..) | FaultTrigger::Event(_) | FaultTrigger::Time(_) => false,
        };
    }

    /// Notes an asynchronous event.
    pub fn on_async_event(&mut self, name: &'static str) {
        self.raised.insert(name);
    }

    /// Counts a call and returns where it is and which fault hits it: the first one in the file.
    pub fn on_call(&mut self, now_ns: u64, verb: Verb, object: Option<(Resource, u32)>) -> CallPoint {
        let object = object.and_then(|(kind, number)| self.ordinal(kind, number));
        *self.verb_calls.entry(verb).or_default() += 1;
        let nth = self.calls.entry((verb, object)).or_default();
        *nth += 1;
        let nth = *nth;
        let hit = self.next_hit(now_ns, FaultPoint::Call(verb), object).first().copied();
        CallPoint { object, nth, hit }
    }

    /// Counts a completion of a queue pair and returns the faults that hit it.
    pub fn on_completion(&mut self, now_ns: u64, qpn: u32) -> Vec<FaultHit> {
        let object = self.ordinal(Resource::QueuePair, qpn);
        self.next_hit(now_ns, FaultPoint::Completion, object)
    }

    fn next_hit(&mut self, now_ns: u64, point: FaultPoint, object: Option<u32>) -> Vec<FaultHit> {
        let elapsed = now_ns.saturating_sub(self.opened_ns);
        let mut hits: Vec<FaultHit> = Vec::new();
        for index in 0..self.faults.len() {
            let fault = &self.faults[index].fault;
            let applies = fault.point == point
                && fault.selected_object().is_none_or(|wanted| object == Some(wanted))
                && fault.after.as_ref().is_none_or(|trigger| self.happened(trigger, elapsed))
                && !fault.until.as_ref().is_some_and(|trigger| self.happened(trigger, elapsed));
            // A call fails once; later faults do not count it.
            if !applies || (!hits.is_empty() && point != FaultPoint::Completion) {
                continue;
            }
            let ActiveFault { fault, counter } = &mut self.faults[index];
            if counter.next(&fault.repeat, Seed(self.seed), fault.id) {
                self.fired.insert(fault.id);
                hits.push(FaultHit { rule: fault.id, action: fault.action, object: fault.object });
            }
        }
        hits
    }

    fn happened(&self, trigger: &FaultTrigger, elapsed_ns: u64) -> bool {
        match trigger {
            FaultTrigger::Call(verb, nth) => self.verb_calls.get(verb).is_some_and(|count| count >= nth),
            FaultTrigger::Event(name) => self.raised.contains(name.as_str()),
            FaultTrigger::Fault(id) => self.fired.contains(id),
            FaultTrigger::Time(ns) => elapsed_ns >= *ns,
            FaultTrigger::Step(step) => self.steps.contains(step),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Choice;
    use alloc::vec;
    use std::num::NonZeroU64;

    fn fault(id: u32, point: FaultPoint, repeat: Repeat) -> ProgramFault {
        let action = ProgramAction::Fail(Errno::ENOMEM);
        ProgramFault { id, process: None, point, object: None, repeat, after: None, until: None, action }
    }

    fn matcher(faults: Vec<ProgramFault>) -> FaultMatcher {
        FaultMatcher::new(ProgramFaults { seed: 1, faults, ..ProgramFaults::default() }, 0)
    }

    const POST: FaultPoint = FaultPoint::Call(Verb::PostSend);

    fn post(matcher: &mut FaultMatcher, now_ns: u64, qpn: u32) -> bool {
        matcher.on_call(now_ns, Verb::PostSend, Some((Resource::QueuePair, qpn))).hit.is_some()
    }

    #[test]
    fn a_point_is_the_call_on_an_object_in_order_of_creation() {
        let nth = Repeat { skip: 1, ..Repeat::times(1) };
        let mut matcher = matcher(vec![ProgramFault { object: Some(2), ..fault(1, POST, nth) }]);
        matcher.on_created(Resource::QueuePair, 900);
        matcher.on_created(Resource::QueuePair, 17);
        let hits: Vec<bool> = [900, 17, 900, 17, 17].map(|qpn| post(&mut matcher, 0, qpn)).into();
        assert_eq!(hits, [false, false, false, true, false]);
        // A number that is used again is a new object.
        matcher.on_created(Resource::QueuePair, 17);
        assert_eq!(matcher.ordinal(Resource::QueuePair, 17), Some(3));
        assert_eq!(matcher.number(Resource::QueuePair, 3), Some(17));
    }

    #[test]
    fn after_and_until_bound_the_time_in_which_a_fault_applies() {
        let all = Repeat::default();
        let first = ProgramFault {
            after: Some(FaultTrigger::Time(10)),
            until: Some(FaultTrigger::Event("PORT_ERR".into())),
            ..fault(1, POST, Repeat::choice(Choice::Every(NonZeroU64::new(2).expect("not zero"))))
        };
        let second = ProgramFault {
            after: Some(FaultTrigger::Fault(1)),
            ..fault(2, FaultPoint::Call(Verb::RegMr), all)
        };
        let mut matcher = matcher(vec![first, second]);
        assert!(matcher.on_call(0, Verb::RegMr, None).hit.is_none());
        assert_eq!([9, 10, 11, 12].map(|now| post(&mut matcher, now, 1)), [false, false, true, false]);
        assert_eq!(matcher.on_call(13, Verb::RegMr, None).hit.map(|hit| hit.rule), Some(2));
        matcher.on_async_event("PORT_ERR");
        assert_eq!([14, 15, 16].map(|now| post(&mut matcher, now, 1)), [false; 3]);
    }

    #[test]
    fn the_object_of_an_event_does_not_select_calls_on_another_kind_of_object() {
        let raise = |event| ProgramFault {
            object: Some(2),
            action: ProgramAction::Raise(event),
            ..fault(1, POST, Repeat::default())
        };
        let mut other_kind = matcher(vec![raise(InjectedEvent::CqErr)]);
        let mut same_kind = matcher(vec![raise(InjectedEvent::QpFatal)]);
        for matcher in [&mut other_kind, &mut same_kind] {
            matcher.on_created(Resource::QueuePair, 17);
        }
        assert!(post(&mut other_kind, 0, 17));
        assert!(!post(&mut same_kind, 0, 17));
    }

    #[test]
    fn a_fault_waits_for_a_step_or_a_fault_outside_of_the_process() {
        for trigger in [FaultTrigger::Step(2), FaultTrigger::Fault(9)] {
            let waiting = ProgramFault { after: Some(trigger.clone()), ..fault(1, POST, Repeat::default()) };
            let mut matcher = matcher(vec![waiting]);
            assert!(!post(&mut matcher, 0, 1));
            matcher.on_trigger(&FaultTrigger::Step(1));
            assert!(!post(&mut matcher, 0, 1));
            matcher.on_trigger(&trigger);
            assert!(post(&mut matcher, 0, 1));
        }
    }

    #[test]
    fn a_probability_gives_the_same_hits_for_the_same_seed() {
        let half = Repeat::choice(Choice::Probability { per_billion: crate::PER_BILLION / 2 });
        let hits = |seed| -> Vec<bool> {
            let faults = vec![fault(1, POST, half)];
            let mut matcher = FaultMatcher::new(ProgramFaults { seed, faults, ..Default::default() }, 0);
            (0..64).map(|_| post(&mut matcher, 0, 1)).collect()
        };
        assert_eq!(hits(1), hits(1));
        assert_ne!(hits(1), hits(2));
    }

    #[test]
    fn the_first_fault_of_the_file_hits_a_call_and_all_hit_a_completion() {
        let all = Repeat::default();
        let mut calls = matcher(vec![fault(1, POST, Repeat::times(1)), fault(2, POST, all)]);
        let rules = [1, 2, 3].map(|_| calls.on_call(0, Verb::PostSend, None).hit.map(|hit| hit.rule));
        assert_eq!(rules, [Some(1), Some(2), Some(2)]);
        let mut completions =
            matcher(vec![fault(1, FaultPoint::Completion, all), fault(2, FaultPoint::Completion, all)]);
        assert_eq!(completions.on_completion(0, 5).len(), 2);
    }
}
