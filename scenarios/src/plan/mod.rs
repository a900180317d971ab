//! A scenario with every name resolved and every claim checked: what a driver carries out.

mod actions;
mod builder;
mod check;
mod cm;
mod expectations;
mod fault;
pub(crate) mod limits;
mod measurements;
mod multicast;
mod names;
mod network;
mod rules;
mod steps;
mod traffic;
mod workloads;

pub use crate::spec::Area;
pub use actions::{CommandPlan, FlowKind, FlowPlan, StepAction, StepPlan, WorkOperation, WorkRequest};
pub(crate) use builder::build;
pub use check::{
    Bound, Check, CompletionCheck, ConnectionCheck, Expectation, ExpectedMemory, OrderCheck, PacketCheck,
    Subject,
};
pub use fault::{
    CompletionChange, CountingRule, FabricChange, FaultKind, FaultPlan, Flap, SwitchChange, TimedFault,
};
pub(crate) use network::default_settings;

use crate::parameters::ParameterValues;
use crate::spec::Invariant;
use softhca_engine::{PayloadMode, QpType, Recovery, Settings};
use softhca_fabric::{
    Action, Choice, Direction, DownDirections, FlowId, LinkSettings, ReceiverSettings, Rule, SwitchSettings,
};
use softhca_queue::AccessFlags;
use softhca_wire::{Mtu, Psn, RnrTimer};
use std::net::IpAddr;

/// Everything that one run needs to know.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What the scenario shows.
    pub title: String,
    /// The seed of this run.
    pub seed: u64,
    /// The parameters of this run.
    pub parameters: ParameterValues,
    /// When the run is cut off.
    pub duration_ns: Option<u64>,
    /// The hosts, in the order of their names.
    pub hosts: Vec<HostPlan>,
    /// The switches, in the order of their names.
    pub switches: Vec<SwitchPlan>,
    /// The cables.
    pub links: Vec<LinkPlan>,
    /// Routes that are not the shortest way.
    pub routes: Vec<RoutePlan>,
    /// The queue pairs; the n-th has role n + 1.
    pub qps: Vec<QpPlan>,
    /// How they are connected.
    pub pairs: Vec<PairPlan>,
    /// What those queue pairs are that the file leaves to real programs.
    pub transport: QpType,
    /// Single steps.
    pub steps: Vec<StepPlan>,
    /// Traffic that goes on.
    pub flows: Vec<FlowPlan>,
    /// Programs that are started.
    pub commands: Vec<CommandPlan>,
    /// The names of workloads.
    pub workloads: Vec<String>,
    /// What goes wrong.
    pub faults: Vec<FaultPlan>,
    /// Rules that only count, for expectations about packets.
    pub counting_rules: Vec<CountingRule>,
    /// What must come of it.
    pub expectations: Vec<Expectation>,
    /// What must hold at every moment.
    pub invariants: Vec<Invariant>,
}

impl Plan {
    /// The role of a queue pair.
    pub const fn role_of(qp: usize) -> FlowId {
        FlowId(qp as u32 + 1)
    }

    /// The queue pair of a role.
    pub const fn qp_of_role(role: FlowId) -> usize {
        role.0 as usize - 1
    }

    /// The pair of a queue pair.
    pub fn pair_of(&self, qp: usize) -> &PairPlan {
        &self.pairs[self.qps[qp].pair]
    }

    /// Whether chance decides about packets. What it decides about a packet that is sent again depends on how
    /// often it is, and so on time.
    pub fn has_random_faults(&self) -> bool {
        let by_chance =
            |rule: &Rule| matches!(rule.repeat.choice, Choice::Probability { .. } | Choice::Burst(_));
        self.faults
            .iter()
            .any(|fault| matches!(&fault.kind, FaultKind::Packets { rule, .. } if by_chance(rule)))
    }

    /// Whether packets come late, so that what a timer makes of it is part of the story.
    pub fn has_delay_faults(&self) -> bool {
        self.faults.iter().any(|fault| {
            matches!(&fault.kind, FaultKind::Packets { rule, .. } if matches!(rule.action, Action::Delay { .. }))
        })
    }

    /// What real time cannot check: the sentences of expectations about time.
    pub fn timed_expectations(&self) -> impl Iterator<Item = &Expectation> {
        self.expectations.iter().filter(|expectation| expectation.is_timed)
    }

    /// The rules that stand on the card of a host, with their names, in the order in which they apply: those that
    /// count come first. Each is about what that card sends: its cable has the direction of that end.
    pub fn rules_for_host(&self, host: usize) -> Vec<(&str, Rule)> {
        let counts = self.counting_rules.iter().map(|count| ("", &count.links, &count.rule));
        let faults = self.faults.iter().filter_map(|fault| match &fault.kind {
            FaultKind::Packets { links: cables, rule } => Some((fault.name.as_str(), cables, rule)),
            _ => None,
        });
        let mut found = Vec::new();
        for (name, cables, rule) in counts.chain(faults) {
            if cables.is_empty() {
                found.push((name, rule.clone()));
            }
            for cable in cables {
                let ends = self.links[*cable].ends;
                for (direction, end) in [Direction::Forward, Direction::Backward].into_iter().zip(ends) {
                    let wanted = rule.selector.direction.is_none_or(|wanted| wanted == direction);
                    if wanted && end == Node::Host(host) {
                        let mut rule = rule.clone();
                        rule.selector.direction = Some(direction);
                        found.push((name, rule));
                    }
                }
            }
        }
        found
    }

    /// Why real sockets cannot carry this out, if they cannot.
    pub fn unsupported_on_udp(&self) -> Option<&'static str> {
        if let Some(why) = self.unsupported_on_real_devices() {
            return Some(why);
        }
        if self.faults.iter().any(|fault| match &fault.kind {
            FaultKind::Timed { fault: what, .. } => !matches!(
                what,
                TimedFault::WithholdReceives { .. }
                    | TimedFault::DelayReceives { .. }
                    | TimedFault::KillProgram { .. }
            ),
            _ => false,
        }) {
            return Some("links and hosts fail at a virtual time only");
        }
        None
    }

    /// Why no real card can be like this, or stand on such a network.
    pub(crate) fn unsupported_on_real_devices(&self) -> Option<&'static str> {
        if !self.switches.is_empty() {
            return Some("switches exist in virtual time only");
        }
        if self.hosts.iter().any(|host| host.receiver.is_some()) {
            return Some("a real card takes what arrives as fast as it can");
        }
        if self.hosts.iter().any(|host| host.initial_rate.is_some()) {
            return Some("initial rates are set in virtual time only");
        }
        if self.hosts.iter().any(|host| host.settings.payload_mode == PayloadMode::Elided) {
            return Some("real packets carry their payload");
        }
        if self.flows.iter().any(|flow| flow.count.is_none()) {
            return Some("a workload without a count ends by virtual time only");
        }
        let cables_of =
            |host| self.links.iter().filter(|cable| cable.ends.contains(&Node::Host(host))).count();
        if (0..self.hosts.len()).any(|host| cables_of(host) > 1) {
            return Some("a card on real sockets has one cable");
        }
        if self.links.iter().any(|cable| cable.line.mtu < u32::MAX) {
            return Some("a real cable carries what its network carries");
        }
        let rules = self.faults.iter().filter_map(|fault| match &fault.kind {
            FaultKind::Packets { rule, .. } => Some(rule),
            _ => None,
        });
        let mut rules = rules.chain(self.counting_rules.iter().map(|count| &count.rule));
        if rules.any(|rule| rule.selector.absolute_psn.is_some()) {
            return Some("real cards choose their first PSN themselves");
        }
        if self.steps.iter().any(|step| step.action == StepAction::Unmap) {
            return Some("the memory of a real process stays where it is");
        }
        if self.multicast_groups().len() > 256 {
            return Some("at most 256 multicast groups get addresses of their own there");
        }
        let cuts = |fault: &FaultPlan| match &fault.kind {
            FaultKind::Packets { rule, .. } => {
                matches!(rule.action, Action::LinkDown { directions: DownDirections::BothWays, .. })
            }
            _ => false,
        };
        if self.faults.iter().any(cuts) {
            return Some("a real cable goes down one way only: each card has its own end");
        }
        None
    }
}

/// A host.
#[derive(Clone, Debug)]
pub struct HostPlan {
    /// Its name.
    pub name: String,
    /// Its address in virtual time.
    pub address: IpAddr,
    /// The settings of its card, without the seed.
    pub settings: Settings,
    /// What the file says that a lost packet does, if it says so.
    pub configured_recovery: Option<Recovery>,
    /// The rate that its queue pairs begin with, in bits per second; the line's without one.
    pub initial_rate: Option<u64>,
    /// How fast its card takes what arrives; at once without one.
    pub receiver: Option<ReceiverSettings>,
}

/// A switch.
#[derive(Clone, Debug)]
pub struct SwitchPlan {
    /// Its name.
    pub name: String,
    /// Its settings.
    pub settings: SwitchSettings,
}

/// A route that is not the shortest way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutePlan {
    /// At this switch
    pub switch: usize,
    /// packets for this host
    pub host: usize,
    /// leave by this cable.
    pub link: usize,
}

/// An end of a cable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Node {
    /// A host, by its place in the plan.
    Host(usize),
    /// A switch, by its place in the plan.
    Switch(usize),
}

/// A cable.
#[derive(Clone, Debug)]
pub struct LinkPlan {
    /// Its two ends; forward leads from the first to the second.
    pub ends: [Node; 2],
    /// Its physics.
    pub line: LinkSettings,
}

/// A queue pair.
#[derive(Clone, Debug)]
pub struct QpPlan {
    /// Its name.
    pub name: String,
    /// Its host.
    pub host: usize,
    /// The queue pair at the other end.
    pub peer: usize,
    /// Its pair.
    pub pair: usize,
}

/// Two queue pairs and how they are connected.
#[derive(Clone, Debug)]
pub struct PairPlan {
    /// The two.
    pub qps: [usize; 2],
    /// What they are.
    pub kind: QpType,
    /// Steps connect them, through the connection manager.
    pub uses_cm: bool,
    /// Payload bytes per packet.
    pub mtu: Mtu,
    /// The exponent of the ack timeout.
    pub timeout: u8,
    /// Retries.
    pub retry_count: u8,
    /// Retries when no receive is posted.
    pub rnr_retry: u8,
    /// The wait when no receive is posted.
    pub min_rnr_timer: RnrTimer,
    /// Reads and atomics outstanding.
    pub max_rd_atomic: u8,
    /// The first PSNs.
    pub sq_psns: [Psn; 2],
    /// What each side allows.
    pub access: AccessFlags,
    /// Receives that each side keeps posted.
    pub posted_receives: u32,
    /// Bytes of each.
    pub receive_bytes: u32,
    /// DSCP and ECN bits.
    pub traffic_class: u8,
    /// Send work requests that may wait.
    pub max_send_wr: u32,
    /// Completions that the queue holds.
    pub cqe: u32,
    /// Bytes of each of the four areas of a queue pair's memory.
    pub area_bytes: u64,
}
