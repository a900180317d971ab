//! Requests that change the fault rules of a host.

use crate::command_error::{CommandError, RequestResult};
use crate::host::DaemonHost;
use crate::state::DaemonState;
use softhca_fabric::{Flow, Rule, RuleCounters};
use softhca_queue::control::{Response, decode, encode};

/// The most rules of a host.
const MAX_RULES: usize = 1024;

fn malformed<T>(_: T) -> CommandError {
    CommandError::new(libc::EINVAL, "cannot decode the rules or flows: the client has a different version")
}

/// Adds rules to the link of a host.
pub(crate) fn add_rules(daemon: &DaemonState, host: &DaemonHost, seed: u64, rules: &[u8]) -> RequestResult {
    let rules: Vec<(Rule, String)> = decode(rules).map_err(malformed)?;
    let existing = host.driver.control(|driver| driver.rules().count());
    if existing + rules.len() > MAX_RULES {
        return Err(CommandError::new(libc::ENOMEM, format!("a host has at most {MAX_RULES} rules")));
    }
    for (rule, name) in rules {
        if !name.is_empty() {
            daemon.recordings.name_rule(rule.id, &name);
        }
        host.driver.control(|driver| driver.add_rule(seed, rule));
    }
    Ok((Response::Done, Vec::new()))
}

/// Adds flows that the rules of a host select.
pub(crate) fn add_flows(host: &DaemonHost, seed: u64, flows: &[u8]) -> RequestResult {
    let flows: Vec<Flow> = decode(flows).map_err(malformed)?;
    host.driver.control(|driver| flows.into_iter().for_each(|flow| driver.add_flow(seed, flow)));
    Ok((Response::Done, Vec::new()))
}

/// The rules of a host and their counters.
pub(crate) fn rules(host: &DaemonHost) -> RequestResult {
    let rules: Vec<(Rule, RuleCounters)> = host
        .driver
        .control(|driver| driver.rules().map(|(rule, counters)| (rule.clone(), counters)).collect());
    Ok((Response::FaultRules(encode(&rules)), Vec::new()))
}

/// Removes all rules, flows and roles of a host.
pub(crate) fn clear_rules(daemon: &DaemonState, host: &DaemonHost) -> RequestResult {
    daemon.roles.remove_host(&host.device.name);
    host.driver.control(|driver| driver.clear_rules());
    Ok((Response::Done, Vec::new()))
}
