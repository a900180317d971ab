//! Connections that steps make through the connection manager, and what its users hear.

use crate::quantity::{CountRange, Time};
use schemars::JsonSchema;
use serde::Deserialize;
use softhca_queue::cm::EventType;

/// Take the next request that comes to a port.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ListenSpec {
    /// The port; of the TCP port space for `rc`, of the IB port space for `uc`, of the UDP port space for `ud`.
    pub port: u16,
}

/// Ask the host of the other queue pair for a connection, or for its datagram queue pair.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ConnectSpec {
    /// The port that is asked.
    pub port: u16,
    /// A text for the other side's program.
    #[serde(default)]
    pub private_data: String,
}

/// Accept the request that came.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct AcceptSpec {
    /// A text for the other side's program.
    #[serde(default)]
    pub private_data: String,
}

/// Refuse the request that came.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RejectSpec {
    /// The reason in the REJ; 28, consumer, unless said. A SIDR_REP has none.
    #[serde(default = "consumer")]
    pub reason: u16,
    /// A text for the other side's program.
    #[serde(default)]
    pub private_data: String,
}

const fn consumer() -> u16 {
    28
}

/// How patient the connection managers are: exponents of 4.096 µs, as on the wire; those of Linux unless said.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CmSpec {
    /// The time that a side may take to answer; 20, 4.3 s, unless said.
    pub response_timeout: Option<u8>,
    /// The time that a packet lives in the network; 18, 1.07 s, unless said. A message waits for its answer for the response
    /// timeout and twice this.
    pub packet_lifetime: Option<u8>,
    /// How often a message without an answer is sent again; 15 unless said.
    pub max_retries: Option<u8>,
    /// The time that an MRA asks for; 24, 69 s, unless said.
    pub service_timeout: Option<u8>,
}

/// What a program hears of a connection: `RDMA_CM_EVENT_…`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the names are those of librdmacm")]
pub enum ConnectionEventName {
    AddrResolved,
    RouteResolved,
    ConnectRequest,
    ConnectError,
    Unreachable,
    Rejected,
    Established,
    Disconnected,
    TimewaitExit,
}

impl ConnectionEventName {
    /// The event of the connection manager.
    pub const fn kind(self) -> EventType {
        match self {
            ConnectionEventName::AddrResolved => EventType::AddressResolved,
            ConnectionEventName::RouteResolved => EventType::RouteResolved,
            ConnectionEventName::ConnectRequest => EventType::ConnectRequest,
            ConnectionEventName::ConnectError => EventType::ConnectError,
            ConnectionEventName::Unreachable => EventType::Unreachable,
            ConnectionEventName::Rejected => EventType::Rejected,
            ConnectionEventName::Established => EventType::Established,
            ConnectionEventName::Disconnected => EventType::Disconnected,
            ConnectionEventName::TimewaitExit => EventType::TimewaitExit,
        }
    }
}

/// A program hears of a connection.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ConnectionExpectation {
    /// The queue pair whose connection it is.
    pub qp: Option<String>,
    /// The host whose program hears it.
    pub host: Option<String>,
    /// What it hears.
    pub event: ConnectionEventName,
    /// 0; with `rejected` the reason of the REJ; with `unreachable` and `disconnected` a negative errno (-110: no answer),
    /// or the status of a SIDR_REP.
    pub status: Option<i32>,
    /// The text that the other side's program sent begins with this.
    pub private_data: Option<String>,
    /// How often; at least once unless said.
    pub times: Option<CountRange>,
    /// Only before this time.
    pub before: Option<Time>,
    /// Only from this time on.
    pub after: Option<Time>,
}
