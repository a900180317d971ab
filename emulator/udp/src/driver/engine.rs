//! The HCA with the memory and the event sink that every call of it needs.

use softhca_engine::{Context, Event, Hca, Instant, MemoryObjects};
use softhca_fabric::{Direction, EventSink, HostId, LinkId, NetworkEvent, Stage};
use softhca_wire::{AddressHeaders, Pfc};

/// The only host and the only link of a driver, as events number them.
const HOST: HostId = HostId(0);
const LINK: LinkId = LinkId(0);

pub(super) struct Engine {
    pub hca: Hca,
    pub memory: MemoryObjects,
    pub sink: Box<dyn EventSink + Send>,
    /// Whether somebody listens to the events of packets, since the last [`Engine::observe`].
    pub is_observed: bool,
}

impl Engine {
    pub fn new(hca: Hca, sink: Box<dyn EventSink + Send>) -> Engine {
        Engine { hca, memory: MemoryObjects::default(), sink, is_observed: false }
    }

    /// Looks whether somebody listens: once for all packets of a poll.
    pub fn observe(&mut self) {
        self.is_observed = self.sink.is_enabled();
        self.hca.set_observed(self.is_observed);
    }

    /// Calls the HCA at `now`.
    #[inline]
    pub fn call<R>(&mut self, now: Instant, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R {
        let sink = &mut *self.sink;
        let mut events = |now, event: &Event| sink.on_event(now, &NetworkEvent::Hca { host: HOST, event });
        act(&mut self.hca, &mut Context { now, memory: &mut self.memory, events: &mut events })
    }
}

/// The event of a packet that left the port (`Admitted`) or entered it (`Delivered`).
pub(super) fn frame_event<'a>(
    stage: Stage,
    addressing: &'a AddressHeaders,
    packet: &'a [u8],
) -> NetworkEvent<'a> {
    NetworkEvent::Frame { link: LINK, direction: direction(stage), stage, addressing, packet }
}

pub(super) fn pause_event(stage: Stage, pause: &Pfc) -> NetworkEvent<'_> {
    NetworkEvent::PauseFrame { link: LINK, direction: direction(stage), stage, pause }
}

fn direction(stage: Stage) -> Direction {
    if stage == Stage::Delivered { Direction::Backward } else { Direction::Forward }
}
