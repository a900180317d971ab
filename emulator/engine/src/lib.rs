//! The card as a state machine: queue pairs, regions, completion queues, without I/O.
//!
//! Frames, time and work requests go in; frames, completions and events come out. The engine has no
//! socket, clock, thread, lock or randomness of its own; [`Hca`] is driven by whoever owns it:
//!
//! * [`Hca::receive`] takes a packet, [`Hca::transmit`] builds the next one in a lent buffer,
//! * [`Hca::next_timeout`] and [`Hca::expire`] are its timers,
//! * [`Hca::ring`] hears the doorbells of applications, whose rings it reads and fills,
//! * the control verbs create, change and destroy resources.
//!
//! Every call is given a [`Context`]: the time, the memory behind regions, and who hears events.

#![no_std]
extern crate alloc;

mod address;
mod ahead;
mod card;
mod cm;
mod completer;
mod completion_queue;
mod congestion;
mod control;
mod duplicate;
mod error;
mod event;
mod flush;
mod hca;
mod inbound;
mod limiter;
mod memory;
mod outbound;
mod owing;
mod protection;
mod queue_pair;
mod refusal;
mod replies;
mod requester;
mod responder;
mod run;
mod settings;
mod shared_receive;
mod table;
mod time;
mod timers;
mod transition;
mod unreliable;

pub use cm::{CmFailure, CmIgnored, CmKind};
pub use congestion::{Congestion, Dcqcn, Notification, RateCause};
pub use control::QpRings;
pub use error::{Error, Resource};
pub use event::{BackCause, DropReason, Event, Packet, Profile, Reason, Refusal, Subscriber};
pub use hca::{Context, Hca};
pub use memory::{Atomic, Memory, MemoryFault, MemoryId, Place};
pub use protection::{Denied, Region};
pub use settings::{Acks, Answers, CmTimes, EndToEndCredits, PayloadMode, Recovery, Settings};
pub use time::Instant;
pub use transition::{Transition, transition};

pub use run::{Gate, Run};
pub use softhca_queue::{
    AddressVector, AhId, AsyncEvent, AttributeMask, Attributes, ClientId, CmChannelId, CmId, Counters, CqId,
    Limits, Modify, PdId, PortState, QpInit, QpKind, QpView, SharedReceiveView, SrqId, SrqInit, State,
    WindowKind, XrcdId,
};
