//! Verbs on an RDMA card made of software.
//!
//! The objects are libibverbs's. A [`Device`] is opened to a [`Context`], which has [`ProtectionDomain`]s,
//! [`CompletionQueue`]s and [`SharedReceiveQueue`]s. A domain has [`MemoryRegion`]s, [`MemoryWindow`]s,
//! [`AddressHandle`]s and [`QueuePair`]s. Each is a handle that keeps alive what it needs, so that they may be dropped
//! in any order. Registered memory is shared with peers by design: it is read and written through the region, never
//! through a reference.
//!
//! These types work on an embedded card ([`Device::embedded`]: in this process, on real sockets). They also work on the
//! simulated cards of a [`World`](sim::World), where the async code of several hosts runs under virtual time.
//!
//! # Integers
//! Counts, limits and handles are `u32`, and so is the length of an SGE. Addresses, offsets and lengths of registered memory
//! are `u64`. Port numbers, GID indices and the exponents and counters of a connection are `u8`, as in verbs. Only lengths of
//! memory of the caller, such as slices, are `usize`.
//!
//! # Features
//! The feature `sockets`, on by default, adds the embedded card and the card of a daemon. Without it, the crate has
//! simulated cards only and builds for wasm32.
//!
//! ```
//! use softhca::{AccessFlags, Device, QpType, SendRequest};
//!
//! # fn main() -> Result<(), softhca::Error> {
//! // Two cards in this process, each on a loopback address of its own.
//! let [alice, bob] = [Device::embedded()?, Device::embedded()?].map(|device| device.open());
//! let [alice_domain, bob_domain] = [alice.allocate_protection_domain()?, bob.allocate_protection_domain()?];
//! let rights = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
//! let source = alice_domain.allocate_region(4096, rights)?;
//! let target = bob_domain.allocate_region(4096, rights)?;
//! let queue = alice.create_completion_queue(16)?;
//! let from = alice_domain.create_queue_pair(QpType::Rc, &queue).build()?;
//! let to = bob_domain.create_queue_pair(QpType::Rc, &bob.create_completion_queue(16)?).build()?;
//! from.connect(&to.endpoint(), &Default::default())?;
//! to.connect(&from.endpoint(), &Default::default())?;
//!
//! source.write_at(0, b"one-sided");
//! from.post_send(&SendRequest::rdma_write(1, &[source.sge(0, 9)], target.remote_address(100)))?;
//! let completion = queue.wait()?;
//! assert!(completion.status.is_success());
//! assert_eq!(target.read_at(100, 9), b"one-sided");
//! # Ok(())
//! # }
//! ```

mod async_events;
mod backend;
pub mod cm;
mod completion_channel;
mod completion_queue;
mod context;
#[cfg(all(feature = "sockets", target_os = "linux"))]
mod daemon;
mod device;
#[cfg(feature = "sockets")]
mod embedded;
mod endpoint_exchange;
mod error;
mod event_fd;
mod executor;
#[cfg(feature = "sockets")]
mod exit_cards;
mod explanation;
mod exploration;
pub mod fault;
mod handle;
pub mod history;
mod local_backend;
mod memory;
mod memory_region;
mod notifier;
mod placement;
mod protection_domain;
mod queue_pair;
mod random;
mod real_clock;
#[cfg(feature = "sockets")]
mod recording;
mod report;
mod shared_receive_queue;
mod shared_sink;
mod simulated;
mod time;
mod work_request;
mod world;
mod xrc;

pub use completion_channel::CompletionChannel;
pub use completion_queue::CompletionQueue;
pub use context::{AsyncEvents, Context};
#[cfg(all(feature = "sockets", target_os = "linux"))]
pub use daemon::{
    ClientStatus, DaemonControl, DaemonStatus, EventStream, FabricPort, HostAsyncEvent, HostDevice,
    HostStatus, QueuePairStatus,
};
pub use device::{Device, DeviceAttributes, PortAttributes};
#[cfg(feature = "sockets")]
pub use embedded::{EmbeddedOptions, PortSwitch};
pub use endpoint_exchange::EndpointExchange;
pub use error::Error;
#[cfg(feature = "tokio")]
pub use executor::spawn_send;
pub use executor::{JoinHandle, block_on, spawn, yield_now};
pub use memory_region::{MemoryRegion, MemoryWindow};
pub use protection_domain::{AddressHandle, ProtectionDomain};
pub use queue_pair::{ConnectOptions, Endpoint, QueuePair, QueuePairBuilder, SendBatch};
pub use random::{Rng, rng};
#[cfg(feature = "sockets")]
pub use recording::{CAPTURE_VARIABLE, LOG_VARIABLE};
pub use shared_receive_queue::SharedReceiveQueue;
pub use time::{Sleep, now, sleep, timeout};
pub use work_request::{ReceiveRequest, SendRequest};
pub use xrc::XrcDomain;

#[cfg(all(feature = "sockets", target_os = "linux"))]
pub use softhca_control::{DATA_PATH_VARIABLE, DEFAULT_NAME, HOST_VARIABLE, NAME_VARIABLE};
pub use softhca_engine::{
    AckPolicy, AddressVector, AsyncEvent, CmTimers, Counters, DeviceLimits, Instant, MemoryWindowType,
    ModifyQp, Placement, PortState, Profile, QpAttributeMask, QpAttributes, QpSnapshot, QpState, QpType,
    Recovery, Resource, ResponseOrder, Settings,
};
pub use softhca_types::{
    AccessFlags, CmId, Completion, CompletionFlags, CompletionOpcode, CompletionStatus, CorruptRing, CqId,
    CqNotify, Errno, InfiniBandPort, MemoryWindowBind, Operation, ReceivedRoute, RemoteAddress, SendFlags,
    SendImmOrInvalidate, Sge, SrqAttributes, SrqId, UdDestination, Verb, VerbsError,
};
#[cfg(feature = "sockets")]
pub use softhca_udp::{BindError, Entropy, IcrcCheck, IcrcMode, Loopback, PortOwner, ReceiveMemory};
pub use softhca_wire::{Gid, LocalKey, Mtu, Psn, Qpn, QueueKey, RemoteKey, RnrTimer};

/// Hosts under virtual time, the links between them, and the result of a run. [`World`](sim::World) has an example.
pub mod sim {
    pub use crate::executor::WaitReason;
    pub use crate::exploration::{Exploration, FailedInterleaving};
    pub use crate::report::{Failure, FailureCause, LogEntry, LogEntryKind, Report};
    pub use crate::simulated::{FabricSink, SimulatedFabric};
    pub use crate::world::{HostResult, World};
    pub use softhca_fabric::{
        EcnMarking, FrameCounters, LinkSettings, PfcSettings, ReceiverSettings, SwitchSettings,
    };
}

/// Events of devices and of the network, and how to subscribe to them.
///
/// ```
/// use softhca::sim::World;
/// use softhca::trace::{Event, EventSink, NetworkEvent, SharedSink};
/// use softhca::{Instant, QpState, QpType};
///
/// #[derive(Default)]
/// struct States(Vec<QpState>);
///
/// impl EventSink for States {
///     fn on_event(&mut self, _: Instant, event: &NetworkEvent<'_>) {
///         if let NetworkEvent::Hca { event: Event::QpStateChanged { to, .. }, .. } = event {
///             self.0.push(*to);
///         }
///     }
/// }
///
/// let (mut world, states) = (World::new(1), SharedSink::<States>::default());
/// world.event_sink(states.clone());
/// let context = world.device("alice").open();
/// let cq = context.create_completion_queue(1)?;
/// let qp = context.allocate_protection_domain()?.create_queue_pair(QpType::Rc, &cq).build()?;
/// qp.init(&Default::default())?;
/// assert_eq!(states.lock().0, [QpState::Init]);
/// # Ok::<(), softhca::Error>(())
/// ```
pub mod trace {
    pub use crate::shared_sink::SharedSink;
    pub use softhca_engine::{DropReason, Event, InjectedPoint, PacketSummary, Reason, RequestError};
    pub use softhca_fabric::{EventSink, HostId, LinkId, NetworkEvent};
    pub use softhca_wire::AddressHeaders;
}

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
    #[doc = include_str!("../../docs/lessons/13-mistakes.md")]
    struct Mistakes;
    #[doc = include_str!("../../docs/lessons/15-every-error-path.md")]
    struct EveryErrorPath;
    #[doc = include_str!("../../docs/lessons/18-one-sided-programs.md")]
    struct OneSidedPrograms;
}
