//! Steps that call the connection manager, its timers, and expectations about its events.

use crate::quantity::{CountRange, Time};
use serde::Deserialize;
use softhca_types::cm::EventType;

/// Waits for the next connection request at a port.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ListenSpec {
    /// Port number: in the TCP port space for `rc`, the IB port space for `uc`, the UDP port space for `ud`.
    pub port: u16,
}

/// Requests a connection to the host of the peer queue pair, or resolves the peer's UD queue pair.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ConnectSpec {
    /// Port number of the passive side.
    pub port: u16,
    /// Private data, as text.
    #[serde(default)]
    pub private_data: String,
}

/// Accepts the received request.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct AcceptSpec {
    /// Private data, as text.
    #[serde(default)]
    pub private_data: String,
}

/// Rejects the received request.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RejectSpec {
    /// Reason code of the REJ; 28 (consumer reject) by default. A SIDR_REP carries none.
    #[serde(default = "consumer_reject")]
    pub reason: u16,
    /// Private data, as text.
    #[serde(default)]
    pub private_data: String,
}

const fn consumer_reject() -> u16 {
    28
}

/// Timers of the connection managers: exponents of 4.096 µs, as on the wire. The defaults are those of Linux.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CmSpec {
    /// Time that a side may take to respond; 20 (4.3 s) by default.
    pub response_timeout: Option<u8>,
    /// Packet lifetime in the network; 18 (1.07 s) by default. A message waits for its response for the response
    /// timeout plus twice this time.
    pub packet_lifetime: Option<u8>,
    /// Maximum number of retransmissions of a message without a response; 15 by default.
    pub max_retries: Option<u8>,
    /// Time that an MRA requests; 24 (69 s) by default.
    pub service_timeout: Option<u8>,
}

/// A program receives a connection management event.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ConnectionExpectation {
    /// Queue pair of the connection.
    pub qp: Option<String>,
    /// Host whose program receives the event.
    pub host: Option<String>,
    /// Event, named after `RDMA_CM_EVENT_…`.
    pub event: EventType,
    /// 0; for `rejected` the reason of the REJ; for `unreachable` and `disconnected` a negative errno (-110 for a
    /// timeout) or the status of a SIDR_REP.
    pub status: Option<i32>,
    /// Prefix of the private data of the peer.
    pub private_data: Option<String>,
    /// Number of events; at least one by default.
    pub times: Option<CountRange>,
    /// Counts only events before this time.
    pub before: Option<Time>,
    /// Counts only events at or after this time.
    pub after: Option<Time>,
}
