//! A scenario with every name resolved and every claim checked: what a driver carries out.

mod build;
mod check;
mod connect;
mod group;
mod network;
mod reach;
mod rules;
mod words;

pub(crate) use build::build;
pub(crate) use check::EVENTS;
pub use check::{
    Bound, Check, CompletionCheck, ConnectionCheck, Expectation, MemoryClaim, OrderCheck, PacketLook, Subject,
};
pub(crate) use network::usual_settings;

use crate::language::{CallName, Errno, Invariant, Placement, RaisedName, StatusName};
use crate::parameters::Values;
use softhca_engine::{PayloadMode, QpKind, Recovery, Settings, State};
use softhca_fabric::{
    Action, Choice, Cut, Direction, FlowControl, Line, Marking, Receiver, Repeat, Role, Rule, RuleId,
    SwitchSettings,
};
use softhca_queue::Access;
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
    pub values: Values,
    /// When the run is cut off.
    pub ends_ns: Option<u64>,
    /// The hosts, in the order of their names.
    pub hosts: Vec<HostPlan>,
    /// The switches, in the order of their names.
    pub switches: Vec<SwitchPlan>,
    /// The cables.
    pub cables: Vec<CablePlan>,
    /// Routes that are not the shortest way.
    pub routes: Vec<RoutePlan>,
    /// The queue pairs; the n-th has role n + 1.
    pub qps: Vec<QpPlan>,
    /// How they are connected.
    pub pairs: Vec<PairPlan>,
    /// What those queue pairs are that the file leaves to real programs.
    pub transport: QpKind,
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
    pub counts: Vec<CountPlan>,
    /// What must come of it.
    pub expectations: Vec<Expectation>,
    /// What must hold at every moment.
    pub invariants: Vec<Invariant>,
}

impl Plan {
    /// The role of a queue pair.
    pub const fn role(qp: usize) -> Role {
        Role(qp as u32 + 1)
    }

    /// The queue pair of a role.
    pub const fn of_role(role: Role) -> usize {
        role.0 as usize - 1
    }

    /// The pair of a queue pair.
    pub fn pair_of(&self, qp: usize) -> &PairPlan {
        &self.pairs[self.qps[qp].pair]
    }

    /// Whether chance decides about packets. What it decides about a packet that is sent again depends on how
    /// often it is, and so on time.
    pub fn leaves_to_chance(&self) -> bool {
        let by_chance = |rule: &Rule| matches!(rule.repeat.choice, Choice::Chance { .. } | Choice::Burst(_));
        self.faults
            .iter()
            .any(|fault| matches!(&fault.kind, FaultKind::Packets { rule, .. } if by_chance(rule)))
    }

    /// Whether packets come late, so that what a timer makes of it is part of the story.
    pub fn delays(&self) -> bool {
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
    pub fn rules_of(&self, host: usize) -> Vec<(&str, Rule)> {
        let counts = self.counts.iter().map(|count| ("", &count.cables, &count.rule));
        let faults = self.faults.iter().filter_map(|fault| match &fault.kind {
            FaultKind::Packets { cables, rule } => Some((fault.name.as_str(), cables, rule)),
            _ => None,
        });
        let mut found = Vec::new();
        for (name, cables, rule) in counts.chain(faults) {
            if cables.is_empty() {
                found.push((name, rule.clone()));
            }
            for cable in cables {
                let ends = self.cables[*cable].ends;
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
    pub fn needs_virtual_time(&self) -> Option<&'static str> {
        if let Some(why) = self.needs_virtual_cards() {
            return Some(why);
        }
        if self.faults.iter().any(|fault| match &fault.kind {
            FaultKind::Timed { what, .. } => !matches!(
                what,
                Disturbance::NoReceives { .. } | Disturbance::SlowReceiver { .. } | Disturbance::Kill { .. }
            ),
            _ => false,
        }) {
            return Some("links and hosts fail at a virtual time only");
        }
        None
    }

    /// Why no real card can be like this, or stand on such a network.
    pub(crate) fn needs_virtual_cards(&self) -> Option<&'static str> {
        if !self.switches.is_empty() {
            return Some("switches exist in virtual time only");
        }
        if self.hosts.iter().any(|host| host.receiver.is_some()) {
            return Some("a real card takes what arrives as fast as it can");
        }
        if self.hosts.iter().any(|host| host.initial_rate.is_some()) {
            return Some("initial rates are set in virtual time only");
        }
        if self.hosts.iter().any(|host| host.settings.payload == PayloadMode::Elided) {
            return Some("real packets carry their payload");
        }
        if self.flows.iter().any(|flow| flow.count.is_none()) {
            return Some("a workload without a count ends by virtual time only");
        }
        let cables_of =
            |host| self.cables.iter().filter(|cable| cable.ends.contains(&Node::Host(host))).count();
        if (0..self.hosts.len()).any(|host| cables_of(host) > 1) {
            return Some("a card on real sockets has one cable");
        }
        if self.cables.iter().any(|cable| cable.line.mtu < u32::MAX) {
            return Some("a real cable carries what its network carries");
        }
        let rules = self.faults.iter().filter_map(|fault| match &fault.kind {
            FaultKind::Packets { rule, .. } => Some(rule),
            _ => None,
        });
        let mut rules = rules.chain(self.counts.iter().map(|count| &count.rule));
        if rules.any(|rule| rule.selector.absolute_psn.is_some()) {
            return Some("real cards choose their first PSN themselves");
        }
        if self.steps.iter().any(|step| step.deed == Deed::Unmap) {
            return Some("the memory of a real process stays where it is");
        }
        if self.groups().len() > 256 {
            return Some("at most 256 multicast groups get addresses of their own there");
        }
        let cuts = |fault: &FaultPlan| match &fault.kind {
            FaultKind::Packets { rule, .. } => {
                matches!(rule.action, Action::LinkDown { cut: Cut::BothWays, .. })
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
    pub said_recovery: Option<Recovery>,
    /// The rate that its queue pairs begin with, in bits per second; the line's without one.
    pub initial_rate: Option<u64>,
    /// How fast its card takes what arrives; at once without one.
    pub receiver: Option<Receiver>,
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
    pub cable: usize,
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
pub struct CablePlan {
    /// Its two ends; forward leads from the first to the second.
    pub ends: [Node; 2],
    /// Its physics.
    pub line: Line,
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
    pub kind: QpKind,
    /// Steps connect them, through the connection manager.
    pub by_cm: bool,
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
    pub reads: u8,
    /// The first PSNs.
    pub psns: [Psn; 2],
    /// What each side allows.
    pub access: Access,
    /// Receives that each side keeps posted.
    pub receives: u32,
    /// Bytes of each.
    pub receive_bytes: u32,
    /// DSCP and ECN bits.
    pub traffic_class: u8,
    /// Send work requests that may wait.
    pub sends: u32,
    /// Completions that the queue holds.
    pub completions: u32,
    /// Bytes of each of the four areas of a queue pair's memory.
    pub area: u64,
}

/// The four areas of a queue pair's memory, in this order, each as large as the largest message needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Area {
    /// What it sends.
    Source,
    /// What peers write, read and change.
    Target,
    /// What it receives.
    Received,
    /// What it read from its peer.
    Fetched,
}

impl Area {
    /// Where an area begins, if each has this size.
    pub const fn start(self, size: u64) -> u64 {
        self as u64 * size
    }
}

/// What a work request does, in terms of areas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// Two-sided data.
    Send {
        /// Four bytes for the receiver.
        immediate: Option<u32>,
    },
    /// One-sided data.
    Write {
        /// Four bytes for the receiver.
        immediate: Option<u32>,
    },
    /// The peer's memory.
    Read,
    /// Swap if equal.
    CompareSwap {
        /// What must be there.
        compare: u64,
        /// What is put there.
        swap: u64,
    },
    /// Add.
    FetchAdd {
        /// How much.
        add: u64,
    },
}

/// A send work request, ready for any card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// What it does.
    pub job: Job,
    /// How much data.
    pub bytes: u32,
    /// Where in its own area.
    pub offset: u64,
    /// Where in the peer's target area.
    pub remote_offset: u64,
    /// Whether the remote address is right.
    pub remote: Placement,
    /// Report success.
    pub signaled: bool,
    /// Wait for earlier reads.
    pub fence: bool,
    /// Ask for an event at the receiver.
    pub solicited: bool,
    /// The data travels in the request.
    pub inline: bool,
    /// The multicast group that it goes to, in place of the peer.
    pub group: Option<IpAddr>,
}

/// What a step does.
#[derive(Clone, Debug, PartialEq)]
pub enum Deed {
    /// Posts a work request.
    Post(Work),
    /// Posts a receive.
    Receive {
        /// Room.
        bytes: u32,
        /// Where in its area.
        offset: u64,
    },
    /// Changes the state.
    Modify {
        /// To this.
        state: State,
        /// And raises an event when drained.
        notify_drained: bool,
    },
    /// Takes the next request that comes to a port.
    Listen {
        /// Which.
        port: u16,
    },
    /// Asks the host of the peer.
    Connect {
        /// At which port.
        port: u16,
        /// With which words.
        private_data: Vec<u8>,
    },
    /// Accepts the request that came.
    Accept {
        /// With which words.
        private_data: Vec<u8>,
    },
    /// Refuses the request that came.
    Reject {
        /// Why.
        reason: u16,
        /// With which words.
        private_data: Vec<u8>,
    },
    /// Ends the connection.
    Disconnect,
    /// Becomes a member of a multicast group.
    Join(IpAddr),
    /// Leaves a multicast group.
    Leave(IpAddr),
    /// Destroys the queue pair.
    Destroy,
    /// Takes its memory away.
    Unmap,
    /// Deregisters its memory.
    Deregister,
    /// Changes what its memory allows.
    Reregister(Access),
}

impl Deed {
    /// Whether something will tell that it is done: a completion, or an event of the connection manager.
    pub fn is_awaited(&self) -> bool {
        match self {
            Deed::Post(work) => work.signaled,
            Deed::Receive { .. }
            | Deed::Listen { .. }
            | Deed::Connect { .. }
            | Deed::Accept { .. }
            | Deed::Disconnect => true,
            _ => false,
        }
    }

    /// Whether the connection manager does it.
    pub fn is_of_connections(&self) -> bool {
        matches!(
            self,
            Deed::Listen { .. }
                | Deed::Connect { .. }
                | Deed::Accept { .. }
                | Deed::Reject { .. }
                | Deed::Disconnect
        )
    }
}

/// A step.
#[derive(Clone, Debug)]
pub struct StepPlan {
    /// Its name.
    pub name: Option<String>,
    /// When, or how long after `after`.
    pub at_ns: u64,
    /// The step before it.
    pub after: Option<usize>,
    /// Who does it.
    pub qp: usize,
    /// How often.
    pub repeat: u32,
    /// What.
    pub deed: Deed,
}

/// What a flow posts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FlowKind {
    /// The same over and over.
    Same(Job),
    /// A message, and an answer from the peer before the next.
    PingPong,
    /// Reads and writes of records.
    KeyValue {
        /// How many records.
        keys: u64,
        /// The share of reads, per billion.
        reads: u32,
    },
}

/// Traffic of one queue pair that goes on.
#[derive(Clone, Debug)]
pub struct FlowPlan {
    /// The workload that it belongs to.
    pub workload: usize,
    /// Who posts.
    pub qp: usize,
    /// What.
    pub kind: FlowKind,
    /// Bytes of each message.
    pub bytes: u32,
    /// How many messages.
    pub count: Option<u64>,
    /// How many at once.
    pub depth: u32,
    /// When it begins.
    pub at_ns: u64,
    /// When it posts its last.
    pub until_ns: Option<u64>,
    /// Time between two at least.
    pub every_ns: u64,
}

/// A program that is started on a host.
#[derive(Clone, Debug)]
pub struct CommandPlan {
    /// The workload that it is.
    pub workload: usize,
    /// Where.
    pub host: usize,
    /// The program and its arguments.
    pub words: Vec<String>,
    /// When.
    pub at_ns: u64,
    /// The exit code that it must have.
    pub exit: i32,
}

/// Something that goes wrong.
#[derive(Clone, Debug)]
pub struct FaultPlan {
    /// Its number, which draws depend on.
    pub id: RuleId,
    /// Its name.
    pub name: String,
    /// It need not happen.
    pub optional: bool,
    /// What it is.
    pub kind: FaultKind,
}

/// What a fault is about.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "a plan has few of them")]
pub enum FaultKind {
    /// Packets on these cables.
    Packets {
        /// The cables.
        cables: Vec<usize>,
        /// The rule.
        rule: Rule,
    },
    /// Something that happens at a time.
    Timed {
        /// When.
        at_ns: u64,
        /// What.
        what: Disturbance,
    },
    /// Completions of a queue pair.
    Completions {
        /// Whose.
        qp: usize,
        /// Which.
        repeat: Repeat,
        /// What becomes of them.
        change: Change,
    },
    /// Calls of a host's program.
    Calls {
        /// Whose.
        host: usize,
        /// Which verb.
        call: CallName,
        /// Which calls.
        repeat: Repeat,
        /// The error.
        errno: Errno,
    },
}

/// What becomes of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It has another status.
    Status(StatusName),
    /// It is handed over later.
    Hold(u64),
}

/// Something that happens at a time, outside of packets.
#[derive(Clone, Debug)]
pub enum Disturbance {
    /// A cable goes down.
    Down {
        /// Which.
        cable: usize,
        /// Forward, backward.
        ways: [bool; 2],
        /// For how long.
        for_ns: Option<u64>,
    },
    /// A cable comes up again.
    Up {
        /// Which.
        cable: usize,
        /// Forward, backward.
        ways: [bool; 2],
    },
    /// A cable goes down and up.
    Flap {
        /// Which.
        cable: usize,
        /// How long down.
        down_ns: u64,
        /// How long up.
        up_ns: u64,
        /// How often.
        times: u32,
    },
    /// A cable has another rate.
    Rate {
        /// Which.
        cable: usize,
        /// Bits per second.
        rate: u64,
    },
    /// A cable has another MTU.
    Mtu {
        /// Which.
        cable: usize,
        /// Bytes.
        mtu: u32,
    },
    /// A switch has other settings: one of buffer, ECN and PFC.
    Switch {
        /// Which.
        switch: usize,
        /// What changes.
        change: SwitchChange,
    },
    /// A card pauses its neighbour.
    PauseStorm {
        /// Whose.
        host: usize,
        /// For how long.
        for_ns: Option<u64>,
        /// On which priority.
        priority: u8,
    },
    /// A card lets its neighbour go on.
    StormOver {
        /// Whose.
        host: usize,
        /// On which priority.
        priority: u8,
    },
    /// A host stands still.
    Stall {
        /// Which.
        host: usize,
        /// For how long.
        for_ns: u64,
    },
    /// A program posts no receives.
    NoReceives {
        /// Whose.
        host: usize,
        /// For how long.
        for_ns: u64,
    },
    /// A program takes its time.
    SlowReceiver {
        /// Whose.
        host: usize,
        /// How long each.
        delay_ns: u64,
    },
    /// A program dies.
    Kill {
        /// Whose.
        host: usize,
    },
    /// An event is raised.
    Raise {
        /// Where.
        host: usize,
        /// Which.
        event: RaisedName,
    },
}

/// What a switch does differently from a time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwitchChange {
    /// The memory that all its queues share.
    Buffer(u64),
    /// When it marks.
    Marking(Marking),
    /// When it pauses.
    FlowControl(FlowControl),
}

/// A rule that only counts.
#[derive(Clone, Debug)]
pub struct CountPlan {
    /// The cables.
    pub cables: Vec<usize>,
    /// The rule.
    pub rule: Rule,
}
