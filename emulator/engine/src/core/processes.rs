//! The seam between the device and the processes of its host.

use crate::core::packet_batch::Peer;
use crate::core::time::Instant;
use alloc::vec::Vec;
use core::net::IpAddr;
use softhca_queue::{AckPath, RecordedConnection};
use softhca_types::{
    CallPoint, ClientId, CmId, FaultHit, FaultTrigger, InjectedEvent, ProgramFaults, Resource, Verb,
};
use softhca_wire::cm::{CommunicationId, ServiceId};
use softhca_wire::{Psn, Qpn};

/// A call of a process that has faults.
pub struct ObservedCall {
    /// The process.
    pub process: u32,
    /// The role of a process whose every call is an event.
    pub role: Option<u32>,
    /// The call, with the fault that hits it.
    pub point: CallPoint,
    /// The number of the object that the fault names.
    pub target: Option<u32>,
}

/// The processes that share a device: their slots, their faults, and records that outlive them.
///
/// The device informs and asks; it has no model of a process itself. A device of one program needs no implementation.
#[allow(unused_variables, reason = "the default is a device without processes")]
pub trait Processes: Send {
    /// A client has a connection manager of its own in a slot. Its identifiers in this one only reserve ports.
    fn set_slot(&mut self, client: ClientId, slot: u16) {}

    /// The slot of a client that has a connection manager of its own.
    fn slot(&self, client: ClientId) -> Option<u16> {
        None
    }

    /// A service of a peer has answered with this communication ID.
    fn on_reply(&mut self, address: IpAddr, service: ServiceId, id: CommunicationId) {}

    /// The last communication ID of a service: it leads to the process that listens.
    fn listener(&self, address: IpAddr, service: ServiceId) -> Option<CommunicationId> {
        None
    }

    /// A peer has ended.
    fn on_peer_gone(&mut self, peer: Peer) {}

    /// A connection begins: its ACKs follow.
    fn record_path(&self, path: &AckPath) {}

    /// Everything up to `psn` is acknowledged. The application cannot see yet what that completes.
    fn record_ack(&self, qpn: Qpn, psn: Psn, msn: u32) {}

    /// The connection of a queue pair has ended.
    fn clear_ack(&self, qpn: Qpn) {}

    /// An identifier whose peer waits for a message.
    fn record_connection(&mut self, connection: &RecordedConnection) {}

    /// The peer of an identifier waits for nothing any more.
    fn clear_connection(&mut self, id: CmId) {}

    /// The device was removed, or is back.
    fn set_device_removed(&mut self, is_removed: bool) {}

    /// Sets the faults of the process of a client. A second client of the process keeps the counts of the first.
    fn set_faults(&mut self, now: Instant, client: ClientId, faults: ProgramFaults) {}

    /// The faults of all processes end.
    fn stop_faults(&mut self) {}

    /// Forgets a client. Returns whether the last process with faults has ended with it.
    fn close_client(&mut self, client: ClientId) -> bool {
        false
    }

    /// Counts a call; `None` if the process has no faults.
    fn on_call(
        &mut self,
        now: Instant,
        client: ClientId,
        verb: Verb,
        object: Option<(Resource, u32)>,
    ) -> Option<ObservedCall> {
        None
    }

    /// A call has created an object.
    fn on_created(&mut self, client: ClientId, kind: Resource, number: u32) {}

    /// Counts a completion. Returns the faults that hit it, and the place of its queue pair in order of creation.
    fn on_completion(&mut self, now: Instant, client: ClientId, qpn: Qpn) -> (Vec<FaultHit>, Option<u32>) {
        (Vec::new(), None)
    }

    /// A fault of a process has raised an event that concerns the whole device.
    fn on_event_raised(&mut self, event: InjectedEvent) {}

    /// The event that a fault of a process raised in the last call: other processes of the host are to know.
    fn take_raised_event(&mut self) -> Option<InjectedEvent> {
        None
    }

    /// Something happened outside of the device that faults may wait for.
    fn on_trigger(&mut self, trigger: &FaultTrigger) {}

    /// An asynchronous event, which faults may wait for.
    fn on_async_event(&mut self, name: &'static str) {}
}

/// A device of one program.
pub(crate) struct SingleProgram;

impl Processes for SingleProgram {}
