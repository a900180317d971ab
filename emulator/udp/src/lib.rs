//! A port of the emulated card on real UDP sockets, and the link control that keeps it lossless.
//!
//! [`RoceSocket`] moves runs of datagrams and tells what the kernel knows about them; [`Links`] decides how
//! much may be sent to whom, without I/O and without a clock of its own. [`Driver`] owns a card and both of
//! them, and drives the three one turn at a time. This is the only crate with socket calls; unsafe code is confined to `system`.

#![cfg(unix)]

mod backbone;
mod batch;
mod driver;
mod entropy;
mod faults;
mod grant;
mod hold;
mod host;
mod link;
mod loopback;
mod multicast;
mod pauses;
pub mod raw;
mod socket;
mod station;
mod system;

pub use backbone::{Backbone, BackboneError};
pub use batch::{Batch, Chunk, Datagram};
pub use driver::{Driver, DriverOptions, IcrcCheck, Passage, Witness};
pub use entropy::Entropy;
pub use grant::{Granter, Holder, LARGEST_CHARGE, budget, charge};
pub use host::{ADDRESS_VARIABLE, BindError, HostSockets, Owner, bind_host, parse_addresses};
pub use link::{LinkChange, LinkEvent, Links, PeerState, UnreachablePort};
pub use loopback::Loopback;
pub use socket::{
    Cause, MAX_RUN_BYTES, MAX_RUN_SEGMENTS, NetworkError, ReceiveMemory, RoceSocket, Segmentation, SendError,
    SocketOptions,
};
pub use station::{Conduct, Station};
pub use system::{Interface, ProcessMark, Ready, Waker, interface_of, wait, wait_writable};
