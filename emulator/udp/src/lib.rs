//! A port of the emulated HCA on real UDP sockets, and the link control that keeps it lossless.
//!
//! [`RoceSocket`] sends and receives batches of datagrams and reports what the kernel knows about them.
//! [`LinkControl`] decides how much may be sent to which peer; it has no I/O and no clock. [`Driver`] owns an HCA and
//! both of them and polls them. This is the only crate with socket calls; unsafe code is confined to `system`.

#![cfg(unix)]

mod batch;
mod bind_error;
mod driver;
mod entropy;
mod fault_injector;
mod grant;
mod host;
mod host_network;
mod link;
mod loopback;
mod multicast;
mod pauses;
mod peer_port;
mod port_owner;
mod process_rings;
pub mod raw;
mod reorder;
mod shared_driver;
mod slot_field;
#[cfg(target_os = "linux")]
mod slot_page;
mod slots;
mod socket;
mod socket_report;
mod subnet_port;
mod sync;
mod system;

pub use batch::{Chunk, Datagram, MAX_BATCH_BYTES, MAX_BATCH_SEGMENTS, ReceiveBatch};
pub use bind_error::{ADDRESS_VARIABLE, BindError};
pub use driver::{Driver, DriverOptions, HandOver, ICRC_VARIABLE, IcrcCheck, IcrcMode, PublishCounters};
pub use entropy::Entropy;
pub use grant::{GrantBalance, GrantIssuer, MAX_FRAME_CHARGE, OutOfBounds, charge, grant_budget};
pub use host::{HostSockets, bind_free_host, bind_host, parse_addresses};
pub use host_network::{HostNetwork, HostNetworkError};
pub use link::{LinkChange, LinkControl, LinkEvent, LinkSecret, PeerState, UnreachablePort};
pub use loopback::Loopback;
pub use peer_port::PeerPort;
pub use port_owner::PortOwner;
pub use process_rings::{OpenRings, RingPair};
pub use shared_driver::{DrivePolicy, MAX_CALLER_DESCRIPTORS, PollGate, SharedDriver};
#[cfg(target_os = "linux")]
pub use slot_page::{SlotPage, SlotRecorder, SlotState};
pub use slots::{OpenSendSocket, SlotGroup};
pub use socket::{RoceSocket, Segmentation, SendError, SocketOptions};
pub use socket_report::{NetworkError, NetworkErrorCause, ReceiveMemory};
pub use subnet_port::SubnetLink;
pub use system::{
    Interface, ProcessIdentity, Ready, SignalsBlocked, Waker, at_exit, interface_of, monotonic_nanos,
    poll_readable, random_words, wait_readable, wait_writable,
};
