//! The network between the hosts of one process: their packets pass its switches instead of sockets.
//!
//! The driver of an attached host advances the network to the current time, receives the host's frames, and wakes the
//! other hosts that have frames. Packets of other machines enter the network too, each machine through a port of its
//! own. The switches queue, mark and pause them like packets of local hosts.

use crate::Waker;
use parking_lot::Mutex;
use softhca_fabric::{
    BuiltTopology, EventSink, ExternalPortUpdate, Fabric, Frame, FrameCounters, HostId, LinkSettings, Origin,
    ReceiverSettings, SwitchSettings, Topology, TopologyError,
};
use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;
use thiserror::Error;

/// The most frames that one poll returns.
const MAX_FRAMES_PER_POLL: usize = 64;

/// Why a host network could not be created.
#[derive(Debug, Error)]
pub enum HostNetworkError {
    /// The topology does not fit these hosts.
    #[error("invalid topology: {0}")]
    Topology(#[from] TopologyError),
    /// The system did not create a wake descriptor.
    #[error("cannot create a wake descriptor: {0}")]
    Io(#[from] io::Error),
}

/// A network that the hosts of a process share.
pub struct HostNetwork {
    inner: Mutex<Inner>,
    topology: BuiltTopology,
    link: LinkSettings,
    started: Instant,
    wakers: Vec<Waker>,
}

struct Inner {
    fabric: Fabric,
    sink: Box<dyn EventSink + Send>,
    /// Hosts that advanced the network, received something and have not polled since: no other host wakes them.
    unpolled: BTreeSet<HostId>,
}

impl HostNetwork {
    /// Connects hosts with these addresses in a topology. The seed decides which packets are ECN-marked.
    pub fn new(
        seed: u64,
        addresses: &[IpAddr],
        topology: &Topology,
        link: LinkSettings,
        settings: SwitchSettings,
    ) -> Result<Arc<HostNetwork>, HostNetworkError> {
        HostNetwork::with_sink(seed, addresses, topology, link, settings, Box::new(()))
    }

    /// A network with an event sink, which is called under the lock of the network.
    pub fn with_sink(
        seed: u64,
        addresses: &[IpAddr],
        topology: &Topology,
        link: LinkSettings,
        settings: SwitchSettings,
        sink: Box<dyn EventSink + Send>,
    ) -> Result<Arc<HostNetwork>, HostNetworkError> {
        let (fabric, built) = Fabric::new(seed, addresses, topology, link, settings)?;
        let wakers = addresses.iter().map(|_| Waker::new()).collect::<io::Result<_>>()?;
        let inner = Mutex::new(Inner { fabric, sink, unpolled: BTreeSet::new() });
        Ok(Arc::new(HostNetwork { inner, topology: built, link, started: Instant::now(), wakers }))
    }

    /// Changes how fast the port of a host accepts frames. Returns false if the network has no such host.
    pub fn set_receiver(&self, address: IpAddr, receiver: ReceiverSettings) -> bool {
        let Inner { fabric, sink, .. } = &mut *self.inner.lock();
        let Some(host) = fabric.host_with_address(address) else { return false };
        fabric.set_receiver(self.now(), host, receiver, &mut **sink);
        true
    }

    /// The rate of every link.
    pub(crate) fn line_rate(&self) -> Option<NonZeroU64> {
        self.link.bits_per_second
    }

    /// Processes every event up to the current time and wakes the hosts that have something to poll.
    fn advance_to_now(&self, inner: &mut Inner, except: HostId) -> softhca_engine::Instant {
        let now = self.now();
        inner.fabric.advance(now, &mut *inner.sink);
        while let Some(host) = inner.fabric.next_ready_host() {
            if host == except {
                inner.unpolled.insert(host);
            } else {
                self.wakers[host.0 as usize].wake();
            }
        }
        now
    }

    /// The descriptor that becomes readable when a frame arrives for a host.
    pub fn wake_descriptor(&self, address: IpAddr) -> Option<BorrowedFd<'_>> {
        let host = self.inner.lock().fabric.host_with_address(address)?;
        Some(self.wakers[host.0 as usize].as_fd())
    }

    /// The switches and links.
    pub fn topology(&self) -> &BuiltTopology {
        &self.topology
    }

    /// Calls `act` with the fabric.
    pub fn with_fabric<R>(&self, act: impl FnOnce(&Fabric) -> R) -> R {
        act(&self.inner.lock().fabric)
    }

    /// The frame counters of the network.
    pub fn frame_counters(&self) -> FrameCounters {
        self.inner.lock().fabric.frame_counters()
    }

    fn now(&self) -> softhca_engine::Instant {
        softhca_engine::Instant::from_nanos(self.started.elapsed().as_nanos() as u64)
    }
}

/// The result of one poll of a host's port.
pub(crate) struct PortPoll {
    pub frames: Vec<(Frame, Origin)>,
    /// Changes at the ports of other machines.
    pub external_updates: Vec<ExternalPortUpdate>,
    /// The priorities that the host may not send now, as a mask.
    pub paused_priorities: u8,
    /// Pause frames since the last poll.
    pub new_pause_frames: u64,
    /// Destinations that were blocked until the link became idle, which it is.
    pub unblocked: BTreeSet<IpAddr>,
}

/// A host's port in the network.
pub(crate) struct HostPort {
    network: Arc<HostNetwork>,
    host: HostId,
    pause_frames: u64,
    /// Destinations that wait for the link to become idle.
    blocked: BTreeSet<IpAddr>,
}

impl HostPort {
    /// The port of the host with this address, if the network has one.
    pub fn new(network: Arc<HostNetwork>, address: IpAddr) -> Option<HostPort> {
        let host = network.inner.lock().fabric.host_with_address(address)?;
        Some(HostPort { network, host, pause_frames: 0, blocked: BTreeSet::new() })
    }

    /// Whether the network leads to another host with this address.
    pub fn routes_to(&self, address: IpAddr) -> bool {
        self.network.inner.lock().fabric.host_with_address(address).is_some_and(|host| host != self.host)
    }

    /// Whether the link is idle and the caller knows every paused priority. The switch has no headroom for a frame that
    /// leaves after the pause arrived. If not, the next poll with an idle link unblocks `destination`.
    pub fn can_send(&mut self, destination: IpAddr, known_paused: u8) -> bool {
        let mut inner = self.network.inner.lock();
        let now = self.network.advance_to_now(&mut inner, self.host);
        let is_idle = inner.fabric.link_free_at(self.host) <= now;
        let can_send = is_idle && inner.fabric.paused_priorities(self.host) & !known_paused == 0;
        if !can_send {
            self.blocked.insert(destination);
        }
        can_send
    }

    pub fn send(&self, frame: Frame) {
        let Inner { fabric, sink, .. } = &mut *self.network.inner.lock();
        fabric.send(self.network.now(), self.host, frame, &mut **sink);
    }

    /// Injects a frame from another machine, behind at most `max_queued` bytes of that machine. Returns the frame if
    /// the network has no port for the machine.
    pub fn inject_external(&self, frame: Frame, max_queued: u64) -> Result<(), Frame> {
        let mut inner = self.network.inner.lock();
        if inner.fabric.host_with_address(frame.addressing.source).is_some() {
            return Err(frame);
        }
        let now = self.network.advance_to_now(&mut inner, self.host);
        let Inner { fabric, sink, .. } = &mut *inner;
        fabric.inject_external(now, self.host, frame, max_queued, &mut **sink)
    }

    /// Whether frames of another machine are in flight to the host.
    pub fn has_external_in_flight(&self, peer: IpAddr) -> bool {
        self.network.inner.lock().fabric.has_in_flight(self.host, peer)
    }

    /// Drops the queued frames of a machine that is gone.
    pub fn discard_external(&self, peer: IpAddr) {
        self.network.inner.lock().fabric.drop_peer(self.host, peer);
    }

    /// The rate of every link.
    pub fn line_rate(&self) -> Option<NonZeroU64> {
        self.network.line_rate()
    }

    /// Advances the network to the current time and returns what it has for the host.
    pub fn poll(&mut self) -> PortPoll {
        let mut inner = self.network.inner.lock();
        let now = self.network.advance_to_now(&mut inner, self.host);
        inner.unpolled.remove(&self.host);
        let fabric = &mut inner.fabric;
        let frames = std::iter::from_fn(|| fabric.receive(self.host)).take(MAX_FRAMES_PER_POLL).collect();
        let external_updates = std::iter::from_fn(|| fabric.next_external_update(self.host)).collect();
        let pause_frames = fabric.port_counters(self.host).pauses_received.iter().sum();
        let new_pause_frames = pause_frames - std::mem::replace(&mut self.pause_frames, pause_frames);
        let is_idle = fabric.link_free_at(self.host) <= now;
        let unblocked = if is_idle { std::mem::take(&mut self.blocked) } else { BTreeSet::new() };
        let paused_priorities = fabric.paused_priorities(self.host);
        PortPoll { frames, external_updates, paused_priorities, new_pause_frames, unblocked }
    }

    /// The nanoseconds until the link can send for a blocked destination; `None` without one.
    fn ns_until_unblocked(&self) -> Option<u64> {
        self.blocked.first()?;
        let at = self.network.inner.lock().fabric.link_free_at(self.host);
        Some(at.since(self.network.now()).as_nanos() as u64)
    }

    /// The nanoseconds until the port needs the next poll.
    pub fn next_timeout(&self) -> Option<u64> {
        self.ns_until_next_event().into_iter().chain(self.ns_until_unblocked()).min()
    }

    /// The nanoseconds until the next event in the network; zero if the host has not polled the last one.
    fn ns_until_next_event(&self) -> Option<u64> {
        let inner = self.network.inner.lock();
        if inner.unpolled.contains(&self.host) {
            return Some(0);
        }
        let at = inner.fabric.next_at()?;
        Some(at.since(self.network.now()).as_nanos() as u64)
    }
}
