//! The context that every call to the HCA receives.

use crate::{Event, Instant, Memory};

/// What a call to the HCA receives: the time, the memory behind regions, and a callback for events.
pub struct Context<'a> {
    /// The time.
    pub now: Instant,
    /// The memory behind regions.
    pub memory: &'a mut dyn Memory,
    /// Receives every event.
    pub events: &'a mut dyn FnMut(Instant, &Event),
}

impl Context<'_> {
    #[inline]
    pub(crate) fn emit(&mut self, event: Event) {
        (self.events)(self.now, &event);
    }
}
