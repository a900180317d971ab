//! What lies between hosts: cables, switches, and the ports of hosts, under one agenda.
//!
//! A network moves frames from node to node; it knows no card. Whoever owns it lets things happen in their
//! order, hands frames in and takes frames out: [`crate::World`] under a virtual clock, [`crate::Fabric`] under
//! any other.

use crate::event_queue::{EventQueue, SimEvent};
use crate::fabric_event::PacketId;
use crate::frame_pool::{NO_SLOT, Slot};
use crate::host_port::HostPort;
use crate::sink::{EventSink, NetworkEvent, Stage};
use crate::switch::Switch;
use crate::{
    Direction, FabricEvent, Fault, FlowTable, Frame, FrameContent, FrameDropReason, HostId, Layout,
    LayoutNode, Link, LinkCounters, LinkId, LinkOutput, LinkSettings, Node, Seed, SwitchId, SwitchSettings,
};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::hint::black_box;
use core::net::{IpAddr, Ipv4Addr};
use softhca_engine::Instant;
use softhca_wire::{AddressHeaders, Pfc};

/// Who has which address.
#[derive(Default)]
pub(crate) struct AddressTable {
    all: BTreeMap<IpAddr, HostId>,
    /// Where the address of the first host plus `n` is that of host `n`, no search is needed.
    first: Option<Ipv4Addr>,
    contiguous: u32,
}

impl AddressTable {
    fn insert(&mut self, address: IpAddr, host: HostId) {
        self.all.insert(address, host);
        if let (IpAddr::V4(address), 0) = (address, host.0) {
            self.first = Some(address);
        }
        let expected = self.first.map(|first| Ipv4Addr::from(first.to_bits().wrapping_add(host.0)));
        if self.contiguous == host.0 && expected.map(IpAddr::V4) == Some(address) {
            self.contiguous += 1;
        }
    }

    #[inline]
    pub fn find(&self, address: IpAddr) -> Option<HostId> {
        if let (IpAddr::V4(address), Some(first)) = (address, self.first) {
            let index = address.to_bits().wrapping_sub(first.to_bits());
            if index < self.contiguous {
                return Some(HostId(index));
            }
        }
        self.all.get(&address).copied()
    }
}

/// What a cable ends in. Every frame that arrives asks for it, hence apart from the cable.
pub(crate) struct LinkEnds {
    pub ends: [Node; 2],
    /// The port of the switch at each end.
    pub ports: [u16; 2],
}

/// What came of something that happened, for the owner of the network.
pub(crate) enum Outcome {
    Nothing,
    /// A frame reached a host; whoever takes it frees its slot.
    Arrived {
        host: HostId,
        slot: u32,
    },
    /// Other priorities of a host are stopped than before; so many pause frames did that.
    Paused {
        host: HostId,
        frames: u64,
    },
}

pub(crate) struct Network {
    pub seed: Seed,
    pub hosts: Vec<HostPort>,
    pub links: Vec<Link>,
    /// What each cable ends in.
    pub link_ends: Vec<LinkEnds>,
    pub switches: Vec<Switch>,
    pub flows: FlowTable,
    pub addresses: AddressTable,
    /// Routes that were set by hand: at a switch, to a host, over these ports.
    pub static_routes: BTreeMap<(SwitchId, HostId), Vec<u16>>,
    pub event_queue: EventQueue,
    pub routes_stale: bool,
    /// Frames that reached a host, and pause frames that reached a switch.
    delivered: u64,
    /// Frames that were lost in switches and at hosts.
    dropped: u64,
    /// Frames that switches put on cables though hosts had sent them.
    forwarded: u64,
    /// Copies of datagrams for groups that switches made.
    copied: u64,
}

/// What came of laying out a topology, in the order of its layout.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BuiltTopology {
    /// The switches.
    pub switches: Vec<SwitchId>,
    /// The cables.
    pub links: Vec<LinkId>,
}

/// Stands for the flow that a packet belongs to: addresses and ports.
fn flow_hash(envelope: &AddressHeaders) -> u64 {
    let port = u64::from(envelope.source_port);
    match (envelope.source, envelope.destination) {
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

/// How many frames went where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameCounters {
    /// Frames that hosts put on cables, duplicates that rules made, pause frames and copies that switches made.
    pub admitted: u64,
    /// Frames that reached a host, and pause frames that reached a switch.
    pub delivered: u64,
    /// Frames that were lost.
    pub dropped: u64,
    /// Frames that are on their way, queued and held-back ones included.
    pub in_flight: u64,
}

impl FrameCounters {
    /// Nothing appeared and nothing vanished.
    pub const fn is_balanced(&self) -> bool {
        self.admitted == self.delivered + self.dropped + self.in_flight
    }
}

impl Network {
    pub fn new(seed: Seed) -> Network {
        Network {
            seed,
            hosts: Vec::new(),
            links: Vec::new(),
            link_ends: Vec::new(),
            switches: Vec::new(),
            flows: FlowTable::new(),
            addresses: AddressTable::default(),
            static_routes: BTreeMap::new(),
            event_queue: EventQueue::default(),
            routes_stale: false,
            delivered: 0,
            dropped: 0,
            forwarded: 0,
            copied: 0,
        }
    }

    pub fn add_host(&mut self, address: IpAddr) -> HostId {
        let id = self.add_port(address);
        self.addresses.insert(address, id);
        id
    }

    /// A port that nothing is sent to: it has no place among the addresses.
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

    pub fn add_link(&mut self, ends: [Node; 2], line: LinkSettings) -> LinkId {
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
        self.links.push(Link::new(self.seed, line));
        self.link_ends.push(LinkEnds { ends, ports });
        self.routes_stale = true;
        id
    }

    /// Connects hosts as a layout says.
    pub fn build_layout(
        &mut self,
        layout: &Layout,
        hosts: &[HostId],
        line: LinkSettings,
        settings: SwitchSettings,
    ) -> BuiltTopology {
        assert!(hosts.len() >= layout.hosts as usize, "{} hosts for {}", hosts.len(), layout.hosts);
        let switches: Vec<_> = layout.switches.iter().map(|name| self.add_switch(name, settings)).collect();
        let node = |end| match end {
            LayoutNode::Host(host) => Node::Host(hosts[host as usize]),
            LayoutNode::Switch(switch) => Node::Switch(switches[switch as usize]),
        };
        let cables: Vec<_> = layout.links.iter().map(|ends| self.add_link(ends.map(node), line)).collect();
        for (switch, host, cable) in &layout.routes {
            self.set_route(switches[*switch as usize], hosts[*host as usize], &[cables[*cable]]);
        }
        BuiltTopology { switches, links: cables }
    }

    pub fn set_route(&mut self, switch: SwitchId, host: HostId, cables: &[LinkId]) {
        let ports = self.switches[switch.0 as usize].ports.iter().zip(0..);
        let ports = ports.filter(|(port, _)| cables.contains(&port.link)).map(|(_, port)| port).collect();
        self.static_routes.insert((switch, host), ports);
        self.routes_stale = true;
    }

    /// Reads a word of what the next thing is going to ask for, and of what follows it. In a large network many things
    /// happen within one nanosecond, each somewhere else: while one happens, the memory of the next is on its way.
    /// The host that comes next, if it is one.
    pub fn prefetch(&mut self, slot: u32) -> Option<HostId> {
        let Slot { event: happening, next, host: to, .. } = *self.event_queue.pool.slot_mut(slot);
        if next != NO_SLOT {
            black_box(self.event_queue.pool.slot_mut(next).serial);
        }
        match happening {
            SimEvent::Arrival { link: cable, direction, .. } => {
                let LinkEnds { ends, ports } = &self.link_ends[cable.0 as usize];
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

    /// Lets something happen. What is the business of hosts only is not done here.
    pub fn handle_event(&mut self, now: Instant, happening: SimEvent, sink: &mut dyn EventSink) -> Outcome {
        match happening {
            SimEvent::Arrival { slot, link: cable, direction } => {
                return self.arrive(now, slot, cable, direction, sink);
            }
            SimEvent::HostPauseExpired { host } => return self.expire_host_pauses(now, host, sink),
            SimEvent::ReceiverDrain { host } => return self.drain(now, host, sink),
            SimEvent::SwitchLinkFree { switch, port } => {
                self.switches[switch.0 as usize].ports[usize::from(port)].waiting_for_link = false;
                self.serve(now, switch, port, sink);
            }
            SimEvent::ReorderTimeout { link: cable } => {
                self.with_link(now, cable, sink, |cable, _, outlet| cable.expire(now.nanos(), outlet));
            }
            SimEvent::SwitchPauseExpired { switch, port } => {
                self.expire_switch_pauses(now, switch, port, sink)
            }
            SimEvent::SwitchPauseRefresh { switch, port, priority } => {
                self.refresh_switch_pause(now, switch, port, priority, sink);
            }
            SimEvent::SwitchWatchdog { switch, port, priority } => {
                self.run_switch_watchdog(now, switch, port, priority, sink)
            }
            SimEvent::HostPauseRefresh { host, priority } => {
                self.refresh_host_pause(now, host, priority, sink)
            }
            SimEvent::HostWatchdog { host, priority } => self.run_host_watchdog(now, host, priority, sink),
            SimEvent::HostLinkFree { .. } | SimEvent::HostTimer { .. } | SimEvent::Loopback => {}
        }
        Outcome::Nothing
    }

    /// The node that a direction of a cable starts at.
    pub fn link_source(&self, cable: LinkId, direction: Direction) -> Node {
        self.link_ends[cable.0 as usize].ends[direction as usize]
    }

    /// When every line of a host has room: a host with several cables sends at the pace of its slowest.
    pub fn host_link_free_at(&self, host: HostId) -> u64 {
        let HostPort { single_uplink: only, links: cables, .. } = &self.hosts[host.0 as usize];
        let free_at =
            |(cable, direction): (LinkId, Direction)| self.links[cable.0 as usize].free_at_ns(direction);
        match *only {
            Some(only) => free_at(only),
            None => cables.iter().copied().map(free_at).max().unwrap_or(0),
        }
    }

    /// Takes a frame that a host sends to others. A frame for nobody's address goes nowhere, as on a network
    /// without a route.
    pub fn send(&mut self, now: Instant, from: HostId, frame: Frame, sink: &mut dyn EventSink) {
        if self.routes_stale {
            self.compute_routes();
        }
        let destination = frame.addressing.destination;
        if destination.is_multicast() {
            for (cable, direction) in self.hosts[from.0 as usize].links.clone() {
                let slot = self.event_queue.pool.insert(frame.clone(), Slot::MULTICAST, 0);
                self.transmit(now, cable, direction, slot, Stage::Admitted, sink);
            }
            return;
        }
        let flow = flow_hash(&frame.addressing);
        if let Some((to, (cable, direction))) = self.route(from, destination, flow) {
            let slot = self.event_queue.pool.insert(frame, to.0, flow);
            self.transmit(now, cable, direction, slot, Stage::Admitted, sink);
        }
    }

    /// Takes a frame that a host sends to another.
    pub fn send_bytes(
        &mut self,
        now: Instant,
        from: HostId,
        (envelope, bytes): (&AddressHeaders, &[u8]),
        content: FrameContent,
        service_level: u8,
        sink: &mut dyn EventSink,
    ) {
        if self.routes_stale {
            self.compute_routes();
        }
        let flow = flow_hash(envelope);
        if let Some((to, (cable, direction))) = self.route(from, envelope.destination, flow) {
            let slot =
                self.event_queue.pool.insert_bytes(envelope, bytes, content, service_level, to.0, flow);
            self.transmit(now, cable, direction, slot, Stage::Admitted, sink);
        }
    }

    /// Who has an address, and by which cable a host sends to it.
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

    /// Takes a frame for a host at one of a cable's ends.
    pub fn send_on_link(
        &mut self,
        now: Instant,
        (cable, direction): (LinkId, Direction),
        to: HostId,
        frame: Frame,
        sink: &mut dyn EventSink,
    ) {
        if self.routes_stale {
            self.compute_routes();
        }
        let flow = flow_hash(&frame.addressing);
        let slot = self.event_queue.pool.insert(frame, to.0, flow);
        self.transmit(now, cable, direction, slot, Stage::Admitted, sink);
    }

    /// Puts a frame on a cable.
    pub fn transmit(
        &mut self,
        now: Instant,
        cable: LinkId,
        direction: Direction,
        slot: u32,
        stage: Stage,
        sink: &mut dyn EventSink,
    ) {
        self.emit_frame(now, cable, direction, stage, slot, sink);
        let Slot { bytes, is_pause, .. } = *self.event_queue.pool.slot_mut(slot);
        let line = &mut self.links[cable.0 as usize];
        if let Some(at) = line.fast_transmit(now.nanos(), direction, bytes as usize, is_pause) {
            return self.event_queue.push(at, SimEvent::Arrival { slot, link: cable, direction });
        }
        let frame = self.event_queue.pool.remove(slot);
        self.with_link(now, cable, sink, |cable, flows, outlet| {
            cable.admit(now.nanos(), direction, frame, flows, outlet);
        });
    }

    /// Calls `act` with a cable and takes what comes out of it.
    pub fn with_link(
        &mut self,
        now: Instant,
        id: LinkId,
        sink: &mut dyn EventSink,
        act: impl FnOnce(&mut Link, &FlowTable, &mut dyn LinkOutput),
    ) {
        let Network { links: cables, flows, event_queue: agenda, addresses, .. } = self;
        let cable = &mut cables[id.0 as usize];
        act(cable, flows, &mut ScheduledOutput { id, now, agenda, addresses, sink });
        if let Some(at) = cable.next_timeout() {
            self.event_queue.push(at, SimEvent::ReorderTimeout { link: id });
        }
    }

    /// A frame comes out of a cable.
    pub fn arrive(
        &mut self,
        now: Instant,
        slot: u32,
        cable: LinkId,
        direction: Direction,
        sink: &mut dyn EventSink,
    ) -> Outcome {
        let link = &self.link_ends[cable.0 as usize];
        let end = direction.reverse() as usize;
        match link.ends[end] {
            Node::Switch(switch) => {
                let port = link.ports[end];
                self.arrive_at_switch(now, switch, port, slot, sink);
                Outcome::Nothing
            }
            Node::Host(host) => {
                self.emit_frame(now, cable, direction, Stage::Delivered, slot, sink);
                self.arrive_at_host(now, host, cable, slot, sink)
            }
        }
    }

    /// A frame is where it was to go; whoever takes it frees its slot.
    pub fn count_delivered(&mut self) {
        self.delivered += 1;
    }

    /// Loses a frame.
    pub fn drop_frame(
        &mut self,
        now: Instant,
        at: Node,
        cable: LinkId,
        slot: u32,
        cause: FrameDropReason,
        sink: &mut dyn EventSink,
    ) {
        self.dropped += 1;
        let frame = self.event_queue.pool.frame(slot);
        let (priority, culprit) = (frame.priority(), PacketId::of(frame));
        sink.on_event(
            now,
            &NetworkEvent::Fabric(FabricEvent::FrameDropped {
                node: at,
                link: cable,
                priority,
                reason: cause,
                packet: culprit,
            }),
        );
        self.event_queue.pool.release(slot);
    }

    pub fn count_forwarded(&mut self) {
        self.forwarded += 1;
    }

    pub fn count_copies(&mut self, copies: u64) {
        self.copied += copies;
    }

    /// Sends a pause frame over a cable.
    pub fn send_pause(
        &mut self,
        now: Instant,
        cable: LinkId,
        direction: Direction,
        pause: &Pfc,
        sink: &mut dyn EventSink,
    ) {
        let slot = self.event_queue.pool.insert(Frame::pause(pause), 0, 0);
        self.transmit(now, cable, direction, slot, Stage::Admitted, sink);
    }

    /// How many frames went where.
    pub fn frame_counters(&self) -> FrameCounters {
        let mut census = FrameCounters {
            delivered: self.delivered,
            dropped: self.dropped,
            in_flight: self.event_queue.pool.frames_in_flight() as u64,
            admitted: self.copied,
        };
        for cable in &self.links {
            for direction in [Direction::Forward, Direction::Backward] {
                let LinkCounters { admitted, duplicated, dropped, held, .. } = cable.counters(direction);
                census.admitted += admitted + duplicated;
                census.dropped += dropped;
                census.in_flight += held;
            }
        }
        census.admitted -= self.forwarded;
        census
    }

    /// Shows a frame to whoever looks.
    #[inline]
    fn emit_frame(
        &mut self,
        now: Instant,
        cable: LinkId,
        direction: Direction,
        stage: Stage,
        slot: u32,
        sink: &mut dyn EventSink,
    ) {
        if sink.is_enabled() {
            self.emit_frame_or_pause(now, cable, direction, stage, slot, sink);
        }
    }

    /// Shows a frame, or the pause that it asks for.
    fn emit_frame_or_pause(
        &mut self,
        now: Instant,
        cable: LinkId,
        direction: Direction,
        stage: Stage,
        slot: u32,
        sink: &mut dyn EventSink,
    ) {
        let frame = self.event_queue.pool.frame(slot);
        match (frame.content, frame.as_pause()) {
            (FrameContent::Pause, Some(pause)) => {
                sink.on_event(now, &NetworkEvent::PauseFrame { link: cable, direction, stage, pause: &pause })
            }
            (FrameContent::Pause, None) => {}
            _ => sink.on_event(
                now,
                &NetworkEvent::Frame {
                    link: cable,
                    direction,
                    stage,
                    addressing: &frame.addressing,
                    packet: &frame.bytes,
                },
            ),
        }
    }
}

/// Where a cable's frames come out: the agenda.
struct ScheduledOutput<'a> {
    id: LinkId,
    now: Instant,
    agenda: &'a mut EventQueue,
    addresses: &'a AddressTable,
    sink: &'a mut dyn EventSink,
}

impl LinkOutput for ScheduledOutput<'_> {
    fn deliver(&mut self, at_ns: u64, direction: Direction, frame: Frame) {
        let destination = frame.addressing.destination;
        let host = match destination.is_multicast() {
            true => Slot::MULTICAST,
            false => self.addresses.find(destination).map_or(Slot::MULTICAST - 1, |host| host.0),
        };
        let flow = flow_hash(&frame.addressing);
        let slot = self.agenda.pool.insert(frame, host, flow);
        self.agenda.push(at_ns, SimEvent::Arrival { slot, link: self.id, direction });
    }

    fn report(&mut self, fault: Fault) {
        self.sink.on_event(self.now, &NetworkEvent::Fault { link: self.id, fault: &fault });
    }
}
