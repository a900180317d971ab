//! An InfiniBand subnet without I/O: packets and time go in, packets and changes of ports come out.
//!
//! [`Subnet`] has the nodes of a [`Topology`] with their subnet management agents, and forwards MADs by directed routes, and
//! MADs and data by LIDs. [`Manager`] is a subnet manager that assigns LIDs and routes, and answers queries for records.

#![no_std]
extern crate alloc;

mod administration;
mod agent;
mod drop_reason;
mod fault;
mod mad_clients;
mod manager;
mod node;
mod packet;
mod performance;
mod rmpp;
mod routing;
mod subnet;
mod topology;
mod traps;
mod user_mad;

pub use drop_reason::DropReason;
pub use fault::{Fault, FaultError, MAX_SCHEDULED, MIN_FLAP_TIME};
pub use mad_clients::{
    ClientId, MAX_AGENTS, MAX_CLIENTS, MAX_MAD, MAX_RECEIVED, MAX_REQUESTS, MadClients, MadError,
    Registration,
};
pub use manager::{Manager, SweepReport};
pub use packet::{Mad, Packet};
pub use performance::{PortCounter, PortCounters};
pub use routing::RoutingEngine;
pub use subnet::{MAX_IN_FLIGHT, Subnet};
pub use topology::{
    GENERATORS, MAX_FILE, MAX_NODES, MAX_PORTS, NodeKind, PortId, Topology, TopologyError, TopologyNode,
};
pub use user_mad::UserMadHeader;
