//! Expectations about the result of a run.

use super::{ConnectionExpectation, Errno, OneOrMany, PacketExpectation};
use crate::quantity::{CountRange, Rate, Size, Time, TimeWindow};
use serde::Deserialize;
use softhca_engine::QpState;
use softhca_types::{CompletionOpcode, CompletionStatus};

/// A condition that must hold at the end of the run. It has exactly one of these keys beside `sometimes`.
#[derive(Clone, Debug, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ExpectSpec {
    /// It need not hold in every run: it is counted over all seeds, and fails if it never held.
    #[serde(default)]
    pub sometimes: bool,
    /// Work completions.
    pub completion: Option<CompletionExpectation>,
    /// Final state of a queue pair.
    pub state: Option<StateExpectation>,
    /// Packets, counted where they enter the link, before faults apply.
    pub packet: Option<PacketExpectation>,
    /// A counter of a device.
    pub counter: Option<CounterExpectation>,
    /// Asynchronous events.
    pub event: Option<EventExpectation>,
    /// Connection management events.
    pub connection: Option<ConnectionExpectation>,
    /// Events in this order; other events may occur in between.
    pub order: Option<Vec<OrderItem>>,
    /// Contents of memory.
    pub memory: Option<MemoryExpectation>,
    /// Application bytes per time.
    pub goodput: Option<GoodputExpectation>,
    /// Distribution of goodput.
    pub fairness: Option<FairnessExpectation>,
    /// Time from post to completion.
    pub latency: Option<LatencyExpectation>,
    /// Time at which all work is complete.
    pub finish: Option<FinishExpectation>,
    /// Counters of a switch.
    pub switch: Option<SwitchExpectation>,
    /// PFC pause frames on a link.
    pub pause: Option<PauseExpectation>,
    /// Verb calls that returned an error.
    pub verb_error: Option<VerbErrorExpectation>,
    /// The exit code of the program of `softhca exec`, as a shell reports it: 137 after SIGKILL. `softhca exec` then ends
    /// with 0 if all expectations hold.
    pub exit_code: Option<u8>,
}

/// Work completions with all of these properties.
#[derive(Clone, Debug, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CompletionExpectation {
    /// Queue pair.
    pub qp: Option<String>,
    /// Step that posted the work request.
    pub step: Option<String>,
    /// Opcode of the completion.
    pub op: Option<CompletionOpcode>,
    /// Status of the completion.
    pub status: Option<CompletionStatus>,
    /// Bytes transferred.
    pub bytes: Option<Size>,
    /// Immediate data.
    pub imm_data: Option<u32>,
    /// Text that the reason contains.
    pub reason: Option<String>,
    /// Number of completions; at least one by default.
    pub times: Option<CountRange>,
    /// Counts only completions before this time.
    pub before: Option<Time>,
}

/// The state of a queue pair.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct StateExpectation {
    /// Queue pair.
    pub qp: String,
    /// State.
    pub is: QpState,
}

/// A counter of a device.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CounterExpectation {
    /// Host.
    pub host: String,
    /// Counter, as `softhca stats` names it.
    pub name: String,
    /// Value at the end of the run.
    pub is: CountRange,
}

/// Asynchronous events.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct EventExpectation {
    /// Host.
    pub host: String,
    /// Event, named after `enum ibv_event_type`: `QP_FATAL`.
    pub name: String,
    /// Number of events; at least one by default.
    pub times: Option<CountRange>,
}

/// An item of an order. It has exactly one of these keys.
#[derive(Clone, Debug, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct OrderItem {
    /// A device sends a packet.
    pub packet: Option<PacketExpectation>,
    /// A work request completes.
    pub completion: Option<CompletionExpectation>,
    /// A queue pair enters a state.
    pub state: Option<StateExpectation>,
    /// A device raises an asynchronous event.
    pub event: Option<EventExpectation>,
    /// A program receives a connection management event.
    pub connection: Option<ConnectionExpectation>,
    /// The fault with this name fires.
    pub fault: Option<String>,
}

/// Contents of memory: exactly one of `holds`, `hex`, `number`.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct MemoryExpectation {
    /// Queue pair that owns the memory.
    pub qp: String,
    /// Area of the memory.
    #[serde(default)]
    pub area: Area,
    /// Offset in the area.
    #[serde(default)]
    pub offset: u64,
    /// Number of bytes; implied by `hex` and `number`.
    pub bytes: Option<Size>,
    /// The source bytes of this queue pair at the same offset, or `zeroes`.
    pub holds: Option<String>,
    /// These bytes.
    pub hex: Option<String>,
    /// This number, as eight bytes.
    pub number: Option<u64>,
}

/// An area of the memory of a queue pair. The areas have this order and the same size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Area {
    /// Data that the queue pair sends.
    Source,
    /// Data that peers write, read and modify.
    #[default]
    Target,
    /// Received messages.
    Received,
    /// Results of READs and atomics.
    Fetched,
}

impl Area {
    /// The offset of the area if each area has `size` bytes.
    pub const fn start(self, size: u64) -> u64 {
        self as u64 * size
    }
}

/// Application bytes per time.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct GoodputExpectation {
    /// Queue pair, workload or step.
    pub of: String,
    /// Lower bound.
    pub at_least: Option<Rate>,
    /// Upper bound.
    pub at_most: Option<Rate>,
    /// Measurement window; from the first post to the last completion by default.
    pub during: Option<TimeWindow>,
}

/// Distribution of goodput as Jain's index: 1 for equal shares, 1/n if one member has all of it.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct FairnessExpectation {
    /// Queue pairs, or a workload for all its queue pairs.
    pub of: OneOrMany,
    /// Lower bound.
    pub at_least: Option<f64>,
    /// Upper bound.
    pub at_most: Option<f64>,
    /// Measurement window.
    pub during: Option<TimeWindow>,
}

/// Time of work requests from post to completion.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct LatencyExpectation {
    /// Queue pair, workload or step.
    pub of: String,
    /// Percentile: 50, 99, 99.9, 100.
    pub percentile: f64,
    /// Lower bound.
    pub at_least: Option<Time>,
    /// Upper bound.
    pub at_most: Option<Time>,
}

/// Time at which all work is complete.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct FinishExpectation {
    /// Workload or step; all work by default.
    pub of: Option<String>,
    /// Latest time.
    pub before: Option<Time>,
    /// Earliest time.
    pub after: Option<Time>,
}

/// Counters of a switch, summed over its ports.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct SwitchExpectation {
    /// Switch.
    pub name: String,
    /// Packets dropped because a buffer was full.
    pub dropped: Option<CountRange>,
    /// Packets marked with CE.
    pub ecn_marked: Option<CountRange>,
    /// Pause frames sent, excluding those that resume.
    pub pause_frames: Option<CountRange>,
    /// Packets dropped by the PFC watchdog.
    pub watchdog_dropped: Option<CountRange>,
    /// Maximum depth of a queue in bytes.
    pub max_queue_bytes: Option<CountRange>,
}

/// PFC pause frames on a link.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PauseExpectation {
    /// Direction of the pause frames: `"switch -> alice"`.
    pub on: String,
    /// Number of pause frames, excluding those that resume; at least one by default.
    pub times: Option<CountRange>,
}

/// Verb calls that returned an error.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct VerbErrorExpectation {
    /// Host.
    pub host: String,
    /// Error; any error by default.
    pub errno: Option<Errno>,
    /// Number of calls; at least one by default.
    pub times: Option<CountRange>,
}

/// A condition that must hold throughout the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Invariant {
    /// After a NAK, a responder sends no further NAK until it receives the PSN of the first.
    OneNakInFlight,
    /// A PSN sequence error NAK carries the first lost PSN.
    NakCarriesFirstLostPsn,
    /// No packet modifies memory twice, and no message completes two receives.
    ExactlyOnce,
    /// The work requests of a send queue complete in the order in which they were posted.
    CompletionsInOrder,
    /// Every signaled work request completes exactly once.
    OneCompletionPerWorkRequest,
    /// Two CNPs of a flow are at least the CNP interval of the receiver apart.
    CnpPacing,
    /// Only injected faults cause loss: no link, switch or port drops a packet otherwise.
    OnlyInjectedLoss,
}
