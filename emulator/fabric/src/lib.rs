//! What lies between hosts: cables with fault rules, and a [`World`] of hosts under a virtual clock.
//!
//! A [`Cable`] takes frames at one end, asks its [`Rule`]s what happens to each, and hands the frames on
//! with the time at which they arrive. Every fault is told as a [`Fault`], a small `Copy` fact. Nothing
//! here performs I/O, reads a clock or keeps a stream of random numbers: the same rules, seed and frames
//! give the same bytes and facts on every machine.
//!
//! Time is a count of nanoseconds since an origin that the caller chooses, in names that end in `_ns`.

#![no_std]
extern crate alloc;

mod action;
mod cable;
mod class;
mod fault;
mod field;
mod flow;
mod frame;
mod history;
mod host;
mod lane;
mod memory;
mod repeat;
mod rule;
mod seed;
mod selector;
#[cfg(test)]
mod testing;
mod verbs;
mod world;

pub use action::{Action, Cut, Place, Seal};
pub use cable::{Cable, LinkState};
pub use class::{Class, Classes, CmMessage};
pub use fault::{Cause, Effect, Fault, Outlet};
pub use field::{Field, Value};
pub use flow::{Endpoint, Flow, Flows, Role, Sense};
pub use frame::{Direction, Frame};
pub use history::{History, Sighting};
pub use host::{Host, HostId};
pub use lane::{Ledger, Line};
pub use memory::Store;
pub use repeat::{BadPattern, Burst, Choice, Pattern, Repeat, Scope};
pub use rule::{Rule, RuleId, Tally};
pub use seed::{PER_BILLION, Seed};
pub use selector::{Selector, Span};
pub use verbs::{Connection, QpOptions, Verbs};
pub use world::{CableId, Census, Observer, Stage, World};
