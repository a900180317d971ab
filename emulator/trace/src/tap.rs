//! A capture of a world: every frame that a host puts on a link, and if asked every frame that arrives.

use crate::NameTable;
use crate::capture::{CaptureWriter, InterfaceId, PacketDirection};
use crate::port_tap::PendingRecord;
use softhca_engine::Instant;
use softhca_fabric::{Direction, EventSink, LinkId, NetworkEvent, Node, Stage};
use softhca_wire::{Bth, Psn};
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

/// Writes the frames of a world to a capture, one interface per host, and one per switch that something of it
/// is written of. Pause frames are written where they are sent.
///
/// Call [`Tap::finish`] at the end: it writes the last frame and returns the first write error.
#[derive(Debug)]
pub struct Tap<W> {
    writer: CaptureWriter<W>,
    names: NameTable,
    points: CapturePoints,
    interfaces: BTreeMap<IpAddr, InterfaceId>,
    /// Those of switches.
    switch_interfaces: BTreeMap<Node, InterfaceId>,
    /// The frame that may still get a comment, and where a fault of it would be reported.
    pending: Option<(LinkId, Direction, Option<Psn>, PendingRecord)>,
    error: Option<io::Error>,
}

impl<W: Write> Tap<W> {
    /// A tap that writes to `writer`, with an interface for every host that has a name.
    pub fn new(writer: CaptureWriter<W>, names: NameTable, points: CapturePoints) -> io::Result<Tap<W>> {
        let (interfaces, switches) = (BTreeMap::new(), BTreeMap::new());
        let mut tap = Tap {
            writer,
            names,
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

    /// Writes the last frame. Returns the first write error.
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

    /// Writes something at a host.
    fn write_at_host(
        &mut self,
        host: IpAddr,
        write: impl FnOnce(&mut CaptureWriter<W>, InterfaceId) -> io::Result<()>,
    ) {
        if self.error.is_none() {
            let interface = self.interface_of_host(host);
            self.error = interface.and_then(|interface| write(&mut self.writer, interface)).err();
        }
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

    /// Writes what leaves a node over a link.
    fn write_from_node(
        &mut self,
        link: LinkId,
        direction: Direction,
        write: impl FnOnce(&mut CaptureWriter<W>, InterfaceId) -> io::Result<()>,
    ) {
        let Some([node, _]) = self.names.link_ends(link, direction).filter(|_| self.error.is_none()) else {
            return;
        };
        let written = self.interface_of_node(node).and_then(|interface| write(&mut self.writer, interface));
        self.error = written.err();
    }

    fn flush_pending(&mut self) {
        if let Some((.., record)) = self.pending.take() {
            self.write_at_host(record.addressing.source, |writer, interface| record.write(writer, interface));
        }
    }
}

impl<W: Write> EventSink for Tap<W> {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        let time_ns = now.nanos();
        match *event {
            NetworkEvent::Frame { link, direction, stage, addressing, packet } => {
                self.flush_pending();
                match stage {
                    Stage::Admitted => {
                        let psn = Bth::parse(packet).ok().map(|bth| bth.psn);
                        let record = PendingRecord::new(time_ns, addressing, packet);
                        self.pending = Some((link, direction, psn, record));
                    }
                    Stage::Forwarded if self.points == CapturePoints::EveryLink => {
                        self.write_from_node(link, direction, |writer, interface| {
                            let outbound = PacketDirection::Outbound;
                            writer.write_packet(time_ns, interface, outbound, addressing, packet, None)
                        });
                    }
                    Stage::Delivered if self.points != CapturePoints::Senders => {
                        let ends = self.names.link_ends(link, direction);
                        let receiver = ends.and_then(|[_, receiver]| self.names.address(receiver.host()?));
                        let receiver = receiver.unwrap_or(addressing.destination);
                        self.write_at_host(receiver, |writer, interface| {
                            let inbound = PacketDirection::Inbound;
                            writer.write_packet(time_ns, interface, inbound, addressing, packet, None)
                        });
                    }
                    Stage::Forwarded | Stage::Delivered => {}
                }
            }
            NetworkEvent::PauseFrame { link, direction, stage, pause } => {
                self.flush_pending();
                if stage == Stage::Admitted {
                    self.write_from_node(link, direction, |writer, interface| {
                        writer.write_pause(time_ns, interface, PacketDirection::Outbound, pause, None)
                    });
                }
            }
            NetworkEvent::Fault { link, fault } => {
                if let Some((at, direction, psn, record)) = &mut self.pending
                    && (*at, *direction, *psn) == (link, fault.direction, fault.packet.psn)
                {
                    record.add_fault(fault, &self.names);
                }
            }
            _ => {}
        }
    }
}
