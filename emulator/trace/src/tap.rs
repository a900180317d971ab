//! A capture of a world: every frame that a host puts on a cable, and if asked every frame that arrives.

use crate::capture::{CaptureWriter, Heading, InterfaceId};
use crate::{Cast, words};
use softhca_fabric::{CableId, Direction, Fault, Frame, Node, Observer, Stage};
use softhca_wire::{Bth, Pfc, Psn};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::IpAddr;

/// Where frames are captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Points {
    /// Where they leave a host, before any fault.
    #[default]
    Senders,
    /// Also where they arrive, after every fault.
    BothEnds,
    /// Also where they leave a switch.
    EveryCable,
}

/// A frame that may still get a comment: faults are told right after the frame they happen to.
#[derive(Debug)]
struct Held {
    time_ns: u64,
    cable: CableId,
    direction: Direction,
    psn: Option<Psn>,
    frame: Frame,
    comment: String,
}

/// Writes the frames of a world to a capture, one interface per host, and one per switch that something of it
/// is written of. Pause frames are written where they are sent.
///
/// Call [`Tap::finish`] at the end: it writes the last frame and tells whether all could be written.
#[derive(Debug)]
pub struct Tap<W> {
    writer: CaptureWriter<W>,
    cast: Cast,
    points: Points,
    interfaces: BTreeMap<IpAddr, InterfaceId>,
    /// Those of switches.
    switches: BTreeMap<Node, InterfaceId>,
    held: Option<Held>,
    failure: Option<io::Error>,
}

impl<W: Write> Tap<W> {
    /// A tap that writes to `writer`, with an interface for every host that has a name.
    pub fn new(writer: CaptureWriter<W>, cast: Cast, points: Points) -> io::Result<Tap<W>> {
        let (interfaces, switches) = (BTreeMap::new(), BTreeMap::new());
        let mut tap = Tap { writer, cast, points, interfaces, switches, held: None, failure: None };
        let addresses: Vec<IpAddr> = tap.cast.hosts().map(|(_, address)| address).collect();
        for address in addresses {
            tap.interface(address)?;
        }
        Ok(tap)
    }

    /// Writes what is left. The first thing that could not be written is the error.
    pub fn finish(&mut self) -> io::Result<()> {
        self.release();
        match self.failure.take() {
            Some(failure) => Err(failure),
            None => self.writer.flush(),
        }
    }

    /// What was written to. Call [`Tap::finish`] first.
    pub fn into_inner(self) -> W {
        self.writer.into_inner()
    }

    fn interface(&mut self, address: IpAddr) -> io::Result<InterfaceId> {
        if let Some(interface) = self.interfaces.get(&address) {
            return Ok(*interface);
        }
        let interface = self.writer.add_interface(&self.cast.host_at(address), &address.to_string())?;
        self.interfaces.insert(address, interface);
        Ok(interface)
    }

    fn write(&mut self, time_ns: u64, at: IpAddr, heading: Heading, frame: &Frame, comment: &str) {
        if self.failure.is_some() {
            return;
        }
        let comment = (!comment.is_empty()).then_some(comment);
        let Frame { envelope, bytes, .. } = frame;
        let written = self
            .interface(at)
            .and_then(|interface| self.writer.packet(time_ns, interface, heading, envelope, bytes, comment));
        self.failure = written.err();
    }

    /// The interface of a host or switch.
    fn interface_of(&mut self, node: Node) -> io::Result<InterfaceId> {
        if let Some(address) = node.host().and_then(|host| self.cast.address(host)) {
            return self.interface(address);
        }
        if let Some(interface) = self.switches.get(&node) {
            return Ok(*interface);
        }
        let interface = self.writer.add_interface(&self.cast.node(node), "switch")?;
        self.switches.insert(node, interface);
        Ok(interface)
    }

    /// Writes what leaves a node over a cable.
    fn write_at(
        &mut self,
        cable: CableId,
        direction: Direction,
        write: impl FnOnce(&mut CaptureWriter<W>, InterfaceId) -> io::Result<()>,
    ) {
        let Some([node, _]) = self.cast.nodes(cable, direction).filter(|_| self.failure.is_none()) else {
            return;
        };
        let written = self.interface_of(node).and_then(|interface| write(&mut self.writer, interface));
        self.failure = written.err();
    }

    fn release(&mut self) {
        if let Some(Held { time_ns, frame, comment, .. }) = self.held.take() {
            self.write(time_ns, frame.envelope.source, Heading::Out, &frame, &comment);
        }
    }
}

impl<W: Write> Observer for Tap<W> {
    fn frame(
        &mut self,
        now: softhca_engine::Instant,
        cable: CableId,
        direction: Direction,
        stage: Stage,
        frame: &Frame,
    ) {
        self.release();
        let time_ns = now.nanos();
        match stage {
            Stage::Admitted => {
                let psn = Bth::parse(&frame.bytes).ok().map(|bth| bth.psn);
                let (frame, comment) = (frame.clone(), String::new());
                self.held = Some(Held { time_ns, cable, direction, psn, frame, comment });
            }
            Stage::Forwarded if self.points == Points::EveryCable => {
                self.write_at(cable, direction, |writer, interface| {
                    writer.packet(time_ns, interface, Heading::Out, &frame.envelope, &frame.bytes, None)
                });
            }
            Stage::Delivered if self.points != Points::Senders => {
                let ends = self.cast.nodes(cable, direction);
                let receiver = ends.and_then(|[_, receiver]| self.cast.address(receiver.host()?));
                let receiver = receiver.unwrap_or(frame.envelope.destination);
                self.write(time_ns, receiver, Heading::In, frame, "");
            }
            Stage::Forwarded | Stage::Delivered => {}
        }
    }

    fn pause(
        &mut self,
        now: softhca_engine::Instant,
        cable: CableId,
        direction: Direction,
        stage: Stage,
        pause: &Pfc,
    ) {
        self.release();
        if stage == Stage::Admitted {
            self.write_at(cable, direction, |writer, interface| {
                writer.pause(now.nanos(), interface, Heading::Out, pause, None)
            });
        }
    }

    fn fault(&mut self, _: softhca_engine::Instant, cable: CableId, fault: &Fault) {
        let sighting = &fault.sighting;
        let Some(held) = &mut self.held else { return };
        let is_same = held.cable == cable && held.direction == fault.direction && held.psn == sighting.psn;
        if is_same {
            if !held.comment.is_empty() {
                held.comment.push_str("; ");
            }
            held.comment += &words::fault(fault, &self.cast);
        }
    }
}
