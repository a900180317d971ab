//! An event sink that its owner reads.

use parking_lot::Mutex;
use softhca_engine::Instant;
use softhca_fabric::{EventSink, NetworkEvent};
use std::ops::DerefMut;
use std::sync::Arc;

/// An event sink that its owner can read and change while devices write to it. Every clone is the same sink.
#[derive(Default)]
pub struct SharedSink<S> {
    sink: Arc<Mutex<S>>,
}

impl<S> SharedSink<S> {
    /// Shares a sink.
    pub fn new(sink: S) -> SharedSink<S> {
        SharedSink { sink: Arc::new(Mutex::new(sink)) }
    }

    /// Locks the sink. Devices wait until the lock is dropped, so the holder must not call verbs.
    pub fn lock(&self) -> impl DerefMut<Target = S> + '_ {
        self.sink.lock()
    }

    /// The sink, if this is the last clone.
    pub fn into_inner(self) -> Option<S> {
        Arc::into_inner(self.sink).map(Mutex::into_inner)
    }
}

impl<S> Clone for SharedSink<S> {
    fn clone(&self) -> SharedSink<S> {
        SharedSink { sink: self.sink.clone() }
    }
}

impl<S: EventSink> EventSink for SharedSink<S> {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        self.sink.lock().on_event(now, event);
    }

    fn is_enabled(&self) -> bool {
        self.sink.lock().is_enabled()
    }

    fn flush(&mut self) {
        self.sink.lock().flush();
    }
}
