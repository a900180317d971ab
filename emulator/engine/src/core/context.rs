//! The context that every call to the HCA receives.

use crate::{Event, Instant, Memory};

/// The arguments of every call: time, memory and event callback.
pub struct Context<'a> {
    /// The current time.
    pub now: Instant,
    /// The memory behind memory regions.
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
