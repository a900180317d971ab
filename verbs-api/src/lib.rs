//! Verbs on an RDMA card made of software.
//!
//! The objects are those of libibverbs: a [`Device`] is opened to a [`Context`], which has
//! [`ProtectionDomain`]s, [`CompletionQueue`]s and [`SharedReceiveQueue`]s; a domain has [`MemoryRegion`]s,
//! [`MemoryWindow`]s, [`AddressHandle`]s and [`QueuePair`]s. Each is a handle that keeps alive what it needs,
//! so that they may be dropped in any order. Registered memory is shared with peers by design: it is read
//! and written through the region, never through a reference.
//!
//! The same types work on an embedded card ([`Device::embedded`]: in this process, on real sockets) and on
//! the simulated cards of a [`World`], where the async code of several hosts runs under virtual time.
//!
//! ```
//! use softhca::{Access, Device, QpKind, SendRequest};
//!
//! # fn main() -> Result<(), softhca::Error> {
//! // Two cards in this process, each on a loopback address of its own.
//! let [alice, bob] = [Device::embedded()?, Device::embedded()?].map(|device| device.open());
//! let [alice_domain, bob_domain] = [alice.allocate_domain()?, bob.allocate_domain()?];
//! let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
//! let source = alice_domain.register(4096, rights)?;
//! let target = bob_domain.register(4096, rights)?;
//! let queue = alice.create_completion_queue(16)?;
//! let from = alice_domain.queue_pair(QpKind::Rc, &queue).create()?;
//! let to = bob_domain.queue_pair(QpKind::Rc, &bob.create_completion_queue(16)?).create()?;
//! from.connect(&to.endpoint(), &Default::default())?;
//! to.connect(&from.endpoint(), &Default::default())?;
//!
//! source.write_at(0, b"one-sided");
//! from.post(&SendRequest::write(1, &[source.entry(0, 9)], target.remote(100)))?;
//! let completion = queue.wait()?;
//! assert!(completion.status.is_success());
//! assert_eq!(target.read_at(100, 9), b"one-sided");
//! # Ok(())
//! # }
//! ```

mod backend;
mod channel;
mod completion;
mod context;
#[cfg(target_os = "linux")]
mod daemon;
mod device;
mod domain;
mod embedded;
mod error;
mod events;
mod executor;
mod local;
mod memory;
mod notifier;
mod queue_pair;
mod random;
pub mod rdma_cm;
mod region;
mod rendezvous;
mod report;
mod shared_receive;
mod simulated;
mod time;
mod work;
mod world;
mod xrc;

pub use channel::CompletionChannel;
pub use completion::CompletionQueue;
pub use context::Context;
#[cfg(target_os = "linux")]
pub use daemon::{ClientStatus, DaemonControl, DaemonStatus, FabricPort, HostCard, HostStatus, SeenEvent};
pub use device::{Device, DeviceAttributes, EmbeddedOptions, PortAttributes, PortSwitch};
pub use domain::{AddressHandle, ProtectionDomain};
pub use error::Error;
pub use executor::{JoinHandle, Wait, block_on, spawn, yield_now};
pub use queue_pair::{Batch, Endpoint, Path, QueuePair, QueuePairBuilder};
pub use random::{Rng, rng};
pub use region::{MemoryRegion, MemoryWindow};
pub use rendezvous::Rendezvous;
pub use report::{Cause, Failure, Moment, Report, What};
pub use shared_receive::SharedReceiveQueue;
pub use time::{Sleep, now, sleep, timeout};
pub use work::{ReceiveRequest, SendRequest};
pub use world::{Outcome, World};
pub use xrc::XrcDomain;

pub use softhca_engine::{
    Acks, AddressVector, Answers, AsyncEvent, AttributeMask, Attributes, CmTimes, Counters, Event, Instant,
    Modify, PortState, QpKind, QpView, Recovery, Settings, State, WindowKind,
};
pub use softhca_fabric::{
    Action, Census, Choice, Class, Classes, CmMessage, Fault, FlowControl, Line, Marking, Observer, Pattern,
    Receiver, Repeat, Role, Rule, RuleId, Selector, Span, SwitchSettings, Tally,
};
#[cfg(target_os = "linux")]
pub use softhca_queue::control::{DEFAULT_NAME, HOST_VARIABLE, NAME_VARIABLE};
pub use softhca_queue::{
    Access, BindWindow, Completion, CompletionFlags, CompletionOperation, Datagram, Notify, Operation,
    RemoteAddress, SendFlags, SendTrailer, Sge, SharedReceiveView, Status,
};
pub use softhca_udp::{Entropy, IcrcCheck, Loopback, Passage, ReceiveMemory, Witness};
pub use softhca_wire::{Gid, LocalKey, Mtu, Psn, Qpn, QueueKey, RemoteKey, RnrTimer};

/// The Rust of the README and the book is run as doc tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../README.md")]
    struct Readme;
    #[doc = include_str!("../../docs/lessons/01-objects.md")]
    struct Objects;
    #[doc = include_str!("../../docs/lessons/08-connection-management.md")]
    struct ConnectionManagement;
    #[doc = include_str!("../../docs/lessons/12-testing.md")]
    struct Testing;
}
