//! The work of hosts: individual steps, and traffic with standard patterns.

use super::{AcceptSpec, AccessRight, ConnectSpec, ListenSpec, RejectSpec};
use crate::quantity::{Probability, Size, Time};
use serde::Deserialize;
use softhca_engine::QpState;
use std::net::IpAddr;

/// One verb call of a queue pair at a given time. A step has exactly one action.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct StepSpec {
    /// Name, for `after` and for expectations.
    pub name: Option<String>,
    /// Time; the start of the run by default. With `after`, the delay after that step.
    #[serde(default)]
    pub at: Time,
    /// Step that must complete first. A `listen` step completes when a request arrives, `connect` and `accept` when the
    /// connection is established or fails, `disconnect` when the connection is closed.
    pub after: Option<String>,
    /// Queue pair.
    pub qp: String,
    /// Number of repetitions without delay; 1 by default.
    #[serde(default = "one")]
    pub repeat: u32,
    /// Post a SEND.
    pub send: Option<TransferSpec>,
    /// Post an RDMA WRITE.
    pub write: Option<TransferSpec>,
    /// Post an RDMA READ.
    pub read: Option<TransferSpec>,
    /// Post an atomic compare and swap.
    pub compare_swap: Option<AtomicSpec>,
    /// Post an atomic fetch and add.
    pub fetch_add: Option<AtomicSpec>,
    /// Post a receive.
    pub receive: Option<ReceiveSpec>,
    /// Modify the state of the queue pair.
    pub modify: Option<ModifySpec>,
    /// Wait for the next connection request at a port of the host.
    pub listen: Option<ListenSpec>,
    /// Request a connection to the host of the peer queue pair, or resolve the peer's UD queue pair.
    pub connect: Option<ConnectSpec>,
    /// Accept the received request.
    pub accept: Option<AcceptSpec>,
    /// Reject the received request.
    pub reject: Option<RejectSpec>,
    /// Close the connection.
    #[serde(default)]
    pub disconnect: bool,
    /// Attach the UD queue pair to a multicast group.
    pub attach_mcast: Option<IpAddr>,
    /// Detach it from a multicast group.
    pub detach_mcast: Option<IpAddr>,
    /// Destroy the queue pair.
    #[serde(default)]
    pub destroy: bool,
    /// Unmap the memory of the region without deregistering it.
    #[serde(default)]
    pub unmap: bool,
    /// Deregister the memory region of the queue pair.
    #[serde(default)]
    pub deregister: bool,
    /// Reregister the memory region of the queue pair with these access rights.
    pub reregister: Option<Vec<AccessRight>>,
}

const fn one() -> u32 {
    1
}

/// The remote address and rkey of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum RemoteTarget {
    /// An address in the peer's region, with its rkey.
    #[default]
    Valid,
    /// An address in the peer's region, with an rkey that no region has.
    WrongRkey,
    /// The first address behind the peer's region.
    OutOfBounds,
    /// An address that is not a multiple of eight.
    Misaligned,
}

/// A SEND, WRITE or READ.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct TransferSpec {
    /// Number of bytes.
    pub bytes: Size,
    /// Peer queue pair. A connected queue pair has only one peer.
    pub to: Option<String>,
    /// Destination multicast group of a datagram, in place of the peer.
    pub group: Option<IpAddr>,
    /// Offset in the local area.
    #[serde(default)]
    pub offset: u64,
    /// Offset in the target area of the peer.
    #[serde(default)]
    pub remote_offset: u64,
    /// Remote address and rkey.
    #[serde(default)]
    pub remote: RemoteTarget,
    /// Immediate data.
    pub imm_data: Option<u32>,
    /// Generate a completion on success; true by default.
    #[serde(default = "enabled")]
    pub signaled: bool,
    /// Wait for earlier READs and atomics.
    #[serde(default)]
    pub fence: bool,
    /// Request a solicited event at the receiver.
    #[serde(default)]
    pub solicited: bool,
    /// Copy the data into the work request.
    #[serde(default)]
    pub inline: bool,
}

const fn enabled() -> bool {
    true
}

/// An atomic.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct AtomicSpec {
    /// Value to add.
    #[serde(default)]
    pub add: u64,
    /// Value to compare with.
    #[serde(default)]
    pub compare: u64,
    /// Value to swap in.
    #[serde(default)]
    pub swap: u64,
    /// Offset of the result in the local area.
    #[serde(default)]
    pub offset: u64,
    /// Offset in the target area of the peer.
    #[serde(default)]
    pub remote_offset: u64,
    /// Remote address and rkey.
    #[serde(default)]
    pub remote: RemoteTarget,
}

/// A receive.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ReceiveSpec {
    /// Size of the buffer.
    pub bytes: Size,
    /// Offset in the received area.
    #[serde(default)]
    pub offset: u64,
}

/// A state change of a queue pair.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ModifySpec {
    /// New state.
    pub state: QpState,
    /// Raise an asynchronous event when the send queue is drained.
    #[serde(default)]
    pub en_sqd_async_notify: bool,
}

/// The operation of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum OperationName {
    /// SEND.
    Send,
    /// RDMA WRITE.
    #[default]
    Write,
    /// RDMA READ.
    Read,
    /// Atomic fetch and add.
    FetchAdd,
}

/// Traffic with a standard pattern. A workload has exactly one pattern.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct WorkloadSpec {
    /// Name, for expectations.
    pub name: Option<String>,
    /// A queue pair posts messages one after the other.
    pub stream: Option<StreamSpec>,
    /// Many hosts send to one.
    pub incast: Option<IncastSpec>,
    /// Every host sends to one host and receives from one host.
    pub permutation: Option<PermutationSpec>,
    /// Two queue pairs send a message back and forth.
    pub ping_pong: Option<PingPongSpec>,
    /// A client reads and writes records in the memory of a server.
    pub key_value: Option<KeyValueSpec>,
    /// A program on a host, in real time.
    pub command: Option<CommandSpec>,
}

/// A queue pair posts messages one after the other.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct StreamSpec {
    /// Queue pair.
    pub qp: String,
    /// Operation.
    pub op: OperationName,
    /// Size of each message.
    pub bytes: Size,
    /// Number of messages; unlimited by default.
    pub count: Option<u64>,
    /// Maximum number of outstanding messages; 1 by default.
    #[serde(default = "one")]
    pub depth: u32,
    /// Start time.
    #[serde(default)]
    pub at: Time,
    /// Time after which no message is posted; unlimited by default.
    pub until: Option<Time>,
    /// Minimum time between two posts; 0 by default.
    #[serde(default)]
    pub interval: Time,
}

/// Many hosts send to one. Every sender has its own connection.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct IncastSpec {
    /// Senders; `"h[1..16]"` names sixteen hosts.
    pub from: Vec<String>,
    /// Receiver.
    pub to: String,
    /// Operation; WRITE by default.
    #[serde(default)]
    pub op: OperationName,
    /// Size of each message.
    pub bytes: Size,
    /// Number of messages per sender; unlimited by default.
    pub count: Option<u64>,
    /// Maximum number of outstanding messages per sender.
    #[serde(default = "one")]
    pub depth: u32,
    /// Start time of the first sender.
    #[serde(default)]
    pub at: Time,
    /// Delay between the starts of two senders.
    #[serde(default)]
    pub stagger: Time,
    /// Time after which no message is posted.
    pub until: Option<Time>,
    /// Priority of the traffic.
    pub priority: Option<u8>,
}

/// Every host sends to one host and receives from one host.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PermutationSpec {
    /// Hosts.
    pub hosts: Vec<String>,
    /// Distance in the list from each sender to its receiver; derived from the seed by default.
    pub shift: Option<u32>,
    /// Operation; WRITE by default.
    #[serde(default)]
    pub op: OperationName,
    /// Size of each message.
    pub bytes: Size,
    /// Number of messages per host; unlimited by default.
    pub count: Option<u64>,
    /// Maximum number of outstanding messages per host.
    #[serde(default = "one")]
    pub depth: u32,
    /// Start time.
    #[serde(default)]
    pub at: Time,
    /// Time after which no message is posted.
    pub until: Option<Time>,
    /// Priority of the traffic.
    pub priority: Option<u8>,
}

/// Two queue pairs send a message back and forth.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PingPongSpec {
    /// The queue pair that starts, and its peer.
    #[serde(deserialize_with = "super::exactly_two")]
    pub between: [String; 2],
    /// Size of each message.
    pub bytes: Size,
    /// Number of rounds.
    pub rounds: u64,
    /// Start time.
    #[serde(default)]
    pub at: Time,
}

/// A client reads and writes records in the memory of a server. The seed selects records and operations.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct KeyValueSpec {
    /// Queue pair of the client; its peer is the server.
    pub client: String,
    /// Number of records.
    pub keys: u64,
    /// Size of each record.
    pub bytes: Size,
    /// Fraction of READs; all other operations are WRITEs.
    pub read_fraction: Probability,
    /// Number of operations.
    pub operations: u64,
    /// Maximum number of outstanding operations.
    #[serde(default = "one")]
    pub depth: u32,
    /// Start time.
    #[serde(default)]
    pub at: Time,
}

/// A program on a host, in real time.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CommandSpec {
    /// Host.
    pub host: String,
    /// Program and arguments. `${ADDRESS_name}` is the address of a host, `${PORT}` a free TCP port.
    pub argv: Vec<String>,
    /// Start time.
    #[serde(default)]
    pub at: Time,
    /// Expected exit code; 0 by default.
    #[serde(default)]
    pub exit_code: i32,
    /// A text that the program prints when it is ready: the programs after it in the file wait for it.
    pub ready: Option<String>,
    /// The programs after it in the file wait until a program listens on the TCP port `${PORT}`.
    #[serde(default)]
    pub ready_tcp: bool,
    /// The programs after it in the file wait until a program of its host listens for connections (`rdma_listen`).
    #[serde(default)]
    pub ready_listen: bool,
    /// The time from its start within which it must end.
    pub timeout: Option<Time>,
}
