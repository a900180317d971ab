//! The port of a host: honors PFC pauses, and buffers frames for a receiver that may be slow.

use crate::Direction;
use crate::ids::{HostId, LinkId, Node};
use crate::pfc::{PauseGenerator, PauseState, PfcSettings};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::net::IpAddr;
use core::time::Duration;

/// The speed of a host's receiver and its flow control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiverSettings {
    /// The rate from the port to the HCA; `None` for unlimited, zero for a stalled receiver.
    pub bits_per_second: Option<u64>,
    /// The size of the receive buffer.
    pub buffer: u64,
    /// Pauses the sender before frames are dropped; `None` lets frames drop.
    pub pfc: Option<PfcSettings>,
    /// Bit mask of priorities that the port pauses permanently regardless of its buffer: a PFC storm of a
    /// broken NIC.
    pub pause_storm: u8,
    /// How long the port may pause its sender. After that it stops sending pauses and drops frames that do
    /// not fit, until the buffer has room again.
    pub watchdog: Option<Duration>,
}

impl Default for ReceiverSettings {
    fn default() -> ReceiverSettings {
        ReceiverSettings {
            bits_per_second: None,
            buffer: 512 << 10,
            pfc: Some(PfcSettings { xoff: 128 << 10, xon: 96 << 10, ..PfcSettings::default() }),
            pause_storm: 0,
            watchdog: None,
        }
    }
}

/// PFC and buffer counters of a host's port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostPortCounters {
    /// Pause frames sent per priority, including resumes.
    pub pauses_sent: [u64; 8],
    /// Pause frames received per priority.
    pub pauses_received: [u64; 8],
    /// Paused time per priority in nanoseconds.
    pub paused_ns: [u64; 8],
    /// Frames dropped because the buffer was full.
    pub dropped_frames: u64,
    /// Watchdog actions.
    pub watchdog_fired: u64,
}

/// The port of a host. The fields that every frame touches come first.
#[repr(C, align(64))]
pub(crate) struct HostPort {
    /// The only link, if the host has exactly one and it leads to a switch.
    pub single_uplink: Option<(LinkId, Direction)>,
    /// Frames in the receive buffer.
    pub queue: VecDeque<u32>,
    pub receiver: ReceiverSettings,
    pub address: IpAddr,
    pub links: Vec<(LinkId, Direction)>,
    /// Links to hosts; links to switches follow.
    pub direct_links: BTreeMap<HostId, (LinkId, Direction)>,
    pub uplinks: Vec<(LinkId, Direction)>,
    pub pauses: PauseState,
    pub pause_generator: PauseGenerator,
    /// Buffered bytes per priority.
    pub ingress_bytes: [u64; 8],
    pub buffered: u64,
    /// A frame is in transfer from the port to the HCA.
    pub draining: bool,
    /// Priorities for which the watchdog suppresses pauses.
    pub watchdog_active: u8,
    pub dropped_frames: u64,
    pub watchdog_fired: u64,
}

impl HostPort {
    pub fn new(address: IpAddr) -> HostPort {
        HostPort {
            single_uplink: None,
            address,
            links: Vec::new(),
            direct_links: BTreeMap::new(),
            uplinks: Vec::new(),
            pauses: PauseState::default(),
            receiver: ReceiverSettings::default(),
            pause_generator: PauseGenerator::default(),
            ingress_bytes: [0; 8],
            queue: VecDeque::new(),
            buffered: 0,
            draining: false,
            watchdog_active: 0,
            dropped_frames: 0,
            watchdog_fired: 0,
        }
    }

    /// Adds a link to a host or a switch.
    pub fn connect(&mut self, way: (LinkId, Direction), to: Node) {
        self.links.push(way);
        match to {
            Node::Host(to) => _ = self.direct_links.insert(to, way),
            Node::Switch(_) => self.uplinks.push(way),
        }
        self.single_uplink = match (&*self.links, &*self.uplinks) {
            ([_], [only]) => Some(*only),
            _ => None,
        };
    }

    pub fn counters(&self) -> HostPortCounters {
        HostPortCounters {
            pauses_sent: self.pause_generator.sent(),
            pauses_received: self.pauses.received(),
            paused_ns: self.pauses.total_ns(),
            dropped_frames: self.dropped_frames,
            watchdog_fired: self.watchdog_fired,
        }
    }
}
