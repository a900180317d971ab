//! Captures and event logs of what the cards of a daemon do, to descriptors that somebody passed.

use parking_lot::Mutex;
use softhca_engine::{Event, Instant};
use softhca_fabric::{
    Direction, EventSink, FabricEvent, Fault, HostId, LinkId, NetworkEvent, Node, RuleId, Stage, SwitchId,
};
use softhca_trace::{CaptureWriter, EventLog, InterfaceId, NameTable, PacketDirection, PortTap};
use softhca_wire::{AddressHeaders, Pfc};
use std::fs::File;
use std::io::{self, BufWriter};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A capture, with an interface and a tap for each host.
struct Capture {
    writer: CaptureWriter<BufWriter<File>>,
    taps: Vec<PortTap>,
    interfaces: Vec<InterfaceId>,
}

/// A capture, a log, or both, of all hosts.
struct Recording {
    /// Who asked for it.
    owner: u64,
    names: NameTable,
    capture: Option<Capture>,
    log: Option<EventLog<BufWriter<File>>>,
    write_error: Option<io::Error>,
}

impl Recording {
    /// Notes the first thing that could not be written; the file ends there.
    fn check_write(&mut self, written: io::Result<()>) {
        if let Err(error) = written
            && self.write_error.is_none()
        {
            eprintln!("softhca: a record ends early: {error}");
            self.write_error = Some(error);
        }
    }

    fn flush(&mut self) {
        let capture = self.capture.as_mut().map_or(Ok(()), |capture| capture.writer.flush());
        let log = self.log.as_mut().map_or(Ok(()), EventLog::flush);
        self.check_write(capture.and(log));
    }

    fn finish(mut self) -> io::Result<()> {
        if let Some(Capture { writer, taps, .. }) = &mut self.capture {
            for tap in taps {
                tap.flush_pending(writer)?;
            }
            writer.flush()?;
        }
        if let Some(log) = &mut self.log {
            log.finish()?;
        }
        match self.write_error {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

/// All records of a daemon.
pub(crate) struct Recordings {
    names: Mutex<NameTable>,
    started: std::time::Instant,
    /// There is one: spares everybody else the lock.
    is_active: AtomicBool,
    recordings: Mutex<Vec<Recording>>,
}

impl Recordings {
    pub fn new() -> Arc<Recordings> {
        Arc::new(Recordings {
            names: Mutex::default(),
            started: std::time::Instant::now(),
            is_active: AtomicBool::new(false),
            recordings: Mutex::default(),
        })
    }

    /// Names a host, before any record starts.
    pub fn name_host(&self, id: HostId, name: &str, address: std::net::IpAddr) {
        let mut cast = self.names.lock();
        cast.add_host(id, name, address);
        // Every host has a cable of its own, which it is the first end of.
        cast.add_link(LinkId(id.0), [id, id]);
    }

    /// Names the switches and cables between the hosts, before any record starts.
    pub fn name_fabric<'a>(
        &self,
        switches: impl IntoIterator<Item = (SwitchId, &'a str)>,
        cables: impl IntoIterator<Item = (LinkId, [Node; 2])>,
    ) {
        let mut cast = self.names.lock();
        switches.into_iter().for_each(|(id, name)| cast.add_switch(id, name));
        let hosts = cast.hosts().count() as u32;
        cables.into_iter().for_each(|(LinkId(id), ends)| cast.add_link(LinkId(hosts + id), ends));
    }

    /// Names the port of another machine and its cable, in the records that there are and those to come.
    fn name_external_port(
        &self,
        port: HostId,
        address: std::net::IpAddr,
        LinkId(cable): LinkId,
        ends: [Node; 2],
    ) {
        let name = |cast: &mut NameTable| {
            cast.add_port(port, &address.to_string());
            let hosts = cast.hosts().count() as u32;
            cast.add_link(LinkId(hosts + cable), ends);
        };
        let mut cast = self.names.lock();
        name(&mut cast);
        for record in self.recordings.lock().iter_mut() {
            name(&mut record.names);
            if let Some(log) = &mut record.log {
                name(log.names_mut());
            }
        }
    }

    /// Names a rule, in the records that there are and those to come.
    pub fn name_rule(&self, id: RuleId, name: &str) {
        self.names.lock().add_rule(id, name);
        for record in self.recordings.lock().iter_mut() {
            record.names.add_rule(id, name);
            if let Some(log) = &mut record.log {
                log.names_mut().add_rule(id, name);
            }
        }
    }

    /// Starts a record.
    pub fn start(&self, owner: u64, capture: Option<File>, log: Option<File>) -> io::Result<()> {
        // Nobody gets a name between here and there that the record would not hear of.
        let names = self.names.lock();
        let cast = names.clone();
        let capture = match capture {
            None => None,
            Some(file) => {
                let mut writer = CaptureWriter::new(BufWriter::new(file))?;
                let interfaces = cast.hosts().map(|(name, at)| writer.add_interface(name, &at.to_string()));
                let interfaces = interfaces.collect::<io::Result<Vec<_>>>()?;
                let taps = interfaces.iter().map(|interface| PortTap::new(*interface)).collect();
                Some(Capture { writer, taps, interfaces })
            }
        };
        let log = log.map(|file| EventLog::new(BufWriter::new(file), "softhca daemon", cast.clone()));
        self.recordings.lock().push(Recording { owner, names: cast, capture, log, write_error: None });
        drop(names);
        self.is_active.store(true, Ordering::Release);
        Ok(())
    }

    /// Ends the records of `owner`. The first thing that could not be written is the error.
    pub fn end(&self, owner: u64) -> io::Result<()> {
        let ended: Vec<Recording> = {
            let mut all = self.recordings.lock();
            let ended = all.extract_if(.., |record| record.owner == owner).collect();
            self.is_active.store(!all.is_empty(), Ordering::Release);
            ended
        };
        ended.into_iter().map(Recording::finish).fold(Ok(()), io::Result::and)
    }

    /// Hands on what was written so far.
    pub fn flush(&self) {
        self.recordings.lock().iter_mut().for_each(Recording::flush);
    }

    fn for_each(&self, act: impl Fn(&mut Recording, Instant) -> io::Result<()>) {
        if self.is_active.load(Ordering::Acquire) {
            // One clock for all cards: what was told first happened first.
            let mut all = self.recordings.lock();
            let now = Instant::from_nanos(self.started.elapsed().as_nanos() as u64);
            for record in all.iter_mut().filter(|record| record.write_error.is_none()) {
                let written = act(record, now);
                record.check_write(written);
            }
        }
    }

    pub fn on_engine_event(&self, host: HostId, event: &Event) {
        self.for_each(|record, now| {
            if let Some(log) = &mut record.log {
                log.record_event(now, host, event);
            }
            match &mut record.capture {
                Some(Capture { writer, taps, .. }) => taps[host.0 as usize].flush_pending(writer),
                None => Ok(()),
            }
        });
    }

    pub fn on_packet_sent(&self, host: HostId, envelope: &AddressHeaders, packet: &[u8]) {
        self.for_each(|record, now| match &mut record.capture {
            Some(Capture { writer, taps, .. }) => {
                taps[host.0 as usize].packet_sent(writer, now.nanos(), envelope, packet)
            }
            None => Ok(()),
        });
    }

    pub fn on_fault(&self, host: HostId, on_fault: &Fault) {
        self.for_each(|record, now| {
            if let Some(log) = &mut record.log {
                log.record_fault(now, LinkId(host.0), on_fault);
            }
            if let Some(Capture { taps, .. }) = &mut record.capture {
                taps[host.0 as usize].add_fault(on_fault, &record.names);
            }
            Ok(())
        });
    }

    /// A switch, or the port of a host, told an event at a time of the fabric's own clock.
    fn on_fabric_event(&self, at: Instant, event: &FabricEvent) {
        self.for_each(|record, now| {
            if let Some(log) = &mut record.log {
                let mut event = at_recording_time(event, at, now);
                // The cables of the fabric are numbered behind those of the hosts.
                link_of(&mut event).0 += record.names.hosts().count() as u32;
                log.record_fabric_event(now, &event);
            }
            Ok(())
        });
    }

    /// A pause that came over a link changed what a host may send; told at a time of its driver's clock.
    pub fn on_port_event(&self, host: HostId, at: Instant, event: &FabricEvent) {
        self.for_each(|record, now| {
            if let Some(log) = &mut record.log {
                let mut event = at_recording_time(event, at, now);
                *link_of(&mut event) = LinkId(host.0);
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

    /// A pause frame left a host over a link, or came over one.
    pub fn on_link_pause(&self, host: HostId, heading: PacketDirection, pause: &Pfc) {
        self.for_each(|record, now| match &mut record.capture {
            Some(Capture { writer, taps, interfaces }) => {
                taps[host.0 as usize].flush_pending(writer)?;
                writer.write_pause(now.nanos(), interfaces[host.0 as usize], heading, pause, None)
            }
            None => Ok(()),
        });
    }

    /// A pause frame left the port of a host, or reached it.
    fn on_pause(
        &self,
        LinkId(cable): LinkId,
        direction: Direction,
        heading: PacketDirection,
        on_pause: &Pfc,
    ) {
        self.for_each(|record, now| {
            let Recording { names: cast, capture: Some(Capture { writer, interfaces, .. }), .. } = record
            else {
                return Ok(());
            };
            let cable = LinkId(cable + interfaces.len() as u32);
            let Some([from, to]) = cast.link_ends(cable, direction) else { return Ok(()) };
            // What goes to another machine is recorded when it leaves over the link.
            let is_outside = |end: Node| end.host().is_some_and(|host| interfaces.len() <= host.0 as usize);
            if is_outside(from) || is_outside(to) {
                return Ok(());
            }
            let end = if heading == PacketDirection::Outbound { from } else { to };
            match end.host().and_then(|host| interfaces.get(host.0 as usize)) {
                Some(interface) => writer.write_pause(now.nanos(), *interface, heading, on_pause, None),
                None => Ok(()),
            }
        });
    }
}

/// The event with the end of a pause in the records' time, where `at` is `now`.
fn at_recording_time(event: &FabricEvent, at: Instant, now: Instant) -> FabricEvent {
    let mut event = *event;
    if let FabricEvent::PauseReceived { until_ns, .. } = &mut event {
        *until_ns = now.nanos().saturating_add(until_ns.saturating_sub(at.nanos()));
    }
    event
}

/// The cable that an event happened at.
fn link_of(event: &mut FabricEvent) -> &mut LinkId {
    match event {
        FabricEvent::EcnMarked { link: cable, .. }
        | FabricEvent::FrameDropped { link: cable, .. }
        | FabricEvent::PauseSent { link: cable, .. }
        | FabricEvent::PauseReceived { link: cable, .. }
        | FabricEvent::PauseEnded { link: cable, .. }
        | FabricEvent::QueueSampled { link: cable, .. }
        | FabricEvent::WatchdogFired { link: cable, .. }
        | FabricEvent::WatchdogRestored { link: cable, .. } => cable,
    }
}

/// Reads what happens between the hosts for records. Packets are recorded where they leave a card.
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
