//! Captures and event logs of the hosts of a daemon.

use crate::async_event_watchers::AsyncEventWatchers;
use crate::command_error::CommandError;
use crate::messages::report;
use crate::record_writer::{RecordOutput, RecordWriter};
use parking_lot::Mutex;
use softhca_engine::{Counters, Event, Instant};
use softhca_fabric::{
    Direction, EventSink, FabricEvent, HostId, LinkId, NetworkEvent, Node, RuleCounters, RuleId, Stage,
    SwitchId,
};
use softhca_queue::RecordedConnection;
use softhca_queue::control::Notification;
use softhca_trace::{CaptureWriter, EventLog, InterfaceId, NameTable, PacketDirection, PortTap};
use softhca_udp::{SlotEvent, SlotPage, monotonic_nanos};
use softhca_wire::Pfc;
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

/// A capture with an interface and a tap per host.
struct Capture {
    writer: CaptureWriter<RecordWriter>,
    taps: Vec<PortTap>,
    interfaces: Vec<InterfaceId>,
}

/// A capture or an event log of all hosts.
struct Recording {
    /// The session that started it; zero for the daemon.
    owner: u64,
    names: NameTable,
    capture: Option<Capture>,
    log: Option<EventLog<RecordWriter>>,
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

impl Recording {
    /// Keeps the first write error, which ends the recording.
    fn check_write(&mut self, written: io::Result<()>) {
        if let Err(error) = written
            && self.write_error.is_none()
        {
            let what = if self.log.is_some() { "an event log" } else { "a capture" };
            report!("the recording of {what} ends early: {error}");
            self.write_error = Some(error);
        }
    }

    /// Writes an event of a host that happened at `now` of the recording and at `at` of its driver.
    fn on_host_event(
        &mut self,
        now: Instant,
        host: HostId,
        at: Instant,
        event: &SlotEvent<'_>,
    ) -> io::Result<()> {
        if let Some(log) = &mut self.log {
            match *event {
                SlotEvent::Hca(mut event) => {
                    if let Event::RnrWaitStarted { until, .. } = &mut event {
                        *until = now.plus(until.since(at));
                    }
                    log.record_event(now, host, &event);
                }
                SlotEvent::Fault(ref fault) => log.record_fault(now, LinkId(host.0), fault),
                SlotEvent::Port(ref event) => {
                    let mut event = at_recording_time(event, at, now);
                    *event.link_mut() = LinkId(host.0);
                    if let FabricEvent::PauseReceived { node, .. } | FabricEvent::PauseEnded { node, .. } =
                        &mut event
                    {
                        *node = Node::Host(host);
                    }
                    log.record_fabric_event(now, &event);
                }
                SlotEvent::Frame { .. } | SlotEvent::Pause { .. } => {}
            }
        }
        let Some(Capture { writer, taps, interfaces }) = &mut self.capture else { return Ok(()) };
        let tap = &mut taps[host.0 as usize];
        match event {
            SlotEvent::Hca(_) => tap.flush_pending(writer),
            SlotEvent::Frame { addressing, packet } => {
                tap.packet_sent(writer, now.nanos(), addressing, packet)
            }
            SlotEvent::Fault(fault) => {
                tap.add_fault(fault, &self.names);
                Ok(())
            }
            SlotEvent::Pause { is_inbound, pause } => {
                tap.flush_pending(writer)?;
                let direction =
                    if *is_inbound { PacketDirection::Inbound } else { PacketDirection::Outbound };
                writer.write_pause(now.nanos(), interfaces[host.0 as usize], direction, pause, None)
            }
            SlotEvent::Port(_) => Ok(()),
        }
    }

    fn flush(&mut self) {
        let capture = self.capture.as_mut().map_or(Ok(()), |capture| capture.writer.flush());
        let log = self.log.as_mut().map_or(Ok(()), EventLog::flush);
        self.check_write(capture.and(log));
    }

    /// Writes the rest and closes the file.
    fn finish(mut self) -> io::Result<()> {
        let mut write_rest = || {
            if let Some(Capture { writer, taps, .. }) = &mut self.capture {
                taps.iter_mut().try_for_each(|tap| tap.flush_pending(writer))?;
                writer.flush()?;
            }
            self.log.as_mut().map_or(Ok(()), EventLog::finish)
        };
        let written = if self.write_error.is_none() { write_rest() } else { Ok(()) };
        let Recording { capture, log, output, write_error, .. } = self;
        // Without a writer, the output ends.
        drop((capture, log));
        write_error.map_or(written, Err).and(output.finish())
    }
}

/// An event that waits for earlier ones of other processes.
struct PendingEvent {
    /// In CLOCK_MONOTONIC.
    time: u64,
    host: HostId,
    /// The process that executes the transport itself; `None` for the daemon's HCA.
    pid: Option<u32>,
    /// The time of the driver's clock.
    at: Instant,
    event: SlotEvent<'static>,
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
            let drained = slot.drain(|time, at, event| {
                // A process may write any time. That of an event is never later than now, also if it came meanwhile.
                let (time, pid, event) = (time.min(monotonic_nanos()), Some(*pid), event.into_owned());
                pending.push(PendingEvent { time, host: key.0, pid, at, event });
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
    recordings: Mutex<Vec<Recording>>,
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

    /// Names a host, before any recording starts.
    pub fn name_host(&self, id: HostId, name: &str, address: std::net::IpAddr) {
        let mut names = self.names.lock();
        names.add_host(id, name, address);
        // Every host has its own link and is the first end of it.
        names.add_link(LinkId(id.0), [id, id]);
    }

    /// Names the switches and links between the hosts, before any recording starts.
    pub fn name_fabric<'a>(
        &self,
        switches: impl IntoIterator<Item = (SwitchId, &'a str)>,
        links: impl IntoIterator<Item = (LinkId, [Node; 2])>,
    ) {
        let mut names = self.names.lock();
        switches.into_iter().for_each(|(id, name)| names.add_switch(id, name));
        let hosts = names.hosts().count() as u32;
        links.into_iter().for_each(|(LinkId(id), ends)| names.add_link(LinkId(hosts + id), ends));
    }

    /// Names the port of an external machine and its link, in existing and future recordings.
    fn name_external_port(
        &self,
        port: HostId,
        address: std::net::IpAddr,
        LinkId(link): LinkId,
        ends: [Node; 2],
    ) {
        let name = |names: &mut NameTable| {
            names.add_port(port, &address.to_string());
            let hosts = names.hosts().count() as u32;
            names.add_link(LinkId(hosts + link), ends);
        };
        let mut names = self.names.lock();
        name(&mut names);
        for recording in self.recordings.lock().iter_mut() {
            name(&mut recording.names);
            if let Some(log) = &mut recording.log {
                name(log.names_mut());
            }
        }
    }

    /// Names a rule, in existing and future recordings.
    pub fn name_rule(&self, id: RuleId, name: &str) {
        self.names.lock().add_rule(id, name);
        for recording in self.recordings.lock().iter_mut() {
            recording.names.add_rule(id, name);
            if let Some(log) = &mut recording.log {
                log.names_mut().add_rule(id, name);
            }
        }
    }

    /// Starts a capture, an event log, or both, for a process or for the daemon itself.
    pub fn start(
        self: &Arc<Self>,
        owner: u64,
        pid: Option<u32>,
        capture: Option<File>,
        log: Option<File>,
    ) -> Result<(), CommandError> {
        let guards = pid.map(|pid| self.count(pid)).transpose()?;
        // The lock is held until the recordings are in the list, so that they miss no name.
        let locked = self.names.lock();
        let mut started = Vec::new();
        if let Some(file) = capture {
            let names = locked.clone();
            let writer = RecordWriter::start(file, guards.clone())?;
            let output = writer.output();
            let mut writer = CaptureWriter::new(writer)?;
            let interfaces = names.hosts().map(|(name, at)| writer.add_interface(name, &at.to_string()));
            let interfaces = interfaces.collect::<io::Result<Vec<_>>>()?;
            let taps = interfaces.iter().map(|interface| PortTap::new(*interface)).collect();
            let capture = Some(Capture { writer, taps, interfaces });
            started.push(Recording { owner, names, capture, log: None, output, write_error: None });
        }
        if let Some(file) = log {
            let names = locked.clone();
            let writer = RecordWriter::start(file, guards)?;
            let output = writer.output();
            let log = Some(EventLog::new(writer, "softhca daemon", names.clone()));
            started.push(Recording { owner, names, capture: None, log, output, write_error: None });
        }
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

    /// The counters of the fault rules of the processes of a host that execute the transport themselves.
    pub fn slot_rules(&self, host: HostId) -> Vec<(RuleId, RuleCounters)> {
        let merge = self.merge.lock();
        merge.pages.range((host, 0)..=(host, u16::MAX)).flat_map(|(_, (_, page))| page.rules()).collect()
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
        for PendingEvent { time, host, pid, at, event } in merge.drain(ends) {
            // The daemon raises events of the port for all processes.
            if let (Some(_), SlotEvent::Hca(Event::AsyncEventRaised { client: Some(_), event })) =
                (pid, &event)
            {
                let host = self.names.lock().host_name(host);
                self.watchers.publish(&Notification::AsyncEventObserved { host, pid, event: *event });
            }
            self.write(time, |recording, now| recording.on_host_event(now, host, at, &event));
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
        let ended: Vec<Recording> = {
            let mut all = self.recordings.lock();
            all.extract_if(.., |recording| recording.owner == owner).collect()
        };
        self.update_activity()?;
        ended.into_iter().map(Recording::finish).fold(Ok(()), io::Result::and)
    }

    fn flush(&self) {
        self.recordings.lock().iter_mut().for_each(Recording::flush);
    }

    /// Writes something that happened at `time` of CLOCK_MONOTONIC to every recording.
    fn write(&self, time: u64, act: impl Fn(&mut Recording, Instant) -> io::Result<()>) {
        let now = Instant::from_nanos(time.saturating_sub(self.started));
        for recording in self.recordings.lock().iter_mut().filter(|recording| recording.write_error.is_none())
        {
            let written = act(recording, now);
            recording.check_write(written);
        }
    }

    fn for_each(&self, act: impl Fn(&mut Recording, Instant) -> io::Result<()>) {
        if self.is_active() {
            // One clock for all hosts: the order of events is the order of their times.
            let _order = self.merge.lock();
            self.write(monotonic_nanos(), act);
        }
    }

    /// Records an event of a host, with a time of the driver's clock.
    pub fn on_host_event(&self, host: HostId, at: Instant, event: &NetworkEvent<'_>) {
        if !self.is_active() {
            return;
        }
        let Some(event) = SlotEvent::new(event) else { return };
        let mut merge = self.merge.lock();
        let time = monotonic_nanos();
        if self.has_slots.load(Ordering::Acquire) {
            merge.pending.push(PendingEvent { time, host, pid: None, at, event: event.into_owned() });
        } else {
            self.write(time, |recording, now| recording.on_host_event(now, host, at, &event));
        }
    }

    /// Records an event of a switch or a port, with a time of the fabric's clock.
    fn on_fabric_event(&self, at: Instant, event: &FabricEvent) {
        self.for_each(|recording, now| {
            if let Some(log) = &mut recording.log {
                let mut event = at_recording_time(event, at, now);
                // The links of the fabric have the numbers after those of the hosts.
                event.link_mut().0 += recording.names.hosts().count() as u32;
                log.record_fabric_event(now, &event);
            }
            Ok(())
        });
    }

    /// Records a pause frame that the port of a host sent or received in the fabric.
    fn on_pause(
        &self,
        LinkId(link): LinkId,
        link_direction: Direction,
        direction: PacketDirection,
        pause: &Pfc,
    ) {
        self.for_each(|recording, now| {
            let Recording { names, capture: Some(Capture { writer, interfaces, .. }), .. } = recording else {
                return Ok(());
            };
            let link = LinkId(link + interfaces.len() as u32);
            let Some([from, to]) = names.link_ends(link, link_direction) else { return Ok(()) };
            // Frames of external machines are recorded at the socket.
            let is_external = |end: Node| end.host().is_some_and(|host| interfaces.len() <= host.0 as usize);
            if is_external(from) || is_external(to) {
                return Ok(());
            }
            let end = if direction == PacketDirection::Outbound { from } else { to };
            match end.host().and_then(|host| interfaces.get(host.0 as usize)) {
                Some(interface) => writer.write_pause(now.nanos(), *interface, direction, pause, None),
                None => Ok(()),
            }
        });
    }
}

/// Converts the end of a pause to the recording's clock, where `at` is `now`.
fn at_recording_time(event: &FabricEvent, at: Instant, now: Instant) -> FabricEvent {
    let mut event = *event;
    if let FabricEvent::PauseReceived { until_ns, .. } = &mut event {
        *until_ns = now.nanos().saturating_add(until_ns.saturating_sub(at.nanos()));
    }
    event
}

/// Records events of the network between the hosts. Packets are recorded where they leave a host.
pub(crate) struct FabricEventSink(pub Arc<Recordings>);

impl EventSink for FabricEventSink {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        match *event {
            NetworkEvent::Fabric(event) => self.0.on_fabric_event(now, &event),
            NetworkEvent::PauseFrame { link, direction, stage: Stage::Admitted, pause } => {
                self.0.on_pause(link, direction, PacketDirection::Outbound, pause);
            }
            NetworkEvent::PauseFrame { link, direction, stage: Stage::Delivered, pause } => {
                self.0.on_pause(link, direction, PacketDirection::Inbound, pause);
            }
            NetworkEvent::PortAttached { port, address, link, ends } => {
                self.0.name_external_port(port, address, link, ends);
            }
            _ => {}
        }
    }
}
