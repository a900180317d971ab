//! The network between hosts: links with fault rules, switches with PFC and ECN, and a [`World`] of hosts
//! under a virtual clock.
//!
//! A [`Link`] accepts frames at one end, applies its [`Rule`]s to each, and delivers frames with their arrival time. A
//! [`Switch`] queues and marks frames and pauses their senders. A [`Topology`] connects hosts and switches. Every fault
//! is reported as a [`Fault`]. The crate does not perform I/O, read a clock or keep random number state. Equal rules,
//! seeds and frames give equal bytes and events on every machine.
//!
//! Times are nanoseconds since an origin that the caller chooses; their names end in `_ns`.

#![no_std]
#![allow(missing_docs, reason = "a comment that repeats the name of its item says nothing")]
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
mod owned_event;
mod pfc;
mod processes;
mod rules;
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
pub use owned_event::{IdOffsets, OwnedEvent};
pub use pfc::{PauseChange, PauseState, PfcSettings, QUANTUM_BITS, pause_ns};
pub use processes::HostProcesses;
pub use rules::{
    Action, BitPosition, Choice, CmMessage, DownDirections, Endpoint, Fault, FaultCause, FaultEffect,
    FieldValue, Flow, FlowHistory, FlowId, FlowTable, GilbertElliott, HeaderField, IcrcPolicy,
    InclusiveRange, LinkOutput, ObservedPacket, PacketClass, PacketClasses, PacketType, Pattern,
    PatternError, Repeat, Rule, RuleCounters, RuleId, Scope, Selector,
};
pub use sink::{EventSink, NetworkEvent, Stage};
pub use softhca_types::PortCounters;
pub use softhca_types::{PER_BILLION, Seed};
pub use switch::{EcnMarking, PfcWatchdog, Scheduling, Switch, SwitchSettings, WatchdogAction};
pub use topology::{Layout, LayoutNode, Topology, TopologyError};
pub use world::{Host, World, simulated_memory};
