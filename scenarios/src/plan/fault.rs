//! What goes wrong in a plan, with every name resolved.

use crate::language::{CallName, Errno, RaisedName, StatusName};
use softhca_fabric::{FlowControl, LinkState, Marking, Repeat, Rule, RuleId};

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
    /// To a cable, a switch or a card.
    Incident {
        /// What.
        what: Incident,
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
}

/// What a driver does to a cable, a switch or a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incident {
    /// A cable goes down or comes up.
    Link {
        /// Which.
        cable: usize,
        /// Forward, backward.
        ways: [bool; 2],
        /// What it is from now on.
        state: LinkState,
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
    /// A card stands still.
    Stall {
        /// Whose.
        host: usize,
        /// For how long.
        for_ns: u64,
    },
    /// An event is raised.
    Raise {
        /// Where.
        host: usize,
        /// Which.
        event: RaisedName,
    },
}

impl Incident {
    /// What ends it, if anything does.
    pub const fn opposite(self) -> Option<Incident> {
        match self {
            Incident::Link { cable, ways, state: LinkState::Down } => {
                Some(Incident::Link { cable, ways, state: LinkState::Up })
            }
            Incident::PauseStorm { host, priority } => Some(Incident::StormOver { host, priority }),
            _ => None,
        }
    }
}

/// A cable that goes down and up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flap {
    /// Which.
    pub cable: usize,
    /// How long down.
    pub down_ns: u64,
    /// How long up.
    pub up_ns: u64,
    /// How often.
    pub times: u32,
}

impl Flap {
    /// When the cable goes down and comes up, if it begins at this time.
    pub fn turns(self, from_ns: u64) -> impl Iterator<Item = (u64, LinkState)> {
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
