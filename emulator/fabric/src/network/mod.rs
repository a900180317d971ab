//! The network between hosts: links, switches and host ports with a common event queue.
//!
//! A network moves frames between nodes; it has no HCAs. Its owner processes events in order, sends frames
//! and receives them: [`crate::World`] under a virtual clock, [`crate::Fabric`] under an external one.

mod addresses;
mod external_ports;
mod forwarding;
mod host_ports;
mod routes;

use addresses::AddressTable;
pub(crate) use external_ports::{ExternalPortSink, ExternalPorts};
pub use external_ports::{ExternalPortUpdate, Origin};

use crate::event_queue::EventQueue;
use crate::fabric_event::PacketId;
use crate::frame_pool::{NO_SLOT, Slot};
use crate::host_port::HostPort;
use crate::sim_event::SimEvent;
use crate::sink::{EventSink, NetworkEvent, Stage};
use crate::switch::Switch;
use crate::{
    Direction, FabricEvent, Fault, FlowTable, Frame, FrameContent, FrameDropReason, HostId, Layout,
    LayoutNode, Link, LinkCounters, LinkId, LinkOutput, LinkSettings, Node, Seed, SwitchId, SwitchSettings,
};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::hint::black_box;
use core::net::IpAddr;
use softhca_engine::Instant;
use softhca_wire::{AddressHeaders, Pfc};

/// The nodes at the ends of a link. Every arriving frame reads it, so it is stored apart from the link.
pub(crate) struct LinkEnds {
    pub ends: [Node; 2],
    /// The switch port at each end.
    pub ports: [u16; 2],
}

/// A port of a switch.
#[derive(Clone, Copy)]
pub(crate) struct PortId {
    pub switch: SwitchId,
    pub port: u16,
}

/// The time of a step of the network, and the observer of its events.
pub(crate) struct Moment<'a> {
    pub now: Instant,
    pub sink: &'a mut dyn EventSink,
}

impl Moment<'_> {
    fn on_event(&mut self, event: &NetworkEvent<'_>) {
        self.sink.on_event(self.now, event);
    }

    fn emit(&mut self, event: FabricEvent) {
        self.on_event(&NetworkEvent::Fabric(event));
    }
}

/// The result of an event for the owner of the network.
pub(crate) enum Outcome {
    Nothing,
    /// A frame reached a host; the owner frees its slot.
    Arrived {
        host: HostId,
        slot: u32,
    },
    /// The paused priorities of a host changed; `frames` pause frames caused it.
    Paused {
        host: HostId,
        frames: u64,
    },
}

#[derive(Default)]
pub(crate) struct Network {
    pub seed: Seed,
    pub hosts: Vec<HostPort>,
    pub links: Vec<Link>,
    pub link_ends: Vec<LinkEnds>,
    pub switches: Vec<Switch>,
    pub flows: FlowTable,
    pub addresses: AddressTable,
    /// Static routes: at a switch, to a host, over these ports.
    pub static_routes: BTreeMap<(SwitchId, HostId), Vec<u16>>,
    pub event_queue: EventQueue,
    pub routes_stale: bool,
    /// Frames that reached a host, and pause frames that reached a switch.
    delivered: u64,
    /// Frames dropped in switches and at hosts.
    dropped: u64,
    /// Frames that switches forwarded.
    forwarded: u64,
    /// Copies of multicast frames made by switches.
    copied: u64,
}

/// The switches and links of a topology, in the order of its layout.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BuiltTopology {
    pub switches: Vec<SwitchId>,
    pub links: Vec<LinkId>,
}

/// A hash of the flow: addresses and ports.
fn flow_hash(addressing: &AddressHeaders) -> u64 {
    let port = u64::from(addressing.source_port);
    match (addressing.source, addressing.destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let addresses = u64::from(source.to_bits()) << 32 | u64::from(destination.to_bits());
            Seed(addresses).draw(&[port])
        }
        (source, destination) => {
            let words = |address: IpAddr| match address {
                IpAddr::V4(v4) => [0, u64::from(v4.to_bits())],
                IpAddr::V6(v6) => [(v6.to_bits() >> 64) as u64, v6.to_bits() as u64],
            };
            let ([a, b], [c, d]) = (words(source), words(destination));
            Seed(port).draw(&[a, b, c, d])
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameCounters {
    /// Frames that hosts sent, copies made by rules and switches, and pause frames.
    pub admitted: u64,
    /// Frames that reached a host, and pause frames that reached a switch.
    pub delivered: u64,
    /// Dropped frames.
    pub dropped: u64,
    /// Frames in flight, including queued and held ones.
    pub in_flight: u64,
}

impl FrameCounters {
    /// Whether every frame is accounted for.
    pub const fn is_balanced(&self) -> bool {
        self.admitted == self.delivered + self.dropped + self.in_flight
    }
}

impl Network {
    pub fn new(seed: Seed) -> Network {
        Network { seed, ..Network::default() }
    }

    pub fn add_host(&mut self, address: IpAddr) -> HostId {
        let id = self.add_port(address);
        self.addresses.insert(address, id);
        id
    }

    /// Adds a port without a destination address: it only sends.
    pub fn add_port(&mut self, address: IpAddr) -> HostId {
        let id = HostId(self.hosts.len() as u32);
        self.hosts.push(HostPort::new(address));
        self.routes_stale = true;
        id
    }

    pub fn add_switch(&mut self, name: &str, settings: SwitchSettings) -> SwitchId {
        let id = SwitchId(self.switches.len() as u32);
        let salt = self.seed.draw(&[0x7377_6974_6368, id.0.into()]);
        self.switches.push(Switch::new(name, settings, salt));
        id
    }

    pub fn add_link(&mut self, ends: [Node; 2], link_settings: LinkSettings) -> LinkId {
        let id = LinkId(self.link_ends.len() as u32);
        let mut ports = [0; 2];
        for (at, direction) in [Direction::Forward, Direction::Backward].into_iter().enumerate() {
            match (ends[at], ends[1 - at]) {
                (Node::Switch(switch), _) => {
                    ports[at] = self.switches[switch.0 as usize].add_port(id, direction);
                }
                (Node::Host(here), there) => {
                    self.hosts[here.0 as usize].connect((id, direction), there);
                }
            }
        }
        self.links.push(Link::new(self.seed, link_settings));
        self.link_ends.push(LinkEnds { ends, ports });
        self.routes_stale = true;
        id
    }

    /// Builds a layout with these hosts.
    pub fn build_layout(
        &mut self,
        layout: &Layout,
        hosts: &[HostId],
        link_settings: LinkSettings,
        settings: SwitchSettings,
    ) -> BuiltTopology {
        assert!(hosts.len() >= layout.hosts as usize, "{} hosts for {}", hosts.len(), layout.hosts);
        let switches: Vec<_> = layout.switches.iter().map(|name| self.add_switch(name, settings)).collect();
        let node = |end| match end {
            LayoutNode::Host(host) => Node::Host(hosts[host as usize]),
            LayoutNode::Switch(switch) => Node::Switch(switches[switch as usize]),
        };
        let links: Vec<_> =
            layout.links.iter().map(|ends| self.add_link(ends.map(node), link_settings)).collect();
        for (switch, host, link) in &layout.routes {
            self.set_route(switches[*switch as usize], hosts[*host as usize], &[links[*link]]);
        }
        BuiltTopology { switches, links }
    }

    pub fn set_route(&mut self, switch: SwitchId, host: HostId, links: &[LinkId]) {
        let ports = self.switches[switch.0 as usize].ports.iter().zip(0..);
        let ports = ports.filter(|(port, _)| links.contains(&port.link)).map(|(_, port)| port).collect();
        self.static_routes.insert((switch, host), ports);
        self.routes_stale = true;
    }

    /// Prefetches the memory of the next event and of the one after it. In a large network many events of one
    /// nanosecond touch unrelated memory; the loads overlap with the current event. Returns the host of the
    /// next event, if any.
    pub fn prefetch(&mut self, slot: u32) -> Option<HostId> {
        let Slot { event, next, host: to, .. } = *self.event_queue.pool.slot_mut(slot);
        if next != NO_SLOT {
            black_box(self.event_queue.pool.slot_mut(next).serial);
        }
        match event {
            SimEvent::Arrival { link, direction, .. } => {
                let LinkEnds { ends, ports } = &self.link_ends[link.0 as usize];
                let end = direction.reverse() as usize;
                match ends[end] {
                    Node::Switch(switch) => {
                        let switch = &self.switches[switch.0 as usize];
                        black_box(switch.ports[usize::from(ports[end])].received_frames);
                        black_box(switch.routes.next_hops.get(to as usize).copied());
                        None
                    }
                    Node::Host(host) => {
                        self.event_queue.pool.prefetch_frame(slot);
                        Some(host)
                    }
                }
            }
            SimEvent::SwitchLinkFree { switch, port } => {
                black_box(self.switches[switch.0 as usize].ports[usize::from(port)].occupied);
                None
            }
            SimEvent::HostLinkFree { host } | SimEvent::HostTimer { host } => Some(host),
            _ => None,
        }
    }

    /// Handles an event, except for events that only hosts handle.
    pub fn handle_event(&mut self, moment: &mut Moment<'_>, event: SimEvent) -> Outcome {
        match event {
            SimEvent::Arrival { slot, link, direction } => {
                return self.arrive(moment, slot, (link, direction));
            }
            SimEvent::HostPauseExpired { host } => return self.expire_host_pauses(moment, host),
            SimEvent::ReceiverDrain { host } => return self.drain(moment, host),
            SimEvent::SwitchLinkFree { switch, port } => {
                self.switches[switch.0 as usize].ports[usize::from(port)].waiting_for_link = false;
                self.serve(moment, PortId { switch, port });
            }
            SimEvent::ReorderTimeout { link } => {
                let now = moment.now.nanos();
                self.with_link(moment, link, |link, _, output| link.expire(now, output));
            }
            SimEvent::SwitchPauseExpired { switch, port } => {
                self.expire_switch_pauses(moment, PortId { switch, port })
            }
            SimEvent::SwitchPauseRefresh { switch, port, priority } => {
                self.refresh_switch_pause(moment, PortId { switch, port }, priority);
            }
            SimEvent::SwitchWatchdog { switch, port, priority } => {
                self.run_switch_watchdog(moment, PortId { switch, port }, priority)
            }
            SimEvent::HostPauseRefresh { host, priority } => self.refresh_host_pause(moment, host, priority),
            SimEvent::HostWatchdog { host, priority } => self.run_host_watchdog(moment, host, priority),
            SimEvent::HostLinkFree { .. } | SimEvent::HostTimer { .. } | SimEvent::Loopback => {}
        }
        Outcome::Nothing
    }

    /// The node at the start of a direction.
    pub fn link_source(&self, link: LinkId, direction: Direction) -> Node {
        self.link_ends[link.0 as usize].ends[direction as usize]
    }

    /// When all links of a host are free: a host with several links sends at the rate of the slowest.
    pub fn host_link_free_at(&self, host: HostId) -> u64 {
        let HostPort { single_uplink: only, links, .. } = &self.hosts[host.0 as usize];
        let free_at =
            |(link, direction): (LinkId, Direction)| self.links[link.0 as usize].free_at_ns(direction);
        match *only {
            Some(only) => free_at(only),
            None => links.iter().copied().map(free_at).max().unwrap_or(0),
        }
    }

    /// Accepts a frame from a host. Discards a frame to an unknown address, as a network without a route
    /// does.
    pub fn send(&mut self, moment: &mut Moment<'_>, from: HostId, frame: Frame) {
        if self.routes_stale {
            self.compute_routes();
        }
        let destination = frame.addressing.destination;
        if destination.is_multicast() {
            for way in self.hosts[from.0 as usize].links.clone() {
                let slot = self.event_queue.pool.insert(frame.clone(), Slot::MULTICAST, 0);
                self.transmit(moment, way, slot, Stage::Admitted);
            }
            return;
        }
        let flow = flow_hash(&frame.addressing);
        if let Some((to, way)) = self.route(from, destination, flow) {
            let slot = self.event_queue.pool.insert(frame, to.0, flow);
            self.transmit(moment, way, slot, Stage::Admitted);
        }
    }

    /// Accepts a unicast packet from a host.
    pub fn send_bytes(
        &mut self,
        moment: &mut Moment<'_>,
        from: HostId,
        (addressing, bytes): (&AddressHeaders, &[u8]),
        content: FrameContent,
        service_level: u8,
    ) {
        if self.routes_stale {
            self.compute_routes();
        }
        let flow = flow_hash(addressing);
        if let Some((to, way)) = self.route(from, addressing.destination, flow) {
            let slot =
                self.event_queue.pool.insert_bytes(addressing, bytes, content, service_level, to.0, flow);
            self.transmit(moment, way, slot, Stage::Admitted);
        }
    }

    /// The host with an address, and the link to it.
    fn route(&self, from: HostId, destination: IpAddr, flow: u64) -> Option<(HostId, (LinkId, Direction))> {
        let port = &self.hosts[from.0 as usize];
        let to = self.addresses.find(destination)?;
        if let Some(only) = port.single_uplink {
            return Some((to, only));
        }
        let way = match port.direct_links.get(&to) {
            Some(way) => *way,
            None if port.uplinks.len() < 2 => *port.uplinks.first()?,
            None => port.uplinks[Seed(0).below(port.uplinks.len() as u64, &[flow]) as usize],
        };
        Some((to, way))
    }

    /// Accepts a frame to a host at the start of a link direction.
    pub fn send_on_link(
        &mut self,
        moment: &mut Moment<'_>,
        way: (LinkId, Direction),
        to: HostId,
        frame: Frame,
    ) {
        if self.routes_stale {
            self.compute_routes();
        }
        let flow = flow_hash(&frame.addressing);
        let slot = self.event_queue.pool.insert(frame, to.0, flow);
        self.transmit(moment, way, slot, Stage::Admitted);
    }

    /// Transmits a frame on a link.
    pub fn transmit(&mut self, moment: &mut Moment<'_>, way: (LinkId, Direction), slot: u32, stage: Stage) {
        self.emit_frame(moment, way, stage, slot);
        let (link, direction) = way;
        let Slot { bytes, is_pause, .. } = *self.event_queue.pool.slot_mut(slot);
        let now = moment.now.nanos();
        let fast = self.links[link.0 as usize].fast_transmit(now, direction, bytes as usize, is_pause);
        if let Some(at) = fast {
            return self.event_queue.push(at, SimEvent::Arrival { slot, link, direction });
        }
        let frame = self.event_queue.pool.remove(slot);
        self.with_link(moment, link, |link, flows, output| link.admit(now, direction, frame, flows, output));
    }

    /// Calls `act` with a link and schedules its output.
    pub fn with_link(
        &mut self,
        moment: &mut Moment<'_>,
        id: LinkId,
        act: impl FnOnce(&mut Link, &FlowTable, &mut dyn LinkOutput),
    ) {
        let Network { links, flows, event_queue, addresses, .. } = self;
        let link = &mut links[id.0 as usize];
        act(link, flows, &mut ScheduledOutput { id, event_queue, addresses, moment });
        if let Some(at) = link.next_timeout() {
            self.event_queue.push(at, SimEvent::ReorderTimeout { link: id });
        }
    }

    /// Handles the arrival of a frame at the end of a link.
    pub fn arrive(
        &mut self,
        moment: &mut Moment<'_>,
        slot: u32,
        (link, direction): (LinkId, Direction),
    ) -> Outcome {
        let ends = &self.link_ends[link.0 as usize];
        let end = direction.reverse() as usize;
        match ends.ends[end] {
            Node::Switch(switch) => {
                let port = ends.ports[end];
                self.arrive_at_switch(moment, PortId { switch, port }, slot);
                Outcome::Nothing
            }
            Node::Host(host) => {
                self.emit_frame(moment, (link, direction), Stage::Delivered, slot);
                self.arrive_at_host(moment, host, link, slot)
            }
        }
    }

    /// Counts a delivered frame; the owner frees its slot.
    pub fn count_delivered(&mut self) {
        self.delivered += 1;
    }

    pub fn drop_frame(
        &mut self,
        moment: &mut Moment<'_>,
        node: Node,
        link: LinkId,
        slot: u32,
        cause: FrameDropReason,
    ) {
        self.dropped += 1;
        let frame = self.event_queue.pool.frame(slot);
        let (priority, packet) = (frame.priority(), PacketId::of(frame));
        moment.emit(FabricEvent::FrameDropped { node, link, priority, reason: cause, packet });
        self.event_queue.pool.release(slot);
    }

    pub fn count_forwarded(&mut self) {
        self.forwarded += 1;
    }

    pub fn count_copies(&mut self, copies: u64) {
        self.copied += copies;
    }

    /// Sends a pause frame on a link.
    pub fn send_pause(&mut self, moment: &mut Moment<'_>, way: (LinkId, Direction), pause: &Pfc) {
        let slot = self.event_queue.pool.insert(Frame::pause(pause), 0, 0);
        self.transmit(moment, way, slot, Stage::Admitted);
    }

    pub fn frame_counters(&self) -> FrameCounters {
        let mut counters = FrameCounters {
            delivered: self.delivered,
            dropped: self.dropped,
            in_flight: self.event_queue.pool.frames_in_flight() as u64,
            admitted: self.copied,
        };
        for link in &self.links {
            for direction in [Direction::Forward, Direction::Backward] {
                let LinkCounters { admitted, duplicated, dropped, held, .. } = link.counters(direction);
                counters.admitted += admitted + duplicated;
                counters.dropped += dropped;
                counters.in_flight += held;
            }
        }
        counters.admitted -= self.forwarded;
        counters
    }

    /// Emits a frame event if the sink is enabled.
    #[inline]
    fn emit_frame(&mut self, moment: &mut Moment<'_>, way: (LinkId, Direction), stage: Stage, slot: u32) {
        if moment.sink.is_enabled() {
            self.emit_frame_or_pause(moment, way, stage, slot);
        }
    }

    /// Emits a frame or pause frame event.
    fn emit_frame_or_pause(
        &mut self,
        moment: &mut Moment<'_>,
        (link, direction): (LinkId, Direction),
        stage: Stage,
        slot: u32,
    ) {
        let frame = self.event_queue.pool.frame(slot);
        match (frame.content, frame.as_pause()) {
            (FrameContent::Pause, Some(pause)) => {
                moment.on_event(&NetworkEvent::PauseFrame { link, direction, stage, pause: &pause })
            }
            (FrameContent::Pause, None) => {}
            _ => moment.on_event(&NetworkEvent::Frame {
                link,
                direction,
                stage,
                addressing: &frame.addressing,
                packet: &frame.bytes,
            }),
        }
    }
}

/// Schedules the frames that leave a link.
struct ScheduledOutput<'a, 'b> {
    id: LinkId,
    event_queue: &'a mut EventQueue,
    addresses: &'a AddressTable,
    moment: &'a mut Moment<'b>,
}

impl LinkOutput for ScheduledOutput<'_, '_> {
    fn deliver(&mut self, at_ns: u64, direction: Direction, frame: Frame) {
        let destination = frame.addressing.destination;
        let host = match destination.is_multicast() {
            true => Slot::MULTICAST,
            false => self.addresses.find(destination).map_or(Slot::MULTICAST - 1, |host| host.0),
        };
        let flow = flow_hash(&frame.addressing);
        let slot = self.event_queue.pool.insert(frame, host, flow);
        self.event_queue.push(at_ns, SimEvent::Arrival { slot, link: self.id, direction });
    }

    fn report(&mut self, fault: Fault) {
        self.moment.on_event(&NetworkEvent::Fault { link: self.id, fault: &fault });
    }
}
