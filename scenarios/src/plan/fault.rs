//! What goes wrong in a plan, with every name resolved.

use crate::language::{CallName, Errno, RaisedName, StatusName};
use softhca_fabric::{FlowControl, Marking, Repeat, Rule, RuleId};

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
