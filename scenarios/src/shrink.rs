//! Delta debugging: the fewest faults with which a run still fails in the same way.
//!
//! A rule that hits many packets, by chance or by count, is first taken apart into one fault for each packet
//! that it hit; runs are the same every time, so that those hit the same packets again.

use crate::plan::{FaultKind, FaultPlan, Node, Plan};
use crate::{Outcome, Verdict, sim};
use softhca_fabric::{
    Choice, Direction, Fault, InclusiveRange, PacketClasses, PacketType, Repeat, Rule, Selector,
};

/// Of a rule that hit more packets than this, the first so many are looked at.
const MAX_HITS: usize = 2_000;

/// What remained of a list of faults.
#[derive(Clone, Debug)]
pub struct Minimized {
    /// The faults that are enough, as a scenario file would say them.
    pub faults: Vec<String>,
    /// How many there were, each hit counted.
    pub before: usize,
    /// What the run with only these comes to.
    pub outcome: Outcome,
}

/// A fault that may be left out.
struct Candidate {
    plan: FaultPlan,
    text: String,
}

/// Reduces the faults of a plan that fails to a list from which none can be left out; nothing if the plan does
/// not fail. `tried` is told the number of each run.
///
/// A rule that does not fire is no failure here: leaving out one fault often keeps another from firing.
pub fn shrink(plan: &Plan, mut tried: impl FnMut(usize)) -> Option<Minimized> {
    let (outcome, hits) = sim::trace_faults(plan);
    tried(1);
    let symptoms = symptoms(&outcome)?;
    let mut suspects: Vec<Candidate> =
        plan.faults.iter().flat_map(|fault| split_by_hit(plan, fault, &hits)).collect();
    let before = suspects.len();
    let mut runs = 1;
    let mut best = outcome;
    let mut attempt = |suspects: &[&Candidate]| {
        runs += 1;
        tried(runs);
        let mut fewer = plan.clone();
        fewer.faults = suspects.iter().map(|suspect| suspect.plan.clone()).collect();
        let outcome = sim::simulate(&fewer, sim::Recording::Digest);
        // Other failures than those that were there at first are another story.
        symptoms.iter().all(|symptom| has_symptom(&outcome, symptom)).then_some(outcome)
    };
    // Larger pieces first: half of the list, then a quarter, then one by one until nothing more can go.
    let mut piece = suspects.len().div_ceil(2).max(1);
    loop {
        let mut changed = false;
        let mut at = 0;
        while at < suspects.len() {
            let end = (at + piece).min(suspects.len());
            let rest: Vec<&Candidate> = suspects[..at].iter().chain(&suspects[end..]).collect();
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
    Some(Minimized { faults, before, outcome: best })
}

/// What is wrong with a run: the expectations that did not hold, or that it could not be carried out.
fn symptoms(outcome: &Outcome) -> Option<Vec<String>> {
    let broken = outcome.error.iter().map(|_| String::new());
    let failures =
        outcome.failures().filter(|failure| !failure.is_unfired_rule()).map(|failure| failure.text.clone());
    let symptoms: Vec<String> = broken.chain(failures).collect();
    (!symptoms.is_empty()).then_some(symptoms)
}

fn has_symptom(outcome: &Outcome, symptom: &str) -> bool {
    match symptom {
        "" => outcome.verdict == Verdict::Error,
        text => outcome.failures().any(|failure| failure.text == text),
    }
}

/// A rule as one fault for each packet that it hit; anything else as it is.
fn split_by_hit(plan: &Plan, fault: &FaultPlan, hits: &[(usize, Fault)]) -> Vec<Candidate> {
    let as_it_is = || {
        let optional = FaultPlan { optional: true, ..fault.clone() };
        vec![Candidate { plan: optional, text: format!("the fault {:?}, as it is in the file", fault.name) }]
    };
    let FaultKind::Packets { rule, .. } = &fault.kind else { return as_it_is() };
    let hits_one = rule.repeat.choice == Choice::All && rule.repeat.times == Some(1);
    let mine: Vec<&(usize, Fault)> =
        hits.iter().filter(|(_, hit)| hit.cause == softhca_fabric::FaultCause::Rule(fault.id)).collect();
    let nameable = |(_, hit): &&(usize, Fault)| {
        hit.packet.flow_id.is_some()
            && hit.packet.relative_psn.is_some_and(|psn| psn >= 0)
            && hit.packet.transmission > 0
    };
    if hits_one || !mine.iter().all(nameable) {
        return as_it_is();
    }
    mine.into_iter()
        .take(MAX_HITS)
        .map(|(cable, hit)| single_hit_fault(plan, fault, rule, *cable, hit))
        .collect()
}

fn single_hit_fault(plan: &Plan, fault: &FaultPlan, rule: &Rule, cable: usize, hit: &Fault) -> Candidate {
    let sighting = &hit.packet;
    let (role, psn) = (sighting.flow_id.expect("checked"), sighting.relative_psn.expect("checked") as u64);
    let selector = Selector {
        direction: Some(hit.direction),
        classes: Some(PacketClasses::Only(sighting.class)),
        flow_id: Some(role),
        packet_type: sighting.packet_type,
        psn: Some(InclusiveRange::exactly(psn)),
        transmission: Some(InclusiveRange::exactly(sighting.transmission)),
        ..Selector::default()
    };
    let name = |node: Node| match node {
        Node::Host(host) => plan.hosts[host].name.as_str(),
        Node::Switch(switch) => plan.switches[switch].name.as_str(),
    };
    let [first, second] = plan.links[cable].ends.map(name);
    let [from, to] = if hit.direction == Direction::Forward { [first, second] } else { [second, first] };
    let class = if sighting.packet_type == Some(PacketType::Request) { "request" } else { "response" };
    let text = format!(
        "[[fault]] # of {:?}: {:?}\n  on = \"{from} -> {to}\"\n  match = {{ class = \"{class}\", qp = \"{}\", psn = \"+{psn}\", \
         transmission = {} }}\n  action = {}\n  times = 1",
        fault.name,
        hit.effect,
        plan.qps[Plan::qp_of_role(role)].name,
        sighting.transmission,
        action_toml(&rule.action)
    );
    // The number stays: what chance decides about a packet depends on it.
    let rule = Rule { id: rule.id, selector, repeat: Repeat::times(1), action: rule.action };
    let kind = FaultKind::Packets { links: vec![cable], rule };
    Candidate { plan: FaultPlan { id: fault.id, name: fault.name.clone(), optional: true, kind }, text }
}

/// An action as a scenario file says it.
fn action_toml(action: &softhca_fabric::Action) -> String {
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
        Action::LinkDown { for_ns, .. } => format!("{{ link-down = {{ for = \"{for_ns}ns\" }} }}"),
    }
}
