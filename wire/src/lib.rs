//! Wire formats of RoCEv2 and InfiniBand: opcodes, transport headers, addressing and CRCs.
//!
//! Each header is a plain value with `parse` and `emit`. `parse` validates its input; `emit` reproduces the
//! parsed bytes exactly. The crate does not allocate per packet, perform I/O or track connections.

#![no_std]
extern crate alloc;

mod address_headers;
mod aeth;
mod bth;
pub mod cm;
mod code;
#[cfg(feature = "serde")]
mod constant;
mod display;
mod ethernet;
mod extended_headers;
mod frame;
mod grh;
mod header_set;
mod icrc;
mod ipv4;
mod ipv6;
mod layout;
pub mod link_control;
mod local_packet;
mod lrh;
mod mad;
mod malformed;
mod named_enum;
mod number;
mod opcode;
mod pfc;
mod rmpp;
pub mod sa;
pub mod smp;
mod transport_header;
mod udp;
mod vcrc;

pub use address_headers::{AddressHeaders, Ecn, Gid, LocalRoute};
pub use aeth::{Aeth, Credits, NakCode, RnrTimer, Syndrome};
pub use bth::Bth;
#[cfg(feature = "serde")]
pub use constant::deserialize_constant;
pub use ethernet::{EtherType, Ethernet, MacAddress, Vlan};
pub use extended_headers::{AtomicAckEth, AtomicEth, Deth, Feth, Ieth, Immediate, Reth, XrcEth};
pub use frame::{FirstHeader, NetworkHeaders, RoceFrame};
pub use grh::Grh;
pub use header_set::ExtendedHeaders;
pub use icrc::{ICRC_LEN, Icrc};
pub use ipv4::Ipv4;
pub use ipv6::Ipv6;
pub use local_packet::LocalPacket;
pub use lrh::Lrh;
pub use mad::MadHeader;
pub use malformed::{Constant, Malformed};
pub use number::{LocalKey, Mtu, PartitionKey, Psn, Qpn, QpnSlot, QueueKey, RemoteKey};
pub use opcode::{ImmOrInvalidate, Opcode, Operation, Position, Service};
pub use pfc::Pfc;
pub use rmpp::{RmppHeader, RmppKind};
pub use transport_header::{TransportHeader, TransportPacket};
pub use udp::Udp;
pub use vcrc::{VCRC_LEN, Vcrc};

/// The UDP port that IANA assigned to RoCEv2.
pub const ROCE_PORT: u16 = 4791;
