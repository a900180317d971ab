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

mod event_queue;
mod fabric;
mod fabric_event;
mod frame;
mod frame_pool;
mod host_port;
mod ids;
mod link;
mod network;
mod pfc;
mod rules;
mod seed;
mod sim_event;
mod sink;
mod switch;
#[cfg(test)]
mod testing;
mod topology;
mod world;

pub use fabric::Fabric;
pub use fabric_event::{FabricEvent, FrameDropReason, PacketId, PauseEndReason};
pub use frame::{Direction, Frame, FrameContent};
pub use host_port::{HostPortCounters, ReceiverSettings};
pub use ids::{HostId, LinkId, Node, SwitchId};
pub use link::{Link, LinkCounters, LinkSettings, LinkState};
pub use network::{BuiltTopology, ExternalPortUpdate, FrameCounters, Origin};
pub use pfc::{PauseChange, PauseState, PfcSettings, QUANTUM_BITS, pause_ns};
pub use rules::{
    Action, BitPosition, Choice, CmMessage, DownDirections, Endpoint, Fault, FaultCause, FaultEffect,
    FieldValue, Flow, FlowHistory, FlowId, FlowTable, GilbertElliott, HeaderField, IcrcPolicy,
    InclusiveRange, LinkOutput, ObservedPacket, PacketClass, PacketClasses, PacketType, Pattern,
    PatternError, Repeat, Rule, RuleCounters, RuleId, Scope, Selector,
};
pub use seed::{PER_BILLION, Seed};
pub use sink::{EventSink, NetworkEvent, Stage};
pub use softhca_queue::PortCounters;
pub use switch::{EcnMarking, PfcWatchdog, Scheduling, Switch, SwitchSettings, WatchdogAction};
pub use topology::{Layout, LayoutNode, Topology, TopologyError};
pub use world::{ConnectOptions, Host, QpOptions, SparseMemory, Verbs, World};
