//! The capture of a recording: frames and pause frames where they leave hosts and switches or arrive.

use crate::capture::{CaptureWriter, InterfaceId, PacketDirection};
use crate::{NameTable, describe};
use softhca_engine::Instant;
use softhca_fabric::{Direction, EventSink, Fault, HostId, LinkId, NetworkEvent, Node, Stage, SwitchId};
use softhca_wire::{AddressHeaders, Bth, Pfc, Psn, RoceFrame};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Write};
use std::net::IpAddr;

/// The most records that wait for the faults of earlier packets, and how long they wait at most. A card reports the faults
/// of a packet right after the packet, but other cards report events at the same time.
const MAX_WAITING: usize = 64;
const MAX_WAITING_NS: u64 = 1_000_000;

/// Where frames are captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CapturePoints {
    /// Where they leave a host, before any fault. Pause frames: also where they leave a switch.
    #[default]
    Senders,
    /// Where they leave a host, before any fault. Pause frames: also where they arrive at a host.
    HostPorts,
    /// Also where they arrive, after every fault.
    BothEnds,
    /// Also where they leave a switch.
    EveryLink,
}

/// Where a record is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Host(IpAddr),
    Switch(SwitchId),
}

/// The packet whose faults may follow.
type OpenPacket = (LinkId, Direction, Option<Psn>);

/// A record that waits for a comment, or for an earlier record.
#[derive(Debug)]
struct WaitingRecord {
    time_ns: u64,
    place: Place,
    heading: PacketDirection,
    /// From the Ethernet header on.
    frame: Vec<u8>,
    comment: String,
    open: Option<OpenPacket>,
}

/// Writes the frames of a network to a capture, with an interface for each host, and for each switch that sends something.
/// It is an event sink.
///
/// Call [`Tap::finish`] at the end: it writes the last frame and returns the first write error.
#[derive(Debug)]
pub struct Tap<W> {
    writer: CaptureWriter<W>,
    names: NameTable,
    points: CapturePoints,
    interfaces: BTreeMap<Place, InterfaceId>,
    /// In the order of their times.
    waiting: VecDeque<WaitingRecord>,
    error: Option<io::Error>,
}

impl<W: Write> Tap<W> {
    /// A tap that writes to `writer`, with an interface for every host that has a name.
    pub fn new(writer: CaptureWriter<W>, names: NameTable, points: CapturePoints) -> io::Result<Tap<W>> {
        let (interfaces, waiting) = (BTreeMap::new(), VecDeque::new());
        let mut tap = Tap { writer, names, points, interfaces, waiting, error: None };
        let addresses: Vec<IpAddr> = tap.names.hosts().map(|(_, address)| address).collect();
        for address in addresses {
            tap.interface(Place::Host(address))?;
        }
        Ok(tap)
    }

    pub(crate) fn names_mut(&mut self) -> &mut NameTable {
        &mut self.names
    }

    /// No fault of an earlier packet of this host follows.
    pub(crate) fn end_turn(&mut self, host: HostId) {
        if let Some(address) = self.names.address(host) {
            let place = Place::Host(address);
            self.waiting
                .iter_mut()
                .filter(|record| record.place == place)
                .for_each(|record| record.open = None);
            self.write_due(0);
        }
    }

    /// Writes the records that wait for nothing at this time. Returns the first write error.
    pub(crate) fn flush(&mut self, now: Instant) -> io::Result<()> {
        self.write_due(now.nanos());
        match &self.error {
            Some(error) => Err(io::Error::new(error.kind(), error.to_string())),
            None => self.writer.flush(),
        }
    }

    /// Writes the last frames. Returns the first write error.
    pub fn finish(&mut self) -> io::Result<()> {
        self.flush(Instant::from_nanos(u64::MAX))
    }

    /// The output of the capture. Call [`Tap::finish`] first.
    pub fn into_inner(self) -> W {
        self.writer.into_inner()
    }

    fn interface(&mut self, place: Place) -> io::Result<InterfaceId> {
        if let Some(interface) = self.interfaces.get(&place) {
            return Ok(*interface);
        }
        let (name, description) = match place {
            Place::Host(address) => (self.names.host_name_at(address), address.to_string()),
            Place::Switch(switch) => (self.names.node_name(Node::Switch(switch)), "switch".into()),
        };
        let interface = self.writer.add_interface(&name, &description)?;
        self.interfaces.insert(place, interface);
        Ok(interface)
    }

    /// The place of a host or switch. A port of another machine has none.
    fn place(&self, node: Node) -> Option<Place> {
        match node {
            Node::Host(host) => self.names.address(host).map(Place::Host),
            Node::Switch(switch) => Some(Place::Switch(switch)),
        }
    }

    fn write(&mut self, record: &WaitingRecord) -> io::Result<()> {
        let interface = self.interface(record.place)?;
        let WaitingRecord { time_ns, heading, frame, comment, .. } = record;
        let comment = (!comment.is_empty()).then_some(comment.as_str());
        self.writer.write_frame(*time_ns, interface, *heading, frame, comment)
    }

    /// Writes the records that wait for nothing at this time.
    fn write_due(&mut self, now_ns: u64) {
        while let Some(first) = self.waiting.front()
            && (first.open.is_none()
                || self.waiting.len() > MAX_WAITING
                || first.time_ns.saturating_add(MAX_WAITING_NS) <= now_ns)
            && let Some(record) = self.waiting.pop_front()
        {
            if self.error.is_none() {
                self.error = self.write(&record).err();
            }
        }
    }

    fn push(
        &mut self,
        now: Instant,
        place: Place,
        heading: PacketDirection,
        frame: Vec<u8>,
        open: Option<OpenPacket>,
    ) {
        let (time_ns, comment) = (now.nanos(), String::new());
        self.waiting.push_back(WaitingRecord { time_ns, place, heading, frame, comment, open });
        self.write_due(time_ns);
    }

    fn on_frame(
        &mut self,
        now: Instant,
        (link, direction, stage): (LinkId, Direction, Stage),
        addressing: &AddressHeaders,
        packet: &[u8],
    ) {
        let ends = self.names.link_ends(link, direction);
        let [from, to] = [0, 1].map(|end| ends.and_then(|ends| self.place(ends[end])));
        let frame = || RoceFrame::new(addressing, packet).to_vec();
        let outbound = PacketDirection::Outbound;
        match stage {
            Stage::Admitted => {
                let is_earlier = |record: &&mut WaitingRecord| {
                    record.open.is_some_and(|(earlier, way, _)| (earlier, way) == (link, direction))
                };
                self.waiting.iter_mut().filter(is_earlier).for_each(|record| record.open = None);
                let psn = Bth::parse(packet).ok().map(|bth| bth.psn);
                let place = from.unwrap_or(Place::Host(addressing.source));
                self.push(now, place, outbound, frame(), Some((link, direction, psn)));
            }
            Stage::Forwarded if self.points == CapturePoints::EveryLink => {
                if let Some(place) = from {
                    self.push(now, place, outbound, frame(), None);
                }
            }
            Stage::Delivered if matches!(self.points, CapturePoints::BothEnds | CapturePoints::EveryLink) => {
                let place = to.unwrap_or(Place::Host(addressing.destination));
                self.push(now, place, PacketDirection::Inbound, frame(), None);
            }
            Stage::Forwarded | Stage::Delivered => {}
        }
    }

    fn on_pause(&mut self, now: Instant, (link, direction, stage): (LinkId, Direction, Stage), pause: &Pfc) {
        let Some(ends) = self.names.link_ends(link, direction) else { return };
        // Frames of other machines are recorded at the card that exchanges them.
        let [Some(from), Some(to)] = ends.map(|end| self.place(end)) else { return };
        let (place, heading) = match stage {
            Stage::Delivered => (to, PacketDirection::Inbound),
            Stage::Admitted | Stage::Forwarded => (from, PacketDirection::Outbound),
        };
        let is_captured = match self.points {
            CapturePoints::HostPorts => matches!(place, Place::Host(_)),
            _ => stage == Stage::Admitted,
        };
        if is_captured {
            self.push(now, place, heading, pause.emit().to_vec(), None);
        }
    }

    fn on_fault(&mut self, link: LinkId, fault: &Fault) {
        // A card has one link, whose ends are both the card.
        let is_card = self.names.link_ends(link, fault.direction).is_none_or(|[from, to]| from == to);
        let is_packet = |record: &&mut WaitingRecord| {
            record.open.is_some_and(|(sent, direction, psn)| {
                sent == link && (is_card || direction == fault.direction) && psn == fault.packet.psn
            })
        };
        if let Some(record) = self.waiting.iter_mut().rev().find(is_packet) {
            let separator = if record.comment.is_empty() { "" } else { "; " };
            record.comment += separator;
            record.comment += &describe::fault(fault, &self.names);
        }
    }
}

impl<W: Write> EventSink for Tap<W> {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        match *event {
            NetworkEvent::Hca { host, .. } => self.end_turn(host),
            NetworkEvent::Frame { link, direction, stage, addressing, packet } => {
                self.on_frame(now, (link, direction, stage), addressing, packet);
            }
            NetworkEvent::PauseFrame { link, direction, stage, pause } => {
                self.on_pause(now, (link, direction, stage), pause);
            }
            NetworkEvent::Fault { link, fault } => self.on_fault(link, fault),
            _ => {}
        }
    }
}
