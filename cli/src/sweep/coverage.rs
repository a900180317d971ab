//! The coverage of a sweep: groups of equivalent points, and the faults that are plausible at each.

use super::injection::{EVENTS, Injection, PacketFault, STATUSES, SweepFault};
use super::point::{Point, PointKind};
use super::recording::{CallContext, Recording};
use super::target::Target;
use softhca::Verb;
use softhca::fault::InjectedEvent;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

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

/// The key of equivalent points. Calls of one verb from one place of the program in one state of the queue pair are
/// equivalent. So are the completions and packets of one queue pair. Calls whose place is unknown are grouped by
/// object.
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
    /// Their common key.
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
                let usable = |event: &InjectedEvent| verb == Verb::PostSend || event.object().is_none();
                faults.extend(EVENTS.into_iter().filter(usable).map(SweepFault::Event));
                faults.push(SweepFault::LinkFlap);
            }
        }
        PointKind::Request | PointKind::Response if coverage.packets => {
            faults.extend(PacketFault::ALL.map(SweepFault::Packet));
        }
        PointKind::Completion if coverage.events => {
            faults.extend(STATUSES.map(SweepFault::Status));
            if target.role_of(&point.role).is_some_and(|role| clean.waits_for_events.contains(&role)) {
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
}
