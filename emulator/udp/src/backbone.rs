//! The network between the hosts of one process: their frames pass its switches in place of sockets.
//!
//! Whoever drives a host that is plugged in lets the network catch up with the clock, takes what has arrived for
//! the host, and wakes the others for whom something has. What comes from other machines enters it too, each over a
//! line of its own, so that its switches queue, mark and pause them as they do the hosts of the process.

use crate::Waker;
use parking_lot::Mutex;
use softhca_fabric::{
    BadTopology, Census, Fabric, Frame, HostId, Laid, Line, Observer, Origin, OutsideNews, Receiver,
    SwitchSettings, Topology,
};
use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::num::NonZeroU64;
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
    inner: Mutex<Inner>,
    laid: Laid,
    line: Line,
    started: Instant,
    wakers: Vec<Waker>,
}

struct Inner {
    fabric: Fabric,
    observer: Box<dyn Observer + Send>,
    /// Hosts that let something happen for themselves and did not look since: nobody else wakes them.
    unseen: BTreeSet<HostId>,
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
        Backbone::observed(seed, addresses, topology, line, settings, Box::new(()))
    }

    /// The same, and shows everything that happens to `observer`, while nothing else can happen in the network.
    pub fn observed(
        seed: u64,
        addresses: &[IpAddr],
        topology: &Topology,
        line: Line,
        settings: SwitchSettings,
        observer: Box<dyn Observer + Send>,
    ) -> Result<Arc<Backbone>, BackboneError> {
        let (fabric, laid) = Fabric::new(seed, addresses, topology, line, settings)?;
        let wakers = addresses.iter().map(|_| Waker::new()).collect::<io::Result<_>>()?;
        let inner = Mutex::new(Inner { fabric, observer, unseen: BTreeSet::new() });
        Ok(Arc::new(Backbone { inner, laid, line, started: Instant::now(), wakers }))
    }

    /// Changes how fast the port of a host takes what arrives. False if the network has no such host.
    pub fn set_receiver(&self, address: IpAddr, receiver: Receiver) -> bool {
        let Inner { fabric, observer, .. } = &mut *self.inner.lock();
        let Some(host) = fabric.host_at(address) else { return false };
        fabric.set_receiver(self.now(), host, receiver, &mut **observer);
        true
    }

    /// The rate of every cable.
    pub(crate) fn line_rate(&self) -> Option<NonZeroU64> {
        self.line.bits_per_second
    }

    /// Lets everything happen that was to happen by now, and wakes the hosts that have something to look at.
    fn catch_up(&self, inner: &mut Inner, except: HostId) -> softhca_engine::Instant {
        let now = self.now();
        inner.fabric.advance(now, &mut *inner.observer);
        while let Some(host) = inner.fabric.woken() {
            if host == except {
                inner.unseen.insert(host);
            } else {
                self.wakers[host.0 as usize].wake();
            }
        }
        now
    }

    /// The descriptor that becomes readable when something arrives for a host.
    pub fn bell(&self, address: IpAddr) -> Option<BorrowedFd<'_>> {
        let host = self.inner.lock().fabric.host_at(address)?;
        Some(self.wakers[host.0 as usize].as_fd())
    }

    /// The switches and cables.
    pub fn laid(&self) -> &Laid {
        &self.laid
    }

    /// Calls `act` with the network, to ask it something.
    pub fn ask<R>(&self, act: impl FnOnce(&Fabric) -> R) -> R {
        act(&self.inner.lock().fabric)
    }

    /// How many frames went where.
    pub fn census(&self) -> Census {
        self.inner.lock().fabric.census()
    }

    fn now(&self) -> softhca_engine::Instant {
        softhca_engine::Instant::from_nanos(self.started.elapsed().as_nanos() as u64)
    }
}

/// What a host finds when it looks.
pub(crate) struct Glance {
    pub frames: Vec<(Frame, Origin)>,
    /// What changed at the lines of other machines.
    pub news: Vec<OutsideNews>,
    /// Priorities that it may not send.
    pub paused: u8,
    /// Pause frames that came so far.
    pub pause_frames: u64,
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
        let host = backbone.inner.lock().fabric.host_at(address)?;
        Some(Plug { backbone, host })
    }

    /// Whether the network leads there.
    pub fn leads_to(&self, address: IpAddr) -> bool {
        self.backbone.inner.lock().fabric.host_at(address).is_some_and(|host| host != self.host)
    }

    /// Whether the line takes a frame now, and whoever asks knows what is paused by now: a frame that leaves after
    /// its pause came would be one that no headroom was kept for.
    pub fn is_free(&self, known: u8) -> bool {
        let mut inner = self.backbone.inner.lock();
        let now = self.backbone.catch_up(&mut inner, self.host);
        inner.fabric.free_at(self.host) <= now && inner.fabric.paused(self.host) & !known == 0
    }

    pub fn send(&self, frame: Frame) {
        let Inner { fabric, observer, .. } = &mut *self.backbone.inner.lock();
        fabric.send(self.backbone.now(), self.host, frame, &mut **observer);
    }

    /// Takes a frame that came from another machine, behind at most `most` bytes of the same one. Gives it back if the
    /// network has no line for that machine.
    pub fn enter(&self, frame: Frame, most: u64) -> Result<(), Frame> {
        let mut inner = self.backbone.inner.lock();
        if inner.fabric.host_at(frame.envelope.source).is_some() {
            return Err(frame);
        }
        let now = self.backbone.catch_up(&mut inner, self.host);
        let Inner { fabric, observer, .. } = &mut *inner;
        fabric.enter(now, self.host, frame, most, &mut **observer)
    }

    /// Whether frames of another machine are on their way to the host.
    pub fn carries(&self, peer: IpAddr) -> bool {
        self.backbone.inner.lock().fabric.carries(self.host, peer)
    }

    /// Drops what waits of another machine that is gone.
    pub fn forget(&self, peer: IpAddr) {
        self.backbone.inner.lock().fabric.forget(self.host, peer);
    }

    /// The rate of every line.
    pub fn line_rate(&self) -> Option<NonZeroU64> {
        self.backbone.line_rate()
    }

    /// Lets the network catch up, and takes what is there for the host.
    pub fn look(&self) -> Glance {
        let mut inner = self.backbone.inner.lock();
        let now = self.backbone.catch_up(&mut inner, self.host);
        inner.unseen.remove(&self.host);
        let fabric = &mut inner.fabric;
        let frames = std::iter::from_fn(|| fabric.take(self.host)).take(BATCH).collect();
        let news = std::iter::from_fn(|| fabric.news(self.host)).collect();
        let pause_frames = fabric.port_counters(self.host).pauses_received.iter().sum();
        let is_free = fabric.free_at(self.host) <= now;
        Glance { frames, news, paused: fabric.paused(self.host), pause_frames, is_free }
    }

    /// How long until the line takes a frame, in nanoseconds.
    pub fn free_in(&self) -> u64 {
        let at = self.backbone.inner.lock().fabric.free_at(self.host);
        at.since(self.backbone.now()).as_nanos() as u64
    }

    /// How long until something happens in the network, in nanoseconds; nothing if something has that the host did not
    /// look at.
    pub fn next_in(&self) -> Option<u64> {
        let inner = self.backbone.inner.lock();
        if inner.unseen.contains(&self.host) {
            return Some(0);
        }
        let at = inner.fabric.next_at()?;
        Some(at.since(self.backbone.now()).as_nanos() as u64)
    }
}
