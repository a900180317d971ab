//! The port of a host: pauses that it honours, and a receiver that may be slow and ask for pauses itself.

use crate::Direction;
use crate::ids::{HostId, LinkId, Node};
use crate::pfc::{PauseGenerator, PauseState, PfcSettings};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::net::IpAddr;
use core::time::Duration;

/// How fast a host takes what arrives, and what it does if that is not fast enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiverSettings {
    /// How fast frames go from the port to the card; none for at once, zero for not at all.
    pub bits_per_second: Option<u64>,
    /// Bytes that wait for the card at most.
    pub buffer: u64,
    /// Pauses the sender before frames are lost; none lets them be lost.
    pub pfc: Option<PfcSettings>,
    /// Priorities for which the port asks for pauses without end, whatever its buffer holds: a broken card.
    pub pause_storm: u8,
    /// How long the port may keep its sender stopped. After that it stops asking, and loses what it cannot
    /// take, until it has room again.
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

/// What the port of a host counted about pauses and its buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostPortCounters {
    /// Pause frames sent, for each priority; those that let the peer go on included.
    pub pauses_sent: [u64; 8],
    /// Pause frames that came, for each priority.
    pub pauses_received: [u64; 8],
    /// How long each priority was stopped, in nanoseconds.
    pub paused_ns: [u64; 8],
    /// Frames that the buffer had no room for.
    pub dropped_frames: u64,
    /// How often the watchdog acted.
    pub watchdog_fired: u64,
}

/// The port of a host. What every frame touches stands together and first.
#[repr(C, align(64))]
pub(crate) struct HostPort {
    /// The only cable, if there is one, and if it leads to a switch.
    pub single_uplink: Option<(LinkId, Direction)>,
    /// Frames that wait for the card.
    pub queue: VecDeque<u32>,
    pub receiver: ReceiverSettings,
    pub address: IpAddr,
    pub links: Vec<(LinkId, Direction)>,
    /// The cables to hosts, and those to switches.
    pub direct_links: BTreeMap<HostId, (LinkId, Direction)>,
    pub uplinks: Vec<(LinkId, Direction)>,
    pub pauses: PauseState,
    pub pause_generator: PauseGenerator,
    /// Bytes that wait for the card, for each priority.
    pub ingress_bytes: [u64; 8],
    pub buffered: u64,
    /// A frame is on its way from the port to the card.
    pub draining: bool,
    /// Priorities for which the watchdog lets nothing be asked.
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

    /// A cable leads from here to a host or a switch.
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
