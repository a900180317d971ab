//! The faults of a plan, with all names resolved.

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
}

/// The target and action of a fault.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "a plan has few of them")]
pub enum FaultKind {
    /// Packets on links.
    Packets { links: Vec<usize>, rule: Rule },
    /// A fault at a time.
    Timed { at_ns: u64, fault: TimedFault },
    /// Calls or completions of the program of a host.
    Program { host: usize, fault: ProgramFault },
}

/// A fault at a time that does not apply to packets.
#[derive(Clone, Debug)]
pub enum TimedFault {
    /// A change of a link, a switch or a device.
    Fabric { change: FabricChange, for_ns: Option<u64> },
    /// A link goes down and up.
    Flap(Flap),
    /// Device and program of a host stop.
    Stall { host: usize, for_ns: u64 },
    /// A program posts no receives.
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

/// A change of a link, a switch or a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FabricChange {
    /// A link goes down or comes up.
    LinkState { link: usize, directions: [bool; 2], state: LinkState },
    /// The rate of a link changes.
    LinkRate { link: usize, rate: u64 },
    /// The MTU of a link changes.
    LinkMtu { link: usize, mtu: u32 },
    /// A setting of a switch changes.
    Switch { switch: usize, change: SwitchChange },
    /// A device starts to send pause frames.
    PauseStorm { host: usize, priority: u8 },
    /// A device stops sending pause frames.
    PauseStormEnd { host: usize, priority: u8 },
    /// A device stops.
    Stall { host: usize, for_ns: u64 },
    /// A device raises an asynchronous event, with its consequences. The object is a queue pair or completion queue, in
    /// order of creation, from 1.
    AsyncEvent { host: usize, event: InjectedEvent, object: Option<u32> },
}

impl FaultPlan {
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

impl FabricChange {
    /// The change that reverts it, if any.
    pub const fn inverse(self) -> Option<FabricChange> {
        match self {
            FabricChange::LinkState { link, directions, state: LinkState::Down } => {
                Some(FabricChange::LinkState { link, directions, state: LinkState::Up })
            }
            FabricChange::PauseStorm { host, priority } => {
                Some(FabricChange::PauseStormEnd { host, priority })
            }
            _ => None,
        }
    }
}

/// A link that goes down and up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flap {
    pub link: usize,
    pub down_ns: u64,
    pub up_ns: u64,
    pub times: u32,
}

impl Flap {
    /// The times at which the link goes down and up, starting at `from_ns`.
    pub fn transitions(self, from_ns: u64) -> impl Iterator<Item = (u64, LinkState)> {
        let Flap { down_ns, up_ns, times, .. } = self;
        (0..u64::from(times)).flat_map(move |n| {
            let at = from_ns + n * (down_ns + up_ns);
            [(at, LinkState::Down), (at + down_ns, LinkState::Up)]
        })
    }
}

/// A new setting of a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwitchChange {
    Buffer(u64),
    Marking(EcnMarking),
    FlowControl(PfcSettings),
}

/// A rule that counts packets for an expectation.
#[derive(Clone, Debug)]
pub struct CountingRule {
    pub links: Vec<usize>,
    pub rule: Rule,
}
