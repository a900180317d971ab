//! What an application and a card share: send, receive and completion rings, doorbells, and the words in which
//! they speak of resources.
//!
//! One layout serves a card in the same process and a card behind shared memory: words of eight bytes,
//! each accessed as an atomic, so that the other side may write at any time without undefined behaviour.
//! What comes out of a ring is decoded and checked; the other side's indices are clamped.

#![no_std]
extern crate alloc;
#[cfg(any(test, feature = "shared"))]
extern crate std;

mod address;
mod attributes;
#[cfg(all(feature = "shared", target_os = "linux"))]
mod bell;
mod block;
pub mod cm;
mod completion;
#[cfg(all(feature = "control", target_os = "linux"))]
pub mod control;
mod counters;
mod doorbell;
mod handle;
mod limits;
mod memory;
mod receive;
mod request;
mod resource;
mod ring;
mod send;
#[cfg(all(feature = "shared", target_os = "linux"))]
mod shared;
mod words;

pub use address::AddressVector;
pub use attributes::{AttributeMask, Attributes, Modify, QpKind, State};
#[cfg(all(feature = "shared", target_os = "linux"))]
pub use bell::Bell;
pub use block::Block;
pub use completion::{
    Completion, CompletionConsumer, CompletionFlags, CompletionOperation, CompletionProducer, Notify, Status,
    completion_ring,
};
pub use counters::{Counters, PortCounters};
pub use doorbell::{DoorbellConsumer, DoorbellProducer, doorbell};
pub use handle::{AhId, ClientId, CmChannelId, CmId, CqId, PdId, SrqId, XrcdId};
pub use limits::Limits;
pub use memory::{Atomic, MemoryFault};
pub use receive::{Receive, ReceiveConsumer, ReceiveProducer, receive_ring};
pub use request::{
    Access, BindWindow, Datagram, Operation, Payload, RemoteAddress, SendFlags, SendRequest, SendTrailer, Sge,
};
pub use resource::{AsyncEvent, PortState, QpInit, QpView, SharedReceiveView, SrqInit, WindowKind};
pub use ring::{Full, Impossible, Shape};
pub use send::{BadRequest, SendConsumer, SendProducer, send_ring};
#[cfg(all(feature = "shared", target_os = "linux"))]
pub use shared::{Rights, SharedMemory, wait_on, wake_all};
pub use words::Words;
