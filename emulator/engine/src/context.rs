//! The context that every call to the HCA receives.

use crate::{Event, EventSink, Instant, Memory};

/// What a call to the card is given: the time, the memory behind regions, and who hears events.
pub struct Context<'a> {
    /// The time.
    pub now: Instant,
    /// The memory behind regions.
    pub memory: &'a mut dyn Memory,
    /// Hears what happens.
    pub events: &'a mut dyn EventSink,
}

impl Context<'_> {
    #[inline]
    pub(crate) fn emit(&mut self, event: Event) {
        self.events.on_event(self.now, &event);
    }
}
