//! What lies between hosts: cables with fault rules, switches, and a [`World`] of hosts under a virtual clock.
//!
//! A [`Cable`] takes frames at one end, asks its [`Rule`]s what happens to each, and hands the frames on
//! with the time at which they arrive. A [`Switch`] queues them, marks them, and pauses their senders; a
//! [`Topology`] says what is connected to what. Every fault is told as a [`Fault`], a small `Copy` fact. Nothing
//! here performs I/O, reads a clock or keeps a stream of random numbers: the same rules, seed and frames
//! give the same bytes and facts on every machine.
//!
//! Time is a count of nanoseconds since an origin that the caller chooses, in names that end in `_ns`.

#![no_std]
extern crate alloc;

mod action;
mod agenda;
mod cable;
mod class;
mod fabric;
mod fabric_event;
mod fault;
mod field;
mod flow;
mod frame;
mod history;
mod host;
mod lane;
mod memory;
mod network;
mod observer;
mod outside;
mod pause;
mod receiver;
mod repeat;
mod routes;
mod rule;
mod seed;
mod selector;
mod slots;
mod switch;
mod switching;
#[cfg(test)]
mod testing;
mod topology;
mod verbs;
mod world;

pub use action::{Action, Cut, Place, Seal};
pub use cable::{Cable, LinkState};
pub use class::{Class, Classes, CmMessage};
pub use fabric::Fabric;
pub use fabric_event::{Culprit, FabricEvent, LossCause, Node, PauseEnd, SwitchId};
pub use fault::{Cause, Effect, Fault, Outlet};
pub use field::{Field, Value};
pub use flow::{Endpoint, Flow, Flows, Role, Sense};
pub use frame::{Content, Direction, Frame};
pub use history::{History, Sighting};
pub use host::{Host, HostId};
pub use lane::{Ledger, Line};
pub use memory::Store;
pub use network::{Census, Laid};
pub use observer::{Observer, Stage};
pub use outside::{Origin, OutsideNews};
pub use pause::{FlowControl, PauseChange, Pauses, QUANTUM_BITS, pause_ns};
pub use receiver::{HostPortCounters, Receiver};
pub use repeat::{BadPattern, Burst, Choice, Pattern, Repeat, Scope};
pub use rule::{Rule, RuleId, Tally};
pub use seed::{PER_BILLION, Seed};
pub use selector::{Selector, Span};
pub use softhca_queue::PortCounters;
pub use switch::{Marking, Remedy, Scheduling, Switch, SwitchSettings, Watchdog};
pub use topology::{BadTopology, End, Layout, Topology};
pub use verbs::{Connection, QpOptions, Verbs};
pub use world::{CableId, World};
