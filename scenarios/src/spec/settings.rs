//! Parameters, devices, links, switches and connections.

use super::CmSpec;
use crate::quantity::{IntegerRange, Probability, Rate, Size, Time};
use serde::Deserialize;
use softhca_engine::{AckPolicy, PayloadMode, Placement, QpType, Recovery};
use softhca_fabric::WatchdogAction;
use softhca_types::AccessFlags;
use std::net::IpAddr;

/// A value that can be changed without editing the file.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ParameterSpec {
    /// Default value.
    #[cfg_attr(feature = "schema", schemars(with = "serde_json::Value"))]
    pub default: toml::Value,
    /// The allowed values, which are also the values of a sweep (`--set name=all`).
    #[serde(default)]
    #[cfg_attr(feature = "schema", schemars(with = "Vec<serde_json::Value>"))]
    pub values: Vec<toml::Value>,
    /// The allowed values as a range of integers, both ends included.
    pub range: Option<IntegerRange>,
    /// Step of the range.
    #[serde(default = "default_step")]
    pub step: u64,
    /// The seed selects the value.
    #[serde(default)]
    pub by_seed: bool,
}

#[cfg(feature = "schema")]
fn profile_names() -> Vec<&'static str> {
    softhca_engine::Profile::names().collect()
}

const fn default_step() -> u64 {
    1
}

overridable! {
    /// Default settings of all devices.
    DeviceSpec {
        /// Whether packets carry their payload; `carried` by default.
        pub payload: Option<PayloadMode>,
        /// Timers of the connection managers.
        pub cm: Option<CmSpec>,
        /// Cards of each host; 1 by default. Further cards are hosts with the name `alice:softhca1`.
        pub cards: Option<u32>,
    }
    /// A host and the settings of its device.
    HostSpec {
        /// IP address; 10.0.0.1, 10.0.0.2, … in the order of names by default. Real time uses loopback addresses.
        pub address: Option<IpAddr>,
        /// It is not SoftHCA's: rxe or a hardware card, which `softhca exec --scenario` leaves alone.
        #[serde(default)]
        pub foreign: bool,
    }
    shared {
        /// Card whose behaviour the device has where cards differ; `softhca` by default.
        #[cfg_attr(feature = "schema", schemars(extend("enum" = profile_names())))]
        profile: String,
        /// Loss recovery; that of the profile by default: `fatal` for `softhca`.
        recovery: Recovery,
        /// Acknowledgement policy; `per-request` by default.
        acks: AckPolicy,
        /// Whether end-to-end credits are used.
        credits: bool,
        /// Order in which received data becomes visible in memory; `in-order` by default. Other orders need virtual time.
        placement: Placement,
        /// Maximum number of packets without an acknowledgement request in a message.
        ack_request_interval: u32,
        /// Congestion control.
        congestion_control: CongestionControlSpec,
        /// Size of the receive buffer; the device sends pause frames above a quarter of it. Requires `receive-rate`.
        receive_buffer: Size,
        /// Rate at which the device processes received packets; unlimited by default, 0 for a device that stopped.
        receive_rate: Rate,
    }
}

/// A congestion control algorithm and its parameters. The defaults are those of the DCQCN paper.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CongestionControlSpec {
    /// Algorithm.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = softhca_engine::CongestionSettings::NAMES)))]
    pub algorithm: String,
    /// Minimum time between two CNPs of a flow.
    pub cnp_interval: Option<Time>,
    /// Interval at which the congestion estimate (alpha) decays.
    pub alpha_timer: Option<Time>,
    /// Interval of the rate increase timer.
    pub rate_timer: Option<Time>,
    /// Number of bytes after which the byte counter increases the rate.
    pub byte_counter: Option<Size>,
    /// Number of fast recovery steps.
    pub fast_recovery_steps: Option<u32>,
    /// Additive increase.
    pub additive_increase: Option<Rate>,
    /// Hyper increase.
    pub hyper_increase: Option<Rate>,
    /// Weight of a mark in the congestion estimate, as `1/n`.
    pub gain: Option<Probability>,
    /// Initial rate of flows; the link rate by default.
    pub initial_rate: Option<Rate>,
    /// Minimum rate.
    pub min_rate: Option<Rate>,
}

/// A link.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct LinkSpec {
    /// Its two ends: hosts or switches.
    #[serde(deserialize_with = "super::exactly_two")]
    pub between: [String; 2],
    /// Propagation delay; 1 µs by default.
    #[serde(default = "one_microsecond")]
    pub delay: Time,
    /// Rate; unlimited by default.
    pub rate: Option<Rate>,
    /// Additional random delay of each packet, up to this; packets stay in order.
    pub jitter: Option<Time>,
    /// Probability with which each packet is lost.
    pub loss: Option<Probability>,
    /// Maximum size of an IP packet in bytes; larger packets are dropped.
    pub mtu: Option<u32>,
}

const fn one_microsecond() -> Time {
    Time(1_000)
}

/// A switch.
#[derive(Clone, Debug, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct SwitchSpec {
    /// Size of the shared buffer; 16 MiB by default.
    pub buffer: Option<Size>,
    /// Maximum depth of a queue of a lossy priority; 1 MiB by default.
    pub queue_limit: Option<Size>,
    /// ECN marking; thresholds of the DCQCN paper by default.
    pub ecn: Option<EcnSpec>,
    /// Priority flow control; on priorities 0 to 5 by default.
    pub pfc: Option<PfcSpec>,
    /// PFC watchdog; off by default.
    pub watchdog: Option<WatchdogSpec>,
    /// The event log records the depth of a queue when it crosses a multiple of this size; never by default.
    pub queue_depth_step: Option<Size>,
}

/// Random ECN marking between two queue depths.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct EcnSpec {
    /// Queue depth below which no packet is marked.
    pub kmin: Size,
    /// Queue depth above which every packet is marked.
    pub kmax: Size,
    /// Probability of a mark just below `kmax`.
    pub pmax: Probability,
}

/// Priority flow control.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PfcSpec {
    /// Lossless priorities; 0 to 5 by default. An empty list disables PFC.
    pub priorities: Option<Vec<u8>>,
    /// Bytes of an ingress port and priority above which the switch sends a pause frame; 256 KiB by default.
    pub xoff: Option<Size>,
    /// Bytes below which it resumes the neighbor; seven eighths of `xoff` by default.
    pub xon: Option<Size>,
    /// Buffer beyond `xoff` for packets in flight when the pause frame is sent; 64 KiB by default.
    pub headroom: Option<Size>,
    /// Pause time in quanta of 512 bit times; 65535 by default.
    pub quanta: Option<std::num::NonZeroU16>,
}

/// The PFC watchdog.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct WatchdogSpec {
    /// Time that a queue can be paused without interruption before the watchdog acts.
    pub detection_time: Time,
    /// Time without a pause frame after which the queue returns to normal.
    pub restoration_time: Time,
    /// Action on the packets of the queue; `drop` by default.
    #[serde(default)]
    pub action: WatchdogAction,
}

/// A standard topology.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub enum Topology {
    /// Two hosts and a link.
    Pair {
        /// Propagation delay; 1 µs by default.
        #[serde(default = "one_microsecond")]
        delay: Time,
        /// Rate of the links; unlimited by default.
        rate: Option<Rate>,
    },
    /// All hosts on one switch.
    Star {
        /// Name of the switch. A switch that `switches` does not declare has default settings.
        #[serde(default = "default_switch")]
        switch: String,
        /// Propagation delay; 1 µs by default.
        #[serde(default = "one_microsecond")]
        delay: Time,
        /// Rate of the links; unlimited by default.
        rate: Option<Rate>,
    },
    /// Two connected switches, `left` and `right`, with hosts on both sides.
    Dumbbell {
        /// Hosts on the left.
        left: Vec<String>,
        /// Hosts on the right.
        right: Vec<String>,
        /// Propagation delay; 1 µs by default.
        #[serde(default = "one_microsecond")]
        delay: Time,
        /// Rate of the host links.
        rate: Option<Rate>,
        /// Rate of the link between the switches; `rate` by default.
        bottleneck: Option<Rate>,
    },
    /// Leaf switches with hosts; every leaf connects to every spine.
    LeafSpine {
        /// Number of leaves. Hosts are assigned in the order of their names.
        leaves: u32,
        /// Number of spines.
        spines: u32,
        /// Propagation delay; 1 µs by default.
        #[serde(default = "one_microsecond")]
        delay: Time,
        /// Rate of the host links.
        rate: Option<Rate>,
        /// Rate of the links between leaves and spines; `rate` by default.
        uplink: Option<Rate>,
    },
    /// A ring of switches with an equal share of hosts on each; packets are forwarded in one direction.
    Ring {
        /// Number of switches.
        switches: u32,
        /// Propagation delay; 1 µs by default.
        #[serde(default = "one_microsecond")]
        delay: Time,
        /// Rate of the links; unlimited by default.
        rate: Option<Rate>,
    },
    /// A three-tier fat tree of k-port switches.
    FatTree {
        /// Ports per switch; the tree connects up to k³/4 hosts.
        k: u32,
        /// Propagation delay; 1 µs by default.
        #[serde(default = "one_microsecond")]
        delay: Time,
        /// Rate of the links; unlimited by default.
        rate: Option<Rate>,
    },
}

fn default_switch() -> String {
    "switch".into()
}

/// A right of a queue pair or a memory region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[repr(u32)]
pub enum AccessRight {
    /// Local operations may write.
    LocalWrite = AccessFlags::LOCAL_WRITE.bits(),
    /// Peers may write.
    RemoteWrite = AccessFlags::REMOTE_WRITE.bits(),
    /// Peers may read.
    RemoteRead = AccessFlags::REMOTE_READ.bits(),
    /// Peers may execute atomics.
    RemoteAtomic = AccessFlags::REMOTE_ATOMIC.bits(),
}

impl AccessRight {
    /// The access flags of several rights.
    pub fn flags(rights: &[AccessRight]) -> AccessFlags {
        AccessFlags::from_bits_truncate(rights.iter().fold(0, |bits, right| bits | *right as u32))
    }
}

overridable! {
    /// Default settings of all connections.
    ConnectionSpec {}
    /// Two queue pairs that are each other's peers.
    PairSpec {
        /// Their names: host, dot, number.
        #[serde(deserialize_with = "super::exactly_two")]
        pub qps: [String; 2],
    }
    shared {
        /// Transport; `rc` by default.
        transport: QpType,
        /// Path MTU: 256, 512, 1024, 2048 or 4096; 1024 by default.
        mtu: u32,
        /// ACK timeout as an exponent of 4.096 µs; 14 by default, 0 for no timeout.
        timeout: u8,
        /// Maximum number of retries; 7 by default.
        retry_count: u8,
        /// Maximum number of retries after RNR NAKs; 7 (unlimited) by default.
        rnr_retry: u8,
        /// Code of the minimum RNR NAK timer (0 to 31); 12 (0.64 ms) by default.
        min_rnr_timer: u8,
        /// Maximum number of outstanding READs and atomics in each direction; 16 by default.
        max_rd_atomic: u8,
        /// First PSN of each side; derived from the seed by default.
        #[serde(default, deserialize_with = "super::optional_two")]
        sq_psn: [u32; 2],
        /// Access rights of queue pairs and memory regions; all by default.
        access: Vec<AccessRight>,
        /// Number of receives that each side keeps posted.
        posted_receives: u32,
        /// Size of each posted receive; the largest message by default.
        receive_bytes: Size,
        /// Priority: the upper three bits of the DSCP.
        priority: u8,
        /// Whether packets are ECN-capable.
        ecn: bool,
        /// Size of the send queue; 128 by default.
        max_send_wr: u32,
        /// Size of the completion queue; sufficient for all queues by default.
        cqe: u32,
    }
}
