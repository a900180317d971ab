//! What an application and a card share: send, receive and completion rings, doorbells, and the words in which
//! they speak of resources.
//!
//! One layout serves a card in the same process and a card behind shared memory: words of eight bytes,
//! each accessed as an atomic, so that the other side may write at any time without undefined behaviour.
//! What comes out of a ring is decoded and checked; the other side's indices are clamped.

#![no_std]
extern crate alloc;
#[cfg(test)]
extern crate std;

mod address;
mod attributes;
mod completion;
mod counters;
mod doorbell;
mod handle;
mod limits;
mod receive;
mod request;
mod resource;
mod ring;
mod send;
mod words;

pub use address::AddressVector;
pub use attributes::{AttributeMask, Attributes, Modify, QpKind, State};
pub use completion::{
    Completion, CompletionConsumer, CompletionFlags, CompletionOperation, CompletionProducer, Notify, Status,
    completion_ring,
};
pub use counters::Counters;
pub use doorbell::{DoorbellConsumer, DoorbellProducer, doorbell};
pub use handle::{AhId, ClientId, CqId, PdId, SrqId, XrcdId};
pub use limits::Limits;
pub use receive::{Receive, ReceiveConsumer, ReceiveProducer, receive_ring};
pub use request::{
    Access, BindWindow, Datagram, Operation, Payload, RemoteAddress, SendFlags, SendRequest, SendTrailer, Sge,
};
pub use resource::{AsyncEvent, QpInit, QpView, SrqInit, WindowKind};
pub use ring::{Full, Impossible, Shape};
pub use send::{BadRequest, SendConsumer, SendProducer, send_ring};
pub use words::Words;
