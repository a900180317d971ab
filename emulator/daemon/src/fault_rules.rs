//! Requests that change the fault rules of a host.

use crate::command_error::{CommandError, RequestResult};
use crate::host::DaemonHost;
use crate::state::DaemonState;
use softhca_control::{Notification, Response, decode, encode};
use softhca_fabric::{Flow, Rule, RuleCounters};
use tokio::task::block_in_place;

/// The most rules of a host.
const MAX_RULES: usize = 1024;

fn malformed<T>(_: T) -> CommandError {
    CommandError::new(libc::EINVAL, "cannot decode the rules or flows: the client has a different version")
}

/// Applies a change to the processes of a host that execute the transport themselves.
fn change_processes(host: &DaemonHost, change: Notification) -> RequestResult {
    if let Some(slots) = &host.slots {
        block_in_place(|| slots.change_rules(&change));
    }
    Ok((Response::Done, Vec::new()))
}

/// Adds rules to the link of a host.
pub(crate) fn add_rules(
    daemon: &DaemonState,
    host: &DaemonHost,
    seed: u64,
    encoded: Vec<u8>,
) -> RequestResult {
    let rules: Vec<(Rule, String)> = decode(&encoded).map_err(malformed)?;
    let existing = host.driver.control(|driver| driver.rules().count());
    if existing + rules.len() > MAX_RULES {
        return Err(CommandError::new(libc::ENOMEM, format!("a host has at most {MAX_RULES} rules")));
    }
    for (rule, name) in rules {
        if !name.is_empty() {
            daemon.recordings.name(|names| names.add_rule(rule.id, &name));
        }
        host.driver.control(|driver| driver.add_rule(seed, rule));
    }
    change_processes(host, Notification::FaultRulesAdded { seed, rules: encoded })
}

/// Adds flows that the rules of a host select.
pub(crate) fn add_flows(host: &DaemonHost, seed: u64, encoded: Vec<u8>) -> RequestResult {
    let flows: Vec<Flow> = decode(&encoded).map_err(malformed)?;
    host.driver.control(|driver| flows.into_iter().for_each(|flow| driver.add_flow(seed, flow)));
    change_processes(host, Notification::FlowsAdded { seed, flows: encoded })
}

/// The rules of a host and their counters.
pub(crate) fn rules(host: &DaemonHost) -> RequestResult {
    let mut rules: Vec<(Rule, RuleCounters)> = host
        .driver
        .control(|driver| driver.rules().map(|(rule, counters)| (rule.clone(), counters)).collect());
    for (id, found) in host.slots.iter().flat_map(|slots| slots.rules()) {
        if let Some((_, counters)) = rules.iter_mut().find(|(rule, _)| rule.id == id) {
            counters.matched = counters.matched.saturating_add(found.matched);
            counters.fired = counters.fired.saturating_add(found.fired);
        }
    }
    Ok((Response::FaultRules(encode(&rules)), Vec::new()))
}

/// Removes all rules, flows and roles of a host.
pub(crate) fn clear_rules(daemon: &DaemonState, host: &DaemonHost) -> RequestResult {
    daemon.roles.remove_host(&host.device.name);
    daemon.publish_has_roles();
    host.driver.control(|driver| driver.clear_rules());
    change_processes(host, Notification::FaultRulesCleared)
}
