//! What must come of a run, with every name resolved: what a judge looks at.

use super::Area;
use crate::quantity::CountRange;
use crate::spec::{Errno, SwitchExpectation};
use softhca_engine::QpState;
use softhca_fabric::{Direction, InclusiveRange, RuleId, Selector};
use softhca_queue::cm::EventType;
use softhca_queue::{CompletionOpcode, CompletionStatus};

/// Something that must hold at the end.
#[derive(Clone, Debug)]
pub struct Expectation {
    /// It in words.
    pub text: String,
    /// It is about time, which real sockets do not keep.
    pub is_timed: bool,
    /// What it is.
    pub check: Check,
}

/// Limits of a number, each if given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound<T> {
    /// The smallest that will do.
    pub at_least: Option<T>,
    /// The largest that will do.
    pub at_most: Option<T>,
}

/// What measurements are about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// What it is called.
    pub name: String,
    /// The queue pairs that post.
    pub qps: Vec<usize>,
    /// Only work of this workload.
    pub workload: Option<usize>,
    /// Only work of this step.
    pub step: Option<usize>,
}

/// What is expected.
#[derive(Clone, Debug)]
pub enum Check {
    /// Completions.
    Completion(CompletionCheck),
    /// A state at the end.
    State {
        /// Whose.
        qp: usize,
        /// Which.
        is: QpState,
    },
    /// Packets that a counting rule saw.
    Packet {
        /// The counting rule's place in the plan.
        count: usize,
        /// How many.
        times: CountRange,
    },
    /// A counter.
    Counter {
        /// Whose.
        host: usize,
        /// Which.
        name: String,
        /// How much.
        is: CountRange,
    },
    /// Asynchronous events.
    Event {
        /// Where.
        host: usize,
        /// Which.
        name: String,
        /// How many.
        times: CountRange,
    },
    /// What programs hear of connections.
    Connection(ConnectionCheck),
    /// Things in order.
    Order(Vec<OrderCheck>),
    /// Bytes.
    Memory {
        /// Whose.
        qp: usize,
        /// Which part.
        area: Area,
        /// From where.
        offset: u64,
        /// How many.
        bytes: u64,
        /// What they are.
        claim: ExpectedMemory,
    },
    /// Useful data in a time.
    Goodput {
        /// Of what.
        of: Subject,
        /// How much, in bits per second.
        bound: Bound<u64>,
        /// When.
        during: Option<InclusiveRange>,
    },
    /// Jain's index.
    Fairness {
        /// Of what.
        of: Vec<Subject>,
        /// How even.
        bound: Bound<f64>,
        /// When.
        during: Option<InclusiveRange>,
    },
    /// Time from post to completion.
    Latency {
        /// Of what.
        of: Subject,
        /// Which percentile.
        percentile: f64,
        /// How long, in nanoseconds.
        bound: Bound<u64>,
    },
    /// Everything is done.
    Finish {
        /// Of what.
        of: Option<Subject>,
        /// When, in nanoseconds.
        bound: Bound<u64>,
    },
    /// What a switch did.
    Switch {
        /// Which.
        switch: usize,
        /// How much of what.
        spec: SwitchExpectation,
    },
    /// Pauses.
    PauseFrames {
        /// On which cable.
        cable: usize,
        /// Which way.
        direction: Direction,
        /// How many.
        times: CountRange,
    },
    /// Calls that failed.
    VerbErrors {
        /// Whose.
        host: usize,
        /// With which error.
        errno: Option<Errno>,
        /// How many.
        times: CountRange,
    },
}

/// Which completions, and how many.
#[derive(Clone, Debug, Default)]
pub struct CompletionCheck {
    /// Whose.
    pub qp: Option<usize>,
    /// Of which step.
    pub step: Option<usize>,
    /// Of what.
    pub operation: Option<CompletionOpcode>,
    /// With which status.
    pub status: Option<CompletionStatus>,
    /// With so many bytes.
    pub bytes: Option<u64>,
    /// With this immediate data.
    pub imm_data: Option<u32>,
    /// With these words in the reason.
    pub reason: Option<String>,
    /// How many.
    pub times: Option<CountRange>,
    /// Before this time.
    pub before: Option<u64>,
}

/// Which events of connections, and how many.
#[derive(Clone, Debug)]
pub struct ConnectionCheck {
    /// Whose connection.
    pub qp: Option<usize>,
    /// Whose program.
    pub host: Option<usize>,
    /// What happened.
    pub kind: EventType,
    /// With which status.
    pub status: Option<i32>,
    /// With which words of the other side.
    pub private_data: Option<Vec<u8>>,
    /// How many.
    pub times: CountRange,
    /// When.
    pub during: InclusiveRange,
}

/// What memory holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExpectedMemory {
    /// What this queue pair sends from the same offset.
    SourceOf(usize),
    /// Zeroes.
    Zeroes,
    /// These bytes.
    Bytes(Vec<u8>),
}

/// One of several things in order.
#[derive(Clone, Debug)]
pub enum OrderCheck {
    /// A packet is sent.
    Packet(PacketCheck, String),
    /// A work request ends.
    Completion(CompletionCheck, String),
    /// A queue pair gets into a state.
    State(usize, QpState, String),
    /// An event is raised.
    Event(usize, String),
    /// A program hears of a connection.
    Connection(ConnectionCheck, String),
    /// A fault happens.
    Fault(RuleId, String),
}

impl OrderCheck {
    /// It in words.
    pub fn text(&self) -> String {
        match self {
            OrderCheck::Packet(_, text)
            | OrderCheck::Completion(_, text)
            | OrderCheck::Connection(_, text)
            | OrderCheck::State(_, _, text) => text.clone(),
            OrderCheck::Event(_, name) => format!("event {name}"),
            OrderCheck::Fault(_, name) => format!("fault {name:?}"),
        }
    }
}

/// A packet as its sender's card tells of it.
#[derive(Clone, Debug)]
pub struct PacketCheck {
    /// The host that sends it, if that matters.
    pub from: Option<usize>,
    /// What it is like; the direction is left out.
    pub selector: Selector,
}
