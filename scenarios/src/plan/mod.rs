//! A scenario with all names resolved and all values checked, ready to execute.

mod actions;
pub(crate) mod builder;
mod check;
mod cm;
mod device;
mod expectations;
mod fault;
mod fault_targets;
pub(crate) mod limits;
mod measurements;
mod multicast;
mod names;
mod network;
mod rules;
mod selectors;
mod steps;
mod topology;
mod traffic;
mod workloads;

pub use crate::spec::Area;
pub use actions::{
    CommandPlan, FlowKind, FlowPlan, ReadyPlan, StepAction, StepPlan, WorkOperation, WorkRequest,
};
pub use check::{
    Bound, Check, CompletionCheck, ConnectionCheck, Expectation, ExpectedMemory, OrderCheck, PacketCheck,
    Subject,
};
pub(crate) use device::default_settings;
pub use fault::{Change, CountingRule, FaultKind, FaultPlan};

use crate::parameters::ParameterValues;
use crate::source::SourceLine;
use crate::spec::Invariant;
use softhca_engine::{PayloadMode, Placement, Profile, QpType, Recovery, Settings};
use softhca_fabric::{
    Action, Choice, Direction, DownDirections, FlowId, HostId, LinkSettings, ReceiverSettings, Repeat, Rule,
    RuleId, Selector, SwitchId, SwitchSettings,
};
use softhca_types::{AccessFlags, ProgramFaults};
use softhca_wire::{Mtu, Psn, RnrTimer};
use std::net::IpAddr;

/// The input of one run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// One sentence that states what the scenario shows.
    pub title: String,
    pub seed: u64,
    pub parameters: ParameterValues,
    /// Time at which the run stops.
    pub duration_ns: Option<u64>,
    /// Hosts, in the order of their names, each followed by its further cards.
    pub hosts: Vec<HostPlan>,
    /// Cards of each host.
    pub cards: usize,
    /// Switches, in the order of their names.
    pub switches: Vec<SwitchPlan>,
    pub links: Vec<LinkPlan>,
    pub link_rules: Vec<LinkRule>,
    /// Routes that differ from the shortest path.
    pub routes: Vec<RoutePlan>,
    /// Queue pairs; the n-th has flow id n + 1.
    pub qps: Vec<QpPlan>,
    /// Pairs of queue pairs.
    pub pairs: Vec<PairPlan>,
    /// Type of the queue pairs of external programs.
    pub transport: QpType,
    pub steps: Vec<StepPlan>,
    /// Flows of the workloads.
    pub flows: Vec<FlowPlan>,
    /// External programs.
    pub commands: Vec<CommandPlan>,
    pub workloads: Vec<String>,
    pub faults: Vec<FaultPlan>,
    /// The end of all faults, after which the run must converge.
    pub heal: Option<HealPlan>,
    /// Where the run leaves the course of the file.
    pub branch: Option<Branch>,
    /// Rules that count packets for expectations.
    pub counting_rules: Vec<CountingRule>,
    pub expectations: Vec<Expectation>,
    pub invariants: Vec<Invariant>,
}

impl Plan {
    /// The flow id of a queue pair.
    pub const fn role_of(qp: usize) -> FlowId {
        FlowId(qp as u32 + 1)
    }

    /// The queue pair of a flow id.
    pub const fn qp_of_role(role: FlowId) -> usize {
        role.0 as usize - 1
    }

    pub fn pair_of(&self, qp: usize) -> &PairPlan {
        &self.pairs[self.qps[qp].pair]
    }

    /// Whether a fault is random. Its decision on a retransmission depends on the number of transmissions, and so on time.
    pub fn has_random_faults(&self) -> bool {
        let by_chance =
            |rule: &Rule| matches!(rule.repeat.choice, Choice::Probability { .. } | Choice::Burst(_));
        self.packet_rules().any(by_chance)
    }

    /// The rules of faults and links for packets.
    pub(crate) fn packet_rules(&self) -> impl Iterator<Item = &Rule> {
        let faults = self.faults.iter().filter_map(|fault| match &fault.kind {
            FaultKind::Packets { rule, .. } => Some(rule),
            _ => None,
        });
        faults.chain(self.link_rules.iter().map(|of_link| &of_link.rule))
    }

    /// Whether a fault delays packets, so that timers can expire.
    pub fn has_delay_faults(&self) -> bool {
        let delays = |action| {
            matches!(
                action,
                Action::Delay { .. }
                    | Action::LimitRate { .. }
                    | Action::PacketTime { .. }
                    | Action::Jitter { .. }
                    | Action::Hold { .. }
            )
        };
        self.packet_rules().any(|rule| delays(rule.action))
    }

    /// Fails for a file without queue pairs of its own.
    pub(crate) fn check_has_queue_pairs(&self) -> Result<(), &'static str> {
        if self.hosts.iter().any(|host| host.is_foreign) {
            return Err("the file has a foreign host: it is for `softhca exec --scenario`");
        }
        match self.qps.is_empty() || self.pairs.is_empty() {
            true => Err("the file connects no queue pairs: it is for `softhca exec --scenario`"),
            false => Ok(()),
        }
    }

    /// Whether the exit code of the program of `softhca exec` is an expectation.
    pub fn expects_exit_code(&self) -> bool {
        self.expectations.iter().any(|expectation| matches!(expectation.check, Check::ExitCode(_)))
    }

    /// The expectations about time, which real time does not check.
    pub fn timed_expectations(&self) -> impl Iterator<Item = &Expectation> {
        self.expectations.iter().filter(|expectation| expectation.is_timed)
    }

    /// Whether a fault waits for a step, an event or another fault.
    pub(crate) fn has_waiting_faults(&self) -> bool {
        self.faults.iter().any(|fault| match &fault.kind {
            FaultKind::Program { .. } => fault.needs_command(),
            _ => fault.after.is_some(),
        })
    }

    /// The time after which programs that have not ended are killed.
    pub fn program_timeout_ns(&self) -> u64 {
        self.duration_ns.unwrap_or(limits::PROGRAM_TIMEOUT_NS)
    }

    /// The faults of the program of a host, with the seed of the plan; `None` if it has none.
    pub fn program_faults(&self, host: usize) -> Option<ProgramFaults> {
        let of_host = |fault: &FaultPlan| match &fault.kind {
            FaultKind::Program { host: wanted, fault } if *wanted == host => Some(fault.clone()),
            _ => None,
        };
        let faults: Vec<_> = self.faults.iter().filter_map(of_host).collect();
        let seed = self.seed;
        (!faults.is_empty()).then(|| ProgramFaults { seed, faults, ..ProgramFaults::default() })
    }

    /// The rules for packets that the device of a host sends, with their names, in the order in which they apply.
    /// Counting rules come first. Rules that wait for something come later.
    pub fn rules_for_host(&self, host: usize) -> Vec<(&str, Rule)> {
        let counts = self.counting_rules.iter().map(|count| ("", &count.links, &count.rule));
        let faults = self.faults.iter().filter(|fault| fault.after.is_none());
        let faults = faults.filter_map(|fault| match &fault.kind {
            FaultKind::Packets { links, rule } => Some((fault.name.as_str(), links, rule)),
            _ => None,
        });
        let mut found = Vec::new();
        for (name, links, rule) in counts.chain(faults) {
            found.extend(self.rule_at_host(host, links, rule).into_iter().map(|rule| (name, rule)));
        }
        for LinkRule { link, rule, name } in &self.link_rules {
            found.extend(self.rule_at_host(host, &[*link], rule).into_iter().map(|rule| (*name, rule)));
        }
        // The rate and the delay of the link, if the file sets them. A device has one link.
        let of_host = |link: &&LinkPlan| link.ends.contains(&Node::Host(host));
        let line = self.links.iter().find(of_host).map(|link| link.line);
        let mut add = |id, action, name| {
            let (selector, repeat) = (Selector::default(), Repeat::default());
            found.push((name, Rule { id, selector, repeat, action }));
        };
        if let Some(bits_per_second) = line.and_then(|line| line.bits_per_second) {
            add(RATE_RULE, Action::LimitRate { bits_per_second }, "the rate of the link");
        }
        if let Some(ns) = line.map(|line| line.delay_ns).filter(|ns| *ns > DEFAULT_DELAY_NS) {
            add(DELAY_RULE, Action::Delay { ns }, "the delay of the link");
        }
        found
    }

    /// The hosts of SoftHCA, with their indices.
    pub fn own_hosts(&self) -> impl Iterator<Item = (usize, &HostPlan)> {
        self.hosts.iter().enumerate().filter(|(_, host)| !host.is_foreign)
    }

    /// The parts of the plan that need knowledge or control of a foreign host, which SoftHCA does not have.
    pub(crate) fn unknown_of_foreign_hosts(&self) -> Option<String> {
        let foreign = |host: &usize| self.hosts[*host].is_foreign;
        let name = |host: usize| &self.hosts[host].name;
        // The foreign host that sends the packets of a rule. A rule for both directions sees those of the own host.
        let sender = |links: &[usize], rule: &Rule| {
            let ends = links.iter().map(|link| self.links[*link].ends);
            let sends = |ends: [Node; 2]| match rule.selector.direction {
                Some(Direction::Forward) => [Some(ends[0]), None],
                Some(Direction::Backward) => [None, Some(ends[1])],
                None => ends.map(Some),
            };
            let mut hosts = ends.flat_map(sends).flatten().filter_map(|end| match end {
                Node::Host(host) => Some(host),
                Node::Switch(_) => None,
            });
            hosts.find(foreign)
        };
        for count in &self.counting_rules {
            if let Some(host) = sender(&count.links, &count.rule) {
                let (host, peer) = (
                    name(host),
                    self.own_hosts().next().map_or("the other host", |(_, own)| own.name.as_str()),
                );
                return Some(format!(
                    "a `packet` expectation counts what {host} sends, which is foreign: packets are counted where they \
                     are sent; use a `counter` of {peer}, such as rcvd_pkts or packet_seq_err"
                ));
            }
        }
        for fault in &self.faults {
            let host = match &fault.kind {
                FaultKind::Packets { links, rule } => sender(links, rule),
                FaultKind::Program { host, .. } => Some(*host).filter(foreign),
                FaultKind::Timed { changes, .. } => {
                    changes.iter().find_map(|(_, change)| change.host().filter(foreign))
                }
            };
            if let Some(host) = host {
                return Some(format!(
                    "fault {:?} concerns what {} does or sends, which is foreign: faults act where packets are sent",
                    fault.name,
                    name(host)
                ));
            }
        }
        let qp = self.qps.iter().find(|qp| foreign(&qp.host));
        let of_check = |expectation: &Expectation| match expectation.check {
            Check::Counter { host, .. } | Check::Event { host, .. } => Some(host).filter(foreign),
            _ => None,
        };
        let host = qp.map(|qp| qp.host).or_else(|| self.expectations.iter().find_map(of_check))?;
        Some(format!(
            "the file asks for a queue pair, a counter or an event of {}, which is foreign",
            name(host)
        ))
    }

    /// The hosts at the ends of a link.
    pub fn hosts_of_link(&self, link: usize) -> impl Iterator<Item = usize> {
        self.links[link].ends.into_iter().filter_map(|end| match end {
            Node::Host(host) => Some(host),
            Node::Switch(_) => None,
        })
    }

    /// A rule for packets that the device of a host sends on these links; all by default.
    pub fn rule_at_host(&self, host: usize, links: &[usize], rule: &Rule) -> Vec<Rule> {
        let mut found = Vec::new();
        if links.is_empty() {
            found.push(rule.clone());
        }
        for link in links {
            let ends = self.links[*link].ends;
            for (direction, end) in [Direction::Forward, Direction::Backward].into_iter().zip(ends) {
                let wanted = rule.selector.direction.is_none_or(|wanted| wanted == direction);
                if wanted && end == Node::Host(host) {
                    let mut rule = rule.clone();
                    rule.selector.direction = Some(direction);
                    found.push(rule);
                }
            }
        }
        found
    }

    /// The reason why real time does not support this plan.
    pub fn unsupported_on_udp(&self) -> Option<&'static str> {
        if let Some(why) = self.unsupported_on_real_devices() {
            return Some(why);
        }
        if self.faults.iter().any(|fault| match &fault.kind {
            FaultKind::Timed { changes, .. } => {
                changes.iter().any(|(_, change)| !change.is_supported_on_udp(fault.after.is_some()))
            }
            _ => false,
        }) {
            return Some(
                "links go down or flap, and hosts stall, `after` a step, an event or a fault; other changes of links and hosts need virtual time",
            );
        }
        None
    }

    /// The reason why real devices do not support this plan.
    pub(crate) fn unsupported_on_real_devices(&self) -> Option<&'static str> {
        if !self.switches.is_empty() {
            return Some("switches require virtual time");
        }
        if self.heal.is_some() {
            return Some("`[heal]` requires virtual time");
        }
        if self.hosts.iter().any(|host| host.receiver.is_some()) {
            return Some("a real device has no receive rate");
        }
        if self.hosts.iter().any(|host| host.initial_rate.is_some()) {
            return Some("initial rates require virtual time");
        }
        if self.hosts.iter().any(|host| host.settings.payload_mode == PayloadMode::Elided) {
            return Some("real packets carry their payload");
        }
        if self.hosts.iter().any(|host| host.settings.placement != Placement::InOrder) {
            return Some("a real device has the placement `in-order`");
        }
        if self.flows.iter().any(|flow| flow.count.is_none()) {
            return Some("a workload without a count requires virtual time");
        }
        let links_of = |host| self.links.iter().filter(|link| link.ends.contains(&Node::Host(host))).count();
        if (0..self.hosts.len()).any(|host| links_of(host) > 1) {
            return Some("a device on real sockets has one link");
        }
        if self.links.iter().any(|link| link.line.mtu < u32::MAX) {
            return Some("the network sets the MTU of a real link");
        }
        let mut rules = self.packet_rules().chain(self.counting_rules.iter().map(|count| &count.rule));
        if rules.any(|rule| rule.selector.absolute_psn.is_some()) {
            return Some("real devices choose their first PSN");
        }
        if self.steps.iter().any(|step| step.action == StepAction::Unmap) {
            return Some("the memory of a real process cannot be unmapped");
        }
        if self.multicast_groups().len() > 256 {
            return Some("at most 256 multicast groups are available");
        }
        let cuts = |fault: &FaultPlan| match &fault.kind {
            FaultKind::Packets { rule, .. } => {
                matches!(rule.action, Action::LinkDown { directions: DownDirections::BothWays, .. })
            }
            _ => false,
        };
        if self.faults.iter().any(cuts) {
            return Some("a packet takes a real link down only in its own direction");
        }
        None
    }
}

/// The end of all faults.
#[derive(Clone, Debug)]
pub struct HealPlan {
    pub at_ns: u64,
    /// Time at which all work must be complete.
    pub deadline_ns: u64,
    /// Its table in the file.
    pub at: SourceLine,
}

/// A run that continues differently from a time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Branch {
    pub at_ns: u64,
    pub continuation: Continuation,
}

/// How a run continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Continuation {
    /// Without faults.
    Healed,
    /// With other random numbers.
    Reseeded(u64),
}

#[derive(Clone, Debug)]
pub struct HostPlan {
    pub name: String,
    /// IP address in virtual time.
    pub address: IpAddr,
    /// It is not SoftHCA's: nothing of it can be changed, seen or counted.
    pub is_foreign: bool,
    /// Settings of its device, without the seed.
    pub settings: Settings,
    /// The profile, if the file sets it.
    pub configured_profile: Option<&'static Profile>,
    /// Loss recovery, if the file sets it.
    pub configured_recovery: Option<Recovery>,
    /// Initial rate of its queue pairs in bits per second; the link rate by default.
    pub initial_rate: Option<u64>,
    /// Receive rate and buffer of its device; unlimited by default.
    pub receiver: Option<ReceiverSettings>,
}

#[derive(Clone, Debug)]
pub struct SwitchPlan {
    pub name: String,
    pub settings: SwitchSettings,
}

/// A route that differs from the shortest path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutePlan {
    pub switch: usize,
    pub host: usize,
    pub link: usize,
}

/// An end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Node {
    /// A host, by its index in the plan.
    Host(usize),
    /// A switch, by its index in the plan.
    Switch(usize),
}

impl From<Node> for softhca_fabric::Node {
    fn from(node: Node) -> softhca_fabric::Node {
        match node {
            Node::Host(host) => softhca_fabric::Node::Host(HostId(host as u32)),
            Node::Switch(switch) => softhca_fabric::Node::Switch(SwitchId(switch as u32)),
        }
    }
}

/// The jitter or loss of a link, as a rule for all of its packets.
#[derive(Clone, Debug)]
pub struct LinkRule {
    pub link: usize,
    pub rule: Rule,
    pub name: &'static str,
}

/// The delay of links whose delay the file does not set, which real links have anyway.
const DEFAULT_DELAY_NS: u64 = 1_000;
/// The rules that delay every packet of a link, and limit its rate: no rule of a file has these numbers.
const DELAY_RULE: RuleId = RuleId(u32::MAX);
const RATE_RULE: RuleId = RuleId(u32::MAX - 1);

/// The highest number of these rules. No rule of a file has one of them.
pub(crate) const LINK_RULES: RuleId = RuleId(u32::MAX - 2);

#[derive(Clone, Debug)]
pub struct LinkPlan {
    /// Its ends; the forward direction is from the first to the second.
    pub ends: [Node; 2],
    pub line: LinkSettings,
}

#[derive(Clone, Debug)]
pub struct QpPlan {
    pub name: String,
    pub host: usize,
    pub peer: usize,
    pub pair: usize,
}

/// Two queue pairs and the settings of their connection.
#[derive(Clone, Debug)]
pub struct PairPlan {
    pub qps: [usize; 2],
    pub kind: QpType,
    /// Steps connect them through the connection manager.
    pub uses_cm: bool,
    pub mtu: Mtu,
    /// Exponent of the ACK timeout.
    pub timeout: u8,
    pub retry_count: u8,
    pub rnr_retry: u8,
    pub min_rnr_timer: RnrTimer,
    /// Maximum number of outstanding READs and atomics.
    pub max_rd_atomic: u8,
    pub sq_psns: [Psn; 2],
    /// Access rights of each side.
    pub access: AccessFlags,
    /// Number of receives that each side keeps posted.
    pub posted_receives: u32,
    pub receive_bytes: u32,
    /// DSCP and ECN bits.
    pub traffic_class: u8,
    pub max_send_wr: u32,
    pub cqe: u32,
    /// Size of each of the four areas of a queue pair.
    pub area_bytes: u64,
}
