//! Scenario files: hosts, what they do, what goes wrong, and what must come of it.
//!
//! A [`Scenario`] is a file that was read and checked; it makes a [`Plan`] for every seed; [`simulate`] carries
//! a plan out in virtual time and judges it. None of this performs I/O: reading files and writing reports is
//! the caller's. With the feature `udp`, `real` does the same on embedded cards and real sockets.
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
//! let scenario = Scenario::read("write.toml", text).unwrap();
//! let outcome = simulate(&scenario.plan(&Default::default(), 1).unwrap(), Recording::Digest);
//! assert_eq!(outcome.verdict, Verdict::Pass);
//! ```

mod judge;
pub mod language;
pub mod live;
mod parameters;
pub mod plan;
mod play;
pub mod quantity;
#[cfg(feature = "udp")]
pub mod real;
mod record;
mod report;
mod scenario;
mod shrink;
mod sim;
mod source;
mod verbs;

pub use language::schema;
pub use parameters::{ALL, Values};
pub use plan::Plan;
pub use report::{Around, Artefacts, ExpectationOutcome, Line, Outcome, RuleOutcome, Skipped, Verdict};
pub use scenario::Scenario;
pub use shrink::{Shrunk, shrink};
pub use sim::{Recording, simulate};
pub use source::Problem;
