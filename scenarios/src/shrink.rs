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

/// The most calls or completions into which a fault is split.
const MAX_CALLS: u64 = 64;

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

/// Removes what `fails` does not need: half of the list, then a quarter, then single ones until none can be removed.
pub fn minimize<T>(mut candidates: Vec<T>, mut fails: impl FnMut(&[&T]) -> bool) -> Vec<T> {
    let mut piece = candidates.len().div_ceil(2).max(1);
    loop {
        let mut changed = false;
        let mut at = 0;
        while at < candidates.len() {
            let end = (at + piece).min(candidates.len());
            let remaining: Vec<&T> = candidates[..at].iter().chain(&candidates[end..]).collect();
            if fails(&remaining) {
                candidates.drain(at..end);
                changed = true;
            } else {
                at = end;
            }
        }
        match piece {
            1 if !changed => return candidates,
            1 => {}
            _ => piece = piece.div_ceil(2),
        }
    }
}

/// The keys of a file that contain faults.
const FAULT_KEYS: [&str; 2] = ["fault", "data-pkt-events"];

/// A fault of a file as TOML.
#[derive(Clone, Debug)]
pub struct FaultText {
    key: &'static str,
    table: toml::Table,
}

impl FaultText {
    /// The faults of a file, in the order of their ids.
    pub fn all(text: &str) -> Vec<FaultText> {
        let file: toml::Table = text.parse().unwrap_or_default();
        let of_key = |key: &'static str| {
            let entries = file.get(key).and_then(toml::Value::as_array).into_iter().flatten();
            let tables = entries.filter_map(|entry| entry.as_table().cloned());
            tables.map(|table| FaultText { key, table }).collect::<Vec<_>>()
        };
        FAULT_KEYS.into_iter().flat_map(of_key).collect()
    }

    /// The fault as one fault for each of its first hits, if it hits calls or completions without further conditions.
    pub fn split(&self, hits: u64) -> Vec<FaultText> {
        let number = |key: &str| self.table.get(key).and_then(toml::Value::as_integer);
        let has = |key: &str| self.table.contains_key(key);
        let hits_calls = ["verb", "qp"].into_iter().any(has);
        let is_conditional =
            ["every", "pattern", "probability", "nth", "after", "until"].into_iter().any(has);
        if !hits_calls || is_conditional || !(2..=MAX_CALLS).contains(&hits) {
            return vec![self.clone()];
        }
        let single = |n: i64| {
            let mut table = self.table.clone();
            let nth = number("skip").unwrap_or(0) + n;
            table.remove("skip");
            table.remove("times");
            let name = table.get("name").and_then(toml::Value::as_str).map(|name| format!("{name} ({nth})"));
            if let Some(name) = name {
                table.insert("name".into(), name.into());
            }
            table.insert("nth".into(), nth.into());
            FaultText { key: self.key, table }
        };
        (1..=hits as i64).map(single).collect()
    }

    /// Marks the fault as one that need not happen.
    pub fn optional(mut self) -> FaultText {
        if self.key == FAULT_KEYS[0] {
            self.table.insert("optional".into(), true.into());
        }
        self
    }
}

impl std::fmt::Display for FaultText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[[{}]]", self.key)?;
        self.table.iter().try_for_each(|(key, value)| write!(f, "\n{key} = {value}"))
    }
}

/// A file with these faults in place of its own. Comments are lost.
pub fn with_faults(text: &str, faults: &[String]) -> String {
    let mut file: toml::Table = text.parse().unwrap_or_default();
    file.retain(|key, _| !FAULT_KEYS.contains(&key));
    format!("{file}\n{}\n", faults.join("\n\n"))
}

/// Reduces the faults of a failing plan to a list of which every fault is necessary; none if the plan does not fail.
/// `text` is the file of the plan. Calls `tried` with the number of each run.
///
/// A rule that does not fire is not a failure here: removing one fault often keeps another from firing.
pub fn shrink(plan: &Plan, text: &str, mut tried: impl FnMut(usize)) -> Option<Minimized> {
    let (outcome, hits) = sim::trace_faults(plan, Recording::Digest);
    tried(1);
    let symptoms = symptoms(&outcome)?;
    let texts = FaultText::all(text);
    let split = |(fault, text): (&FaultPlan, &FaultText)| split_by_hit(plan, fault, text, &hits);
    let candidates: Vec<Candidate> = plan.faults.iter().zip(&texts).flat_map(split).collect();
    let before = candidates.len();
    let mut runs = 1;
    let mut best = outcome;
    let candidates = minimize(candidates, |candidates| {
        runs += 1;
        tried(runs);
        let mut fewer = plan.clone();
        fewer.faults = candidates.iter().map(|candidate| candidate.plan.clone()).collect();
        let outcome = sim::simulate(&fewer, Recording::Digest);
        // Only the original failures count.
        let fails = symptoms.iter().all(|symptom| has_symptom(&outcome, symptom));
        if fails {
            best = outcome;
        }
        fails
    });
    let faults = candidates.into_iter().map(|candidate| candidate.text).collect();
    Some(Minimized { faults, before, outcome: best })
}

/// The failures of a run: failed expectations, or an empty text if it could not be executed.
pub(crate) fn symptoms(outcome: &Outcome) -> Option<Vec<String>> {
    let broken = outcome.error.iter().map(|_| String::new());
    let failures =
        outcome.failures().filter(|failure| !failure.is_unfired_rule()).map(|failure| failure.text.clone());
    let symptoms: Vec<String> = broken.chain(failures).collect();
    (!symptoms.is_empty()).then_some(symptoms)
}

pub(crate) fn has_symptom(outcome: &Outcome, symptom: &str) -> bool {
    match symptom {
        "" => outcome.verdict == Verdict::Error,
        text => outcome.failures().any(|failure| failure.text == text),
    }
}

/// Splits a rule into one fault for each packet that it hit. Other faults stay as they are.
fn split_by_hit(plan: &Plan, fault: &FaultPlan, text: &FaultText, hits: &[(usize, Fault)]) -> Vec<Candidate> {
    let as_it_is =
        || vec![Candidate { plan: FaultPlan { optional: true, ..fault.clone() }, text: text.to_string() }];
    let FaultKind::Packets { rule, .. } = &fault.kind else { return as_it_is() };
    let hits_one = rule.repeat.choice == Choice::All && rule.repeat.times == Some(1);
    let hits_of_rule: Vec<&(usize, Fault)> =
        hits.iter().filter(|(_, hit)| hit.cause == softhca_fabric::FaultCause::Rule(fault.id)).collect();
    let nameable = |(_, hit): &&(usize, Fault)| {
        hit.packet.flow_id.is_some()
            && hit.packet.relative_psn.is_some_and(|psn| psn >= 0)
            && hit.packet.transmission > 0
    };
    let Some(action) = text.table.get("action").filter(|_| !hits_one) else { return as_it_is() };
    if !hits_of_rule.iter().all(nameable) {
        return as_it_is();
    }
    hits_of_rule
        .into_iter()
        .take(MAX_HITS)
        .map(|(link, hit)| single_hit_fault(plan, fault, rule, action, *link, hit))
        .collect()
}

fn single_hit_fault(
    plan: &Plan,
    fault: &FaultPlan,
    rule: &Rule,
    action: &toml::Value,
    link: usize,
    hit: &Fault,
) -> Candidate {
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
        "[[fault]] # part of {:?}: {:?}\non = \"{from} -> {to}\"\nmatch = {{ class = \"{class}\", qp = \"{}\", psn = \"+{psn}\", \
         transmission = {} }}\naction = {action}\ntimes = 1",
        fault.name,
        hit.effect,
        plan.qps[Plan::qp_of_role(role)].name,
        packet.transmission,
    );
    // Keep the id: random decisions depend on it.
    let rule = Rule { id: rule.id, selector, repeat: Repeat::times(1), action: rule.action };
    let kind = FaultKind::Packets { links: vec![link], rule };
    let (name, after) = (fault.name.clone(), fault.after.clone());
    Candidate {
        plan: FaultPlan { id: fault.id, name, optional: true, after, kind, at: fault.at.clone() },
        text,
    }
}
