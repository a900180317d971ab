//! A capture of a world: every frame that a host puts on a cable, and if asked every frame that arrives.

use crate::capture::{CaptureWriter, Heading, InterfaceId};
use crate::{Cast, words};
use softhca_fabric::{CableId, Direction, Fault, Frame, Observer, Stage};
use softhca_wire::{Bth, Psn};
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

/// Writes the frames of a world to a capture, one interface per host.
///
/// Call [`Tap::finish`] at the end: it writes the last frame and tells whether all could be written.
#[derive(Debug)]
pub struct Tap<W> {
    writer: CaptureWriter<W>,
    cast: Cast,
    points: Points,
    interfaces: BTreeMap<IpAddr, InterfaceId>,
    held: Option<Held>,
    failure: Option<io::Error>,
}

impl<W: Write> Tap<W> {
    /// A tap that writes to `writer`, with an interface for every host that has a name.
    pub fn new(writer: CaptureWriter<W>, cast: Cast, points: Points) -> io::Result<Tap<W>> {
        let (interfaces, held, failure) = (BTreeMap::new(), None, None);
        let mut tap = Tap { writer, cast, points, interfaces, held, failure };
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
        let Frame { envelope, bytes } = frame;
        let written = self
            .interface(at)
            .and_then(|interface| self.writer.packet(time_ns, interface, heading, envelope, bytes, comment));
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
            Stage::Delivered if self.points == Points::BothEnds => {
                let ends = self.cast.ends(cable, direction);
                let receiver = ends.map_or(frame.envelope.destination, |[_, receiver]| receiver);
                self.write(time_ns, receiver, Heading::In, frame, "");
            }
            Stage::Delivered => {}
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
