//! The context that every call to the HCA receives.

use crate::{Event, EventSink, Instant, Memory};

/// The arguments of every call: time, memory and event sink.
pub struct Context<'a> {
    /// The current time.
    pub now: Instant,
    /// The memory behind memory regions.
    pub memory: &'a mut dyn Memory,
    /// Receives all events.
    pub events: &'a mut dyn EventSink,
}

impl Context<'_> {
    #[inline]
    pub(crate) fn emit(&mut self, event: Event) {
        self.events.on_event(self.now, &event);
    }
}
