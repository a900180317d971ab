//! Whether a run converges after its faults have ended, and what waits for what if it does not.

use super::{CheckResult, Evaluator};
use crate::executor::{ObservedCompletion, Origin};
use crate::plan::{HealPlan, StepAction};
use crate::quantity::Time;
use crate::report::ExpectationOutcome;
use softhca_engine::QpState;

/// The most waits that a verdict names.
const MAX_WAITS: usize = 8;

impl Evaluator<'_> {
    /// All work is complete at the deadline, and every workload without an end has made progress.
    pub(super) fn convergence(&self, heal: &HealPlan) -> ExpectationOutcome {
        let (at, deadline) = (Time(heal.at_ns), Time(heal.deadline_ns - heal.at_ns));
        let text = format!("after the faults end at {at}, all work completes within {deadline}");
        let waits = self.waits(heal.at_ns);
        let last = self.results.log.completions.last();
        let location =
            last.map_or_else(|| self.default_location(), |seen| self.location(seen.time_ns, seen.qp));
        let result = match waits.len() {
            0 => {
                let last = last.map_or("there was none".into(), |seen| format!("at {}", Time(seen.time_ns)));
                CheckResult::new(true, format!("the last completion: {last}"))
            }
            found => {
                let mut detail = waits[..found.min(MAX_WAITS)].join("; ");
                if found > MAX_WAITS {
                    detail += &format!("; and {} more", found - MAX_WAITS);
                }
                CheckResult::new(false, detail)
            }
        };
        result.at(location).outcome(&text, Some(heal.at.clone()))
    }

    /// What waits, and for what.
    fn waits(&self, healed_ns: u64) -> Vec<String> {
        let (plan, log) = (self.plan, &self.results.log);
        let mut waits = Vec::new();
        let mut described = vec![false; plan.qps.len()];
        for (index, flow) in plan.flows.iter().enumerate() {
            let progress = log.progress[index];
            let name = &plan.workloads[flow.workload];
            let is_after = |seen: &ObservedCompletion| {
                seen.time_ns >= healed_ns && seen.origin == Some(Origin::Flow(index))
            };
            let progressed = match flow.count {
                Some(count) if progress.done < count => format!("{} of {count} messages", progress.done),
                None if flow.until_ns.is_none() && !log.completions.iter().any(is_after) => {
                    "no message since".to_owned()
                }
                _ => continue,
            };
            if progress.is_finished {
                continue;
            }
            described[flow.qp] = true;
            waits.push(format!("{name:?} has {progressed}: {}", self.wait_of(flow.qp)));
        }
        for (index, step) in plan.steps.iter().enumerate() {
            let is_receive = matches!(step.action, StepAction::Receive { .. });
            if log.pending_completions[index] == 0 || is_receive {
                continue;
            }
            let name = |index: usize| match &plan.steps[index].name {
                Some(name) => format!("step {name:?}"),
                None => format!("step {}", index + 1),
            };
            match step.after.filter(|after| log.pending_completions[*after] > 0) {
                Some(after) => waits.push(format!("{} waits for {}", name(index), name(after))),
                None if !described[step.qp] => {
                    described[step.qp] = true;
                    waits.push(format!("{}: {}", name(index), self.wait_of(step.qp)));
                }
                None => {}
            }
        }
        for (qp, _) in described.iter().enumerate().filter(|(_, is_described)| !**is_described) {
            if self.results.end.waits[qp].is_some() {
                waits.push(self.wait_of(qp));
            }
        }
        waits
    }

    /// What a queue pair waits for, and the state of its peer.
    fn wait_of(&self, qp: usize) -> String {
        let (end, name, peer) = (&self.results.end, self.name(qp), self.plan.qps[qp].peer);
        let state = |qp: usize| match end.states[qp] {
            Some(QpState::Error) => {
                let last = self.results.record.states.iter().rev().find(|(_, at, ..)| *at == qp);
                last.map_or("ERR".into(), |(time_ns, _, _, reason)| {
                    format!("ERR since {}: {reason}", Time(*time_ns))
                })
            }
            Some(state) => state.to_string(),
            None => "destroyed".into(),
        };
        let wait = match &end.waits[qp] {
            Some(wait) => format!("{name} waits for {wait}"),
            None => format!("{name} has nothing posted and is {}", state(qp)),
        };
        match end.states[peer] {
            Some(QpState::ReadyToSend) => wait,
            _ => format!("{wait}; {} is {}", self.name(peer), state(peer)),
        }
    }
}
