//! Facts that switches and the ports of hosts tell: one `Copy` enum, in the past tense.

use crate::{HostId, LinkId};
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
pub struct PacketId {
    /// Who sent it.
    pub source: IpAddr,
    /// Whom it is for.
    pub destination: IpAddr,
    /// The queue pair that it is for, and its PSN, unless it is malformed.
    pub bth: Option<(Qpn, Psn)>,
}

impl PacketId {
    pub(crate) fn of(frame: &crate::Frame) -> PacketId {
        PacketId {
            source: frame.addressing.source,
            destination: frame.addressing.destination,
            bth: Bth::parse(&frame.bytes).ok().map(|bth| (bth.destination_qp, bth.psn)),
        }
    }
}

/// Why a frame got lost in a switch or at the port of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FrameDropReason {
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
    HopLimitExceeded,
    /// A frame for a MAC to understand that it did not.
    MalformedPause,
}

impl fmt::Display for FrameDropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FrameDropReason::BufferFull => "the buffer is full",
            FrameDropReason::QueueFull => "the queue is full",
            FrameDropReason::HeadroomFull => "the headroom is full: it is too small for this cable",
            FrameDropReason::Watchdog => "the watchdog empties a queue that stood still",
            FrameDropReason::NoRoute => "there is no route to the destination",
            FrameDropReason::HopLimitExceeded => "it passed too many switches",
            FrameDropReason::MalformedPause => "the pause frame cannot be read",
        })
    }
}

/// How a pause came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseEndReason {
    /// The port that had asked for it asked to go on.
    Resumed,
    /// Its time was over.
    Expired,
    /// A watchdog ended it.
    WatchdogFired,
}

/// Something that happened in a switch, or at the port of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named after what they are")]
pub enum FabricEvent {
    /// A packet got a congestion mark because `depth` bytes were waiting before it.
    EcnMarked { node: Node, link: LinkId, priority: u8, depth: u64, packet: PacketId },
    /// A frame was lost.
    FrameDropped { node: Node, link: LinkId, priority: u8, reason: FrameDropReason, packet: PacketId },
    /// A pause frame was sent because `held` bytes of that priority had come over the cable; zero quanta let
    /// the peer go on.
    PauseSent { node: Node, link: LinkId, priority: u8, quanta: u16, ingress_bytes: u64 },
    /// A pause frame came; the priority is stopped until then.
    PauseReceived { node: Node, link: LinkId, priority: u8, quanta: u16, until_ns: u64 },
    /// A priority goes on.
    PauseEnded { node: Node, link: LinkId, priority: u8, reason: PauseEndReason },
    /// The depth of a queue passed a multiple of the step that the switch was asked to tell.
    QueueSampled { node: Node, link: LinkId, priority: u8, depth: u64 },
    /// A watchdog acted on a queue that stood still, or on a host that did not let others go on; `lost`
    /// frames were in its way.
    WatchdogFired { node: Node, link: LinkId, priority: u8, dropped: u64 },
    /// The watchdog is done: everything is as before.
    WatchdogRestored { node: Node, link: LinkId, priority: u8 },
}
