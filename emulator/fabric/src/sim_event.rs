//! The events of the event queue.

use crate::{Direction, HostId, LinkId, SwitchId};

/// Something that will happen.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SimEvent {
    /// A frame comes out of a cable.
    Arrival { slot: u32, link: LinkId, direction: Direction },
    /// The line of a host is free.
    HostLinkFree { host: HostId },
    /// A timer of a card may have run out.
    HostTimer { host: HostId },
    /// A cable held frames back for long enough.
    ReorderTimeout { link: LinkId },
    /// The oldest frame that a host sent to itself comes back.
    Loopback,
    /// The line of a switch's port is free.
    SwitchLinkFree { switch: SwitchId, port: u16 },
    /// A pause of a switch's port may be over.
    SwitchPauseExpired { switch: SwitchId, port: u16 },
    /// A pause of a host may be over.
    HostPauseExpired { host: HostId },
    /// A pause that a switch asked for is to be asked for again.
    SwitchPauseRefresh { switch: SwitchId, port: u16, priority: u8 },
    /// A pause that a host asked for is to be asked for again.
    HostPauseRefresh { host: HostId, priority: u8 },
    /// A queue may have stood still for too long, or its guard may be lifted.
    SwitchWatchdog { switch: SwitchId, port: u16, priority: u8 },
    /// A host may have asked for pauses for too long.
    HostWatchdog { host: HostId, priority: u8 },
    /// A slow receiver has done with a frame.
    ReceiverDrain { host: HostId },
}
