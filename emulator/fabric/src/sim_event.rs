//! Simulation events.

use crate::{Direction, HostId, LinkId, SwitchId};

/// A scheduled event.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SimEvent {
    /// A frame arrives at the end of a link.
    Arrival { slot: u32, link: LinkId, direction: Direction },
    /// The link of a host can accept a frame.
    HostLinkFree { host: HostId },
    /// An HCA timer may have expired.
    HostTimer { host: HostId },
    /// A link releases reordered frames.
    ReorderTimeout { link: LinkId },
    /// The oldest loopback frame arrives.
    Loopback,
    /// The link of a switch port can accept a frame.
    SwitchLinkFree { switch: SwitchId, port: u16 },
    /// A pause at a switch port may have expired.
    SwitchPauseExpired { switch: SwitchId, port: u16 },
    /// A pause at a host may have expired.
    HostPauseExpired { host: HostId },
    /// A switch refreshes a pause.
    SwitchPauseRefresh { switch: SwitchId, port: u16, priority: u8 },
    /// A host refreshes a pause.
    HostPauseRefresh { host: HostId, priority: u8 },
    /// The PFC watchdog checks a switch queue for a stall or for its restoration.
    SwitchWatchdog { switch: SwitchId, port: u16, priority: u8 },
    /// The PFC watchdog of a host checks the duration of its pause.
    HostWatchdog { host: HostId, priority: u8 },
    /// A slow receiver has processed a frame.
    ReceiverDrain { host: HostId },
}
