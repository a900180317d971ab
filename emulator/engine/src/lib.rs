//! The HCA as a state machine without I/O: queue pairs, memory regions, completion queues.
//!
//! Input is frames, time and work requests; output is frames, completions and events. The engine has no socket,
//! clock, thread, lock or source of randomness. The owner of an [`Hca`] drives it:
//!
//! * [`Hca::receive`] handles a packet, [`Hca::transmit`] builds the next batch in the caller's buffer,
//! * [`Hca::next_timeout`] and [`Hca::expire`] are the timers,
//! * [`Hca::process_doorbells`] reads the work requests that applications posted,
//! * the control verbs create, modify and destroy resources.
//!
//! Every call takes a [`Context`]: the time, the memory behind memory regions and the event callback.

#![no_std]
extern crate alloc;

mod addressing;
mod cm;
mod completion_queue;
mod context;
mod control;
mod control_packets;
mod event;
mod hca;
mod hca_state;
mod injection;
mod memory;
mod packet_batch;
mod peer_window;
mod process_faults;
mod protection;
mod queue_pair;
mod random;
mod rate_control;
mod reason;
mod recovery;
mod settings;
mod shared_receive_queue;
mod table;
mod time;
mod timers;

pub use cm::{CmDropReason, CmFailure, CmMessageKind, MadOwner};
pub use context::Context;
pub use control::{Attachments, QpRings};
pub use event::{Event, InjectedPoint, PacketSummary, QpConfiguration};
pub use hca::Hca;
pub use memory::{AtomicOperation, Memory, MemoryFault, MemoryId, MemoryObjects};
pub use protection::{AccessError, MemoryRegion};
pub use queue_pair::{Transition, completion_opcode, transition};
pub use rate_control::{
    CongestionSettings, DcqcnParameters, NotificationPoint, RateCause, RateControlSettings,
};
pub use reason::{DropReason, LinkReject, Reason, RequestError, RetransmitCause};
pub use recovery::Recovery;
pub use settings::{AckPolicy, CmTimers, EndToEndCredits, PayloadMode, ResponseOrder, Settings};
pub use time::Instant;

pub use packet_batch::{PacketBatch, Peer, TransmitGate};
pub use softhca_queue::{
    AddressVector, AhId, AsyncEvent, ClientId, CmChannelId, CmId, Command, Counters, CqId, DeviceLimits,
    MemoryWindowType, ModifyQp, PdId, PortState, QpAttributeMask, QpAttributes, QpCapabilities,
    QpInitAttributes, QpSnapshot, QpState, QpType, Reply, Resource, SrqAttributes, SrqId, SrqInitAttributes,
    VerbsError, XrcdId,
};

/// The result of a verb.
pub type VerbsResult<T = ()> = Result<T, VerbsError>;
