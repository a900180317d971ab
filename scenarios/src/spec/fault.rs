//! What goes wrong: which packets, how often, and what happens.

use super::{EcnSpec, PfcSpec};
use crate::quantity::{IntegerRange, Probability, PsnRange, Rate, Size, Time, TimeWindow};
use schemars::JsonSchema;
use serde::Deserialize;

/// Something that goes wrong. `on` is about packets on a cable, `link` about the cable itself, `switch`, `host`
/// and `qp` about those; with `call` it is about a verb that the host's program calls.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct FaultSpec {
    /// Its name in reports and traces.
    pub name: Option<String>,
    /// A direction of a cable: `"alice -> bob"`, or both: `"alice - bob"`.
    pub on: Option<String>,
    /// A cable: `"alice - bob"`.
    pub link: Option<String>,
    /// A switch.
    pub switch: Option<String>,
    /// A host.
    pub host: Option<String>,
    /// A queue pair, whose completions the action changes.
    pub qp: Option<String>,
    /// A verb that the host's program calls: `post-send` or `post-receive`.
    pub verb: Option<Verb>,
    /// Which packets; all unless said.
    #[serde(default, rename = "match")]
    pub packet_match: PacketMatch,
    /// What happens.
    pub action: FaultAction,
    /// When, for actions that are not about packets.
    #[serde(default)]
    pub at: Time,
    /// The first so many are left alone.
    #[serde(default)]
    pub skip: u64,
    /// At most so many are hit.
    pub times: Option<u64>,
    /// Only each n-th is hit.
    pub every: Option<u64>,
    /// Hits and misses in order, over and over: `XOO`.
    pub pattern: Option<String>,
    /// Each is hit with this probability.
    pub probability: Option<Probability>,
    /// Hits come in bursts (Gilbert-Elliott).
    pub burst: Option<BurstSpec>,
    /// Count each flow by itself instead of all together.
    #[serde(default)]
    pub per_flow: bool,
    /// The run does not fail if this never happens.
    #[serde(default)]
    pub optional: bool,
}

/// A verb that a program calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Verb {
    /// Posting a send work request.
    PostSend,
    /// Posting a receive.
    PostReceive,
}

/// Which packets. Every condition that is given has to hold.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PacketMatch {
    /// What the packet is for.
    pub class: Option<ClassName>,
    /// With class `nak`: the code.
    pub code: Option<NakName>,
    /// With class `cm`: the message.
    pub cm: Option<CmName>,
    /// The opcode without its transport: `WRITE_FIRST`; or several.
    pub opcode: Option<OneOrMany>,
    /// The queue pair whose request it is or whose request it answers.
    pub qp: Option<String>,
    /// The PSN.
    pub psn: Option<PsnRange>,
    /// The message, counted from 0.
    pub message: Option<IntegerRange>,
    /// The packet in its message, counted from 0.
    pub packet: Option<IntegerRange>,
    /// How often this PSN was sent, this time included: 1 is the first transmission.
    pub transmission: Option<IntegerRange>,
    /// The upper three bits of the DSCP.
    pub priority: Option<u8>,
    /// When.
    pub time: Option<TimeWindow>,
}

/// One name or several.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
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

/// What a packet is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ClassName {
    /// Everything that an application asked for: SEND, WRITE, READ requests, atomics, datagrams.
    Request,
    /// Part of a SEND on a connection.
    Send,
    /// Part of a WRITE.
    Write,
    /// A READ request.
    ReadRequest,
    /// An atomic request.
    Atomic,
    /// A datagram.
    Datagram,
    /// Everything that answers: responses, ACKs, NAKs, RNR NAKs.
    Response,
    /// Part of the answer to a READ.
    ReadResponse,
    /// The answer to an atomic.
    AtomicResponse,
    /// A positive acknowledgement.
    Ack,
    /// A refusal, of any code unless `code` is given.
    Nak,
    /// A refusal for want of a receive.
    RnrNak,
    /// A congestion notification.
    Cnp,
    /// A pause of priority flow control.
    Pfc,
    /// A connection manager's message, any unless `cm` is given.
    Cm,
    /// Any other packet to or from QP1.
    Management,
}

/// The code of a NAK.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NakName {
    /// PSN sequence error.
    Sequence,
    /// Invalid request.
    InvalidRequest,
    /// Remote access error.
    RemoteAccess,
    /// Remote operational error.
    RemoteOperation,
}

/// A message of the connection manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names are those of the specification")]
pub enum CmName {
    Req,
    Mra,
    Rej,
    Rep,
    Rtu,
    Dreq,
    Drep,
    #[serde(rename = "sidr-req")]
    SidrReq,
    #[serde(rename = "sidr-rep")]
    SidrRep,
}

/// Bursts after Gilbert and Elliott: every flow is in a good or a bad state.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct BurstSpec {
    /// The probability of going from good to bad, per packet.
    pub enter: Probability,
    /// The probability of going from bad to good, per packet.
    pub leave: Probability,
    /// The probability of a hit in the good state; 0 unless said.
    #[serde(default)]
    pub good: Probability,
    /// The probability of a hit in the bad state; 1 unless said.
    #[serde(default = "certain")]
    pub bad: Probability,
}

const fn certain() -> Probability {
    Probability(softhca_fabric::PER_BILLION)
}

/// What happens.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub enum FaultAction {
    /// Packets: nothing, the rule only counts.
    Count,
    /// Packets: lost.
    Drop,
    /// Packets: so many more of each arrive right behind it.
    Duplicate(u32),
    /// Packets: held back until others have passed.
    Reorder(ReorderSpec),
    /// Packets: so much later; others may overtake.
    Delay(Time),
    /// Packets: one bit is flipped.
    Corrupt(CorruptSpec),
    /// Packets: a congestion mark is put on.
    MarkCe,
    /// Packets: a header field gets another value, and the ICRC is repaired.
    Rewrite(RewriteSpec),
    /// Packets: the link goes down with this packet. Links: it goes down.
    LinkDown(LinkDownSpec),
    /// Links: down and up again, several times.
    Flap(FlapSpec),
    /// Links: another rate.
    SetRate(Rate),
    /// Links: another MTU, in bytes of an IP packet.
    SetMtu(u32),
    /// Switches: another size of the shared buffer.
    SetBuffer(Size),
    /// Switches: other marking.
    SetEcn(EcnSpec),
    /// Switches: other pause thresholds.
    SetPfc(PfcSpec),
    /// Hosts: the card pauses its neighbour without end, as a NIC with a broken receive pipeline does.
    PauseStorm(PauseStormSpec),
    /// Hosts: card and program stand still for so long; what arrives waits.
    Stall(Time),
    /// Hosts: the program posts no receives for so long.
    WithholdReceives(Time),
    /// Hosts: the program takes so long over each receive before it posts another.
    DelayReceives(Time),
    /// Hosts: the program dies; its queue pairs are gone.
    Kill,
    /// Hosts: an asynchronous event is raised: `port-err`, `port-active`, `gid-change` or `device-fatal`.
    RaiseEvent(AsyncEventName),
    /// Queue pairs: completions come with another status.
    SetStatus(StatusName),
    /// Queue pairs: completions are handed over so much later.
    DelayCompletion(Time),
    /// Calls: they fail with this error.
    Fail(Errno),
}

/// How a packet is held back.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ReorderSpec {
    /// Behind how many others.
    pub by: std::num::NonZeroU32,
    /// It goes on after this time even if fewer came; 1 ms unless said.
    #[serde(default = "millisecond")]
    pub within: Time,
}

const fn millisecond() -> Time {
    Time(1_000_000)
}

/// Which bit is flipped; any that the ICRC covers unless said.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CorruptSpec {
    /// Counted from the first bit of the BTH.
    pub bit: Option<u32>,
    /// Counted from the first bit of the payload.
    pub payload_bit: Option<u32>,
    /// The ICRC is computed anew, so that nobody can see the damage.
    #[serde(default)]
    pub fix_icrc: bool,
}

/// A header field and its new value.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RewriteSpec {
    /// The field.
    pub field: FieldName,
    /// Its new value.
    pub value: Option<u64>,
    /// How much is added to its value, modulo its width.
    pub add: Option<i64>,
}

/// A header field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the names are those of the headers")]
pub enum FieldName {
    Opcode,
    Solicited,
    Migration,
    Pad,
    Version,
    PKey,
    Reserved,
    DestinationQp,
    AckRequest,
    Psn,
    QKey,
    SourceQp,
    Address,
    RKey,
    Length,
    AtomicAddress,
    AtomicKey,
    SwapOrAdd,
    Compare,
    Syndrome,
    Msn,
    Original,
    Immediate,
    InvalidatedKey,
}

/// Which directions of a link are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LinkDirections {
    /// Both.
    #[default]
    Both,
    /// The one from the first end to the second: a one-way partition.
    Forward,
    /// The other.
    Backward,
}

/// A link that goes down.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct LinkDownSpec {
    /// How long; for ever unless said.
    #[serde(rename = "for")]
    pub duration: Option<Time>,
    /// In which direction.
    #[serde(default)]
    pub direction: LinkDirections,
}

/// A link that goes down and up.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct FlapSpec {
    /// How long it is down each time.
    pub down: Time,
    /// How long it is up in between.
    pub up: Time,
    /// How often.
    pub times: u32,
}

/// A pause storm.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PauseStormSpec {
    /// How long; for ever unless said.
    #[serde(rename = "for")]
    pub duration: Option<Time>,
    /// The priority; 0 unless said.
    #[serde(default)]
    pub priority: u8,
}

/// An asynchronous event that a fault may raise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the names are those of the verbs")]
pub enum AsyncEventName {
    PortErr,
    PortActive,
    GidChange,
    DeviceFatal,
}

/// How a work request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the names are those of every verbs text")]
pub enum StatusName {
    Success,
    LocalLength,
    LocalQpOperation,
    LocalProtection,
    Flushed,
    WindowBind,
    BadResponse,
    LocalAccess,
    RemoteInvalidRequest,
    RemoteAccess,
    RemoteOperation,
    RetryExceeded,
    RnrRetryExceeded,
    RemoteAbort,
    Fatal,
    General,
}

/// An error of the verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[allow(missing_docs, reason = "the names are those of errno.h")]
pub enum Errno {
    ENOMEM,
    EINVAL,
    EAGAIN,
    EIO,
    EPERM,
}

impl Errno {
    /// The number of the error on Linux.
    pub const fn number(self) -> i32 {
        match self {
            Errno::EPERM => 1,
            Errno::EIO => 5,
            Errno::EAGAIN => 11,
            Errno::ENOMEM => 12,
            Errno::EINVAL => 22,
        }
    }

    /// The error with this number; EINVAL for those that have no name here.
    pub(crate) fn of(number: i32) -> Errno {
        let all = [Errno::EPERM, Errno::EIO, Errno::EAGAIN, Errno::ENOMEM];
        all.into_iter().find(|errno| errno.number() == number).unwrap_or(Errno::EINVAL)
    }
}

/// A fault in the notation of Lumina.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct LuminaEvent {
    /// The pair, counted from 0 in the order of the file; its first queue pair is the requester.
    pub qpn: u32,
    /// The PSN relative to the first, counted from 0.
    pub psn: u64,
    /// What happens.
    #[serde(rename = "type")]
    pub kind: LuminaKind,
    /// The n-th transmission of that PSN, counted from 1.
    #[serde(default = "first")]
    pub iter: u64,
}

const fn first() -> u64 {
    1
}

/// What a Lumina event does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LuminaKind {
    /// The packet is lost.
    Drop,
    /// The packet gets a congestion mark.
    Ecn,
    /// A bit of the packet is flipped.
    Corrupt,
}
