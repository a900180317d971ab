//! Hosts, cables, switches, connections and parameters.

use super::CmSpec;
use crate::quantity::{IntegerRange, Probability, Rate, Size, Time};
use schemars::JsonSchema;
use serde::Deserialize;

/// A value that may be changed from outside of the file.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ParameterSpec {
    /// The value unless something else is asked for.
    #[schemars(with = "serde_json::Value")]
    pub default: toml::Value,
    /// The values of a sweep (`--set name=all`), and the only ones allowed.
    #[serde(default)]
    #[schemars(with = "Vec<serde_json::Value>")]
    pub values: Vec<toml::Value>,
    /// The values of a sweep as a range of whole numbers, both ends included.
    pub range: Option<IntegerRange>,
    /// The step of the range.
    #[serde(default = "step")]
    pub step: u64,
    /// Every seed picks a value of its own.
    #[serde(default)]
    pub by_seed: bool,
}

const fn step() -> u64 {
    1
}

/// What a lost packet does to a reliable connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RecoveryName {
    /// It ends the connection.
    Fatal,
    /// The requester sends everything since the loss again.
    GoBackN,
    /// The requester sends the whole message again.
    #[serde(rename = "go-back-0")]
    GoBack0,
}

/// How many acknowledgements a responder sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AcksName {
    /// One for each packet that asks.
    Each,
    /// One for all that came before it was sent.
    Coalesce,
}

/// Whether packets carry their payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PayloadName {
    /// They do.
    Carried,
    /// They have their headers and lengths, and no bytes: for large networks in virtual time, where only time
    /// and order matter.
    Elided,
}

/// The settings of a card.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DeviceSpec {
    /// What a lost packet does; `fatal` unless said.
    pub recovery: Option<RecoveryName>,
    /// How many acknowledgements are sent; `each` unless said.
    pub acks: Option<AcksName>,
    /// Whether end-to-end credits are used.
    pub credits: Option<bool>,
    /// Packets without an acknowledgement request after which one is made in the middle of a message.
    pub ack_request_every: Option<u32>,
    /// Whether packets carry their payload; `carried` unless said.
    pub payload: Option<PayloadName>,
    /// How senders react to congestion.
    pub congestion_control: Option<CongestionControlSpec>,
    /// How patient the connection managers are.
    pub cm: Option<CmSpec>,
    /// How much waits for a card at most; it asks for a pause from a quarter on. With `receive-rate` only.
    pub receive_buffer: Option<Size>,
    /// How fast a card takes what arrives; at once unless said, 0 for not at all.
    pub receive_rate: Option<Rate>,
}

/// A host.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct HostSpec {
    /// Its address; 10.0.0.1, 10.0.0.2, … in the order of names unless said. Real time uses loopback addresses.
    pub address: Option<std::net::IpAddr>,
    /// What a lost packet does.
    pub recovery: Option<RecoveryName>,
    /// How many acknowledgements are sent.
    pub acks: Option<AcksName>,
    /// Whether end-to-end credits are used.
    pub credits: Option<bool>,
    /// Packets without an acknowledgement request after which one is made in the middle of a message.
    pub ack_request_every: Option<u32>,
    /// How senders react to congestion.
    pub congestion_control: Option<CongestionControlSpec>,
    /// How much waits for the card at most; it asks for a pause from a quarter on. With `receive-rate` only.
    pub receive_buffer: Option<Size>,
    /// How fast the card takes what arrives: a slow receiver; 0 is one that takes nothing.
    pub receive_rate: Option<Rate>,
}

/// How senders react to congestion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CongestionAlgorithm {
    /// Not at all.
    Off,
    /// DCQCN: receivers answer marks with CNPs, senders slow down.
    Dcqcn,
}

/// Congestion control with its parameters; those of the DCQCN paper unless said.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CongestionControlSpec {
    /// Which.
    pub algorithm: CongestionAlgorithm,
    /// The least time between two CNPs of a flow.
    pub cnp_interval: Option<Time>,
    /// How often the estimate of congestion decays without a CNP.
    pub alpha_timer: Option<Time>,
    /// How often the rate rises by time.
    pub rate_timer: Option<Time>,
    /// After how many bytes the rate rises by volume.
    pub byte_counter: Option<Size>,
    /// Steps of fast recovery.
    pub fast_recovery_steps: Option<u32>,
    /// The additive increase.
    pub additive_increase: Option<Rate>,
    /// The hyper increase.
    pub hyper_increase: Option<Rate>,
    /// The weight of a mark in the estimate, as `1/n`.
    pub gain: Option<Probability>,
    /// The rate that flows begin with; the line's unless said.
    pub initial_rate: Option<Rate>,
    /// The lowest rate.
    pub min_rate: Option<Rate>,
}

/// A cable.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct LinkSpec {
    /// Its two ends: hosts or switches.
    #[serde(deserialize_with = "super::two")]
    pub between: [String; 2],
    /// How long a bit takes from end to end.
    #[serde(default = "microsecond")]
    pub delay: Time,
    /// How fast bits leave the sender; at once unless said.
    pub rate: Option<Rate>,
    /// The most bytes of an IP packet; larger ones are lost.
    pub mtu: Option<u32>,
}

const fn microsecond() -> Time {
    Time(1_000)
}

/// A switch.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct SwitchSpec {
    /// The memory that all its queues share; 16 MiB unless said.
    pub buffer: Option<Size>,
    /// What a queue of a priority that is not lossless may hold; 1 MiB unless said.
    pub queue_limit: Option<Size>,
    /// When it marks packets; with the thresholds of the DCQCN paper unless said.
    pub ecn: Option<EcnSpec>,
    /// When it pauses its neighbours; on priorities 0 to 5 unless said.
    pub pfc: Option<PfcSpec>,
    /// What it does about a neighbour that pauses it for ever; nothing unless said.
    pub watchdog: Option<WatchdogSpec>,
    /// The event log tells the depth of a queue whenever it passes a multiple of this; never unless said.
    pub queue_depth_step: Option<Size>,
}

/// Random marking between two queue lengths.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct EcnSpec {
    /// Below this queue length nothing is marked.
    pub kmin: Size,
    /// Above this queue length everything is marked.
    pub kmax: Size,
    /// The probability of a mark just below `kmax`.
    pub pmax: Probability,
}

/// Priority flow control.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PfcSpec {
    /// The lossless priorities; 0 to 5 unless said, an empty list pauses nobody.
    pub priorities: Option<Vec<u8>>,
    /// Bytes of an ingress port and priority from which the neighbour is paused; 256 KiB unless said.
    pub xoff: Option<Size>,
    /// Bytes down to which it stays paused; seven eighths of `xoff` unless said.
    pub xon: Option<Size>,
    /// Room beyond `xoff` for what is on its way when the pause is sent; 64 KiB unless said.
    pub headroom: Option<Size>,
    /// How long each pause frame lasts, in 512 bit times of the cable; 65535 unless said.
    pub quanta: Option<std::num::NonZeroU16>,
}

/// The PFC watchdog.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct WatchdogSpec {
    /// How long a queue may be paused without a break.
    pub detection_time: Time,
    /// How long no pause must have come before the queue is trusted again.
    pub restoration_time: Time,
    /// What becomes of its packets meanwhile; `drop` unless said.
    #[serde(default)]
    pub action: WatchdogAction,
}

/// What a watchdog does with a queue that stood still.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum WatchdogAction {
    /// Drops what waits and what comes.
    #[default]
    Drop,
    /// Sends in spite of the pause.
    Forward,
}

/// A well-known shape of cables.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub enum Topology {
    /// Two hosts and a cable.
    Pair {
        /// How long a bit takes.
        #[serde(default = "microsecond")]
        delay: Time,
        /// How fast bits leave the sender.
        rate: Option<Rate>,
    },
    /// All hosts on one switch.
    Star {
        /// The switch; one with the default settings unless it is named and described.
        #[serde(default = "switch")]
        switch: String,
        /// How long a bit takes.
        #[serde(default = "microsecond")]
        delay: Time,
        /// How fast bits leave the sender.
        rate: Option<Rate>,
    },
    /// Two switches with a cable between them, hosts on either side.
    Dumbbell {
        /// The hosts on the left.
        left: Vec<String>,
        /// The hosts on the right.
        right: Vec<String>,
        /// How long a bit takes.
        #[serde(default = "microsecond")]
        delay: Time,
        /// How fast bits leave a host.
        rate: Option<Rate>,
        /// How fast bits leave a switch towards the other.
        bottleneck: Option<Rate>,
    },
    /// Leaf switches with hosts, every leaf connected to every spine.
    LeafSpine {
        /// How many leaves; hosts are dealt out in the order of their names.
        leaves: u32,
        /// How many spines.
        spines: u32,
        /// How long a bit takes.
        #[serde(default = "microsecond")]
        delay: Time,
        /// How fast bits leave a host.
        rate: Option<Rate>,
        /// How fast bits leave a leaf towards a spine and back.
        uplink: Option<Rate>,
    },
    /// Switches in a circle, a share of the hosts on each; packets go round clockwise.
    Ring {
        /// How many switches.
        switches: u32,
        /// How long a bit takes.
        #[serde(default = "microsecond")]
        delay: Time,
        /// How fast bits leave the sender.
        rate: Option<Rate>,
    },
    /// A three-tier fat tree of k-port switches.
    FatTree {
        /// Ports per switch; the tree has room for k³/4 hosts.
        k: u32,
        /// How long a bit takes.
        #[serde(default = "microsecond")]
        delay: Time,
        /// How fast bits leave the sender.
        rate: Option<Rate>,
    },
}

fn switch() -> String {
    "switch".into()
}

/// The transport of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TransportName {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Extended reliable connection: known, so that it can be refused with a reason.
    #[schemars(skip)]
    Xrc,
}

/// A right that peers have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AccessRight {
    /// The card may write for local operations.
    LocalWrite,
    /// Peers may write.
    RemoteWrite,
    /// Peers may read.
    RemoteRead,
    /// Peers may do atomics.
    RemoteAtomic,
}

/// How queue pairs are connected.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ConnectionSpec {
    /// The transport; `rc` unless said.
    pub transport: Option<TransportName>,
    /// Payload bytes per packet: 256, 512, 1024, 2048 or 4096; 1024 unless said.
    pub mtu: Option<u32>,
    /// The exponent of 4.096 µs that an acknowledgement may take; 14 unless said, 0 for ever.
    pub timeout: Option<u8>,
    /// How often to try again; 7 unless said.
    pub retry_count: Option<u8>,
    /// How often to try again when no receive is posted; 7, for ever, unless said.
    pub rnr_retry: Option<u8>,
    /// The code of the wait that a peer without a receive asks for (0 to 31); 12, 0.64 ms, unless said.
    pub min_rnr_timer: Option<u8>,
    /// Reads and atomics outstanding, each way; 16 unless said.
    pub max_rd_atomic: Option<u8>,
    /// The first PSN of each side; drawn from the seed unless said.
    #[serde(default, deserialize_with = "super::two_if_given")]
    pub sq_psn: Option<[u32; 2]>,
    /// What each side's memory and queue pair allow; everything unless said.
    pub access: Option<Vec<AccessRight>>,
    /// Receives that each side posts at the start and again whenever one is used.
    pub posted_receives: Option<u32>,
    /// Bytes of each of them; as many as the largest message unless said.
    pub receive_bytes: Option<Size>,
    /// The priority: the upper three bits of the DSCP.
    pub priority: Option<u8>,
    /// Whether packets say that their sender understands congestion marks.
    pub ecn: Option<bool>,
    /// Send work requests that may wait; 128 unless said.
    pub max_send_wr: Option<u32>,
    /// Completions that the queue holds; enough for everything unless said.
    pub cqe: Option<u32>,
}

/// Two connected queue pairs.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PairSpec {
    /// Their names: the host, a dot and a number.
    #[serde(deserialize_with = "super::two")]
    pub qps: [String; 2],
    /// The transport; `rc` unless said.
    pub transport: Option<TransportName>,
    /// Payload bytes per packet.
    pub mtu: Option<u32>,
    /// The exponent of 4.096 µs that an acknowledgement may take.
    pub timeout: Option<u8>,
    /// How often to try again.
    pub retry_count: Option<u8>,
    /// How often to try again when no receive is posted.
    pub rnr_retry: Option<u8>,
    /// The code of the wait that a peer without a receive asks for.
    pub min_rnr_timer: Option<u8>,
    /// Reads and atomics outstanding, each way.
    pub max_rd_atomic: Option<u8>,
    /// The first PSN of each side.
    #[serde(default, deserialize_with = "super::two_if_given")]
    pub sq_psn: Option<[u32; 2]>,
    /// What each side's memory and queue pair allow.
    pub access: Option<Vec<AccessRight>>,
    /// Receives that each side posts at the start and again whenever one is used.
    pub posted_receives: Option<u32>,
    /// Bytes of each of them.
    pub receive_bytes: Option<Size>,
    /// The priority: the upper three bits of the DSCP.
    pub priority: Option<u8>,
    /// Whether packets say that their sender understands congestion marks.
    pub ecn: Option<bool>,
    /// Send work requests that may wait.
    pub max_send_wr: Option<u32>,
    /// Completions that the queue holds.
    pub cqe: Option<u32>,
}

impl PairSpec {
    /// What the pair says of its connection.
    pub fn connection(&self) -> ConnectionSpec {
        let PairSpec {
            qps: _,
            transport,
            mtu,
            timeout,
            retry_count,
            rnr_retry,
            min_rnr_timer,
            max_rd_atomic: reads,
            sq_psn: first_psn,
            ..
        } = self;
        ConnectionSpec {
            transport: *transport,
            mtu: *mtu,
            timeout: *timeout,
            retry_count: *retry_count,
            rnr_retry: *rnr_retry,
            min_rnr_timer: *min_rnr_timer,
            max_rd_atomic: *reads,
            sq_psn: *first_psn,
            access: self.access.clone(),
            posted_receives: self.posted_receives,
            receive_bytes: self.receive_bytes,
            priority: self.priority,
            ecn: self.ecn,
            max_send_wr: self.max_send_wr,
            cqe: self.cqe,
        }
    }
}

/// The state of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum StateName {
    /// RESET.
    Reset,
    /// INIT.
    Init,
    /// Ready to receive.
    Rtr,
    /// Ready to send.
    Rts,
    /// Send queue drained.
    Sqd,
    /// Send queue error.
    Sqe,
    /// Error.
    Error,
}
