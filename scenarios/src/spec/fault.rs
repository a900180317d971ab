//! Injected faults: which packets or calls, how often, and the action.

use super::FaultAction;
use crate::quantity::{CountRange, IntegerRange, Probability, PsnRange, Time, TimeWindow};
use serde::Deserialize;
use softhca_fabric::{CmMessage, HeaderField};
use softhca_types::cm::EventType;
pub use softhca_types::{Errno, InjectedEvent, Verb};
use softhca_wire::NakCode;

/// An injected fault. `on` selects packets on a link, `link` the link itself, `switch` a switch, `host` a host, `qp` the
/// completions of a queue pair; `host` with `verb` selects calls of a verb.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct FaultSpec {
    /// Name in reports and traces.
    pub name: Option<String>,
    /// One direction of a link: `"alice -> bob"`, or both: `"alice - bob"`.
    pub on: Option<String>,
    /// A link: `"alice - bob"`.
    pub link: Option<String>,
    /// A switch.
    pub switch: Option<String>,
    /// A host.
    pub host: Option<String>,
    /// A queue pair whose completions the action changes.
    pub qp: Option<String>,
    /// A verb that the program of the host calls: `reg_mr`, `rdma_connect`.
    pub verb: Option<Verb>,
    /// The object of the verb in order of creation, from 1: the second queue pair, completion queue or region that the
    /// program created. All by default.
    pub object: Option<u32>,
    /// The n-th call or completion only, from 1: short for `skip = n - 1` and `times = 1`.
    pub nth: Option<u64>,
    /// Only in processes with this name (`/proc/PID/comm`).
    pub process: Option<String>,
    /// Only after this. `at` is then the time since.
    pub after: Option<TriggerSpec>,
    /// Only until this.
    pub until: Option<TriggerSpec>,
    /// The vendor error of a completion, with the action `set-status`.
    pub vendor_error: Option<u32>,
    /// Selects packets; all packets by default.
    #[serde(default, rename = "match")]
    pub packet_match: PacketMatch,
    /// Action.
    pub action: FaultAction,
    /// Time, for actions that do not apply to packets.
    #[serde(default)]
    pub at: Time,
    /// Number of matches to skip first.
    #[serde(default)]
    pub skip: u64,
    /// Maximum number of hits.
    pub times: Option<u64>,
    /// Hits only each n-th match.
    pub every: Option<u64>,
    /// Repeating pattern of hits (X) and misses (O): `XOO`.
    pub pattern: Option<String>,
    /// Probability of a hit.
    pub probability: Option<Probability>,
    /// Bursts of hits (Gilbert-Elliott model).
    pub burst: Option<BurstSpec>,
    /// Counts matches per flow instead of per rule.
    #[serde(default)]
    pub per_flow: bool,
    /// The run does not fail if the fault never fires.
    #[serde(default)]
    pub optional: bool,
}

/// The end of all faults. The run fails if it has not converged at the deadline.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct HealSpec {
    /// Time at which all faults end.
    pub at: Time,
    /// Time since then in which all work must complete; 10 s by default.
    #[serde(default = "ten_seconds")]
    pub deadline: Time,
}

const fn ten_seconds() -> Time {
    Time(10_000_000_000)
}

/// The beginning or end of the time in which a fault applies: one of the keys. Faults of packets, links, switches and
/// hosts begin after a step, an event or another fault.
#[derive(Clone, Debug, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct TriggerSpec {
    /// The n-th call of this verb, on any object.
    pub verb: Option<Verb>,
    /// Which call of `verb`; the first by default.
    pub nth: Option<u64>,
    /// An asynchronous event of the device: `PORT_ERR`.
    pub event: Option<String>,
    /// Another fault fired, by its name.
    pub fault: Option<String>,
    /// A time since the program opened its device.
    pub time: Option<Time>,
    /// A step is complete, by its name.
    pub step: Option<String>,
}

/// An event of the connection manager in place of the result of a call.
#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CmEventSpec {
    /// The event.
    pub event: EventType,
    /// Its status: a negative errno, or the reason of a rejection; 0 by default.
    #[serde(default)]
    pub status: i32,
}

overridable! {
    /// Selects packets. A packet matches if all given conditions hold.
    PacketMatch {}
    /// Packets that a sender puts on a link.
    PacketExpectation {
        /// One direction of a link, or both.
        pub on: Option<String>,
        /// Number of packets; at least one by default.
        pub times: Option<CountRange>,
    }
    shared {
        /// Packet class.
        class: ClassName,
        /// NAK code, with class `nak`.
        code: NakCode,
        /// Message, with class `cm`.
        cm: CmMessage,
        /// Opcode without its transport: `WRITE_FIRST`; or several.
        opcode: OneOrMany,
        /// Requester: the queue pair that sends the request or receives the response.
        qp: String,
        /// PSN.
        psn: PsnRange,
        /// Index of the message, from 0.
        message: IntegerRange,
        /// Index of the packet in its message, from 0.
        packet: IntegerRange,
        /// Transmission of this PSN: 1 is the first, 2 the first retransmission.
        transmission: IntegerRange,
        /// Priority: the upper three bits of the DSCP.
        priority: u8,
        /// Time window.
        time: TimeWindow,
    }
}

/// One name or several.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum OneOrMany {
    /// One.
    One(String),
    /// Any of these.
    Many(Vec<String>),
}

impl OneOrMany {
    /// All of them.
    pub fn all(&self) -> &[String] {
        match self {
            OneOrMany::One(one) => std::slice::from_ref(one),
            OneOrMany::Many(many) => many,
        }
    }
}

/// A class of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ClassName {
    /// All requests: SEND, WRITE, READ request, atomic, datagram.
    Request,
    /// A packet of a SEND on a connection.
    Send,
    /// A packet of a WRITE.
    Write,
    /// A READ request.
    ReadRequest,
    /// An atomic request.
    Atomic,
    /// A datagram.
    Datagram,
    /// All responses: READ and atomic responses, ACK, NAK, RNR NAK.
    Response,
    /// A packet of a READ response.
    ReadResponse,
    /// An atomic response.
    AtomicResponse,
    /// A positive acknowledgement.
    Ack,
    /// A NAK; with `code`, only this code.
    Nak,
    /// An RNR NAK.
    RnrNak,
    /// A congestion notification packet.
    Cnp,
    /// A PFC pause frame.
    Pfc,
    /// A connection management message; with `cm`, only this message.
    Cm,
    /// Any other packet to or from QP1.
    Management,
}

/// The Gilbert-Elliott model: each flow is in a good or in a bad state.
#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct BurstSpec {
    /// Probability per packet of the transition from good to bad.
    pub enter: Probability,
    /// Probability per packet of the transition from bad to good.
    pub leave: Probability,
    /// Probability of a hit in the good state; 0 by default.
    #[serde(default)]
    pub good: Probability,
    /// Probability of a hit in the bad state; 1 by default.
    #[serde(default = "certain")]
    pub bad: Probability,
}

const fn certain() -> Probability {
    Probability(softhca_fabric::PER_BILLION)
}

/// Holds a packet back.
#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ReorderSpec {
    /// Number of packets that pass first.
    pub by: std::num::NonZeroU32,
    /// Maximum time to hold the packet; 1 ms by default.
    #[serde(default = "one_millisecond")]
    pub within: Time,
}

const fn one_millisecond() -> Time {
    Time(1_000_000)
}

/// The bit to flip; by default, any bit that the ICRC covers.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CorruptSpec {
    /// Bit, counted from the first bit of the BTH.
    pub bit: Option<u32>,
    /// Bit, counted from the first bit of the payload.
    pub payload_bit: Option<u32>,
    /// Recompute the ICRC, so that the receiver cannot detect the damage.
    #[serde(default)]
    pub fix_icrc: bool,
}

/// A header field and its new value.
#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RewriteSpec {
    /// Header field.
    pub field: HeaderField,
    /// New value.
    pub value: Option<u64>,
    /// Difference to add, modulo the width of the field.
    pub add: Option<i64>,
}

/// Directions of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum LinkDirections {
    /// Both.
    #[default]
    Both,
    /// From the first end to the second: a one-way partition.
    Forward,
    /// From the second end to the first.
    Backward,
}

/// A link that goes down.
#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct LinkDownSpec {
    /// Time after which the link comes up; never by default.
    #[serde(rename = "for")]
    pub duration: Option<Time>,
    /// Directions.
    #[serde(default)]
    pub direction: LinkDirections,
}

/// A link that goes down and up.
#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct FlapSpec {
    /// Time down.
    pub down: Time,
    /// Time up.
    pub up: Time,
    /// Number of repetitions.
    pub times: u32,
}

/// A pause storm.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PauseStormSpec {
    /// Duration; unlimited by default.
    #[serde(rename = "for")]
    pub duration: Option<Time>,
    /// Priority; 0 by default.
    #[serde(default)]
    pub priority: u8,
}

/// A fault in the notation of Lumina.
#[derive(Clone, Copy, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct LuminaEvent {
    /// Index of the pair in the file, from 0; its first queue pair is the requester.
    pub qpn: u32,
    /// PSN relative to the first, from 0.
    pub psn: u64,
    /// Action.
    #[serde(rename = "type")]
    pub kind: LuminaKind,
    /// Transmission of the PSN, from 1.
    #[serde(default = "first_transmission")]
    pub iter: u64,
}

const fn first_transmission() -> u64 {
    1
}

/// The action of a Lumina event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum LuminaKind {
    /// Drop the packet.
    Drop,
    /// Set the CE mark.
    Ecn,
    /// Flip one bit.
    Corrupt,
}
