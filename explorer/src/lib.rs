//! Runs as a page for a browser: one file, nothing fetched, opened from disk.
//!
//! [`Run`] reads what there is to see: an event log, a capture, or the folder of a run. [`Page`] puts one or
//! two of them into the page, whose parts in `page/` are built into this crate as they are. [`LiveServer`] serves
//! the page of a run that goes on, on loopback, to whoever knows its link.
//! What the page shows is its own business; here is only how the data gets in, and that no text of it can
//! become code.

mod bundle;
mod live;
mod page;
mod run;
mod section;
mod why;

pub use live::{EventFeed, LiveServer};
pub use page::{ExampleScenario, Page};
pub use run::{OpenError, Run};
pub use why::WhyReport;
