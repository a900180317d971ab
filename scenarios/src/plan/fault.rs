//! The faults of a plan, with all names resolved.

use crate::source::SourceLine;
use softhca_fabric::{EcnMarking, LinkState, PfcSettings, Rule, RuleId};
use softhca_types::{FaultTrigger, InjectedEvent, ProgramFault};

/// An injected fault.
#[derive(Clone, Debug)]
pub struct FaultPlan {
    /// Its id, which random decisions depend on.
    pub id: RuleId,
    pub name: String,
    /// It does not have to fire.
    pub optional: bool,
    /// It begins after this: a step, an event or another fault. Faults of programs have triggers of their own.
    pub after: Option<FaultTrigger>,
    pub kind: FaultKind,
    /// Its table in the file.
    pub at: SourceLine,
}

/// The target and action of a fault.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "a plan has few of them")]
pub enum FaultKind {
    /// Packets on links.
    Packets { links: Vec<usize>, rule: Rule },
    /// Changes from a time on, each with its delay after that time.
    Timed { at_ns: u64, changes: Vec<(u64, Change)> },
    /// Calls or completions of the program of a host.
    Program { host: usize, fault: ProgramFault },
}

/// A change of a link, a switch, a device, a program or the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A link goes down or comes up.
    LinkState { link: usize, directions: [bool; 2], state: LinkState },
    /// The rate of a link changes.
    LinkRate { link: usize, rate: u64 },
    /// The MTU of a link changes.
    LinkMtu { link: usize, mtu: u32 },
    /// The shared buffer of a switch changes.
    SwitchBuffer { switch: usize, bytes: u64 },
    /// The ECN marking of a switch changes.
    SwitchMarking { switch: usize, marking: EcnMarking },
    /// The PFC thresholds of a switch change.
    SwitchPfc { switch: usize, settings: PfcSettings },
    /// A device starts to send pause frames.
    PauseStorm { host: usize, priority: u8 },
    /// A device stops sending pause frames.
    PauseStormEnd { host: usize, priority: u8 },
    /// Device and program of a host stop for this time.
    Stall { host: usize, for_ns: u64 },
    /// A stall ends.
    StallEnd { host: usize },
    /// A device raises an asynchronous event, with its consequences. The object is a queue pair or completion queue, in
    /// order of creation, from 1.
    AsyncEvent { host: usize, event: InjectedEvent, object: Option<u32> },
    /// A program posts no receives for this time.
    WithholdReceives { host: usize, for_ns: u64 },
    /// A program delays its receives.
    DelayReceives { host: usize, delay_ns: u64 },
    /// A program ends.
    KillProgram { host: usize },
    /// A program ends and starts again.
    RestartProgram { host: usize },
    /// The daemon ends, and a new one may start in its place.
    KillDaemon { restart: bool },
}

impl Change {
    /// The host whose program or device it changes.
    pub(crate) const fn host(&self) -> Option<usize> {
        match self {
            Change::PauseStorm { host, .. }
            | Change::PauseStormEnd { host, .. }
            | Change::Stall { host, .. }
            | Change::StallEnd { host }
            | Change::AsyncEvent { host, .. }
            | Change::WithholdReceives { host, .. }
            | Change::DelayReceives { host, .. }
            | Change::KillProgram { host }
            | Change::RestartProgram { host } => Some(*host),
            _ => None,
        }
    }

    /// Why real programs do not support it.
    pub(crate) const fn unsupported_for_programs(&self) -> Option<&'static str> {
        match self {
            Change::LinkState { directions: [true, true], .. }
            | Change::Stall { .. }
            | Change::StallEnd { .. }
            | Change::KillProgram { .. }
            | Change::RestartProgram { .. }
            | Change::KillDaemon { .. } => None,
            Change::AsyncEvent { event, .. } => match event.object() {
                Some(_) => Some("an event of a queue pair or completion queue without `verb` is"),
                None => None,
            },
            Change::LinkState { .. } => Some("a link that is down in one direction only is"),
            _ => Some("a fault of a host or a link, other than a link that goes down, is"),
        }
    }

    /// Whether steps and workloads on real sockets support it; some changes only `after` something, not at a time.
    pub(crate) const fn is_supported_on_udp(&self, waits: bool) -> bool {
        match self {
            Change::WithholdReceives { .. }
            | Change::DelayReceives { .. }
            | Change::KillProgram { .. }
            | Change::AsyncEvent { .. } => true,
            Change::LinkState { directions: [true, true], .. }
            | Change::Stall { .. }
            | Change::StallEnd { .. } => waits,
            _ => false,
        }
    }
}

impl FaultPlan {
    /// Whether a command must watch the run to begin it, or to change what it changes.
    pub fn needs_command(&self) -> bool {
        match &self.kind {
            FaultKind::Timed { .. } => true,
            FaultKind::Packets { .. } => self.after.is_some(),
            FaultKind::Program { fault, .. } => {
                let mut triggers = [&fault.after, &fault.until].into_iter().flatten();
                triggers.any(|trigger| matches!(trigger, FaultTrigger::Step(_) | FaultTrigger::Fault(_)))
            }
        }
    }

    /// Whether it waits for this.
    pub fn waits_for(&self, trigger: &FaultTrigger) -> bool {
        match &self.kind {
            FaultKind::Program { fault, .. } => {
                [&fault.after, &fault.until].into_iter().flatten().any(|wanted| wanted == trigger)
            }
            _ => self.after.as_ref() == Some(trigger),
        }
    }
}

/// A rule that counts packets for an expectation.
#[derive(Clone, Debug)]
pub struct CountingRule {
    pub links: Vec<usize>,
    pub rule: Rule,
}
