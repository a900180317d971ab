//! Captures and event logs of the hosts of a daemon.

use crate::command_error::CommandError;
use crate::messages::report;
use crate::record_writer::{RecordOutput, RecordWriter};
use parking_lot::Mutex;
use softhca_engine::{Event, Instant};
use softhca_fabric::{
    Direction, EventSink, FabricEvent, Fault, HostId, LinkId, NetworkEvent, Node, RuleId, Stage, SwitchId,
};
use softhca_trace::{CaptureWriter, EventLog, InterfaceId, NameTable, PacketDirection, PortTap};
use softhca_wire::{AddressHeaders, Pfc};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The most recordings of one process, and of all processes. Every event is formatted once per recording.
const MAX_PER_PROCESS: usize = 4;
const MAX_RECORDINGS: usize = 64;

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

/// All recordings of a daemon.
pub(crate) struct Recordings {
    names: Mutex<NameTable>,
    started: std::time::Instant,
    /// A recording exists. Without one, no thread takes the lock.
    is_active: AtomicBool,
    recordings: Mutex<Vec<Recording>>,
    /// The recordings of each process.
    counts: Arc<Mutex<BTreeMap<u32, usize>>>,
}

impl Recordings {
    pub fn new() -> Arc<Recordings> {
        Arc::new(Recordings {
            names: Mutex::default(),
            started: std::time::Instant::now(),
            is_active: AtomicBool::new(false),
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
        &self,
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
        self.is_active.store(true, Ordering::Release);
        Ok(())
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
    pub fn end(&self, owner: u64) -> io::Result<()> {
        let ended: Vec<Recording> = {
            let mut all = self.recordings.lock();
            let ended = all.extract_if(.., |recording| recording.owner == owner).collect();
            self.is_active.store(!all.is_empty(), Ordering::Release);
            ended
        };
        ended.into_iter().map(Recording::finish).fold(Ok(()), io::Result::and)
    }

    /// Flushes all recordings.
    pub fn flush(&self) {
        self.recordings.lock().iter_mut().for_each(Recording::flush);
    }

    fn for_each(&self, act: impl Fn(&mut Recording, Instant) -> io::Result<()>) {
        if self.is_active.load(Ordering::Acquire) {
            // One clock for all hosts: the order of events is the order of their times.
            let mut all = self.recordings.lock();
            let now = Instant::from_nanos(self.started.elapsed().as_nanos() as u64);
            for recording in all.iter_mut().filter(|recording| recording.write_error.is_none()) {
                let written = act(recording, now);
                recording.check_write(written);
            }
        }
    }

    /// Records an event of a host, with a time of the driver's clock.
    pub fn on_engine_event(&self, host: HostId, at: Instant, event: &Event) {
        self.for_each(|recording, now| {
            if let Some(log) = &mut recording.log {
                let mut event = *event;
                if let Event::RnrWaitStarted { until, .. } = &mut event {
                    *until = now.plus(until.since(at));
                }
                log.record_event(now, host, &event);
            }
            match &mut recording.capture {
                Some(Capture { writer, taps, .. }) => taps[host.0 as usize].flush_pending(writer),
                None => Ok(()),
            }
        });
    }

    pub fn on_packet_sent(&self, host: HostId, addressing: &AddressHeaders, packet: &[u8]) {
        self.for_each(|recording, now| match &mut recording.capture {
            Some(Capture { writer, taps, .. }) => {
                taps[host.0 as usize].packet_sent(writer, now.nanos(), addressing, packet)
            }
            None => Ok(()),
        });
    }

    pub fn on_fault(&self, host: HostId, on_fault: &Fault) {
        self.for_each(|recording, now| {
            if let Some(log) = &mut recording.log {
                log.record_fault(now, LinkId(host.0), on_fault);
            }
            if let Some(Capture { taps, .. }) = &mut recording.capture {
                taps[host.0 as usize].add_fault(on_fault, &recording.names);
            }
            Ok(())
        });
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

    /// Records the effect of a received pause frame on a host, with a time of the driver's clock.
    pub fn on_port_event(&self, host: HostId, at: Instant, event: &FabricEvent) {
        self.for_each(|recording, now| {
            if let Some(log) = &mut recording.log {
                let mut event = at_recording_time(event, at, now);
                *event.link_mut() = LinkId(host.0);
                if let FabricEvent::PauseReceived { node: at, .. }
                | FabricEvent::PauseEnded { node: at, .. } = &mut event
                {
                    *at = Node::Host(host);
                }
                log.record_fabric_event(now, &event);
            }
            Ok(())
        });
    }

    /// Records a pause frame that a host sent or received over its socket.
    pub fn on_link_pause(&self, host: HostId, direction: PacketDirection, pause: &Pfc) {
        self.for_each(|recording, now| match &mut recording.capture {
            Some(Capture { writer, taps, interfaces }) => {
                taps[host.0 as usize].flush_pending(writer)?;
                writer.write_pause(now.nanos(), interfaces[host.0 as usize], direction, pause, None)
            }
            None => Ok(()),
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
