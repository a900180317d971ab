//! Scenario files: hosts, their work, injected faults, and expectations about the result.
//!
//! A [`Scenario`] is a parsed and checked file. It builds a [`Plan`] for each seed, and [`simulate`] executes a plan in
//! virtual time and evaluates its expectations. The crate performs no I/O: the caller reads files and writes reports.
//! With the feature `udp`, the module `udp` executes plans on embedded devices and real sockets.
//!
//! ```
//! use softhca_scenarios::{Recording, Scenario, Verdict, simulate};
//!
//! let text = r#"
//!     title = "A write arrives"
//!     [hosts]
//!     alice = {}
//!     bob = {}
//!     [[pair]]
//!     qps = ["alice.1", "bob.1"]
//!     [[step]]
//!     qp = "alice.1"
//!     write = { bytes = 4000 }
//!     [[expect]]
//!     memory = { qp = "bob.1", bytes = 4000, holds = "alice.1" }
//! "#;
//! let scenario = Scenario::parse("write.toml", text).unwrap();
//! let outcome = simulate(&scenario.plan(&Default::default(), 1).unwrap(), Recording::Digest);
//! assert_eq!(outcome.verdict, Verdict::Pass);
//! ```

#![allow(missing_docs, reason = "a comment that repeats the name of its item says nothing")]

mod bisect;
mod evaluate;
mod executor;
mod hosts;
mod lessons;
pub mod live;
mod parameters;
pub mod plan;
pub mod quantity;
mod record;
mod recorder;
mod report;
mod scenario;
mod schedule;
mod shrink;
mod sim;
mod source;
pub mod spec;
mod swarm;
#[cfg(feature = "udp")]
pub mod udp;
mod verbs;

pub use bisect::{Bisection, Moment, bisect};
pub use lessons::LESSON_SCENARIOS;
pub use parameters::{ParameterValues, SWEEP_ALL};
pub use plan::Plan;
pub use recorder::Recording;
pub use report::{
    Artifacts, ExpectationOutcome, Outcome, RuleOutcome, RunReport, SkippedExpectation, TraceLocation,
    Verdict,
};
pub use scenario::Scenario;
pub use shrink::{FaultText, Minimized, minimize, shrink, with_faults};
pub use sim::simulate;
pub use source::{Diagnostic, SourceLine};
#[cfg(feature = "schema")]
pub use spec::generate_schema;

/// The JSON Schema of scenario files.
pub const SCHEMA: &str = include_str!("../schema.json");
