//! Delta debugging: finds a minimal list of faults with which a run still fails in the same way.
//!
//! A rule that hits many packets is first split into one fault for each packet that it hit. Runs are deterministic, so
//! these faults hit the same packets again.

use crate::plan::{FaultKind, FaultPlan, Node, Plan};
use crate::{Outcome, Recording, Verdict, sim};
use softhca_fabric::{
    Choice, Direction, Fault, InclusiveRange, PacketClasses, PacketType, Repeat, Rule, Selector,
};

/// Maximum number of hits of a rule that are considered.
const MAX_HITS: usize = 2_000;

/// A minimal list of faults.
#[derive(Clone, Debug)]
pub struct Minimized {
    /// The necessary faults, in the notation of scenario files.
    pub faults: Vec<String>,
    /// Original number of faults, counting each hit.
    pub before: usize,
    /// Result of the run with only these faults.
    pub outcome: Outcome,
}

/// A fault that may be unnecessary.
struct Candidate {
    plan: FaultPlan,
    text: String,
}

/// Reduces the faults of a failing plan to a list of which every fault is necessary; none if the plan does not fail.
/// Calls `tried` with the number of each run.
///
/// A rule that does not fire is not a failure here: removing one fault often keeps another from firing.
pub fn shrink(plan: &Plan, mut tried: impl FnMut(usize)) -> Option<Minimized> {
    let (outcome, hits) = sim::trace_faults(plan, Recording::Digest);
    tried(1);
    let symptoms = symptoms(&outcome)?;
    let mut candidates: Vec<Candidate> =
        plan.faults.iter().flat_map(|fault| split_by_hit(plan, fault, &hits)).collect();
    let before = candidates.len();
    let mut runs = 1;
    let mut best = outcome;
    let mut attempt = |candidates: &[&Candidate]| {
        runs += 1;
        tried(runs);
        let mut fewer = plan.clone();
        fewer.faults = candidates.iter().map(|candidate| candidate.plan.clone()).collect();
        let outcome = sim::simulate(&fewer, Recording::Digest);
        // Only the original failures count.
        symptoms.iter().all(|symptom| has_symptom(&outcome, symptom)).then_some(outcome)
    };
    // Try to remove half of the list, then a quarter, then single faults until none can be removed.
    let mut piece = candidates.len().div_ceil(2).max(1);
    loop {
        let mut changed = false;
        let mut at = 0;
        while at < candidates.len() {
            let end = (at + piece).min(candidates.len());
            let remaining: Vec<&Candidate> = candidates[..at].iter().chain(&candidates[end..]).collect();
            match attempt(&remaining) {
                Some(outcome) => {
                    candidates.drain(at..end);
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
    let faults = candidates.into_iter().map(|candidate| candidate.text).collect();
    Some(Minimized { faults, before, outcome: best })
}

/// The failures of a run: failed expectations, or an empty text if it could not be executed.
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

/// Splits a rule into one fault for each packet that it hit. Other faults stay as they are.
fn split_by_hit(plan: &Plan, fault: &FaultPlan, hits: &[(usize, Fault)]) -> Vec<Candidate> {
    let as_it_is = || {
        let optional = FaultPlan { optional: true, ..fault.clone() };
        vec![Candidate { plan: optional, text: format!("the fault {:?} of the file", fault.name) }]
    };
    let FaultKind::Packets { rule, .. } = &fault.kind else { return as_it_is() };
    let hits_one = rule.repeat.choice == Choice::All && rule.repeat.times == Some(1);
    let hits_of_rule: Vec<&(usize, Fault)> =
        hits.iter().filter(|(_, hit)| hit.cause == softhca_fabric::FaultCause::Rule(fault.id)).collect();
    let nameable = |(_, hit): &&(usize, Fault)| {
        hit.packet.flow_id.is_some()
            && hit.packet.relative_psn.is_some_and(|psn| psn >= 0)
            && hit.packet.transmission > 0
    };
    if hits_one || !hits_of_rule.iter().all(nameable) {
        return as_it_is();
    }
    hits_of_rule
        .into_iter()
        .take(MAX_HITS)
        .map(|(link, hit)| single_hit_fault(plan, fault, rule, *link, hit))
        .collect()
}

fn single_hit_fault(plan: &Plan, fault: &FaultPlan, rule: &Rule, link: usize, hit: &Fault) -> Candidate {
    let packet = &hit.packet;
    let (role, psn) = (packet.flow_id.expect("checked"), packet.relative_psn.expect("checked") as u64);
    let selector = Selector {
        direction: Some(hit.direction),
        classes: Some(PacketClasses::Only(packet.class)),
        flow_id: Some(role),
        packet_type: packet.packet_type,
        psn: Some(InclusiveRange::exactly(psn)),
        transmission: Some(InclusiveRange::exactly(packet.transmission)),
        ..Selector::default()
    };
    let name = |node: Node| match node {
        Node::Host(host) => plan.hosts[host].name.as_str(),
        Node::Switch(switch) => plan.switches[switch].name.as_str(),
    };
    let [first, second] = plan.links[link].ends.map(name);
    let [from, to] = if hit.direction == Direction::Forward { [first, second] } else { [second, first] };
    let class = if packet.packet_type == Some(PacketType::Request) { "request" } else { "response" };
    let text = format!(
        "[[fault]] # part of {:?}: {:?}\n  on = \"{from} -> {to}\"\n  match = {{ class = \"{class}\", qp = \"{}\", psn = \"+{psn}\", \
         transmission = {} }}\n  action = {}\n  times = 1",
        fault.name,
        hit.effect,
        plan.qps[Plan::qp_of_role(role)].name,
        packet.transmission,
        action_toml(&rule.action)
    );
    // Keep the id: random decisions depend on it.
    let rule = Rule { id: rule.id, selector, repeat: Repeat::times(1), action: rule.action };
    let kind = FaultKind::Packets { links: vec![link], rule };
    Candidate { plan: FaultPlan { id: fault.id, name: fault.name.clone(), optional: true, kind }, text }
}

/// An action in the notation of scenario files.
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
