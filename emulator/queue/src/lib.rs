//! Queues between an application and a card: send, receive and completion rings, and doorbells.
//!
//! One layout serves a card in the same process and a card behind shared memory: words of eight bytes,
//! each accessed as an atomic, so that the other side may write at any time without undefined behaviour.
//! What comes out of a ring is decoded and checked; the other side's indices are clamped.

#![no_std]
extern crate alloc;
#[cfg(test)]
extern crate std;

mod completion;
mod doorbell;
mod receive;
mod request;
mod ring;
mod send;
mod words;

pub use completion::{
    Completion, CompletionConsumer, CompletionFlags, CompletionOperation, CompletionProducer, Notify, Status,
    completion_ring,
};
pub use doorbell::{DoorbellConsumer, DoorbellProducer, doorbell};
pub use receive::{Receive, ReceiveConsumer, ReceiveProducer, receive_ring};
pub use request::{
    Access, BindWindow, Datagram, Operation, Payload, RemoteAddress, SendFlags, SendRequest, SendTrailer, Sge,
};
pub use ring::{Full, Impossible, Shape};
pub use send::{BadRequest, SendConsumer, SendProducer, send_ring};
pub use words::Words;
