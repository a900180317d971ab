//! What hosts do: single steps, and traffic of well-known shapes.

use super::{AcceptSpec, AccessRight, ConnectSpec, ListenSpec, RejectSpec, StateName};
use crate::quantity::{Probability, Size, Time};
use schemars::JsonSchema;
use serde::Deserialize;
use std::net::IpAddr;

/// One work request, or one change of a queue pair, at its time.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct StepSpec {
    /// A name, for `after` and for expectations.
    pub name: Option<String>,
    /// When; at the start unless said. With `after`, how long after it.
    #[serde(default)]
    pub at: Time,
    /// The step whose completion comes first; `listen` is complete when a request is there, `connect` and `accept` when the
    /// connection stands or cannot be made, `disconnect` when it is over.
    pub after: Option<String>,
    /// The queue pair that does it.
    pub qp: String,
    /// How often, one right after the other; once unless said.
    #[serde(default = "one")]
    pub repeat: u32,
    /// Two-sided data.
    pub send: Option<TransferSpec>,
    /// One-sided data into the peer's memory.
    pub write: Option<TransferSpec>,
    /// The peer's memory into one's own.
    pub read: Option<TransferSpec>,
    /// Swap eight bytes of the peer's memory if they compare equal.
    pub compare_swap: Option<AtomicSpec>,
    /// Add to eight bytes of the peer's memory.
    pub fetch_add: Option<AtomicSpec>,
    /// Post a receive.
    pub receive: Option<ReceiveSpec>,
    /// Change the state of the queue pair.
    pub modify: Option<ModifySpec>,
    /// Take the next request that comes to a port of the host.
    pub listen: Option<ListenSpec>,
    /// Ask the host of the other queue pair for a connection, or for its datagram queue pair.
    pub connect: Option<ConnectSpec>,
    /// Accept the request that came.
    pub accept: Option<AcceptSpec>,
    /// Refuse the request that came.
    pub reject: Option<RejectSpec>,
    /// End the connection.
    #[serde(default)]
    pub disconnect: bool,
    /// Make the datagram queue pair a member of a multicast group.
    pub attach_mcast: Option<IpAddr>,
    /// Take it out of a multicast group.
    pub detach_mcast: Option<IpAddr>,
    /// Destroy the queue pair.
    #[serde(default)]
    pub destroy: bool,
    /// Take the memory behind the region away, without deregistering it.
    #[serde(default)]
    pub unmap: bool,
    /// Deregister the region of the queue pair.
    #[serde(default)]
    pub deregister: bool,
    /// Change what the region of the queue pair allows.
    pub reregister: Option<Vec<AccessRight>>,
}

const fn one() -> u32 {
    1
}

/// Where a remote address points.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RemoteTarget {
    /// Into the peer's region.
    #[default]
    Valid,
    /// Into the peer's region with a key that nobody gave out.
    WrongRkey,
    /// Just behind the peer's region.
    OutOfBounds,
    /// At an address that is not a multiple of eight.
    Misaligned,
}

/// A SEND, WRITE or READ.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct TransferSpec {
    /// How much.
    pub bytes: Size,
    /// The queue pair at the other end; the connected one, and the only one possible unless datagrams are sent.
    pub to: Option<String>,
    /// The multicast group that a datagram goes to, in place of the other queue pair.
    pub group: Option<IpAddr>,
    /// Where in one's own memory.
    #[serde(default)]
    pub offset: u64,
    /// Where in the peer's memory.
    #[serde(default)]
    pub remote_offset: u64,
    /// Whether the remote address is right.
    #[serde(default)]
    pub remote: RemoteTarget,
    /// Four bytes for the receiver's completion.
    pub imm_data: Option<u32>,
    /// Report success; yes unless said.
    #[serde(default = "yes")]
    pub signaled: bool,
    /// Wait until earlier reads and atomics are done.
    #[serde(default)]
    pub fence: bool,
    /// Ask for a completion event at the receiver.
    #[serde(default)]
    pub solicited: bool,
    /// The data travels in the request itself.
    #[serde(default)]
    pub inline: bool,
}

const fn yes() -> bool {
    true
}

/// An atomic.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct AtomicSpec {
    /// What is added.
    #[serde(default)]
    pub add: u64,
    /// What must be found.
    #[serde(default)]
    pub compare: u64,
    /// What is put there.
    #[serde(default)]
    pub swap: u64,
    /// Where in one's own memory the old value goes.
    #[serde(default)]
    pub offset: u64,
    /// Where in the peer's memory.
    #[serde(default)]
    pub remote_offset: u64,
    /// Whether the remote address is right.
    #[serde(default)]
    pub remote: RemoteTarget,
}

/// A receive.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ReceiveSpec {
    /// Room for how much.
    pub bytes: Size,
    /// Where in one's own memory.
    #[serde(default)]
    pub offset: u64,
}

/// A change of a queue pair.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ModifySpec {
    /// The state that it goes to.
    pub state: StateName,
    /// Raise an event when the send queue is drained.
    #[serde(default)]
    pub en_sqd_async_notify: bool,
}

/// What is done over and over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OperationName {
    /// SEND.
    Send,
    /// RDMA WRITE.
    Write,
    /// RDMA READ.
    Read,
    /// Fetch and add.
    FetchAdd,
}

/// Traffic of a well-known shape: one of these.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct WorkloadSpec {
    /// A name, for expectations.
    pub name: Option<String>,
    /// Messages one after the other from a queue pair.
    pub stream: Option<StreamSpec>,
    /// Many hosts send to one.
    pub incast: Option<IncastSpec>,
    /// Every host sends to another, and none receives from two.
    pub permutation: Option<PermutationSpec>,
    /// A message there, a message back.
    pub ping_pong: Option<PingPongSpec>,
    /// A client reads and writes records in a server's memory.
    pub key_value: Option<KeyValueSpec>,
    /// A program on a host, in real time.
    pub command: Option<CommandSpec>,
}

/// Which of the shapes a workload has.
#[derive(Clone, Debug)]
pub enum WorkloadKind<'a> {
    /// A stream.
    Stream(&'a StreamSpec),
    /// An incast.
    Incast(&'a IncastSpec),
    /// A permutation.
    Permutation(&'a PermutationSpec),
    /// A ping-pong.
    PingPong(&'a PingPongSpec),
    /// A key-value mix.
    KeyValue(&'a KeyValueSpec),
    /// A program.
    Command(&'a CommandSpec),
}

impl WorkloadSpec {
    /// The shapes that are given; exactly one if the file is right.
    pub fn kinds(&self) -> Vec<WorkloadKind<'_>> {
        let WorkloadSpec { name: _, stream, incast, permutation, ping_pong, key_value, command } = self;
        [
            stream.as_ref().map(WorkloadKind::Stream),
            incast.as_ref().map(WorkloadKind::Incast),
            permutation.as_ref().map(WorkloadKind::Permutation),
            ping_pong.as_ref().map(WorkloadKind::PingPong),
            key_value.as_ref().map(WorkloadKind::KeyValue),
            command.as_ref().map(WorkloadKind::Command),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

/// Messages one after the other from a queue pair.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct StreamSpec {
    /// The queue pair that sends, or reads.
    pub qp: String,
    /// What it does.
    pub op: OperationName,
    /// Bytes of each message.
    pub bytes: Size,
    /// How many messages; without end unless said.
    pub count: Option<u64>,
    /// How many at once; one unless said.
    #[serde(default = "one")]
    pub depth: u32,
    /// When it begins.
    #[serde(default)]
    pub at: Time,
    /// When it posts its last message; never unless said.
    pub until: Option<Time>,
    /// Time from one message to the next at least; none unless said.
    #[serde(default)]
    pub interval: Time,
}

/// Many hosts send to one. Every sender gets a connection of its own.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct IncastSpec {
    /// The hosts that send; `"h[1..16]"` stands for sixteen.
    pub from: Vec<String>,
    /// The host that they send to.
    pub to: String,
    /// What they do; WRITE unless said.
    #[serde(default = "write")]
    pub op: OperationName,
    /// Bytes of each message.
    pub bytes: Size,
    /// How many messages each; without end unless said.
    pub count: Option<u64>,
    /// How many at once each.
    #[serde(default = "one")]
    pub depth: u32,
    /// When the first begins.
    #[serde(default)]
    pub at: Time,
    /// How much later each begins than the one before it.
    #[serde(default)]
    pub stagger: Time,
    /// When they post their last message.
    pub until: Option<Time>,
    /// The priority of this traffic.
    pub priority: Option<u8>,
}

const fn write() -> OperationName {
    OperationName::Write
}

/// Every host sends to another, and none receives from two.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PermutationSpec {
    /// The hosts.
    pub hosts: Vec<String>,
    /// Each host sends to the one so many places later; drawn from the seed unless said.
    pub shift: Option<u32>,
    /// What they do; WRITE unless said.
    #[serde(default = "write")]
    pub op: OperationName,
    /// Bytes of each message.
    pub bytes: Size,
    /// How many messages each; without end unless said.
    pub count: Option<u64>,
    /// How many at once each.
    #[serde(default = "one")]
    pub depth: u32,
    /// When they begin.
    #[serde(default)]
    pub at: Time,
    /// When they post their last message.
    pub until: Option<Time>,
    /// The priority of this traffic.
    pub priority: Option<u8>,
}

/// A message there, a message back.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PingPongSpec {
    /// The queue pair that begins, and its peer.
    #[serde(deserialize_with = "super::two")]
    pub between: [String; 2],
    /// Bytes of each message.
    pub bytes: Size,
    /// How many rounds.
    pub rounds: u64,
    /// When it begins.
    #[serde(default)]
    pub at: Time,
}

/// A client reads and writes records in a server's memory, as the seed decides.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct KeyValueSpec {
    /// The client's queue pair; its peer is the server.
    pub client: String,
    /// How many records.
    pub keys: u64,
    /// Bytes of each.
    pub bytes: Size,
    /// The share of READs; the others are WRITEs.
    pub read_fraction: Probability,
    /// How many operations.
    pub operations: u64,
    /// How many at once.
    #[serde(default = "one")]
    pub depth: u32,
    /// When it begins.
    #[serde(default)]
    pub at: Time,
}

/// A program on a host, in real time.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CommandSpec {
    /// The host.
    pub host: String,
    /// The program and its arguments; `${ADDRESS_name}` stands for the address of a host.
    pub argv: Vec<String>,
    /// When it begins.
    #[serde(default)]
    pub at: Time,
    /// The exit code that it must have; 0 unless said.
    #[serde(default)]
    pub exit_code: i32,
}
