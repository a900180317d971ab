//! What goes wrong in a plan, with every name resolved.

use crate::spec::{Errno, Verb};
use softhca_engine::AsyncEvent;
use softhca_fabric::{EcnMarking, LinkState, PfcSettings, Repeat, Rule, RuleId};
use softhca_queue::CompletionStatus;

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
        links: Vec<usize>,
        /// The rule.
        rule: Rule,
    },
    /// Something that happens at a time.
    Timed {
        /// When.
        at_ns: u64,
        /// What.
        fault: TimedFault,
    },
    /// Completions of a queue pair.
    Completions {
        /// Whose.
        qp: usize,
        /// Which.
        repeat: Repeat,
        /// What becomes of them.
        change: CompletionChange,
    },
    /// Calls of a host's program.
    Verbs {
        /// Whose.
        host: usize,
        /// Which verb.
        verb: Verb,
        /// Which calls.
        repeat: Repeat,
        /// The error.
        errno: Errno,
    },
}

/// What becomes of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionChange {
    /// It has another status.
    Status(CompletionStatus),
    /// It is handed over later.
    Delay(u64),
}

/// Something that happens at a time, outside of packets.
#[derive(Clone, Debug)]
pub enum TimedFault {
    /// To a cable, a switch or a card.
    Fabric {
        /// What.
        change: FabricChange,
        /// After which the opposite happens.
        for_ns: Option<u64>,
    },
    /// A cable goes down and up.
    Flap(Flap),
    /// A host stands still, card and program.
    Stall {
        /// Which.
        host: usize,
        /// For how long.
        for_ns: u64,
    },
    /// A program posts no receives.
    WithholdReceives {
        /// Whose.
        host: usize,
        /// For how long.
        for_ns: u64,
    },
    /// A program takes its time.
    DelayReceives {
        /// Whose.
        host: usize,
        /// How long each.
        delay_ns: u64,
    },
    /// A program dies.
    KillProgram {
        /// Whose.
        host: usize,
    },
}

/// What a driver does to a cable, a switch or a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FabricChange {
    /// A cable goes down or comes up.
    LinkState {
        /// Which.
        link: usize,
        /// Forward, backward.
        directions: [bool; 2],
        /// What it is from now on.
        state: LinkState,
    },
    /// A cable has another rate.
    LinkRate {
        /// Which.
        link: usize,
        /// Bits per second.
        rate: u64,
    },
    /// A cable has another MTU.
    LinkMtu {
        /// Which.
        link: usize,
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
        /// On which priority.
        priority: u8,
    },
    /// A card lets its neighbour go on.
    PauseStormEnd {
        /// Whose.
        host: usize,
        /// On which priority.
        priority: u8,
    },
    /// A card stands still.
    Stall {
        /// Whose.
        host: usize,
        /// For how long.
        for_ns: u64,
    },
    /// An event is raised.
    AsyncEvent {
        /// Where.
        host: usize,
        /// Which.
        event: AsyncEvent,
    },
}

impl FabricChange {
    /// What ends it, if anything does.
    pub const fn inverse(self) -> Option<FabricChange> {
        match self {
            FabricChange::LinkState { link: cable, directions: ways, state: LinkState::Down } => {
                Some(FabricChange::LinkState { link: cable, directions: ways, state: LinkState::Up })
            }
            FabricChange::PauseStorm { host, priority } => {
                Some(FabricChange::PauseStormEnd { host, priority })
            }
            _ => None,
        }
    }
}

/// A cable that goes down and up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flap {
    /// Which.
    pub link: usize,
    /// How long down.
    pub down_ns: u64,
    /// How long up.
    pub up_ns: u64,
    /// How often.
    pub times: u32,
}

impl Flap {
    /// When the cable goes down and comes up, if it begins at this time.
    pub fn transitions(self, from_ns: u64) -> impl Iterator<Item = (u64, LinkState)> {
        let Flap { down_ns, up_ns, times, .. } = self;
        (0..u64::from(times)).flat_map(move |n| {
            let at = from_ns + n * (down_ns + up_ns);
            [(at, LinkState::Down), (at + down_ns, LinkState::Up)]
        })
    }
}

/// What a switch does differently from a time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwitchChange {
    /// The memory that all its queues share.
    Buffer(u64),
    /// When it marks.
    Marking(EcnMarking),
    /// When it pauses.
    FlowControl(PfcSettings),
}

/// A rule that only counts.
#[derive(Clone, Debug)]
pub struct CountingRule {
    /// The cables.
    pub links: Vec<usize>,
    /// The rule.
    pub rule: Rule,
}
