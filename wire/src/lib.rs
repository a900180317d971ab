//! RoCEv2 as bytes: opcodes, transport headers, addressing and the invariant CRC.
//!
//! Every header is a plain value with `parse` and `emit`; parsing checks, and what was parsed can be
//! emitted again byte for byte. Nothing here allocates per packet, performs I/O or knows a connection.

#![no_std]
extern crate alloc;

mod aeth;
mod bth;
mod envelope;
mod extended;
mod header;
mod icrc;
pub mod link;
mod malformed;
mod number;
mod opcode;

pub use aeth::{Aeth, NakCode, RnrTimer, Syndrome};
pub use bth::Bth;
pub use envelope::{Ecn, Envelope, Gid};
pub use extended::{AtomicAckEth, AtomicEth, Deth, Feth, Ieth, Immediate, Reth, XrcEth};
pub use header::{Header, Transport};
pub use icrc::{ICRC_LEN, Icrc};
pub use malformed::Malformed;
pub use number::{LocalKey, Mtu, PartitionKey, Psn, QueueKey, Qpn, RemoteKey};
pub use opcode::{Headers, Opcode, Operation, Position, Service, Trailer};

/// The UDP port that IANA assigned to RoCEv2.
pub const ROCE_PORT: u16 = 4791;
