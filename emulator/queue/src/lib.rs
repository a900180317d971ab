//! The interface between an application and an HCA: send, receive and completion queues, doorbells, and the types of
//! the verbs.
//!
//! One layout serves an HCA in the same process and one behind shared memory. It consists of words of eight bytes, each
//! accessed as an atomic: the other side may write at any time without undefined behaviour. Everything read from a ring
//! is decoded and validated, the indices of the other side included.

#![no_std]
extern crate alloc;
#[cfg(any(test, feature = "shared"))]
extern crate std;

mod ack_records;
mod address;
mod attributes;
mod call_site;
pub mod cm;
mod cm_records;
mod command;
mod completion;
#[cfg(all(feature = "control", target_os = "linux"))]
pub mod control;
mod counters;
mod doorbell;
mod error;
mod guarded_access;
mod handed_over;
mod handle;
mod limits;
mod memory;
mod memory_block;
mod packet_ring;
mod program_fault;
mod receive;
mod repetition;
mod resource;
mod resource_kind;
mod ring;
mod seed;
mod send;
mod shared_access;
#[cfg(all(feature = "shared", target_os = "linux"))]
mod shared_memory;
mod shared_words;
mod sync;
mod verb;
mod work_request;

pub use ack_records::{AckPath, AckRecords, RecordedAck};
pub use address::AddressVector;
pub use attributes::{ModifyQp, QpAttributeMask, QpAttributes, QpState, QpType};
pub use call_site::CallSite;
pub use cm_records::{CmRecords, RecordedConnection};
pub use command::{Command, QpCapabilities, Reply};
pub use completion::{
    Completion, CompletionConsumer, CompletionFlags, CompletionOpcode, CompletionProducer, CompletionStatus,
    CqNotify, completion_ring,
};
pub use counters::{Counters, PortCounters};
pub use doorbell::{DoorbellConsumer, DoorbellProducer, SleepFlag, doorbell_ring};
pub use error::VerbsError;
pub use guarded_access::recover as recover_from_memory_fault;
pub use handed_over::HandedOverPacket;
pub use handle::{AhId, ClientId, CmChannelId, CmId, CqId, PdId, SrqId, XrcdId};
pub use limits::{DeviceLimits, ResourceCounts};
pub use memory::{AtomicOperation, MemoryFault};
pub use memory_block::{ExternalMemory, MemoryBlock};
pub use packet_ring::{PacketChunk, PacketConsumer, PacketProducer, PacketRing};
pub use program_fault::{
    CallPoint, FaultHit, FaultMatcher, FaultPoint, FaultTrigger, InjectedEvent, ProgramAction, ProgramFault,
    ProgramFaults,
};
pub use receive::{ReceiveConsumer, ReceiveProducer, ReceiveWorkRequest, receive_ring};
pub use repetition::{Choice, GilbertElliott, HitCounter, Pattern, PatternError, Repeat, Scope};
pub use resource::{
    AsyncEvent, MemoryWindowType, PortState, QpInitAttributes, QpSnapshot, SrqAttributes, SrqInitAttributes,
};
pub use resource_kind::Resource;
pub use ring::{CorruptRing, QueueFull, RingLayout};
pub use seed::{PER_BILLION, Seed};
pub use send::{InvalidWorkRequest, SendConsumer, SendProducer, send_ring};
#[cfg(all(feature = "shared", target_os = "linux"))]
pub use shared_memory::{MapMode, SharedMemory};
pub use shared_words::SharedWords;
pub use verb::{Errno, Verb, VerbReach, VerbSet};
pub use work_request::{
    AccessFlags, MemoryWindowBind, Operation, Payload, RemoteAddress, SendFlags, SendImmOrInvalidate,
    SendWorkRequest, Sge, UdDestination,
};
