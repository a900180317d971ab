//! The memory that a daemon shares with a process which executes the transport itself. It holds the counters of the
//! HCA, the last ACK of each queue pair, the connections, and a ring of events while the daemon records.
//!
//! Every event has a time of CLOCK_MONOTONIC, by which the daemon merges the events of all processes. While a process
//! writes an event, the page says so: the daemon then knows which times no further event can have.

use crate::system::monotonic_nanos;
use softhca_control::{decode, encode};
use softhca_engine::{Counters, Instant};
use softhca_fabric::{EventSink, NetworkEvent, OwnedEvent};
use softhca_queue::{
    AckRecords, CmRecords, MapMode, PacketChunk, PacketConsumer, PacketProducer, PacketRing, RecordedAck,
    RecordedConnection, SharedMemory, SharedWords,
};
use softhca_types::CorruptRing;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

/// The word that the daemon sets while it records.
const RECORDED: usize = 0;
/// The word that the daemon sets while queue pairs wait for roles or have them.
const ROLES: usize = 1;
/// The word that the process sets while it writes an event: [`WRITING_SOON`], then the time of the event.
const WRITING: usize = 8;
const WRITING_SOON: u64 = 1;
/// The word in which the process counts the changes of fault rules that it has applied.
const APPLIED: usize = 9;
/// The words of the counters.
const COUNTERS: usize = 16;
const MAX_COUNTERS: usize = 112;
/// The word at which the ring begins.
const RING: usize = COUNTERS + MAX_COUNTERS;
/// The bytes of the ring. Only those in use occupy memory.
const CAPACITY: usize = 4 << 20;
/// The most bytes of an event: a packet with its addressing.
const MAX_EVENT: usize = 16 << 10;
/// The word at which the ACKs of queue pairs begin. Only those in use occupy memory.
const ACKS: usize = RING + PacketRing::words(CAPACITY);
/// The word at which the connections begin. Only those in use occupy memory.
const CONNECTIONS: usize = ACKS + AckRecords::WORDS;
/// How long a process with a full ring waits before it looks again.
const FULL_RING_DELAY: Duration = Duration::from_micros(100);

const fn page_bytes() -> usize {
    (CONNECTIONS + CmRecords::WORDS) * 8
}

fn ring(memory: &Arc<SharedMemory>) -> PacketRing {
    let words = memory.words(RING, PacketRing::words(CAPACITY));
    PacketRing::new(words, Arc::new(memory.block()), RING * 8, CAPACITY)
}

/// The daemon's side of a page.
pub struct SlotPage {
    words: SharedWords,
    acks: AckRecords,
    connections: CmRecords,
    events: PacketConsumer,
    /// The process has destroyed its ring: nothing more of it is recorded.
    is_corrupt: bool,
    buffer: Box<[u8]>,
}

impl SlotPage {
    /// Creates a page. Its descriptor is for the process.
    pub fn create() -> io::Result<(SlotPage, OwnedFd)> {
        let memory = Arc::new(SharedMemory::create("softhca-slot", page_bytes(), MapMode::ReadWrite)?);
        let descriptor = memory.take_descriptor().ok_or(io::ErrorKind::NotFound)?;
        let (words, events) = (memory.words(0, RING), PacketConsumer::new(ring(&memory)));
        let buffer = vec![0; MAX_EVENT].into();
        let acks = AckRecords::new(memory.words(ACKS, AckRecords::WORDS));
        let connections = CmRecords::new(memory.words(CONNECTIONS, CmRecords::WORDS));
        Ok((SlotPage { words, acks, connections, events, is_corrupt: false, buffer }, descriptor))
    }

    /// The state that needs no lock.
    pub fn state(&self) -> SlotState {
        SlotState { words: self.words.clone() }
    }

    /// The last ACK of each connection of the process.
    pub fn acks(&self) -> impl Iterator<Item = RecordedAck> {
        self.acks.iter()
    }

    /// The connections of the process whose peers wait for a message.
    pub fn connections(&self) -> impl Iterator<Item = RecordedConnection> {
        self.connections.iter()
    }

    /// Starts or ends the recording of the process.
    pub fn set_recorded(&self, is_recorded: bool) {
        self.words[RECORDED].store((is_recorded && !self.is_corrupt).into(), Ordering::SeqCst);
    }

    /// The counters of the process's HCA.
    pub fn counters(&self) -> Counters {
        let count = Counters::DESCRIPTIONS.len();
        Counters::from_values(
            (COUNTERS..COUNTERS + count).map(|word| self.words[word].load(Ordering::Relaxed)),
        )
    }

    /// The earliest time that a further event can have. `None` if that is not known yet.
    pub fn next_event_time(&self, now: u64) -> Option<u64> {
        fence(Ordering::SeqCst);
        match self.words[WRITING].load(Ordering::SeqCst) {
            0 => Some(now),
            WRITING_SOON => None,
            time => Some(time),
        }
    }

    /// Gives every event in the ring to `act`, with its time and the time of the driver. The content of the ring is not
    /// trusted: a corrupt one is reported once, and ends the recording of the process.
    pub fn drain(&mut self, mut act: impl FnMut(u64, Instant, OwnedEvent)) -> Result<(), CorruptRing> {
        while !self.is_corrupt {
            let popped = self.events.pop(&mut self.buffer).inspect_err(|_| {
                self.is_corrupt = true;
                self.words[RECORDED].store(0, Ordering::SeqCst);
            })?;
            let Some(PacketChunk { length, .. }) = popped else { break };
            if let Ok((time, at, event)) = decode(&self.buffer[..length]) {
                act(time, at, event);
            }
        }
        Ok(())
    }
}

/// The state in a page that the daemon and the process read and write without a lock.
#[derive(Clone)]
pub struct SlotState {
    words: SharedWords,
}

impl SlotState {
    /// Says whether queue pairs wait for roles or have them.
    pub fn set_has_roles(&self, has_roles: bool) {
        self.words[ROLES].store(has_roles.into(), Ordering::SeqCst);
    }

    /// Whether queue pairs wait for roles or have them.
    pub fn has_roles(&self) -> bool {
        self.words[ROLES].load(Ordering::SeqCst) != 0
    }

    /// The process has applied a change of the fault rules.
    pub fn count_applied(&self) {
        self.words[APPLIED].fetch_add(1, Ordering::Release);
    }

    /// How many changes of the fault rules the process has applied.
    pub fn applied(&self) -> u64 {
        self.words[APPLIED].load(Ordering::Acquire)
    }

    /// Makes counters visible to the daemon.
    pub fn publish(&self, counters: &Counters) {
        for (word, (_, value)) in (COUNTERS..COUNTERS + MAX_COUNTERS).zip(counters.iter()) {
            self.words[word].store(value, Ordering::Relaxed);
        }
    }
}

/// The process's side of a page: writes events while the daemon records them, and passes them on.
pub struct SlotRecorder {
    words: SharedWords,
    events: PacketProducer,
    /// The daemon is gone.
    is_abandoned: Arc<AtomicBool>,
    forward_to: Box<dyn EventSink + Send>,
}

impl SlotRecorder {
    /// The process's side of a page, until `is_abandoned`.
    pub fn adopt(
        page: OwnedFd,
        is_abandoned: Arc<AtomicBool>,
        forward_to: Box<dyn EventSink + Send>,
    ) -> io::Result<(SlotRecorder, SlotState, AckRecords, CmRecords)> {
        let memory = Arc::new(SharedMemory::adopt(page, page_bytes(), MapMode::ReadWrite)?);
        let words = memory.words(0, RING);
        let events = PacketProducer::new(ring(&memory));
        let state = SlotState { words: words.clone() };
        let acks = AckRecords::new(memory.words(ACKS, AckRecords::WORDS));
        let connections = CmRecords::new(memory.words(CONNECTIONS, CmRecords::WORDS));
        Ok((SlotRecorder { words, events, is_abandoned, forward_to }, state, acks, connections))
    }

    #[cold]
    fn record(&mut self, at: Instant, event: &OwnedEvent) {
        self.words[WRITING].store(WRITING_SOON, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let time = monotonic_nanos();
        self.words[WRITING].store(time, Ordering::SeqCst);
        let bytes = encode(&(time, at, event));
        let chunk = PacketChunk { length: bytes.len(), segment_size: 1, traffic_class: 0, address: 0 };
        // A recording is complete: the process waits until the daemon has made room.
        while !self.events.push(chunk, &bytes)
            && self.is_recorded()
            && !self.is_abandoned.load(Ordering::Relaxed)
        {
            std::thread::sleep(FULL_RING_DELAY);
        }
        self.words[WRITING].store(0, Ordering::Release);
    }

    fn is_recorded(&self) -> bool {
        self.words[RECORDED].load(Ordering::Relaxed) != 0
    }
}

impl EventSink for SlotRecorder {
    #[inline]
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        if self.is_recorded()
            && let Some(event) = OwnedEvent::new(event)
        {
            self.record(now, &event);
        }
        self.forward_to.on_event(now, event);
    }

    fn is_enabled(&self) -> bool {
        self.is_recorded() || self.forward_to.is_enabled()
    }

    fn flush(&mut self) {
        self.forward_to.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use softhca_engine::{CqId, Event};
    use softhca_fabric::HostId;

    fn page() -> (SlotPage, SlotRecorder, SlotState) {
        let (page, descriptor) = SlotPage::create().unwrap();
        let (recorder, counters, ..) = SlotRecorder::adopt(descriptor, Arc::default(), Box::new(())).unwrap();
        (page, recorder, counters)
    }

    fn notified(number: u32) -> Event {
        Event::CompletionNotified { cq: CqId(number) }
    }

    fn emit(recorder: &mut SlotRecorder, event: &Event) {
        recorder.on_event(Instant::from_nanos(7), &NetworkEvent::Hca { host: HostId(0), event });
    }

    #[test]
    fn events_are_written_while_they_are_recorded() {
        let (mut page, mut recorder, _) = page();
        emit(&mut recorder, &notified(1));
        page.set_recorded(true);
        (2..5).for_each(|number| emit(&mut recorder, &notified(number)));
        page.set_recorded(false);
        emit(&mut recorder, &notified(5));
        let (mut last, mut found) = (0, Vec::new());
        page.drain(|time, at, event| {
            assert!(last <= time && at == Instant::from_nanos(7));
            last = time;
            let OwnedEvent::Hca { event, .. } = event else { panic!("an event of the HCA") };
            found.push(event);
        })
        .unwrap();
        assert_eq!(found, [2, 3, 4].map(notified));
        assert_eq!(page.next_event_time(last + 1), Some(last + 1));
    }

    #[test]
    fn a_full_ring_loses_nothing() {
        let (mut page, mut recorder, _) = page();
        page.set_recorded(true);
        const EVENTS: u32 = 400_000;
        let writer = std::thread::spawn(move || {
            (0..EVENTS).for_each(|number| emit(&mut recorder, &notified(number)));
        });
        let mut expected = 0;
        while expected < EVENTS {
            page.drain(|_, _, event| {
                let OwnedEvent::Hca { event, .. } = event else { panic!("an event of the HCA") };
                assert_eq!(event, notified(expected));
                expected += 1;
            })
            .unwrap();
        }
        writer.join().unwrap();
    }

    #[test]
    fn a_corrupt_ring_ends_the_recording_of_its_process() {
        let (mut page, descriptor) = SlotPage::create().unwrap();
        let memory = SharedMemory::adopt(descriptor.try_clone().unwrap(), page_bytes(), MapMode::ReadWrite);
        let (mut recorder, ..) = SlotRecorder::adopt(descriptor, Arc::default(), Box::new(())).unwrap();
        page.set_recorded(true);
        Arc::new(memory.unwrap()).words(RING, 1)[0].store(u64::MAX, Ordering::Relaxed);
        assert!(page.drain(|_, _, _| ()).is_err());
        assert!(page.drain(|_, _, _| ()).is_ok(), "reported once");
        page.set_recorded(true);
        // Without a reader, a full ring would make the process wait.
        (0..400_000).for_each(|number| emit(&mut recorder, &notified(number)));
    }

    #[test]
    fn the_daemon_reads_the_counters() {
        let (page, _, counters) = page();
        let published = Counters::from_values(1..);
        counters.publish(&published);
        assert_eq!(page.counters(), published);
        assert!(Counters::DESCRIPTIONS.len() <= MAX_COUNTERS);
    }
}
