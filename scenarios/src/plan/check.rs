//! The expectations of a plan, with all names resolved.

use super::Area;
use crate::quantity::CountRange;
use crate::source::SourceLine;
use crate::spec::{Errno, SwitchExpectation};
use softhca_engine::QpState;
use softhca_fabric::{Direction, InclusiveRange, RuleId, Selector};
use softhca_types::cm::EventType;
use softhca_types::{CompletionOpcode, CompletionStatus};

/// A condition that must hold at the end of the run.
#[derive(Clone, Debug)]
pub struct Expectation {
    /// The condition in words.
    pub text: String,
    /// It is about time, which real time does not reproduce.
    pub is_timed: bool,
    pub check: Check,
    /// It is counted over all seeds, and need not hold in every run.
    pub sometimes: bool,
    /// Its `[[expect]]`.
    pub at: Option<SourceLine>,
}

impl Expectation {
    pub fn new(text: String, is_timed: bool, check: Check) -> Expectation {
        Expectation { text, is_timed, check, sometimes: false, at: None }
    }
}

/// Optional bounds of a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound<T> {
    pub at_least: Option<T>,
    pub at_most: Option<T>,
}

/// The subject of a measurement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    pub name: String,
    pub qps: Vec<usize>,
    /// Counts only work of this workload.
    pub workload: Option<usize>,
    /// Counts only work of this step.
    pub step: Option<usize>,
}

/// A check of the results of a run.
#[derive(Clone, Debug)]
pub enum Check {
    /// Work completions.
    Completion(CompletionCheck),
    /// Final state of a queue pair.
    State { qp: usize, is: QpState },
    /// Packets that a counting rule matched.
    Packet { count: usize, times: CountRange },
    /// A counter.
    Counter { host: usize, name: String, is: CountRange },
    /// Asynchronous events.
    Event { host: usize, name: String, times: CountRange },
    /// Connection management events.
    Connection(ConnectionCheck),
    /// Events in order.
    Order(Vec<OrderCheck>),
    /// Contents of memory.
    Memory { qp: usize, area: Area, offset: u64, bytes: u64, claim: ExpectedMemory },
    /// Application bytes per time.
    Goodput { of: Subject, bound: Bound<u64>, during: Option<InclusiveRange> },
    /// Jain's index.
    Fairness { of: Vec<Subject>, bound: Bound<f64>, during: Option<InclusiveRange> },
    /// Time from post to completion.
    Latency { of: Subject, percentile: f64, bound: Bound<u64> },
    /// Completion of all work.
    Finish { of: Option<Subject>, bound: Bound<u64> },
    /// Counters of a switch.
    Switch { switch: usize, spec: SwitchExpectation },
    /// PFC pause frames.
    PauseFrames { link: usize, direction: Direction, times: CountRange },
    /// Verb calls that returned an error.
    VerbErrors { host: usize, errno: Option<Errno>, times: CountRange },
    /// The exit code of the program of `softhca exec`.
    ExitCode(u8),
}

/// Selects and counts completions.
#[derive(Clone, Debug, Default)]
pub struct CompletionCheck {
    pub qp: Option<usize>,
    pub step: Option<usize>,
    pub operation: Option<CompletionOpcode>,
    pub status: Option<CompletionStatus>,
    pub bytes: Option<u64>,
    pub imm_data: Option<u32>,
    /// Text that the reason contains.
    pub reason: Option<String>,
    /// Expected count; at least one by default.
    pub times: Option<CountRange>,
    /// Counts only completions before this time.
    pub before: Option<u64>,
}

/// Selects and counts connection management events.
#[derive(Clone, Debug)]
pub struct ConnectionCheck {
    pub qp: Option<usize>,
    /// Host of the program.
    pub host: Option<usize>,
    pub kind: EventType,
    pub status: Option<i32>,
    /// Prefix of the private data.
    pub private_data: Option<Vec<u8>>,
    pub times: CountRange,
    pub during: InclusiveRange,
}

/// Expected contents of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExpectedMemory {
    /// The source bytes of this queue pair at the same offset.
    SourceOf(usize),
    Zeroes,
    Bytes(Vec<u8>),
}

/// One item of an order.
#[derive(Clone, Debug)]
pub enum OrderCheck {
    /// A device sends a packet.
    Packet(PacketCheck, String),
    /// A work request completes.
    Completion(CompletionCheck, String),
    /// A queue pair enters a state.
    State(usize, QpState, String),
    /// A device raises an asynchronous event.
    Event(usize, String),
    /// A program receives a connection management event.
    Connection(ConnectionCheck, String),
    Fault(RuleId, String),
}

impl OrderCheck {
    /// The condition in words.
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

/// Selects packets in the events of the sending device.
#[derive(Clone, Debug)]
pub struct PacketCheck {
    /// Sending host, if given.
    pub from: Option<usize>,
    /// Selector, without the direction.
    pub selector: Selector,
}
