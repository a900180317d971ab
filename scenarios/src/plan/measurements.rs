//! Expectations about goodput, fairness, latency and completion time.

use super::builder::PlanBuilder;
use super::check::{Bound, Check, Expectation, Subject};
use crate::quantity::{Rate, Time};
use crate::source::{Result, join_path};
use crate::spec::{FairnessExpectation, FinishExpectation, GoodputExpectation, LatencyExpectation};

impl PlanBuilder<'_> {
    pub(super) fn goodput(&mut self, spec: &GoodputExpectation, path: &str) -> Result<Expectation> {
        let of = self.subject(&spec.of, &join_path(path, "of"))?;
        let bound =
            Bound { at_least: spec.at_least.map(|rate| rate.0), at_most: spec.at_most.map(|rate| rate.0) };
        let text =
            format!("goodput of {} {}", spec.of, describe_bound(&bound, |rate| Rate(rate).to_string()));
        let check = Check::Goodput { of, bound, during: spec.during.map(|window| window.0) };
        Ok(Expectation::new(text, true, check))
    }

    pub(super) fn fairness(&mut self, spec: &FairnessExpectation, path: &str) -> Result<Expectation> {
        let mut of = Vec::new();
        for name in spec.of.all() {
            let whole = self.subject(name, &join_path(path, "of"))?;
            for qp in &whole.qps {
                of.push(Subject { name: self.qps[*qp].name.clone(), qps: vec![*qp], ..whole.clone() });
            }
        }
        if of.is_empty() {
            return Err(self.error_in(path, "of", "fairness needs at least one queue pair"));
        }
        for (key, share) in [("at-least", spec.at_least), ("at-most", spec.at_most)] {
            if share.is_some_and(|share| !(0.0..=1.0).contains(&share)) {
                return Err(self.error_in(path, key, "fairness is between 0 and 1"));
            }
        }
        let bound = Bound { at_least: spec.at_least, at_most: spec.at_most };
        let names = spec.of.all().join(", ");
        let text = format!("fairness among {names} {}", describe_bound(&bound, |index| index.to_string()));
        let check = Check::Fairness { of, bound, during: spec.during.map(|window| window.0) };
        Ok(Expectation::new(text, true, check))
    }

    pub(super) fn latency(&mut self, spec: &LatencyExpectation, path: &str) -> Result<Expectation> {
        let of = self.subject(&spec.of, &join_path(path, "of"))?;
        if !(0.0..=100.0).contains(&spec.percentile) {
            return Err(self.error_in(path, "percentile", "a percentile is between 0 and 100"));
        }
        let bound =
            Bound { at_least: spec.at_least.map(|time| time.0), at_most: spec.at_most.map(|time| time.0) };
        let words = describe_bound(&bound, |time| Time(time).to_string());
        let text = format!("latency of {} at percentile {} {words}", spec.of, spec.percentile);
        Ok(Expectation::new(text, true, Check::Latency { of, percentile: spec.percentile, bound }))
    }

    pub(super) fn finish(&mut self, spec: &FinishExpectation, path: &str) -> Result<Expectation> {
        let of = spec.of.as_ref().map(|name| self.subject(name, &join_path(path, "of"))).transpose()?;
        let bound =
            Bound { at_least: spec.after.map(|time| time.0), at_most: spec.before.map(|time| time.0) };
        let what = spec.of.as_deref().unwrap_or("all work");
        let is_timed = bound.at_least.is_some() || bound.at_most.is_some();
        let text = match is_timed {
            true => {
                format!(
                    "{what} completes at a time {}",
                    describe_bound(&bound, |time| Time(time).to_string())
                )
            }
            false => format!("{what} completes"),
        };
        Ok(Expectation::new(text, is_timed, Check::Finish { of, bound }))
    }

    /// The queue pair, workload or step that `of` names.
    fn subject(&mut self, name: &str, path: &str) -> Result<Subject> {
        if let Some(workload) = self.workloads.iter().position(|workload| workload == name) {
            let flows = self.flows.iter().filter(|flow| flow.workload == workload);
            let qps = flows.map(|flow| flow.qp).collect();
            return Ok(Subject { name: name.into(), qps, workload: Some(workload), step: None });
        }
        if let Some(step) = self.steps.iter().position(|step| step.name.as_deref() == Some(name)) {
            let qps = vec![self.steps[step].qp];
            return Ok(Subject { name: name.into(), qps, workload: None, step: Some(step) });
        }
        match self.qp(name, path) {
            Ok(qp) => Ok(Subject { name: name.into(), qps: vec![qp], workload: None, step: None }),
            Err(_) => {
                let mut names: Vec<String> = self.qps.iter().map(|qp| qp.name.clone()).collect();
                names.extend(self.workloads.iter().cloned());
                names.extend(self.steps.iter().filter_map(|step| step.name.clone()));
                names.truncate(24);
                let problem = self.error_at(path, format!("unknown queue pair, workload or step {name:?}"));
                Err(problem.suggest(name, names.iter().map(String::as_str)))
            }
        }
    }
}

fn describe_bound<T: Copy>(bound: &Bound<T>, show: impl Fn(T) -> String) -> String {
    match (bound.at_least, bound.at_most) {
        (Some(least), Some(most)) => format!("between {} and {}", show(least), show(most)),
        (Some(least), None) => format!("at least {}", show(least)),
        (None, Some(most)) => format!("at most {}", show(most)),
        (None, None) => "without bounds".into(),
    }
}
