//! Changes of the device of a host.

use serde::{Deserialize, Serialize};
use softhca_types::{FaultTrigger, InjectedEvent, PortState};

/// A change of the device of a host, which each process with a card of its own applies to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceChange {
    /// The port goes down or comes up, with its link.
    PortState(PortState),
    /// An asynchronous event is raised, with its consequences.
    Event(InjectedEvent),
    /// Something happened that fault rules of programs wait for.
    Trigger(FaultTrigger),
    /// The faults of the device end: a removed device returns, and a port that is down comes up.
    FaultsEnded,
}
