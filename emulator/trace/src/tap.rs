//! A capture of a world: every frame that a host puts on a cable, and if asked every frame that arrives.

use crate::capture::{CaptureWriter, InterfaceId, PacketDirection};
use crate::{NameTable, describe};
use softhca_fabric::{Direction, FabricSink, Fault, Frame, LinkId, Node, Stage};
use softhca_wire::{Bth, Pfc, Psn};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::IpAddr;

/// Where frames are captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CapturePoints {
    /// Where they leave a host, before any fault.
    #[default]
    Senders,
    /// Also where they arrive, after every fault.
    BothEnds,
    /// Also where they leave a switch.
    EveryLink,
}

/// A frame that may still get a comment: faults are told right after the frame they happen to.
#[derive(Debug)]
struct PendingRecord {
    time_ns: u64,
    link: LinkId,
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
    names: NameTable,
    points: CapturePoints,
    interfaces: BTreeMap<IpAddr, InterfaceId>,
    /// Those of switches.
    switch_interfaces: BTreeMap<Node, InterfaceId>,
    pending: Option<PendingRecord>,
    error: Option<io::Error>,
}

impl<W: Write> Tap<W> {
    /// A tap that writes to `writer`, with an interface for every host that has a name.
    pub fn new(writer: CaptureWriter<W>, cast: NameTable, points: CapturePoints) -> io::Result<Tap<W>> {
        let (interfaces, switches) = (BTreeMap::new(), BTreeMap::new());
        let mut tap = Tap {
            writer,
            names: cast,
            points,
            interfaces,
            switch_interfaces: switches,
            pending: None,
            error: None,
        };
        let addresses: Vec<IpAddr> = tap.names.hosts().map(|(_, address)| address).collect();
        for address in addresses {
            tap.interface_of_host(address)?;
        }
        Ok(tap)
    }

    /// Writes what is left. The first thing that could not be written is the error.
    pub fn finish(&mut self) -> io::Result<()> {
        self.flush_pending();
        match self.error.take() {
            Some(failure) => Err(failure),
            None => self.writer.flush(),
        }
    }

    /// What was written to. Call [`Tap::finish`] first.
    pub fn into_inner(self) -> W {
        self.writer.into_inner()
    }

    fn interface_of_host(&mut self, address: IpAddr) -> io::Result<InterfaceId> {
        if let Some(interface) = self.interfaces.get(&address) {
            return Ok(*interface);
        }
        let interface = self.writer.add_interface(&self.names.host_name_at(address), &address.to_string())?;
        self.interfaces.insert(address, interface);
        Ok(interface)
    }

    fn write_frame(
        &mut self,
        time_ns: u64,
        at: IpAddr,
        heading: PacketDirection,
        frame: &Frame,
        comment: &str,
    ) {
        if self.error.is_some() {
            return;
        }
        let comment = (!comment.is_empty()).then_some(comment);
        let Frame { addressing: envelope, bytes, .. } = frame;
        let written = self.interface_of_host(at).and_then(|interface| {
            self.writer.write_packet(time_ns, interface, heading, envelope, bytes, comment)
        });
        self.error = written.err();
    }

    /// The interface of a host or switch.
    fn interface_of_node(&mut self, node: Node) -> io::Result<InterfaceId> {
        if let Some(address) = node.host().and_then(|host| self.names.address(host)) {
            return self.interface_of_host(address);
        }
        if let Some(interface) = self.switch_interfaces.get(&node) {
            return Ok(*interface);
        }
        let interface = self.writer.add_interface(&self.names.node_name(node), "switch")?;
        self.switch_interfaces.insert(node, interface);
        Ok(interface)
    }

    /// Writes what leaves a node over a cable.
    fn write_from_node(
        &mut self,
        cable: LinkId,
        direction: Direction,
        write: impl FnOnce(&mut CaptureWriter<W>, InterfaceId) -> io::Result<()>,
    ) {
        let Some([node, _]) = self.names.link_ends(cable, direction).filter(|_| self.error.is_none()) else {
            return;
        };
        let written = self.interface_of_node(node).and_then(|interface| write(&mut self.writer, interface));
        self.error = written.err();
    }

    fn flush_pending(&mut self) {
        if let Some(PendingRecord { time_ns, frame, comment, .. }) = self.pending.take() {
            self.write_frame(time_ns, frame.addressing.source, PacketDirection::Outbound, &frame, &comment);
        }
    }
}

impl<W: Write> FabricSink for Tap<W> {
    fn on_frame(
        &mut self,
        now: softhca_engine::Instant,
        cable: LinkId,
        direction: Direction,
        stage: Stage,
        frame: &Frame,
    ) {
        self.flush_pending();
        let time_ns = now.nanos();
        match stage {
            Stage::Admitted => {
                let psn = Bth::parse(&frame.bytes).ok().map(|bth| bth.psn);
                let (frame, comment) = (frame.clone(), String::new());
                self.pending = Some(PendingRecord { time_ns, link: cable, direction, psn, frame, comment });
            }
            Stage::Forwarded if self.points == CapturePoints::EveryLink => {
                self.write_from_node(cable, direction, |writer, interface| {
                    writer.write_packet(
                        time_ns,
                        interface,
                        PacketDirection::Outbound,
                        &frame.addressing,
                        &frame.bytes,
                        None,
                    )
                });
            }
            Stage::Delivered if self.points != CapturePoints::Senders => {
                let ends = self.names.link_ends(cable, direction);
                let receiver = ends.and_then(|[_, receiver]| self.names.address(receiver.host()?));
                let receiver = receiver.unwrap_or(frame.addressing.destination);
                self.write_frame(time_ns, receiver, PacketDirection::Inbound, frame, "");
            }
            Stage::Forwarded | Stage::Delivered => {}
        }
    }

    fn on_pause_frame(
        &mut self,
        now: softhca_engine::Instant,
        cable: LinkId,
        direction: Direction,
        stage: Stage,
        pause: &Pfc,
    ) {
        self.flush_pending();
        if stage == Stage::Admitted {
            self.write_from_node(cable, direction, |writer, interface| {
                writer.write_pause(now.nanos(), interface, PacketDirection::Outbound, pause, None)
            });
        }
    }

    fn on_fault(&mut self, _: softhca_engine::Instant, cable: LinkId, fault: &Fault) {
        let sighting = &fault.packet;
        let Some(held) = &mut self.pending else { return };
        let is_same = held.link == cable && held.direction == fault.direction && held.psn == sighting.psn;
        if is_same {
            if !held.comment.is_empty() {
                held.comment.push_str("; ");
            }
            held.comment += &describe::fault(fault, &self.names);
        }
    }
}
