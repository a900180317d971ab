//! Captures and event logs of what the cards of a daemon do, to descriptors that somebody passed.

use parking_lot::Mutex;
use softhca_engine::{Event, Instant};
use softhca_fabric::{
    CableId, Direction, FabricEvent, Fault, HostId, Node, Observer, RuleId, Stage, SwitchId,
};
use softhca_trace::{CaptureWriter, Cast, EventLog, Heading, InterfaceId, PortTap};
use softhca_wire::{Envelope, Pfc};
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
struct Record {
    /// Who asked for it.
    owner: u64,
    cast: Cast,
    capture: Option<Capture>,
    log: Option<EventLog<BufWriter<File>>>,
    broken: Option<io::Error>,
}

impl Record {
    /// Notes the first thing that could not be written; the file ends there.
    fn note(&mut self, written: io::Result<()>) {
        if let Err(error) = written
            && self.broken.is_none()
        {
            eprintln!("softhca: a record ends early: {error}");
            self.broken = Some(error);
        }
    }

    fn flush(&mut self) {
        let capture = self.capture.as_mut().map_or(Ok(()), |capture| capture.writer.flush());
        let log = self.log.as_mut().map_or(Ok(()), EventLog::flush);
        self.note(capture.and(log));
    }

    fn finish(mut self) -> io::Result<()> {
        if let Some(Capture { writer, taps, .. }) = &mut self.capture {
            for tap in taps {
                tap.release(writer)?;
            }
            writer.flush()?;
        }
        if let Some(log) = &mut self.log {
            log.finish()?;
        }
        match self.broken {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

/// All records of a daemon.
pub(crate) struct Records {
    cast: Mutex<Cast>,
    started: std::time::Instant,
    /// There is one: spares everybody else the lock.
    any: AtomicBool,
    all: Mutex<Vec<Record>>,
}

impl Records {
    pub fn new() -> Arc<Records> {
        Arc::new(Records {
            cast: Mutex::default(),
            started: std::time::Instant::now(),
            any: AtomicBool::new(false),
            all: Mutex::default(),
        })
    }

    /// Names a host, before any record starts.
    pub fn name_host(&self, id: HostId, name: &str, address: std::net::IpAddr) {
        let mut cast = self.cast.lock();
        cast.name_host(id, name, address);
        // Every host has a cable of its own, which it is the first end of.
        cast.name_cable(CableId(id.0), [id, id]);
    }

    /// Names the switches and cables between the hosts, before any record starts.
    pub fn name_fabric<'a>(
        &self,
        switches: impl IntoIterator<Item = (SwitchId, &'a str)>,
        cables: impl IntoIterator<Item = (CableId, [Node; 2])>,
    ) {
        let mut cast = self.cast.lock();
        switches.into_iter().for_each(|(id, name)| cast.name_switch(id, name));
        let hosts = cast.hosts().count() as u32;
        cables.into_iter().for_each(|(CableId(id), ends)| cast.name_cable(CableId(hosts + id), ends));
    }

    /// Names the port of another machine and its cable, in the records that there are and those to come.
    fn name_port(&self, port: HostId, address: std::net::IpAddr, CableId(cable): CableId, ends: [Node; 2]) {
        let name = |cast: &mut Cast| {
            cast.name_port(port, &address.to_string());
            let hosts = cast.hosts().count() as u32;
            cast.name_cable(CableId(hosts + cable), ends);
        };
        let mut cast = self.cast.lock();
        name(&mut cast);
        for record in self.all.lock().iter_mut() {
            name(&mut record.cast);
            if let Some(log) = &mut record.log {
                name(log.cast_mut());
            }
        }
    }

    /// Names a rule, in the records that there are and those to come.
    pub fn name_rule(&self, id: RuleId, name: &str) {
        self.cast.lock().name_rule(id, name);
        for record in self.all.lock().iter_mut() {
            record.cast.name_rule(id, name);
            if let Some(log) = &mut record.log {
                log.cast_mut().name_rule(id, name);
            }
        }
    }

    /// Starts a record.
    pub fn start(&self, owner: u64, capture: Option<File>, log: Option<File>) -> io::Result<()> {
        // Nobody gets a name between here and there that the record would not hear of.
        let names = self.cast.lock();
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
        self.all.lock().push(Record { owner, cast, capture, log, broken: None });
        drop(names);
        self.any.store(true, Ordering::Release);
        Ok(())
    }

    /// Ends the records of `owner`. The first thing that could not be written is the error.
    pub fn end(&self, owner: u64) -> io::Result<()> {
        let ended: Vec<Record> = {
            let mut all = self.all.lock();
            let ended = all.extract_if(.., |record| record.owner == owner).collect();
            self.any.store(!all.is_empty(), Ordering::Release);
            ended
        };
        ended.into_iter().map(Record::finish).fold(Ok(()), io::Result::and)
    }

    /// Hands on what was written so far.
    pub fn flush(&self) {
        self.all.lock().iter_mut().for_each(Record::flush);
    }

    fn each(&self, act: impl Fn(&mut Record, Instant) -> io::Result<()>) {
        if self.any.load(Ordering::Acquire) {
            // One clock for all cards: what was told first happened first.
            let mut all = self.all.lock();
            let now = Instant::from_nanos(self.started.elapsed().as_nanos() as u64);
            for record in all.iter_mut().filter(|record| record.broken.is_none()) {
                let written = act(record, now);
                record.note(written);
            }
        }
    }

    pub fn card(&self, host: HostId, event: &Event) {
        self.each(|record, now| {
            if let Some(log) = &mut record.log {
                log.card(now, host, event);
            }
            match &mut record.capture {
                Some(Capture { writer, taps, .. }) => taps[host.0 as usize].release(writer),
                None => Ok(()),
            }
        });
    }

    pub fn sent(&self, host: HostId, envelope: &Envelope, packet: &[u8]) {
        self.each(|record, now| match &mut record.capture {
            Some(Capture { writer, taps, .. }) => {
                taps[host.0 as usize].sent(writer, now.nanos(), envelope, packet)
            }
            None => Ok(()),
        });
    }

    pub fn fault(&self, host: HostId, fault: &Fault) {
        self.each(|record, now| {
            if let Some(log) = &mut record.log {
                log.fault(now, CableId(host.0), fault);
            }
            if let Some(Capture { taps, .. }) = &mut record.capture {
                taps[host.0 as usize].fault(fault, &record.cast);
            }
            Ok(())
        });
    }

    /// A switch, or the port of a host, told an event at a time of the fabric's own clock.
    fn fabric(&self, at: Instant, event: &FabricEvent) {
        self.each(|record, now| {
            if let Some(log) = &mut record.log {
                let mut event = retimed(event, at, now);
                // The cables of the fabric are numbered behind those of the hosts.
                cable_of(&mut event).0 += record.cast.hosts().count() as u32;
                log.fabric(now, &event);
            }
            Ok(())
        });
    }

    /// A pause that came over a link changed what a host may send; told at a time of its driver's clock.
    pub fn port(&self, host: HostId, at: Instant, event: &FabricEvent) {
        self.each(|record, now| {
            if let Some(log) = &mut record.log {
                let mut event = retimed(event, at, now);
                *cable_of(&mut event) = CableId(host.0);
                if let FabricEvent::PauseReceived { at, .. } | FabricEvent::PauseEnded { at, .. } = &mut event
                {
                    *at = Node::Host(host);
                }
                log.fabric(now, &event);
            }
            Ok(())
        });
    }

    /// A pause frame left a host over a link, or came over one.
    pub fn link_pause(&self, host: HostId, heading: Heading, pause: &Pfc) {
        self.each(|record, now| match &mut record.capture {
            Some(Capture { writer, taps, interfaces }) => {
                taps[host.0 as usize].release(writer)?;
                writer.pause(now.nanos(), interfaces[host.0 as usize], heading, pause, None)
            }
            None => Ok(()),
        });
    }

    /// A pause frame left the port of a host, or reached it.
    fn pause(&self, CableId(cable): CableId, direction: Direction, heading: Heading, pause: &Pfc) {
        self.each(|record, now| {
            let Record { cast, capture: Some(Capture { writer, interfaces, .. }), .. } = record else {
                return Ok(());
            };
            let cable = CableId(cable + interfaces.len() as u32);
            let Some([from, to]) = cast.nodes(cable, direction) else { return Ok(()) };
            // What goes to another machine is recorded when it leaves over the link.
            let is_outside = |end: Node| end.host().is_some_and(|host| interfaces.len() <= host.0 as usize);
            if is_outside(from) || is_outside(to) {
                return Ok(());
            }
            let end = if heading == Heading::Out { from } else { to };
            match end.host().and_then(|host| interfaces.get(host.0 as usize)) {
                Some(interface) => writer.pause(now.nanos(), *interface, heading, pause, None),
                None => Ok(()),
            }
        });
    }
}

/// The event with the end of a pause in the records' time, where `at` is `now`.
fn retimed(event: &FabricEvent, at: Instant, now: Instant) -> FabricEvent {
    let mut event = *event;
    if let FabricEvent::PauseReceived { until_ns, .. } = &mut event {
        *until_ns = now.nanos().saturating_add(until_ns.saturating_sub(at.nanos()));
    }
    event
}

/// The cable that an event happened at.
fn cable_of(event: &mut FabricEvent) -> &mut CableId {
    match event {
        FabricEvent::Marked { cable, .. }
        | FabricEvent::Lost { cable, .. }
        | FabricEvent::PauseSent { cable, .. }
        | FabricEvent::PauseReceived { cable, .. }
        | FabricEvent::PauseEnded { cable, .. }
        | FabricEvent::QueueSampled { cable, .. }
        | FabricEvent::WatchdogFired { cable, .. }
        | FabricEvent::WatchdogRestored { cable, .. } => cable,
    }
}

/// Reads what happens between the hosts for records. Packets are recorded where they leave a card.
pub(crate) struct Lookout(pub Arc<Records>);

impl Observer for Lookout {
    fn fabric(&mut self, now: Instant, event: &FabricEvent) {
        self.0.fabric(now, event);
    }

    fn pause(&mut self, _: Instant, cable: CableId, direction: Direction, stage: Stage, pause: &Pfc) {
        match stage {
            Stage::Admitted => self.0.pause(cable, direction, Heading::Out, pause),
            Stage::Delivered => self.0.pause(cable, direction, Heading::In, pause),
            Stage::Forwarded => {}
        }
    }

    fn attached(&mut self, port: HostId, address: std::net::IpAddr, cable: CableId, ends: [Node; 2]) {
        self.0.name_port(port, address, cable, ends);
    }
}
