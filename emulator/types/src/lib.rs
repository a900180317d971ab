//! The vocabulary of the verbs: commands and their replies, attributes and states of objects, work requests and their
//! completions, counters, and the faults of programs.
//!
//! The types are plain data. Every back end, the daemon's control protocol and the engine use them.

#![no_std]
extern crate alloc;
#[cfg(test)]
extern crate std;

mod address;
mod attributes;
mod call_site;
pub mod cm;
mod command;
mod completion;
mod counters;
mod error;
mod handle;
mod infiniband_port;
mod limits;
mod program_fault;
mod repetition;
mod resource;
mod resource_kind;
mod seed;
mod verb;
mod work_request;

pub use address::AddressVector;
pub use attributes::{ModifyQp, QpAttributeMask, QpAttributes, QpState, QpType};
pub use call_site::{CallSite, MAX_CALL_SITES};
pub use command::{Command, QpCapabilities, Reply};
pub use completion::{
    Completion, CompletionFlags, CompletionOpcode, CompletionStatus, CqNotify, ReceivedRoute,
};
pub use counters::{Counters, PortCounters};
pub use error::{CorruptRing, VerbsError};
pub use handle::{AhId, ClientId, CmChannelId, CmId, CqId, PdId, SrqId, XrcdId};
pub use infiniband_port::InfiniBandPort;
pub use limits::{DeviceLimits, ResourceCounts};
pub use program_fault::{
    CallPoint, FaultHit, FaultMatcher, FaultPoint, FaultTrigger, InjectedEvent, ProgramAction, ProgramFault,
    ProgramFaults,
};
pub use repetition::{Choice, GilbertElliott, HitCounter, Pattern, PatternError, Repeat, Scope};
pub use resource::{
    AsyncEvent, MemoryWindowType, PortState, QpInitAttributes, QpSnapshot, SrqAttributes, SrqInitAttributes,
};
pub use resource_kind::Resource;
pub use seed::{PER_BILLION, Seed};
pub use verb::{Errno, Verb, VerbReach, VerbSet};
pub use work_request::{
    AccessFlags, MemoryWindowBind, Operation, Payload, ReceiveWorkRequest, RemoteAddress, SendFlags,
    SendImmOrInvalidate, SendWorkRequest, Sge, UdDestination,
};
