//! An explanation and its evidence.

use crate::describe::duration;
use crate::log::Certainty;
use crate::text::wrap;
use serde::Serialize;
use std::fmt::Write;

/// One step of an explanation: where in the log or capture, when, and what.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Evidence {
    /// The number of the entry of the event log, counted from 0.
    pub entry: usize,
    /// The number of the packet in the capture that shows it, counted from 1 as Wireshark does; null for an event log.
    pub packet: Option<u64>,
    /// Nanoseconds since the start.
    pub time_ns: u64,
    /// A sentence.
    pub text: String,
}

/// Why one work request ended as it did, or what is wrong with a connection: a line of `softhca why --json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(title = "A finding of softhca why --json"))]
pub struct Explanation {
    /// The connection: the names of its two ends.
    pub connection: String,
    /// The work request, if it is about one. A capture numbers the messages in the order in which they begin.
    pub request: Option<String>,
    /// The call that posted the work request: source file and line, or module and offset; null if the log does not have it.
    pub posted_at: Option<String>,
    /// The completion status of the work request; null if it has none, or the finding is about a connection.
    pub status: Option<String>,
    /// The cause as a word: docs/reference/why.md lists them.
    pub code: String,
    /// How sure it is: `known` if the input shows it, `inferred` if it is the usual cause of what the input shows,
    /// `ambiguous` if the input fits more than one cause.
    #[cfg_attr(feature = "schema", schemars(with = "CertaintySchema"))]
    pub certainty: Certainty,
    /// What is explained.
    pub title: String,
    /// What happened, in order.
    pub evidence: Vec<Evidence>,
    /// The cause, in a few sentences.
    pub cause: String,
    /// What to do about it. Empty if nothing is to be done.
    pub advice: String,
}

#[cfg(feature = "schema")]
#[derive(schemars::JsonSchema)]
#[schemars(rename_all = "lowercase")]
#[expect(dead_code, reason = "only its schema is used")]
enum CertaintySchema {
    Known,
    Inferred,
    Ambiguous,
}

/// The JSON Schema of a line of `softhca why --json`.
pub const SCHEMA: &str = include_str!("schema.json");

/// Generates [`SCHEMA`] from the types.
#[cfg(feature = "schema")]
pub fn generate_schema() -> String {
    let schema = schemars::schema_for!(Explanation);
    serde_json::to_string_pretty(&schema).expect("a schema is JSON") + "\n"
}

impl Explanation {
    pub(super) fn write(&self, text: &mut String, width: usize, states_certainty: bool) {
        const TIME: usize = 10;
        let width = width.max(40);
        for line in wrap(&self.title, width) {
            let _ = writeln!(text, "{line}");
        }
        if let Some(place) = &self.posted_at {
            let _ = writeln!(text, "Posted at {place}");
        }
        text.push('\n');
        for link in &self.evidence {
            for (number, line) in wrap(&link.text, width - TIME - 2).iter().enumerate() {
                let time = if number == 0 { duration(link.time_ns) } else { String::new() };
                let _ = writeln!(text, "{time:>TIME$}  {line}");
            }
        }
        let heading = match states_certainty {
            true => format!("Cause ({}, {})", self.code, self.certainty.name()),
            false => "Cause".into(),
        };
        for (heading, body) in [(heading.as_str(), &self.cause), ("What to do", &self.advice)] {
            if body.is_empty() {
                continue;
            }
            text.push('\n');
            for line in wrap(&format!("{heading}: {body}"), width) {
                let _ = writeln!(text, "{line}");
            }
        }
    }
}
