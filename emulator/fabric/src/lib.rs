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
mod event_queue;
mod external_ports;
mod fabric;
mod fabric_event;
mod fault;
mod flow;
mod flow_history;
mod forwarding;
mod frame;
mod frame_pool;
mod header_field;
mod host;
mod host_port;
mod link;
mod link_direction;
mod memory;
mod network;
mod packet_class;
mod pfc;
mod repetition;
mod routes;
mod rule;
mod seed;
mod selector;
mod sink;
mod switch;
#[cfg(test)]
mod testing;
mod topology;
mod verbs;
mod world;

pub use action::{Action, BitPosition, DownDirections, IcrcPolicy};
pub use external_ports::{ExternalPortUpdate, Origin};
pub use fabric::Fabric;
pub use fabric_event::{FabricEvent, FrameDropReason, Node, PacketId, PauseEndReason, SwitchId};
pub use fault::{Fault, FaultCause, FaultEffect, LinkOutput};
pub use flow::{Endpoint, Flow, FlowId, FlowTable, PacketType};
pub use flow_history::{FlowHistory, ObservedPacket};
pub use frame::{Direction, Frame, FrameContent};
pub use header_field::{FieldValue, HeaderField};
pub use host::{Host, HostId};
pub use host_port::{HostPortCounters, ReceiverSettings};
pub use link::{Link, LinkState};
pub use link_direction::{LinkCounters, LinkSettings};
pub use memory::SparseMemory;
pub use network::{BuiltTopology, FrameCounters};
pub use packet_class::{CmMessage, PacketClass, PacketClasses};
pub use pfc::{PauseChange, PauseState, PfcSettings, QUANTUM_BITS, pause_ns};
pub use repetition::{Choice, GilbertElliott, Pattern, PatternError, Repeat, Scope};
pub use rule::{Rule, RuleCounters, RuleId};
pub use seed::{PER_BILLION, Seed};
pub use selector::{InclusiveRange, Selector};
pub use sink::{EventSink, NetworkEvent, Stage};
pub use softhca_queue::PortCounters;
pub use switch::{EcnMarking, PfcWatchdog, Scheduling, Switch, SwitchSettings, WatchdogAction};
pub use topology::{Layout, LayoutNode, Topology, TopologyError};
pub use verbs::{ConnectOptions, QpOptions, Verbs};
pub use world::{LinkId, World};
