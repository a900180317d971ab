//! The lines of a log.

use super::event::LogEvent;
use super::value::Keyword;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// The format in the first line of a log.
pub const FORMAT: &str = "softhca-events";
/// The version of the format: a release in which a name or a field is new, gone or of another meaning has the
/// next one.
pub const VERSION: u32 = 1;

/// The first line of a log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`].
    pub version: u32,
    /// Title of the run.
    pub title: String,
    /// The hosts whose cards report events.
    pub vantage_points: Vec<VantagePoint>,
    /// `capture` if the entries are inferred from a capture; absent in an event log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Keyword>,
    /// The packets that the snap length of the capture cut; they have no entries.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cut_packets: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

softhca_wire::named_enum! {
    /// How sure an entry, or an explanation, is.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum Certainty {
        /// The input shows it.
        Known => "known",
        /// It is the usual cause of what the input shows.
        Inferred => "inferred",
        /// The input fits more than one cause.
        Ambiguous => "ambiguous",
    }
}

/// A host whose card reports events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VantagePoint {
    /// Its name.
    pub host: String,
    pub address: IpAddr,
}

/// Every other line of a log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// When, in nanoseconds since the start.
    pub time: u64,
    /// Name of the host or switch; for a fault, name of the sender.
    pub host: String,
    /// The event: the keys `name` and `data`.
    #[serde(flatten)]
    pub event: LogEvent,
    /// Why, as a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trigger: Option<String>,
    /// How sure it is, if it is concluded from a capture; absent for what was observed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certainty: Option<Certainty>,
}
