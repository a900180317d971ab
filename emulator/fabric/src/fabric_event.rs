//! Events of switches and host ports.

use crate::ids::{LinkId, Node};
use core::fmt;
use core::net::IpAddr;
use softhca_wire::{Bth, Psn, Qpn};

/// Identifies a packet in an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketId {
    /// The sender.
    pub source: IpAddr,
    /// The receiver.
    pub destination: IpAddr,
    /// Destination queue pair and PSN, unless the packet is malformed.
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

/// Why a switch or a host port dropped a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FrameDropReason {
    /// The shared buffer is full.
    BufferFull,
    /// The queue of a lossy priority is full.
    QueueFull,
    /// The sender is paused and exceeded the headroom.
    HeadroomFull,
    /// The PFC watchdog drops frames of a stalled queue.
    Watchdog,
    /// No host has the destination address.
    NoRoute,
    /// The hop limit reached zero.
    HopLimitExceeded,
    /// The frame is a malformed pause frame.
    MalformedPause,
}

impl fmt::Display for FrameDropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FrameDropReason::BufferFull => "buffer full",
            FrameDropReason::QueueFull => "queue full",
            FrameDropReason::HeadroomFull => "headroom full: too small for this link",
            FrameDropReason::Watchdog => "PFC watchdog drops a stalled queue",
            FrameDropReason::NoRoute => "no route to the destination",
            FrameDropReason::HopLimitExceeded => "hop limit exceeded",
            FrameDropReason::MalformedPause => "malformed pause frame",
        })
    }
}

/// Why a pause ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseEndReason {
    /// The peer resumed the priority.
    Resumed,
    /// The pause time expired.
    Expired,
    /// The PFC watchdog ended it.
    WatchdogFired,
}

/// An event of a switch or a host port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named after what they are")]
pub enum FabricEvent {
    /// A switch marked a packet CE because `depth` bytes were queued before it.
    EcnMarked { node: Node, link: LinkId, priority: u8, depth: u64, packet: PacketId },
    /// A frame was dropped.
    FrameDropped { node: Node, link: LinkId, priority: u8, reason: FrameDropReason, packet: PacketId },
    /// A pause frame was sent because `ingress_bytes` of that priority from the link were buffered. Zero
    /// quanta resume the peer.
    PauseSent { node: Node, link: LinkId, priority: u8, quanta: u16, ingress_bytes: u64 },
    /// A pause frame was received; the priority is paused until `until_ns`.
    PauseReceived { node: Node, link: LinkId, priority: u8, quanta: u16, until_ns: u64 },
    /// A priority resumed.
    PauseEnded { node: Node, link: LinkId, priority: u8, reason: PauseEndReason },
    /// The depth of a queue crossed a multiple of the sample step.
    QueueSampled { node: Node, link: LinkId, priority: u8, depth: u64 },
    /// The PFC watchdog acted on a stalled queue, or on a host that kept its sender paused; it dropped
    /// `dropped` frames.
    WatchdogFired { node: Node, link: LinkId, priority: u8, dropped: u64 },
    /// The PFC watchdog restored the queue.
    WatchdogRestored { node: Node, link: LinkId, priority: u8 },
}
