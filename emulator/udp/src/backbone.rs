//! The network between the hosts of one process: their frames pass its switches in place of sockets.
//!
//! Whoever drives a host that is plugged in lets the network catch up with the clock, takes what has arrived for
//! the host, and wakes the others for whom something has.

use crate::Waker;
use parking_lot::Mutex;
use softhca_fabric::{BadTopology, Census, Fabric, Frame, HostId, Laid, Line, SwitchSettings, Topology};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;
use thiserror::Error;

/// Frames that a host takes at a time.
const BATCH: usize = 64;

/// Why there is no backbone.
#[derive(Debug, Error)]
pub enum BackboneError {
    /// The topology cannot be built of these hosts.
    #[error("the topology: {0}")]
    Topology(#[from] BadTopology),
    /// The system gives no descriptor.
    #[error("a descriptor to wake hosts with: {0}")]
    Io(#[from] io::Error),
}

/// A network that the hosts of a process share.
pub struct Backbone {
    fabric: Mutex<Fabric>,
    laid: Laid,
    started: Instant,
    wakers: Vec<Waker>,
}

impl Backbone {
    /// Connects hosts with these addresses as a topology says. The seed decides which packets are marked.
    pub fn new(
        seed: u64,
        addresses: &[IpAddr],
        topology: &Topology,
        line: Line,
        settings: SwitchSettings,
    ) -> Result<Arc<Backbone>, BackboneError> {
        let (fabric, laid) = Fabric::new(seed, addresses, topology, line, settings)?;
        let wakers = addresses.iter().map(|_| Waker::new()).collect::<io::Result<_>>()?;
        Ok(Arc::new(Backbone { fabric: Mutex::new(fabric), laid, started: Instant::now(), wakers }))
    }

    /// The descriptor that becomes readable when something arrives for a host.
    pub fn bell(&self, address: IpAddr) -> Option<BorrowedFd<'_>> {
        let host = self.fabric.lock().host_at(address)?;
        Some(self.wakers[host.0 as usize].as_fd())
    }

    /// The switches and cables.
    pub fn laid(&self) -> &Laid {
        &self.laid
    }

    /// Calls `act` with the network, to ask it something.
    pub fn ask<R>(&self, act: impl FnOnce(&Fabric) -> R) -> R {
        act(&self.fabric.lock())
    }

    /// How many frames went where.
    pub fn census(&self) -> Census {
        self.fabric.lock().census()
    }

    fn now(&self) -> softhca_engine::Instant {
        softhca_engine::Instant::from_nanos(self.started.elapsed().as_nanos() as u64)
    }
}

/// What a host finds when it looks.
pub(crate) struct Glance {
    pub frames: Vec<Frame>,
    /// Priorities that it may not send.
    pub paused: u8,
    /// Its line takes a frame.
    pub is_free: bool,
}

/// A host's end of a backbone.
pub(crate) struct Plug {
    backbone: Arc<Backbone>,
    host: HostId,
}

impl Plug {
    /// The end of the host with this address, if it has one.
    pub fn new(backbone: Arc<Backbone>, address: IpAddr) -> Option<Plug> {
        let host = backbone.fabric.lock().host_at(address)?;
        Some(Plug { backbone, host })
    }

    /// Whether the network leads there.
    pub fn leads_to(&self, address: IpAddr) -> bool {
        self.backbone.fabric.lock().host_at(address).is_some_and(|host| host != self.host)
    }

    /// Whether the line takes a frame now.
    pub fn is_free(&self) -> bool {
        self.backbone.fabric.lock().free_at(self.host) <= self.backbone.now()
    }

    pub fn send(&self, frame: Frame) {
        self.backbone.fabric.lock().send(self.backbone.now(), self.host, frame, &mut ());
    }

    /// Lets the network catch up, and takes what is there for the host.
    pub fn look(&self) -> Glance {
        let mut fabric = self.backbone.fabric.lock();
        let now = self.backbone.now();
        fabric.advance(now, &mut ());
        while let Some(host) = fabric.woken() {
            if host != self.host {
                self.backbone.wakers[host.0 as usize].wake();
            }
        }
        let frames = std::iter::from_fn(|| fabric.take(self.host)).take(BATCH).collect();
        Glance { frames, paused: fabric.paused(self.host), is_free: fabric.free_at(self.host) <= now }
    }

    /// How long until the line takes a frame, in nanoseconds.
    pub fn free_in(&self) -> u64 {
        let at = self.backbone.fabric.lock().free_at(self.host);
        at.since(self.backbone.now()).as_nanos() as u64
    }

    /// How long until something happens in the network, in nanoseconds.
    pub fn next_in(&self) -> Option<u64> {
        let at = self.backbone.fabric.lock().next_at()?;
        Some(at.since(self.backbone.now()).as_nanos() as u64)
    }
}
