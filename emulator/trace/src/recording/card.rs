//! The events of a card in real time, on their way to a recording.

use super::Recording;
use crate::NameTable;
use softhca_engine::Instant;
use softhca_fabric::{EventSink, HostId, IdOffsets, NetworkEvent, OwnedEvent};
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Passes the events of a card, or of its network, to a recording that others share. It is an event sink.
#[derive(Debug)]
pub struct CardRecorder<W: Write> {
    recording: Arc<Mutex<Recording<W>>>,
    offsets: IdOffsets,
    /// The events are those of a network. Its packets are recorded where they leave a card.
    is_network: bool,
    /// The start of the recording's clock.
    started: std::time::Instant,
}

impl<W: Write> CardRecorder<W> {
    /// A sink for a card with these numbers in the recording.
    pub const fn new(
        recording: Arc<Mutex<Recording<W>>>,
        offsets: IdOffsets,
        started: std::time::Instant,
    ) -> CardRecorder<W> {
        CardRecorder { recording, offsets, is_network: false, started }
    }

    /// A sink of the same recording for the network of the card. The link of the card is before those of the network.
    pub fn of_network(&self) -> CardRecorder<W> {
        let mut network = self.clone();
        network.offsets.links += 1;
        network.is_network = true;
        network
    }

    /// The numbers of the card or network.
    pub const fn offsets(&self) -> IdOffsets {
        self.offsets
    }

    fn now(&self) -> Instant {
        Instant::from_nanos(self.started.elapsed().as_nanos() as u64)
    }

    /// Locks the recording.
    pub fn lock(&self) -> MutexGuard<'_, Recording<W>> {
        self.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<W: Write> Clone for CardRecorder<W> {
    fn clone(&self) -> CardRecorder<W> {
        let CardRecorder { recording, offsets, is_network, started } = self;
        let (recording, offsets, is_network, started) = (recording.clone(), *offsets, *is_network, *started);
        CardRecorder { recording, offsets, is_network, started }
    }
}

impl<W: Write> EventSink for CardRecorder<W> {
    fn on_event(&mut self, at: Instant, event: &NetworkEvent<'_>) {
        if let NetworkEvent::PortAttached { port, address, link, ends } = *event {
            let name =
                |names: &mut NameTable| names.add_external_port((port, address), (link, ends), self.offsets);
            self.lock().name(name);
        }
        let is_elsewhere = self.is_network && matches!(event, NetworkEvent::Frame { .. });
        let Some(mut event) = OwnedEvent::new(event).filter(|_| !is_elsewhere) else { return };
        let mut recording = self.lock();
        // Taken under the lock: the order of events is the order of their times.
        let now = self.now();
        event.move_to(self.offsets, at, now);
        recording.on_event(now, &event.as_event());
    }

    fn flush(&mut self) {
        let mut recording = self.lock();
        recording.end_turn(self.offsets.host(HostId(0)));
        // A failed write ends the recording. It must not stop the card.
        let _ = recording.flush(self.now());
    }
}

impl<W: Write> Drop for CardRecorder<W> {
    fn drop(&mut self) {
        self.flush();
    }
}
