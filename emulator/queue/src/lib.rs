//! The memory that an application and an HCA share: send, receive and completion queues, doorbells, packet rings, and
//! registered memory.
//!
//! One layout serves an HCA in the same process and one behind shared memory. It consists of words of eight bytes, each
//! accessed as an atomic: the other side may write at any time without undefined behaviour. Everything read from a ring
//! is decoded and validated, the indices of the other side included.

#![no_std]
extern crate alloc;
#[cfg(any(test, feature = "shared"))]
extern crate std;

mod ack_records;
mod cm_records;
mod command_rings;
mod completion;
mod doorbell;
mod guarded_access;
mod memory;
mod memory_block;
mod packet_ring;
mod receive;
mod ring;
mod send;
mod shared_access;
#[cfg(all(feature = "shared", target_os = "linux"))]
mod shared_memory;
mod shared_words;
mod sync;

pub use ack_records::{AckPath, AckRecords, RecordedAck};
pub use cm_records::{CmRecords, RecordedConnection};
pub use command_rings::{QpRingLayout, ring_words};
pub use completion::{CompletionConsumer, CompletionProducer, CompletionView, completion_ring};
pub use doorbell::{DoorbellConsumer, DoorbellProducer, SleepFlag, doorbell_ring};
pub use guarded_access::recover as recover_from_memory_fault;
pub use memory::{AtomicOperation, MemoryFault};
pub use memory_block::{ExternalMemory, MemoryBlock, WriteOrigin, WriterRole};
pub use packet_ring::{PacketChunk, PacketConsumer, PacketProducer, PacketRing};
pub use receive::{ReceiveConsumer, ReceiveProducer, receive_ring};
pub use ring::{QueueFull, RingLayout};
pub use send::{InvalidWorkRequest, SendConsumer, SendProducer, SimpleRequest, send_ring};
#[cfg(all(feature = "shared", target_os = "linux"))]
pub use shared_memory::{MapMode, SharedMemory};
pub use shared_words::SharedWords;
