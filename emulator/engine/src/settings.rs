//! What is set once per device.

use crate::{CongestionSettings, Recovery};
use core::time::Duration;
use softhca_wire::Mtu;

/// How many acknowledgements a responder sends.
#[cfg_attr(
    feature = "schema",
    derive(serde::Deserialize, schemars::JsonSchema),
    serde(rename_all = "kebab-case")
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum AckPolicy {
    /// One for each packet that asks: what a trace should show.
    #[default]
    PerRequest,
    /// One for all that came before it was sent: what a busy card should do.
    Coalesce,
}

/// What becomes of an acknowledgement that is due together with a lone answer to another card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ResponseOrder {
    /// Both go in one run, which takes the least time in all.
    #[default]
    WithAck,
    /// The answer goes ahead: who polls for it has it sooner, and the acknowledgement follows while it is at work. For
    /// cards whose users have a processor each.
    ResponseFirst,
}

/// Whether end-to-end credits of acknowledgements are used (IBA 9.7.7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EndToEndCredits {
    /// They are sent as "not used" and ignored.
    #[default]
    Off,
    /// A responder tells how many receives are posted, a requester sends no more than one packet beyond them.
    On,
}

/// Whether packets carry what they are about.
#[cfg_attr(
    feature = "schema",
    derive(serde::Deserialize, schemars::JsonSchema),
    serde(rename_all = "kebab-case")
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PayloadMode {
    /// They do.
    #[default]
    Carried,
    /// They have their headers and their lengths; the bytes of the payload stay where they are, and those
    /// that arrive are zeroes. For simulations that ask how long things take. Packets of both hosts must
    /// agree, and only a world can carry them.
    Elided,
}

/// How long the connection manager waits, and how often it tries: exponents of 4.096 µs, as messages carry them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CmTimers {
    /// The time that either side may take to answer; both are told it in a REQ.
    pub response_timeout: u8,
    /// The time that a packet lives in the network.
    pub packet_lifetime: u8,
    /// How often a message without an answer is sent again.
    pub max_retries: u8,
    /// The time that an MRA asks for.
    pub service_timeout: u8,
}

impl CmTimers {
    /// Those of Linux: an answer is waited for for 6.44 s, sixteen times; an MRA asks for 69 s.
    pub const LINUX: CmTimers =
        CmTimers { response_timeout: 20, packet_lifetime: 18, max_retries: 15, service_timeout: 24 };

    /// How long a message waits for its answer: there, the time that the other side may take, and back.
    pub const fn reply_timeout(&self) -> Duration {
        Duration::from_nanos(
            (4096 << (self.response_timeout & 0x1f)) + 2 * (4096 << (self.packet_lifetime & 0x1f)),
        )
    }
}

impl Default for CmTimers {
    fn default() -> CmTimers {
        CmTimers::LINUX
    }
}

/// The settings of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// What a lost packet does.
    pub recovery: Recovery,
    /// How many acknowledgements are sent.
    pub ack_policy: AckPolicy,
    /// Whether answers wait for them.
    pub response_order: ResponseOrder,
    /// The least time that an acknowledgement may take in `fatal` recovery; zero in virtual time.
    pub min_ack_timeout: Duration,
    /// Packets without an acknowledgement request after which one is made in the middle of a message.
    pub ack_request_interval: u32,
    /// The most payload that a packet of the port carries: the size of datagrams, the limit of path MTUs.
    pub mtu: Mtu,
    /// Whether end-to-end credits are used.
    pub end_to_end_credits: EndToEndCredits,
    /// What the card does about congestion.
    pub congestion: CongestionSettings,
    /// Whether packets carry their payload.
    pub payload_mode: PayloadMode,
    /// How patient the connection manager is.
    pub cm: CmTimers,
    /// Where the numbers of queue pairs and keys begin.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            recovery: Recovery::default(),
            ack_policy: AckPolicy::default(),
            response_order: ResponseOrder::default(),
            min_ack_timeout: Duration::ZERO,
            ack_request_interval: 64,
            mtu: Mtu::B4096,
            end_to_end_credits: EndToEndCredits::default(),
            congestion: CongestionSettings::default(),
            payload_mode: PayloadMode::default(),
            cm: CmTimers::default(),
            seed: 0,
        }
    }
}
