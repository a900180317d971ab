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
mod attributes;
mod card;
mod completer;
mod completion_queue;
mod control;
mod counters;
mod error;
mod event;
mod flush;
mod hca;
mod inbound;
mod memory;
mod outbound;
mod protection;
mod queue_pair;
mod replies;
mod requester;
mod responder;
mod settings;
mod shared_receive;
mod table;
mod time;
mod timers;
mod unreliable;

pub use address::AddressVector;
pub use attributes::{AttributeMask, Attributes, Modify, QpKind, State, Transition, transition};
pub use control::{QpInit, QpRings, SrqInit};
pub use counters::Counters;
pub use error::{Error, Resource};
pub use event::{AsyncEvent, BackCause, DropReason, Event, Packet, Reason, Refusal, Subscriber};
pub use hca::{Context, Gate, Hca, Run};
pub use memory::{Atomic, Memory, MemoryFault, MemoryId};
pub use protection::{Denied, Region, WindowKind};
pub use queue_pair::QpView;
pub use settings::{Acks, Limits, Recovery, Settings};
pub use time::Instant;

macro_rules! handle {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        $($(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u32);)*
    };
}

handle! {
    /// Names an application of the card: the owner of its resources.
    ClientId,
    /// Names a protection domain.
    PdId,
    /// Names a completion queue.
    CqId,
    /// Names a shared receive queue.
    SrqId,
    /// Names an address handle.
    AhId,
    /// Names an XRC domain.
    XrcdId,
}
