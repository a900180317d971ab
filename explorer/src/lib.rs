//! HTML pages of runs: one file that loads nothing and opens from disk.
//!
//! [`Run`] reads an event log, a capture, or the folder of a run. [`Page`] puts one or two of them into the page. The
//! scripts and the style sheet in `page/` are part of this crate. [`LiveServer`] serves the page of a live run on
//! loopback. This crate puts the data into the page such that no text in them can become code; the scripts show them.

#![allow(missing_docs, reason = "a comment that repeats the name of its item says nothing")]

mod bundle;
#[cfg(not(target_family = "wasm"))]
pub mod http;
mod index;
#[cfg(not(target_family = "wasm"))]
mod live;
mod page;
mod run;
mod section;
mod why;

pub use index::{IndexPage, IndexRow};
#[cfg(not(target_family = "wasm"))]
pub use live::{EventFeed, LiveServer};
pub use page::{ExampleScenario, Page};
pub use run::{OpenError, Run};
pub use why::WhyReport;
