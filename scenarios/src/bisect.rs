//! From which moment on a failure was inevitable: a failed run is repeated up to a time and continues differently, without
//! its faults or with other random numbers.

use crate::plan::{Branch, Continuation, FaultKind, FlowKind, Plan};
use crate::quantity::Time;
use crate::shrink::{has_symptom, symptoms};
use crate::{Recording, sim};
use softhca_fabric::{Action, Fault, FaultCause, Seed};
use std::collections::BTreeMap;

/// Moments after the first inevitable one that are tried too: a failure can be avoidable again.
const LATER_MOMENTS: usize = 8;
/// Moments between the last fault and the end of the run.
const MOMENTS_AFTER_FAULTS: u64 = 16;

/// A moment of a run, and its continuations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// The run continues differently from this time on.
    pub at_ns: u64,
    /// The faults before.
    pub faults: usize,
    /// The continuations that failed in the same way.
    pub failed: u32,
    /// All continuations.
    pub continuations: u32,
}

impl Moment {
    const fn is_inevitable(&self) -> bool {
        self.failed == self.continuations
    }
}

/// Where a failure became inevitable.
#[derive(Clone, Debug)]
pub struct Bisection {
    /// The expectations that did not hold.
    pub symptoms: Vec<String>,
    /// The moments that were tried, in the order of time.
    pub moments: Vec<Moment>,
    /// The first moment from which on every continuation failed; `None` if even at the last one some did not.
    pub inevitable: Option<Moment>,
    /// The last fault before that moment; `None` if no fault came before.
    pub cause: Option<String>,
    /// The end of the run.
    pub ended_ns: u64,
}

/// Finds the moment from which on a failing plan fails however it continues; `None` if it does not fail. Tries one
/// continuation without faults and `reseeds` with other random numbers at each moment, and calls `tried` with the number of
/// each run.
pub fn bisect(plan: &Plan, reseeds: u32, mut tried: impl FnMut(usize)) -> Option<Bisection> {
    let (outcome, hits) = sim::trace_faults(plan, Recording::Digest);
    tried(1);
    let symptoms = symptoms(&outcome)?;
    // A moment comes before the first fault, or just after a fault: between two faults nothing else changes.
    let mut times: Vec<u64> = hits.iter().map(|(_, hit)| hit.at_ns).chain(timed_faults(plan)).collect();
    times.retain(|at| *at <= outcome.ended_ns);
    times.sort_unstable();
    let mut moments = vec![0];
    moments.extend(times.iter().map(|at| at + 1));
    let last = times.last().copied().unwrap_or(0);
    let rest = outcome.ended_ns.saturating_sub(last) / MOMENTS_AFTER_FAULTS;
    moments.extend((1..=MOMENTS_AFTER_FAULTS).map(|part| last + 1 + part * rest));
    moments.dedup();
    let mut search = Search {
        plan,
        symptoms: &symptoms,
        reseeds,
        times,
        seen: BTreeMap::new(),
        runs: 1,
        tried: &mut tried,
    };
    let (mut first, mut last) = (0, moments.len() - 1);
    loop {
        while first < last {
            let middle = first.midpoint(last);
            match search.moment(moments[middle]).is_inevitable() {
                true => last = middle,
                false => first = middle + 1,
            }
        }
        let step = (moments.len() - 1 - first).div_ceil(LATER_MOMENTS).max(1);
        let mut later = (first + 1..moments.len()).step_by(step);
        let avoidable = later.rfind(|index| !search.moment(moments[*index]).is_inevitable());
        match avoidable {
            Some(index) if index + 1 < moments.len() => (first, last) = (index + 1, moments.len() - 1),
            _ => break,
        }
    }
    let inevitable = Some(search.moment(moments[first])).filter(Moment::is_inevitable);
    let moments = search.seen.into_values().collect();
    let cause = inevitable.and_then(|moment| last_fault(plan, &hits, moment.at_ns));
    Some(Bisection { symptoms, moments, inevitable, cause, ended_ns: outcome.ended_ns })
}

struct Search<'a> {
    plan: &'a Plan,
    symptoms: &'a [String],
    reseeds: u32,
    /// The times of faults.
    times: Vec<u64>,
    seen: BTreeMap<u64, Moment>,
    runs: usize,
    tried: &'a mut dyn FnMut(usize),
}

impl Search<'_> {
    fn moment(&mut self, at_ns: u64) -> Moment {
        if let Some(known) = self.seen.get(&at_ns) {
            return *known;
        }
        let reseeds = if is_random(self.plan) { self.reseeds } else { 0 };
        let seeds = (0..reseeds).map(|index| {
            Continuation::Reseeded(Seed(self.plan.seed).draw(&[0x6269_7365_6374, at_ns, index.into()]))
        });
        let continuations: Vec<Continuation> = std::iter::once(Continuation::Healed).chain(seeds).collect();
        let mut failed = 0;
        for continuation in &continuations {
            self.runs += 1;
            (self.tried)(self.runs);
            let mut plan = self.plan.clone();
            plan.branch = Some(Branch { at_ns, continuation: *continuation });
            // A fault that does not happen in a continuation is no failure.
            plan.faults.iter_mut().for_each(|fault| fault.optional = true);
            let outcome = sim::simulate(&plan, Recording::Digest);
            failed += u32::from(self.symptoms.iter().all(|symptom| has_symptom(&outcome, symptom)));
        }
        let faults = self.times.partition_point(|at| *at < at_ns);
        let moment = Moment { at_ns, faults, failed, continuations: continuations.len() as u32 };
        self.seen.insert(at_ns, moment);
        moment
    }
}

/// Whether other random numbers can change a run.
fn is_random(plan: &Plan) -> bool {
    let jitters = |action: &Action| matches!(action, Action::Jitter { .. } | Action::Corrupt { .. });
    plan.has_random_faults()
        || plan.flows.iter().any(|flow| matches!(flow.kind, FlowKind::KeyValue { .. }))
        || plan.packet_rules().any(|rule| jitters(&rule.action))
}

/// The times at which faults of links, switches, hosts and programs begin.
fn timed_faults(plan: &Plan) -> impl Iterator<Item = u64> {
    plan.faults.iter().filter_map(|fault| match &fault.kind {
        FaultKind::Timed { at_ns, .. } if fault.after.is_none() => Some(*at_ns),
        _ => None,
    })
}

/// The last fault before a time, in words.
fn last_fault(plan: &Plan, hits: &[(usize, Fault)], before_ns: u64) -> Option<String> {
    let of_packets = hits.iter().filter(|(_, hit)| hit.at_ns < before_ns).max_by_key(|(_, hit)| hit.at_ns);
    let of_packets = of_packets.map(|(_, hit)| (hit.at_ns, describe_hit(plan, hit)));
    let timed = plan.faults.iter().filter_map(|fault| match &fault.kind {
        FaultKind::Timed { at_ns, .. } if fault.after.is_none() && *at_ns < before_ns => {
            Some((*at_ns, format!("fault {:?}", fault.name)))
        }
        _ => None,
    });
    let (at_ns, what) = timed.chain(of_packets).max_by_key(|(at_ns, _)| *at_ns)?;
    Some(format!("{what} at {}", Time(at_ns)))
}

fn describe_hit(plan: &Plan, hit: &Fault) -> String {
    let cause = match hit.cause {
        FaultCause::Rule(id) => {
            let fault = plan.faults.iter().find(|fault| fault.id == id).map(|fault| fault.name.as_str());
            let of_link =
                plan.link_rules.iter().find(|of_link| of_link.rule.id == id).map(|of_link| of_link.name);
            format!("fault {:?}", fault.or(of_link).unwrap_or("?"))
        }
        FaultCause::LinkDown => "the link that is down".into(),
        FaultCause::ExceedsMtu => "the MTU of the link".into(),
    };
    let packet = &hit.packet;
    let opcode = packet.opcode.map_or_else(|| "a malformed packet".to_owned(), |opcode| opcode.to_string());
    let qp =
        packet.flow_id.map_or(String::new(), |role| format!(" of {}", plan.qps[Plan::qp_of_role(role)].name));
    let psn = packet.relative_psn.map_or(String::new(), |psn| format!(" PSN +{psn}"));
    format!("{cause} hit {opcode}{psn}{qp}")
}
