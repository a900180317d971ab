//! Delta debugging: the fewest faults with which a run still fails.
//!
//! A rule that hits many packets, by chance or by count, is first taken apart into one fault for each packet
//! that it hit; runs are the same every time, so that those hit the same packets again.

use crate::plan::{FaultKind, FaultPlan, Node, Plan};
use crate::{Outcome, Verdict, sim};
use softhca_fabric::{Choice, Classes, Direction, Fault, Repeat, Rule, Selector, Sense, Span};

/// Of a rule that hit more packets than this, the first so many are looked at.
const MOST_HITS: usize = 2_000;

/// What remained of a list of faults.
#[derive(Clone, Debug)]
pub struct Shrunk {
    /// The faults that are enough, as a scenario file would say them.
    pub faults: Vec<String>,
    /// How many there were, each hit counted.
    pub before: usize,
    /// What the run with only these comes to.
    pub outcome: Outcome,
}

/// A fault that may be left out.
struct Suspect {
    plan: FaultPlan,
    text: String,
}

/// Reduces the faults of a plan that fails to a list from which none can be left out; nothing if the plan does
/// not fail. `tried` is told the number of each run.
///
/// A rule that does not fire is no failure here: leaving out one fault often keeps another from firing.
pub fn shrink(plan: &Plan, mut tried: impl FnMut(usize)) -> Option<Shrunk> {
    let (outcome, hits) = sim::trace_faults(plan);
    tried(1);
    if !fails(&outcome) {
        return None;
    }
    let mut suspects: Vec<Suspect> =
        plan.faults.iter().flat_map(|fault| take_apart(plan, fault, &hits)).collect();
    let before = suspects.len();
    let mut runs = 1;
    let mut best = outcome;
    let mut attempt = |suspects: &[&Suspect]| {
        runs += 1;
        tried(runs);
        let mut fewer = plan.clone();
        fewer.faults = suspects.iter().map(|suspect| suspect.plan.clone()).collect();
        let outcome = sim::simulate(&fewer, sim::Recording::Digest);
        fails(&outcome).then_some(outcome)
    };
    // Larger pieces first: half of the list, then a quarter, then one by one until nothing more can go.
    let mut piece = suspects.len().div_ceil(2).max(1);
    loop {
        let mut changed = false;
        let mut at = 0;
        while at < suspects.len() {
            let end = (at + piece).min(suspects.len());
            let rest: Vec<&Suspect> = suspects[..at].iter().chain(&suspects[end..]).collect();
            match attempt(&rest) {
                Some(outcome) => {
                    suspects.drain(at..end);
                    (best, changed) = (outcome, true);
                }
                None => at = end,
            }
        }
        match piece {
            1 if !changed => break,
            1 => {}
            _ => piece = piece.div_ceil(2),
        }
    }
    let faults = suspects.into_iter().map(|suspect| suspect.text).collect();
    Some(Shrunk { faults, before, outcome: best })
}

fn fails(outcome: &Outcome) -> bool {
    outcome.verdict == Verdict::Error || outcome.failures().any(|failure| !failure.is_about_a_rule())
}

/// A rule as one fault for each packet that it hit; anything else as it is.
fn take_apart(plan: &Plan, fault: &FaultPlan, hits: &[(usize, Fault)]) -> Vec<Suspect> {
    let as_it_is = || {
        let optional = FaultPlan { optional: true, ..fault.clone() };
        vec![Suspect { plan: optional, text: format!("the fault {:?}, as it is in the file", fault.name) }]
    };
    let FaultKind::Packets { rule, .. } = &fault.kind else { return as_it_is() };
    let hits_one = rule.repeat.choice == Choice::Each && rule.repeat.times == Some(1);
    let mine: Vec<&(usize, Fault)> =
        hits.iter().filter(|(_, hit)| hit.cause == softhca_fabric::Cause::Rule(fault.id)).collect();
    let nameable = |(_, hit): &&(usize, Fault)| {
        hit.sighting.role.is_some()
            && hit.sighting.relative_psn.is_some_and(|psn| psn >= 0)
            && hit.sighting.transmission > 0
    };
    if hits_one || !mine.iter().all(nameable) {
        return as_it_is();
    }
    mine.into_iter().take(MOST_HITS).map(|(cable, hit)| one_hit(plan, fault, rule, *cable, hit)).collect()
}

fn one_hit(plan: &Plan, fault: &FaultPlan, rule: &Rule, cable: usize, hit: &Fault) -> Suspect {
    let sighting = &hit.sighting;
    let (role, psn) = (sighting.role.expect("checked"), sighting.relative_psn.expect("checked") as u64);
    let selector = Selector {
        direction: Some(hit.direction),
        classes: Some(Classes::Only(sighting.class)),
        role: Some(role),
        sense: sighting.sense,
        psn: Some(Span::exactly(psn)),
        transmission: Some(Span::exactly(sighting.transmission)),
        ..Selector::default()
    };
    let name = |node: Node| match node {
        Node::Host(host) => plan.hosts[host].name.as_str(),
        Node::Switch(switch) => plan.switches[switch].name.as_str(),
    };
    let [first, second] = plan.cables[cable].ends.map(name);
    let [from, to] = if hit.direction == Direction::Forward { [first, second] } else { [second, first] };
    let class = if sighting.sense == Some(Sense::Request) { "data" } else { "answer" };
    let text = format!(
        "[[fault]] # of {:?}: {:?}\n  on = \"{from} -> {to}\"\n  match = {{ class = \"{class}\", qp = \"{}\", psn = \"+{psn}\", \
         transmission = {} }}\n  action = {}\n  times = 1",
        fault.name,
        hit.effect,
        plan.qps[Plan::of_role(role)].name,
        sighting.transmission,
        spoken(&rule.action)
    );
    // The number stays: what chance decides about a packet depends on it.
    let rule = Rule { id: rule.id, selector, repeat: Repeat::times(1), action: rule.action };
    let kind = FaultKind::Packets { cables: vec![cable], rule };
    Suspect { plan: FaultPlan { id: fault.id, name: fault.name.clone(), optional: true, kind }, text }
}

/// An action as a scenario file says it.
fn spoken(action: &softhca_fabric::Action) -> String {
    use softhca_fabric::Action;
    match action {
        Action::Count => "\"count\"".into(),
        Action::Drop => "\"drop\"".into(),
        Action::Duplicate { copies } => format!("{{ duplicate = {copies} }}"),
        Action::Reorder { by, within_ns } => {
            format!("{{ reorder = {{ by = {by}, within = \"{within_ns}ns\" }} }}")
        }
        Action::Delay { ns } => format!("{{ delay = \"{ns}ns\" }}"),
        Action::Corrupt { .. } => "{ corrupt = {} }".into(),
        Action::MarkCe => "\"mark-ce\"".into(),
        Action::Rewrite { .. } => "{ rewrite = … }".into(),
        Action::LinkDown { for_ns, .. } => format!("{{ down = {{ for = \"{for_ns}ns\" }} }}"),
    }
}
