//! The HCA as a state machine without I/O: queue pairs, memory regions, completion queues.
//!
//! Input is frames, time and work requests; output is frames, completions and events. The engine has no socket,
//! clock, thread, lock or source of randomness. The owner of an [`Hca`] drives it:
//!
//! * `Hca::receive` handles a packet, `Hca::transmit` builds the next batch in the caller's buffer,
//! * `Hca::next_timeout` and `Hca::expire` are the timers,
//! * `Hca::process_doorbells` reads the work requests that applications posted,
//! * the control verbs create, modify and destroy resources.
//!
//! Every call takes a [`Context`]: the time, the memory behind memory regions and the event callback.

#![no_std]
#![allow(private_bounds, private_interfaces, reason = "the transport is chosen inside of this crate")]
extern crate alloc;

mod cm;
mod core;
mod profile;
mod transport;

pub use cm::MadOwner;
pub use core::cm_event::{CmDropReason, CmFailure, CmMessageKind};
pub use core::congestion::{
    CongestionSettings, DcqcnParameters, NotificationPoint, RateCause, RateControlSettings,
};
pub use core::context::Context;
pub use core::control::{Attachments, QpRings};
pub use core::event::{Event, InjectedPoint, PacketSummary, QpConfiguration};
pub use core::memory::{
    AtomicOperation, Memory, MemoryFault, MemoryId, MemoryObjects, PlacementOrder, WriteOrigin, WriterRole,
};
pub use core::processes::{ObservedCall, Processes};
pub use core::protection::{AccessError, MemoryRegion};
pub use core::queue_pair::Wait;
pub use core::reason::{DropReason, LinkReject, Reason, RequestError, RetransmitCause};
pub use core::settings::{
    AckPolicy, CmTimers, EndToEndCredits, PayloadMode, Placement, Recovery, ResponseOrder, Settings,
};
pub use core::time::Instant;
pub use core::transition::{Transition, transition};

pub use core::packet_batch::{HostWire, PacketBatch, Peer, TransmitGate};
pub use profile::{
    AdaptiveRetransmission, FactValue, InvalidateAnswer, Profile, RetryTiming, VendorError, WriteCheck,
    WriteCount,
};
pub use softhca_types::{
    AddressVector, AhId, AsyncEvent, ClientId, CmChannelId, CmId, Command, Counters, CqId, DeviceLimits,
    MemoryWindowType, ModifyQp, PdId, PortState, QpAttributeMask, QpAttributes, QpCapabilities,
    QpInitAttributes, QpSnapshot, QpState, QpType, Reply, Resource, SrqAttributes, SrqId, SrqInitAttributes,
    VerbsError, XrcdId,
};

/// The HCA with the InfiniBand transport.
pub type Hca = core::hca::Hca<transport::ib::Ib>;

/// The result of a verb.
pub type VerbsResult<T = ()> = Result<T, VerbsError>;
