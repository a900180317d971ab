//! Requests that change the fault rules of a host.

use crate::command_error::{CommandError, RequestResult};
use crate::host::DaemonHost;
use crate::host_rules::{MAX_FLOWS, MAX_RULE_BYTES, RuleChange};
use crate::state::DaemonState;
use softhca_control::{MAX_RULES, Response, decode, encode};
use softhca_fabric::{Flow, FlowId, Rule, RuleCounters};
use std::collections::BTreeSet;
use tokio::task::block_in_place;

fn malformed<T>(_: T) -> CommandError {
    CommandError::new(libc::EINVAL, "cannot decode the rules or flows: the client has a different version")
}

/// Applies a change to the processes of a host that execute the transport themselves.
fn change_processes(host: &DaemonHost, change: &RuleChange) -> RequestResult {
    if let Some(slots) = &host.slots {
        block_in_place(|| slots.change_rules(change));
    }
    Ok((Response::Done, Vec::new()))
}

/// Adds rules to the link of a host.
pub(crate) fn add_rules(daemon: &DaemonState, host: &DaemonHost, seed: u64, encoded: &[u8]) -> RequestResult {
    let named: Vec<(Rule, String)> = decode(encoded).map_err(malformed)?;
    let _changing = block_in_place(|| host.rule_changes.lock());
    let mut all: Vec<Rule> =
        host.driver.control(|driver| driver.rules().map(|(rule, _)| rule.clone()).collect());
    all.extend(named.iter().map(|(rule, _)| rule.clone()));
    if all.len() > MAX_RULES || encode(&all).len() > MAX_RULE_BYTES {
        let text = format!("a host has at most {MAX_RULES} rules, and {} KiB of them", MAX_RULE_BYTES >> 10);
        return Err(CommandError::new(libc::ENOMEM, text));
    }
    daemon.recordings.name(|names| {
        let with_names = named.iter().filter(|(_, name)| !name.is_empty());
        with_names.for_each(|(rule, name)| names.add_rule(rule.id, name));
    });
    let rules: Vec<Rule> = named.into_iter().map(|(rule, _)| rule).collect();
    host.driver.control(|driver| rules.iter().for_each(|rule| driver.add_rule(seed, rule.clone())));
    change_processes(host, &RuleChange::AddRules { seed, rules })
}

/// Adds flows that the rules of a host select.
pub(crate) fn add_flows(host: &DaemonHost, seed: u64, encoded: &[u8]) -> RequestResult {
    let flows: Vec<Flow> = decode(encoded).map_err(malformed)?;
    let _changing = block_in_place(|| host.rule_changes.lock());
    let existing: Vec<FlowId> = host.driver.control(|driver| driver.flows().map(|flow| flow.id).collect());
    let ids: BTreeSet<FlowId> = existing.into_iter().chain(flows.iter().map(|flow| flow.id)).collect();
    if ids.len() > MAX_FLOWS {
        return Err(CommandError::new(libc::ENOMEM, format!("a host has at most {MAX_FLOWS} flows")));
    }
    host.driver.control(|driver| flows.iter().for_each(|flow| driver.add_flow(seed, *flow)));
    change_processes(host, &RuleChange::AddFlows { seed, flows })
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
    let _changing = block_in_place(|| host.rule_changes.lock());
    daemon.roles.remove_host(&host.device.name);
    daemon.publish_has_roles();
    host.driver.control(|driver| driver.clear_rules());
    change_processes(host, &RuleChange::Clear)
}
