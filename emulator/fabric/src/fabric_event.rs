//! Facts that switches and the ports of hosts tell: one `Copy` enum, in the past tense.

use crate::{CableId, HostId};
use core::fmt;
use core::net::IpAddr;
use softhca_wire::{Bth, Psn, Qpn};

/// Names a switch of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SwitchId(pub u32);

/// What a cable ends in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Node {
    /// A host.
    Host(HostId),
    /// A switch.
    Switch(SwitchId),
}

impl Node {
    /// The host, if it is one.
    pub const fn host(self) -> Option<HostId> {
        match self {
            Node::Host(host) => Some(host),
            Node::Switch(_) => None,
        }
    }

    /// The switch, if it is one.
    pub const fn switch(self) -> Option<SwitchId> {
        match self {
            Node::Switch(switch) => Some(switch),
            Node::Host(_) => None,
        }
    }
}

impl From<HostId> for Node {
    fn from(host: HostId) -> Node {
        Node::Host(host)
    }
}

impl From<SwitchId> for Node {
    fn from(switch: SwitchId) -> Node {
        Node::Switch(switch)
    }
}

/// What is told of a packet that something happened to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Culprit {
    /// Who sent it.
    pub source: IpAddr,
    /// Whom it is for.
    pub destination: IpAddr,
    /// The queue pair that it is for, and its PSN, unless it is malformed.
    pub packet: Option<(Qpn, Psn)>,
}

impl Culprit {
    pub(crate) fn of(frame: &crate::Frame) -> Culprit {
        Culprit {
            source: frame.envelope.source,
            destination: frame.envelope.destination,
            packet: Bth::parse(&frame.bytes).ok().map(|bth| (bth.destination, bth.psn)),
        }
    }
}

/// Why a frame got lost in a switch or at the port of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LossCause {
    /// The whole buffer was full.
    BufferFull,
    /// A queue of a priority that may lose frames was full.
    QueueFull,
    /// The sender was told to stop, and more came than the headroom takes.
    HeadroomFull,
    /// A watchdog lets nothing into a queue that stood still.
    Watchdog,
    /// Nobody has the destination's address.
    NoRoute,
    /// It passed too many switches.
    HopLimit,
    /// A frame for a MAC to understand that it did not.
    Unreadable,
}

impl fmt::Display for LossCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LossCause::BufferFull => "the buffer is full",
            LossCause::QueueFull => "the queue is full",
            LossCause::HeadroomFull => "the headroom is full: it is too small for this cable",
            LossCause::Watchdog => "the watchdog empties a queue that stood still",
            LossCause::NoRoute => "there is no route to the destination",
            LossCause::HopLimit => "it passed too many switches",
            LossCause::Unreadable => "the pause frame cannot be read",
        })
    }
}

/// How a pause came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseEnd {
    /// The port that had asked for it asked to go on.
    Resumed,
    /// Its time was over.
    Expired,
    /// A watchdog ended it.
    Overruled,
}

/// Something that happened in a switch, or at the port of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named after what they are")]
pub enum FabricEvent {
    /// A packet got a congestion mark because `depth` bytes were waiting before it.
    Marked { switch: SwitchId, cable: CableId, priority: u8, depth: u64, culprit: Culprit },
    /// A frame was lost.
    Lost { at: Node, cable: CableId, priority: u8, cause: LossCause, culprit: Culprit },
    /// A pause frame was sent because `held` bytes of that priority had come over the cable; zero quanta let
    /// the peer go on.
    PauseSent { at: Node, cable: CableId, priority: u8, quanta: u16, held: u64 },
    /// A pause frame came; the priority is stopped until then.
    PauseReceived { at: Node, cable: CableId, priority: u8, quanta: u16, until_ns: u64 },
    /// A priority goes on.
    PauseEnded { at: Node, cable: CableId, priority: u8, how: PauseEnd },
    /// The depth of a queue passed a multiple of the step that the switch was asked to tell.
    QueueSampled { switch: SwitchId, cable: CableId, priority: u8, depth: u64 },
    /// A watchdog acted on a queue that stood still, or on a host that did not let others go on; `lost`
    /// frames were in its way.
    WatchdogFired { at: Node, cable: CableId, priority: u8, lost: u64 },
    /// The watchdog is done: everything is as before.
    WatchdogRestored { at: Node, cable: CableId, priority: u8 },
}
