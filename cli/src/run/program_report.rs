//! Reports of `softhca exec --scenario`, in the format of `softhca run`.

use super::job::{Backend, Job, RunResult};
use super::junit;
use softhca_scenarios::{Outcome, ParameterValues, Scenario};
use std::sync::Arc;
use std::time::Duration;

/// The result of a scenario on a program of `softhca exec`, as a line of JSON and as a JUnit report.
pub fn exec_reports(
    scenario: Arc<Scenario>,
    outcome: Outcome,
    duration: Duration,
    replay: &str,
) -> (String, String) {
    let (seed, parameters) = (scenario.seed, ParameterValues::new());
    let job = Job { scenario, parameters, seed, swarm: false, backend: Backend::Udp };
    let ran = RunResult { outcome, values: ParameterValues::new(), duration, failed_attempts: 0 };
    let mut line = job.json_line(&ran);
    line.replay = replay.to_owned();
    let json = serde_json::to_string(&line).unwrap_or_default();
    let summary = ran.summary();
    let own = job.replay();
    (json, junit::report(&[job], &[(0, summary)]).replace(&own, replay))
}
