//! What must come of a run.

use super::fault::StatusName;
use super::{ConnectionExpectation, Errno, PacketMatch, StateName};
use crate::quantity::{CountRange, Rate, Size, Time, TimeWindow};
use schemars::JsonSchema;
use serde::Deserialize;

/// Something that must hold at the end: one of these.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ExpectSpec {
    /// A work request ends like this.
    pub completion: Option<CompletionExpectation>,
    /// A queue pair is in this state at the end.
    pub state: Option<StateExpectation>,
    /// Packets are sent; counted where they enter the cable, before any fault.
    pub packet: Option<PacketExpectation>,
    /// A counter of a card.
    pub counter: Option<CounterExpectation>,
    /// An asynchronous event is raised.
    pub event: Option<EventExpectation>,
    /// A program hears of a connection.
    pub connection: Option<ConnectionExpectation>,
    /// These things happen in this order; others may happen in between.
    pub order: Option<Vec<OrderItem>>,
    /// Memory holds these bytes.
    pub memory: Option<MemoryExpectation>,
    /// How much useful data arrives in a time.
    pub goodput: Option<GoodputExpectation>,
    /// How evenly goodput is shared.
    pub fairness: Option<FairnessExpectation>,
    /// How long work requests take.
    pub latency: Option<LatencyExpectation>,
    /// Everything is done in time.
    pub finish: Option<FinishExpectation>,
    /// What a switch did.
    pub switch: Option<SwitchExpectation>,
    /// Pauses on a cable.
    pub pause: Option<PauseExpectation>,
    /// A verb failed in the program's hands.
    pub verb_error: Option<VerbErrorExpectation>,
}

/// A work request ends like this.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CompletionExpectation {
    /// The queue pair.
    pub qp: Option<String>,
    /// The step whose work request it is.
    pub step: Option<String>,
    /// What it was.
    pub op: Option<CompletedName>,
    /// How it ended.
    pub status: Option<StatusName>,
    /// Bytes transferred.
    pub bytes: Option<Size>,
    /// Immediate data.
    pub imm_data: Option<u32>,
    /// Words that the reason contains.
    pub reason: Option<String>,
    /// How many; at least one unless said.
    pub times: Option<CountRange>,
    /// Only those before this time.
    pub before: Option<Time>,
}

/// What completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the names are those of every verbs text")]
pub enum CompletedName {
    Send,
    Write,
    Read,
    CompareSwap,
    FetchAdd,
    BindWindow,
    LocalInvalidate,
    Receive,
    ReceiveWriteImmediate,
}

/// A queue pair is in this state at the end.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct StateExpectation {
    /// The queue pair.
    pub qp: String,
    /// The state.
    pub is: StateName,
}

/// Packets are sent.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PacketExpectation {
    /// A direction of a cable.
    pub on: Option<String>,
    /// How many; at least one unless said.
    pub times: Option<CountRange>,
    /// What the packet is for.
    pub class: Option<super::ClassName>,
    /// With class `nak`: the code.
    pub code: Option<super::NakName>,
    /// With class `cm`: the message.
    pub cm: Option<super::CmName>,
    /// The opcode, or several.
    pub opcode: Option<super::OneOrMany>,
    /// The queue pair whose request it is or whose request it answers.
    pub qp: Option<String>,
    /// The PSN.
    pub psn: Option<crate::quantity::PsnRange>,
    /// The message, counted from 0.
    pub message: Option<crate::quantity::IntegerRange>,
    /// The packet in its message, counted from 0.
    pub packet: Option<crate::quantity::IntegerRange>,
    /// How often this PSN was sent, this time included.
    pub transmission: Option<crate::quantity::IntegerRange>,
    /// The upper three bits of the DSCP.
    pub priority: Option<u8>,
    /// When.
    pub time: Option<TimeWindow>,
}

impl PacketExpectation {
    /// The packets that are counted.
    pub fn packet_match(&self) -> PacketMatch {
        let PacketExpectation { on: _, times: _, class, code, cm, opcode, qp, psn, message, packet, .. } =
            self;
        PacketMatch {
            class: *class,
            code: *code,
            cm: *cm,
            opcode: opcode.clone(),
            qp: qp.clone(),
            psn: *psn,
            message: *message,
            packet: *packet,
            transmission: self.transmission,
            priority: self.priority,
            time: self.time,
        }
    }
}

/// A counter of a card.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CounterExpectation {
    /// The host.
    pub host: String,
    /// The counter, as `softhca stats` names it.
    pub name: String,
    /// Its value at the end.
    pub is: CountRange,
}

/// An asynchronous event is raised.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct EventExpectation {
    /// The host.
    pub host: String,
    /// The event, as `ibv_event_type` names it: `QP_FATAL`.
    pub name: String,
    /// How many; at least one unless said.
    pub times: Option<CountRange>,
}

/// One of the things that happen in order: one of these.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct OrderItem {
    /// A packet is sent.
    pub packet: Option<PacketExpectation>,
    /// A work request ends.
    pub completion: Option<CompletionExpectation>,
    /// A queue pair gets into a state.
    pub state: Option<StateExpectation>,
    /// An asynchronous event is raised.
    pub event: Option<EventExpectation>,
    /// A program hears of a connection.
    pub connection: Option<ConnectionExpectation>,
    /// A fault of this name happens.
    pub fault: Option<String>,
}

/// Memory holds these bytes: exactly one of `holds`, `hex`, `number`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct MemoryExpectation {
    /// The queue pair whose memory it is.
    pub qp: String,
    /// Which part of it.
    #[serde(default)]
    pub area: AreaName,
    /// From where in that part.
    #[serde(default)]
    pub offset: u64,
    /// How many bytes; with `hex` and `number` what they need.
    pub bytes: Option<Size>,
    /// The bytes that this queue pair sends from the same offset, or `nothing` for zeroes.
    pub holds: Option<String>,
    /// These bytes.
    pub hex: Option<String>,
    /// This number of eight bytes.
    pub number: Option<u64>,
}

/// A part of a queue pair's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AreaName {
    /// What it sends.
    Source,
    /// What peers write, read and change.
    #[default]
    Target,
    /// What it receives.
    Received,
    /// What it read from its peer.
    Fetched,
}

/// How much useful data arrives in a time.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct GoodputExpectation {
    /// A queue pair, or a workload as a whole.
    pub of: String,
    /// At least.
    pub at_least: Option<Rate>,
    /// At most.
    pub at_most: Option<Rate>,
    /// Only completions in this span of time; from the first post to the last completion unless said.
    pub during: Option<TimeWindow>,
}

/// How evenly goodput is shared: Jain's index, 1 for equal shares, 1/n if one has everything.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct FairnessExpectation {
    /// Queue pairs, or a workload for all its queue pairs.
    pub of: super::OneOrMany,
    /// At least.
    pub at_least: Option<f64>,
    /// At most.
    pub at_most: Option<f64>,
    /// Only completions in this span of time.
    pub during: Option<TimeWindow>,
}

/// How long work requests take, from post to completion.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct LatencyExpectation {
    /// A queue pair, or a workload as a whole.
    pub of: String,
    /// Which percentile: 50, 99, 99.9, 100.
    pub percentile: f64,
    /// At least.
    pub at_least: Option<Time>,
    /// At most.
    pub at_most: Option<Time>,
}

/// Everything is done in time.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct FinishExpectation {
    /// A workload or a step; everything unless said.
    pub of: Option<String>,
    /// Not later than this.
    pub before: Option<Time>,
    /// Not earlier than this.
    pub after: Option<Time>,
}

/// What a switch did, over all its ports.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct SwitchExpectation {
    /// The switch.
    pub name: String,
    /// Packets that it lost for want of room.
    pub dropped: Option<CountRange>,
    /// Packets that it marked.
    pub ecn_marked: Option<CountRange>,
    /// Pause frames that it sent, without those that end a pause.
    pub pause_frames: Option<CountRange>,
    /// Packets that its watchdog dropped.
    pub watchdog_dropped: Option<CountRange>,
    /// The most bytes that ever waited in one of its queues.
    pub max_queue_bytes: Option<CountRange>,
}

/// Pauses on a cable.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PauseExpectation {
    /// A direction of a cable: who tells whom to pause.
    pub on: String,
    /// How many frames that pause, without those that end a pause; at least one unless said.
    pub times: Option<CountRange>,
}

/// A verb failed in the program's hands.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct VerbErrorExpectation {
    /// The host.
    pub host: String,
    /// The error; any unless said.
    pub errno: Option<Errno>,
    /// How many; at least one unless said.
    pub times: Option<CountRange>,
}

/// What must hold at every moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Invariant {
    /// A responder that refused a PSN refuses nothing else until that PSN has come.
    OneNakInFlight,
    /// A sequence NAK names the first PSN that was lost.
    NakCarriesFirstLostPsn,
    /// No packet changes memory twice, and no message completes two receives.
    ExactlyOnce,
    /// The work requests of a send queue complete in the order in which they were posted.
    CompletionsInOrder,
    /// Every signalled work request completes once.
    OneCompletionPerWorkRequest,
    /// Two CNPs of a flow are at least the CNP interval of its receiver apart.
    CnpPacing,
    /// No packet is lost that no rule lost: neither on a cable nor in a switch or at a port.
    OnlyInjectedLoss,
}
