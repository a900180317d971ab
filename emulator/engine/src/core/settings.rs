//! The settings of a device.

use crate::Profile;
use crate::core::congestion::CongestionSettings;
use core::time::Duration;
use softhca_wire::{Mtu, QpnSlot};

softhca_wire::named_enum! {
    /// The effect of a lost packet on a reliable connection.
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
    #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
    #[derive(Default)]
    pub enum Recovery {
        /// The connection fails, as on a lossless fabric.
        #[default]
        Fatal => "fatal",
        /// The requester retransmits from the lost packet (IBA 9.7.5).
        GoBackN => "go-back-n",
        /// The requester retransmits the whole message; the responder discards the part that it has received.
        #[cfg_attr(feature = "serde", serde(rename = "go-back-0"))]
        GoBack0 => "go-back-0",
    }
}

softhca_wire::named_enum! {
    /// The order in which received data becomes visible in memory. Only simulated devices have another order than
    /// `in-order`.
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
    #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
    #[derive(Default)]
    pub enum Placement {
        /// In the order of PSNs, and the last bytes of a packet last.
        #[default]
        InOrder => "in-order",
        /// The cache lines of a message in any order; messages of a queue pair in their order. Other queue pairs see what
        /// the card has executed.
        OutOfOrder => "out-of-order",
        /// Any order that the specification allows: data of a WRITE is visible only after a later SEND, WRITE with
        /// immediate data, READ or atomic of the same queue pair (IBA 9.5).
        Adversarial => "adversarial",
    }
}

/// The number of ACKs that a responder sends.
#[cfg_attr(feature = "serde", derive(serde::Deserialize), serde(rename_all = "kebab-case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum AckPolicy {
    /// One for each packet that requests it, for readable traces.
    #[default]
    PerRequest,
    /// One for all packets that arrived before it is sent, for throughput.
    Coalesce,
}

/// The order of a single response and a pending ACK to another HCA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ResponseOrder {
    /// Both go in one batch, which costs the least time in total.
    #[default]
    WithAck,
    /// The response precedes the ACK, which lowers its latency for a polling application. For HCAs whose applications
    /// have a processor each.
    ResponseFirst,
}

/// The use of end-to-end credits in ACKs (IBA 9.7.7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EndToEndCredits {
    /// The responder sends the credit count "invalid", the requester ignores credits.
    #[default]
    Off,
    /// The responder advertises the number of posted receives; the requester sends at most one packet beyond them.
    On,
}

/// The presence of payload in packets.
#[cfg_attr(feature = "serde", derive(serde::Deserialize), serde(rename_all = "kebab-case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PayloadMode {
    /// Packets carry their payload.
    #[default]
    Carried,
    /// Packets have headers and lengths but no payload bytes; received payloads are zero. For simulations of timing.
    /// Both peers must use the same mode, and only a simulated network can carry such packets.
    Elided,
}

/// Timeouts and retries of the connection manager. Timeouts are exponents of 4.096 µs, as in CM messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CmTimers {
    /// The response time of either side, announced in the REQ.
    pub response_timeout: u8,
    /// The lifetime of a packet in the network.
    pub packet_lifetime: u8,
    /// The number of retransmissions of an unanswered message.
    pub max_retries: u8,
    /// The time that an MRA requests.
    pub service_timeout: u8,
}

impl CmTimers {
    /// The values of Linux: sixteen tries with a timeout of 6.44 s each; an MRA requests 69 s.
    pub const LINUX: CmTimers =
        CmTimers { response_timeout: 20, packet_lifetime: 18, max_retries: 15, service_timeout: 24 };

    /// The timeout of a message: the response time of the peer and two packet lifetimes.
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
    /// The card whose behaviour the device has where cards differ.
    pub profile: &'static Profile,
    /// The recovery mode.
    pub recovery: Recovery,
    /// The recovery mode of connections to a foreign peer, on whose network packets are lost.
    pub foreign_recovery: Recovery,
    /// The most unacknowledged packets to a foreign peer, over all queue pairs.
    pub foreign_window: u32,
    /// The number of ACKs.
    pub ack_policy: AckPolicy,
    /// The order of responses and ACKs.
    pub response_order: ResponseOrder,
    /// The lower bound of the ACK timeout in `fatal` recovery; zero in virtual time.
    pub min_ack_timeout: Duration,
    /// The number of packets without the AckReq bit after which a packet in the middle of a message sets it.
    pub ack_request_interval: u32,
    /// The MTU of the port: the maximum payload of datagrams, the upper bound of path MTUs.
    pub mtu: Mtu,
    /// End-to-end credits.
    pub end_to_end_credits: EndToEndCredits,
    /// Congestion control.
    pub congestion: CongestionSettings,
    /// Presence of payload in packets.
    pub payload_mode: PayloadMode,
    /// The order in which received data becomes visible.
    pub placement: Placement,
    /// Messages of one packet take a shorter way through the engine. It changes no packet, completion or event.
    pub straight_path: bool,
    /// Timing of the connection manager.
    pub cm: CmTimers,
    /// The QPNs that the device gives out.
    pub qpn_slot: QpnSlot,
    /// The seed of queue pair numbers, keys, communication IDs and initial PSNs. A device on a network takes them from the
    /// operating system's random number generator if it is 0.
    pub seed: u64,
}

impl Settings {
    /// The settings of a device with this profile.
    pub fn with_profile(profile: &'static Profile) -> Settings {
        Settings { profile, recovery: profile.recovery, ..Settings::default() }
    }
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            profile: Profile::SOFTHCA,
            recovery: Recovery::default(),
            foreign_recovery: Recovery::GoBackN,
            foreign_window: 128,
            ack_policy: AckPolicy::default(),
            response_order: ResponseOrder::default(),
            min_ack_timeout: Duration::ZERO,
            ack_request_interval: 64,
            mtu: Mtu::B4096,
            end_to_end_credits: EndToEndCredits::default(),
            congestion: CongestionSettings::default(),
            payload_mode: PayloadMode::default(),
            placement: Placement::default(),
            straight_path: true,
            cm: CmTimers::default(),
            qpn_slot: QpnSlot::ALL,
            seed: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_is_found_by_its_name() {
        for mode in Recovery::ALL {
            assert_eq!(Recovery::from_name(mode.name()), Some(mode));
        }
        assert_eq!(Recovery::from_name("selective"), None);
        for placement in Placement::ALL {
            assert_eq!(Placement::from_name(placement.name()), Some(placement));
        }
    }
}
