//! The expectations of a plan, with all names resolved.

use super::Area;
use crate::quantity::CountRange;
use crate::spec::{Errno, SwitchExpectation};
use softhca_engine::QpState;
use softhca_fabric::{Direction, InclusiveRange, RuleId, Selector};
use softhca_queue::cm::EventType;
use softhca_queue::{CompletionOpcode, CompletionStatus};

/// A condition that must hold at the end of the run.
#[derive(Clone, Debug)]
pub struct Expectation {
    /// The condition in words.
    pub text: String,
    /// It is about time, which real time does not reproduce.
    pub is_timed: bool,
    /// Check.
    pub check: Check,
}

/// Optional bounds of a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound<T> {
    /// Lower bound.
    pub at_least: Option<T>,
    /// Upper bound.
    pub at_most: Option<T>,
}

/// The subject of a measurement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// Name.
    pub name: String,
    /// Queue pairs.
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
    State {
        /// Queue pair.
        qp: usize,
        /// State.
        is: QpState,
    },
    /// Packets that a counting rule matched.
    Packet {
        /// Index of the counting rule.
        count: usize,
        /// Expected count.
        times: CountRange,
    },
    /// A counter.
    Counter {
        /// Host.
        host: usize,
        /// Name.
        name: String,
        /// Expected value.
        is: CountRange,
    },
    /// Asynchronous events.
    Event {
        /// Host.
        host: usize,
        /// Name.
        name: String,
        /// Expected count.
        times: CountRange,
    },
    /// Connection management events.
    Connection(ConnectionCheck),
    /// Events in order.
    Order(Vec<OrderCheck>),
    /// Contents of memory.
    Memory {
        /// Queue pair.
        qp: usize,
        /// Area.
        area: Area,
        /// Offset in the area.
        offset: u64,
        /// Number of bytes.
        bytes: u64,
        /// Expected bytes.
        claim: ExpectedMemory,
    },
    /// Application bytes per time.
    Goodput {
        /// Subject.
        of: Subject,
        /// Bounds in bits per second.
        bound: Bound<u64>,
        /// Time window.
        during: Option<InclusiveRange>,
    },
    /// Jain's index.
    Fairness {
        /// Subject.
        of: Vec<Subject>,
        /// Bounds of the index.
        bound: Bound<f64>,
        /// Time window.
        during: Option<InclusiveRange>,
    },
    /// Time from post to completion.
    Latency {
        /// Subject.
        of: Subject,
        /// Percentile.
        percentile: f64,
        /// Bounds in nanoseconds.
        bound: Bound<u64>,
    },
    /// Completion of all work.
    Finish {
        /// Subject.
        of: Option<Subject>,
        /// Bounds in nanoseconds.
        bound: Bound<u64>,
    },
    /// Counters of a switch.
    Switch {
        /// Switch.
        switch: usize,
        /// Expected counters.
        spec: SwitchExpectation,
    },
    /// PFC pause frames.
    PauseFrames {
        /// Link.
        link: usize,
        /// Direction.
        direction: Direction,
        /// Expected count.
        times: CountRange,
    },
    /// Verb calls that returned an error.
    VerbErrors {
        /// Host.
        host: usize,
        /// Error; any if none.
        errno: Option<Errno>,
        /// Expected count.
        times: CountRange,
    },
    /// The exit code of the program of `softhca exec`.
    ExitCode(u8),
}

/// Selects and counts completions.
#[derive(Clone, Debug, Default)]
pub struct CompletionCheck {
    /// Queue pair.
    pub qp: Option<usize>,
    /// Step.
    pub step: Option<usize>,
    /// Opcode.
    pub operation: Option<CompletionOpcode>,
    /// Status.
    pub status: Option<CompletionStatus>,
    /// Number of bytes.
    pub bytes: Option<u64>,
    /// Immediate data.
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
    /// Queue pair of the connection.
    pub qp: Option<usize>,
    /// Host of the program.
    pub host: Option<usize>,
    /// Event.
    pub kind: EventType,
    /// Status.
    pub status: Option<i32>,
    /// Prefix of the private data.
    pub private_data: Option<Vec<u8>>,
    /// Expected count.
    pub times: CountRange,
    /// Time window.
    pub during: InclusiveRange,
}

/// Expected contents of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExpectedMemory {
    /// The source bytes of this queue pair at the same offset.
    SourceOf(usize),
    /// Zeroes.
    Zeroes,
    /// These bytes.
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
    /// A fault fires.
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
