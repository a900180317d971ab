//! Events of switches and host ports.

use crate::ids::{LinkId, Node};
use core::net::IpAddr;
use softhca_wire::{Bth, Psn, Qpn};

/// Identifies a packet in an event.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
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

softhca_wire::named_enum! {
    /// Why a switch or a host port dropped a frame.
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    pub enum FrameDropReason {
        /// The shared buffer is full.
        BufferFull => "buffer full",
        /// The queue of a lossy priority is full.
        QueueFull => "queue full",
        /// The sender is paused and exceeded the headroom.
        HeadroomFull => "headroom full: too small for this link",
        /// The PFC watchdog drops frames of a stalled queue.
        Watchdog => "PFC watchdog drops a stalled queue",
        /// No host has the destination address.
        NoRoute => "no route to the destination",
        /// The hop limit reached zero.
        HopLimitExceeded => "hop limit exceeded",
        /// The frame is a malformed pause frame.
        MalformedPause => "malformed pause frame",
    }
}

/// Why a pause ended.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseEndReason {
    /// The peer resumed the priority.
    Resumed,
    /// The pause time expired.
    Expired,
    /// The PFC watchdog ended it.
    WatchdogFired,
}

/// Passes the declaration of every event of switches and host ports to the macro `$callback`, behind the tokens
/// `$prefix`, in the form of [`hca_events`](softhca_engine::hca_events). Every event also has the node at which it
/// happened, a link and a priority.
#[macro_export]
macro_rules! fabric_events {
    ($callback:ident! { $($prefix:tt)* }) => { $callback! { $($prefix)*
        fabric {
            /// A switch set the ECN mark (CE) of a packet because of the queue in front of it.
            "fabric:ecn_marked" EcnMarked
            [unusual "ECN-marks {packet|packet}: {depth} B queued for link {link}, priority {priority}"] {
                /// Bytes in the queue in front of it.
                depth: u64,
                /// The packet.
                packet: PacketId,
            }
            /// A switch or a host port dropped a frame.
            "fabric:frame_dropped" FrameDropped
            [error "drops {packet|packet} at link {link}, priority {priority}: {trigger}"] {
                /// Why.
                reason: FrameDropReason,
                /// The packet.
                packet: PacketId,
            }
            /// A pause frame was sent.
            "fabric:pause_sent" PauseSent
            [normal "{quanta?pauses priority {priority} on link {link} for {quanta} quanta}{quanta!resumes priority {priority} on link {link}}, {ingress_bytes} B buffered"] {
                /// The duration, in units of 512 bit times; 0 resumes the priority.
                quanta: u16,
                /// Bytes of the priority that arrived over the link and are still buffered.
                ingress_bytes: u64,
            }
            /// A pause frame was received.
            "fabric:pause_received" PauseReceived
            [normal "{quanta?is paused on link {link}, priority {priority}, for {until_ns|until}}{quanta!may resume priority {priority} on link {link}}"] {
                /// The duration, in units of 512 bit times; 0 resumes the priority.
                quanta: u16,
                /// When the pause expires, in nanoseconds since the start.
                until_ns: u64,
            }
            /// A paused priority resumed.
            "fabric:pause_ended" PauseEnded
            [normal "resumes priority {priority} on link {link} ({reason|words})"] {
                /// `resumed`, `expired`, or `watchdog-fired`.
                reason: PauseEndReason,
            }
            /// The depth of a queue passed a multiple of the sampling step of the switch.
            "fabric:queue_sampled" QueueSampled
            [normal "{depth} B queued for link {link}, priority {priority}"] {
                /// Bytes in the queue.
                depth: u64,
            }
            /// A watchdog acted on a queue that was paused for too long, or on a host that paused others for too long.
            "fabric:watchdog_fired" WatchdogFired
            [error "the watchdog dropped {dropped} frames of link {link}, priority {priority}"] {
                /// Frames that it removed from the queue.
                dropped: u64,
            }
            /// A watchdog restored normal operation.
            "fabric:watchdog_restored" WatchdogRestored
            [normal "the watchdog restored link {link}, priority {priority}"] {}
        }
    } };
}

macro_rules! declare_events {
    (fabric {$(
        $(#[doc = $meaning:literal])+
        $name:literal $variant:ident [$emphasis:ident $text:literal] {
            $( $(#[doc = $about:literal])+ $field:ident: $type:ty, )*
        }
    )*}) => {
        /// Something that happened in a switch or at the port of a host.
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs, reason = "every event has a node, a link and a priority")]
        pub enum FabricEvent {$(
            $(#[doc = $meaning])+
            $variant { node: Node, link: LinkId, priority: u8, $( $(#[doc = $about])+ $field: $type, )* },
        )*}

        impl FabricEvent {
            /// The switch or host at which it happened.
            pub const fn node(&self) -> Node {
                match self {$( FabricEvent::$variant { node, .. } => *node, )*}
            }

            /// The switch or host at which it happened, to change it.
            pub const fn node_mut(&mut self) -> &mut Node {
                match self {$( FabricEvent::$variant { node, .. } => node, )*}
            }

            /// The link that it is about.
            pub const fn link_mut(&mut self) -> &mut LinkId {
                match self {$( FabricEvent::$variant { link, .. } => link, )*}
            }
        }
    };
}

fabric_events! { declare_events! {} }
