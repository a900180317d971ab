//! Measurements of a run: goodput, fairness, latency, and what was done when.

use super::{CheckResult, Evaluator};
use crate::executor::{ObservedCompletion, Origin};
use crate::plan::{Bound, FlowKind, Subject};
use crate::quantity::{Rate, Time};
use softhca_fabric::InclusiveRange;
use std::collections::BTreeMap;

impl Evaluator<'_> {
    /// Completions of a subject that count as work done, in order.
    fn finished_work<'b>(&'b self, of: &'b Subject) -> impl Iterator<Item = &'b ObservedCompletion> {
        self.results.log.completions.iter().filter(move |seen| {
            let mine = match seen.origin {
                Some(Origin::Flow(flow)) => of.step.is_none() && of.workload.is_none_or(|w| self.plan.flows[flow].workload == w),
                Some(Origin::Step(step)) => of.workload.is_none() && of.step.is_none_or(|wanted| wanted == step),
                _ => false,
            };
            // A round of a ping-pong is done when the answer is there, anything else when it completes.
            let is_round = matches!(seen.origin, Some(Origin::Flow(flow)) if self.plan.flows[flow].kind == FlowKind::PingPong);
            let counts = seen.completion.opcode.is_receive() == is_round;
            mine && counts && of.qps.contains(&seen.qp) && seen.completion.status.is_success()
        })
    }

    fn goodput(&self, of: &Subject, during: Option<InclusiveRange>) -> u64 {
        let window = during.map(|span| (span.first, span.last.min(self.results.end.ended_ns)));
        let inside = |seen: &&ObservedCompletion| {
            window.is_none_or(|(first, last)| (first..=last).contains(&seen.time_ns))
        };
        let bytes: u128 = self.finished_work(of).filter(inside).map(|seen| u128::from(seen.bytes)).sum();
        let (first, last) = window.unwrap_or_else(|| {
            let first = self.finished_work(of).map(|seen| seen.posted_ns).min().unwrap_or(0);
            (first, self.finished_work(of).map(|seen| seen.time_ns).max().unwrap_or(0))
        });
        match u128::from(last.saturating_sub(first)) {
            0 => 0,
            ns => (bytes * 8 * 1_000_000_000 / ns) as u64,
        }
    }

    pub(super) fn check_goodput(
        &self,
        of: &Subject,
        bound: &Bound<u64>,
        during: Option<InclusiveRange>,
    ) -> CheckResult {
        let rate = self.goodput(of, during);
        CheckResult::new(within_bound(bound, rate), format!("it is {}", Rate(rate)))
            .at(self.default_location())
    }

    pub(super) fn fairness(
        &self,
        of: &[Subject],
        bound: &Bound<f64>,
        during: Option<InclusiveRange>,
    ) -> CheckResult {
        let rates: Vec<u64> = of.iter().map(|subject| self.goodput(subject, during)).collect();
        let index = jain_index(&rates);
        let shares: Vec<String> = of
            .iter()
            .zip(&rates)
            .map(|(subject, rate)| format!("{} {}", subject.name, Rate(*rate)))
            .collect();
        let detail = format!("it is {index:.3}: {}", shares.join(", "));
        CheckResult::new(within_bound(bound, index), detail).at(self.default_location())
    }

    /// The goodput of every workload.
    pub(super) fn goodputs(&self) -> BTreeMap<String, u64> {
        if self.results.end.in_real_time {
            return BTreeMap::new();
        }
        let one = |(workload, name): (usize, &String)| {
            let flows = self.plan.flows.iter().filter(|flow| flow.workload == workload);
            let of = Subject {
                name: name.clone(),
                qps: flows.map(|flow| flow.qp).collect(),
                workload: Some(workload),
                step: None,
            };
            (name.clone(), self.goodput(&of, None))
        };
        self.plan.workloads.iter().enumerate().map(one).collect()
    }

    pub(super) fn latency(&self, of: &Subject, percentile: f64, bound: &Bound<u64>) -> CheckResult {
        let mut times: Vec<u64> = self.finished_work(of).map(|seen| seen.time_ns - seen.posted_ns).collect();
        times.sort_unstable();
        // The smallest time that so many per cent do not exceed.
        let rank =
            ((percentile / 100.0 * times.len() as f64).ceil() as usize).clamp(1, times.len().max(1)) - 1;
        match times.get(rank) {
            None => CheckResult::new(false, "nothing completed").at(self.default_location()),
            Some(time) => {
                let detail = format!("it is {} of {} work requests", Time(*time), times.len());
                CheckResult::new(within_bound(bound, *time), detail).at(self.default_location())
            }
        }
    }

    pub(super) fn finish(&self, of: Option<&Subject>, bound: &Bound<u64>) -> CheckResult {
        let log = self.results.log;
        let mut open = Vec::new();
        for (index, flow) in self.plan.flows.iter().enumerate() {
            let mine = of.is_none_or(|of| {
                of.workload.map_or(of.step.is_none() && of.qps.contains(&flow.qp), |w| w == flow.workload)
            });
            let done = log.progress[index].done;
            if mine && flow.count.is_some_and(|count| done < count) {
                open.push(format!(
                    "{} did {done} of {} messages",
                    self.name(flow.qp),
                    flow.count.unwrap_or(0)
                ));
            }
        }
        for (index, step) in self.plan.steps.iter().enumerate() {
            let mine = of.is_none_or(|of| {
                of.step.map_or(of.workload.is_none() && of.qps.contains(&step.qp), |wanted| wanted == index)
            });
            if mine && log.pending_completions[index] > 0 {
                let name = step.name.clone().unwrap_or_else(|| format!("step {}", index + 1));
                open.push(format!("{name} waits for {} completions", log.pending_completions[index]));
            }
        }
        let last = log
            .completions
            .iter()
            .filter(|seen| of.is_none_or(|of| of.qps.contains(&seen.qp)))
            .map(|seen| seen.time_ns)
            .max();
        let time_ns = last.unwrap_or(0);
        let detail = match open.is_empty() {
            true => format!("done at {}", Time(time_ns)),
            false => open.join("; "),
        };
        let held = open.is_empty() && within_bound(bound, time_ns);
        let qp = of.and_then(|of| of.qps.first().copied()).unwrap_or(0);
        CheckResult::new(held, detail).at(self.location(time_ns, qp))
    }
}

fn within_bound<T: PartialOrd>(bound: &Bound<T>, value: T) -> bool {
    bound.at_least.as_ref().is_none_or(|least| value >= *least)
        && bound.at_most.as_ref().is_none_or(|most| value <= *most)
}

/// Jain's index: 1 for equal shares, 1/n if one has everything, 1 if all have nothing.
fn jain_index(rates: &[u64]) -> f64 {
    let sum: f64 = rates.iter().map(|rate| *rate as f64).sum();
    let squares: f64 = rates.iter().map(|rate| (*rate as f64).powi(2)).sum();
    if squares == 0.0 { 1.0 } else { sum * sum / (rates.len() as f64 * squares) }
}

#[cfg(test)]
mod tests {
    use super::jain_index;

    #[test]
    fn fairness_is_one_for_equal_shares_and_one_nth_for_a_monopoly() {
        assert!((jain_index(&[5, 5, 5, 5]) - 1.0).abs() < 1e-12);
        assert!((jain_index(&[20, 0, 0, 0]) - 0.25).abs() < 1e-12);
        assert!((jain_index(&[0, 0]) - 1.0).abs() < 1e-12);
    }
}
