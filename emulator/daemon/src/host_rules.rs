//! The fault rules and flows of a host, as processes that execute the transport themselves get them.

use softhca_control::{MAX_MESSAGE, Notification, encode};
use softhca_fabric::{Flow, FlowId, Rule};
use softhca_udp::Driver;
use std::collections::BTreeMap;

/// The most encoded bytes of a host's rules.
pub(crate) const MAX_RULE_BYTES: usize = 96 << 10;
/// The most flows of a host. Roles can add as many again.
pub(crate) const MAX_FLOWS: usize = 1024;

/// No encoded flow is longer.
const MAX_FLOW_BYTES: usize = 64;
/// A process gets all rules and flows in one message.
const _: () = assert!(MAX_RULE_BYTES + 2 * MAX_FLOWS * MAX_FLOW_BYTES < MAX_MESSAGE - (16 << 10));

/// A change of the fault rules of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RuleChange {
    AddRules { seed: u64, rules: Vec<Rule> },
    AddFlows { seed: u64, flows: Vec<Flow> },
    Clear,
}

impl RuleChange {
    /// The notification for a process.
    pub fn notification(&self) -> Notification {
        match self {
            RuleChange::AddRules { seed, rules } => {
                Notification::FaultRulesAdded { seed: *seed, rules: encode(rules) }
            }
            RuleChange::AddFlows { seed, flows } => {
                Notification::FlowsAdded { seed: *seed, flows: encode(flows) }
            }
            RuleChange::Clear => Notification::FaultRulesCleared,
        }
    }
}

/// The fault rules and flows of a host.
#[derive(Clone, Default)]
pub(crate) struct HostRules {
    /// The seed of the first change.
    seed: u64,
    rules: Vec<Rule>,
    flows: BTreeMap<FlowId, Flow>,
}

impl HostRules {
    /// Applies a change, which is within the limits.
    pub fn apply(&mut self, change: &RuleChange) {
        if let (RuleChange::AddRules { seed, .. } | RuleChange::AddFlows { seed, .. }, true) =
            (change, self.rules.is_empty() && self.flows.is_empty())
        {
            self.seed = *seed;
        }
        match change {
            RuleChange::AddRules { rules, .. } => self.rules.extend_from_slice(rules),
            RuleChange::AddFlows { flows, .. } => {
                self.flows.extend(flows.iter().map(|flow| (flow.id, *flow)))
            }
            RuleChange::Clear => *self = HostRules::default(),
        }
    }

    /// Adds the rules and flows to a driver without any.
    pub fn add_to(self, driver: &mut Driver) {
        self.rules.into_iter().for_each(|rule| driver.add_rule(self.seed, rule));
        self.flows.into_values().for_each(|flow| driver.add_flow(self.seed, flow));
    }

    /// The notifications from which a process gets all rules and flows.
    pub fn notifications(&self) -> Vec<Notification> {
        let HostRules { seed, rules, flows } = self;
        let rules = RuleChange::AddRules { seed: *seed, rules: rules.clone() };
        let flows = RuleChange::AddFlows { seed: *seed, flows: flows.values().copied().collect() };
        let has_content = |change: &&RuleChange| match change {
            RuleChange::AddRules { rules, .. } => !rules.is_empty(),
            RuleChange::AddFlows { flows, .. } => !flows.is_empty(),
            RuleChange::Clear => false,
        };
        [rules, flows].iter().filter(has_content).map(RuleChange::notification).collect()
    }
}
