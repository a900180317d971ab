//! The HCA with the memory and the event sink that every call of it needs.

use crate::DriverSink;
use softhca_engine::{Context, Event, Hca, Instant, Memory};

pub(super) struct Engine<M> {
    pub hca: Hca,
    pub memory: M,
    pub sink: Box<dyn DriverSink>,
}

struct EngineEvents<'a>(&'a mut dyn DriverSink);

impl softhca_engine::EventSink for EngineEvents<'_> {
    #[inline]
    fn on_event(&mut self, now: Instant, event: &Event) {
        self.0.on_engine_event(now, event);
    }
}

impl<M: Memory> Engine<M> {
    /// Calls the HCA at `now`.
    #[inline]
    pub fn call<R>(&mut self, now: Instant, act: impl FnOnce(&mut Hca, &mut Context<'_>) -> R) -> R {
        let mut events = EngineEvents(&mut *self.sink);
        act(&mut self.hca, &mut Context { now, memory: &mut self.memory, events: &mut events })
    }
}
