//! Captures and event logs of the hosts of a daemon.

use crate::async_event_watchers::AsyncEventWatchers;
use crate::command_error::CommandError;
use crate::messages::report;
use crate::record_writer::{RecordOutput, RecordWriter};
use parking_lot::Mutex;
use softhca_control::Notification;
use softhca_engine::{Counters, Event, Instant};
use softhca_fabric::{EventSink, HostId, IdOffsets, LinkId, NetworkEvent, Node, OwnedEvent};
use softhca_queue::RecordedConnection;
use softhca_trace::{CapturePoints, NameTable, Recording};
use softhca_udp::{SlotPage, monotonic_nanos};
use softhca_wire::cm::CommunicationId;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The most recordings of one process, and of all processes. Every event is formatted once per recording.
const MAX_PER_PROCESS: usize = 4;
const MAX_RECORDINGS: usize = 64;

/// How often recordings are flushed, and the events of processes that execute the transport themselves are read.
const DRAIN_INTERVAL: Duration = Duration::from_millis(2);
/// The most time that events wait for earlier ones of a process that is stopped while it writes one.
const MAX_MERGE_DELAY: u64 = 1_000_000_000;

/// The files that recordings are written to.
#[derive(Default)]
pub(crate) struct RecordingFiles {
    pub capture: Option<File>,
    pub log: Option<File>,
    /// A stream of events for a process.
    pub events: Option<File>,
}

/// A capture, an event log or a stream of events of all hosts.
struct HostRecording {
    /// The session that started it; zero for the daemon.
    owner: u64,
    /// For messages.
    kind: &'static str,
    recording: Recording<RecordWriter>,
    output: RecordOutput,
    write_error: Option<io::Error>,
}

/// Counts a recording of a process until its file is closed.
struct RecordingGuard {
    counts: Arc<Mutex<BTreeMap<u32, usize>>>,
    pid: u32,
}

impl Drop for RecordingGuard {
    fn drop(&mut self) {
        let mut counts = self.counts.lock();
        if let Some(count) = counts.get_mut(&self.pid) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.pid);
            }
        }
    }
}

impl HostRecording {
    fn start(
        owner: u64,
        kind: &'static str,
        writer: RecordWriter,
        start: impl FnOnce(RecordWriter) -> io::Result<Recording<RecordWriter>>,
    ) -> io::Result<HostRecording> {
        let output = writer.output();
        Ok(HostRecording { owner, kind, recording: start(writer)?, output, write_error: None })
    }

    /// Reports and keeps the first write error, which ends the recording.
    fn check_write(&mut self, written: io::Result<()>) {
        if self.write_error.is_none()
            && let Err(error) = written
        {
            report!("the recording of {} ends early: {error}", self.kind);
            self.write_error = Some(error);
        }
    }

    fn flush(&mut self, now: Instant) {
        if self.write_error.is_none() {
            let written = self.recording.flush(now);
            self.check_write(written);
        }
    }

    /// Writes the rest and closes the file.
    fn finish(mut self) -> io::Result<()> {
        let written = self.recording.finish();
        self.check_write(written);
        let HostRecording { recording, output, write_error, .. } = self;
        // Without a writer, the output ends.
        drop(recording);
        write_error.map_or(Ok(()), Err).and(output.finish())
    }
}

/// An event that waits for earlier ones of other processes.
struct PendingEvent {
    /// In CLOCK_MONOTONIC.
    time: u64,
    offsets: IdOffsets,
    /// The process that executes the transport itself; `None` for the daemon's HCA.
    pid: Option<u32>,
    /// The time of the clock of the driver or network.
    at: Instant,
    event: OwnedEvent,
}

/// The events of a process are those of its card, whatever numbers the process writes.
fn assign_to_card(event: &mut OwnedEvent) {
    match event {
        OwnedEvent::Hca { host, .. } => *host = HostId(0),
        OwnedEvent::Frame { link, .. }
        | OwnedEvent::PauseFrame { link, .. }
        | OwnedEvent::Fault { link, .. } => *link = LinkId(0),
        OwnedEvent::Fabric(event) => {
            *event.node_mut() = Node::Host(HostId(0));
            *event.link_mut() = LinkId(0);
        }
    }
}

/// The events of all processes in the order of their times.
#[derive(Default)]
struct Merge {
    /// The pages of processes, with their numbers.
    pages: BTreeMap<(HostId, u16), (u32, SlotPage)>,
    pending: Vec<PendingEvent>,
    /// No event with an earlier time follows.
    released_until: u64,
}

impl Merge {
    /// Reads the events of a process, or of all.
    fn read(&mut self, page: Option<(HostId, u16)>) {
        let pending = &mut self.pending;
        for (key, (pid, slot)) in
            self.pages.iter_mut().filter(|(key, _)| page.is_none_or(|page| page == **key))
        {
            let drained = slot.drain(|time, at, mut event| {
                assign_to_card(&mut event);
                // A process may write any time. That of an event is never later than now, also if it came meanwhile.
                let (time, pid) = (time.min(monotonic_nanos()), Some(*pid));
                pending.push(PendingEvent { time, offsets: IdOffsets::of_card(key.0), pid, at, event });
            });
            if let Err(error) = drained {
                report!("the events of process {pid} are not recorded any more: {error}");
            }
        }
    }

    /// Reads the events of all processes. Returns those that no earlier one can follow, in order.
    fn drain(&mut self, ends: bool) -> Vec<PendingEvent> {
        let now = monotonic_nanos();
        let mut until = now;
        for (_, page) in self.pages.values() {
            until = until.min(page.next_event_time(now).unwrap_or(self.released_until));
        }
        let until = if ends { u64::MAX } else { until.max(now.saturating_sub(MAX_MERGE_DELAY)) };
        self.read(None);
        self.released_until = self.released_until.max(until.min(now));
        self.pending.sort_by_key(|event| event.time);
        let count = self.pending.partition_point(|event| event.time < until);
        self.pending.drain(..count).collect()
    }
}

/// All recordings of a daemon.
pub(crate) struct Recordings {
    names: Mutex<NameTable>,
    /// In CLOCK_MONOTONIC.
    started: u64,
    /// A recording exists. Without one, no thread takes the lock.
    is_active: AtomicBool,
    /// Processes may execute the transport themselves: their events and the daemon's are merged.
    has_slots: AtomicBool,
    /// Locked before `recordings`.
    merge: Mutex<Merge>,
    recordings: Mutex<Vec<HostRecording>>,
    watchers: Arc<AsyncEventWatchers>,
    /// The recordings of each process.
    counts: Arc<Mutex<BTreeMap<u32, usize>>>,
}

impl Recordings {
    pub fn new(watchers: Arc<AsyncEventWatchers>) -> Arc<Recordings> {
        Arc::new(Recordings {
            watchers,
            names: Mutex::default(),
            started: monotonic_nanos(),
            is_active: AtomicBool::new(false),
            has_slots: AtomicBool::new(false),
            merge: Mutex::default(),
            recordings: Mutex::default(),
            counts: Arc::default(),
        })
    }

    /// Changes the names of existing and future recordings.
    pub fn name(&self, change: impl Fn(&mut NameTable)) {
        let mut names = self.names.lock();
        change(&mut names);
        self.recordings.lock().iter_mut().for_each(|recording| recording.recording.name(&change));
    }

    /// Starts recordings for a process or for the daemon itself.
    pub fn start(
        self: &Arc<Self>,
        owner: u64,
        pid: Option<u32>,
        files: RecordingFiles,
    ) -> Result<(), CommandError> {
        let RecordingFiles { capture, log, events } = files;
        let guards = pid.map(|pid| self.count(pid)).transpose()?;
        // The lock is held until the recordings are in the list, so that they miss no name.
        let locked = self.names.lock();
        let names = || Recording::new(locked.clone());
        let start_capture = |writer| names().with_capture(writer, CapturePoints::HostPorts);
        let start_log = |writer| Ok(names().with_log(writer, "softhca daemon"));
        let start_stream = |writer| Ok(names().with_stream(writer));
        let writer = |file| RecordWriter::start(file, guards.clone());
        let stream = |file| RecordWriter::start_stream(file, guards.clone());
        let started = [
            capture.map(|file| HostRecording::start(owner, "a capture", writer(file)?, start_capture)),
            log.map(|file| HostRecording::start(owner, "an event log", writer(file)?, start_log)),
            events.map(|file| HostRecording::start(owner, "events", stream(file)?, start_stream)),
        ];
        let started = started.into_iter().flatten().collect::<io::Result<Vec<_>>>()?;
        self.recordings.lock().extend(started);
        drop(locked);
        Ok(self.update_activity()?)
    }

    /// While there is a recording or a watcher of asynchronous events, a thread reads the events of processes and flushes.
    pub fn update_activity(self: &Arc<Self>) -> io::Result<()> {
        let merge = self.merge.lock();
        let is_active = !self.recordings.lock().is_empty() || !self.watchers.is_empty();
        let was_active = self.is_active.swap(is_active, Ordering::AcqRel);
        merge.pages.values().for_each(|(_, page)| page.set_recorded(is_active));
        if is_active && !was_active {
            let recordings = self.clone();
            std::thread::Builder::new().name("softhca records".into()).spawn(move || {
                while recordings.is_active() {
                    if recordings.has_slots.load(Ordering::Acquire) {
                        recordings.drain(false);
                    }
                    recordings.flush();
                    std::thread::sleep(DRAIN_INTERVAL);
                }
            })?;
        }
        Ok(())
    }

    /// Whether there is a recording.
    pub fn is_active(&self) -> bool {
        self.is_active.load(Ordering::Acquire)
    }

    /// From now on, processes may execute the transport themselves.
    pub fn allow_slots(&self) {
        self.has_slots.store(true, Ordering::Release);
    }

    /// Records the events of a process that executes the transport itself.
    pub fn add_slot(&self, host: HostId, slot: u16, pid: u32, page: SlotPage) {
        let mut merge = self.merge.lock();
        page.set_recorded(self.is_active());
        merge.pages.insert((host, slot), (pid, page));
    }

    /// The process in a slot is gone. Returns its page.
    pub fn remove_slot(&self, host: HostId, slot: u16) -> Option<SlotPage> {
        let mut merge = self.merge.lock();
        merge.read(Some((host, slot)));
        merge.pages.remove(&(host, slot)).map(|(_, page)| page)
    }

    /// The slot of the process of a host that has a connection with this communication ID of a peer.
    pub fn slot_of_connection(&self, host: HostId, peer: IpAddr, remote_id: CommunicationId) -> Option<u16> {
        let merge = self.merge.lock();
        let is_it = |connection: RecordedConnection| {
            connection.destination == peer && connection.remote_id == remote_id
        };
        let mut pages = merge.pages.range((host, 0)..=(host, u16::MAX));
        pages.find(|(_, (_, page))| page.connections().any(is_it)).map(|((_, slot), _)| *slot)
    }

    /// The counters of the processes of a host that execute the transport themselves.
    pub fn slot_counters(&self, host: HostId) -> Counters {
        let mut sum = Counters::default();
        let merge = self.merge.lock();
        merge.pages.range((host, 0)..=(host, u16::MAX)).for_each(|(_, (_, page))| sum.add(&page.counters()));
        sum
    }

    /// Writes the events of all processes, as far as none can precede them; all if the recordings end.
    fn drain(&self, ends: bool) {
        let mut merge = self.merge.lock();
        for PendingEvent { time, offsets, pid, at, event } in merge.drain(ends) {
            if let (Some(_), OwnedEvent::Hca { event: Event::AsyncEventRaised { client, event }, .. }) =
                (pid, &event)
            {
                // The daemon raises events of the whole device too.
                if client.is_none() {
                    continue;
                }
                let host = self.names.lock().host_name(offsets.host(HostId(0)));
                self.watchers.publish(&Notification::AsyncEventObserved { host, pid, event: *event });
            }
            self.write(time, offsets, at, event);
        }
    }

    /// Counts a recording of a process, if the limits permit it.
    fn count(&self, pid: u32) -> Result<Arc<RecordingGuard>, CommandError> {
        let mut counts = self.counts.lock();
        let of_process = counts.get(&pid).copied().unwrap_or(0);
        let text = if of_process >= MAX_PER_PROCESS {
            format!("process {pid} has {MAX_PER_PROCESS} recordings, which is the limit of a process")
        } else if counts.values().sum::<usize>() >= MAX_RECORDINGS {
            format!("the daemon has {MAX_RECORDINGS} recordings, which is its limit")
        } else {
            counts.insert(pid, of_process + 1);
            return Ok(Arc::new(RecordingGuard { counts: self.counts.clone(), pid }));
        };
        Err(CommandError::new(libc::EMFILE, text))
    }

    /// Ends the recordings of `owner`. Returns the first write error.
    pub fn end(self: &Arc<Self>, owner: u64) -> io::Result<()> {
        if self.has_slots.load(Ordering::Acquire) && self.is_active() {
            self.drain(true);
        }
        let ended: Vec<HostRecording> = {
            let mut all = self.recordings.lock();
            all.extract_if(.., |recording| recording.owner == owner).collect()
        };
        self.update_activity()?;
        ended.into_iter().map(HostRecording::finish).fold(Ok(()), io::Result::and)
    }

    fn flush(&self) {
        let now = self.time_of(monotonic_nanos());
        self.recordings.lock().iter_mut().for_each(|recording| recording.flush(now));
    }

    /// A time of CLOCK_MONOTONIC in the clock of the recordings.
    fn time_of(&self, time: u64) -> Instant {
        Instant::from_nanos(time.saturating_sub(self.started))
    }

    /// Writes an event of a card or network, which happened at `time` of CLOCK_MONOTONIC and `at` of its own clock.
    fn write(&self, time: u64, offsets: IdOffsets, at: Instant, mut event: OwnedEvent) {
        let now = self.time_of(time);
        event.move_to(offsets, at, now);
        for recording in self.recordings.lock().iter_mut() {
            recording.recording.on_event(now, &event.as_event());
        }
    }

    /// Records an event of a card or network, with a time of its own clock.
    fn record(&self, offsets: IdOffsets, at: Instant, event: &NetworkEvent<'_>) {
        if !self.is_active() {
            return;
        }
        let Some(event) = OwnedEvent::new(event) else { return };
        // One clock for all: the order of events is the order of their times.
        let mut merge = self.merge.lock();
        let time = monotonic_nanos();
        if self.has_slots.load(Ordering::Acquire) {
            merge.pending.push(PendingEvent { time, offsets, pid: None, at, event });
        } else {
            self.write(time, offsets, at, event);
        }
    }

    /// Records an event of a host, with a time of the driver's clock.
    pub fn on_host_event(&self, host: HostId, at: Instant, event: &NetworkEvent<'_>) {
        self.record(IdOffsets::of_card(host), at, event);
    }
}

/// Records events of the network between the hosts. Packets are recorded where they leave a host.
pub(crate) struct FabricEventSink {
    pub recordings: Arc<Recordings>,
    /// The links of the network have the numbers after those of the hosts.
    pub offsets: IdOffsets,
}

impl EventSink for FabricEventSink {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        let FabricEventSink { recordings, offsets } = self;
        match *event {
            NetworkEvent::Frame { .. } => {}
            NetworkEvent::PortAttached { port, address, link, ends } => {
                recordings.name(|names| names.add_external_port((port, address), (link, ends), *offsets));
            }
            _ => recordings.record(*offsets, now, event),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use softhca_engine::CqId;

    #[test]
    fn a_process_cannot_write_events_of_another_host() {
        let event = Event::CompletionNotified { cq: CqId(1) };
        let mut event = OwnedEvent::Hca { host: HostId(u32::MAX), event };
        assign_to_card(&mut event);
        event.move_to(IdOffsets::of_card(HostId(3)), Instant::ZERO, Instant::ZERO);
        assert!(matches!(event, OwnedEvent::Hca { host: HostId(3), .. }));
    }
}
